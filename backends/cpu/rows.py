"""What a row of the table holds: the one definition that encoder, walk and kernels share.

A row is ROW int64 words: the header (`Header`), then the fields of its kernel
(one of the classes below). Fields are plain numbers: addresses, sizes, strides
and bit patterns of floats. Sizes and addresses that depend on symbols are
written anew before a run whenever a symbol has changed (`table.Code.refresh`).

A weight may move from step to step (a ring), so it is two fields: `w_at`, the
address of its word in the block table (0: there is none), and `w`, bytes beyond
what that word holds. Where an operand may be a slot, `…_at` is 0 and the other
field is the whole address; both 0 means that the operand is absent.

Strides of rows count elements unless a field says bytes. `f64_…` fields hold
the bits of a float64.
"""

from __future__ import annotations

from typing import NamedTuple

from flashrt.ir.types import Dim

ROW = 40  # int64 words in a row


class Header(NamedTuple):
    """The part of a row that the walk reads.

    kernel: address. solo: 1 when thread 0 does it alone. waits, waits_end: range of pairs
    (address of a tick, steps back as a number ≤ 0) in the wait list. signals, signals_end: range
    of tick addresses in the signal list. taken: of what threads take in turns, how much is; 0 between runs.
    """

    kernel: Dim
    solo: Dim
    waits: Dim
    waits_end: Dim
    signals: Dim
    signals_end: Dim
    taken: Dim


class Linear(NamedTuple):
    """y[T,N] = x[T,K]·wᵀ + bias + residual. x is f32, or what `quantize` made of it (x_stride in elements).

    scratch: memory of each thread, scratch_stride bytes apart; 0 for kernels that need none.
    """

    x: Dim
    x_stride: Dim
    w_at: Dim
    w: Dim
    y: Dim
    y_stride: Dim
    bias_at: Dim
    bias: Dim
    residual: Dim
    residual_stride: Dim
    t: Dim
    n: Dim
    k: Dim
    scratch: Dim = 0
    scratch_stride: Dim = 0


class Heads(NamedTuple):
    """y[T, heads*(d-k+n)]: of each head of x[T, heads*d] the channels from k on, then its first k times its
    rows of w[heads*n, k].

    head_bytes, unit_bytes: of a head's weights, of 16 of its channels.
    """

    x: Dim
    x_stride: Dim
    d: Dim
    w_at: Dim
    w: Dim
    head_bytes: Dim
    unit_bytes: Dim
    y: Dim
    y_stride: Dim
    t: Dim
    heads: Dim
    n: Dim
    k: Dim


class Embedding(NamedTuple):
    """y[T,C] = rows ids[T] of w[V,C]; NaN where an id is outside [0, V). id_bytes: 4 for i32, 8 for i64."""

    ids: Dim
    w_at: Dim
    w: Dim
    y: Dim
    y_stride: Dim
    t: Dim
    v: Dim
    c: Dim
    id_bytes: Dim


class Norm(NamedTuple):
    """Each group of `width` channels of x[T, groups*width] normalised. `w_size`: elements of w (and b)."""

    x: Dim
    x_stride: Dim
    w_at: Dim
    w: Dim
    b_at: Dim
    b: Dim
    y: Dim
    y_stride: Dim
    t: Dim
    groups: Dim
    width: Dim
    w_size: Dim
    f64_eps: Dim
    f64_offset: Dim


class RopeTable(NamedTuple):
    """y[T, 2*half] = cosines, then sines, of positions[T]·w[half]. position_bytes: 4 for i32, 8 for i64."""

    positions: Dim
    w_at: Dim
    w: Dim
    y: Dim
    y_stride: Dim
    t: Dim
    half: Dim
    f64_scale: Dim
    position_bytes: Dim


class Rope(NamedTuple):
    """The first 2*half channels of each head of x[T, heads*dim] rotated by table[T, 2*half]."""

    x: Dim
    x_stride: Dim
    table: Dim
    table_stride: Dim
    y: Dim
    y_stride: Dim
    t: Dim
    heads: Dim
    dim: Dim
    half: Dim


