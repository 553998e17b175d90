"""Products of some more tokens with quantised weights: tiles on tensor cores, parts in several blocks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from flashrt.backend import WORKSPACE
from flashrt.backends.cuda import CudaDevice, args, code, gemm
from flashrt.backends.cuda.args import Launch, Step
from flashrt.backends.cuda.operands import Limits, Matrix, Operands
from flashrt.ir.ops import ATTENTION_BF16, LINEAR_BF16
from flashrt.ir.text import read_micro
from flashrt.layouts import LAYOUTS, U8, pack_plain, unpack
from tests.backends.cpu_streams import HEAD, compute, packed
from tests.backends.cuda_streams import F32, DeviceMemory, agree, guard_intact, in_turns, run
from tests.backends.kernel_texts import AT, attention_text

RNG = np.random.default_rng(11)
EXACT = 'numerics="acc=f32"'
KIB = 1 << 10


# ---- tiles -----------------------------------------------------------------------------
@pytest.mark.parametrize("shared", [99 * KIB, 163 * KIB, 227 * KIB], ids=["consumer", "A100", "H100"])
@pytest.mark.parametrize("layout", gemm.NAMES)
def test_a_ring_fits_beside_what_warps_hand_over(layout: str, shared: int) -> None:
    groups = shared == 227 * KIB
    ops = cast(Operands, SimpleNamespace(limits=Limits(132, shared, shared + KIB, groups=groups)))
    for n, k, gated in [(16, 32, False), (4096, 14336, False), (28672, 4096, True), (128256, 4096, False)]:
        for rows in (1, 16, 17, 64, 65, gemm.MOST_TOGETHER[layout] if groups else gemm.MOST):
            w = Matrix(0, n, k, LAYOUTS[layout])
            tile = gemm.tile_of(w, n // 2 if gated else n, rows, ops)
            handed = 0 if tile.warps == gemm.MULTIPLY else tile.warps * 8 * tile.eights * 128
            assert gemm.FRONT + handed + tile.slot * tile.depth == tile.shared <= shared
            assert 2 <= tile.depth <= gemm.DEPTH
            assert tile.slot % 1024 == 0
            assert 8 * tile.eights >= min(rows, 128 if groups else 64)


@pytest.mark.parametrize(
    "n,k,gated,rows,warps",
    [
        (28672, 4096, True, 16, 8),
        (4096, 14336, False, 16, 8),
        (128256, 4096, False, 64, 8),
        (6144, 4096, False, 64, 4),
        (4096, 4096, False, 64, 4),
        (4096, 4096, False, 128, 8),
    ],
    ids=["gate_up", "down", "head", "qkv", "o", "o of many"],
)
def test_tiles_are_large_where_blocks_have_much_to_do(
    n: int, k: int, gated: bool, rows: int, warps: int
) -> None:
    ops = cast(Operands, SimpleNamespace(limits=Limits(132, 227 * KIB, 228 * KIB)))
    w = Matrix(0, n, k, LAYOUTS["q4.16x32"])
    assert gemm.tile_of(w, n // 2 if gated else n, rows, ops).warps == warps


# ---- the kernels -----------------------------------------------------------------------
def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def f32(x: Any) -> U8:
    return pack_plain(LAYOUTS["f32"], np.asarray(x, np.float32))


def product(layout: str, n: int, k: int, epilogue: str) -> str:
    """%0 f32 [T, k], rounded to %3; %3·w → %1; the residual is %2."""
    bias = f"bias {AT} block=@b\n" if "bias" in epilogue else ""
    residual = ",%2" if "residual" in epilogue else ""
    return f"""weight w f32[{n},{k}] sources=[w] layout={layout}
