"""Paged attention in AMX tiles, for steps of many tokens: numerics
"act=bf16 acc=f32 chunk=2pages kv=bf16".

Queries and weights are rounded to bf16, as keys and values are; scores and sums are float32. The queries of a
tile are (token, head) pairs of one key head: sixteen lanes. Scores come as [key, query], so that the
maximum and the sum over keys are taken lane by lane, and results are summed as [channel, query].
Keys are taken 32 at a time, in order, and a query's sums depend on nothing else: so neither the
number of threads nor the other tokens of a step change a bit.

A thread's memory: query tiles, sums, states (64 bytes each: sum of weights, highest score, positions),
one block of keys and one of values, scores and weights of the tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from flashrt.backends.cpu.amx import pairs, tile, tiles_off, tiles_on
from flashrt.backends.cpu.attention import A, keys_of, length_of, run_length, start_of, to_values
from flashrt.backends.cpu.intrinsics import (
    I8,
    I64,
    at,
    inner,
    intrinsic,
    load_f32,
    load_i32,
    number,
    operand,
    stack,
    store_f32,
    word,
)
from flashrt.backends.cpu.rows import ATTENTION_TILES, RUN, TILE
from flashrt.backends.cpu.share import dealt, run_at, runs_of
from flashrt.backends.cpu.tiles import load_at
from flashrt.backends.cpu.vector import (
    LANES,
    VI,
    VS,
    V,
    any_above,
    call,
    constant,
    f32x16,
    fma,
    load,
    load_whole,
    masked_load,
    muladd,
    splat,
    spread,
    store,
    store_bf16,
    store_whole,
    vmax,
    vtanh,
)

KEYS = 32  # of a block: the depth of a tile product
STATE = 256  # bytes of a tile's state
LOG2_E = 1.4426950408889634
_LOWEST = -1e30  # stands for a maximum of nothing; the weights of what is masked are 0 beside it
# (2^f - 1) / f for |f| ≤ 1/2, fitted at Chebyshev nodes, so that 2^0 is 1 and 2^f right to 4e-6
_NODES = np.cos((np.arange(64) + 0.5) * np.pi / 64) / 2
_POWER = tuple(float(c) for c in np.polyfit(_NODES, (2.0**_NODES - 1) / _NODES, 3))


@intrinsic
def power(typing, v):
    """2^v, v ≤ 0; good enough for what is then rounded to bf16."""

    def codegen(context, b, signature, args):
        v = b.select(b.fcmp_ordered(">", args[0], constant(-200.0)), args[0], constant(-200.0))
        whole = call(b, "llvm.rint.v16f32", V, v)
        f = b.fsub(v, whole)
        p = constant(_POWER[0])
        for c in (*_POWER[1:], 1.0):
            p = muladd(b, p, f, constant(c))
        biased = b.add(b.fptosi(whole, VI), ir.Constant(VI, [127] * LANES))
        # below 2^-126 there is nothing but zero
        biased = b.select(
            b.icmp_signed(">", biased, ir.Constant(VI, [0] * LANES)), biased, ir.Constant(VI, None)
        )
        return b.fmul(p, b.bitcast(b.shl(biased, ir.Constant(VI, [23] * LANES)), V))

    return f32x16(f32x16), codegen


@intrinsic
def seen(typing, v, key, after, last):
    """v where after < key ≤ last, -inf elsewhere."""

    def codegen(context, b, signature, args):
        v, key, after, last = args
        keys = splat(b, key)
        inside = b.and_(b.fcmp_ordered("<", after, keys), b.fcmp_ordered("<=", keys, last))
        return b.select(inside, v, constant(-float("inf")))

    return f32x16(f32x16, types.float32, f32x16, f32x16), codegen


@intrinsic
def store_pairs(typing, dst, even, odd):
    """Lanes of both, rounded to bf16, side by side."""

    def codegen(context, b, signature, args):
        value = pairs(b, args[1], args[2])
        b.store(value, at(b, args[0], value.type)).align = 64
        return context.get_dummy_value()

    return types.void(types.int64, f32x16, f32x16), codegen


@intrinsic
def copy_words(typing, dst, src, count):
    """min(32, `count`) 16-bit words, zeros behind up to 32."""

    def codegen(context, b, signature, args):
        dst, src, count = args
        for half in range(2):
            left = b.sub(count, I64(16 * half))
            value = masked_load(b, b.add(src, I64(32 * half)), left, VS)
            b.store(value, at(b, b.add(dst, I64(32 * half)), VS)).align = 2
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def join_words(typing, dst, even, odd, even_count, odd_count):
    """16 pairs of 16-bit words: the first counts of each from memory, zeros behind."""

    def codegen(context, b, signature, args):
        dst, even, odd, even_count, odd_count = args
        low = b.zext(masked_load(b, even, even_count, VS), VI)
        high = b.shl(b.zext(masked_load(b, odd, odd_count, VS), VI), ir.Constant(VI, [16] * LANES))
        b.store(b.or_(low, high), at(b, dst, VI)).align = 4
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def transpose(typing, dst, src, src_stride):
    """16 rows of 16 words (src_stride bytes apart) → their columns, as rows that lie close."""

    def codegen(context, b, signature, args):
        dst, src, src_stride = args
        rows = [load_at(b, b.add(src, b.mul(src_stride, I64(i))), VI, 0, 4) for i in range(LANES)]
        width = LANES // 2
        while width:
            # rows i and i + width trade the quarter that lies on the wrong side of the diagonal
            low = [lane if not lane & width else LANES + lane - width for lane in range(LANES)]
            high = [lane + width if not lane & width else LANES + lane for lane in range(LANES)]
            for i in (i for i in range(LANES) if not i & width):
                both = rows[i], rows[i + width]
                rows[i], rows[i + width] = (
                    b.shuffle_vector(*both, ir.Constant(VI, order)) for order in (low, high)
                )
            width //= 2
        for i, row in enumerate(rows):
            b.store(row, at(b, b.add(dst, I64(64 * i)), VI)).align = 4
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def score_tiles(typing, keys, keys_stride, queries, depth, scores):
    """scores f32[32][16] = keys bf16[32, 32·depth] · queries: a tile for each 32 channels."""

    def codegen(context, b, signature, args):
        keys, keys_stride, queries, depth, scores = args
        for i in range(2):
            tile(b, "tilezero", i)
        with cgutils.for_range(b, depth) as loop:
            tile(b, "tileloadd64", 2, at(b, b.add(queries, b.mul(loop.index, I64(TILE))), I8), I64(64))
            for i in range(2):
                rows = b.add(b.add(keys, b.mul(loop.index, I64(64))), b.mul(keys_stride, I64(16 * i)))
                tile(b, "tileloadd64", 3, at(b, rows, I8), keys_stride)
                tile(b, "tdpbf16ps", i, 3, 2)
        for i in range(2):
            tile(b, "tilestored64", i, at(b, b.add(scores, I64(TILE * i)), I8), I64(64))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def mix_tiles(typing, values, weights, sums, count):
    """sums f32[16·count][16] += values bf16[16·count][32] · weights bf16[32][16]"""

    def codegen(context, b, signature, args):
        values, weights, sums, count = args
        tile(b, "tileloadd64", 2, at(b, weights, I8), I64(64))
        with cgutils.for_range(b, count) as loop:
            offset = b.mul(loop.index, I64(TILE))
            at_sums = at(b, b.add(sums, offset), I8)
            tile(b, "tileloadd64", 0, at_sums, I64(64))
            tile(b, "tileloadd64", 3, at(b, b.add(values, offset), I8), I64(64))
            tile(b, "tdpbf16ps", 0, 3, 2)
            tile(b, "tilestored64", 0, at_sums, I64(64))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@inner
def parts(row):
    """(tiles of a query's channels, tiles of a result's channels)"""
    return (word(row, A.k_dim) + 31) >> 5, (word(row, A.v_dim) + 15) >> 4


@inner
def places(row, memory):
    """Addresses of query tiles, sums, states, keys, values, scores, weights in a thread's memory."""
    deep, wide = parts(row)
    sums = memory + ATTENTION_TILES * TILE * deep
    states = sums + ATTENTION_TILES * TILE * wide
    keys = states + ATTENTION_TILES * STATE
    values = keys + 2 * TILE * deep
    scores = values + TILE * wide
    return memory, sums, states, keys, values, scores, scores + ATTENTION_TILES * 2 * TILE


