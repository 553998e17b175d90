"""Gives slots, ring blocks and resident blocks their place in each device's memory.

Slots share memory only where it is proven that every use of the earlier one is over when
the later one is written, and that in the next step it is the other way round. Sizes are
those of the largest step.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from flashrt.errors import PlanError
from flashrt.ir import micro
from flashrt.ir.bounds import Bounds
from flashrt.ir.order import Access, HappensBefore, accesses, root_of
from flashrt.ir.types import TensorType
from flashrt.layouts import aligned


def pack(stream: micro.Stream) -> micro.Stream:
    """Fills in all offsets and the sizes of arenas and rings.

    Raises:
        PlanError: a slot's size has no bound.
    """
    offsets, arenas = _arenas(stream)
    slots = tuple(replace(s, offset=offsets.get(s.id)) for s in stream.slots)
    rings, blocks = [], []
    placed: dict[tuple[str, str], int] = {}
    for device in dict.fromkeys(b.device for b in stream.blocks):
        ring = frozenset(b.name for b in stream.blocks if b.device == device and b.home == "ring")
        found, size = ring_layout(stream, device, ring)
        if ring:
            rings.append((device, size))
        placed |= {(name, device): offset for name, offset in found.items()}
    ends: dict[str, int] = defaultdict(int)
    for block in stream.blocks:
        offset = placed.get((block.name, block.device))
        if block.home == "resident":
            offset = ends[block.device]
            ends[block.device] += aligned(block.bytes)
        blocks.append(replace(block, offset=offset))
    return replace(stream, slots=slots, blocks=tuple(blocks), arenas=tuple(arenas), rings=tuple(rings))


def staying_bytes(stream: micro.Stream) -> Counter[str]:
    """What resident blocks take of each device."""
    kept = Counter[str]()
    for block in stream.blocks:
        kept[block.device] += aligned(block.bytes) if block.home == "resident" else 0
    return kept


class FirstFit:
    """First fit: the pieces in use, by offset, and how far they ever reached."""

    def __init__(self) -> None:
        self.size = 0
        self._used: list[tuple[int, int, int | str]] = []  # (offset, end, whose)

    def place(self, nbytes: int, over: Iterable[int | str] = ()) -> int:
        """The offset that a new piece would have; it may share with pieces that are `over`."""
        free, offset = set(over), 0
        for start, end, name in self._used:
            if name in free:
                continue
            if start - offset >= nbytes:
                break
            offset = max(offset, end)
        return offset

    def take(self, nbytes: int, whose: int | str, over: Iterable[int | str] = ()) -> int:
        """The offset of a new piece, as `place` says."""
        offset = self.place(nbytes, over)
        insort(self._used, (offset, offset + nbytes, whose), key=lambda used: used[:2])
        self.size = max(self.size, offset + nbytes)
        return offset

    def give_back(self, whose: int | str) -> None:
        """The piece is free for whatever comes."""
        self._used = [used for used in self._used if used[2] != whose]


# ---- weights ---------------------------------------------------------------------
def ring_layout(stream: micro.Stream, device: str, ring: frozenset[str]) -> tuple[dict[str, int], int]:
    """Offsets of ring blocks, and the ring's size, in the order in which they are loaded and evicted.

    An evicted block's memory is used again by later prefetches of the same lane.
    """
    sizes = {b.name: aligned(b.bytes) for b in stream.blocks if b.device == device}
    moves = [
        i
        for i in stream.instrs
        if isinstance(i, micro.Prefetch | micro.Evict) and i.device == device and i.block in ring
    ]
    loads = Counter(i.block for i in moves if isinstance(i, micro.Prefetch))
    one_lane = len({i.lane for i in moves}) == 1
    memory, offsets = FirstFit(), dict[str, int]()
    evicted = {i.block: at for at, i in reversed(list(enumerate(moves))) if isinstance(i, micro.Evict)}
    for at, instr in enumerate(moves):  # what the step before has left loaded
        if isinstance(instr, micro.Prefetch) and evicted.get(instr.block, at) < at:
            offsets.setdefault(instr.block, memory.take(sizes[instr.block], instr.block))
    for instr in moves:
        if isinstance(instr, micro.Prefetch):
            if instr.block not in offsets:
                offsets[instr.block] = memory.take(sizes[instr.block], instr.block)
        elif one_lane and loads[instr.block] == 1:
            memory.give_back(instr.block)
    return offsets, memory.size


# ---- activations -----------------------------------------------------------------
@dataclass(slots=True)
class _Life:
    """The uses of one slot and its aliases, as instruction indices.

    last: the last use in each lane. end: the last use of all (none while the caller may read it).
    carried: it is read before it is written, so it keeps its value from step to step.
    """

    slot: int
    bytes: int = 0
    writers: list[int] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    end: float = -1
    output: bool = False
    carried: bool = False


def _arenas(stream: micro.Stream) -> tuple[dict[int, int], list[tuple[str, int]]]:
    """Offsets of the slots that own memory, and the arena of each device."""
    order = HappensBefore(stream)
    lives = _lives(stream, order)
    offsets: dict[int, int] = {}
    arenas = []
    devices: dict[str, list[_Life]] = defaultdict(list)
    for slot in stream.slots:
        if slot.id in lives:
            devices[slot.device].append(lives[slot.id])
    for device, own in devices.items():
        found, size = _arena(own, order)
        offsets |= found
        arenas.append((device, size))
    return offsets, arenas


def _lives(stream: micro.Stream, order: HappensBefore) -> dict[int, _Life]:
    """The life of each slot that owns arena memory."""
    slots = {s.id: s for s in stream.slots}
    roots = {i: root_of(i, slots) for i in slots}
    lives = {r: _Life(r) for r in roots.values() if not slots[r].input}
    sizes = _Sizes(stream)
    for slot in stream.slots:
        if (life := lives.get(roots[slot.id])) is not None:
            life.bytes = max(life.bytes, sizes.of(slot))
    for i, instr in enumerate(stream.instrs):
        reads, writes = accesses(instr)
        for access, writing in (*((a, False) for a in reads), *((a, True) for a in writes)):
            if (owner := _life_of(access, roots, lives)) is not None:
                _record(owner, i, writing, order)
    for output in stream.outputs:
        if (life := lives.get(roots[int(output.value.removeprefix("%"))])) is not None:
            life.output, life.end = True, math.inf
    return lives


def _life_of(access: Access, roots: Mapping[int, int], lives: Mapping[int, _Life]) -> _Life | None:
    return lives.get(roots[int(access.name)]) if access.kind == "slot" else None


def _record(life: _Life, i: int, writing: bool, order: HappensBefore) -> None:
    if writing:
        life.writers.append(i)
    elif not life.writers:
        life.carried = True
    life.last[order.lane(i)] = i
    life.end = i


class _Sizes:
    """Bytes of slots at the largest step."""

    def __init__(self, stream: micro.Stream) -> None:
        self._bounds = Bounds.of(stream)
        self._known: dict[TensorType, int] = {}

    def of(self, slot: micro.Slot) -> int:
        """The slot's size, in whole cache lines."""
        if slot.type not in self._known:
            most = self._bounds.interval(slot.type.bytes)[1]
            if math.isinf(most):
                raise PlanError(
                    f"slot %{slot.id} has no largest size: {slot.type}",
                    hint="declare every symbol in it with its range: symbol T lo=1 hi=512 hint=1",
                )
            self._known[slot.type] = aligned(math.ceil(most))
        return self._known[slot.type]


