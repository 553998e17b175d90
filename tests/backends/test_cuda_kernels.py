"""Every CUDA kernel against the reference: on a GPU where there is one, else with its threads emulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashrt import backend
from flashrt.backends.cuda import CudaDevice, args, encode, gemm
from flashrt.backends.cuda import linear as products
from flashrt.backends.cuda import sample as sampling
from flashrt.backends.cuda.args import Step
from flashrt.backends.cuda.kernels import STORED, TABLES
from flashrt.backends.cuda.operands import Limits, Matrix
from flashrt.ir.ops import LINEAR_EXACT, LINEAR_I8
from flashrt.ir.text import read_micro
from flashrt.layouts import LAYOUTS, U8, pack_plain
from tests.backends.cpu_streams import HEAD, compute, packed
from tests.backends.cuda_streams import F32, DeviceMemory, agree, guard_intact, run
from tests.backends.kernel_texts import AT, attention_text, linear_text, sample_text

RNG = np.random.default_rng(3)
EXACT = 'numerics="acc=f32"'
LINEAR = 'numerics="act=f32 acc=f32"'
ROUNDED = 'numerics="act=bf16 acc=f32"'


def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def f32(x: Any) -> U8:
    return pack_plain(LAYOUTS["f32"], np.asarray(x, np.float32))


def linear(layout: str, n: int, k: int, epilogue: str, numerics: str = LINEAR) -> str:
    return linear_text(layout, n, k, epilogue, numerics)


@pytest.mark.parametrize("layout", STORED)
@pytest.mark.parametrize(
    "n,k,t,epilogue",
    [(48, 64, 1, ""), (40, 70, 7, "+bias+residual"), (5, 40, 3, "+bias"), (80, 2080, 2, "+residual")],
)
def test_linear(gpu: CudaDevice, layout: str, n: int, k: int, t: int, epilogue: str) -> None:
    values = {0: r(t, k), 2: r(t, n)}
    blocks = {"w": packed(layout, n, k), "b": f32(r(n))}
    agree(gpu, linear(layout, n, k, epilogue), values, 1, blocks, T=t)


@pytest.mark.parametrize("layout", STORED)
def test_a_row_has_the_same_bits_alone_and_among_others(gpu: CudaDevice, layout: str) -> None:
    text, x, w = linear(layout, 40, 72, ""), r(15, 72), packed(layout, 40, 72)
    together = run(gpu, text, {0: x}, {"w": w}, T=15).read(1)
    for t in (0, 7, 14):
        alone = run(gpu, text, {0: x[t]}, {"w": w}, T=1).read(1)
        assert alone.tobytes() == together[t].tobytes()


PRODUCTS = [
    *((layout, LINEAR_EXACT) for layout in products.NAMES),
    *((layout, LINEAR_I8) for layout in products.PACKED),
]


def prepared(layout: str, n: int, k: int, numerics: str, epilogue: str = "") -> str:
    """%0, rounded to bytes for int8, · w → %1; the residual is %2."""
    if numerics == LINEAR_I8:
        return rounded_to_bytes(layout, n, k, epilogue)
    return linear(layout, n, k, epilogue, f'numerics="{numerics}"')


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The launches of products of few tokens."""
    found: list[Step] = []
    make = products._few

    def kept(*args: Any) -> list[Step]:
        made = make(*args)
        found.extend(made)
        return made

    monkeypatch.setattr(products, "_few", kept)
    return found


def names(steps: list[Step]) -> list[str]:
    return [step.kernel for step in steps if isinstance(step, args.Launch | args.Product)]


def first_of(steps: list[Step]) -> args.Linear:
    """What the first launch is handed: a product, or what makes columns for it."""
    first = steps[0]
    if isinstance(first, args.Product):
        return first.of
    assert isinstance(first, args.Launch)
    return args.Linear(*first.fields)  # type: ignore[arg-type]


def room_of(device: CudaDevice) -> Any:
    """The memory that kernels use in turns, poisoned."""
    return device._scratch("room", backend.ROOM).fill_(0xFF)


