"""Paged attention with an online softmax: keys in chunks of one page, in order.

State kv f32[P, 2, heads, 16, dim]: index 0 keys, 1 values. One (token, head)
pair is one thread's work, its sums depend on nothing else: so neither the
number of threads nor the other tokens of a step change a bit.
"""

from __future__ import annotations

from typing import Any

from numba import types

from flashrt.backends.cpu import rows
from flashrt.backends.cpu.intrinsics import (
    copy_bytes,
    inner,
    load_f32,
    load_i32,
    number,
    operand,
    stack,
    store_f32,
    word,
)
from flashrt.backends.cpu.vector import (
    fma,
    lane_max,
    lane_sum,
    load,
    load_whole,
    spread,
    store,
    store_whole,
    vexp,
    vtanh,
)

K = rows.KvWrite(*range(len(rows.KvWrite._fields)))
A = rows.Attention(*range(len(rows.Attention._fields)))


@inner
def page_of(pages, stride, seq, position):
    """The page that holds a position of a sequence."""
    return types.int64(load_i32(pages + 4 * (seq * stride + (position >> 4))))


def kv_write() -> Any:
    """Each token's keys and values into its row of its page."""

    def kernel(tid, nth, row):
        heads, k_bytes, v_bytes = word(row, K.heads), 4 * word(row, K.k_dim), 4 * word(row, K.v_dim)
        line = 4 * word(row, K.dim)
        count = word(row, K.t) * heads
        for item in range(count * tid // nth, count * (tid + 1) // nth):
            t, head = item // heads, item % heads
            position = types.int64(load_i32(word(row, K.positions) + 4 * t))
            seq = types.int64(load_i32(word(row, K.seq) + 4 * t))
            page = page_of(word(row, K.pages), word(row, K.pages_stride), seq, position)
            at = word(row, K.kv) + ((page * 2 * heads + head) * 16 + (position & 15)) * line
            copy_bytes(at, word(row, K.k) + 4 * t * word(row, K.k_stride) + head * k_bytes, k_bytes)
            at += heads * 16 * line
            copy_bytes(at, word(row, K.v) + 4 * t * word(row, K.v_stride) + head * v_bytes, v_bytes)

    return kernel


@inner
def dot(a, b, count):
    total = spread(types.float32(0))
    for c in range(0, count, 16):
        total = fma(load(a + 4 * c, count - c), load(b + 4 * c, count - c), total)
    return lane_sum(total)


@inner
def length_of(row, seq):
    """One more than the largest position that a sequence has in this step."""
    longest = types.int64(0)
    for t in range(word(row, A.t)):
        if load_i32(word(row, A.seq) + 4 * t) == seq:
            longest = max(longest, types.int64(load_i32(word(row, A.positions) + 4 * t)) + 1)
    return longest


@inner
def score_page(row, q, keys, first, last, scores):
    """Scores of rows [first, last) of a page; -inf in the other lanes."""
    dim, stride = word(row, A.k_dim), 4 * word(row, A.dim)
    store_whole(scores, spread(types.float32(0)))
    for i in range(first, last):
        store_f32(scores + 4 * i, dot(q, keys + i * stride, dim))
    v = load_whole(scores) * spread(types.float32(number(row, A.f64_scale)))
    cap = types.float32(number(row, A.f64_softcap))
    if cap > 0:
        v = spread(cap) * vtanh(v / spread(cap))
    store_whole(scores, v)
    for i in range(first):
        store_f32(scores + 4 * i, types.float32(-float("inf")))
    for i in range(last, 16):
        store_f32(scores + 4 * i, types.float32(-float("inf")))


@inner
def mix_page(row, values, first, last, weights, shrink, y):
    """y = y·shrink + Σ weights·values"""
    dim, stride = word(row, A.v_dim), 4 * word(row, A.dim)
    for c in range(0, dim, 16):
        total = load(y + 4 * c, dim - c) * spread(shrink)
        for i in range(first, last):
            total = fma(spread(load_f32(weights + 4 * i)), load(values + i * stride + 4 * c, dim - c), total)
        store(y + 4 * c, total, dim - c)


@inner
def attend(row, t, head, q, y, scores):
    """One head of one token."""
    position = types.int64(load_i32(word(row, A.positions) + 4 * t))
    seq = types.int64(load_i32(word(row, A.seq) + 4 * t))
    kv_heads, window = word(row, A.kv_heads), word(row, A.window)
    page_bytes = 64 * word(row, A.dim)
    kv_head = head // (word(row, A.heads) // kv_heads)
    end = position + 1 if word(row, A.causal) else length_of(row, seq)
    start = max(position + 1 - window, 0) if window > 0 else types.int64(0)
    sinks = operand(row, A.sinks_at, A.sinks)
    top, total = types.float32(-float("inf")), types.float32(0)
    if sinks != 0:
        top, total = load_f32(sinks + 4 * head), types.float32(1)
    for c in range(0, word(row, A.v_dim), 16):
        store(y + 4 * c, spread(types.float32(0)), word(row, A.v_dim) - c)
    for chunk in range(start >> 4, (end + 15) >> 4):
        page = page_of(word(row, A.pages), word(row, A.pages_stride), seq, 16 * chunk)
        keys = word(row, A.kv) + (page * 2 * kv_heads + kv_head) * page_bytes
        first, last = max(start - 16 * chunk, 0), min(end - 16 * chunk, 16)
        score_page(row, q, keys, first, last, scores)
        v = load_whole(scores)
        higher = max(top, lane_max(v))
        weights = vexp(v - spread(higher))
        shrink = lane_max(vexp(spread(top - higher)))
        total = total * shrink + lane_sum(weights)
        store_whole(scores, weights)
        mix_page(row, keys + kv_heads * page_bytes, first, last, scores, shrink, y)
        top = higher
    for c in range(0, word(row, A.v_dim), 16):
        n = word(row, A.v_dim) - c
        store(y + 4 * c, load(y + 4 * c, n) / spread(total), n)


def attention() -> Any:
    """softmax(q·k·scale)·v over the keys that each token may see."""

    def kernel(tid, nth, row):
        heads, k_dim, v_dim = word(row, A.heads), word(row, A.k_dim), word(row, A.v_dim)
        count, scores = word(row, A.t) * heads, stack(64)
        for item in range(count * tid // nth, count * (tid + 1) // nth):
            t, head = item // heads, item % heads
            q = word(row, A.q) + 4 * (t * word(row, A.q_stride) + head * k_dim)
            y = word(row, A.y) + 4 * (t * word(row, A.y_stride) + head * v_dim)
            attend(row, t, head, q, y, scores)

    return kernel
