"""Rotary positions: the table of a step, and the rotation."""

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
    word,
)
from flashrt.backends.cpu.share import over_tokens
from flashrt.backends.cpu.vector import load, store

T = rows.RopeTable(*range(len(rows.RopeTable._fields)))
R = rows.Rope(*range(len(rows.Rope._fields)))


def rope_table() -> Any:
    """Angles are float32 products, as models define them; their cosines are right to the last bit."""

    @inner
    def body(row, first, last):
        half = word(row, T.half)
        frequencies, scale = operand(row, T.w_at, T.w), types.float32(number(row, T.f64_scale))
        for t in range(first, last):
            position = types.float32(load_index(word(row, T.positions), t, word(row, T.position_bytes)))
            y = word(row, T.y) + 4 * t * word(row, T.y_stride)
            for i in range(half):
                angle = types.float64(position * load_f32(frequencies + 4 * i))
                store_f32(y + 4 * i, types.float32(math.cos(angle)) * scale)
                store_f32(y + 4 * (half + i), types.float32(math.sin(angle)) * scale)

    return over_tokens(T.t, body)


def _each_head(rotate: Any) -> Any:
    """The kernel that calls rotate(x, y, cosines, sines, half) for each head of each token, and copies the
    channels behind the first 2·half."""

    @inner
    def body(row, first, last):
        heads, dim, half = word(row, R.heads), word(row, R.dim), word(row, R.half)
        for item in range(first * heads, last * heads):
            t, head = item // heads, item % heads
            x = word(row, R.x) + 4 * (t * word(row, R.x_stride) + head * dim)
            y = word(row, R.y) + 4 * (t * word(row, R.y_stride) + head * dim)
            table = word(row, R.table) + 4 * t * word(row, R.table_stride)
            rotate(x, y, table, table + 4 * half, half)
            if dim > 2 * half:
                copy_bytes(y + 8 * half, x + 8 * half, 4 * (dim - 2 * half))

    return over_tokens(R.t, body)


def rope() -> Any:
    """Halves x1, x2 of a head's first channels: x1·cos - x2·sin, x2·cos + x1·sin; the rest is copied."""

    @inner
    def rotate(x, y, cosines, sines, half):
        for c in range(0, half, 16):
            n, second = half - c, 4 * (half + c)
            x1, x2 = load(x + 4 * c, n), load(x + second, n)
            cos, sin = load(cosines + 4 * c, n), load(sines + 4 * c, n)
            store(y + 4 * c, x1 * cos - x2 * sin, n)
            store(y + second, x2 * cos + x1 * sin, n)

    return _each_head(rotate)


def rope_pairs() -> Any:
    """As `rope`, of the channels 2i and 2i+1."""

    @inner
    def rotate(x, y, cosines, sines, half):
        for i in range(half):
            even, odd = load_f32(x + 8 * i), load_f32(x + 8 * i + 4)
            cos, sin = load_f32(cosines + 4 * i), load_f32(sines + 4 * i)
            store_f32(y + 8 * i, even * cos - odd * sin)
            store_f32(y + 8 * i + 4, odd * cos + even * sin)

    return _each_head(rotate)
