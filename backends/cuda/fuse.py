"""Rows that run as one kernel: what stands between them never reaches memory.

    rms_norm, linear                    the product takes its input and normalises it
    quantize, linear                    the product takes its input and rounds it, normalised or not
    linear (gate and up), gated         the product's blocks hold both halves
    rope, rope, kv_write                one kernel for queries, keys and the cache
    rope, rope, kv_write, attention     the attention of one token does all that
    any of these, quantize to bf16      the result is written rounded

Rows are joined where nobody else reads what lies between, and where what the joint kernel writes doesn't
overlap what it still reads: `pack` knew them one after the other. Where it does, one of the two is moved,
if only these rows know of it; what is rounded, to where it would have lain before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from flashrt.backend import Compute, Memory, Place
from flashrt.errors import LawError
from flashrt.ir import micro
from flashrt.ir.order import root_of
from flashrt.ir.text import show_instr

ALIGNED = 256  # bytes: what libraries like best


@dataclass(frozen=True, slots=True)
class Row:
    """An instruction, and the bias that belongs to it."""

    instr: micro.Dispatch | micro.Quantize
    bias: micro.BlockRef | None = None

    @property
    def op(self) -> str:
        """The operation without layout and epilogue; "quantize" for that instruction."""
        if isinstance(self.instr, micro.Quantize):
            return "quantize"
        return self.instr.kernel.partition("+")[0].partition(".")[0]


@dataclass(frozen=True, slots=True)
class Joint:
    """One kernel: a main row and what joins it.

    norm: the rms_norm in front of a linear. taken: the quantize there. gated: what makes its halves one.
    rounded: the quantize behind. keys, write: the second rope and the kv_write behind the first rope.
    queries: the first rope, where the main row is the attention behind all three.
    """

    main: Row
    norm: micro.Dispatch | None = None
    taken: micro.Quantize | None = None
    gated: micro.Dispatch | None = None
    rounded: micro.Quantize | None = None
    queries: micro.Dispatch | None = None
    keys: micro.Dispatch | None = None
    write: micro.Dispatch | None = None

    @property
    def reads(self) -> tuple[micro.SlotRef, ...]:
        """The slots that are read."""
        main = self.main.instr
        if isinstance(main, micro.Quantize):
            return (main.src,)
        first = self.norm.args[0] if self.norm else self.taken.src if self.taken else main.args[0]
        args = (first, *main.args[1:])
        if self.queries and self.keys and self.write:
            args = (*self.queries.args, self.keys.args[0], self.write.args[1], *main.args[1:])
        return tuple(a for a in args if isinstance(a, micro.SlotRef))

    @property
    def dst(self) -> micro.SlotRef | None:
        """What is written in the end."""
        if self.rounded is not None:
            return self.rounded.dst
        last = self.gated or self.main.instr
        return last.dst


def rows_of(instrs: Sequence[Compute]) -> list[Row]:
    """Joins each bias with its dispatch. Raises LawError for one without it."""
    rows: list[Row] = []
    bias: micro.Bias | None = None
    for instr in instrs:
        if isinstance(instr, micro.Bias):
            bias = instr
            continue
        wanted = isinstance(instr, micro.Dispatch) and "bias" in instr.kernel.split("+")
        if wanted != (bias is not None):
            raise LawError(
                "a bias stands directly before the dispatch whose kernel name has +bias",
                lines=f"    {show_instr(instr)}",
            )
        rows.append(Row(instr, bias.block if bias else None))
        bias = None
    return rows


class Taking(Enum):
    """How a linear prepares its input. NOT: others do. WHILE: some of its blocks while others write already.
    BEFORE: before it writes anything."""

    NOT = 0
    WHILE = 1
    BEFORE = 2


class Fuser:
    """Joins the rows of one stream.

    few: whether a linear runs the kernel for few tokens; takes: how it prepares its input; alone: whether an
    attention is one token's. moved: slots that `join` wants elsewhere: at a place, or in memory of
    their own. readers: how many each slot has.
    """

    def __init__(
        self, memory: Memory, few: Callable[[micro.Dispatch], bool],
        takes: Callable[[micro.Dispatch], Taking], alone: Callable[[micro.Dispatch], bool],
    ) -> None:  # fmt: skip
        self._memory, self._few, self._takes, self._alone = memory, few, takes, alone
        self.moved: dict[int, Place | None] = {}
        self._free: set[int] = set()
        self._slots = {s.id: s for s in memory.stream.slots}
        self.readers: Counter[int] = Counter(
            root_of(ref.slot, self._slots) for i in memory.stream.instrs for ref in _read(i)
        )
        for output in memory.stream.outputs:
            self.readers[root_of(int(output.value.removeprefix("%")), self._slots)] += 1

    def join(self, rows: Sequence[Row]) -> list[Joint]:
        """The kernels, in order."""
        self._free = self._movable(rows)
        out: list[Joint] = []
        at = 0
        while at < len(rows):
            joint, taken = self._one(rows[at:])
            out.append(joint)
            at += taken
        return out

    def _one(self, rows: Sequence[Row]) -> tuple[Joint, int]:
        row = rows[0]
        match row.op:
            case "rms_norm":
                return self._prepared(rows) or self._rounding(Joint(row), rows, 1)
            case "quantize":
                return self._prepared(rows) or (Joint(row), 1)
            case "linear":
                return self._linear(Joint(row), rows, 1)
            case "rope":
                return self._rope(rows) or (Joint(row), 1)
            case "gated" | "attention":
                return self._rounding(Joint(row), rows, 1)
        return Joint(row), 1

    def _prepared(self, rows: Sequence[Row]) -> tuple[Joint, int] | None:
        """rms_norm, quantize or both, and the linear behind them."""
        norm: micro.Dispatch | None = None
        taken: micro.Quantize | None = None
        at, between = 0, list[micro.SlotRef]()
        first = rows[0].instr
        if isinstance(first, micro.Dispatch):
            norm, at = first, 1
            between.append(_dst(rows[0]))
        if not at or self._only(rows, at, "quantize", between[-1]):
            second = rows[at].instr
            assert isinstance(second, micro.Quantize)
            taken = second
            between.append(taken.dst)
            at += 1
        if not self._only(rows, at, "linear", between[-1]):
            return None
        main, source = rows[at].instr, norm.args[0] if norm else taken.src if taken else None
        assert isinstance(main, micro.Dispatch) and isinstance(source, micro.SlotRef)
        if norm and norm.attr("width") not in (None, self._width(source)):
            return None
        taking = self._takes(main)
        if source.lo is not None or taking is Taking.NOT or not all(self._once(ref) for ref in between):
            return None
        if main.args.count(between[-1]) != 1:
            return None
        joint, taken_rows = self._linear(Joint(rows[at], norm=norm, taken=taken), rows, at + 1)
        free = taking is Taking.BEFORE or self._apart(source, joint.dst) or self._move(source)
        return (joint, taken_rows) if free else None

    def _linear(self, joint: Joint, rows: Sequence[Row], at: int) -> tuple[Joint, int]:
        main = joint.main.instr
        assert isinstance(main, micro.Dispatch) and main.dst is not None
        plain = joint.main.bias is None and "residual" not in main.kernel
        if plain and main.dst.lo is None and self._few(main) and at < len(rows) and rows[at].op == "gated":
            gated, width = rows[at].instr, self._width(main.dst)
            assert isinstance(gated, micro.Dispatch)
            halves = (_range(main.dst, 0, width // 2), _range(main.dst, width // 2, width))
            # each half is read once: two readers of the whole
            if gated.args == halves and width % 32 == 0 and self.readers[self._root(main.dst)] == 2:
                both, taken = self._rounding(replace(joint, gated=gated), rows, at + 1)
                if all(self._apart(ref, both.dst) for ref in both.reads):
                    return both, taken
        return joint, at

    def _rounding(self, joint: Joint, rows: Sequence[Row], at: int) -> tuple[Joint, int]:
        last = joint.gated or joint.main.instr
        assert last.dst is not None
        if not self._only(rows, at, "quantize", last.dst) or not self._once(last.dst):
            return joint, at
        rounded = rows[at].instr
        assert isinstance(rounded, micro.Quantize)
        if rounded.scheme != "bf16":
            return joint, at
        if all(self._apart(ref, rounded.dst) for ref in joint.reads) or self._stays(rounded, last.dst, joint):
            return replace(joint, rounded=rounded), at + 1
        return joint, at

    def _rope(self, rows: Sequence[Row]) -> tuple[Joint, int] | None:
        if [row.op for row in rows[:3]] != ["rope", "rope", "kv_write"]:
            return None
        queries, keys, write = (row.instr for row in rows[:3])
        assert isinstance(queries, micro.Dispatch) and isinstance(keys, micro.Dispatch)
        assert isinstance(write, micro.Dispatch) and keys.dst is not None and queries.dst is not None
        alike = queries.args[1] == keys.args[1] and queries.attr("head_dim") == keys.attr("head_dim")
        if write.args[0] != keys.dst or not self._once(keys.dst) or not alike:
            return None
        return self._attending(queries, keys, write, rows) or (Joint(rows[0], keys=keys, write=write), 3)

    def _attending(
        self, queries: micro.Dispatch, keys: micro.Dispatch, write: micro.Dispatch, rows: Sequence[Row]
    ) -> tuple[Joint, int] | None:
        """The attention behind them, when it is one token's."""
        turned = queries.dst
        if turned is None or not self._once(turned) or not self._only(rows, 3, "attention", turned):
            return None
        main = rows[3].instr
        assert isinstance(main, micro.Dispatch) and main.dst is not None
        if main.args[1:4] != write.args[2:5] or main.reads != write.writes or not self._alone(main):
            return None
        joint = Joint(rows[3], queries=queries, keys=keys, write=write)
        joint, taken = self._rounding(joint, rows, 4)
        apart = all(self._apart(ref, joint.dst) for ref in joint.reads)
        return (joint, taken) if apart or self._move(main.dst) else None

    # ---- what may be moved -----------------------------------------------------------
    def _movable(self, rows: Sequence[Row]) -> set[int]:
        """Slots that these rows alone know: one of them writes all of it, and no other row reads it."""
        written = Counter(self._root(ref) for i in self._memory.stream.instrs for ref in _written(i))
        readers = Counter(self._root(ref) for row in rows for ref in _read(row.instr))
        whole = {self._root(ref) for row in rows for ref in _written(row.instr) if ref.lo is None}
        return {at for at in whole if written[at] == 1 and readers[at] == self.readers[at]}

    def _move(self, ref: micro.SlotRef) -> bool:
        """Moves a slot, if it may be."""
        at = self._root(ref)
        if at in self._free:
            self.moved[at] = None
        return at in self._free

    def _stays(self, rounded: micro.Quantize, unrounded: micro.SlotRef, joint: Joint) -> bool:
        """Puts what is rounded into the memory of what isn't, at its begin or end, if nothing that is written
        there while it is needed stands in the way."""
        at, slot = self._root(rounded.dst), self._slots[unrounded.slot]
        if at not in self._free or rounded.dst.lo is not None or slot.alias is not None:
            return False
        whole, nbytes = self._memory.slot(slot.id), self._memory.slot(at).bytes
        instrs = self._memory.stream.instrs
        begin = next(n for n, instr in enumerate(instrs) if instr is rounded)
        end = max(n for n, instr in enumerate(instrs) if any(self._root(ref) == at for ref in _read(instr)))
        others = [ref for i in instrs[begin + 1 : end + 1] for ref in _written(i)]
        # transfers may have lanes of their own
        others += [ref for i in instrs if isinstance(i, micro.Transfer) for ref in _written(i)]
        taken = [self._place(ref) for ref in (*others, *joint.reads)]
        for offset in (whole.offset, whole.offset + (whole.bytes - nbytes) // ALIGNED * ALIGNED):
            place = Place(whole.buffer, offset, nbytes)
            if nbytes <= whole.bytes and not any(_overlap(place, other) for other in taken if other):
                self.moved[at] = place
                return True
        return False

    # ---- what may be joined ----------------------------------------------------------
    def _only(self, rows: Sequence[Row], at: int, op: str, ref: micro.SlotRef) -> bool:
        """Whether the row at `at` is such an operation on just that slot."""
        if at >= len(rows) or rows[at].op != op:
            return False
        instr = rows[at].instr
        if isinstance(instr, micro.Quantize):
            return instr.src == ref
        return instr.args[0] == ref

    def _once(self, ref: micro.SlotRef) -> bool:
        return self.readers[self._root(ref)] == 1

    def _root(self, ref: micro.SlotRef) -> int:
        return root_of(ref.slot, self._slots)

    def _width(self, ref: micro.SlotRef) -> int:
        width = self._slots[ref.slot].type.shape[-1]
        return width if isinstance(width, int) else -1

    def _apart(self, read: micro.SlotRef, written: micro.SlotRef | None) -> bool:
        """Whether two slots share no memory."""
        if written is None:
            return True
        a, b = self._place(read), self._place(written)
        return a is None or b is None or not _overlap(a, b)

    def _place(self, ref: micro.SlotRef) -> Place | None:
        """Where a slot lies; None: in memory of its own."""
        at = self._root(ref)
        return self.moved[at] if at in self.moved else self._memory.slot(ref.slot)


def _overlap(a: Place, b: Place) -> bool:
    return a.buffer is b.buffer and a.offset < b.offset + b.bytes and b.offset < a.offset + a.bytes


def _range(ref: micro.SlotRef, lo: int, hi: int) -> micro.SlotRef:
    return micro.SlotRef(ref.slot, lo, hi)


def _dst(row: Row) -> micro.SlotRef:
    assert row.instr.dst is not None
    return row.instr.dst


def _written(instr: micro.Instr) -> list[micro.SlotRef]:
    match instr:
        case micro.Dispatch() | micro.Quantize() | micro.Transfer():
            return [] if instr.dst is None else [instr.dst]
    return []


def _read(instr: micro.Instr) -> list[micro.SlotRef]:
    match instr:
        case micro.Dispatch():
            return [a for a in instr.args if isinstance(a, micro.SlotRef)]
        case micro.Quantize() | micro.Transfer():
            return [instr.src]
    return []
