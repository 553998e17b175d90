"""Happens-before: which instruction is certainly over when another one starts.

Steps follow each other without a join. What orders instructions is
- lane order: a lane runs its instructions one after the other, step after step;
- ticks: a wait is over after the instruction that signals its tick;
- the host: it writes the inputs of step k+1 when every compute lane has ended
  step k, so what reads an input slot comes after that.

The relation is kept as vector clocks: how many leading instructions of each lane
are certainly over. An instruction without waits shares the clock of its lane's
previous one, so time and memory grow with the number of waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

from flashrt.ir import micro
from flashrt.ir.types import Dim

COMPUTE = "compute"  # the lane whose end is the end of a step
Clock = tuple[int, ...]
Ring = tuple[str, str]  # a ring block: name, device


class Access(NamedTuple):
    """A use of memory: a slot (name is its number), a weight block or a state of a device.

    lo, hi: channels of a slot, rows of a block; None for all of it.
    """

    kind: Literal["slot", "block", "state"]
    device: str
    name: int | str
    lo: Dim | None = None
    hi: Dim | None = None


def accesses(instr: micro.Instr) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """What an instruction reads and what it writes.

    An `evict` frees its block, which counts as writing it. A `bias` names a block
    that is read by the dispatch after it: look there for the time of the access.
    """
    device = instr.device
    match instr:
        case micro.Dispatch():
            reads = [_argument(arg, device, instr.keeper) for arg in instr.args]
            reads += [Access("state", device, name) for name in instr.reads]
            writes = [Access("state", device, name) for name in instr.writes]
            if instr.dst is not None:
                writes.append(_argument(instr.dst, device))
            return tuple(reads), tuple(writes)
        case micro.Quantize():
            return (_argument(instr.src, device),), (_argument(instr.dst, device),)
        case micro.Transfer():
            return (_argument(instr.src, instr.source or device),), (_argument(instr.dst, instr.to),)
        case micro.Bias():
            return (_argument(instr.block, device),), ()
        case micro.Prefetch() | micro.Evict():
            return (), (Access("block", device, instr.block),)


def _argument(arg: micro.Arg, device: str, keeper: str = "") -> Access:
    if isinstance(arg, micro.SlotRef):
        return Access("slot", device, arg.slot, arg.lo, arg.hi)
    return Access("block", keeper or device, arg.block, arg.lo, arg.hi)


def loaded_at_start(stream: micro.Stream) -> set[Ring]:
    """Ring blocks that the step before left loaded: they are used before their first prefetch."""
    ring = {(b.name, b.device) for b in stream.blocks if b.home == "ring"}
    prefetched = {(i.block, i.device) for i in stream.instrs if isinstance(i, micro.Prefetch)}
    first: dict[Ring, micro.Instr] = {}
    for instr in stream.instrs if ring else ():
        for access in chain(*accesses(instr)):
            if access.kind == "block":
                first.setdefault((str(access.name), access.device), instr)
    late = {key for key, instr in first.items() if not isinstance(instr, micro.Prefetch)}
    return ring & prefetched & late


def input_slots(stream: micro.Stream) -> frozenset[int]:
    """Slots that lie in the step block, aliases of them included."""
    slots = {slot.id: slot for slot in stream.slots}
    return frozenset(i for i in slots if slots[root_of(i, slots)].input)


def root_of(slot: int, slots: dict[int, micro.Slot]) -> int:
    """The slot that owns the memory `slot` lies in: the end of its chain of aliases."""
    for _ in range(len(slots)):
        entry = slots.get(slot)
        if entry is None or entry.alias is None or entry.alias not in slots:
            break
        slot = entry.alias
    return slot


@dataclass(frozen=True, slots=True)
class _Edge:
    """Wait for instruction `source` of this step (steps 0) or of the previous one (steps 1)."""

    source: int
    steps: int


class HappensBefore:
    """The order that lanes, ticks and the host's writes impose on a stream.

    Instructions are named by their index in `stream.instrs`; `host` is the index of the
    host's writing of the inputs. Waits for ticks that nothing earlier signals order
    nothing (a law of their own reports them).
    """

    def __init__(self, stream: micro.Stream) -> None:
        self.host = len(stream.instrs)
        lanes: dict[tuple[str, str], int] = {("", "host"): 0}
        self._lane: list[int] = []
        self._position: list[int] = []
        self._length = [1]
        last: dict[int, int] = {}
        compute: set[int] = set()
        for i, instr in enumerate(stream.instrs):
            lane = lanes.setdefault((instr.device, instr.lane), len(lanes))
            if lane == len(self._length):
                self._length.append(0)
            if instr.lane == COMPUTE:
                compute.add(lane)
            self._lane.append(lane)
            self._position.append(self._length[lane])
            self._length[lane] += 1
            last[lane] = i
        self._lane.append(0)
        self._position.append(0)
        self._edges = _edges(stream, self.host)
        self._edges[self.host] = [_Edge(last[lane], 1) for lane in sorted(compute)]
        self._clocks: list[list[Clock]] = []

    def before(self, i: int, j: int, steps_apart: int = 0) -> bool:
        """Whether instruction i of a step is certainly over when j, `steps_apart` steps later, starts."""
        lane = self._lane[i]
        if lane == self._lane[j]:
            return steps_apart > 0 or self._position[i] < self._position[j]
        while len(self._clocks) <= steps_apart:
            self._clocks.append(self._unroll())
        return self._clocks[steps_apart][j][lane] > self._position[i]

    def lane(self, i: int) -> int:
        """The number of the lane that instruction i runs on."""
        return self._lane[i]

    def _unroll(self) -> list[Clock]:
        """The clocks of one more step: what of step 0 is over when each of its instructions starts."""
        earlier = self._clocks[-1] if self._clocks else None
        current = self._first_clocks(earlier)
        clocks: list[Clock] = [()] * (self.host + 1)
        for j in (self.host, *range(self.host)):
            lane = self._lane[j]
            for edge in self._edges.get(j, ()):
                if edge.steps == 0:
                    current[lane] = self._joined(current[lane], edge.source, clocks, earlier is not None)
                elif earlier is not None:
                    current[lane] = self._joined(current[lane], edge.source, earlier, len(self._clocks) > 1)
            clocks[j] = current[lane]
        return clocks

    def _first_clocks(self, earlier: list[Clock] | None) -> list[Clock]:
        """The clock with which each lane enters a step."""
        if earlier is None:
            return [(0,) * len(self._length)] * len(self._length)
        ends: list[Clock] = [()] * len(self._length)
        for j in (self.host, *range(self.host)):
            ends[self._lane[j]] = earlier[j]
        return [(*end[:lane], self._length[lane], *end[lane + 1 :]) for lane, end in enumerate(ends)]

    def _joined(self, clock: Clock, source: int, clocks: list[Clock], later: bool) -> Clock:
        """`clock` after waiting for `source`. later: it is of a later step than the one counted."""
        lane = self._lane[source]
        done = self._length[lane] if later else self._position[source] + 1
        if clock[lane] >= done and not later:
            return clock
        joined = list(map(max, clock, clocks[source]))
        joined[lane] = max(joined[lane], done)
        return tuple(joined)


def _edges(stream: micro.Stream, host: int) -> dict[int, list[_Edge]]:
    """For each instruction with waits: what it waits for."""
    signallers = {
        instr.signals: i for i, instr in reversed(list(enumerate(stream.instrs))) if instr.signals is not None
    }
    inputs = input_slots(stream)
    edges: dict[int, list[_Edge]] = {}
    for i, instr in enumerate(stream.instrs):
        found = [edge for wait in instr.waits for edge in _edge(wait, i, signallers)]
        if inputs and not inputs.isdisjoint(_slots_read(instr)):
            found.append(_Edge(host, 0))
        if found:
            edges[i] = found
    return edges


def _slots_read(instr: micro.Instr) -> list[int]:
    match instr:
        case micro.Dispatch():
            return [arg.slot for arg in instr.args if isinstance(arg, micro.SlotRef)]
        case micro.Quantize() | micro.Transfer():
            return [instr.src.slot]
    return []


def _edge(wait: micro.Wait, i: int, signallers: dict[int, int]) -> Iterator[_Edge]:
    source = signallers.get(wait.tick)
    if source is not None and (wait.step == -1 or (wait.step == 0 and source < i)):
        yield _Edge(source, -wait.step)