def _arena(lives: list[_Life], order: HappensBefore) -> tuple[dict[int, int], int]:
    """Offsets of one device's slots, and the size of its arena."""
    writers = _Writers(lives, order)
    shared = [x for x in lives if not x.carried and x.writers and writers.follow_next_step(x)]
    memory, alive, offsets = FirstFit(), dict[int, _Life](), dict[int, int]()
    for life in sorted(shared, key=lambda x: x.writers[0]):
        ended = [x for x in alive.values() if x.end < life.writers[0]]
        heads = writers.upcoming(life.writers[0])
        for other in ended:
            if _over(other, heads, order):
                memory.give_back(other.slot)
                del alive[other.slot]
        over = [x.slot for x in ended if x.slot in alive and _over(x, life.writers, order)]
        offsets[life.slot] = memory.take(life.bytes, life.slot, over)
        alive[life.slot] = life
    size = memory.size
    for life in lives:
        if life.slot not in offsets:
            offsets[life.slot] = size
            size += life.bytes
    return offsets, size


def _over(life: _Life, writers: Iterable[int], order: HappensBefore) -> bool:
    """Whether every use of a slot is certainly over when each of the instructions starts."""
    return all(order.before(use, w) for w in writers for use in life.last.values())


class _Writers:
    """The instructions that write to a device's arena, by lane."""

    def __init__(self, lives: Iterable[_Life], order: HappensBefore) -> None:
        self._order = order
        by_lane: dict[int, list[int]] = defaultdict(list)
        for i in sorted(w for life in lives for w in life.writers):
            by_lane[order.lane(i)].append(i)
        self._first = [lane[0] for lane in by_lane.values()]
        self._left = [deque(lane) for lane in by_lane.values()]

    def follow_next_step(self, life: _Life) -> bool:
        """Whether whatever writes in the next step starts after all uses of this one's slot."""
        order = self._order
        used = all(order.before(use, w, 1) for w in self._first for use in life.last.values())
        # the caller reads outputs before it writes the next inputs
        return used and (not life.output or all(order.before(order.host, w) for w in self._first))

    def upcoming(self, i: int) -> list[int]:
        """The first writer of each lane that isn't before instruction i of the stream."""
        heads = []
        for lane in self._left:
            while lane and lane[0] < i:
                lane.popleft()
            heads += [lane[0]] if lane else []
        return heads