class KvWrite(NamedTuple):
    """k[T, heads*k_dim] and v[T, heads*v_dim] into the pages of kv[P,2,heads,16,dim], `item` bytes each.

    latent: whether kv is [P,1,…], and v stands behind k in it.
    """

    k: Dim
    k_stride: Dim
    v: Dim
    v_stride: Dim
    positions: Dim
    seq: Dim
    pages: Dim
    pages_stride: Dim
    kv: Dim
    t: Dim
    heads: Dim
    k_dim: Dim
    v_dim: Dim
    dim: Dim
    item: Dim
    latent: Dim


class Attention(NamedTuple):
    """y[T, heads*v_dim] = attention of q[T, heads*k_dim] over kv[P,2,kv_heads,16,dim].

    item: bytes of an element of kv. window, softcap: 0 is none. scratch: of each thread, scratch_stride
    bytes apart. shared: of all threads, zeros between steps (`attention.attend_few`). latent: whether kv is
    [P,1,…], and the last v_dim channels of a key are its value.
    """

    q: Dim
    q_stride: Dim
    positions: Dim
    seq: Dim
    pages: Dim
    pages_stride: Dim
    kv: Dim
    sinks_at: Dim
    sinks: Dim
    y: Dim
    y_stride: Dim
    t: Dim
    heads: Dim
    kv_heads: Dim
    k_dim: Dim
    v_dim: Dim
    dim: Dim
    item: Dim
    window: Dim
    causal: Dim
    f64_scale: Dim
    f64_softcap: Dim
    latent: Dim
    scratch: Dim = 0
    scratch_stride: Dim = 0
    shared: Dim = 0


class Map(NamedTuple):
    """y = f(a, b) elementwise over [rows, width].

    b_stride 0: one row for all; b_step 0: one number for all.
    """

    a: Dim
    a_stride: Dim
    b_at: Dim
    b: Dim
    b_stride: Dim
    b_step: Dim
    y: Dim
    y_stride: Dim
    rows: Dim
    width: Dim
    f64_by: Dim
    f64_limit: Dim = 0


class Route(NamedTuple):
    """y[T, 2*top_k] = each token's best experts, by x[T, experts] logits, and their weights.

    two: whether a group counts by its two best experts. scratch: of each thread, scratch_stride bytes apart.
    """

    x: Dim
    x_stride: Dim
    bias_at: Dim
    bias: Dim
    y: Dim
    y_stride: Dim
    t: Dim
    experts: Dim
    top_k: Dim
    softmax: Dim
    normalise: Dim
    groups: Dim
    top_groups: Dim
    two: Dim
    f64_scale: Dim
    scratch: Dim
    scratch_stride: Dim


class Experts(NamedTuple):
    """y[t*top_k, n] = x·wᵀ + bias with the rows of w[experts*n, k] of each pair's expert.

    x: as a linear's; x_bytes: of a row. shared: whether the pairs of a token have one row. padded: whether
    the kernel reads RUN rows. route[t, 2*top_k]. expert_bytes, unit_bytes: of an expert's weights, of 16 of
    its channels. scratch: of each thread, scratch_stride bytes apart.
    """

    x: Dim
    x_stride: Dim
    x_bytes: Dim
    shared: Dim
    padded: Dim
    w_at: Dim
    w: Dim
    expert_bytes: Dim
    unit_bytes: Dim
    y: Dim
    y_stride: Dim
    bias_at: Dim
    bias: Dim
    route: Dim
    route_stride: Dim
    t: Dim
    n: Dim
    k: Dim
    experts: Dim
    top_k: Dim
    scratch: Dim
    scratch_stride: Dim


class ExpertSum(NamedTuple):
    """out[t, width] = Σ over j of route[t, top_k + j] · y[t*top_k + j, width]."""

    y: Dim
    y_stride: Dim
    route: Dim
    route_stride: Dim
    out: Dim
    out_stride: Dim
    t: Dim
    width: Dim
    top_k: Dim


class Copy(NamedTuple):
    """Rows of `bytes` bytes from x to y; strides in bytes.

    which, unless 0: [rows], the row of x (from its end where negative), of `of`; a row of ones bits (NaN)
    where there is no such row. which_bytes: 4 for i32, 8 for i64.
    """

    x: Dim
    x_stride: Dim
    which: Dim
    y: Dim
    y_stride: Dim
    rows: Dim
    bytes: Dim
    which_bytes: Dim = 0
    of: Dim = 0


