"""Sampling: the definition of flashrt/backends/reference/sample.py without its sort.

Logits are counted into buckets by their distance from the largest. Only the
bucket in which a limit falls (the k-th largest, the end of top_p, the draw) is
gathered and sorted. One row is one thread's work.
"""

from __future__ import annotations

import math
from typing import Any

from numba import types

from flashrt.backends.cpu import rows
from flashrt.backends.cpu.intrinsics import (
    inner,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    store_f32,
    store_f64,
    store_i32,
    store_i64,
    word,
)
from flashrt.backends.cpu.vector import LANES, any_above, load, load_whole, store, vdrawable

S = rows.Sample(*range(len(rows.Sample._fields)))
BUCKETS = rows.SAMPLE_BUCKETS
GREEDY = 1e-5
FAR = -60.0  # a distance from which e^distance adds nothing to a float64 sum that starts at 1
LARGEST = 3.4028234663852886e38


@inner
def splitmix64(x):
    """One step of the splitmix64 generator (Steele, Lea, Flood 2014)."""
    x = types.uint64(x + types.uint64(0x9E3779B97F4A7C15))
    x = types.uint64((x ^ (x >> types.uint64(30))) * types.uint64(0xBF58476D1CE4E5B9))
    x = types.uint64((x ^ (x >> types.uint64(27))) * types.uint64(0x94D049BB133111EB))
    return x ^ (x >> types.uint64(31))


@inner
def uniform(seed, draw):
    """A number in [0, 1) that depends on (seed, draw) alone."""
    bits = splitmix64(types.uint64(seed) ^ splitmix64(types.uint64(draw)))
    return types.float64(types.int64(bits >> types.uint64(11))) / 9007199254740992.0


@inner
def drawable(x):
    """NaN as -inf, +inf as the largest float32."""
    if x != x:
        return types.float32(-math.inf)
    return min(x, types.float32(LARGEST))


@inner
def penalised(x, penalty):
    if x == types.float32(-math.inf):
        return x
    y = x / penalty if x > 0 else x * penalty
    return min(max(y, types.float32(-LARGEST)), types.float32(LARGEST))


@inner
def largest(logits, v):
    """The index of the largest logit that can be drawn, the first of those."""
    best, top = types.int64(0), drawable(load_f32(logits))
    for i in range(0, v, LANES):
        some = min(LANES, v - i)
        if some == LANES and not any_above(load_whole(logits + 4 * i), top):
            continue
        for j in range(i, i + some):
            x = drawable(load_f32(logits + 4 * j))
            if x > top:
                best, top = types.int64(j), x
    return best


@inner
def prepare(row, n, values):
    """Logits that can be drawn, penalties applied, into `values`; the largest's index."""
    v, h = word(row, S.v), word(row, S.h)
    logits = word(row, S.logits) + 4 * n * word(row, S.logits_stride)
    for i in range(0, v, LANES):
        whole = load(logits + 4 * i, v - i)
        store(values + 4 * i, vdrawable(whole, types.float32(LARGEST)), v - i)
    penalty = load_f32(word(row, S.penalty) + 4 * n)
    if penalty != 1:
        for i in range(h):
            id = types.int64(load_i32(word(row, S.history) + 4 * (n * word(row, S.history_stride) + i)))
            if 0 <= id < v:
                # from the given logit: an id that stands twice counts once
                store_f32(values + 4 * id, penalised(drawable(load_f32(logits + 4 * id)), penalty))
    return largest(values, v)


@inner
def before(values, i, j):
    """Whether token i comes before token j: larger logit, or the same and a lower id."""
    a, b = load_f32(values + 4 * i), load_f32(values + 4 * j)
    return a > b or (a == b and i < j)


@inner
def sink_down(values, heap, at, count):
    while True:
        child = 2 * at + 1
        if child >= count:
            return
        left = types.int64(load_i32(heap + 4 * child))
        if child + 1 < count and before(values, left, types.int64(load_i32(heap + 4 * child + 4))):
            child += 1
        mine, theirs = types.int64(load_i32(heap + 4 * at)), types.int64(load_i32(heap + 4 * child))
        if not before(values, mine, theirs):
            return
        store_i32(heap + 4 * at, types.int32(theirs))
        store_i32(heap + 4 * child, types.int32(mine))
        at = child


@inner
def sort(values, list, count):
    """Heapsort of token ids into descending order."""
    for at in range((count >> 1) - 1, -1, -1):
        sink_down(values, list, at, count)
    for end in range(count - 1, 0, -1):
        first, last = load_i32(list), load_i32(list + 4 * end)
        store_i32(list, last)
        store_i32(list + 4 * end, first)
        sink_down(values, list, 0, end)


@inner
def distance(values, i, top, temperature):
    """(logit - largest) / temperature, at most 0."""
    return (types.float64(load_f32(values + 4 * i)) - top) / temperature


