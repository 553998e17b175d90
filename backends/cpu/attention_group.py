"""A page of keys or values for several query heads that share it: each number is read and widened once.

The sums of a head are those of `attention.sixteen_dots` and of `page_functions`' mix, bit for bit: its
channels and keys are added in the same order, whatever heads are beside it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from flashrt.backends.cpu.intrinsics import F32, I64, at, inner, intrinsic, word
from flashrt.backends.cpu.rows import Attention
from flashrt.backends.cpu.tiles import floats, load_at
from flashrt.backends.cpu.vector import LANES, V, constant, f32x16, joined, muladd, splat

HEADS = 4  # at a time: their queries, and their sums of 64 values, fit into 32 registers
GROUP_BYTES = HEADS * LANES * 64  # of `sums`
BYTES = {"f32": 4, "bf16": 2}  # of an element of the cache
CHANNELS = 64  # at a time
A = Attention(*range(len(Attention._fields)))


def _vectors(b: ir.IRBuilder, address: ir.Value, element: str, width: int) -> list[ir.Value]:
    """CHANNELS numbers as float32."""
    return [floats(b, b.add(address, I64(width * c)), element) for c in range(0, CHANNELS, LANES)]


@cache
def dots_of(element: str, heads: int) -> Any:
    """dots(q, q_stride, keys, stride, dim, sums): f32[heads][16][16], lanes of each head's q · each key.

    dim: a multiple of CHANNELS. The lanes of sums[h][i] add up to the dot product (`sum_lanes`).
    """
    width = BYTES[element]

    @intrinsic
    def dots(typing, q, q_stride, keys, stride, dim, sums):
        def codegen(context, b, signature, args):
            q, q_stride, keys, stride, dim, sums = args

            def chunk(index: ir.Value, first: bool) -> None:
                c = b.mul(index, I64(CHANNELS))
                at_q = b.add(q, b.mul(c, I64(4)))
                queries = [_vectors(b, b.add(at_q, b.mul(q_stride, I64(h))), "f32", 4) for h in range(heads)]
                line = b.add(keys, b.mul(c, I64(width)))
                for i in range(LANES):
                    key = _vectors(b, b.add(line, b.mul(stride, I64(i))), element, width)
                    for h in range(heads):
                        place = b.add(sums, I64(64 * (LANES * h + i)))
                        total = constant(0.0) if first else load_at(b, place, V, 0, 64)
                        for one, other in zip(queries[h], key, strict=True):
                            total = muladd(b, one, other, total)
                        b.store(total, at(b, place, V)).align = 64

            chunk(I64(0), True)
            with cgutils.for_range_slice(b, I64(1), b.udiv(dim, I64(CHANNELS)), I64(1)) as (index, _):
                chunk(index, False)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dots


@intrinsic
def sum_lanes(typing, sums):
    """Sixteen vectors from the address on → lane i: the lanes of the i-th, added up."""

    def codegen(context, b, signature, args):
        return joined(b, [load_at(b, args[0], V, 64 * i, 64) for i in range(LANES)])

    return f32x16(types.int64), codegen


@cache
def mix_of(element: str, heads: int) -> Any:
    """mix(values, stride, first, last, weights, y, y_stride): y[h] += Σ weights[h][i]·value i, 64 channels.

    stride, y_stride: bytes from value to value and from head to head. weights: f32[heads][16].
    """
    width = BYTES[element]

    @intrinsic
    def mix(typing, values, stride, first, last, weights, y, y_stride):
        def codegen(context, b, signature, args):
            values, stride, first, last, weights, y, y_stride = args
            outs = [b.add(y, b.mul(y_stride, I64(h))) for h in range(heads)]
            sums = [[cgutils.alloca_once_value(b, one) for one in _vectors(b, out, "f32", 4)] for out in outs]
            with cgutils.for_range_slice(b, first, last, I64(1)) as (i, _):
                value = _vectors(b, b.add(values, b.mul(stride, i)), element, width)
                at_weight = b.add(weights, b.mul(i, I64(4)))
                for h in range(heads):
                    weight = splat(b, load_at(b, at_weight, F32, 64 * h, 4))
                    for total, one in zip(sums[h], value, strict=True):
                        b.store(muladd(b, weight, one, b.load(total)), total)
            for out, of_head in zip(outs, sums, strict=True):
                for j, total in enumerate(of_head):
                    b.store(b.load(total), at(b, b.add(out, I64(64 * j)), V)).align = 4
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return mix


def group_functions(element: str) -> tuple[Any, Any]:
    """dots(row, q, keys, count, sums) and mix(row, values, first, last, count, weights, y, y_stride).

    count: heads, at most HEADS; q: of the first one, the others behind it.
    """
    item = BYTES[element]
    dots1, dots2, dots3, dots4 = (dots_of(element, heads) for heads in range(1, HEADS + 1))
    mix1, mix2, mix3, mix4 = (mix_of(element, heads) for heads in range(1, HEADS + 1))

    @inner
    def dots(row, q, keys, count, sums):
        dim = word(row, A.k_dim)
        q_stride, stride = 4 * dim, item * word(row, A.dim)
        if count == 1:
            dots1(q, q_stride, keys, stride, dim, sums)
        elif count == 2:
            dots2(q, q_stride, keys, stride, dim, sums)
        elif count == 3:
            dots3(q, q_stride, keys, stride, dim, sums)
        else:
            dots4(q, q_stride, keys, stride, dim, sums)

    @inner
    def mix(row, values, first, last, count, weights, y, y_stride):
        stride = item * word(row, A.dim)
        for c in range(0, word(row, A.v_dim), CHANNELS):
            at_values, at_y = values + item * c, y + 4 * c
            if count == 1:
                mix1(at_values, stride, first, last, weights, at_y, y_stride)
            elif count == 2:
                mix2(at_values, stride, first, last, weights, at_y, y_stride)
            elif count == 3:
                mix3(at_values, stride, first, last, weights, at_y, y_stride)
            else:
                mix4(at_values, stride, first, last, weights, at_y, y_stride)

    return dots, mix
