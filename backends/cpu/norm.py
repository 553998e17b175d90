"""RMS and layer normalisation; sums in 16 lanes, then half with half."""

from __future__ import annotations

import math
from typing import Any

from numba import types

from flashrt.backends.cpu import rows
from flashrt.backends.cpu.intrinsics import inner, number, operand, stack, word
from flashrt.backends.cpu.share import over_tokens
from flashrt.backends.cpu.vector import fma, lane_sum, load, spread, store

N = rows.Norm(*range(len(rows.Norm._fields)))


@inner
def sum_of(x, count):
    total = spread(types.float32(0))
    for c in range(0, count, 16):
        total = total + load(x + 4 * c, count - c)
    return lane_sum(total)


@inner
def sum_of_squares(x, count, mean):
    """Σ (x - mean)²"""
    total = spread(types.float32(0))
    centre = spread(mean)
    for c in range(0, count, 16):
        v = load(x + 4 * c, count - c)
        # the empty lanes hold 0, not the mean
        v = v - (centre if count - c >= 16 else part(centre, count - c))
        total = fma(v, v, total)
    return lane_sum(total)


@inner
def part(v, count):
    """The first `count` lanes, zeros behind."""
    buffer = stack(64)
    store(buffer, v, 16)
    return load(buffer, count)


def _norm(centred: bool) -> Any:
    @inner
    def body(row, first, last):
        groups, width, size = word(row, N.groups), word(row, N.width), word(row, N.w_size)
        w, b = operand(row, N.w_at, N.w), operand(row, N.b_at, N.b)
        eps, offset = number(row, N.f64_eps), spread(types.float32(number(row, N.f64_offset)))
        for item in range(first * groups, last * groups):
            t, g = item // groups, item % groups
            x = word(row, N.x) + 4 * (t * word(row, N.x_stride) + g * width)
            y = word(row, N.y) + 4 * (t * word(row, N.y_stride) + g * width)
            mean = sum_of(x, width) / types.float32(width) if centred else types.float32(0)
            square = sum_of_squares(x, width, mean) / types.float32(width)
            inverse = types.float32(1) / types.float32(math.sqrt(square + types.float32(eps)))
            at = 4 * ((g * width) % size)
            for c in range(0, width, 16):
                v = (load(x + 4 * c, width - c) - spread(mean)) * spread(inverse)
                if w != 0:
                    v = v * (offset + load(w + at + 4 * c, width - c))
                if b != 0:
                    v = v + load(b + at + 4 * c, width - c)
                store(y + 4 * c, v, width - c)

    return over_tokens(N.t, body)


def rms_norm() -> Any:
    """x / sqrt(mean(x²) + eps) · (offset + w)"""
    return _norm(centred=False)


def layer_norm() -> Any:
    """(x - mean) / sqrt(variance + eps) · w + b"""
    return _norm(centred=True)
