"""Every CPU kernel against the reference: layouts, ragged shapes, strides, threads, token counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashrt.errors import PlanError
from flashrt.layouts import LAYOUTS, MATRICES, U8, pack_plain
from tests.backends.cpu_streams import F32, agree, cpu, packed, run
from tests.backends.kernel_texts import AT, linear_text

RNG = np.random.default_rng(3)
EXACT = 'numerics="acc=f32"'
LINEAR = 'numerics="act=f32 acc=f32"'


def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def f32(x: Any) -> U8:
    return pack_plain(LAYOUTS["f32"], np.asarray(x, np.float32))


def linear(layout: str, n: int, k: int, epilogue: str) -> str:
    return linear_text(layout, n, k, epilogue, LINEAR)


@pytest.mark.parametrize("layout", MATRICES)
@pytest.mark.parametrize(
    "n,k,t,epilogue",
    [(48, 64, 1, ""), (40, 70, 7, "+bias+residual"), (5, 33, 13, "+bias"), (130, 96, 16, "+residual")],
)
def test_linear(layout: str, n: int, k: int, t: int, epilogue: str) -> None:
    values = {0: r(t, k), 2: r(t, n)}
    agree(linear(layout, n, k, epilogue), values, 1, {"w": packed(layout, n, k), "b": f32(r(n))}, T=t)


@pytest.mark.parametrize("layout", MATRICES)
def test_a_row_has_the_same_bits_alone_and_among_others(layout: str) -> None:
    text, x, w = linear(layout, 40, 70, ""), r(15, 70), packed(layout, 40, 70)
    together = run(cpu(), text, {0: x}, {"w": w}, T=15).read(1)
    for t in range(15):
        alone = run(cpu(), text, {0: x[t]}, {"w": w}, T=1).read(1)
        assert alone.tobytes() == together[t].tobytes()


SPLIT = f"""split s positions=[0,16,32,48] start=32
weight w f32[40,70] sources=[w] layout=LAYOUT
weight b f32[40] sources=[b] layout=f32
slot %0 cpu:0 f32[T,100]
slot %1 cpu:0 f32[T,40]
block w cpu:0 lo=16 hi=40 bytes=0
block b cpu:0 lo=16 hi=40 bytes=0
bias {AT} block=@b[s:40]
dispatch {AT} kernel=linear.LAYOUT+bias args=[%0[20:90],@w[s:40]] dst=%1[s:40] {LINEAR}
"""


@pytest.mark.parametrize("layout", MATRICES)
@pytest.mark.parametrize("s", [16, 32, 40])
def test_ranges_of_channels_move_with_their_split(layout: str, s: int) -> None:
    w, b = packed(layout, 40, 70), f32(r(40))
    blocks = {"w": w[LAYOUTS[layout].span(16, 40, 70)], "b": b[64:]}
    values = {0: r(3, 100), 1: np.zeros((3, 40), np.float32)}
    got = agree(SPLIT.replace("LAYOUT", layout), values, 1, blocks, T=3, s=s)
    assert (got[:, :s] == 0).all() and (got[:, s:] != 0).all()


@pytest.mark.parametrize("ids", ["i32", "i64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_embedding_is_exactly_what_the_layout_means(layout: str, ids: str) -> None:
    text = f"""weight w f32[37,70] sources=[w] layout={layout}