@inner
def begin_tile(row, j, t, kv_head, first, queries, position, memory):
    """The j-th tile: its queries as a product takes them, nothing summed yet.

    A sink is a score of weight 1 without a value.
    """
    at_queries, at_sums, states, stage, _, _, _ = places(row, memory)
    deep, wide = parts(row)
    group, k_dim = word(row, A.heads) // word(row, A.kv_heads), word(row, A.k_dim)
    sinks, state = operand(row, A.sinks_at, A.sinks), states + STATE * j
    for lane in range(16):
        query = first + 16 * j + lane
        token, head = query // group, kv_head * group + query % group
        q = word(row, A.q) + 4 * ((t + token) * word(row, A.q_stride) + head * k_dim)
        for c in range(0, 32 * deep, 16):
            # lanes beyond the last query are zeros
            store_bf16(stage + lane * 64 * deep + 2 * c, load(q + 4 * c, k_dim - c if query < queries else 0))
        store_f32(state + 128 + 4 * lane, types.float32(position + token))
        store_f32(state + 4 * lane, types.float32(0 if sinks == 0 else 1))
        top = types.float32(-float("inf"))
        if sinks != 0 and query < queries:
            top = load_f32(sinks + 4 * head) * types.float32(LOG2_E)
        store_f32(state + 64 + 4 * lane, top)
    for c in range(deep):
        transpose(at_queries + TILE * (j * deep + c), stage + 64 * c, 64 * deep)
    for i in range(16 * wide):
        store_whole(at_sums + TILE * j * wide + 64 * i, spread(types.float32(0)))


