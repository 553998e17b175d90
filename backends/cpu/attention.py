"""Paged attention with an online softmax: keys in chunks of one page, in order.

State kv[P, 2, heads, 16, dim], f32 or bf16: index 0 keys, 1 values; or [P, 1, …], where the values
are the last channels of the keys (latent attention). Keys are summed in ranges of RANGE pages,
and ranges are merged in order: so a step of few tokens can share the keys out among threads, and
neither the number of threads nor the other tokens of a step change a bit. In larger steps a (token,
head) pair is one thread's work; tokens of one sequence that follow each other are taken together,
page by page.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from flashrt.backends.cpu import rows
from flashrt.backends.cpu.attention_group import BYTES, GROUP_BYTES, HEADS, group_functions, sum_lanes
from flashrt.backends.cpu.intrinsics import (
    I64,
    atomic_add,
    copy_bytes,
    inner,
    intrinsic,
    load_f32,
    load_i32,
    number,
    operand,
    prefetch_lines,
    stack,
    store_f32,
    store_i64,
    word,
)
from flashrt.backends.cpu.rows import FEW, LATENT_BYTES, SHARED_BYTES
from flashrt.backends.cpu.share import dealt, over_tokens, run_at, runs_of
from flashrt.backends.cpu.tiles import floats, floats_part, load_at
from flashrt.backends.cpu.vector import (
    LANES,
    V,
    any_above,
    constant,
    f32x16,
    fma,
    joined,
    lane_max,
    lane_sum,
    lanes_between,
    load,
    load_whole,
    masked_load,
    muladd,
    spread,
    store,
    store_bf16_part,
    store_whole,
    vexp,
    vtanh,
)

RANGE = 8  # pages
SCORES = 16 * 64 + GROUP_BYTES  # bytes: of a page's scores, then sums of a group
slot_bytes = inner(rows.slot_bytes)
K = rows.KvWrite(*range(len(rows.KvWrite._fields)))
A = rows.Attention(*range(len(rows.Attention._fields)))


@inner
def page_of(pages, stride, seq, position):
    """The page that holds a position of a sequence."""
    return types.int64(load_i32(pages + 4 * (seq * stride + (position >> 4))))


@inner
def write_line(dst, src, count, item):
    """`count` floats as f32 (item 4) or bf16 (item 2)."""
    if item == 4:
        copy_bytes(dst, src, 4 * count)
        return
    for c in range(0, count, 16):
        store_bf16_part(dst + 2 * c, load(src + 4 * c, count - c), count - c)


def kv_write() -> Any:
    """Each token's keys and values into its row of its page."""

    @inner
    def body(row, first, last):
        heads, k_dim, v_dim = word(row, K.heads), word(row, K.k_dim), word(row, K.v_dim)
        item, line = word(row, K.item), word(row, K.item) * word(row, K.dim)
        planes, below = (1, k_dim * item) if word(row, K.latent) else (2, heads * 16 * line)
        for i in range(first * heads, last * heads):
            t, head = i // heads, i % heads
            position = types.int64(load_i32(word(row, K.positions) + 4 * t))
            seq = types.int64(load_i32(word(row, K.seq) + 4 * t))
            page = page_of(word(row, K.pages), word(row, K.pages_stride), seq, position)
            at = word(row, K.kv) + ((page * planes * heads + head) * 16 + (position & 15)) * line
            write_line(at, word(row, K.k) + 4 * (t * word(row, K.k_stride) + head * k_dim), k_dim, item)
            at += below
            write_line(at, word(row, K.v) + 4 * (t * word(row, K.v_stride) + head * v_dim), v_dim, item)

    return over_tokens(K.t, body)


@inner
def length_of(row, seq):
    """One more than the largest position that a sequence has in this step."""
    longest = types.int64(0)
    for t in range(word(row, A.t)):
        if load_i32(word(row, A.seq) + 4 * t) == seq:
            longest = max(longest, types.int64(load_i32(word(row, A.positions) + 4 * t)) + 1)
    return longest


