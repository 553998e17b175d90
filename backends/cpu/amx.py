"""Products of packed weights with bf16 activations in AMX tiles: numerics "act=bf16 acc=f32".

A tile holds 16 rows of 64 bytes. Weights are widened to scale·q (+ min), rounded to bf16 and laid
out for the tile product, one block of 32 k × 16 channels a tile, in a scratch of the thread: once
for all tokens of the thread, a chunk of K at a time. Then 16 tokens × 32 channels at a time, two
tiles of sums. A sum takes its k in order, so it doesn't depend on the tokens and channels beside it.

Object code with these instructions is only made where the processor has them and Linux lets us.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from flashrt.backends.cpu.intrinsics import (
    I8,
    I16,
    I32,
    I64,
    at,
    inner,
    intrinsic,
    operand,
    stack,
    word,
)
from flashrt.backends.cpu.linear import Kernel, L, finish
from flashrt.backends.cpu.rows import RUN, TILE, TILE_BLOCKS, TILE_RUNS
from flashrt.backends.cpu.share import channels_of, product_run, product_runs
from flashrt.backends.cpu.tiles import decode, numbers, parts
from flashrt.backends.cpu.vector import LANES, VI, call, load_whole, muladd, store_whole
from flashrt.layouts import LAYOUTS, Layout

# Tile registers. Four in use, not all eight: beside a busy hyper-thread the processor has few to rename,
# and a product of 2 × 2 tiles then takes twice as long as one of 1 × 2.
_SUMS, _TOKENS, _WEIGHTS = (0, 1), 2, 3
VW = ir.VectorType(I16, 2 * LANES)


def tile(b: ir.IRBuilder, name: str, *args: Any) -> None:
    """Calls an instruction on tiles; plain numbers are register numbers."""
    values = [I8(a) if isinstance(a, int) else a for a in args]
    kind = ir.FunctionType(ir.VoidType(), [v.type for v in values])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), values)


@intrinsic
def tiles_on(typing, config):
    """All tiles 16 rows of 64 bytes; config: address of 64 bytes that are overwritten."""

    def codegen(context, b, signature, args):
        words = [1] + [0] * 3 + [64 | 64 << 16] * 4 + [0] * 4 + [0x10101010] * 2 + [0] * 2
        b.store(ir.Constant(VI, words), at(b, args[0], VI)).align = 4
        tile(b, "ldtilecfg", at(b, args[0], I8))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def tiles_off(typing):
    """Gives the tiles back, so that a change of threads needn't save them."""

    def codegen(context, b, signature, args):
        tile(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def tile_product(typing, x, x_stride, w, blocks, sums, first):
    """sums f32[16][32] (+)= x bf16[16, 32·blocks] · w: two tiles a block; x_stride in bytes.

    first: 1 when the sums begin at zero.
    """

    def codegen(context, b, signature, args):
        x, x_stride, w, blocks, sums, first = args
        at_sums = [at(b, b.add(sums, I64(64 * i)), I8) for i in range(2)]
        with b.if_else(b.icmp_signed("!=", first, I64(0))) as (then, otherwise):
            with then:
                for i in range(2):
                    tile(b, "tilezero", _SUMS[i])
            with otherwise:
                for i in range(2):
                    tile(b, "tileloadd64", _SUMS[i], at_sums[i], I64(128))
        with cgutils.for_range(b, blocks) as loop:
            at_w = b.add(w, b.mul(loop.index, I64(2 * TILE)))
            tile(b, "tileloadd64", _TOKENS, at(b, b.add(x, b.mul(loop.index, I64(64))), I8), x_stride)
            for i in range(2):
                tile(b, "tileloadd64", _WEIGHTS, at(b, b.add(at_w, I64(TILE * i)), I8), I64(64))
                tile(b, "tdpbf16ps", _SUMS[i], _TOKENS, _WEIGHTS)
        for i in range(2):
            tile(b, "tilestored64", _SUMS[i], at_sums[i], I64(128))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def pairs(b: ir.IRBuilder, even: ir.Value, odd: ir.Value) -> ir.Value:
    """Each lane of both, rounded to bf16, side by side: one row of a weight tile."""
    # all of even, then all of odd
    apart = call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", VW, odd, even)
    order = [half + lane for lane in range(LANES) for half in (0, LANES)]
    return b.shuffle_vector(apart, apart, ir.Constant(ir.VectorType(I32, 2 * LANES), order))


@cache
def weight_tile(layout: Layout) -> Any:
    """fill(dst, q, s, m): one block of 32 k × 16 channels as a bf16 tile."""

    @intrinsic
    def fill(typing, dst, q, s, m):
        def codegen(context, b, signature, args):
            dst, q, s, m = args
            places = [I64(LANES * layout.number.itemsize * part) for part in range(parts(layout))]
            scales = [numbers(b, b.add(s, place), layout) for place in places]
            minima = [numbers(b, b.add(m, place), layout) for place in places] if layout.minimum else []
            for j in range(layout.bits):
                weights = {}
                for k, value in decode(b, q, j, layout):
                    scale = scales[k // layout.block]
                    if minima:
                        weights[k] = muladd(b, scale, value, minima[k // layout.block])
                    else:
                        weights[k] = b.fmul(scale, value)
                for k in sorted(weights)[::2]:
                    row = at(b, b.add(dst, I64(32 * k)), VW)
                    b.store(pairs(b, weights[k], weights[k + 1]), row).align = 64
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return fill


def quantised_bf16(name: str) -> Kernel:
    """The kernel of a packed layout with groups of 16 channels."""
    layout = LAYOUTS[name]
    fill = weight_tile(layout)
    quant_bytes, scale_bytes, block_bytes = layout.quant_bytes, layout.scale_bytes, layout.block_bytes

    @inner
    def store_sums(row, sums, first, tokens, channel):
        """Sums of up to 32 tokens × 32 channels, with their epilogue."""
        n, residual = word(row, L.n), word(row, L.residual)
        bias, y_stride = operand(row, L.bias_at, L.bias), 4 * word(row, L.y_stride)
        if bias != 0 or n - channel < 32:
            for t in range(tokens):
                for c in range(channel, min(n, channel + 32), 16):
                    finish(row, load_whole(sums + 128 * t + 4 * (c - channel)), first + t, c, n - c)
            return
        y = word(row, L.y) + first * y_stride + 4 * channel
        more_stride = 4 * word(row, L.residual_stride)
        more = residual + first * more_stride + 4 * channel
        for t in range(tokens):
            low, high = load_whole(sums + 128 * t), load_whole(sums + 128 * t + 64)
            if residual != 0:
                low, high = low + load_whole(more), high + load_whole(more + 64)
                more += more_stride
            store_whole(y, low)
            store_whole(y + 64, high)
            y += y_stride

    @inner
    def fill_pair(row, pair, from_block, count, tiles):
        """`count` blocks of two groups as tiles, those of a block side by side."""
        blocks = (word(row, L.k) + 31) >> 5
        for i in range(min(((word(row, L.n) + 15) >> 4) - 2 * pair, 2)):
            group = operand(row, L.w_at, L.w) + (2 * pair + i) * blocks * block_bytes
            q, s = group + from_block * quant_bytes, group + blocks * quant_bytes + scale_bytes * from_block
            m = s + scale_bytes * blocks
            for c in range(count):
                at = scale_bytes * c
                fill(tiles + TILE * (2 * c + i), q + c * quant_bytes, s + at, m + at)

    @inner
    def some_runs(row, pair, begin, end, tid, nth, tiles):
        """32 channels for runs [begin, end) of tokens, at most TILE_RUNS.

        The tiles of a second group that isn't there hold anything: nobody reads those sums.
        """
        tokens, blocks, x_stride = word(row, L.t), (word(row, L.k) + 31) >> 5, 2 * word(row, L.x_stride)
        sums = tiles + 2 * TILE * TILE_BLOCKS
        for block in range(0, blocks, TILE_BLOCKS):
            count, x = min(blocks - block, TILE_BLOCKS), word(row, L.x) + 64 * block
            fill_pair(row, pair, block, count, tiles)
            for run in range(begin, end):
                first, last = product_run(run, tokens, tid, nth)
                for t in range(first, last, 16):
                    at = sums + 128 * (RUN * (run - begin) + t - first)
                    tile_product(x + t * x_stride, x_stride, tiles, count, at, types.int64(block == 0))
        for run in range(begin, end):
            first, last = product_run(run, tokens, tid, nth)
            store_sums(row, sums + 128 * RUN * (run - begin), first, last - first, 32 * pair)

    def kernel(tid, nth, row):
        tiles, tokens = word(row, L.scratch) + tid * word(row, L.scratch_stride), word(row, L.t)
        first, last = channels_of((word(row, L.n) + 31) >> 5, tokens, tid, nth)
        runs = product_runs(tokens, nth)
        tiles_on(stack(64))
        for pair in range(first, last):
            for begin in range(0, runs, TILE_RUNS):
                some_runs(row, pair, begin, min(begin + TILE_RUNS, runs), tid, nth, tiles)
        tiles_off()

    return kernel
