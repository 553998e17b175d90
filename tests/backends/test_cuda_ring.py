"""Products whose weights pass through a ring in shared memory: its sizes, and the same bits in whatever order
warps run, however small the ring, and on however many processors."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from flashrt.backends.cuda import CudaDevice, linear
from flashrt.backends.cuda.operands import Limits, Matrix, Operands
from flashrt.errors import PlanError
from flashrt.ir.ops import LINEAR_BF16, LINEAR_EXACT, LINEAR_I8
from flashrt.layouts import LAYOUTS, U8, pack_plain
from tests.backends.cpu_streams import packed
from tests.backends.cuda_streams import F32, agree, in_turns, run
from tests.backends.kernel_texts import AT, linear_text

RNG = np.random.default_rng(7)
EXACT = 'numerics="acc=f32"'
KIB = 1 << 10


# ---- sizes -----------------------------------------------------------------------------
def block(layout: str, k: int, rows: int, numerics: str, shared: int) -> linear.Block:
    limits = Limits(processors=132, shared=shared, shared_all=shared + KIB)
    ops = SimpleNamespace(limits=limits, device="gpu:0")
    return linear.block_of(Matrix(0, 64, k, LAYOUTS[layout]), rows, numerics, cast(Operands, ops))


def room(layout: str, k: int, tokens: int, numerics: str) -> int:
    return linear.room(Matrix(0, 64, k, LAYOUTS[layout]), tokens, numerics)


def most(layout: str) -> int:
    """Bytes of a slot."""
    return linear.PLAIN_SLOT if layout == "bf16" else linear.SLOT


def tight(layout: str, k: int, tokens: int, numerics: str) -> int:
    """Bytes of shared memory with which a block has two of the smallest slots."""
    least = linear.ring_bytes(linear.slot_bytes(layout, linear.WARPS), 2)
    return room(layout, k, tokens, numerics) + least


@pytest.mark.parametrize("shared", [99 * KIB, 163 * KIB, 227 * KIB], ids=["consumer", "A100", "H100"])
@pytest.mark.parametrize("numerics", [LINEAR_EXACT, LINEAR_BF16, LINEAR_I8])
@pytest.mark.parametrize("layout", linear.NAMES)
def test_a_ring_fits_beside_what_a_block_keeps(layout: str, numerics: str, shared: int) -> None:
    for k in (32, 576, 2080, 4096, 8192, 14336):
        if tight(layout, k, 1, numerics) > shared:
            assert (layout, k, numerics, shared) == ("bf16", 14336, LINEAR_EXACT, 99 * KIB)
            continue
        for rows in range(1, 33):
            found = block(layout, k, rows, numerics, shared)
            kept = room(layout, k, found.tokens, numerics)
            assert kept + linear.ring_bytes(found.slot, found.depth) == found.shared <= shared
            assert 2 <= found.depth <= linear.DEPTH
            assert found.span % linear.WARPS == 0
            assert linear.slot_bytes(layout, found.span) <= found.slot <= most(layout)
            assert found.slot % 128 == 0
            assert found.tokens * found.digits <= min(8 * found.tile, linear.COLUMNS)
            # one more slot, if the ring may have it, has no room
            assert found.depth == linear.DEPTH or found.shared + found.slot > shared


@pytest.mark.parametrize("layout", linear.NAMES)
def test_slots_share_a_row_evenly(layout: str) -> None:
    for k in range(32, 20000, 32 * 7):
        for slot in (linear.slot_bytes(layout, linear.WARPS), 20000, most(layout)):
            span, blocks = linear.span_of(layout, k, slot), -(-k // 32)
            turns = -(-blocks // span)
            assert linear.slot_bytes(layout, span) <= slot
            assert span * turns - blocks < linear.WARPS * turns  # none has a whole round too many
            assert span <= -(-blocks // linear.WARPS) * linear.WARPS


def test_a_product_that_is_too_wide_is_refused() -> None:
    with pytest.raises(PlanError, match="bytes of shared memory"):
        block("bf16", 32 << 10, 1, LINEAR_EXACT, 99 * KIB)


# ---- the kernels -----------------------------------------------------------------------
def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def f32(x: Any) -> U8:
    return pack_plain(LAYOUTS["f32"], np.asarray(x, np.float32))


def mlp(layout: str, n: int, k: int, numerics: str) -> str:
    """rms_norm of %0, its rounding, one product for gate and up, gated into %4: one kernel."""
    scheme = {LINEAR_BF16: "bf16", LINEAR_I8: "i8/32"}.get(numerics, "")
    rounded = {"bf16": f"bf16[32*ceildiv(T,32),{k}]", "i8/32": f"u8[T,{k + k // 8}]", "": f"f32[T,{k}]"}
    quantize = f"quantize {AT} src=%1 dst=%2 scheme={scheme}\n" if scheme else ""
    x = "%2" if scheme else "%1"
    return f"""weight w f32[{2 * n},{k}] sources=[w] layout={layout}