@cache
def sixteen_dots(element: str, size: int) -> Any:
    """dots(q, keys, stride, dim) → lane i: q · (the key i·stride bytes beyond `keys`).

    size: dim when it is known beforehand, with keys that lie close; else 0. Lanes add up as in
    `vector.tree`, whatever the size.
    """
    width = BYTES[element]

    @intrinsic
    def dots(typing, q, keys, stride, dim):
        def codegen(context, b, signature, args):
            q, keys, stride, dim = args
            if size:
                # constant distances: no registers for sixteen addresses
                stride, dim = I64(width * size), I64(size)
            sums = [cgutils.alloca_once_value(b, constant(0.0)) for _ in range(LANES)]

            def add(c: ir.Value, count: ir.Value | None = None) -> None:
                """16 channels from c on, or `count` < 16 of them."""
                at_q, line = b.add(q, b.mul(c, I64(4))), b.add(keys, b.mul(c, I64(width)))
                one = load_at(b, at_q, V, 0, 4) if count is None else masked_load(b, at_q, count)
                for i, total in enumerate(sums):
                    row = b.add(line, b.mul(stride, I64(i)))
                    key = floats(b, row, element) if count is None else floats_part(b, row, element, count)
                    b.store(muladd(b, one, key, b.load(total)), total)

            for c in range(0, size, LANES):
                add(I64(c))
            if not size:
                with cgutils.for_range(b, b.lshr(dim, I64(4))) as loop:
                    add(b.mul(loop.index, I64(LANES)))
                rest = b.and_(dim, I64(15))
                with b.if_then(b.icmp_signed("!=", rest, I64(0))):
                    add(b.sub(dim, rest), rest)
            return joined(b, [b.load(total) for total in sums])

        return f32x16(*[types.int64] * 4), codegen

    return dots


@inner
def load_four(address):
    """64 floats."""
    at = address
    return load_whole(at), load_whole(at + 64), load_whole(at + 128), load_whole(at + 192)


@inner
def store_four(address, v0, v1, v2, v3):
    """64 floats."""
    store_whole(address, v0)
    store_whole(address + 64, v1)
    store_whole(address + 128, v2)
    store_whole(address + 192, v3)


@cache
def loaders(element: str) -> tuple[Any, Any]:
    """load_whole and load_part of keys or values, as float32."""

    @intrinsic
    def whole(typing, address):
        return f32x16(types.int64), lambda context, b, signature, args: floats(b, args[0], element)

    @intrinsic
    def part(typing, address, count):
        def codegen(context, b, signature, args):
            return floats_part(b, args[0], element, args[1])

        return f32x16(types.int64, types.int64), codegen

    return whole, part


@cache
def page_functions(element: str) -> tuple[Any, Any, Any]:
    """score(row, q, keys), mix(…) and mix_two(…) of pages of f32 or bf16; see `score_page` and `mix_page`."""
    dots_64, dots_128, dots_any = (sixteen_dots(element, size) for size in (64, 128, 0))
    whole, part = loaders(element)
    item = BYTES[element]

    @inner
    def four(address):
        return (
            whole(address),
            whole(address + 16 * item),
            whole(address + 32 * item),
            whole(address + 48 * item),
        )

    @inner
    def score(row, q, keys):
        dim, k_dim = word(row, A.dim), word(row, A.k_dim)
        if dim == 64 and k_dim == 64:
            return dots_64(q, keys, 64 * item, 64)
        if dim == 128 and k_dim == 128:
            return dots_128(q, keys, 128 * item, 128)
        return dots_any(q, keys, item * dim, k_dim)

    @inner
    def mix(row, values, first, last, weights, y):
        dim, stride = word(row, A.v_dim), item * word(row, A.dim)
        c = 0
        while dim - c >= 64:
            y0, y1, y2, y3 = load_four(y + 4 * c)
            for i in range(first, last):
                one = spread(load_f32(weights + 4 * i))
                v0, v1, v2, v3 = four(values + i * stride + item * c)
                y0, y1, y2, y3 = fma(one, v0, y0), fma(one, v1, y1), fma(one, v2, y2), fma(one, v3, y3)
            store_four(y + 4 * c, y0, y1, y2, y3)
            c += 64
        while c < dim:
            total = load(y + 4 * c, dim - c)
            for i in range(first, last):
                at = values + i * stride + item * c
                value = whole(at) if dim - c >= 16 else part(at, dim - c)
                total = fma(spread(load_f32(weights + 4 * i)), value, total)
            store(y + 4 * c, total, dim - c)
            c += 16

    @inner
    def mix_two(row, values, weights, y, y_stride):
        z, stride = y + y_stride, item * word(row, A.dim)
        for c in range(0, word(row, A.v_dim), 64):
            y0, y1, y2, y3 = load_four(y + 4 * c)
            z0, z1, z2, z3 = load_four(z + 4 * c)
            for i in range(16):
                one, two = spread(load_f32(weights + 4 * i)), spread(load_f32(weights + 64 + 4 * i))
                v0, v1, v2, v3 = four(values + item * c + i * stride)
                y0, y1, y2, y3 = fma(one, v0, y0), fma(one, v1, y1), fma(one, v2, y2), fma(one, v3, y3)
                z0, z1, z2, z3 = fma(two, v0, z0), fma(two, v1, z1), fma(two, v2, z2), fma(two, v3, z3)
            store_four(y + 4 * c, y0, y1, y2, y3)
            store_four(z + 4 * c, z0, z1, z2, z3)

    return score, mix, mix_two


