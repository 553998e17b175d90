"""Derives the ticks of a stream from what its instructions touch.

Given lanes and an order that is a valid serial execution, every read-after-write,
write-after-read and write-after-write between two lanes becomes a wait, within a step
(`!3`) and from one step to the next (`!3@-1`). Lanes order themselves. Slots, weight
blocks (loading writes, evicting writes, using reads) and states are treated alike.
So a pass that moves instructions or changes their lanes never edits ticks: it asks for
new ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from flashrt.ir import micro
from flashrt.ir.bounds import Bounds
from flashrt.ir.memory import MemoryMap, Use, conflict, supersedes, timed_uses
from flashrt.ir.types import Expr

Needs = dict[int, int]  # lane → the last instruction of it that must be over
Uses = Sequence[tuple[Sequence[Use], Sequence[Use]]]
NEVER = -(1 << 60)  # a position before every step


def synchronise(stream: micro.Stream, *, minimal: bool = False) -> micro.Stream:
    """The stream with its ticks made anew.

    minimal: leave out waits that lane order and the other waits imply.
    """
    lanes = _Lanes(stream)
    now, earlier = _needs(stream, lanes)
    if minimal:
        now, earlier = _Sieve(lanes, now, earlier).sift()
    return _written(stream, now, earlier)


class _Lanes:
    """Lane and position of each instruction; lanes are numbered in order of appearance."""

    def __init__(self, stream: micro.Stream) -> None:
        numbers: dict[tuple[str, str], int] = {}
        self.of: list[int] = []
        self.position: list[int] = []
        self.length: list[int] = []
        for instr in stream.instrs:
            lane = numbers.setdefault((instr.device, instr.lane), len(numbers))
            if lane == len(self.length):
                self.length.append(0)
            self.of.append(lane)
            self.position.append(self.length[lane])
            self.length[lane] += 1


# ---- what must be over before what ---------------------------------------------
@dataclass(slots=True)
class _Piece:
    """The accesses of one piece of memory that later ones are compared with: use → (step, instruction).

    Reads are kept by lane: the last one of a lane stands for those before it.
    """

    writes: dict[Use, tuple[int, int]] = field(default_factory=dict)
    reads: dict[tuple[Use, int], tuple[int, int]] = field(default_factory=dict)


def _needs(stream: micro.Stream, lanes: _Lanes) -> tuple[list[Needs], list[Needs]]:
    """For each instruction: what of this step, and what of the previous one, it must come after."""
    count = len(stream.instrs)
    now: list[Needs] = [{} for _ in range(count)]
    earlier: list[Needs] = [{} for _ in range(count)]
    if len(lanes.length) < 2:
        return now, earlier
    memory = MemoryMap(stream)
    known = memory.bounds
    uses = _shared(list(timed_uses(memory)), memory, lanes)
    pieces: dict[int, _Piece] = defaultdict(_Piece)
    for step in (0, 1):
        for i, (reads, writes) in enumerate(uses):
            for use in reads:
                for number in use.pieces:
                    piece = pieces[number]
                    _compare(piece.writes.items(), use, step, i, known, lanes, (now, earlier))
                    piece.reads[use, lanes.of[i]] = (step, i)
            for use in writes:
                for number in use.pieces:
                    piece = pieces[number]
                    before = [*piece.writes.items(), *((u, at) for (u, _), at in piece.reads.items())]
                    _compare(before, use, step, i, known, lanes, (now, earlier))
                    _forget(piece, use, step, i, known)
    return now, earlier


def _shared(uses: Uses, memory: MemoryMap, lanes: _Lanes) -> Uses:
    """Only the uses of memory that several lanes touch; inputs are the host's to order."""
    inputs = {("slot", slot) for slot in memory.inputs}
    touched: dict[int, set[int]] = defaultdict(set)
    for i, (reads, writes) in enumerate(uses):
        for use in (*reads, *writes):
            for number in use.pieces:
                touched[number].add(lanes.of[i])
    shared = {number for number, found in touched.items() if len(found) > 1}

    def keep(found: Sequence[Use]) -> tuple[Use, ...]:
        return tuple(u for u in found if u.owner not in inputs and not shared.isdisjoint(u.pieces))

    return [(keep(reads), keep(writes)) for reads, writes in uses]


