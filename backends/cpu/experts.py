"""Mixtures of experts: routing, products with the weights of each token's experts, weighted sums.

An expert's product is the kernel of the same format for linears, called for one expert's tokens at a
time: it gets a row of its own on the stack. So a number has the bits that a linear would give it, whatever
other tokens and experts the step has, and only experts that a token chose are read.

Threads share the work by (expert, 16 channels), weighted by how many tokens chose the expert.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from numba import types

from flashrt.backends.cpu import rows
from flashrt.backends.cpu.elementwise import part_of
from flashrt.backends.cpu.intrinsics import (
    copy_bytes,
    inner,
    load_f32,
    load_i64,
    number,
    operand,
    stack,
    store_f32,
    store_i64,
    word,
)
from flashrt.backends.cpu.linear import Kernel, fill_nan, zero
from flashrt.backends.cpu.rows import RUN, WIDE
from flashrt.backends.cpu.share import runs_of
from flashrt.backends.cpu.vector import (
    lane_max,
    lane_sum,
    load,
    load_whole,
    spread,
    store,
    store_whole,
    vexp,
    vmax,
    vsigmoid,
)

X = rows.Experts(*range(len(rows.Experts._fields)))
R = rows.Route(*range(len(rows.Route._fields)))
S = rows.ExpertSum(*range(len(rows.ExpertSum._fields)))
L = rows.Linear(*range(len(rows.Linear._fields)))
M = rows.Map(*range(len(rows.Map._fields)))


@inner
def chosen(row, pair):
    """The expert of the pair-th (token, choice), -1 where there is no such expert."""
    top_k = word(row, X.top_k)
    at = word(row, X.route) + 4 * (pair // top_k * word(row, X.route_stride) + pair % top_k)
    value = load_f32(at)
    if value >= types.float32(0) and value < types.float32(word(row, X.experts)):
        return types.int64(value)
    return types.int64(-1)


@inner
def count_tokens(row, counts, first_thread):
    """How many pairs each expert has → all that have one; rows of the others become NaN."""
    for e in range(word(row, X.experts)):
        store_i64(counts + 8 * e, 0)
    total = 0
    for pair in range(word(row, X.t) * word(row, X.top_k)):
        e = chosen(row, pair)
        if e >= 0:
            store_i64(counts + 8 * e, load_i64(counts + 8 * e) + 1)
            total += 1
        elif first_thread:
            fill_nan(word(row, X.y) + 4 * pair * word(row, X.y_stride), word(row, X.n))
    return total


@inner
def row_of_x(row, pair):
    """Where a pair's row of x begins."""
    t = pair // word(row, X.top_k) if word(row, X.shared) else pair
    return word(row, X.x) + t * word(row, X.x_bytes)


@inner
def fill_field(row, field, value):
    store_i64(row + 8 * field, value)


