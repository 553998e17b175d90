"""One block of an INT8 product: its quants as bytes, and its integer sums onto float32 totals.

Shared by the dot products of vnni.py and the tiles of amx_i8.py, so that they give the same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from flashrt.backends.cpu.intrinsics import F32, I32, I64
from flashrt.backends.cpu.tiles import Totals, ints, load_at, numbers, shifted
from flashrt.backends.cpu.vector import LANES, VI, V, muladd, splat
from flashrt.layouts import Layout


def unsigned(b: ir.IRBuilder, q: ir.Value, j: int, layout: Layout) -> list[tuple[int, ir.Value]]:
    """(k, bytes of 16 channels × 4 k) of the j-th 64 bytes from q; see flashrt/layouts.py."""
    words = load_at(b, q, VI, 64 * j, 4)
    if layout.bits == 8:
        return [(4 * j, words if layout.minimum else shifted(b, words))]
    nibbles = ints(0x0F0F0F0F)
    return [(8 * j, b.and_(words, nibbles)), (8 * j + 4, b.and_(b.lshr(words, ints(4)), nibbles))]


def block_scales(b: ir.IRBuilder, s: ir.Value, m: ir.Value, block: ir.Value, layout: Layout) -> Any:
    """Scales of 16 channels, and their minima or None, of a block of `layout.block`."""
    per_block = b.mul(block, I64(layout.number.itemsize * LANES))
    scale = numbers(b, b.add(s, per_block), layout)
    return scale, numbers(b, b.add(m, per_block), layout) if layout.minimum else None


def add_block(
    b: ir.IRBuilder,
    totals: Totals,
    t: int,
    dot: ir.Value,
    weights: Any,
    scale_at: Any,
    total_at: Any,
    minimum: bool,
) -> None:
    """One block of one token: its integer sums, scaled, onto the totals; see the top of vnni.py."""
    scale, least = weights
    a_scale = splat(b, load_at(b, scale_at, F32, 0, 4))
    if minimum:
        total = splat(b, load_at(b, total_at, F32, 0, 4))
        totals.add(t, a_scale, muladd(b, b.sitofp(dot, V), scale, b.fmul(least, total)))
    else:
        dot = b.sub(dot, splat(b, load_at(b, total_at, I32, 0, 4)))
        totals.add(t, b.sitofp(dot, V), b.fmul(scale, a_scale))
