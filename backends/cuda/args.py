"""What kernels are handed: the structs of source/*.cu, field by field, 8 bytes each."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


def packed(fields: Sequence[int | float]) -> bytes:
    """A struct's bytes: whole numbers and addresses as int64, the rest as doubles."""
    kinds = "".join("d" if isinstance(value, float) else "q" for value in fields)
    return struct.pack(f"<{kinds}", *fields)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. grid: blocks; threads: of a block; fields: its arguments; shared: bytes of shared
    memory."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    fields: tuple[int | float, ...]
    shared: int = 0

    @property
    def args(self) -> bytes:
        """The arguments as the kernel takes them."""
        return packed(self.fields)


@dataclass(frozen=True, slots=True)
class Live:
    """Work that depends on what the host knows of the step: done anew in each, never recorded."""

    work: Callable[[], None]


class Linear(NamedTuple):
    w: int
    n: int
    k: int
    second: int
    tiles: int
    x: int
    x_stride: int
    x_kind: int
    norm: int
    norm_on: int
    eps: float
    offset: float
    y: int
    y_stride: int
    y_bf16: int
    bias: int
    residual: int
    residual_stride: int
    act: int
    rows: int
    tokens: int
    digits: int
    span: int = 0
    slot_bytes: int = 0
    depth: int = 0
    columns: int = 0
    piece: int = 0
    begin: int = 0


@dataclass(frozen=True, slots=True)
class Product:
    """A launch of a product for few tokens, which may become one with those in front and behind.

    of: without the ring, which they share; layout: of the weights; room: bytes of shared memory that a block
    has beside the ring.
    """

    kernel: str
    grid: tuple[int, int]
    threads: int
    of: Linear
    layout: str
    room: int


# A launch, or a call that enqueues work of a library; and what may yet become a part of one.
Work = Launch | Live | Callable[[], None]
Step = Work | Product

JOINED = 8  # products of one kernel at most, as source/linear.cu has it


def chain(parts: Sequence[Linear], door: int) -> tuple[int | float, ...]:
    """The fields of a kernel for so many products. door: a word, 0 at first, for more than one."""
    rest = (JOINED - len(parts)) * len(Linear._fields)
    return (len(parts), door, *(value for part in parts for value in part), *(0,) * rest)


class Gemm(NamedTuple):
    w: int
    n: int
    k: int
    second: int
    x: int
    x_rows: int
    y: int
    y_stride: int
    y_as: int
    bias: int
    residual: int
    residual_stride: int
    act: int
    rows: int
    warps: int
    slot_bytes: int
    depth: int
    counts: int
    sums: int


class Plain(NamedTuple):
    w: int
    w_at: int
    n: int
    k: int
    format: int
    x: int
    x_stride: int
    y: int
    y_stride: int
    bias: int
    residual: int
    residual_stride: int
    rows: int


class Unpack(NamedTuple):
    w: int
    w_at: int
    n: int
    k: int
    format: int
    y: int


class Embedding(NamedTuple):
    ids: int
    wide: int
    w: int
    w_at: int
    n: int
    k: int
    format: int
    y: int
    y_stride: int
    rows: int


class Rope(NamedTuple):
    q: int = 0
    q_stride: int = 0
    heads: int = 0
    q_out: int = 0
    q_out_stride: int = 0
    k: int = 0
    k_stride: int = 0
    k_heads: int = 0
    k_out: int = 0
    k_out_stride: int = 0
    v: int = 0
    v_stride: int = 0
    v_heads: int = 0
    table: int = 0
    table_stride: int = 0
    half: int = 0
    d: int = 0
    dv: int = 0
    kv: int = 0
    dim: int = 0
    bf16: int = 0
    positions: int = 0
    seq: int = 0
    pages: int = 0
    page_stride: int = 0
    late: int = 0
    rows: int = 0


class Attention(NamedTuple):
    q: int
    q_stride: int
    heads: int
    kv_heads: int
    d: int
    dv: int
    kv: int
    dim: int
    bf16: int
    positions: int
    seq: int
    pages: int
    page_stride: int
    y: int
    y_stride: int
    y_as: int
    sinks: int
    scale: float
    softcap: float
    window: int
    causal: int
    rounded: int
    late: int
    rows: int
    parts: int
    through: int
    k: int = 0
    v: int = 0
    table: int = 0
    half: int = 0


class Pairs(NamedTuple):
    x: int
    x_stride: int
    table: int
    table_stride: int
    y: int
    y_stride: int
    heads: int
    d: int
    half: int
    rows: int


class Route(NamedTuple):
    x: int
    x_stride: int
    bias: int
    y: int
    y_stride: int
    experts: int
    top_k: int
    softmax: int
    normalise: int
    groups: int
    top_groups: int
    two: int
    scale: float
    rows: int


