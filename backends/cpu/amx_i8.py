"""INT8 products in AMX tiles, for several tokens: the same numerics and bits as vnni.py.

A block, the 32 or 16 k that share a scale, is half a tile or a quarter: one product gives the sums of 16
channels for up to 16 tokens, in integers. They are then scaled and added block by block, as vnni.py does it
for one token.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from flashrt.backends.cpu.amx import tile
from flashrt.backends.cpu.blocks import add_block, block_scales, unsigned
from flashrt.backends.cpu.intrinsics import I8, I64, at, inner, intrinsic
from flashrt.backends.cpu.rows import SUM_BLOCKS, TILE
from flashrt.backends.cpu.tiles import Totals, load_at, parts, prefetch_ahead
from flashrt.backends.cpu.vector import VI
from flashrt.layouts import Layout

_SUMS, _TOKENS, _WEIGHTS = (0, 1), (2, 3), (4, 5)  # tile registers


@cache
def tiles_i8_on(block: int) -> Any:
    """on(config, tokens): tiles of sums and tokens have `tokens` rows, those of tokens `block` bytes in each.

    config: address of 64 bytes that are overwritten.
    """

    @intrinsic
    def on(typing, config, tokens):
        def codegen(context, b, signature, args):
            config, tokens = args
            b.store(ir.Constant(VI, [1, *[0] * 15]), at(b, config, VI)).align = 4
            eight = ir.IntType(8)
            for register in (*_SUMS, *_TOKENS, *_WEIGHTS):
                wide = block if register in _TOKENS else 64  # bytes of a row
                b.store(ir.IntType(16)(wide), at(b, b.add(config, I64(16 + 2 * register)), ir.IntType(16)))
                rows = eight(block // 4) if register in _WEIGHTS else b.trunc(tokens, eight)
                b.store(rows, at(b, b.add(config, I64(48 + register)), eight))
            tile(b, "ldtilecfg", at(b, config, I8))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return on


@cache
def spread_weights(layout: Layout) -> Any:
    """spread(dst, q, first, count): `count` blocks of a group's quants, from block `first` on, as unsigned
    bytes: rows of 4 k × 16 channels.
    """
    nbytes = layout.quant_bytes // parts(layout)

    @intrinsic
    def spread(typing, dst, q, first, count):
        def codegen(context, b, signature, args):
            dst, q, first, count = args
            with cgutils.for_range(b, count) as loop:
                block = b.add(first, loop.index)
                prefetch_ahead(b, q, block, layout.block_bytes // parts(layout))
                source = b.add(q, b.mul(block, I64(nbytes)))
                target = b.add(dst, b.mul(loop.index, I64(16 * layout.block)))
                for j in range(nbytes // 64):
                    for k, words in unsigned(b, source, j, layout):
                        b.store(words, at(b, b.add(target, I64(16 * k)), VI)).align = 64
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return spread


@cache
def block_sums(block: int) -> Any:
    """sums(a, a_stride, w, blocks, to): i32[blocks][16][16] = a i8[tokens, block·blocks] · w, block by block;
    see `spread_weights`."""

    @intrinsic
    def sums(typing, a, a_stride, w, blocks, to):
        def codegen(context, b, signature, args):
            a, a_stride, w, blocks, to = args

            def one(index: ir.Value, way: int) -> None:
                tile(b, "tilezero", _SUMS[way])
                tokens = at(b, b.add(a, b.mul(index, I64(block))), I8)
                tile(b, "tileloadd64", _TOKENS[way], tokens, a_stride)
                weights = at(b, b.add(w, b.mul(index, I64(16 * block))), I8)
                tile(b, "tileloadd64", _WEIGHTS[way], weights, I64(64))
                tile(b, "tdpbsud", _SUMS[way], _TOKENS[way], _WEIGHTS[way])
                tile(b, "tilestored64", _SUMS[way], at(b, b.add(to, b.mul(index, I64(TILE))), I8), I64(64))

            with cgutils.for_range(b, b.lshr(blocks, I64(1))) as loop:
                first = b.mul(loop.index, I64(2))
                one(first, 0)
                one(b.add(first, I64(1)), 1)
            with b.if_then(b.icmp_signed("!=", b.and_(blocks, I64(1)), I64(0))):
                one(b.sub(blocks, I64(1)), 0)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return sums


@cache
def scale_tile(layout: Layout, tokens: int) -> Any:
    """scaled(sums, s, m, blocks, scales, totals, stride, acc): adds `tokens` tokens' sums of some blocks.

    sums: i32[blocks][16][16], from the first token on. scales, totals: addresses of the first token's
    scale of the first block, and of Σ a; `stride` bytes from token to token.
    """
    shift = parts(layout).bit_length() - 1  # a token has one scale for 32 k

    @intrinsic
    def scaled(typing, sums, s, m, blocks, scales, totals, stride, acc):
        def codegen(context, b, signature, args):
            sums, s, m, blocks, scales, block_totals, stride, acc = args
            kept = Totals(b, acc, tokens)
            offsets = [b.mul(stride, I64(t)) for t in range(tokens)]
            with cgutils.for_range(b, blocks) as loop:
                here = b.add(sums, b.mul(loop.index, I64(TILE)))
                of_scale = b.mul(b.lshr(loop.index, I64(shift)), I64(4))
                of_total = b.mul(loop.index, I64(4))
                weights = block_scales(b, s, m, loop.index, layout)
                for t in range(tokens):
                    dot = load_at(b, here, VI, 64 * t, 4)
                    scale_at = b.add(scales, b.add(offsets[t], of_scale))
                    total_at = b.add(block_totals, b.add(offsets[t], of_total))
                    add_block(b, kept, t, dot, weights, scale_at, total_at, layout.minimum)
            kept.store()
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return scaled


def tile_group(layout: Layout) -> Any:
    """sums(q, s, m, blocks, a, a_stride, count, acc, w, sums): 16 channels × `count` ≤ 16 tokens.

    blocks: of 32 k. w, sums: room for the quants as bytes, and for the sums, of SUM_BLOCKS blocks that share
    a scale. Few of them, so that they and the tokens stay in the nearest cache.
    """
    spread, add = spread_weights(layout), block_sums(layout.block)
    scale8, scale4, scale1 = (scale_tile(layout, tokens) for tokens in (8, 4, 1))
    each, width, row = parts(layout), layout.block, 16 * layout.number.itemsize

    @inner
    def group(q, s, m, blocks, a, stride, count, acc, w, sums):
        scales, totals = a + 32 * blocks, a + 36 * blocks
        for block in range(0, blocks * each, SUM_BLOCKS):
            some, at = min(blocks * each - block, SUM_BLOCKS), row * block
            spread(w, q, block, some)
            add(a + width * block, stride, w, some, sums)
            t = 0
            while t < count:
                here, of_scale = sums + 64 * t, scales + t * stride + 4 * (block // each)
                of_total, to = totals + t * stride + 4 * block, acc + 64 * t
                if count - t >= 8:
                    scale8(here, s + at, m + at, some, of_scale, of_total, stride, to)
                    t += 8
                elif count - t >= 4:
                    scale4(here, s + at, m + at, some, of_scale, of_total, stride, to)
                    t += 4
                else:
                    scale1(here, s + at, m + at, some, of_scale, of_total, stride, to)
                    t += 1

    return group