def expert_product(module: str, maker: str, *args: Any) -> Kernel:
    """The kernel that a linear's kernel `module.maker(*args)` makes."""
    product = inner(getattr(import_module(f"flashrt.backends.cpu.{module}"), maker)(*args))

    @inner
    def some_tokens(row, e, unit, units, pairs, count, one, x, y):
        """`units` times 16 channels of expert e for `count` ≤ RUN pairs. one: a row of a linear."""
        channel, n = 16 * unit, word(row, X.n)
        width, bias = min(n - channel, 16 * units), operand(row, X.bias_at, X.bias)
        to, y_stride = word(row, X.y) + 4 * channel, 4 * word(row, X.y_stride)
        weights = operand(row, X.w_at, X.w) + e * word(row, X.expert_bytes) + unit * word(row, X.unit_bytes)
        alone = count == 1 and word(row, X.padded) == 0
        fill_field(one, L.x, row_of_x(row, load_i64(pairs)) if alone else x)
        fill_field(one, L.w, weights)
        fill_field(one, L.y, to + load_i64(pairs) * y_stride if alone else y)
        fill_field(one, L.bias, bias + 4 * (e * n + channel) if bias != 0 else 0)
        fill_field(one, L.t, count)
        fill_field(one, L.n, width)
        product(0, 1, one)
        if not alone:
            for i in range(count):
                copy_bytes(to + load_i64(pairs + 8 * i) * y_stride, y + 4 * 16 * WIDE * i, 4 * width)

    @inner
    def gather(row, pairs, count, x):
        """The rows of x of some pairs side by side, with zeros behind where the kernel reads more."""
        size = word(row, X.x_bytes)
        for i in range(count):
            copy_bytes(x + i * size, row_of_x(row, load_i64(pairs + 8 * i)), size)
        if word(row, X.padded):
            zero(x + count * size, (RUN - count) * size >> 6)

    @inner
    def one_expert(row, e, first, last, left, one, pairs, x, y):
        """16-channel units [first, last) of expert e for all `left` pairs that have chosen it."""
        pair = 0
        while left > 0:
            count = 0
            while count < min(left, RUN):
                if chosen(row, pair) == e:
                    store_i64(pairs + 8 * count, pair)
                    count += 1
                pair += 1
            left -= count
            gather(row, pairs, count, x)
            for unit in range(first, last, WIDE):
                some_tokens(row, e, unit, min(last - unit, WIDE), pairs, count, one, x, y)

    def kernel(tid, nth, row):
        experts, units = word(row, X.experts), (word(row, X.n) + 15) >> 4
        own = word(row, X.scratch) + tid * word(row, X.scratch_stride)
        counts, y = own, own + ((8 * experts + 63) >> 6 << 6)
        x = y + 4 * 16 * WIDE * RUN
        one, pairs = stack(8 * 16), stack(8 * 32)
        zero(one, 2)
        fill_field(one, L.x_stride, word(row, X.x_stride))
        fill_field(one, L.y_stride, 16 * WIDE)
        fill_field(one, L.k, word(row, X.k))
        fill_field(one, L.scratch, x + ((RUN * word(row, X.x_bytes) + 63) >> 6 << 6))
        total = units * count_tokens(row, counts, tid == 0)
        first, last, begin = total * tid // nth, total * (tid + 1) // nth, 0
        for e in range(experts):
            count = load_i64(counts + 8 * e)
            end = begin + units * count
            if count > 0 and begin < last and end > first:
                lo = max(0, (first - begin + count - 1) // count)
                hi = min(units, (last - begin + count - 1) // count)
                if lo < hi:
                    one_expert(row, e, lo, hi, count, one, pairs, x, y)
            begin = end

    return kernel


def expert_sum() -> Kernel:
    """Each token's rows times their weights, in the order of its choices."""

    def kernel(tid, nth, row):
        width, top_k, y_stride = word(row, S.width), word(row, S.top_k), 4 * word(row, S.y_stride)
        chunks = (width + 15) >> 4
        parts = word(row, S.t) * chunks
        for part in range(parts * tid // nth, parts * (tid + 1) // nth):
            t, c = part // chunks, 16 * (part % chunks)
            y = word(row, S.y) + t * top_k * y_stride + 4 * c
            weights = word(row, S.route) + 4 * (t * word(row, S.route_stride) + top_k)
            total = spread(types.float32(0))
            for j in range(top_k):
                total = total + spread(load_f32(weights + 4 * j)) * load(y + j * y_stride, width - c)
            store(word(row, S.out) + 4 * (t * word(row, S.out_stride) + c), total, width - c)

    return kernel


def gated_clamped() -> Kernel:
    """(clip(b, ±limit) + 1) · a' · sigmoid(alpha · a'), a' = min(a, limit)"""

    def kernel(tid, nth, row):
        width, b_at = word(row, M.width), operand(row, M.b_at, M.b)
        strides = 4 * word(row, M.a_stride), 4 * word(row, M.b_stride), 4 * word(row, M.y_stride)
        alpha, limit = types.float32(number(row, M.f64_by)), types.float32(number(row, M.f64_limit))
        bottom, scale = spread(-limit), spread(alpha)
        one, none = spread(types.float32(1)), spread(types.float32(0))
        for i in range(runs_of(word(row, M.rows), nth)):
            r, c, count = part_of(i, tid, nth, row)
            for _ in range(count):
                a = load(word(row, M.a) + r * strides[0] + 4 * c, width - c)
                b = load(b_at + r * strides[1] + 4 * c, width - c)
                a = none - vmax(none - a, bottom)
                b = vmax(none - vmax(none - b, bottom), bottom)
                store(word(row, M.y) + r * strides[2] + 4 * c, (b + one) * a * vsigmoid(scale * a), width - c)
                c += 16
                if c >= width:
                    r, c = r + 1, 0

    return kernel


# ---- routing ------------------------------------------------------------------------
@inner
def scored(row, logits, scores, experts, softmax):
    """softmax or sigmoid of a token's logits."""
    minus = spread(types.float32(float("-inf")))
    top = minus
    for c in range(0, experts, 16):
        store_whole(scores + 4 * c, minus)
        store(scores + 4 * c, load(logits + 4 * c, experts - c), experts - c)
        top = vmax(top, load_whole(scores + 4 * c))
    highest, total = spread(lane_max(top)), spread(types.float32(0))
    for c in range(0, experts, 16):
        value = load_whole(scores + 4 * c)
        value = vexp(value - highest) if softmax else vsigmoid(value)
        total = total + value
        store_whole(scores + 4 * c, value)
    if softmax:
        whole = spread(lane_sum(total))
        for c in range(0, experts, 16):
            store_whole(scores + 4 * c, load_whole(scores + 4 * c) / whole)


@inner
def largest(values, count):
    """The number of the largest value, the first of equal ones; of NaNs, any."""
    best, value = 0, load_f32(values)
    for i in range(1, count):
        if load_f32(values + 4 * i) > value:
            best, value = i, load_f32(values + 4 * i)
    return best


@inner
def group_score(values, size, two):
    """A group's best score, or the sum of its two best."""
    best = second = types.float32(float("-inf"))
    for i in range(size):
        value = load_f32(values + 4 * i)
        if value > best:
            best, second = value, best
        elif value > second:
            second = value
    return best + second if two and size > 1 else best


@inner
def keep_best_groups(row, choice, experts, scores):
    """Experts outside of the best groups get -inf. scores: room for a number a group."""
    groups, low = word(row, R.groups), types.float32(float("-inf"))
    size = experts // groups
    for g in range(groups):
        store_f32(scores + 4 * g, group_score(choice + 4 * g * size, size, word(row, R.two)))
    for _ in range(groups - word(row, R.top_groups)):
        worst = groups - 1
        for g in range(groups - 1, -1, -1):
            if not load_f32(scores + 4 * g) >= load_f32(scores + 4 * worst):
                worst = g
        store_f32(scores + 4 * worst, types.float32(float("inf")))
        for i in range(worst * size, (worst + 1) * size):
            store_f32(choice + 4 * i, low)


@inner
def choose(row, t, scores, choice, rest):
    """The best experts of token t and their weights."""
    experts, top_k, bias = word(row, R.experts), word(row, R.top_k), operand(row, R.bias_at, R.bias)
    scored(row, word(row, R.x) + 4 * t * word(row, R.x_stride), scores, experts, word(row, R.softmax))
    for c in range(0, experts, 16):
        value = load_whole(scores + 4 * c)
        store_whole(choice + 4 * c, value + load(bias + 4 * c, experts - c) if bias != 0 else value)
    if word(row, R.groups) > 1:
        keep_best_groups(row, choice, experts, rest)
    y, total = word(row, R.y) + 4 * t * word(row, R.y_stride), types.float32(0)
    for j in range(top_k):
        e = largest(choice, experts)
        store_f32(choice + 4 * e, types.float32(float("-inf")))
        store_f32(y + 4 * j, types.float32(e))
        weight = load_f32(scores + 4 * e)
        store_f32(y + 4 * (top_k + j), weight)
        total += weight
    scale = types.float32(number(row, R.f64_scale))
    for j in range(top_k):
        at = y + 4 * (top_k + j)
        weight = load_f32(at) / total if word(row, R.normalise) else load_f32(at)
        store_f32(at, weight * scale)


def route() -> Kernel:
    """Which experts each token goes to."""

    @inner
    def body(row, first, last, scratch):
        size = (word(row, R.experts) + 15) >> 4 << 6
        for t in range(first, last):
            choose(row, t, scratch, scratch + size, scratch + 2 * size)

    def kernel(tid, nth, row):
        tokens = word(row, R.t)
        scratch = word(row, R.scratch) + tid * word(row, R.scratch_stride)
        body(row, tokens * tid // nth, tokens * (tid + 1) // nth, scratch)

    return kernel