slot %0 cpu:0 {ids}[T]
slot %1 cpu:0 f32[T,70]
block w cpu:0 lo=0 hi=37 bytes=0
dispatch {AT} kernel=embedding.{layout} args=[%0,@w] dst=%1 {EXACT}
"""
    agree(text, {0: [36, 0, 17, 16, 36]}, 1, {"w": packed(layout, 37, 70)}, tolerance=0, T=5)
    outside = run(cpu(), text, {0: [-1, 37, 5, 2**31 - 1]}, {"w": packed(layout, 37, 70)}, T=4).read(1)
    assert np.isnan(outside[[0, 1, 3]]).all() and np.isfinite(outside[2]).all()


NORM = f"""weight w f32[W] sources=[w] layout=f32
weight b f32[W] sources=[b] layout=f32
slot %0 cpu:0 f32[T,C]
slot %1 cpu:0 f32[T,C]
block w cpu:0 lo=0 hi=W bytes=0
block b cpu:0 lo=0 hi=W bytes=0
dispatch {AT} kernel=KERNEL args=ARGS dst=%1 attrs={{ATTRS}} {EXACT}
"""


@pytest.mark.parametrize("channels,width,w", [(48, 48, 48), (70, 70, 70), (60, 20, 20), (60, 20, 60)])
@pytest.mark.parametrize("offset", [0, 1])
def test_rms_norm(channels: int, width: int, w: int, offset: int) -> None:
    text = NORM.replace("KERNEL", "rms_norm").replace("ARGS", "[%0,@w]")
    text = text.replace("ATTRS", f"eps=1e-05,width={width},offset={offset}").replace("C]", f"{channels}]")
    agree(text.replace("W", str(w)), {0: r(5, channels)}, 1, {"w": f32(r(w)), "b": f32(r(w))}, T=5)


def test_rms_norm_without_weight_and_with_tiny_values() -> None:
    text = NORM.replace("KERNEL", "rms_norm").replace("ARGS", "[%0]").replace("W", "7").replace("C]", "7]")
    x = r(3, 7) * np.float32(1e-12)
    agree(text.replace("ATTRS", "eps=1e-06,width=7"), {0: x}, 1, T=3)


@pytest.mark.parametrize("args", ["[%0,@w]", "[%0,@w,@b]"])
@pytest.mark.parametrize("channels", [64, 37])
def test_layer_norm(args: str, channels: int) -> None:
    text = NORM.replace("KERNEL", "layer_norm").replace("ARGS", args).replace("ATTRS", "eps=1e-05")
    text = text.replace("C]", f"{channels}]").replace("W", str(channels))
    blocks = {"w": f32(r(channels)), "b": f32(r(channels))}
    agree(text, {0: r(5, channels) + 100}, 1, blocks, tolerance=2e-5, T=5)


def test_rope_table_keeps_late_positions_exact() -> None:
    text = f"""weight w f32[24] sources=[w] layout=f32
slot %0 cpu:0 i32[T]
slot %1 cpu:0 f32[T,48]
block w cpu:0 lo=0 hi=24 bytes=0
dispatch {AT} kernel=rope_table args=[%0,@w] dst=%1 attrs={{scale=1.5}} {EXACT}
"""
    frequencies = (1e4 ** -(np.arange(24) / 24)).astype(np.float32)
    agree(text, {0: [0, 1, 77, 131071]}, 1, {"w": f32(frequencies)}, T=4, tolerance=2e-7)


@pytest.mark.parametrize("dim,rotated", [(32, 32), (40, 24), (10, 10)])
def test_rope(dim: int, rotated: int) -> None:
    text = f"""slot %0 cpu:0 f32[T,{3 * dim}]
