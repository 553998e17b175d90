"""Which accesses of a stream touch the same bytes, and which of those nothing orders.

The memory of each device is cut into pieces at the ends of its packed slots
(and ring blocks), so that a slot or block is a few whole pieces and two of them
share bytes exactly where they share a piece. What `pack` hasn't placed yet is a
piece of its own. Inside a slot, channel ranges may be disjoint.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple

from flashrt.ir import micro
from flashrt.ir.bounds import Bounds, Span
from flashrt.ir.order import Access, HappensBefore, accesses, input_slots, root_of
from flashrt.ir.types import Dim

Owner = tuple[Hashable, ...]  # ("slot", root) or ("block" | "state", device, name)


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """An access as bytes: pieces of memory, whose they are, and the channels touched.

    axis: size of the last axis the channels count along; span None: everything.
    A `MemoryMap` makes each one once, so equal uses are one object.
    """

    pieces: tuple[int, ...]
    owner: Owner
    axis: Dim
    span: Span | None


Uses = Sequence[Use]


def owner_of(access: Access) -> Owner:
    """What an access names; a slot has one device, so it is named by its number alone."""
    if access.kind == "slot":
        return ("slot", access.name)
    return (access.kind, access.device, access.name)


def memory_name(owner: Owner) -> str:
    """The name of a slot, block or state as a message writes it."""
    match owner:
        case ("slot", slot):
            return f"%{slot}"
        case ("block", device, block):
            return f"@{block} on {device}"
    return f"state {owner[-1]!r}"


def named(stream: micro.Stream, at: int) -> str:
    """The name of an instruction as a message writes it: `dispatch 12 (layers.3.mlp.up)`."""
    instr = stream.instrs[at]
    node = f" ({instr.node})" if instr.node else ""
    return f"{type(instr).__name__.lower()} {at}{node}"


class MemoryMap:
    """Where the slots, blocks and states of a stream lie, as pieces of memory."""

    def __init__(self, stream: micro.Stream) -> None:
        self.stream = stream
        self.bounds = Bounds.of(stream)
        self.slots = {slot.id: slot for slot in stream.slots}
        self.roots = {i: root_of(i, self.slots) for i in self.slots}
        self._count = 0
        self._pieces: dict[Owner, tuple[int, ...]] = {}
        self._uses: dict[tuple[Owner, Dim, Span | None], Use] = {}
        self._cut()

    @cached_property
    def accesses(self) -> list[tuple[tuple[Access, ...], tuple[Access, ...]]]:
        """What each instruction reads and writes."""
        return [accesses(instr) for instr in self.stream.instrs]

    @cached_property
    def uses(self) -> list[tuple[list[Use], list[Use]]]:
        """What each instruction reads and writes, as pieces of memory."""
        return [([self.use(a) for a in r], [self.use(a) for a in w]) for r, w in self.accesses]

    @cached_property
    def inputs(self) -> frozenset[int]:
        """The slots that the host fills."""
        return input_slots(self.stream)

    def use(self, access: Access) -> Use:
        """The access as pieces of memory."""
        owner, axis, span = self._touched(access)
        key = (owner, axis, span)
        if key not in self._uses:
            self._uses[key] = Use(self.pieces(owner), *key)
        return self._uses[key]

    def pieces(self, owner: Owner) -> tuple[int, ...]:
        """The pieces a slot, block or state consists of."""
        if owner not in self._pieces:
            self._pieces[owner] = (self._count,)
            self._count += 1
        return self._pieces[owner]

    def extent(self, slot: micro.Slot) -> int:
        """Bytes of a slot when its symbols are largest; 0 when nothing bounds them."""
        most = self.bounds.interval(slot.type.bytes)[1]
        return 0 if math.isinf(most) else math.ceil(most)

    def _touched(self, access: Access) -> tuple[Owner, Dim, Span | None]:
        if access.kind != "slot":
            return owner_of(access), 0, None
        number = int(access.name)
        owner = ("slot", self.roots.get(number, number))
        slot = self.slots.get(number)
        if slot is None or not slot.type.shape or access.lo is None or access.hi is None:
            return owner, 0, None
        axis, span = slot.type.shape[-1], (access.lo, access.hi)
        return (owner, 0, None) if span == (0, axis) else (owner, axis, span)

    def _cut(self) -> None:
        """Cuts each device's arena, ring and resident memory at the ends of what lies there."""
        placed: dict[tuple[str, str], list[tuple[Owner, int, int]]] = defaultdict(list)
        for slot in self.stream.slots:
            if slot.offset is not None and not slot.input and self.roots[slot.id] == slot.id:
                span = (("slot", slot.id), slot.offset, slot.offset + self.extent(slot))
                placed["arena", slot.device].append(span)
        for block in self.stream.blocks:
            if block.offset is not None:
                owner: Owner = ("block", block.device, block.name)
                placed[block.home, block.device].append((owner, block.offset, block.offset + block.bytes))
        for spans in placed.values():
            cuts = sorted({end for _, lo, hi in spans for end in (lo, hi)})
            for owner, lo, hi in spans:
                first, last = bisect_left(cuts, lo), bisect_left(cuts, hi)
                if first < last:
                    self._pieces[owner] = tuple(range(self._count + first, self._count + last))
            self._count += len(cuts)