@inner
def take_keys(row, seq, kv_head, base, end, memory):
    """The block's keys, row by row, and its values, column by column.

    Rows from `end` on may hold anything: of keys they are left out (their scores are masked), of values
    they are zeros.
    """
    _, _, _, keys, values, stage, _ = places(row, memory)
    deep, wide = parts(row)
    line, k_dim, v_dim = 2 * word(row, A.dim), word(row, A.k_dim), word(row, A.v_dim)
    count = min(end - base, KEYS)
    first = keys_of(row, seq, base >> 4, kv_head)
    second = keys_of(row, seq, (base >> 4) + 1, kv_head) if count > 16 else first
    for r in range(count):
        source = (first if r < 16 else second) + (r & 15) * line
        for c in range(deep):
            copy_words(keys + 64 * (r * deep + c), source + 64 * c, k_dim - 32 * c)
    below = to_values(row)
    for i in range(wide):
        for r in range(16):
            source = (first if r < 8 else second) + below + ((2 * r) & 15) * line + 32 * i
            left = v_dim - 16 * i
            join_words(stage + 64 * r, source, source + line, left if 2 * r < count else 0,
                       left if 2 * r + 1 < count else 0)  # fmt: skip
        transpose(values + TILE * i, stage, 64)


@inner
def mask_scores(row, scores, positions, base, end):
    """-inf for keys that a query doesn't see, and from `end` on."""
    last = positions if word(row, A.causal) else spread(types.float32(end - 1))
    window = word(row, A.window)
    after = positions - spread(types.float32(window) if window > 0 else types.float32(float("inf")))
    for r in range(KEYS):
        v = spread(types.float32(-float("inf")))
        if base + r < end:
            v = seen(load_whole(scores + 64 * r), types.float32(base + r), after, last)
        store_whole(scores + 64 * r, v)


@inner
def scale_scores(row, scores):
    """In units of log 2."""
    cap, scale = types.float32(number(row, A.f64_softcap)), types.float32(number(row, A.f64_scale))
    for r in range(KEYS):
        v = load_whole(scores + 64 * r)
        if cap > 0:
            v = spread(cap) * vtanh(v * spread(scale / cap)) * spread(types.float32(LOG2_E))
        else:
            v = v * spread(scale * types.float32(LOG2_E))
        store_whole(scores + 64 * r, v)


@inner
def weigh(row, scores, weights, state, sums, factor):
    """Scores, times `factor` in units of log 2, → weights; a higher maximum makes earlier sums smaller."""
    wide, by = parts(row)[1], spread(factor)
    higher = load_whole(scores)
    for r in range(1, KEYS):
        higher = vmax(higher, load_whole(scores + 64 * r))
    top, total = load_whole(state + 64), load_whole(state)
    higher = vmax(top, higher * by)
    less = spread(types.float32(0)) - vmax(higher, spread(types.float32(_LOWEST)))
    if any_above(higher - top, types.float32(0)):
        shrink = power(top + less)
        total = total * shrink
        for i in range(16 * wide):
            store_whole(sums + 64 * i, load_whole(sums + 64 * i) * shrink)
        store_whole(state + 64, higher)
    for r in range(0, KEYS, 2):
        even = power(fma(load_whole(scores + 64 * r), by, less))
        odd = power(fma(load_whole(scores + 64 * r + 64), by, less))
        total = total + (even + odd)
        store_pairs(weights + 32 * r, even, odd)
    store_whole(state, total)


@inner
def weigh_tile(row, j, base, end, from_position, to_position, memory):
    """The j-th tile, whose queries stand at these positions (both ends included)."""
    _, sums, states, _, _, all_scores, all_weights = places(row, memory)
    scores, weights, state = all_scores + 2 * TILE * j, all_weights + TILE * j, states + STATE * j
    factor = types.float32(number(row, A.f64_scale)) * types.float32(LOG2_E)
    if number(row, A.f64_softcap) > 0 or factor <= 0:
        scale_scores(row, scores)
        factor = types.float32(1)
    late = word(row, A.causal) != 0 and base + KEYS - 1 > from_position
    if late or base + KEYS > end or base < start_of(row, to_position):
        mask_scores(row, scores, load_whole(state + 128), base, end)
    weigh(row, scores, weights, state, sums + TILE * j * parts(row)[1], factor)