score_f32, mix_f32, mix_two_f32 = page_functions("f32")
score_bf16, mix_bf16, mix_two_bf16 = page_functions("bf16")
group_dots_f32, group_mix_f32 = group_functions("f32")
group_dots_bf16, group_mix_bf16 = group_functions("bf16")


@inner
def score_page(row, q, keys, first, last):
    """Scores of rows [first, last) of a page; -inf in the other lanes."""
    v = score_bf16(row, q, keys) if word(row, A.item) == 2 else score_f32(row, q, keys)
    return seen_scores(row, v, first, last)


@inner
def seen_scores(row, v, first, last):
    """Dot products of a page → scores."""
    v = v * spread(types.float32(number(row, A.f64_scale)))
    cap = types.float32(number(row, A.f64_softcap))
    if cap > 0:
        v = spread(cap) * vtanh(v / spread(cap))
    return v if last - first == 16 else lanes_between(v, first, last, types.float32(-float("inf")))


@inner
def mix_page(row, values, first, last, weights, y):
    """y += Σ weights·values, rows [first, last) of a page"""
    if word(row, A.item) == 2:
        mix_bf16(row, values, first, last, weights, y)
    else:
        mix_f32(row, values, first, last, weights, y)


@inner
def mix_two(row, values, weights, y, y_stride):
    """`mix_page` of two tokens that see the whole page; v_dim is a multiple of 64."""
    if word(row, A.item) == 2:
        mix_two_bf16(row, values, weights, y, y_stride)
    else:
        mix_two_f32(row, values, weights, y, y_stride)


@inner
def scale_row(y, dim, by):
    """y *= by"""
    for c in range(0, dim, 16):
        store(y + 4 * c, load(y + 4 * c, dim - c) * spread(by), dim - c)


@inner
def weigh_page(row, scores, state, y):
    """Scores → weights, in place. state: sixteen sums of weights, then the highest score so far.

    A higher one makes all that was summed before smaller.
    """
    v, top, total = load_whole(scores), load_f32(state + 64), load_whole(state)
    if any_above(v, top):
        higher = max(top, lane_max(v))
        shrink = lane_max(vexp(spread(top - higher)))
        total = total * spread(shrink)
        scale_row(y, word(row, A.v_dim), shrink)
        store_f32(state + 64, higher)
        top = higher
    weights = vexp(v - spread(top))
    store_whole(scores, weights)
    store_whole(state, total + weights)


@inner
def start_of(row, position):
    """The first key that a token at this position sees."""
    window = word(row, A.window)
    return max(position + 1 - window, 0) if window > 0 else types.int64(0)


@inner
def begin_row(row, head, state, y):
    """Nothing is summed yet, but for a sink: a score of weight 1 without a value."""
    sinks = operand(row, A.sinks_at, A.sinks)
    store_whole(state, spread(types.float32(0)))
    store_f32(state + 64, types.float32(-float("inf")))
    if sinks != 0:
        store_f32(state, types.float32(1))
        store_f32(state + 64, load_f32(sinks + 4 * head))
    for c in range(0, word(row, A.v_dim), 16):
        store(y + 4 * c, spread(types.float32(0)), word(row, A.v_dim) - c)


@inner
def end_of(row, position, length):
    """One past the last key that a token at this position sees; length: of its sequence."""
    return position + 1 if word(row, A.causal) else length