class Quantize(NamedTuple):
    """x f32[T,K] → y u8[T, K + 4*ceildiv(K,32)], or bf16[T', K'] rounded up to 32; y_stride in bytes."""

    x: Dim
    x_stride: Dim
    y: Dim
    y_stride: Dim
    t: Dim
    k: Dim


class Sample(NamedTuple):
    """One token a row of logits[N,V].

    scratch: `sample_bytes(V)` bytes for each thread, scratch_stride apart.
    """

    logits: Dim
    logits_stride: Dim
    temperature: Dim
    top_k: Dim
    top_p: Dim
    min_p: Dim
    penalty: Dim
    seed: Dim
    draw: Dim
    history: Dim
    history_stride: Dim
    y: Dim
    n: Dim
    v: Dim
    h: Dim
    scratch: Dim
    scratch_stride: Dim


RUN = 32  # tokens that are taken together (share.py)
TILE = 1024  # bytes of an AMX tile
TILE_BLOCKS = 12  # blocks of K whose weight tiles (24 KB) stay in the first-level cache for all tokens
TILE_RUNS = 32  # runs of tokens that a thread keeps sums of at a time
TILE_SCRATCH = 2 * TILE * TILE_BLOCKS + TILE_RUNS * RUN * 128  # bytes: weight tiles, sums f32[tokens][32]


TILED = 5  # tokens from which INT8 products use AMX tiles (amx_i8.py)
SUM_BLOCKS = 6  # blocks whose sums lie in memory before they are scaled
FEW = 16  # tokens of a step whose keys are shared out among threads (attention.py)
WIDE = 32  # times 16 channels: what an expert's product makes at a time
SHARED_BYTES = 1 << 20  # of their sums; steps that need more share out heads only
LATENT_BYTES = 16 << 20  # the same of latent attention, where many heads have wide sums


def slot_bytes(v_dim: int) -> int:
    """Sums of one range of keys: v_dim floats and a state, whole cache lines."""
    return (4 * v_dim + 128 + 63) // 64 * 64


ATTENTION_TILES = 8  # tiles of 16 queries that a block of keys is used for (attention_tiles.py)


def attention_bytes(k_dim: int, v_dim: int) -> int:
    """A thread's scratch: queries, sums, states of the tiles; keys, values, scores, weights of a block."""
    deep, wide = (k_dim + 31) // 32, (v_dim + 15) // 16
    return (
        (ATTENTION_TILES + 2) * TILE * deep
        + (ATTENTION_TILES + 1) * TILE * wide
        + ATTENTION_TILES * (256 + 3 * TILE)
    )


def i8_row_bytes(k: int, sums: int) -> int:
    """Prepared INT8 activations of one token: bytes and scales of whole blocks of 32, `sums` sums of each,
    whole cache lines."""
    return ((36 + 4 * sums) * ((k + 31) // 32) + 63) // 64 * 64


SAMPLE_BUCKETS = 1024


def sample_bytes(v: int) -> int:
    """Scratch of one thread that samples from v logits: f32[v], i32[v], then two rows of buckets."""
    return -(-8 * v // 64) * 64 + 16 * SAMPLE_BUCKETS


Fields = (
    Linear | Embedding | Norm | RopeTable | Rope | KvWrite | Attention | Map | Copy | Quantize | Sample
    | Route | Experts | ExpertSum | Heads
)  # fmt: skip

# words of the team's memory, each on a cache line of its own
GO, CODE, EPOCH, DONE, ARRIVED, RELEASED, FAULT, SLEEPERS, QUIT, RECALL, TEAM = (64 * i for i in range(11))
MAX_THREADS = 1024
WANTED = 64 * 11  # a word a thread: whether it is to work
ROLE = WANTED + 8 * MAX_THREADS  # a word a thread: the run it last worked in, then what it is there
CONTROL_BYTES = ROLE + 8 * MAX_THREADS


class CodeWords(NamedTuple):
    """What the walk is handed: addresses and the number of rows."""

    rows: int
    row_count: int
    waits: int
    signals: int
    stamps: int
    abort: int