def conflict(a: Use, b: Use, known: Bounds) -> bool:
    """Whether two uses of a common piece may touch the same byte."""
    if a is b or a.owner != b.owner or a.span is None or b.span is None or a.axis != b.axis:
        return True
    return not known.disjoint(a.span, b.span)


def supersedes(new: Use, old: Use, known: Bounds) -> bool:
    """Whether whatever conflicts with `old` certainly conflicts with `new` too."""
    if new is old or new.span is None:
        return True
    if new.owner != old.owner or old.span is None or new.axis != old.axis:
        return False
    return known.within(old.span, new.span)


class Hazard(NamedTuple):
    """Two accesses of the same memory that nothing orders.

    kind: "read-after-write", "write-after-read" or "write-after-write"; `first` and `second`
    are instruction indices, `steps` is 1 when the second one is of the next step.
    """

    kind: str
    first: int
    second: int
    steps: int
    owner: Owner


At = tuple[int, int]  # step, instruction
MANY = 4  # owners of a piece, from which on it pays to keep its accesses by lane


class _Trail:
    """The accesses of one kind to one piece that later ones must be checked against.

    held: by owner, then by use and lane, since the last read of a lane stands for the ones before it. Uses of
    different owners always conflict: of many others it is enough to look at the last one of each lane.
    """

    __slots__ = ("_lanes", "held")

    def __init__(self) -> None:
        self.held: dict[Owner, dict[tuple[Use, int], At]] = {}
        self._lanes: dict[int, list[tuple[Use, At]]] = {}  # in order, once asked for; some not held any more

    def add(self, use: Use, lane: int, at: At) -> None:
        """Records an access."""
        own = self.held.get(use.owner)
        if own is None:
            own = self.held[use.owner] = {}
        own[use, lane] = at
        if self._lanes:
            self._lanes.setdefault(lane, []).append((use, at))

    def others(self, owner: Owner) -> list[At]:
        """The accesses by everyone but an owner."""
        return [at for o, own in self.held.items() if o != owner for at in own.values()]

    def latest(self, owner: Owner) -> Iterator[At]:
        """Of each lane, the last one of the `others`."""
        if not self._lanes:
            every = ((at, use, lane) for own in self.held.values() for (use, lane), at in own.items())
            for at, use, lane in sorted(every, key=itemgetter(0)):
                self._lanes.setdefault(lane, []).append((use, at))
        for lane, trail in self._lanes.items():
            while trail and self.held.get(trail[-1][0].owner, {}).get((trail[-1][0], lane)) != trail[-1][1]:
                trail.pop()
            yield from islice((at for use, at in reversed(trail) if use.owner != owner), 1)

    def drop(self, new: Use, known: Bounds) -> None:
        """Forgets what `new` supersedes."""
        if new.span is None:
            self.held.clear()
            self._lanes.clear()
        elif own := self.held.get(new.owner):
            for key in [key for key in own if supersedes(new, key[0], known)]:
                del own[key]

    def keep(self, owner: Owner) -> None:
        """Forgets the `others`."""
        own = self.held.get(owner)
        self.held = {} if own is None else {owner: own}
        self._lanes.clear()


class _Piece:
    """What later accesses of one piece of memory are checked against.

    owner, spans: whose the piece is, and the channels written since it became theirs.
    """

    __slots__ = ("owner", "reads", "spans", "writes")

    def __init__(self) -> None:
        self.writes, self.reads = _Trail(), _Trail()
        self.owner: Owner = ()
        self.spans: dict[tuple[Dim, Span], None] = {}


def timed_uses(memory: MemoryMap) -> Iterator[tuple[list[Use], list[Use]]]:
    """What each instruction reads and writes; a bias's block is read by the dispatch after it."""
    pending: dict[tuple[str, str], list[Use]] = {}
    for instr, (reads, writes) in zip(memory.stream.instrs, memory.uses, strict=True):
        if isinstance(instr, micro.Bias):
            pending.setdefault((instr.device, instr.lane), []).extend(reads)
            reads = []
        elif pending:
            reads = reads + pending.pop((instr.device, instr.lane), [])
        yield reads, writes