@inner
def head_bytes(row):
    """Of a head's keys (or values) in one page."""
    return 16 * word(row, A.item) * word(row, A.dim)


@inner
def to_values(row):
    """Bytes from a key to its value: latent ones are the key's last channels."""
    if word(row, A.latent):
        return word(row, A.item) * (word(row, A.k_dim) - word(row, A.v_dim))
    return word(row, A.kv_heads) * head_bytes(row)


@inner
def attend_page(row, chunk, keys, position, count, length, q, q_stride, y, y_stride, states, scores):
    """One page for `count` tokens from `position`: scores, weights, values.

    In three loops, so that the processor finds work of several tokens to do at a time.
    """
    begin, end = types.int64(0), types.int64(count)
    while begin < count and end_of(row, position + begin, length) <= 16 * chunk:
        begin += 1
    while end > begin and start_of(row, position + end - 1) >= 16 * chunk + 16:
        end -= 1
    for i in range(begin, end):
        first = max(start_of(row, position + i) - 16 * chunk, 0)
        last = min(end_of(row, position + i, length) - 16 * chunk, 16)
        store_whole(scores + 64 * i, score_page(row, q + i * q_stride, keys, first, last))
    for i in range(begin, end):
        weigh_page(row, scores + 64 * i, states + 128 * i, y + i * y_stride)
    values, v_dim = keys + to_values(row), word(row, A.v_dim)
    here = begin
    while here < end:
        first = max(start_of(row, position + here) - 16 * chunk, 0)
        last = min(end_of(row, position + here, length) - 16 * chunk, 16)
        # ends rise from token to token, and so do starts
        whole = last == 16 and here + 1 < end and start_of(row, position + here + 1) <= 16 * chunk
        if whole and not v_dim & 63:
            mix_two(row, values, scores + 64 * here, y + here * y_stride, y_stride)
            here += 2
        else:
            mix_page(row, values, first, last, scores + 64 * here, y + here * y_stride)
            here += 1


@inner
def begin_part(row, state, y):
    """Nothing is summed yet."""
    store_whole(state, spread(types.float32(0)))
    store_f32(state + 64, types.float32(-float("inf")))
    for c in range(0, word(row, A.v_dim), 16):
        store(y + 4 * c, spread(types.float32(0)), word(row, A.v_dim) - c)


@inner
def merge(row, state, y, part, part_y):
    """Adds the sums of a range to those of all ranges before it."""
    top, other = load_f32(state + 64), load_f32(part + 64)
    if other == types.float32(-float("inf")):
        return
    dim, grow = word(row, A.v_dim), types.float32(1)
    if other > top:
        shrink = lane_max(vexp(spread(top - other)))
        store_whole(state, load_whole(state) * spread(shrink))
        scale_row(y, dim, shrink)
        store_f32(state + 64, other)
    else:
        grow = lane_max(vexp(spread(other - top)))
    store_whole(state, fma(spread(grow), load_whole(part), load_whole(state)))
    for c in range(0, dim, 16):
        store(y + 4 * c, fma(spread(grow), load(part_y + 4 * c, dim - c), load(y + 4 * c, dim - c)), dim - c)


@inner
def finish_row(row, state, y):
    """Sums of weighted values → their mean."""
    scale_row(y, word(row, A.v_dim), types.float32(1) / lane_sum(load_whole(state)))


@inner
def keys_of(row, seq, chunk, kv_head):
    """Where the keys of a page of one head begin; its values are `to_values` bytes behind."""
    page = page_of(word(row, A.pages), word(row, A.pages_stride), seq, 16 * chunk)
    planes = 1 if word(row, A.latent) else 2
    return word(row, A.kv) + (page * planes * word(row, A.kv_heads) + kv_head) * head_bytes(row)