@inner
def bucket_of(d):
    """Buckets descend: 0 holds the largest logits. 1/16 wide; the last holds all the rest."""
    return types.int64(min(-d * 16.0, BUCKETS - 1.0))


@inner
def gather(values, list, v, top, temperature, bucket):
    """The tokens of one bucket in descending order; how many."""
    count = 0
    for i in range(v):
        if bucket_of(distance(values, i, top, temperature)) == bucket:
            store_i32(list + 4 * count, types.int32(i))
            count += 1
    sort(values, list, count)
    return count


@inner
def kth(values, list, counts, v, top, temperature, k):
    """The k-th token in descending order (the last one when there are fewer)."""
    for b in range(BUCKETS):
        store_i64(counts + 8 * b, 0)
    for i in range(v):
        at = counts + 8 * bucket_of(distance(values, i, top, temperature))
        store_i64(at, load_i64(at) + 1)
    k = min(k, v)
    seen, b = load_i64(counts), 0
    while seen < k:
        b += 1
        seen += load_i64(counts + 8 * b)
    gather(values, list, v, top, temperature, b)
    return types.int64(load_i32(list + 4 * (k - 1 - (seen - load_i64(counts + 8 * b)))))


@inner
def weight(values, i, top, temperature, least, last):
    """e^distance of a token that is kept, else 0. last: the last token kept by top_k, or -1."""
    d = distance(values, i, top, temperature)
    if d < FAR or (last >= 0 and before(values, last, i)):
        return 0.0
    p = math.exp(d)
    return p if p >= least else 0.0


@inner
def walk_to(values, list, masses, v, top, temperature, least, last, goal, passing):
    """The first token in descending order whose running sum reaches `goal` (exceeds it, if
    `passing`), and that sum; the last token with a weight when none does."""
    running, b = 0.0, 0
    while b < BUCKETS - 1:
        next = running + load_f64(masses + 8 * b)
        if (next > goal if passing else next >= goal) and load_f64(masses + 8 * b) > 0:
            break
        running = next
        b += 1
    if b == BUCKETS - 1 and load_f64(masses + 8 * b) == 0:
        while load_f64(masses + 8 * b) == 0:
            b -= 1
        running -= load_f64(masses + 8 * b)
    token, count = types.int64(0), gather(values, list, v, top, temperature, b)
    for at in range(count):
        i = types.int64(load_i32(list + 4 * at))
        p = weight(values, i, top, temperature, least, last)
        if p > 0:
            token = i
            running += p
            if running > goal if passing else running >= goal:
                break
    return token, running


@inner
def fill_masses(values, masses, v, top, temperature, least, last):
    """The weights of each bucket, added in order of ids; the sum of all buckets."""
    for b in range(BUCKETS):
        store_f64(masses + 8 * b, 0.0)
    for i in range(v):
        at = masses + 8 * bucket_of(distance(values, i, top, temperature))
        store_f64(at, load_f64(at) + weight(values, i, top, temperature, least, last))
    total = 0.0
    for b in range(BUCKETS):
        total += load_f64(masses + 8 * b)
    return total


@inner
def pick(row, n, values, list, counts, masses):
    """The token of row n."""
    v = word(row, S.v)
    temperature = types.float64(load_f32(word(row, S.temperature) + 4 * n))
    if temperature < GREEDY and load_f32(word(row, S.penalty) + 4 * n) == 1:
        return largest(word(row, S.logits) + 4 * n * word(row, S.logits_stride), v)
    best = prepare(row, n, values)
    top = types.float64(load_f32(values + 4 * best))
    if temperature < GREEDY or top == -math.inf:
        return best
    last, k = types.int64(-1), types.int64(load_i32(word(row, S.top_k) + 4 * n))
    if k > 0:
        last = kth(values, list, counts, v, top, temperature, k)
    least = types.float64(load_f32(word(row, S.min_p) + 4 * n))
    total = fill_masses(values, masses, v, top, temperature, least, last)
    share = types.float64(load_f32(word(row, S.top_p) + 4 * n))
    if share < 1:
        last, total = walk_to(values, list, masses, v, top, temperature, least, last, share * total, False)
        total = fill_masses(values, masses, v, top, temperature, least, last)
    u = uniform(load_i64(word(row, S.seed) + 8 * n), load_i64(word(row, S.draw) + 8 * n))
    return walk_to(values, list, masses, v, top, temperature, least, last, u * total, True)[0]


def sample() -> Any:
    """One token a row."""

    def kernel(tid, nth, row):
        count, v = word(row, S.n), word(row, S.v)
        values = word(row, S.scratch) + tid * word(row, S.scratch_stride)
        list = values + 4 * v
        counts = values + ((8 * v + 63) & -64)
        masses = counts + 8 * BUCKETS
        for n in range(count * tid // nth, count * (tid + 1) // nth):
            store_i32(word(row, S.y) + 4 * n, types.int32(pick(row, n, values, list, counts, masses)))

    return kernel
