"""One block of 32 of an INT8 product: its quants as bytes, and its integer sums onto float32 totals.

Shared by the dot products of vnni.py and the tiles of amx_i8.py, so that they give the same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from flashrt.backends.cpu.intrinsics import F32, I32, I64
from flashrt.backends.cpu.tiles import VH, Totals, ints, load_at
from flashrt.backends.cpu.vector import LANES, VI, V, muladd, splat


def unsigned(b: ir.IRBuilder, q: ir.Value, j: int, bits: int) -> list[tuple[int, ir.Value]]:
    """(k, bytes of 16 channels × 4 k) of the j-th 64 bytes of a block; see flashrt/layouts.py."""
    words = load_at(b, q, VI, 64 * j, 4)
    if bits == 8:
        return [(4 * j, b.xor(words, ints(-0x7F7F7F80)))]
    nibbles = ints(0x0F0F0F0F)
    return [(8 * j, b.and_(words, nibbles)), (8 * j + 4, b.and_(b.lshr(words, ints(4)), nibbles))]


def block_scales(b: ir.IRBuilder, s: ir.Value, m: ir.Value, block: ir.Value, minimum: bool) -> Any:
    """Scales of 16 channels, and their minima or None, of a block."""
    per_block = b.mul(block, I64(2 * LANES))
    scale = b.fpext(load_at(b, b.add(s, per_block), VH), V)
    return scale, b.fpext(load_at(b, b.add(m, per_block), VH), V) if minimum else None


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
