"""Functions of single elements, copies, and the quantisation of activations."""

from __future__ import annotations

import math
from typing import Any

from numba import types

from flashrt.backends.cpu import rows
from flashrt.backends.cpu.intrinsics import (
    copy_bytes,
    inner,
    load_f32,
    load_index,
    number,
    operand,
    store_f32,
    store_u8,
    word,
)
from flashrt.backends.cpu.share import dealt, over_tokens, run_at, runs_of
from flashrt.backends.cpu.vector import (
    lane_max,
    load,
    spread,
    store,
    store_bf16,
    store_i8,
    vabs,
    verf,
    vexp,
    vmax,
    vsigmoid,
    vtanh,
)

M = rows.Map(*range(len(rows.Map._fields)))
C = rows.Copy(*range(len(rows.Copy._fields)))
Q = rows.Quantize(*range(len(rows.Quantize._fields)))


@inner
def silu(v):
    return v / (spread(types.float32(1)) + vexp(spread(types.float32(0)) - v))


@inner
def gelu(v):
    one, half = spread(types.float32(1)), spread(types.float32(0.5))
    return v * half * (one + verf(v * spread(types.float32(math.sqrt(0.5)))))


@inner
def gelu_tanh(v):
    one, half = spread(types.float32(1)), spread(types.float32(0.5))
    cube = spread(types.float32(0.044715)) * v * v * v
    return v * half * (one + vtanh(spread(types.float32(math.sqrt(2 / math.pi))) * (v + cube)))


@inner
def relu(v):
    return vmax(v, spread(types.float32(0)))


ACTIVATIONS = {
    "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu, "tanh": vtanh, "sigmoid": vsigmoid,
}  # fmt: skip


@inner
def other(b, step, c, count):
    """16 elements of a row of the second operand, or its one number 16 times."""
    return load(b + 4 * c, count) if step else spread(load_f32(b))


@inner
def part_of(i, tid, nth, row):
    """(row, channel, vectors): where the i-th part of a thread begins, and how many vectors it has."""
    chunks, tokens = (word(row, M.width) + 15) >> 4, word(row, M.rows)
    if dealt(tokens, nth):
        first, last = run_at(i, tokens, tid, nth)
        return first, 0, (last - first) * chunks
    count = tokens * chunks
    first = count * tid // nth
    return first // chunks, 16 * (first % chunks), count * (tid + 1) // nth - first


def _binary(function: Any) -> Any:
    """y = function(a, b)"""

    def kernel(tid, nth, row):
        width, b_at, step = word(row, M.width), operand(row, M.b_at, M.b), word(row, M.b_step)
        strides = 4 * word(row, M.a_stride), 4 * word(row, M.b_stride), 4 * word(row, M.y_stride)
        for i in range(runs_of(word(row, M.rows), nth)):
            r, c, count = part_of(i, tid, nth, row)
            at_a, at_b = word(row, M.a) + r * strides[0], b_at + r * strides[1]
            at_y = word(row, M.y) + r * strides[2]
            for _ in range(count):
                a, b = load(at_a + 4 * c, width - c), other(at_b, step, c, width - c)
                store(at_y + 4 * c, function(a, b), width - c)
                c += 16
                if c >= width:
                    c, at_a, at_b, at_y = 0, at_a + strides[0], at_b + strides[1], at_y + strides[2]

    return kernel


def _unary(function: Any) -> Any:
    """y = function(a, by)"""

    def kernel(tid, nth, row):
        width, by = word(row, M.width), spread(types.float32(number(row, M.f64_by)))
        a_stride, y_stride = 4 * word(row, M.a_stride), 4 * word(row, M.y_stride)
        for i in range(runs_of(word(row, M.rows), nth)):
            r, c, count = part_of(i, tid, nth, row)
            at_a, at_y = word(row, M.a) + r * a_stride, word(row, M.y) + r * y_stride
            for _ in range(count):
                store(at_y + 4 * c, function(load(at_a + 4 * c, width - c), by), width - c)
                c += 16
                if c >= width:
                    c, at_a, at_y = 0, at_a + a_stride, at_y + y_stride

    return kernel


def add() -> Any:
    """a + b"""
    return _binary(inner(lambda a, b: a + b))


def mul() -> Any:
    """a · b"""
    return _binary(inner(lambda a, b: a * b))


def gated(act: str) -> Any:
    """act(a) · b"""
    function = ACTIVATIONS[act]
    return _binary(inner(lambda a, b: function(a) * b))


def activation(act: str) -> Any:
    """act(a)"""
    function = ACTIVATIONS[act]
    return _unary(inner(lambda a, by: function(a)))


def scale() -> Any:
    """a · by"""
    return _unary(inner(lambda a, by: a * by))


def softcap() -> Any:
    """by · tanh(a / by)"""
    return _unary(inner(lambda a, by: by * vtanh(a / by)))


@inner
def fill_ones(address, count):
    """`count` bytes of 255."""
    for i in range(count):
        store_u8(address + i, types.uint8(255))


def copy() -> Any:
    """Rows of bytes from one place to another, by an index when there is one."""

    @inner
    def body(row, first, last):
        which, of = word(row, C.which), word(row, C.of)
        for r in range(first, last):
            source, y = types.int64(r), word(row, C.y) + r * word(row, C.y_stride)
            if which:
                source = load_index(which, r, word(row, C.which_bytes))
                source += of if source < 0 else 0
                if not 0 <= source < of:
                    fill_ones(y, word(row, C.bytes))
                    continue
            copy_bytes(y, word(row, C.x) + source * word(row, C.x_stride), word(row, C.bytes))

    return over_tokens(C.rows, body)


def round_bf16() -> Any:
    """Rows of bf16, nearest and half to even, zeros up to whole blocks of 32 tokens and channels."""

    def kernel(tid, nth, row):
        k, count = word(row, Q.k), word(row, Q.t)
        padded, width, out = (count + 31) // 32 * 32, (k + 31) // 32 * 32, word(row, Q.y)
        for i in range(runs_of(padded, nth)):
            first, last = run_at(i, padded, tid, nth)
            for t in range(first, last):
                x, y = word(row, Q.x) + 4 * t * word(row, Q.x_stride), out + t * word(row, Q.y_stride)
                for c in range(0, width, 16):
                    store_bf16(y + 2 * c, load(x + 4 * c, k - c if t < count else 0))

    return kernel


def quantize() -> Any:
    """Blocks of 32: bytes x/scale, half to even, then the scales (largest magnitude / 127)."""

    @inner
    def body(row, first, last):
        k = word(row, Q.k)
        for t in range(first, last):
            x, y = word(row, Q.x) + 4 * t * word(row, Q.x_stride), word(row, Q.y) + t * word(row, Q.y_stride)
            for at in range(0, k, 32):
                n = min(k - at, 32)
                low, high = load(x + 4 * at, n), load(x + 4 * at + 64, n - 16)
                scale = lane_max(vmax(vabs(low), vabs(high))) / types.float32(127)
                divisor = spread(types.float32(1) if scale == 0 else scale)
                store_i8(y + at, low / divisor, n)
                store_i8(y + at + 16, high / divisor, n - 16)
                store_f32(y + k + 4 * (at >> 5), scale)

    return over_tokens(Q.t, body)
