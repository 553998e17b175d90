"""Matrix products and the embedding: packed weights in, float32 out.

Threads share the output channels, in groups of 16 (packed formats) or 4 (plain
rows). Tokens are taken 8, 4 or 1 at a time so that a weight is decoded once
for several of them; see tiles.py for why that changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from flashrt.backends.cpu import rows
from flashrt.backends.cpu.intrinsics import (
    copy_bytes,
    inner,
    load_index,
    operand,
    stack,
    store_f32,
    word,
)
from flashrt.backends.cpu.share import channels_of, next_channels, over_tokens, product_run, product_runs
from flashrt.backends.cpu.tiles import element_as_f32, plain_tile, quant_tile, word_as_f32
from flashrt.backends.cpu.vector import lane_sum, load, load_whole, spread, store, store_whole
from flashrt.layouts import LAYOUTS

L = rows.Linear(*range(len(rows.Linear._fields)))
E = rows.Embedding(*range(len(rows.Embedding._fields)))
Kernel = Callable[[Any, Any, Any], None]


@inner
def zero(address, count):
    """`count` vectors of zeros."""
    for i in range(count):
        store_whole(address + 64 * i, spread(types.float32(0)))


@inner
def finish(row, total, t, channel, count):
    """Adds bias and residual to min(16, count) totals and stores them."""
    bias = operand(row, L.bias_at, L.bias)
    residual = word(row, L.residual)
    if bias != 0:
        total = total + load(bias + 4 * channel, count)
    if residual != 0:
        total = total + load(residual + 4 * (t * word(row, L.residual_stride) + channel), count)
    store(word(row, L.y) + 4 * (t * word(row, L.y_stride) + channel), total, count)


@inner
def pad_rows(dst, x, x_stride, tokens, count):
    """The last `count` < 32 numbers of some rows, with zeros behind."""
    zero(dst, 2 * tokens)
    for i in range(tokens):
        copy_bytes(dst + 128 * i, x + i * x_stride, 4 * count)


def quantised(name: str) -> Kernel:
    """The kernel of a packed layout with groups of 16 channels."""
    layout = LAYOUTS[name]
    tile8, tile4, tile1 = (quant_tile(layout, tokens) for tokens in (8, 4, 1))
    quant_bytes, scale_bytes, block_bytes = layout.quant_bytes, layout.scale_bytes, layout.block_bytes

    @inner
    def add(tokens, q, s, m, blocks, x, x_stride, acc):
        if tokens == 8:
            tile8(q, s, m, blocks, x, x_stride, acc)
        elif tokens == 4:
            tile4(q, s, m, blocks, x, x_stride, acc)
        else:
            tile1(q, s, m, blocks, x, x_stride, acc)

    def kernel(tid, nth, row):
        n, k, t_count = word(row, L.n), word(row, L.k), word(row, L.t)
        whole, tail, blocks = k >> 5, k & 31, (k + 31) >> 5
        weights, x_stride = operand(row, L.w_at, L.w), 4 * word(row, L.x_stride)
        groups, group_bytes = (n + 15) >> 4, blocks * block_bytes
        acc, padded = stack(8 * 64), stack(8 * 128)
        first_group, last_group = next_channels(row, groups, group_bytes, t_count, tid, nth, -1)
        while first_group < last_group:
            for g in range(first_group, last_group):
                q = weights + g * group_bytes
                s = q + blocks * quant_bytes
                m = s + blocks * scale_bytes
                for run in range(product_runs(t_count, nth)):
                    t, end = product_run(run, t_count, tid, nth)
                    while t < end:
                        tokens = 8 if end - t >= 8 else (4 if end - t >= 4 else 1)
                        x = word(row, L.x) + t * x_stride
                        zero(acc, tokens)
                        add(tokens, q, s, m, whole, x, x_stride, acc)
                        if tail:
                            pad_rows(padded, x + 128 * whole, x_stride, tokens, tail)
                            at = whole * quant_bytes, whole * scale_bytes
                            add(tokens, q + at[0], s + at[1], m + at[1], 1, padded, 128, acc)
                        for i in range(tokens):
                            finish(row, load_whole(acc + 64 * i), t + i, 16 * g, n - 16 * g)
                        t += tokens
            first_group, last_group = next_channels(row, groups, group_bytes, t_count, tid, nth, last_group)

    return kernel


def plain(element: str) -> Kernel:
    """The kernel of rows of plain elements."""
    tiles = {(r, t): plain_tile(element, r, t) for r in (4, 1) for t in (4, 1)}
    tile44, tile41, tile14, tile11 = tiles[4, 4], tiles[4, 1], tiles[1, 4], tiles[1, 1]
    tail44, tail41, tail14, tail11 = (plain_tile("f32", r, t) for r in (4, 1) for t in (4, 1))
    one, size = element_as_f32(element), 4 if element == "f32" else 2

    @inner
    def add(channels, tokens, w, w_stride, x, x_stride, steps, acc):
        if channels == 4 and tokens == 4:
            tile44(w, w_stride, x, x_stride, steps, acc)
        elif channels == 4:
            tile41(w, w_stride, x, x_stride, steps, acc)
        elif tokens == 4:
            tile14(w, w_stride, x, x_stride, steps, acc)
        else:
            tile11(w, w_stride, x, x_stride, steps, acc)

    @inner
    def add_tail(channels, tokens, w, w_stride, x, x_stride, count, acc, padded):
        """The last `count` < 16 of K: both sides copied as f32 with zeros behind."""
        zero(padded, 8)
        for c in range(channels):
            for i in range(count):
                store_f32(padded + 64 * c + 4 * i, one(w + c * w_stride + size * i))
        for t in range(tokens):
            copy_bytes(padded + 256 + 64 * t, x + t * x_stride, 4 * count)
        if channels == 4 and tokens == 4:
            tail44(padded, 64, padded + 256, 64, 1, acc)
        elif channels == 4:
            tail41(padded, 64, padded + 256, 64, 1, acc)
        elif tokens == 4:
            tail14(padded, 64, padded + 256, 64, 1, acc)
        else:
            tail11(padded, 64, padded + 256, 64, 1, acc)

    @inner
    def some_channels(row, channel, channels, t, end, acc, padded, sums):
        """1 or 4 channels of tokens [t, end)."""
        k, x_stride = word(row, L.k), 4 * word(row, L.x_stride)
        steps, tail = k >> 4, k & 15
        w = operand(row, L.w_at, L.w) + channel * k * size
        while t < end:
            tokens = 4 if end - t >= 4 else 1
            x = word(row, L.x) + t * x_stride
            zero(acc, channels * tokens)
            add(channels, tokens, w, k * size, x, x_stride, steps, acc)
            if tail:
                add_tail(channels, tokens, w + 16 * size * steps, k * size,
                         x + 64 * steps, x_stride, tail, acc, padded)  # fmt: skip
            for i in range(tokens):
                for c in range(channels):
                    store_f32(sums + 4 * c, lane_sum(load_whole(acc + 64 * (c * tokens + i))))
                finish(row, load(sums, channels), t + i, channel, channels)
            t += tokens

    def kernel(tid, nth, row):
        n, t_count = word(row, L.n), word(row, L.t)
        acc, padded, sums = stack(16 * 64), stack(8 * 64), stack(64)
        first_block, last_block = channels_of((n + 3) >> 2, t_count, tid, nth)
        for block in range(first_block, last_block):
            for run in range(product_runs(t_count, nth)):
                t, end = product_run(run, t_count, tid, nth)
                if n - 4 * block >= 4:
                    some_channels(row, 4 * block, 4, t, end, acc, padded, sums)
                else:
                    for channel in range(4 * block, n):
                        some_channels(row, channel, 1, t, end, acc, padded, sums)

    return kernel


@inner
def fill_nan(address, count):
    """`count` floats of NaN."""
    for c in range(0, count, 16):
        store(address + 4 * c, spread(types.float32(float("nan"))), count - c)


def _embedding(decode: Any) -> Kernel:
    @inner
    def body(row, first, last):
        v, c = word(row, E.v), word(row, E.c)
        weights = operand(row, E.w_at, E.w)
        for t in range(first, last):
            id = load_index(word(row, E.ids), t, word(row, E.id_bytes))
            y = word(row, E.y) + 4 * t * word(row, E.y_stride)
            if 0 <= id < v:
                decode(weights, id, c, y)
            else:
                fill_nan(y, c)

    return over_tokens(E.t, body)


def plain_embedding(element: str) -> Kernel:
    """Rows of plain elements, as float32."""
    one, size = element_as_f32(element), 4 if element == "f32" else 2

    @inner
    def decode(weights, id, count, y):
        for k in range(count):
            store_f32(y + 4 * k, one(weights + (id * count + k) * size))

    return _embedding(decode)


def quantised_embedding(name: str) -> Kernel:
    """Rows of a packed layout: exactly `layouts.unpack`."""
    layout = LAYOUTS[name]
    minimum, shift, rows = layout.minimum, layout.block.bit_length() - 1, layout.rows
    quant_bytes, scale_bytes, block_bytes = layout.quant_bytes, layout.scale_bytes, layout.block_bytes
    number, item = element_as_f32("f32" if layout.wide else "f16"), layout.number.itemsize
    store_word, in_word = word_as_f32(layout), 32 // layout.bits

    @inner
    def decode(weights, id, count, y):
        blocks, channel = (count + 31) >> 5, id % rows
        group = weights + id // rows * blocks * block_bytes
        scales = group + blocks * quant_bytes + item * channel
        tail = stack(64)
        for first in range(0, count, 1 << shift):  # numbers that share a scale
            at = scales + rows * item * (first >> shift)
            scale = number(at)
            least = number(at + blocks * scale_bytes) if minimum else types.float32(0)
            for k in range(first, min(first + (1 << shift), count), in_word):
                word_at = group + (k >> 5) * quant_bytes + 4 * ((k & 31) // in_word * rows + channel)
                if count - k >= in_word:
                    store_word(y + 4 * k, word_at, scale, least)
                else:
                    store_word(tail, word_at, scale, least)
                    copy_bytes(y + 4 * k, tail, 4 * (count - k))

    return _embedding(decode)
