"""Which lanes have nothing to do in a step: where a split leaves one side empty, that side may rest.

A device whose shards are all empty neither computes nor is waited for: its core, its link and its
driver are left alone, as if the plan had been made without it.
"""

from __future__ import annotations

from collections.abc import Collection

from flashrt.ir import micro
from flashrt.ir.clock import Lane, lane_of
from flashrt.ir.order import accesses, root_of
from flashrt.ir.types import Env, evaluate


class Rests:
    """The lanes that rest, by where the splits stand; worked out once for each combination of ends.

    Between its ends a split leaves nothing empty. May be asked by several threads.
    """

    def __init__(self, stream: micro.Stream) -> None:
        self.stream = stream
        self._known: dict[tuple[int, ...], frozenset[Lane]] = {}
        self._hints = {s.name: s.hint for s in stream.symbols}

    def at(self, env: Env) -> frozenset[Lane]:
        """The lanes that have nothing to do. env: holds the split variables at least."""
        ends = tuple(
            (env[s.name] == s.positions[-1]) - (env[s.name] == s.positions[0]) for s in self.stream.splits
        )
        if not any(ends):
            return frozenset()
        if ends not in self._known:
            at = {s.name: env[s.name] for s in self.stream.splits}
            self._known[ends] = idle_lanes(self.stream, {**self._hints, **at})
        return self._known[ends]


def idle_lanes(stream: micro.Stream, env: Env) -> frozenset[Lane]:
    """The lanes of which no instruction makes anything that is used. env: symbols and split variables."""
    slots = {s.id: s for s in stream.slots}
    used = {root_of(int(o.value.removeprefix("%")), slots) for o in stream.outputs}
    live: set[Lane] = set()
    following: micro.Instr | None = None  # the next live instruction of the lane, for a bias
    for instr in reversed(stream.instrs):
        if isinstance(instr, micro.Bias):
            needed = following is not None and lane_of(following) == lane_of(instr)
        else:
            needed = _needed(instr, slots, used, env)
            following = instr if needed else None
        if needed:
            live.add(lane_of(instr))
            used.update(root_of(int(a.name), slots) for a in accesses(instr)[0] if a.kind == "slot")
    return frozenset(map(lane_of, stream.instrs)) - live


def _needed(instr: micro.Instr, slots: dict[int, micro.Slot], used: Collection[int], env: Env) -> bool:
    """Whether an instruction has an effect. What comes behind it has been looked at: it reads `used`."""
    if isinstance(instr, micro.Prefetch | micro.Evict):
        return True  # the next step finds the ring as this one leaves it
    for access in accesses(instr)[1]:
        if access.kind != "slot":
            return True
        slot = slots[int(access.name)]
        width = slot.type.shape[-1] if slot.type.shape else 1
        lo = 0 if access.lo is None else access.lo
        hi = width if access.hi is None else access.hi
        if root_of(slot.id, slots) in used and evaluate(hi - lo, env) > 0:
            return True
    return False