@pytest.mark.parametrize("layout,numerics", PRODUCTS)
def test_seventy_tokens_have_the_bits_of_one_at_a_time(
    gpu: CudaDevice, steps: list[Step], layout: str, numerics: str
) -> None:
    """Columns made once, in pieces of which the last has fewer tokens."""
    n, k, t = 40, 96 if layout == "bf16" else 200, 70  # bf16 only has kernels for whole blocks of 32
    text, w = prepared(layout, n, k, numerics, "+bias+residual"), packed(layout, n, k)
    x, more, blocks = r(t, k) * np.exp(r(t, k)), r(t, n), {"w": w, "b": f32(r(n))}
    alone = [run(gpu, text, {0: x[i], 2: more[i]}, blocks, T=1).read(1)[0] for i in range(t)]
    assert not [name for name in names(steps) if "columns" in name]
    steps.clear()
    room_of(gpu)
    together = run(gpu, text, {0: x, 2: more}, blocks, T=t)
    assert names(steps)[0] == f"columns_{products.NAMES[layout]}" and len(steps) == 2
    assert guard_intact(together)
    assert together.read(1).tobytes() == np.stack(alone).tobytes()


@pytest.mark.parametrize("layout,numerics", PRODUCTS)
@pytest.mark.parametrize("n,k,t", [(75, 72, 9), (16, 32, 16), (40, 1632, 33)])
def test_more_tokens(
    gpu: CudaDevice, steps: list[Step], layout: str, numerics: str, n: int, k: int, t: int
) -> None:
    k = -(-k // 32) * 32 if layout == "bf16" else k
    values, blocks = {0: r(t, k), 2: r(t, n)}, {"w": packed(layout, n, k), "b": f32(r(n))}
    room_of(gpu)
    agree(gpu, prepared(layout, n, k, numerics, "+bias+residual"), values, 1, blocks, T=t)
    assert len(names(steps)) == 2


@pytest.mark.parametrize("layout,numerics", PRODUCTS)
def test_columns_of_many_tokens_are_made_in_turns(
    gpu: CudaDevice, steps: list[Step], monkeypatch: pytest.MonkeyPatch, layout: str, numerics: str
) -> None:
    """Where there is no room for all of them: a few tokens, their products, and so on; the same bits."""
    n, k, t = 40, 96, 70
    text, w = prepared(layout, n, k, numerics, "+residual"), packed(layout, n, k)
    values = {0: r(t, k), 2: r(t, n)}
    want = run(gpu, text, values, {"w": w}, T=t).read(1).tobytes()
    _, product = steps
    assert isinstance(product, args.Product)
    fields, pieces = product.of, product.grid[1]
    steps.clear()
    monkeypatch.setattr(products, "ROOM", 2 * fields.piece + 1)
    room = room_of(gpu)
    assert run(gpu, text, values, {"w": w}, T=t).read(1).tobytes() == want
    assert len(steps) == 2 * -(-pieces // 2) > 2
    assert bool((room[2 * fields.piece :] == 0xFF).all())


@pytest.mark.parametrize("t", [8, 20, 70])
def test_a_result_may_lie_where_its_input_was(
    gpu: CudaDevice, steps: list[Step], monkeypatch: pytest.MonkeyPatch, t: int
) -> None:
    """Where blocks make columns while others write, or not all are made at once, rounding stays a kernel of
    its own; else the product takes the input itself."""
    k, layout = 96, "q4.16x32"
    text, x, w = prepared(layout, k, k, LINEAR_I8), r(t, k), packed(layout, k, k)
    want = run(gpu, text, {0: x}, {"w": w}, T=t).read(1)
    fields = first_of(steps)
    if t == 70:
        monkeypatch.setattr(products, "ROOM", 2 * fields.piece)
    steps.clear()
    memory = DeviceMemory(read_micro(HEAD + text), {"cpu:0": gpu}, {"T": t})
    memory.device, memory.places[1] = gpu, memory.places[0]
    memory.put(0, x)
    memory.load_block("w", "cpu:0", w)
    gpu.run(gpu.load(compute(memory.stream), memory), 1)
    assert memory.read(1).tobytes() == want.tobytes()
    fields = first_of(steps)
    assert (fields.x == fields.y) is (fields.x_kind == 0) is (t == 20)


def test_columns_fit_their_room() -> None:
    """One piece of them at least, however wide a product."""
    for layout, numerics in PRODUCTS:
        for k in (32, 4096, 53248):
            w = Matrix(0, 64, k, LAYOUTS[layout])
            assert 32 * products.held(w, numerics) + 128 <= backend.ROOM


@pytest.mark.parametrize(
    "tiles,pieces,processors,blocks",
    [
        (192, 1, 132, 132), (5, 1, 132, 5), (128, 8, 132, 16), (896, 3, 132, 44),
        (128, 70, 132, 13), (3, 9, 4, 1),
    ],
)  # fmt: skip
def test_pieces_share_processors(tiles: int, pieces: int, processors: int, blocks: int) -> None:
    """In one round of the processors, or in several where that is sooner."""
    assert products._across(tiles, pieces, processors) == blocks


def quantised(layout: str, n: int, k: int, epilogue: str = "") -> str:
    text = linear(layout, n, k, epilogue, ROUNDED).replace("args=[%0", "args=[%3")
    slot = f"slot %3 cpu:0 bf16[32*ceildiv(T,32),{-(-k // 32) * 32}]\n"
    quantize = f"quantize {AT} src=%0 dst=%3 scheme=bf16\n"
    head, first, rest = text.partition("bias " if "bias" in epilogue else "dispatch ")
    head, block, blocks = head.partition("block ")
    return head + slot + block + blocks + quantize + first + rest


@pytest.mark.parametrize("layout", ["q4.16x32", "q4m.16x32", "q8.16x32", "bf16"])
@pytest.mark.parametrize("t", [1, 8, 40])
def test_linear_with_bf16_activations(gpu: CudaDevice, layout: str, t: int) -> None:
    n, k = 48, 96 if layout == "bf16" else 72  # bf16 only has kernels for whole blocks of 32
    values = {0: r(t, k), 2: r(t, n)}
    blocks = {"w": packed(layout, n, k), "b": f32(r(n))}
    agree(gpu, quantised(layout, n, k, "+bias+residual"), values, 1, blocks, T=t, tolerance=4e-3)


@pytest.mark.parametrize("layout", ["q4.16x32", "q4m.16x32", "q8.16x32"])
def test_a_weight_is_unpacked_in_pieces(
    gpu: CudaDevice, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no room for all of it: each piece's columns, the last ones fewer, and what is added."""
    n, k, t = 88, 72, 40
    monkeypatch.setattr(products, "ROOM", 2 * k * 39)  # of 16 rows each, 39 would be 32
    monkeypatch.setattr(products, "EVEN", 16)
    monkeypatch.setattr(gemm, "MOST", 8)  # else the library has no part in so few tokens
    unpacked, unpack = list[int](), args.Unpack

    def noted(*fields: int) -> args.Unpack:
        unpacked.append(fields[2])
        return unpack(*fields)

    monkeypatch.setattr(args, "Unpack", noted)
    values = {0: r(t, k), 2: r(t, n)}
    blocks = {"w": packed(layout, n, k), "b": f32(r(n))}
    agree(gpu, quantised(layout, n, k, "+bias+residual"), values, 1, blocks, T=t, tolerance=4e-3)
    assert unpacked == [32, 32, 24]


def test_pieces_of_a_weight_fit_and_are_even() -> None:
    for n in (16, 4096, 6144, 28672, 128256, 131072 + 8):
        for k in (32, 4096, 14336, 53248):
            some = products._unpacked_at_once(n, k)
            assert 2 * min(some, n) * k <= products.ROOM
            most = products.ROOM // (2 * k)
            assert some == n or n <= some * -(-n // (most // products.EVEN * products.EVEN))


WHOLE = 'numerics="act=i8/32 acc=f32"'


def rounded_to_bytes(layout: str, n: int, k: int, epilogue: str = "") -> str:
    text = linear(layout, n, k, epilogue, WHOLE).replace("args=[%0", "args=[%3")
    slot = f"slot %3 cpu:0 u8[T,{k + 4 * -(-k // 32)}]\n"
    head, block, rest = text.partition("block ")
    head, text = head + slot, block + rest
    first = "bias " if "bias" in epilogue else "dispatch "
    return head + text.replace(first, f"quantize {AT} src=%0 dst=%3 scheme=i8/32\n{first}", 1)


@pytest.mark.parametrize("layout", ["q4.16x32", "q4m.16x32", "q8.16x32"])
@pytest.mark.parametrize("t", [1, 3, 19])
@pytest.mark.parametrize("n,k", [(40, 72), (32, 4100)])
def test_linear_with_int8_activations(gpu: CudaDevice, layout: str, t: int, n: int, k: int) -> None:
    values = {0: r(t, k) * np.exp(r(t, k))}
    agree(gpu, rounded_to_bytes(layout, n, k), values, 1, {"w": packed(layout, n, k)}, T=t)


@pytest.mark.parametrize("t", [16, 17])
def test_little_shared_memory(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, t: int) -> None:
    """A block of nine tokens is the largest that fits, with one set of sums; the last block has fewer."""
    monkeypatch.setattr(gpu.driver, "limits", Limits(1, 99 << 10, 100 << 10))
    n, k = 64, 4096  # two tiles of the one processor
    blocks = {"w": packed("q8.16x32", n, k)}
    agree(gpu, rounded_to_bytes("q8.16x32", n, k), {0: r(t, k)}, 1, blocks, T=t)


def test_a_column_of_bytes_is_the_same_with_and_without_its_own_kernel(gpu: CudaDevice) -> None:
    text, w = rounded_to_bytes("q4.16x32", 40, 96), packed("q4.16x32", 40, 96)
    x = r(20, 96)
    alone = run(gpu, text, {0: x[3]}, {"w": w}, T=1).read(1)
    assert alone.tobytes() == run(gpu, text, {0: x}, {"w": w}, T=20).read(1)[3].tobytes()


@pytest.mark.parametrize("scale", [1.0, 0.3, 7e-3, 1e30, 1e-36, 3e-39, 1e-44])
def test_bytes_next_to_halves_are_rounded_as_a_division_does(gpu: CudaDevice, scale: float) -> None:
    """Quotients at halves and around them, zeros, and scales too small to be normal."""
    halves = (np.arange(31) * 4 + 0.5).astype(np.float32)
    near = np.stack([np.nextafter(halves, np.float32(side), dtype=np.float32) for side in (-1, 1000)])
    rows = np.stack([halves, *near, -halves, RNG.uniform(-127, 127, 31), 0 * halves])
    largest = np.array([127, 127, 127, -127, 127, 0], np.float32)
    x = (np.concatenate([largest[:, None], rows], axis=1) * scale).astype(np.float32)
    text, w = rounded_to_bytes("q8.16x32", 16, 32), packed("q8.16x32", 16, 32)
    by_division = run(gpu, text, {0: np.concatenate([x, x])}, {"w": w}, T=12).read(1)[:6]
    assert run(gpu, text, {0: x}, {"w": w}, T=6).read(1).tobytes() == by_division.tobytes()


@pytest.mark.parametrize("ids", ["i32", "i64"])
@pytest.mark.parametrize("channels", [70, 256])
@pytest.mark.parametrize("layout", TABLES)
def test_embedding_is_exactly_what_the_layout_means(
    gpu: CudaDevice, layout: str, channels: int, ids: str
) -> None:
    text = f"""weight w f32[37,{channels}] sources=[w] layout={layout}
slot %0 cpu:0 {ids}[T]
slot %1 cpu:0 f32[T,{channels}]
block w cpu:0 lo=0 hi=37 bytes=0
dispatch {AT} kernel=embedding.{layout} args=[%0,@w] dst=%1 {EXACT}
"""
    values, w = {0: np.array([36, 0, 17, 16, 36])}, packed(layout, 37, channels)
    agree(gpu, text, values, 1, {"w": w}, tolerance=0, T=5)
    outside = run(gpu, text, {0: np.array([-1, 37, 5])}, {"w": w}, T=3).read(1)
    assert np.isnan(outside[:2]).all() and np.isfinite(outside[2]).all()


NORM = f"""weight w f32[W] sources=[w] layout=f32
weight b f32[W] sources=[b] layout=f32
slot %0 cpu:0 f32[T,C]
slot %1 cpu:0 f32[T,C]
block w cpu:0 lo=0 hi=W bytes=0
block b cpu:0 lo=0 hi=W bytes=0
dispatch {AT} kernel=KERNEL args=ARGS dst=%1 attrs={{ATTRS}} {EXACT}
"""


@pytest.mark.parametrize("channels,width,w", [(48, 48, 48), (700, 700, 700), (60, 20, 20), (60, 20, 60)])
@pytest.mark.parametrize("offset", [0, 1])
def test_rms_norm(gpu: CudaDevice, channels: int, width: int, w: int, offset: int) -> None:
    text = NORM.replace("KERNEL", "rms_norm").replace("ARGS", "[%0,@w]")
    text = text.replace("ATTRS", f"eps=1e-05,width={width},offset={offset}").replace("C]", f"{channels}]")
    agree(gpu, text.replace("W", str(w)), {0: r(5, channels)}, 1, {"w": f32(r(w)), "b": f32(r(w))}, T=5)


@pytest.mark.parametrize("args", ["[%0,@w]", "[%0,@w,@b]"])
def test_layer_norm(gpu: CudaDevice, args: str) -> None:
    text = NORM.replace("KERNEL", "layer_norm").replace("ARGS", args).replace("ATTRS", "eps=1e-05")
    text = text.replace("C]", "600]").replace("W", "600")
    blocks = {"w": f32(r(600)), "b": f32(r(600))}
    agree(gpu, text, {0: r(5, 600) + 10}, 1, blocks, tolerance=2e-5, T=5)


def test_rope_table_keeps_late_positions_exact(gpu: CudaDevice) -> None:
    text = f"""weight w f32[24] sources=[w] layout=f32
slot %0 cpu:0 i32[T]
slot %1 cpu:0 f32[T,48]
block w cpu:0 lo=0 hi=24 bytes=0
dispatch {AT} kernel=rope_table args=[%0,@w] dst=%1 attrs={{scale=1.5}} {EXACT}
"""
    frequencies = (1e4 ** -(np.arange(24) / 24)).astype(np.float32)
    agree(gpu, text, {0: np.array([0, 1, 77, 131071])}, 1, {"w": f32(frequencies)}, T=4, tolerance=3e-7)


@pytest.mark.parametrize("dim,rotated", [(32, 32), (40, 24), (128, 128)])
def test_rope(gpu: CudaDevice, dim: int, rotated: int) -> None:
    text = f"""slot %0 cpu:0 f32[T,{3 * dim}]
slot %1 cpu:0 f32[T,{rotated}]
slot %2 cpu:0 f32[T,{3 * dim}]
dispatch {AT} kernel=rope args=[%0,%1] dst=%2 attrs={{head_dim={dim}}} {EXACT}
"""
    agree(gpu, text, {0: r(5, 3 * dim), 1: r(5, rotated)}, 2, tolerance=3e-7, T=5)


def mapped(kernel: str, args: str, attrs: str = "") -> str:
    return f"""weight w f32[70] sources=[w] layout=f32
slot %0 cpu:0 f32[T,70]
slot %1 cpu:0 f32[T,70]
slot %2 cpu:0 f32[T,70]
block w cpu:0 lo=0 hi=70 bytes=0
dispatch {AT} kernel={kernel} args={args} dst=%2 attrs={{{attrs}}} {EXACT}
"""


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "tanh", "sigmoid"])
def test_activations(gpu: CudaDevice, act: str) -> None:
    values = {0: r(3, 70) * 3, 1: r(3, 70)}
    agree(gpu, mapped("activation", "[%0]", f'act="{act}"'), values, 2, T=3)
    if act in ("silu", "gelu", "gelu_tanh", "relu"):
        agree(gpu, mapped("gated", "[%0,%1]", f'act="{act}"'), values, 2, T=3)


@pytest.mark.parametrize(
    "kernel,args,attrs",
    [
        ("add", "[%0,%1]", ""), ("mul", "[%0,%1]", ""), ("add", "[%0,@w]", ""),
        ("scale", "[%0]", "by=0.3"), ("softcap", "[%0]", "cap=5.0"), ("view", "[%0]", ""),
    ],
)  # fmt: skip
def test_elementwise(gpu: CudaDevice, kernel: str, args: str, attrs: str) -> None:
    agree(gpu, mapped(kernel, args, attrs), {0: r(3, 70), 1: r(3, 70)}, 2, {"w": f32(r(70))}, T=3)


def test_slice_and_rows(gpu: CudaDevice) -> None:
    text = f"""slot %0 cpu:0 f32[T,70]
slot %1 cpu:0 i32[S]
slot %2 cpu:0 f32[T,30]
slot %3 cpu:0 f32[S,70]
dispatch {AT} kernel=slice args=[%0] dst=%2 attrs={{lo=21,hi=51}} {EXACT}
dispatch {AT} kernel=rows args=[%0,%1] dst=%3 {EXACT}
"""
    values = {0: r(5, 70), 1: np.array([4, 0, 4])}
    for slot in (2, 3):
        agree(gpu, text, values, slot, T=5, S=3, tolerance=0)


# ---- attention -------------------------------------------------------------------------
@pytest.mark.parametrize("t", [3, 20])
@pytest.mark.parametrize(
    "heads,kv_heads,d,dv,numerics,attrs,sinks",
    [
        (4, 2, 16, 16, "acc=f32 chunk=page", "causal=true,window=0,softcap=0.0", False),
        (8, 2, 128, 128, "acc=f32 chunk=page kv=bf16", "causal=true,window=0,softcap=0.0", True),
        (6, 2, 64, 32, "acc=f32 chunk=page", "causal=true,window=150,softcap=2.0", True),
        (2, 2, 80, 80, "acc=f32 chunk=page", "causal=false,window=0,softcap=0.0", False),
        (8, 1, 40, 40, "act=bf16 acc=f32 chunk=2pages kv=bf16", "causal=true,window=9", False),
        (4, 1, 160, 160, "acc=f32 chunk=page", "causal=true,window=0,softcap=0.0", False),
    ],
)
def test_attention(
    gpu: CudaDevice, t: int, heads: int, kv_heads: int, d: int, dv: int, numerics: str, attrs: str,
    sinks: bool,
) -> None:  # fmt: skip
    """Two sequences, one beyond two ranges of keys: old keys are in the cache, new ones in the step."""
    text = attention_text(
        heads, kv_heads, d, dv, f",{attrs}", sinks=sinks, numerics=numerics, scale=0.25, pages="S,M"
    )
    pages, lengths = 40, (300, 7)
    table = RNG.permutation(pages)[:40].reshape(2, 20).astype(np.int32)
    first = t // 3
    seq = np.array([1] * first + [0] * (t - first), np.int32)
    positions = np.concatenate([lengths[1] + np.arange(first), lengths[0] + np.arange(t - first)]).astype(
        np.int32
    )
    state = r(pages, 2, kv_heads, 16, max(d, dv))
    values = {
        0: r(t, heads * d),
        1: r(t, kv_heads * d),
        2: r(t, kv_heads * dv),
        3: positions,
        4: seq,
        5: table,
    }
    tolerance = 1e-2 if "act=bf16" in numerics else 4e-6
    agree(gpu, text, values, 6, {"sinks": f32(r(heads))}, state=state, tolerance=tolerance, times=2,
          T=t, S=2, M=20, P=pages)  # fmt: skip


@pytest.mark.parametrize("length", [0, 15, 64, 300])
@pytest.mark.parametrize(
    "heads,kv_heads,d,dv,turned,numerics,attrs",
    [
        (8, 2, 128, 128, 128, "acc=f32 chunk=page kv=bf16", "causal=true,window=0,softcap=0.0"),
        (8, 1, 64, 32, 48, "acc=f32 chunk=page", "causal=true,window=150,softcap=2.0"),
        (2, 2, 160, 160, 160, "acc=f32 chunk=page", "causal=false,window=0,softcap=0.0"),
        (2, 1, 40, 40, 40, "act=bf16 acc=f32 chunk=2pages kv=bf16", "causal=true,window=0,softcap=0.0"),
    ],
)
def test_one_token_is_rotated_and_kept_by_its_attention(
    gpu: CudaDevice, length: int, heads: int, kv_heads: int, d: int, dv: int, turned: int, numerics: str,
    attrs: str,
) -> None:  # fmt: skip
    """The same bits as kernel by kernel, in the result and in the cache."""
    text = attention_text(heads, kv_heads, d, dv, f",{attrs}", numerics=numerics, scale=0.25, pages="S,M")
    slots = f"""slot %7 cpu:0 f32[T,{turned}]
slot %8 cpu:0 f32[T,{heads * d}]
slot %9 cpu:0 f32[T,{kv_heads * d}]
"""
    ropes = "".join(
        f"dispatch {AT} kernel=rope args=[%{x},%7] dst=%{y} attrs={{head_dim={d}}} {EXACT}\n"
        for x, y in ((0, 8), (1, 9))
    )
    text = text.replace("kernel=kv_write args=[%1", "kernel=kv_write args=[%9")
    text = text.replace("kernel=attention args=[%0", "kernel=attention args=[%8")
    text = text.replace("block sinks", slots + "block sinks").replace("dispatch", ropes + "dispatch", 1)
    state, table = r(40, 2, kv_heads, 16, max(d, dv)), RNG.permutation(40)[:20]
    values = {
        0: r(1, heads * d), 1: r(1, kv_heads * d), 2: r(1, kv_heads * dv), 3: np.array([length]),
        4: np.array([0]), 5: table[None], 7: r(1, turned),
    }  # fmt: skip
    blocks = {"sinks": f32(r(heads))}
    one, each = (
        run(gpu, text, values, blocks, state, alone=alone, times=2, T=1, S=1, M=20, P=40)
        for alone in (False, True)
    )
    assert np.isfinite(one.read(6)).all() and np.isnan(one.read(8)).all() and np.isfinite(each.read(8)).all()
    assert one.read(6).tobytes() == each.read(6).tobytes()
    assert one.state_bytes("kv").tobytes() == each.state_bytes("kv").tobytes()


@pytest.mark.parametrize("full", [0, 1 << 20])
@pytest.mark.parametrize("room", [encode.ROOM, 5000])
def test_ranges_of_keys_by_one_block_or_by_many_are_the_same_bits(
    gpu: CudaDevice, full: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the processors are full, or sums of ranges would take more memory than there is for them."""
    text = attention_text(4, 2, 16, 16, ",causal=true,window=0,softcap=0.0", pages="S,M")
    pages, t = 20, 5
    values = {0: r(t, 64), 1: r(t, 32), 2: r(t, 32), 3: np.arange(250, 250 + t), 4: np.zeros(t, np.int32),
              5: RNG.permutation(pages)[None].astype(np.int32)}  # fmt: skip
    sinks, state = {"sinks": f32(r(4))}, r(pages, 2, 2, 16, 16)

    def bits() -> bytes:
        out: F32 = run(gpu, text, values, sinks, state, T=t, S=1, M=pages, P=pages).read(6)
        return out.tobytes()

    want = bits()
    monkeypatch.setattr(encode, "FULL", full)
    monkeypatch.setattr(encode, "ROOM", room)
    assert bits() == want


# ---- sampling --------------------------------------------------------------------------
@pytest.mark.parametrize("transient", [sampling.TRANSIENT, 5 * 80 * 1000])
def test_sample(gpu: CudaDevice, transient: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows at once, or some."""
    monkeypatch.setattr(sampling, "TRANSIENT", transient)
    t, m = 12, 5
    logits = r(t, 1000) * 3
    logits[3, ::7], logits[4, 5], logits[5], logits[6, [2, 9]] = np.nan, np.inf, -np.inf, 50
    values = {
        0: logits,
        1: np.array([0, 0.7, 1, 1, 0, 1, 0, 1.3, 2, 1, 0.2, 5]),
        2: np.array([0, 5, 0, 0, 0, 0, 3, 50, 0, 1, 0, 400]),
        3: np.array([1, 1, 0.9, 0.5, 1, 1, 1, 0.95, 1, 1, 0.1, 1]),
        4: np.array([0, 0, 0, 0, 0, 0, 0, 0.05, 0.2, 0, 0, 0]),
        5: np.array([1, 1.3, 1, 1, 1, 1, 2, 1.1, 1, 1, 1, 0.5]),
        6: RNG.integers(-(2**62), 2**62, t),
        7: np.arange(t) * 7,
        8: RNG.integers(-1, 1000, (t, m)),
    }
    agree(gpu, sample_text(1000, "M"), values, 9, T=t, M=m)
