"""Products of packed weights with bf16 activations in AMX tiles: numerics "act=bf16 acc=f32".

A tile holds 16 rows of 64 bytes. Weights are widened to scale·q (+ min), rounded to bf16 and laid
out for the tile product, one block of 32 k × 16 channels a tile, in a scratch of the thread: once
for all tokens. Then 32 tokens × 32 channels at a time, four tiles of sums, over all of K. A sum
takes its k in order, so it doesn't depend on the tokens and channels beside it.

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
from flashrt.backends.cpu.tiles import VH, decode, load_at
from flashrt.backends.cpu.vector import LANES, VI, V, call, load_whole, muladd, store_whole
from flashrt.layouts import BLOCK

TILE = 1024  # bytes
_SUMS, _TOKENS, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers
VW = ir.VectorType(I16, 2 * LANES)


def _tile(b: ir.IRBuilder, name: str, *args: Any) -> None:
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
        _tile(b, "ldtilecfg", at(b, args[0], I8))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def tiles_off(typing):
    """Gives the tiles back, so that a change of threads needn't save them."""

    def codegen(context, b, signature, args):
        _tile(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def tile_product(typing, x, x_stride, w, blocks, sums):
    """sums f32[32][32] = x bf16[32, 32·blocks] · w: two tiles a block; x_stride in bytes."""

    def codegen(context, b, signature, args):
        x, x_stride, w, blocks, sums = args
        below = b.mul(x_stride, I64(16))
        for tile in _SUMS:
            _tile(b, "tilezero", tile)
        with cgutils.for_range(b, blocks) as loop:
            at_x = b.add(x, b.mul(loop.index, I64(64)))
            at_w = b.add(w, b.mul(loop.index, I64(2 * TILE)))
            for i in range(2):
                _tile(b, "tileloadd64", _WEIGHTS[i], at(b, b.add(at_w, I64(TILE * i)), I8), I64(64))
            for i in range(2):
                _tile(b, "tileloadd64", _TOKENS[i], at(b, at_x, I8), x_stride)
                at_x = b.add(at_x, below)
                for j in range(2):
                    _tile(b, "tdpbf16ps", 2 * i + j, _TOKENS[i], _WEIGHTS[j])
        for tile in _SUMS:
            corner = b.add(sums, I64(16 * 128 * (tile // 2) + 64 * (tile % 2)))
            _tile(b, "tilestored64", tile, at(b, corner, I8), I64(128))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def _pairs(b: ir.IRBuilder, even: ir.Value, odd: ir.Value) -> ir.Value:
    """Each lane of both, rounded to bf16, side by side: one row of a weight tile."""
    # all of even, then all of odd
    apart = call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", VW, odd, even)
    order = [half + lane for lane in range(LANES) for half in (0, LANES)]
    return b.shuffle_vector(apart, apart, ir.Constant(ir.VectorType(I32, 2 * LANES), order))


@cache
def weight_tile(bits: int, minimum: bool) -> Any:
    """fill(dst, q, s, m): one block of 16 channels as a bf16 tile."""

    @intrinsic
    def fill(typing, dst, q, s, m):
        def codegen(context, b, signature, args):
            dst, q, s, m = args
            scale = b.fpext(load_at(b, s, VH), V)
            least = b.fpext(load_at(b, m, VH), V) if minimum else None
            for j in range(bits):
                weights = {
                    k: muladd(b, scale, value, least) if minimum else b.fmul(scale, value)
                    for k, value in decode(b, q, j, bits, minimum)
                }
                for k in sorted(weights)[::2]:
                    row = at(b, b.add(dst, I64(32 * k)), VW)
                    b.store(_pairs(b, weights[k], weights[k + 1]), row).align = 64
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return fill


def quantised_bf16(bits: int, minimum: bool) -> Kernel:
    """The kernel of a packed format with groups of 16 channels and blocks of 32."""
    fill = weight_tile(bits, minimum)
    quant_bytes = 16 * BLOCK * bits // 8
    block_bytes = quant_bytes + (64 if minimum else 32)

    @inner
    def fill_group(weights, blocks, dst):
        s = weights + blocks * quant_bytes
        m = s + 32 * blocks
        for i in range(blocks):
            fill(dst + 2 * TILE * i, weights + i * quant_bytes, s + 32 * i, m + 32 * i)

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

    def kernel(tid, nth, row):
        n, t_count, blocks = word(row, L.n), word(row, L.t), (word(row, L.k) + 31) >> 5
        weights, x_stride = operand(row, L.w_at, L.w), 2 * word(row, L.x_stride)
        tiles = word(row, L.scratch) + tid * word(row, L.scratch_stride)
        groups, sums = (n + 15) >> 4, stack(4096)
        pairs = (groups + 1) >> 1
        tiles_on(sums)
        for pair in range(pairs * tid // nth, pairs * (tid + 1) // nth):
            count = min(groups - 2 * pair, 2)
            for i in range(count):
                fill_group(weights + (2 * pair + i) * blocks * block_bytes, blocks, tiles + TILE * i)
            for first in range(0, t_count, 32):
                # the tiles of a second group that isn't there hold anything: nobody reads those sums
                tile_product(word(row, L.x) + first * x_stride, x_stride, tiles, blocks, sums)
                store_sums(row, sums, first, min(t_count - first, 32), 32 * pair)
        tiles_off()

    return kernel