slot %1 cpu:0 f32[T,{rotated}]
slot %2 cpu:0 f32[T,{3 * dim}]
dispatch {AT} kernel=rope args=[%0,%1] dst=%2 attrs={{head_dim={dim}}} {EXACT}
"""
    agree(text, {0: r(5, 3 * dim), 1: r(5, rotated)}, 2, tolerance=3e-7, T=5)


ELEMENTWISE = f"""weight b SHAPE sources=[b] layout=f32
slot %0 cpu:0 f32[T,37]
slot %1 cpu:0 f32[T,37]
slot %2 cpu:0 f32[T,37]
slot %3 cpu:0 SHAPE
block b cpu:0 lo=0 hi=1 bytes=0
dispatch {AT} kernel=KERNEL args=ARGS dst=%2 attrs=ATTRS {EXACT}
"""


def elementwise(kernel: str, args: str, attrs: str = "{}", shape: str = "f32[37]") -> str:
    text = ELEMENTWISE.replace("KERNEL", kernel).replace("ARGS", args).replace("ATTRS", attrs)
    return text.replace("SHAPE", shape)


WIDE = np.array([0, -0.0, 1e-30, 0.3, -0.59, 0.61, 5, -9, 30, -100, 3e38, -3e38], np.float32)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "tanh", "sigmoid"])
def test_activations(act: str) -> None:
    x, up = r(6, 37) * 3, r(6, 37)
    x[:, : len(WIDE)] = WIDE
    with np.errstate(all="ignore"):
        alone = run(cpu(), elementwise("activation", "[%0]", f'{{act="{act}"}}'), {0: x}, T=6).read(2)
        both = run(cpu(2), elementwise("gated", "[%0,%1]", f'{{act="{act}"}}'), {0: x, 1: up}, T=6).read(2)
        product, want = alone * up, true_activation(act, x.astype(np.float64))
    # a few units in the last place, but for the far tails of gelu, where 1 + erf cancels
    np.testing.assert_allclose(alone, want, rtol=6e-7, atol=1e-6 if "gelu" in act else 1e-37)
    np.testing.assert_allclose(both, product, rtol=2e-7)
    assert np.array_equal(np.signbit(alone[x == 0]), np.signbit(want[x == 0].astype(np.float32)))


def true_activation(act: str, x: Any) -> Any:
    """In float64."""
    from math import erf

    tanh_of = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return {
        "silu": lambda: x / (1 + np.exp(np.minimum(-x, 700))),
        "gelu": lambda: x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2,
        "gelu_tanh": lambda: x * (1 + np.tanh(tanh_of)) / 2,
        "relu": lambda: np.maximum(x, 0),
        "tanh": lambda: np.tanh(x),
        "sigmoid": lambda: 1 / (1 + np.exp(np.minimum(-x, 700))),
    }[act]()


@pytest.mark.parametrize("kernel", ["add", "mul"])
@pytest.mark.parametrize("args,shape", [("[%0,%1]", "f32[37]"), ("[%0,%3]", "f32[37]"), ("[%0,%3]", "f32[1]"),
                                        ("[%0,@b]", "f32[37]"), ("[%0,@b]", "f32[1]")])  # fmt: skip
def test_add_and_mul_broadcast(kernel: str, args: str, shape: str) -> None:
    size = int(shape[4:-1])
    text = elementwise(kernel, args, shape=shape).replace("hi=1 ", f"hi={size} ")
    agree(text, {0: r(5, 37), 1: r(5, 37), 3: r(size)}, 2, {"b": f32(r(size))}, T=5, tolerance=0)


def test_scale_and_softcap() -> None:
    agree(elementwise("scale", "[%0]", "{by=0.37}"), {0: r(5, 37)}, 2, T=5, tolerance=0)
    x = r(5, 37) * 40
    got = agree(elementwise("softcap", "[%0]", "{cap=30.0}"), {0: x}, 2, T=5, tolerance=3e-7)
    np.testing.assert_allclose(got, 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-6)


def test_a_nan_stays_one() -> None:
    x = np.full((1, 37), np.nan, np.float32)
    for act in ("silu", "gelu", "gelu_tanh", "relu", "tanh", "sigmoid"):
        got = run(cpu(), elementwise("activation", "[%0]", f'{{act="{act}"}}'), {0: x}, T=1).read(2)
        assert np.isnan(got).all(), act


@pytest.mark.parametrize("index", ["i32", "i64"])
def test_slice_view_and_rows_copy(index: str) -> None:
    text = f"""slot %0 cpu:0 f32[T,12]
slot %1 cpu:0 f32[T,5]
slot %2 cpu:0 f32[T*2,6]
slot %3 cpu:0 {index}[3]
slot %4 cpu:0 f32[3,12]
dispatch {AT} kernel=slice args=[%0] dst=%1 attrs={{lo=4,hi=9}} {EXACT}
dispatch {AT} kernel=view args=[%0] dst=%2 {EXACT}
dispatch {AT} kernel=rows args=[%0,%3] dst=%4 {EXACT}
"""
    values = {0: r(5, 12), 3: [4, 0, -1]}
    for out in (1, 2, 4):
        agree(text, values, out, tolerance=0, T=5)
    outside = run(cpu(), text, {**values, 3: [5, -6, 4]}, T=5).read(4)
    assert np.isnan(outside[:2]).all() and np.isfinite(outside[2]).all()


@pytest.mark.parametrize(
    ("slot", "kernel"),
    [("f64[T,12]", "scale"), ("i64[T,12]", "add"), ("bf16[T,12]", "rms_norm"), ("i16[3]", "rows")],
)
def test_other_dtypes_are_refused(slot: str, kernel: str) -> None:
    """A kernel that took them for its own would read and write the wrong bytes."""
    text = f"""slot %0 cpu:0 f32[T,12]
slot %1 cpu:0 {slot}
slot %2 cpu:0 f32[T,12]
dispatch {AT} kernel={kernel} args=[%0,%1] dst=%2 {EXACT}
"""
    with pytest.raises(PlanError, match=f"%1 is {slot.partition('[')[0]}"):
        run(cpu(), text, {}, T=5)


@pytest.mark.parametrize("k", [64, 70, 5])
def test_quantize(k: int) -> None:
    bytes_ = k + 4 * -(-k // 32)
    text = f"""slot %0 cpu:0 f32[T,{k}]
slot %1 cpu:0 u8[T,{bytes_}]
quantize {AT} src=%0 dst=%1 scheme="i8/32"
"""
    x = r(5, k)
    x[2] = 0
    agree(text, {0: x}, 1, tolerance=0, T=5)


def test_an_unknown_kernel_is_named_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"conv3d(.|\n)*linear\.q4\.16x32"):
        run(cpu(), elementwise("conv3d", "[%0]"), {}, T=1)
