"""The inner loops of matrix products: some channels times some tokens, for a run of K.

Each is generated for its weight format and its number of tokens. Whatever that
number, one output element is summed in the same order: two chains (even and
odd k) inside the weights that share a scale, their sum times it onto the total.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from flashrt.backends.cpu.intrinsics import F32, I16, I32, I64, at, emit_prefetch, intrinsic
from flashrt.backends.cpu.vector import LANES, VI, VS, V, constant, masked_load, muladd, splat, tree
from flashrt.layouts import BLOCK, Layout

VH = ir.VectorType(ir.HalfType(), LANES)
# A float whose bits are 0x4B000000 | n is 2^23 + n, for n < 2^23: whole numbers without a conversion.
_MAGIC, _BASE = 0x4B000000, float(2**23)


def load_at(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, offset: int = 0, align: int = 2) -> Any:
    value = b.load(at(b, b.add(address, I64(offset)), kind))
    value.align = align
    return value


def ints(value: int) -> ir.Constant:
    return ir.Constant(VI, [value] * LANES)


def _whole(b: ir.IRBuilder, words: ir.Value, bit: int, bits: int, zero: int) -> ir.Value:
    """Bits [bit, bit+bits) of each lane, less `zero`, as floats."""
    if bit:
        words = b.lshr(words, ints(bit))
    if bit + bits < 32:
        words = b.and_(words, ints((1 << bits) - 1))
    return b.fsub(b.bitcast(b.or_(words, ints(_MAGIC)), V), constant(_BASE + zero))


def shifted(b: ir.IRBuilder, words: ir.Value) -> ir.Value:
    """Signed bytes to unsigned ones: 128 more."""
    return b.xor(words, ints(-0x7F7F7F80))


def decode(b: ir.IRBuilder, q: ir.Value, j: int, layout: Layout) -> list[tuple[int, ir.Value]]:
    """(k, quants of 16 channels) of the j-th 64 bytes of a block of 32; see flashrt/layouts.py."""
    words = load_at(b, q, VI, 64 * j, 4)
    zero = 0 if layout.minimum else 1 << layout.bits - 1
    if layout.bits == 8:
        words = words if layout.minimum else shifted(b, words)
        return [(4 * j + i, _whole(b, words, 8 * i, 8, zero)) for i in range(4)]
    low = [(8 * j + i, _whole(b, words, 8 * i, 4, zero)) for i in range(4)]
    return low + [(8 * j + 4 + i, _whole(b, words, 8 * i + 4, 4, zero)) for i in range(4)]


AHEAD = 12288  # bytes: some 200 ns of work for one token


def parts(layout: Layout) -> int:
    """How many scales a channel has for 32 weights."""
    return BLOCK // layout.block


def words(layout: Layout, part: int) -> range:
    """Which 64 bytes of a block of 32 hold the quants of its part-th scale."""
    each = layout.bits // parts(layout)
    return range(part * each, (part + 1) * each)


def numbers(b: ir.IRBuilder, address: ir.Value, layout: Layout) -> ir.Value:
    """Scales or minima of 16 channels."""
    return floats(b, address, "f32" if layout.wide else "f16")


def prefetch_ahead(b: ir.IRBuilder, q: ir.Value, step: ir.Value, record: int) -> None:
    """Asks for the bytes that are read soon. q: where a group begins; record: bytes of it a step.

    Quants, scales and minima of a group are three short runs, too short for the processor to guess; but
    groups lie behind each other, so their bytes are one.
    """
    address = b.add(q, b.mul(step, I64(record)))
    for offset in range(0, record, 64):
        emit_prefetch(b, b.add(address, I64(AHEAD + offset)), 3)


@cache
def quant_tile(layout: Layout, tokens: int) -> Any:
    """tile(q, s, m, blocks, x, x_stride, acc): adds 16 channels × `tokens` over `blocks` blocks of 32.

    q, s, m: addresses of a group's quants, scales and minima. x: address of f32 with rows
    x_stride bytes apart. acc: f32[tokens][16], read and written.
    """

    @intrinsic
    def tile(typing, q, s, m, blocks, x, x_stride, acc):
        def codegen(context, b, signature, args):
            q, s, m, blocks, x, x_stride, acc = args
            rows = [b.add(x, b.mul(x_stride, I64(t))) for t in range(tokens)]
            totals = Totals(b, acc, tokens)
            with cgutils.for_range(b, blocks) as loop:
                block = b.add(q, b.mul(loop.index, I64(layout.quant_bytes)))
                at_x = [b.add(row, b.mul(loop.index, I64(128))) for row in rows]
                of_block = b.mul(loop.index, I64(layout.scale_bytes))
                for part in range(parts(layout)):
                    place = b.add(of_block, I64(LANES * layout.number.itemsize * part))
                    chains = [[constant(0.0), constant(0.0)] for _ in range(tokens)]
                    for j in words(layout, part):
                        for k, w in decode(b, block, j, layout):
                            for t in range(tokens):
                                xk = splat(b, load_at(b, at_x[t], F32, 4 * k, 4))
                                chains[t][k & 1] = muladd(b, w, xk, chains[t][k & 1])
                    scale = numbers(b, b.add(s, place), layout)
                    for t in range(tokens):
                        totals.add(t, b.fadd(*chains[t]), scale)
                    if layout.minimum:
                        least = numbers(b, b.add(m, place), layout)
                        for t in range(tokens):
                            totals.add(t, splat(b, _sum_of(b, at_x[t], part, layout)), least)
            totals.store()
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


def _sum_of(b: ir.IRBuilder, x: ir.Value, part: int, layout: Layout) -> ir.Value:
    """Σ x over the k that share a scale."""
    first = layout.block * part
    vectors = [load_at(b, x, V, 4 * k, 4) for k in range(first, first + layout.block, LANES)]
    return tree(b, b.fadd(*vectors) if len(vectors) == 2 else vectors[0], b.fadd)


class Totals:
    """Accumulators that live in registers during a loop and in memory around it."""

    def __init__(self, b: ir.IRBuilder, address: ir.Value, count: int) -> None:
        self.b, self.address = b, address
        self.values = [cgutils.alloca_once(b, V) for _ in range(count)]
        for i, value in enumerate(self.values):
            b.store(load_at(b, address, V, 64 * i, 4), value)

    def add(self, i: int, a: ir.Value, c: ir.Value) -> None:
        self.b.store(muladd(self.b, a, c, self.b.load(self.values[i])), self.values[i])

    def store(self) -> None:
        for i, value in enumerate(self.values):
            target = at(self.b, self.b.add(self.address, I64(64 * i)), V)
            self.b.store(self.b.load(value), target).align = 4


def floats(b: ir.IRBuilder, address: ir.Value, element: str) -> ir.Value:
    """16 elements as f32."""
    if element == "f32":
        return load_at(b, address, V, 0, 4)
    if element == "f16":
        return b.fpext(load_at(b, address, VH), V)
    return b.bitcast(b.shl(b.zext(load_at(b, address, VS), VI), ints(16)), V)


def floats_part(b: ir.IRBuilder, address: ir.Value, element: str, count: ir.Value) -> ir.Value:
    """`count` < 16 elements of f32 or bf16 as f32, zeros behind; no more are read."""
    if element == "f32":
        return masked_load(b, address, count)
    half = masked_load(b, address, count, VS)
    return b.bitcast(b.shl(b.zext(half, VI), ints(16)), V)


@cache
def plain_tile(element: str, rows: int, tokens: int) -> Any:
    """tile(w, w_stride, x, x_stride, steps, acc): adds `rows` channels × `tokens` over 16*steps of K.

    Strides in bytes. acc: f32[rows][tokens][16]: lane i holds the sum over k = i mod 16.
    """
    size = 4 if element == "f32" else 2

    @intrinsic
    def tile(typing, w, w_stride, x, x_stride, steps, acc):
        def codegen(context, b, signature, args):
            w, w_stride, x, x_stride, steps, acc = args
            w_rows = [b.add(w, b.mul(w_stride, I64(r))) for r in range(rows)]
            x_rows = [b.add(x, b.mul(x_stride, I64(t))) for t in range(tokens)]
            totals = Totals(b, acc, rows * tokens)
            with cgutils.for_range(b, steps) as loop:
                w_at = b.mul(loop.index, I64(16 * size))
                ws = [floats(b, b.add(row, w_at), element) for row in w_rows]
                x_at = b.mul(loop.index, I64(64))
                xs = [load_at(b, b.add(row, x_at), V, 0, 4) for row in x_rows]
                for r in range(rows):
                    for t in range(tokens):
                        totals.add(r * tokens + t, ws[r], xs[t])
            totals.store()
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return tile


@cache
def word_as_f32(layout: Layout) -> Any:
    """store(y, source, scale, least): the numbers in a channel's word of packed quants, in their order: 8 of
    4 bits, or 4 of 8."""
    shifts = [0, 8, 16, 24] if layout.bits == 8 else [0, 8, 16, 24, 4, 12, 20, 28]
    count = len(shifts)
    kind, numbers = ir.VectorType(I32, count), ir.VectorType(F32, count)

    @intrinsic
    def store(typing, y, source, scale, least):
        def codegen(context, b, signature, args):
            y, source, scale, least = args
            quants = splat(b, load_at(b, source, I32), count)
            if layout.bits == 8 and not layout.minimum:
                high = b.shl(quants, ir.Constant(kind, [24 - shift for shift in shifts]))
                quants = b.ashr(high, ir.Constant(kind, [24] * count))
            else:
                quants = b.lshr(quants, ir.Constant(kind, shifts))
                quants = b.and_(quants, ir.Constant(kind, [(1 << layout.bits) - 1] * count))
            if layout.bits == 4 and not layout.minimum:
                quants = b.sub(quants, ir.Constant(kind, [8] * count))
            values = b.fmul(b.sitofp(quants, numbers), splat(b, scale, count))
            if layout.minimum:
                values = b.fadd(values, splat(b, least, count))
            b.store(values, at(b, y, numbers)).align = 4
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32, types.float32), codegen

    return store


@cache
def element_as_f32(element: str) -> Any:
    """load(address): one element as float32."""

    @intrinsic
    def load(typing, address):
        def codegen(context, b, signature, args):
            if element == "f32":
                return load_at(b, args[0], F32, 0, 4)
            if element == "f16":
                return b.fpext(load_at(b, args[0], ir.HalfType()), F32)
            wide = b.zext(load_at(b, args[0], I16), ir.IntType(32))
            return b.bitcast(b.shl(wide, ir.IntType(32)(16)), F32)

        return types.float32(types.int64), codegen

    return load
