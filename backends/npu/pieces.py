"""Cuts loaded instructions into pieces: what one session runs between two looks at the ticks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flashrt.backend import Compute
from flashrt.backends.npu.kernels import MOVES
from flashrt.backends.reference.kernels import Kernel, read_kernel
from flashrt.errors import LawError, PlanError
from flashrt.ir import micro
from flashrt.ir.order import root_of
from flashrt.ir.text import show_instr
from flashrt.ir.types import size

MOST_WEIGHTS = 1 << 30  # bytes of f32 weights in one graph: a serialised ONNX graph ends at 2 GiB


@dataclass(frozen=True, slots=True)
class Row:
    """A dispatch and the bias that belongs to it. index: of the dispatch in the loaded instructions."""

    index: int
    dispatch: micro.Dispatch
    kernel: Kernel
    bias: micro.Bias | None

    @property
    def instrs(self) -> tuple[Compute, ...]:
        """Both, in order."""
        return (self.bias, self.dispatch) if self.bias else (self.dispatch,)

    @property
    def indices(self) -> tuple[int, ...]:
        """Of both, in order."""
        return (self.index - 1, self.index) if self.bias else (self.index,)

    @property
    def slots(self) -> tuple[micro.SlotRef, ...]:
        """The slots it reads."""
        return tuple(a for a in self.dispatch.args if isinstance(a, micro.SlotRef))

    @property
    def dst(self) -> micro.SlotRef:
        """The slot it writes."""
        assert self.dispatch.dst is not None, show_instr(self.dispatch)
        return self.dispatch.dst


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that run together: they wait for all that any of them waits for, then compute, then signal.

    reads: slots that come from memory. writes: results that somebody else needs, in order.
    """

    rows: tuple[Row, ...]
    reads: tuple[micro.SlotRef, ...]
    writes: tuple[micro.SlotRef, ...]

    @property
    def moves(self) -> bool:
        """Whether it only moves bytes, so that no session is needed."""
        return self.rows[0].kernel.op in MOVES


def read_rows(instrs: Sequence[Compute]) -> Iterator[Row]:
    """Joins each bias with its dispatch.

    Raises PlanError for what can't run here, LawError for a bias without its dispatch.
    """
    bias: micro.Bias | None = None
    for index, instr in enumerate(instrs):
        match instr:
            case micro.Bias():
                bias = instr
                continue
            case micro.Quantize():
                raise PlanError(
                    f"an NPU has no quantize {instr.scheme}", lines=f"    {show_instr(instr)}",
                    hint="its products take activations as they are",
                )  # fmt: skip
        kernel = read_kernel(instr.kernel)
        if kernel.bias != (bias is not None):
            raise LawError(
                "a bias stands directly before the dispatch whose kernel name has +bias",
                lines=f"    {show_instr(instr)}",
            )
        yield Row(index, instr, kernel, bias)
        bias = None


@dataclass(slots=True)
class _Open:
    """The piece that is being filled. made: what it has written so far, by the slot that owns the memory."""

    rows: list[Row] = field(default_factory=list)
    made: dict[int, micro.SlotRef] = field(default_factory=dict)
    reads: dict[micro.SlotRef, None] = field(default_factory=dict)
    weights: int = 0


def cut(rows: Sequence[Row], stream: micro.Stream) -> tuple[Piece, ...]:
    """The pieces of consecutive rows.

    A piece ends before a row that waits; before a row that moves bytes, and after it; before a row
    that reads or writes a part of a slot of which the piece has written another part; and where its
    weights would no longer fit into one graph.
    """
    slots = {s.id: s for s in stream.slots}
    roots = {id: root_of(id, slots) for id in slots}
    found: list[_Open] = []
    for row in rows:
        weights = _weight_bytes(row, stream)
        if not found or not _joins(row, found[-1], roots, weights):
            found.append(_Open())
        piece = found[-1]
        made = set(piece.made.values())
        piece.reads |= dict.fromkeys(ref for ref in row.slots if ref not in made)
        piece.made.pop(roots[row.dst.slot], None)  # the order is that of the last writes
        piece.made[roots[row.dst.slot]] = row.dst
        piece.weights += weights
        piece.rows.append(row)
    return tuple(_closed(piece, stream, roots) for piece in found)


def _joins(row: Row, piece: _Open, roots: Mapping[int, int], weights: int) -> bool:
    if any(i.waits for i in row.instrs) or row.kernel.op in MOVES or piece.rows[-1].kernel.op in MOVES:
        return False
    if piece.weights + weights > MOST_WEIGHTS:
        return False
    return all(piece.made.get(roots[ref.slot], ref) == ref for ref in (*row.slots, row.dst))


def _closed(piece: _Open, stream: micro.Stream, roots: Mapping[int, int]) -> Piece:
    """With the results that are read outside of the piece, in it from memory, or by the caller."""
    own = {id(row.dispatch) for row in piece.rows}
    needed = {roots[ref.slot] for ref in piece.reads}
    needed |= {roots[int(o.value.removeprefix("%"))] for o in stream.outputs}
    for instr in stream.instrs:
        if id(instr) not in own:
            needed |= {roots[ref.slot] for ref in _slots_read(instr)}
    writes = tuple(ref for root, ref in piece.made.items() if root in needed)
    return Piece(tuple(piece.rows), tuple(piece.reads), writes)


def _slots_read(instr: micro.Instr) -> tuple[micro.SlotRef, ...]:
    match instr:
        case micro.Dispatch():
            return tuple(a for a in instr.args if isinstance(a, micro.SlotRef))
        case micro.Quantize() | micro.Transfer():
            return (instr.src,)
        case _:
            return ()


def _weight_bytes(row: Row, stream: micro.Stream) -> int:
    """Bytes of the row's blocks as f32, at their largest."""
    names = [a.block for a in row.dispatch.args if isinstance(a, micro.BlockRef)]
    shapes = {w.name: w.type.shape for w in stream.weights}
    held = {b.name: b.hi - b.lo for b in stream.blocks if b.device == row.dispatch.device}
    total = 0
    for name in names:
        wide = 1
        for dim in shapes[name][1:]:
            wide *= size(dim, {})
        total += held[name] * wide * 4
    if total > MOST_WEIGHTS:
        raise PlanError(
            f"%{row.dispatch.node} has {total / 1e9:.1f} GB of float32 weights, too much for an ONNX graph",
            hint="split it, or place it on another device",
        )
    return total
