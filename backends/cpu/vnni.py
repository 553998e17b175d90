"""Products of packed weights with INT8 activations: numerics "act=i8/32 acc=f32".

The sum over a block, the weights that share a scale, is taken in integers, so it is exact however it is
taken: with AVX512-VNNI's four-byte dot product, in AMX tiles when there are several tokens (amx_i8.py),
or with plain multiplications on any other processor.
Blocks are then added in their order, in float32: so neither the processor nor the number of
tokens, threads or channels beside a value changes a bit of it.

    q4              y += (Σ q·a - 8·Σ a) · (scale · a_scale)
    q8, q8f         y += (Σ (q+128)·a - 128·Σ a) · (scale · a_scale)
    with a minimum  y += (scale · Σ q·a + min · Σ a) · a_scale

A token's activations are laid out anew before the loop ("prepared"): whole blocks of 32 bytes with
zeros behind the last one, the scales f32[blocks of 32], and Σ a of each block, as it is needed above.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from flashrt.backends.cpu.amx import tiles_off
from flashrt.backends.cpu.amx_i8 import tile_group, tiles_i8_on
from flashrt.backends.cpu.blocks import add_block, block_scales, unsigned
from flashrt.backends.cpu.intrinsics import (
    F32,
    I8,
    I32,
    I64,
    at,
    copy_bytes,
    inner,
    intrinsic,
    operand,
    stack,
    word,
)
from flashrt.backends.cpu.linear import Kernel, L, finish, zero
from flashrt.backends.cpu.rows import RUN, SUM_BLOCKS, TILED, i8_row_bytes
from flashrt.backends.cpu.share import next_channels, product_run, product_runs
from flashrt.backends.cpu.tiles import Totals, ints, load_at, parts, prefetch_ahead, words
from flashrt.backends.cpu.vector import LANES, VI, call, load_whole, splat
from flashrt.layouts import BLOCK, LAYOUTS, Layout

row_bytes = inner(i8_row_bytes)


def _multiplied(b: ir.IRBuilder, total: ir.Value, q: ir.Value, a: ir.Value) -> ir.Value:
    """The four-byte dot product in plain arithmetic: q holds unsigned bytes, a (one word) signed ones."""
    for i in range(4):
        unsigned = b.and_(b.lshr(q, ints(8 * i)), ints(255))
        signed = b.ashr(b.shl(a, I32(24 - 8 * i)), I32(24))
        total = b.add(total, b.mul(unsigned, splat(b, signed)))
    return total


def _dot(b: ir.IRBuilder, total: ir.Value, q: ir.Value, a: ir.Value, vnni: bool) -> ir.Value:
    """Each lane of `total` plus the products of its four bytes of q with the four bytes of a."""
    if not vnni:
        return _multiplied(b, total, q, a)
    return call(b, "llvm.x86.avx512.vpdpbusd.512", VI, total, q, splat(b, a))


@cache
def dot_tile(layout: Layout, tokens: int, vnni: bool) -> Any:
    """tile(q, s, m, blocks, a, a_stride, acc): adds 16 channels × `tokens` over `blocks` blocks of 32.

    q, s, m: addresses of a group's quants, scales and minima. a: address of prepared activations,
    a_stride bytes from token to token. acc: f32[tokens][16], read and written.
    """
    chains = 2 if tokens == 1 else 1  # integers may be added in any order: whatever hides the latency
    count = parts(layout)

    @intrinsic
    def tile(typing, q, s, m, blocks, a, a_stride, acc):
        def codegen(context, b, signature, args):
            q, s, m, blocks, a, a_stride, acc = args
            rows = [b.add(a, b.mul(a_stride, I64(t))) for t in range(tokens)]
            scales = [b.add(row, b.mul(blocks, I64(BLOCK))) for row in rows]
            sums = [b.add(row, b.mul(blocks, I64(BLOCK + 4))) for row in rows]
            totals = Totals(b, acc, tokens)
            with cgutils.for_range(b, blocks) as loop:
                block = b.add(q, b.mul(loop.index, I64(layout.quant_bytes)))
                a_bytes = b.mul(loop.index, I64(BLOCK))
                at_a = [b.add(row, a_bytes) for row in rows]
                prefetch_ahead(b, q, loop.index, layout.block_bytes)
                for part in range(count):
                    dots = [[ints(0)] * chains for _ in range(tokens)]
                    for j in words(layout, part):
                        for k, w in unsigned(b, block, j, layout):
                            for t in range(tokens):
                                four, chain = load_at(b, at_a[t], I32, k, 4), k // 4 % chains
                                dots[t][chain] = _dot(b, dots[t][chain], w, four, vnni)
                    unit = b.add(b.mul(loop.index, I64(count)), I64(part))
                    weights = block_scales(b, s, m, unit, layout)
                    of_block, of_unit = b.mul(loop.index, I64(4)), b.mul(unit, I64(4))
                    for t in range(tokens):
                        dot = b.add(*dots[t]) if chains == 2 else dots[t][0]
                        places = b.add(scales[t], of_block), b.add(sums[t], of_unit)
                        add_block(b, totals, t, dot, weights, *places, layout.minimum)
            totals.store()
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


@cache
def store_sum(times: int, as_float: bool, count: int) -> Any:
    """store(dst, src): `times` Σ of `count` signed bytes, 16 or 32, as an int32 or a float32."""

    @intrinsic
    def store(typing, dst, src):
        def codegen(context, b, signature, args):
            bytes_at = range(0, count, LANES)
            wide = [b.sext(load_at(b, args[1], ir.VectorType(I8, LANES), i, 1), VI) for i in bytes_at]
            wide = b.add(*wide) if len(wide) == 2 else wide[0]
            total = b.mul(call(b, "llvm.vector.reduce.add.v16i32", I32, wide), I32(times))
            value = b.sitofp(total, F32) if as_float else total
            b.store(value, at(b, args[0], value.type)).align = 4
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store


def preparation(layout: Layout) -> Any:
    """prepare(x, k, dst): one quantised row as the tiles read it; see the top of this file."""
    times = 1 if layout.minimum else 1 << layout.bits - 1
    store = store_sum(times, layout.minimum, layout.block)
    count, block = parts(layout), layout.block

    @inner
    def prepare(x, k, dst):
        blocks = (k + 31) >> 5
        if k & 31:
            zero(dst + (k >> 5) * 32, 1)
        copy_bytes(dst, x, k)
        copy_bytes(dst + 32 * blocks, x + k, 4 * blocks)
        for i in range(blocks * count):
            store(dst + 36 * blocks + 4 * i, dst + block * i)

    return prepare


def quantised_i8(name: str, vnni: bool, tiles: bool = False) -> Kernel:
    """The kernel of a packed layout with groups of 16 channels.

    tiles: AMX does the sums of TILED tokens and more.
    """
    layout = LAYOUTS[name]
    tile8, tile4, tile1 = (dot_tile(layout, tokens, vnni) for tokens in (8, 4, 1))
    tile_sums: Any = tile_group(layout) if tiles else None
    tiles_on: Any = tiles_i8_on(layout.block)
    prepare, scales = preparation(layout), parts(layout)
    quant_bytes, scale_bytes, block_bytes = layout.quant_bytes, layout.scale_bytes, layout.block_bytes

    @inner
    def add(tokens, q, s, m, blocks, a, stride, acc):
        if tokens == 8:
            tile8(q, s, m, blocks, a, stride, acc)
        elif tokens == 4:
            tile4(q, s, m, blocks, a, stride, acc)
        else:
            tile1(q, s, m, blocks, a, stride, acc)

    @inner
    def group(row, g, first, count, a, stride, acc):
        """16 channels of `count` tokens from `first`."""
        n, blocks = word(row, L.n), (word(row, L.k) + 31) >> 5
        q = operand(row, L.w_at, L.w) + g * blocks * block_bytes
        s = q + blocks * quant_bytes
        t = 0
        while t < count:
            left = count - t
            tokens = 8 if left >= 8 else (4 if left >= 4 else 1)
            zero(acc, tokens)
            add(tokens, q, s, s + scale_bytes * blocks, blocks, a + t * stride, stride, acc)
            for i in range(tokens):
                finish(row, load_whole(acc + 64 * i), first + t + i, 16 * g, n - 16 * g)
            t += tokens

    @inner
    def tiled_group(row, g, first, count, a, stride, acc, work):
        """The same of at most 16 tokens. work: room for the quants of SUM_BLOCKS blocks, then for sums."""
        n, blocks = word(row, L.n), (word(row, L.k) + 31) >> 5
        q = operand(row, L.w_at, L.w) + g * blocks * block_bytes
        s = q + blocks * quant_bytes
        zero(acc, count)
        sums = work + 512 * SUM_BLOCKS
        tile_sums(q, s, s + scale_bytes * blocks, blocks, a, stride, count, acc, work, sums)
        for i in range(count):
            finish(row, load_whole(acc + 64 * i), first + i, 16 * g, n - 16 * g)

    def kernel(tid, nth, row):
        n, k, t_count = word(row, L.n), word(row, L.k), word(row, L.t)
        groups, stride, group_bytes = (n + 15) >> 4, row_bytes(k, scales), ((k + 31) >> 5) * block_bytes
        a, acc = word(row, L.scratch) + tid * word(row, L.scratch_stride), stack(16 * 64)
        for run in range(product_runs(t_count, nth)):
            first, end = product_run(run, t_count, tid, nth)
            for t in range(first, end):
                prepare(word(row, L.x) + t * word(row, L.x_stride), k, a + (t - first) * stride)
            first_group, last_group = next_channels(row, groups, group_bytes, t_count, tid, nth, -1)
            while first_group < last_group:
                t = first
                if tiles:
                    while end - t >= TILED:
                        count = min(end - t, 16)
                        tiles_on(stack(64), count)
                        for g in range(first_group, last_group):
                            tiled_group(
                                row, g, t, count, a + (t - first) * stride, stride, acc, a + RUN * stride
                            )
                        tiles_off()
                        t += count
                if t < end:
                    for g in range(first_group, last_group):
                        group(row, g, t, end - t, a + (t - first) * stride, stride, acc)
                first_group, last_group = next_channels(
                    row, groups, group_bytes, t_count, tid, nth, last_group
                )

    return kernel