weight b f32[{k}] sources=[b] layout=f32
slot %0 cpu:0 f32[T,{k}]
slot %1 cpu:0 f32[T,{k}]
slot %2 cpu:0 {rounded[scheme]}
slot %3 cpu:0 f32[T,{2 * n}]
slot %4 cpu:0 f32[T,{n}]
block w cpu:0 lo=0 hi={2 * n} bytes=0
block b cpu:0 lo=0 hi={k} bytes=0
dispatch {AT} kernel=rms_norm args=[%0,@b] dst=%1 attrs={{eps=1e-05,width={k},offset=1}} {EXACT}
{quantize}dispatch {AT} kernel=linear.{layout} args=[{x},@w] dst=%3 numerics="{numerics}"
dispatch {AT} kernel=gated args=[%3[0:{n}],%3[{n}:{2 * n}]] dst=%4 attrs={{act="silu"}} {EXACT}
"""


def same_bits(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, text: str, values: Any, out: int, blocks: Any,
    shared: int, rows: int,
) -> None:  # fmt: skip
    """What a slot has with two of the smallest slots, on few processors, in several orders of the warps."""
    driver = device.driver
    want = run(device, text, values, blocks, T=rows).read(out)
    assert np.isfinite(want).all()
    orders = [(1, 0, -1), (2, 1, -1), (3, 0, 16), (1, 1, 16), (1, 0, 17), (1, 0, 19), (1, 0, 5)]
    for processors, down, late in orders:
        monkeypatch.setattr(driver, "limits", replace(driver.limits, processors=processors, shared=shared))
        in_turns(device, down, late)
        got = run(device, text, values, blocks, T=rows).read(out)
        in_turns(device, 0, -1)
        assert got.tobytes() == want.tobytes(), (processors, down, late)


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("layout", linear.NAMES)
def test_bias_and_residual(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, layout: str, t: int) -> None:
    """Channels that fill no tile, inputs that fill no slot, and more slots than the ring has."""
    n, k = 75, 1632
    text = linear_text(layout, n, k, "+bias+residual", f'numerics="{LINEAR_EXACT}"')
    values, blocks = {0: r(t, k), 2: r(t, n)}, {"w": packed(layout, n, k), "b": f32(r(n))}
    agree(gpu, text, values, 1, blocks, T=t)
    same_bits(gpu, monkeypatch, text, values, 1, blocks, tight(layout, k, t, LINEAR_EXACT), t)


@pytest.mark.parametrize(
    "layout,numerics,t,tolerance",
    [
        ("q4.16x32", LINEAR_EXACT, 1, 4e-6), ("q4m.16x32", LINEAR_EXACT, 2, 4e-6),
        ("q8.16x32", LINEAR_EXACT, 2, 4e-6), ("bf16", LINEAR_EXACT, 2, 4e-6),
        ("bf16", LINEAR_BF16, 8, 4e-3), ("q4.16x32", LINEAR_BF16, 4, 4e-3),
        ("q4m.16x32", LINEAR_I8, 8, 4e-6), ("q8.16x32", LINEAR_I8, 1, 4e-6),
        ("q4.16x32", LINEAR_EXACT, 11, 4e-6), ("q4m.16x32", LINEAR_EXACT, 9, 4e-6),
        ("bf16", LINEAR_EXACT, 10, 4e-6), ("bf16", LINEAR_BF16, 12, 4e-3),
        ("q4.16x32", LINEAR_I8, 33, 4e-6), ("q8.16x32", LINEAR_I8, 9, 4e-6),
    ],
)  # fmt: skip
def test_norm_and_gate(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, layout: str, numerics: str, t: int, tolerance: float
) -> None:
    """Both halves of a tile, one after the other with bf16, and several tiles for a block. Of more than 8
    tokens, a kernel in front normalises and rounds."""
    n, k = 48, 1120
    text = mlp(layout, n, k, numerics)
    values, blocks = {0: r(t, k)}, {"w": packed(layout, 2 * n, k), "b": f32(0.1 * r(k))}
    agree(gpu, text, values, 4, blocks, T=t, tolerance=tolerance)
    at_once = block(layout, k, t, numerics, gpu.driver.limits.shared).tokens
    same_bits(gpu, monkeypatch, text, values, 4, blocks, tight(layout, k, at_once, numerics), t)


# ---- several products in one kernel ------------------------------------------------------
@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products each kernel has."""
    found, make = list[int](), linear._chain

    def kept(some: Any, ops: Operands) -> Any:
        found.append(len(some))
        return make(some, ops)

    monkeypatch.setattr(linear, "_chain", kept)
    return found