@inner
def attend(row, t, count, head, states, scores, memory):
    """One head of `count` tokens from t: one sequence, positions one after the other.

    Page by page, so that a page is read from memory once for all of them. Each token's sums are
    its own: alone it gives the same bits. memory: sums of a range, a row for each token.
    """
    position = types.int64(load_i32(word(row, A.positions) + 4 * t))
    seq = types.int64(load_i32(word(row, A.seq) + 4 * t))
    kv_head, v_dim = head // (word(row, A.heads) // word(row, A.kv_heads)), word(row, A.v_dim)
    q_stride, y_stride = 4 * word(row, A.q_stride), 4 * word(row, A.y_stride)
    q = word(row, A.q) + t * q_stride + 4 * head * word(row, A.k_dim)
    y = word(row, A.y) + t * y_stride + 4 * head * v_dim
    parts = states + 16 * 128
    for i in range(count):
        begin_row(row, head, states + 128 * i, y + i * y_stride)
    length = types.int64(0) if word(row, A.causal) else length_of(row, seq)
    chunk, end = start_of(row, position) >> 4, (end_of(row, position + count - 1, length) + 15) >> 4
    while chunk < end:
        for i in range(count):
            begin_part(row, parts + 128 * i, memory + 4 * i * v_dim)
        stop = min(end, (chunk // RANGE + 1) * RANGE)
        for c in range(chunk, stop):
            keys = keys_of(row, seq, c, kv_head)
            attend_page(row, c, keys, position, count, length, q, q_stride, memory, 4 * v_dim, parts, scores)
        for i in range(count):
            merge(row, states + 128 * i, y + i * y_stride, parts + 128 * i, memory + 4 * i * v_dim)
        chunk = stop
    for i in range(count):
        finish_row(row, states + 128 * i, y + i * y_stride)


# ---- few tokens: their keys are shared out, too --------------------------------------------
@inner
def ranges_of(row, t):
    """(first page, one past the last page) of a token's keys."""
    position = types.int64(load_i32(word(row, A.positions) + 4 * t))
    length = types.int64(0)
    if not word(row, A.causal):
        length = length_of(row, types.int64(load_i32(word(row, A.seq) + 4 * t)))
    return start_of(row, position) >> 4, (end_of(row, position, length) + 15) >> 4


@inner
def range_count(first, end):
    """Ranges that pages [first, end) touch."""
    return (end + RANGE - 1) // RANGE - first // RANGE


@inner
def slots_needed(row):
    """How many sums of a range all tokens and heads of the step need."""
    count = types.int64(0)
    for t in range(word(row, A.t)):
        first, end = ranges_of(row, t)
        count += range_count(first, end) * word(row, A.heads)
    return count


@inner
def attend_group(row, q, count, keys, below, first, last, slot, size, scores):
    """One page for `count` heads. slot: of the first one's sums, `size` bytes from head to head."""
    sums, v_dim = scores + 16 * 64, word(row, A.v_dim)
    if word(row, A.item) == 2:
        group_dots_bf16(row, q, keys, count, sums)
    else:
        group_dots_f32(row, q, keys, count, sums)
    for h in range(count):
        store_whole(scores + 64 * h, seen_scores(row, sum_lanes(sums + 1024 * h), first, last))
        weigh_page(row, scores + 64 * h, slot + h * size + 4 * v_dim, slot + h * size)
    if word(row, A.item) == 2:
        group_mix_bf16(row, keys + below, first, last, count, scores, slot, size)
    else:
        group_mix_f32(row, keys + below, first, last, count, scores, slot, size)


@inner
def attend_range(row, t, kv_head, begin, stop, slot, scores):
    """All heads of one key head over pages [begin, stop): a page is read once for all of them.

    slot: where their sums go, one after the other: v_dim floats, then a state. scores: SCORES bytes.
    """
    position = types.int64(load_i32(word(row, A.positions) + 4 * t))
    seq = types.int64(load_i32(word(row, A.seq) + 4 * t))
    group, k_dim, v_dim = word(row, A.heads) // word(row, A.kv_heads), word(row, A.k_dim), word(row, A.v_dim)
    length = types.int64(0) if word(row, A.causal) else length_of(row, seq)
    q = word(row, A.q) + 4 * (t * word(row, A.q_stride) + kv_head * group * k_dim)
    size, below, lines = slot_bytes(v_dim), to_values(row), head_bytes(row) >> 6
    for h in range(group):
        begin_part(row, slot + h * size + 4 * v_dim, slot + h * size)
    for c in range(begin, stop):
        keys = keys_of(row, seq, c, kv_head)
        if c + 2 < stop:
            following = keys_of(row, seq, c + 2, kv_head)
            prefetch_lines(following, lines)
            prefetch_lines(following + below, lines)
        first = max(start_of(row, position) - 16 * c, 0)
        last = min(end_of(row, position, length) - 16 * c, 16)
        if k_dim & 63 or v_dim & 63:
            for h in range(group):
                store_whole(scores, score_page(row, q + 4 * h * k_dim, keys, first, last))
                weigh_page(row, scores, slot + h * size + 4 * v_dim, slot + h * size)
                mix_page(row, keys + below, first, last, scores, slot + h * size)
            continue
        for h in range(0, group, HEADS):
            count, at = min(HEADS, group - h), slot + h * size
            attend_group(row, q + 4 * h * k_dim, count, keys, below, first, last, at, size, scores)


@inner
def merge_ranges(row, t, kv_head, slot, count, states):
    """The sums of all ranges, in order, of the heads of one key head."""
    group, v_dim = word(row, A.heads) // word(row, A.kv_heads), word(row, A.v_dim)
    size = slot_bytes(v_dim)
    for h in range(group):
        y = word(row, A.y) + 4 * (t * word(row, A.y_stride) + (kv_head * group + h) * v_dim)
        begin_row(row, kv_head * group + h, states, y)
        for i in range(count):
            part = slot + (i * group + h) * size
            merge(row, states, y, part + 4 * v_dim, part)
        finish_row(row, states, y)


@inner
def attend_few(tid, nth, row, states, scores):
    """Ranges of keys in turn; whoever ends the last one of a token and key head merges them."""
    kv_heads, group = word(row, A.kv_heads), word(row, A.heads) // word(row, A.kv_heads)
    size = group * slot_bytes(word(row, A.v_dim))
    counters, slots = word(row, A.shared), word(row, A.shared) + 8 * FEW * kv_heads
    item = types.int64(0)
    for t in range(word(row, A.t)):
        begin, end = ranges_of(row, t)
        count = range_count(begin, end)
        for kv_head in range(kv_heads):
            for i in range(count):
                if (item + i) % nth == tid:
                    first = max(begin, (begin // RANGE + i) * RANGE)
                    last = min(end, (begin // RANGE + i + 1) * RANGE)
                    attend_range(row, t, kv_head, first, last, slots + (item + i) * size, scores)
                    counter = counters + 8 * (t * kv_heads + kv_head)
                    if atomic_add(counter, 1) + 1 == count:
                        store_i64(counter, 0)
                        merge_ranges(row, t, kv_head, slots + item * size, count, states)
            item += count


@inner
def run_length(row, t, most):
    """How many tokens from t on, at most `most`, follow each other in one sequence."""
    positions, seq = word(row, A.positions), word(row, A.seq)
    count = 1
    while (
        count < most
        and load_i32(seq + 4 * (t + count)) == load_i32(seq + 4 * t)
        and load_i32(positions + 4 * (t + count)) == load_i32(positions + 4 * t) + count
    ):
        count += 1
    return count


@inner
def attend_all(row, t, end, head, states, scores, memory):
    """One head of tokens [t, end), at most 16."""
    while t < end:
        count = run_length(row, t, end - t)
        attend(row, t, count, head, states, scores, memory)
        t += count


def attention() -> Any:
    """softmax(q·k·scale)·v over the keys that each token may see."""

    def kernel(tid, nth, row):
        heads, tokens = word(row, A.heads), word(row, A.t)
        states, scores = stack(2 * 16 * 128), stack(SCORES)
        memory = word(row, A.scratch) + tid * word(row, A.scratch_stride)
        room = LATENT_BYTES if word(row, A.latent) else SHARED_BYTES
        if tokens <= FEW and slots_needed(row) * slot_bytes(word(row, A.v_dim)) <= room:
            attend_few(tid, nth, row, states, scores)
            return
        if dealt(tokens, nth):
            for i in range(runs_of(tokens, nth)):
                first, last = run_at(i, tokens, tid, nth)
                for head in range(heads):
                    for t in range(first, last, 16):
                        attend_all(row, t, min(t + 16, last), head, states, scores, memory)
            return
        size = 16 if tokens >= 64 else 1  # few tokens: single ones spread better over the threads
        blocks = (tokens + size - 1) // size
        # in turn: blocks of late tokens see more keys than those of early ones
        for item in range(tid, blocks * heads, nth):
            head, t = item // blocks, size * (item % blocks)
            attend_all(row, t, min(t + size, tokens), head, states, scores, memory)

    return kernel