class Choices(NamedTuple):
    route: int
    route_stride: int
    experts: int
    top_k: int
    shared: int
    most: int
    items: int
    order: int
    rows: int


class PlainExpert(NamedTuple):  # and Choices
    w: int
    n: int
    k: int
    format: int
    x: int
    x_stride: int
    y: int
    y_stride: int
    bias: int


class ExpertTile(NamedTuple):  # and Choices
    w: int
    n: int
    k: int
    expert_bytes: int
    x: int
    x_stride: int
    y: int
    y_stride: int
    bias: int


class ExpertSum(NamedTuple):
    near: int
    near_stride: int
    far: int
    far_stride: int
    route: int
    route_stride: int
    y: int
    y_stride: int
    width: int
    top_k: int
    rows: int


class ExpertCache(NamedTuple):
    route: int
    route_stride: int
    table: int
    asked: int
    y: int
    y_stride: int
    experts: int
    top_k: int
    rows: int


class Clamped(NamedTuple):
    gate: int
    gate_stride: int
    up: int
    up_stride: int
    y: int
    y_stride: int
    width: int
    alpha: float
    limit: float
    rows: int


class LatentWrite(NamedTuple):
    k: int
    k_stride: int
    v: int
    v_stride: int
    own: int
    d: int
    kv: int
    bf16: int
    positions: int
    seq: int
    pages: int
    page_stride: int
    rows: int


class Latent(NamedTuple):
    q: int
    q_stride: int
    heads: int
    d: int
    dv: int
    kv: int
    bf16: int
    positions: int
    seq: int
    pages: int
    page_stride: int
    y: int
    y_stride: int
    y_bf16: int
    sinks: int
    scale: float
    softcap: float
    window: int
    causal: int
    rounded: int
    rows: int
    parts: int
    ranges: int


class HeadLinear(NamedTuple):
    w: int
    format: int
    heads: int
    d: int
    n: int
    k: int
    x: int
    x_stride: int
    y: int
    y_stride: int
    rows: int


class Pull(NamedTuple):
    entries: int
    many: int
    stamp: int
    epoch: int
    through: int
    pulled: int


class Push(NamedTuple):
    from_: int
    to: int
    apart: int
    kept: int
    words: int
    epoch: int


class Carry(NamedTuple):
    tick_0: int = 0
    tick_1: int = 0
    tick_2: int = 0
    tick_3: int = 0
    step_0: int = 0
    step_1: int = 0
    step_2: int = 0
    step_3: int = 0
    epoch: int = 0
    abort: int = 0
    x: int = 0
    x_stride: int = 0
    y: int = 0
    y_stride: int = 0
    words: int = 0
    rows: int = 0
    signal: int = 0
    through: int = 0
    stamps: int = 0
    holds: int = 0


class Norm(NamedTuple):
    x: int
    x_stride: int
    w: int
    b: int
    y: int
    y_stride: int
    y_as: int
    groups: int
    width: int
    w_size: int
    eps: float
    offset: float
    layer: int
    rows: int


class RopeTable(NamedTuple):
    positions: int
    wide: int
    frequencies: int
    y: int
    y_stride: int
    half: int
    scale: float
    rows: int


class Map(NamedTuple):
    a: int
    a_stride: int
    b: int
    b_stride: int
    b_step: int
    y: int
    y_stride: int
    y_as: int
    width: int
    what: int
    act: int
    by: float
    rows: int


class Move(NamedTuple):
    x: int
    x_stride: int
    by: int
    wide: int
    limit: int
    y: int
    y_stride: int
    words: int
    rows: int


class Round(NamedTuple):
    x: int
    x_stride: int
    width: int
    y: int
    y_stride: int
    y_as: int
    y_width: int
    rows: int
    padded: int


class Tiles(NamedTuple):
    x: int
    x_stride: int
    width: int
    y: int
    y_rows: int
    format: int
    rows: int


class Quantize(NamedTuple):
    x: int
    x_stride: int
    width: int
    y: int
    y_stride: int
    rows: int


class Argmax(NamedTuple):
    x: int
    x_stride: int
    width: int
    y: int
    best: int
    best_at: int
    through: int
    rows: int


class Penalise(NamedTuple):
    x: int
    x_stride: int
    width: int
    penalty: int
    history: int
    history_stride: int
    y: int
    uniform: int
    seed: int
    draw: int
    rows: int


def launch(
    kernel: str, grid: Sequence[int], threads: int, fields: tuple[int | float, ...], shared: int = 0
) -> Launch:
    """A launch with these fields; a grid of fewer than three sizes has ones behind it."""
    x, y, z = (*grid, 1, 1)[:3]
    return Launch(kernel, (x, y, z), threads, fields, shared)


def elementwise(fields: Map, rows: int) -> Launch:
    """A launch of that kernel for at most so many rows: a thread takes four neighbouring elements."""
    return launch("elementwise", (-(-fields.width // 1024), rows), 256, fields)