def layer(layout: str, n: int, k: int, numerics: str) -> str:
    """%0 → product + %0 = %1 → normalised, gate and up, gated = %4 → product + %1 = %5 → product = %6."""
    exact = f'numerics="{numerics}"'
    residual = "attrs={residual=true}"
    return f"""weight o f32[{k},{k}] sources=[o] layout={layout}
weight w f32[{2 * n},{k}] sources=[w] layout={layout}
weight d f32[{k},{n}] sources=[d] layout={layout}
weight h f32[{3 * n},{k}] sources=[h] layout={layout}
weight b f32[{k}] sources=[b] layout=f32
slot %0 cpu:0 f32[T,{k}]
slot %1 cpu:0 f32[T,{k}]
slot %2 cpu:0 f32[T,{k}]
slot %3 cpu:0 f32[T,{2 * n}]
slot %4 cpu:0 f32[T,{n}]
slot %5 cpu:0 f32[T,{k}]
slot %6 cpu:0 f32[T,{3 * n}]
block o cpu:0 lo=0 hi={k} bytes=0
block w cpu:0 lo=0 hi={2 * n} bytes=0
block d cpu:0 lo=0 hi={k} bytes=0
block h cpu:0 lo=0 hi={3 * n} bytes=0
block b cpu:0 lo=0 hi={k} bytes=0
dispatch {AT} kernel=linear.{layout}+residual args=[%0,@o,%0] dst=%1 {residual} {exact}
dispatch {AT} kernel=rms_norm args=[%1,@b] dst=%2 attrs={{eps=1e-05,width={k},offset=1}} {EXACT}
dispatch {AT} kernel=linear.{layout} args=[%2,@w] dst=%3 {exact}
dispatch {AT} kernel=gated args=[%3[0:{n}],%3[{n}:{2 * n}]] dst=%4 attrs={{act="silu"}} {EXACT}
dispatch {AT} kernel=linear.{layout}+residual args=[%4,@d,%1] dst=%5 {residual} {exact}
dispatch {AT} kernel=linear.{layout} args=[%5,@h] dst=%6 {exact}
"""


@pytest.mark.parametrize("layout,t", [("q4.16x32", 1), ("q4m.16x32", 3), ("q8.16x32", 1)])
def test_products_in_one_kernel_have_the_bits_of_several(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, joined: list[int], layout: str, t: int
) -> None:
    """Blocks with no tile of a product, with one, and with several; in several orders of blocks and warps."""
    n, k = 160, 96
    text = layer(layout, n, k, LINEAR_EXACT)
    values = {0: r(t, k)}
    rows = {"o": (k, k), "w": (2 * n, k), "d": (k, n), "h": (3 * n, k)}
    blocks = {name: packed(layout, *shape) for name, shape in rows.items()} | {"b": f32(0.1 * r(k))}
    with monkeypatch.context() as apart:
        apart.setattr(linear, "_alike", lambda some, other: False)
        several = agree(gpu, text, values, 6, blocks, T=t).tobytes()
    joined.clear()
    for _ in range(2):  # words that blocks count in are as they were
        assert run(gpu, text, values, blocks, T=t).read(6).tobytes() == several
    assert set(joined) == {4}
    same_bits(gpu, monkeypatch, text, values, 6, blocks, tight(layout, n, t, LINEAR_EXACT), t)
    # a block that has no tile of some products, and whose first, copying or last warp comes late
    monkeypatch.setattr(gpu.driver, "limits", replace(gpu.driver.limits, processors=4))
    for late in (0, 16, 17):
        in_turns(gpu, 0, late, 3)
        got = run(gpu, text, values, blocks, T=t).read(6)
        in_turns(gpu, 0, -1)
        assert got.tobytes() == several, late


def test_products_of_other_numerics_have_kernels_of_their_own(gpu: CudaDevice, joined: list[int]) -> None:
    """Though it is the same kernel for one token."""
    n, k = 64, 96
    exact, i8 = (f'numerics="{numerics}"' for numerics in (LINEAR_EXACT, LINEAR_I8))
    text = f"""weight w f32[{k},{k}] sources=[w] layout=q4.16x32
weight v f32[{n},{k}] sources=[v] layout=q4.16x32
slot %0 cpu:0 f32[T,{k}]
slot %1 cpu:0 f32[T,{k}]
slot %2 cpu:0 u8[T,{k + k // 8}]
slot %3 cpu:0 f32[T,{n}]
block w cpu:0 lo=0 hi={k} bytes=0
block v cpu:0 lo=0 hi={n} bytes=0
dispatch {AT} kernel=linear.q4.16x32 args=[%0,@w] dst=%1 {exact}
quantize {AT} src=%1 dst=%2 scheme=i8/32
dispatch {AT} kernel=linear.q4.16x32 args=[%2,@v] dst=%3 {i8}
"""
    blocks = {"w": packed("q4.16x32", k, k), "v": packed("q4.16x32", n, k)}
    agree(gpu, text, {0: r(1, k)}, 3, blocks, T=1, tolerance=4e-3)
    assert joined == [1, 1]