weight b f32[{n}] sources=[b] layout=f32
slot %0 cpu:0 f32[T,{k}]
slot %1 cpu:0 f32[T,{n}]
slot %2 cpu:0 f32[T,{n}]
slot %3 cpu:0 bf16[32*ceildiv(T,32),{-(-k // 32) * 32}]
block w cpu:0 lo=0 hi={n} bytes=0
block b cpu:0 lo=0 hi={n} bytes=0
quantize {AT} src=%0 dst=%3 scheme=bf16
{bias}dispatch {AT} kernel=linear.{layout}{epilogue} args=[%3,@w{residual}] dst=%1 numerics="{LINEAR_BF16}"
"""


def bf16(x: F32) -> F32:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def weights(layout: str, data: U8, n: int, k: int) -> F32:
    """The weights that products use: rounded to bf16, as are q4's scales."""
    kind = LAYOUTS[layout]
    if layout == "q4.16x32":
        groups = data.reshape(-1, kind.group_bytes(k)).copy()
        scales = groups[:, kind.quant_bytes * -(-k // 32) :]
        scales[:] = bf16(scales.view(np.float16).astype(np.float32)).astype(np.float16).view(np.uint8)
        data = groups.reshape(-1)
    return bf16(unpack(kind, data, n, k))


def close(got: F32, want: F32, tolerance: float = 3e-6) -> None:
    scale = float(np.abs(want).max())
    np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=tolerance)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The launches of tiles."""
    found: list[Step] = []
    make = gemm.gemm

    def kept(*given: Any) -> list[Step]:
        steps = make(*given)
        found.append(steps[-1])
        return steps

    monkeypatch.setattr(gemm, "gemm", kept)
    return found


def on(monkeypatch: pytest.MonkeyPatch, device: CudaDevice, processors: int, **more: Any) -> None:
    """Lets so many blocks share the work: few have large tiles."""
    limits = replace(device.driver.limits, processors=processors, **more)
    monkeypatch.setattr(device.driver, "limits", limits)


def warps(step: Step) -> int:
    """Those that have channels of their own, in a tile of a launch."""
    assert isinstance(step, Launch) and isinstance(step.fields, args.Gemm)
    return step.fields.warps


SINGLE, TOGETHER = False, True


@pytest.mark.parametrize("layout", gemm.NAMES)
@pytest.mark.parametrize(
    "n,k,t,epilogue,processors,groups",
    [
        (48, 64, 9, "+bias+residual", 60, SINGLE),  # no whole tile, and inputs that end within a slot
        (75, 1664, 16, "", 60, SINGLE),
        (75, 1664, 16, "", 1, SINGLE),  # more slots than the ring has
        (300, 576, 33, "+residual", 1, SINGLE),  # several tiles of channels
        (257, 192, 70, "+bias", 60, SINGLE),  # and of tokens
        (257, 576, 70, "+bias+residual", 2, SINGLE),
        (16, 64, 192, "", 60, SINGLE),
        (5, 128, 130, "+bias+residual", 60, SINGLE),
        (48, 64, 65, "+bias+residual", 60, TOGETHER),
        (75, 1664, 128, "", 1, TOGETHER),
        (300, 576, 130, "+residual", 3, TOGETHER),
        (257, 192, 259, "+bias", 60, TOGETHER),
    ],
)
def test_it_differs_from_rounded_weights_only_in_the_order_of_sums(
    gpu: CudaDevice,
    launched: list[Step],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    n: int,
    k: int,
    t: int,
    epilogue: str,
    processors: int,
    groups: bool,
) -> None:
    on(monkeypatch, gpu, processors, groups=groups)
    x, more, bias, w = r(t, k), r(t, n), r(n), packed(layout, n, k)
    memory = run(gpu, product(layout, n, k, epilogue), {0: x, 2: more}, {"w": w, "b": f32(bias)}, T=t)
    large = groups or processors < 60
    assert [warps(step) for step in launched] == [8 if large else 4] and guard_intact(memory)
    want = bf16(x).astype(np.float64) @ weights(layout, w, n, k).T.astype(np.float64)
    want = want + (bias if "bias" in epilogue else 0) + (more if "residual" in epilogue else 0)
    close(memory.read(1), want.astype(np.float32))


@pytest.mark.parametrize(
    "t,groups",
    [
        *((t, SINGLE) for t in (1, 8, 9, 17, 64, 192, 193)),
        *((t, TOGETHER) for t in (64, 65, 193, 256, 257)),
    ],
)
def test_as_the_reference_on_either_side_of_the_bounds(
    gpu: CudaDevice, launched: list[Step], monkeypatch: pytest.MonkeyPatch, t: int, groups: bool
) -> None:
    on(monkeypatch, gpu, gpu.driver.limits.processors, groups=groups)
    monkeypatch.setitem(gemm.MOST_TOGETHER, "q4.16x32", 256)
    n, k = 40, 128
    values, blocks = {0: r(t, k), 2: r(t, n)}, {"w": packed("q4.16x32", n, k), "b": f32(r(n))}
    agree(gpu, product("q4.16x32", n, k, "+bias+residual"), values, 1, blocks, T=t, tolerance=6e-3)
    assert len(launched) == (gemm.LEAST <= t <= (256 if groups else gemm.MOST))


@pytest.mark.parametrize("k", [14336, 28672])
def test_large_prompts_keep_to_the_room_that_is_planned(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """Sums of shared tiles, and inputs that others don't write in tiles."""
    on(monkeypatch, gpu, 132, groups=True, shared=227 * KIB, shared_all=228 * KIB)
    other = "slot %6 cpu:0 f32[T,16]\nblock v cpu:0 lo=0 hi=16 bytes=0\nblock w"
    both = product("q4.16x32", 16, k, "").replace("block w", other, 1)
    both = f"weight v f32[16,{k}] sources=[v] layout=q8.16x32\n{both}"
    both += f'dispatch {AT} kernel=linear.q8.16x32 args=[%3,@v] dst=%6 numerics="{LINEAR_BF16}"\n'
    for text, layouts in ((product("q4.16x32", 16, k, ""), ("q4.16x32",)), (both, ("q4.16x32", "q8.16x32"))):
        stream = read_micro(HEAD.replace("T lo=1 hi=512", "T lo=1 hi=2048") + text)
        memory = DeviceMemory(stream, {"cpu:0": gpu}, {"T": 2048}, pages=8)
        memory.device = gpu
        for name, layout in zip("wv", layouts, strict=False):
            memory.load_block(name, "cpu:0", packed(layout, 16, k))
        memory.load_block("b", "cpu:0", f32(r(16)))
        loaded = gpu.load(compute(stream), memory)
        (piece,) = loaded._pieces
        for t in (64, 512, 1280, 2048):
            piece.buckets[t,] = loaded._bucket(piece, {"T": t}, False)
            assert gpu.held + loaded.held <= WORKSPACE["gpu"][""].device
        gpu._scratch.clear()


def mlp(layout: str, n: int, k: int) -> str:
    """%0 rounded to %1; gate and up of it in one product, gated, rounded to %4."""
    return f"""weight w f32[{2 * n},{k}] sources=[w] layout={layout}
slot %0 cpu:0 f32[T,{k}]
slot %1 cpu:0 bf16[32*ceildiv(T,32),{-(-k // 32) * 32}]
slot %2 cpu:0 f32[T,{2 * n}]
slot %3 cpu:0 f32[T,{n}]
slot %4 cpu:0 bf16[32*ceildiv(T,32),{-(-n // 32) * 32}]
slot %5 cpu:0 f32[T,{n}]
block w cpu:0 lo=0 hi={2 * n} bytes=0
quantize {AT} src=%0 dst=%1 scheme=bf16
dispatch {AT} kernel=linear.{layout} args=[%1,@w] dst=%2 numerics="{LINEAR_BF16}"
dispatch {AT} kernel=gated args=[%2[0:{n}],%2[{n}:{2 * n}]] dst=%3 attrs={{act="ACT"}} {EXACT}
"""


def act(name: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    if name == "silu":
        return x / (1 + np.exp(-x))
    assert name == "relu"
    return np.where(x > 0, x, 0)


@pytest.mark.parametrize("rounded,processors", [(False, 60), (True, 1)])
@pytest.mark.parametrize("layout,name,n,k,t,groups", [
    ("q4.16x32", "silu", 208, 1088, 40, SINGLE), ("q4m.16x32", "relu", 16, 960, 9, SINGLE),
    ("q8.16x32", "silu", 80, 448, 66, SINGLE), ("q4.16x32", "silu", 144, 192, 140, TOGETHER),
])  # fmt: skip
def test_gate_and_up(
    gpu: CudaDevice,
    launched: list[Step],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    name: str,
    n: int,
    k: int,
    t: int,
    groups: bool,
    rounded: bool,
    processors: int,
) -> None:
    on(monkeypatch, gpu, processors, groups=groups)
    text = mlp(layout, n, k).replace("ACT", name)
    if rounded:
        text += f"quantize {AT} src=%3 dst=%4 scheme=bf16\n"
    x, w = r(t, k), packed(layout, 2 * n, k)
    memory = run(gpu, text, {0: x}, {"w": w}, T=t)
    large = groups or processors < 60
    assert [warps(step) for step in launched] == [8 if large else 4] and guard_intact(memory)
    both = bf16(x).astype(np.float64) @ weights(layout, w, 2 * n, k).T.astype(np.float64)
    want = (act(name, both[:, :n]) * both[:, n:]).astype(np.float32)
    if rounded:
        close(memory.read(4)[:t, :n].astype(np.float32), want, 4e-3)
    else:
        close(memory.read(3), want, 6e-6)


NORMED = f"""slot %5 cpu:0 f32[T,128]
dispatch {AT} kernel=rms_norm args=[%0] dst=%5 attrs={{eps=1e-05}} {EXACT}
"""
BY_HEADS = f"""slot %5 cpu:0 f32[T,128]
dispatch {AT} kernel=rms_norm args=[%0] dst=%5 attrs={{eps=1e-05,width=8}} {EXACT}
"""
BY_ODD_HEADS = BY_HEADS.replace("width=8", "width=4")
GATED = f"""slot %6 cpu:0 f32[T,256]
slot %5 cpu:0 f32[T,128]
dispatch {AT} kernel=gated args=[%6[0:128],%6[128:256]] dst=%5 attrs={{act="silu"}} {EXACT}
"""
PLAIN = "slot %5 cpu:0 f32[T,128]\n"


@pytest.mark.parametrize("layout", gemm.NAMES)
@pytest.mark.parametrize("maker", [PLAIN, NORMED, BY_HEADS, BY_ODD_HEADS, GATED])
def test_whoever_makes_activations_writes_them_in_tiles(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, layout: str, maker: str
) -> None:
    """The same bits as when they are put in order by a kernel of their own; heads that end within eight
    channels are."""
    n, k, t = 72, 128, 21
    text = product(layout, n, k, "").replace("src=%0", "src=%5").replace("quantize", maker + "quantize", 1)
    x, both, w = r(t, k), r(t, 2 * k), packed(layout, n, k)
    ordered = list[int]()
    make = gemm.gemm

    def counted(*given: Any) -> list[Step]:
        steps = make(*given)
        ordered.append(len(steps) - 1)
        return steps

    monkeypatch.setattr(gemm, "gemm", counted)
    values = {0: x} | ({6: both} if maker == GATED else {5: x} if maker == PLAIN else {})
    in_tiles = run(gpu, text, values, {"w": w}, T=t)
    monkeypatch.setattr(code, "in_tiles", lambda *given: {})
    apart = run(gpu, text, values, {"w": w}, T=t)
    assert ordered == [int(maker == BY_ODD_HEADS), 1]
    assert bits(in_tiles, 1) == bits(apart, 1) and guard_intact(in_tiles)
    want = apart.read(3)[:t].astype(np.float64) @ weights(layout, w, n, k).T.astype(np.float64)
    close(in_tiles.read(1), want.astype(np.float32))


@pytest.mark.parametrize("second", ["q4m.16x32", "q8.16x32"])
def test_weights_that_want_another_order_have_their_own(
    gpu: CudaDevice, launched: list[Step], second: str
) -> None:
    """Two products of one input: both take its tiles, or neither does."""
    n, k, t = 48, 128, 17
    text = product("q4.16x32", n, k, "").replace(
        "block w", f"slot %6 cpu:0 f32[T,{n}]\nblock v cpu:0 lo=0 hi={n} bytes=0\nblock w", 1
    )
    text = f"weight v f32[{n},{k}] sources=[v] layout={second}\n" + text
    text += f'dispatch {AT} kernel=linear.{second} args=[%3,@v] dst=%6 numerics="{LINEAR_BF16}"\n'
    x, w, v = r(t, k), packed("q4.16x32", n, k), packed(second, n, k)
    memory = run(gpu, text, {0: x}, {"w": w, "v": v}, T=t)
    for out, layout, data in ((1, "q4.16x32", w), (6, second, v)):
        want = bf16(x).astype(np.float64) @ weights(layout, data, n, k).T.astype(np.float64)
        close(memory.read(out), want.astype(np.float32))
    assert len(launched) == 2 and guard_intact(memory)


@pytest.mark.parametrize("t", [9, 40])
def test_attention_writes_tiles(
    gpu: CudaDevice, launched: list[Step], monkeypatch: pytest.MonkeyPatch, t: int
) -> None:
    heads, d, n, pages = 4, 32, 40, 12
    text = attention_text(
        heads, 2, d, d, ",causal=true,window=0,softcap=0.0", numerics=ATTENTION_BF16, pages="S,M"
    )
    text = f"weight w f32[{n},{heads * d}] sources=[w] layout=q4.16x32\n" + text.replace(
        "block sinks", f"slot %7 cpu:0 bf16[32*ceildiv(T,32),{heads * d}]\nslot %8 cpu:0 f32[T,{n}]\n"
        f"block w cpu:0 lo=0 hi={n} bytes=0\nblock sinks", 1,
    )  # fmt: skip
    text += f"quantize {AT} src=%6 dst=%7 scheme=bf16\n"
    text += f'dispatch {AT} kernel=linear.q4.16x32 args=[%7,@w] dst=%8 numerics="{LINEAR_BF16}"\n'
    table = RNG.permutation(pages)[None].astype(np.int32)
    values = {
        0: r(t, heads * d),
        1: r(t, 2 * d),
        2: r(t, 2 * d),
        3: np.arange(100, 100 + t),
        4: np.zeros(t),
        5: table,
    }
    blocks, state = {"sinks": f32(r(heads)), "w": packed("q4.16x32", n, heads * d)}, r(pages, 2, 2, 16, d)
    sizes: dict[str, Any] = {"T": t, "S": 1, "M": pages, "P": pages}
    first = run(gpu, text, values, blocks, state, **sizes)
    monkeypatch.setattr(code, "in_tiles", lambda *given: {})
    assert bits(run(gpu, text, values, blocks, state, **sizes), 8) == bits(first, 8)
    agree(gpu, text, values, 8, blocks, state=state, tolerance=6e-3, **sizes)
    assert len(launched) == 3


def bits(memory: DeviceMemory, slot: int) -> bytes:
    return memory.read(slot).tobytes()


@pytest.mark.parametrize(
    "layout,processors,n,t",
    [("q4.16x32", 1, 272, 19), ("q4.16x32", 7, 272, 19), ("q4m.16x32", 3, 272, 19), ("q8.16x32", 60, 272, 19),
     ("q4.16x32", 3, 80, 130)],
)  # fmt: skip
def test_any_number_of_blocks_shares_the_work(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, layout: str, processors: int, n: int, t: int
) -> None:
    """Several tiles for a block, several blocks for a tile, more blocks than work; the same in every step and
    in whatever order warps run, with the smallest ring."""
    k = 704
    x, w = r(t, k), packed(layout, n, k)
    on(monkeypatch, gpu, processors, shared=(99 if t < 64 else 140) * KIB, groups=t > 64)
    text = product(layout, n, k, "")
    first = run(gpu, text, {0: x}, {"w": w}, T=t, times=2)
    want = bf16(x).astype(np.float64) @ weights(layout, w, n, k).T.astype(np.float64)
    close(first.read(1), want.astype(np.float32))
    for down, late in [(1, -1), (0, 8), (1, 3)]:
        in_turns(gpu, down, late)
        again = run(gpu, text, {0: x}, {"w": w}, T=t)
        in_turns(gpu, 0, -1)
        assert bits(again, 1) == bits(first, 1), (down, late)