def _compare(
    before: Iterable[tuple[Use, tuple[int, int]]],
    use: Use,
    step: int,
    i: int,
    known: Bounds,
    lanes: _Lanes,
    needs: tuple[list[Needs], list[Needs]],
) -> None:
    for old, (old_step, j) in before:
        lane = lanes.of[j]
        if lane == lanes.of[i] or step == old_step == 1:
            continue  # ordered by the lane, or found in the step before
        if conflict(old, use, known) or (step != old_step and _moves(old, use)):
            found = needs[step - old_step][i]
            found[lane] = max(j, found.get(lane, -1))


def _moves(old: Use, new: Use) -> bool:
    """Whether channel ranges depend on symbols, which may differ from one step to the next."""
    return any(isinstance(d, Expr) for u in (old, new) for d in u.span or ())


def _forget(piece: _Piece, use: Use, step: int, i: int, known: Bounds) -> None:
    """Records a write, and drops what nobody needs to be compared with any more."""

    def over(old: Use, old_step: int) -> bool:
        return supersedes(use, old, known) and (old_step == step or use.span is None or not _moves(old, use))

    piece.writes = {u: at for u, at in piece.writes.items() if not over(u, at[0])}
    piece.reads = {k: at for k, at in piece.reads.items() if not over(k[0], at[0])}
    piece.writes[use] = (step, i)


# ---- which of those waits are implied --------------------------------------------
class _Sieve:
    """Keeps a wait only where lane order and the waits kept so far don't imply it.

    A lane's knowledge is a vector: the position in each lane up to which everything is
    known to be over, relative to this step (negative: in the previous one).
    """

    def __init__(self, lanes: _Lanes, now: list[Needs], earlier: list[Needs]) -> None:
        self._lanes, self._now, self._earlier = lanes, now, earlier
        self._asked = {j for needs in (*now, *earlier) for j in needs.values()}

    def sift(self) -> tuple[list[Needs], list[Needs]]:
        """First the waits within the step; then, knowing those, the ones for the previous step."""
        nothing = [NEVER] * len(self._lanes.length)
        no_needs: list[Needs] = [{}] * len(self._now)
        now, _, ends, at = self._walk([list(nothing) for _ in nothing], self._now, no_needs, {})
        starts = [self._before(end) for end in ends]
        then = {j: self._before(clock) for j, clock in at.items()}
        _, earlier, _, _ = self._walk(starts, now, self._earlier, then)
        return now, earlier

    def _before(self, clock: Sequence[int]) -> list[int]:
        """A clock of the previous step, as seen from this one."""
        return [at - length for at, length in zip(clock, self._lanes.length, strict=True)]

    def _walk(
        self,
        known: list[list[int]],
        now: list[Needs],
        earlier: list[Needs],
        then: dict[int, list[int]],
    ) -> tuple[list[Needs], list[Needs], list[list[int]], dict[int, list[int]]]:
        """Goes through a step; gives the waits kept, the lanes' last clocks, and the clocks asked for."""
        lanes = self._lanes
        kept_now: list[Needs] = []
        kept_earlier: list[Needs] = []
        at: dict[int, list[int]] = {}
        for i, lane in enumerate(lanes.of):
            clock = known[lane]
            kept_now.append(self._keep(now[i], clock, 0, at))
            kept_earlier.append(self._keep(earlier[i], clock, 1, then))
            clock[lane] = lanes.position[i]
            if i in self._asked:
                at[i] = list(clock)
        return kept_now, kept_earlier, known, at

    def _keep(self, needs: Needs, clock: list[int], steps: int, at: dict[int, list[int]]) -> Needs:
        kept: Needs = {}
        for lane, j in sorted(needs.items(), key=lambda need: -need[1]):
            if clock[lane] < self._lanes.position[j] - steps * self._lanes.length[lane]:
                kept[lane] = j
                clock[:] = map(max, clock, at[j])
        return kept


# ---- writing them down -----------------------------------------------------------
def _written(stream: micro.Stream, now: list[Needs], earlier: list[Needs]) -> micro.Stream:
    """Numbers the ticks in order of their signals, and puts waits and signals on the instructions."""
    signalling = sorted({j for needs in (*now, *earlier) for j in needs.values()})
    ticks = {j: tick for tick, j in enumerate(signalling)}
    instrs = []
    for i, instr in enumerate(stream.instrs):
        waits = [micro.Wait(ticks[j]) for j in sorted(now[i].values())]
        waits += [micro.Wait(ticks[j], -1) for j in sorted(earlier[i].values())]
        signals = ticks.get(i)
        if (instr.waits, instr.signals) != (tuple(waits), signals):
            instr = replace(instr, waits=tuple(waits), signals=signals)
        instrs.append(instr)
    return replace(stream, instrs=tuple(instrs))