def output_slots(stream: micro.Stream) -> Iterator[int]:
    """The numbers of the slots that the caller reads after a step."""
    for output in stream.outputs:
        if output.value[:1] == "%" and output.value[1:].isdecimal():
            yield int(output.value[1:])


def hazards(memory: MemoryMap) -> Iterator[Hazard]:
    """Every kind of unordered access, within a step and from one step to the next.

    The host's writing of the inputs and reading of the outputs count too.
    """
    stream, order = memory.stream, HappensBefore(memory.stream)
    inputs = [memory.use(Access("slot", s.device, s.id)) for s in stream.slots if s.input]
    outputs = [memory.use(Access("slot", "", slot)) for slot in output_slots(stream)]
    host: tuple[Uses, Uses] = outputs, inputs
    uses = [*timed_uses(memory), host]
    scan = _Scan(memory.bounds, order, _contested(uses, order))
    for step in (0, 1):
        yield from scan.visit(step, order.host, (), inputs)
        for i, (reads, writes) in enumerate(uses[:-1]):
            yield from scan.visit(step, i, reads, writes)
        if step == 0:
            yield from scan.peek(order.host, outputs)


def _contested(uses: Sequence[tuple[Uses, Uses]], order: HappensBefore) -> set[int]:
    """The pieces that several lanes touch. A lane orders itself."""
    first: dict[int, int] = {}
    found: set[int] = set()
    for i, (reads, writes) in enumerate(uses):
        lane = order.lane(i)
        for use in chain(reads, writes):
            found.update(number for number in use.pieces if first.setdefault(number, lane) != lane)
    return found


class _Scan:
    """Goes through the accesses of two steps in order and compares each with the ones before it."""

    def __init__(self, known: Bounds, order: HappensBefore, contested: set[int]) -> None:
        self._known, self._order, self._contested = known, order, contested
        self._pieces: dict[int, _Piece] = defaultdict(_Piece)

    def visit(self, step: int, i: int, reads: Uses, writes: Uses) -> Iterator[Hazard]:
        """The hazards of one instruction against everything before it."""
        found: dict[Hazard, None] = {}
        for use in reads:
            for number in use.pieces:
                if number in self._contested:
                    self._read(self._pieces[number], step, i, use, found)
        for use in writes:
            for number in use.pieces:
                if number in self._contested:
                    self._write(self._pieces[number], step, i, use, found)
        # within a step a hazard shows up in both steps: the first time is enough
        yield from (h for h in found if h.steps == step)

    def peek(self, i: int, reads: Uses) -> Iterator[Hazard]:
        """The hazards of reading in the next step, without keeping a record of it."""
        found: dict[Hazard, None] = {}
        for use in reads:
            for number in use.pieces:
                self._compare("read-after-write", self._pieces[number].writes, 1, i, use, found)
        yield from found

    def _read(self, piece: _Piece, step: int, i: int, use: Use, found: dict[Hazard, None]) -> None:
        self._compare("read-after-write", piece.writes, step, i, use, found)
        piece.reads.add(use, self._order.lane(i), (step, i))

    def _write(self, piece: _Piece, step: int, i: int, use: Use, found: dict[Hazard, None]) -> None:
        self._compare("write-after-write", piece.writes, step, i, use, found)
        self._compare("write-after-read", piece.reads, step, i, use, found)
        self._forget(piece, use)
        piece.writes.add(use, self._order.lane(i), (step, i))

    def _compare(
        self, kind: str, earlier: _Trail, step: int, i: int, use: Use, found: dict[Hazard, None]
    ) -> None:
        if not earlier.held:
            return
        own = earlier.held.get(use.owner, {})
        before = [at for (old, _), at in own.items() if conflict(old, use, self._known)]
        others = len(earlier.held) - bool(own)
        if others and (others < MANY or not all(self._over(at, step, i) for at in earlier.latest(use.owner))):
            before += earlier.others(use.owner)
        for at in before:
            if not self._over(at, step, i):
                found[Hazard(kind, at[1], i, step - at[0], use.owner)] = None

    def _over(self, at: At, step: int, i: int) -> bool:
        """Whether an access is certainly over when instruction i of a step starts (or is its own)."""
        return at == (step, i) or self._order.before(at[1], i, step - at[0])

    def _forget(self, piece: _Piece, use: Use) -> None:
        """Drops what later accesses needn't be compared with: they are compared with `use`."""
        piece.writes.drop(use, self._known)
        piece.reads.drop(use, self._known)
        if piece.owner != use.owner:
            piece.owner, piece.spans = use.owner, {}
        if use.span is not None:
            piece.spans[use.axis, use.span] = None
            spans = [span for axis, span in piece.spans if axis == use.axis]
            if self._known.covered((0, use.axis), spans):
                piece.writes.keep(use.owner)
                piece.reads.keep(use.owner)