@inner
def attend_block(row, begin, tiles, base, end, first, queries, position, memory):
    """Tiles [begin, tiles) and one block of keys. One kind of work after the other: a tile product waits
    for what was stored just before, and here that is another tile's."""
    at_queries, sums, _, keys, values, scores, weights = places(row, memory)
    deep, wide = parts(row)
    group = word(row, A.heads) // word(row, A.kv_heads)
    for j in range(begin, tiles):
        score_tiles(keys, 64 * deep, at_queries + TILE * j * deep, deep, scores + 2 * TILE * j)
    for j in range(begin, tiles):
        one = position + (first + 16 * j) // group
        other = position + (min(first + 16 * j + 16, queries) - 1) // group
        weigh_tile(row, j, base, end, one, other, memory)
    for j in range(begin, tiles):
        mix_tiles(values, weights + TILE * j, sums + TILE * j * wide, wide)


@inner
def end_tile(row, j, t, kv_head, first, queries, memory):
    """Divides by the sum of weights and stores."""
    _, all_sums, states, _, turned, scores, _ = places(row, memory)
    _, wide = parts(row)
    group, v_dim = word(row, A.heads) // word(row, A.kv_heads), word(row, A.v_dim)
    inverse = spread(types.float32(1)) / load_whole(states + STATE * j)
    for i in range(wide):
        for r in range(16):
            store_whole(scores + 64 * r, load_whole(all_sums + TILE * (j * wide + i) + 64 * r) * inverse)
        transpose(turned, scores, 64)
        for lane in range(min(16, queries - first - 16 * j)):
            query = first + 16 * j + lane
            head = kv_head * group + query % group
            y = word(row, A.y) + 4 * ((t + query // group) * word(row, A.y_stride) + head * v_dim + 16 * i)
            store(y, load_whole(turned + 64 * lane), v_dim - 16 * i)


@inner
def attend_tiles(row, t, kv_head, first, queries, position, seq, end, memory):
    """Queries from `first` on of a run of tokens from t: as many tiles as there is room for.

    end: one past the last key that any of them sees.
    """
    group = word(row, A.heads) // word(row, A.kv_heads)
    tiles = min((queries - first + 15) >> 4, ATTENTION_TILES)
    for j in range(tiles):
        begin_tile(row, j, t, kv_head, first, queries, position, memory)
    begin = start_of(row, position + first // group) // KEYS
    for block in range(begin, (end + KEYS - 1) // KEYS):
        base = KEYS * block
        take_keys(row, seq, kv_head, base, end, memory)
        # the first tiles may stand before all of these keys, and see none
        seeing = types.int64(0)
        while word(row, A.causal) and position + (first + 16 * seeing + 15) // group < base:
            seeing += 1
        attend_block(row, seeing, tiles, base, end, first, queries, position, memory)
    for j in range(tiles):
        end_tile(row, j, t, kv_head, first, queries, memory)


@inner
def attend_run(row, t, last, kv_head, memory):
    """One key head's queries of tokens [t, last)."""
    group = word(row, A.heads) // word(row, A.kv_heads)
    while t < last:
        count = run_length(row, t, last - t)
        position = types.int64(load_i32(word(row, A.positions) + 4 * t))
        seq = types.int64(load_i32(word(row, A.seq) + 4 * t))
        end = position + count if word(row, A.causal) else length_of(row, seq)
        for first in range(0, count * group, 16 * ATTENTION_TILES):
            attend_tiles(row, t, kv_head, first, count * group, position, seq, end, memory)
        t += count


def attention() -> Any:
    """softmax(q·k·scale)·v over the keys that each token may see."""

    def kernel(tid, nth, row):
        heads, tokens = word(row, A.kv_heads), word(row, A.t)
        memory = word(row, A.scratch) + tid * word(row, A.scratch_stride)
        tiles_on(stack(64))
        if dealt(tokens, nth):
            for i in range(runs_of(tokens, nth)):
                first, last = run_at(i, tokens, tid, nth)
                for head in range(heads):
                    attend_run(row, first, last, head, memory)
        else:
            runs = (tokens + RUN - 1) // RUN
            for item in range(tid, runs * heads, nth):
                first = RUN * (item // heads)
                attend_run(row, first, min(first + RUN, tokens), item % heads, memory)
        tiles_off()

    return kernel
