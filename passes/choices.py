"""The ways one unit can be placed: on a home device, with some of its products elsewhere or shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from flashrt.ir import logical, physical
from flashrt.ir.bounds import Bounds
from flashrt.ir.types import Dim, Weight
from flashrt.passes.budget import Held, weights_held
from flashrt.passes.price import Prices, finish
from flashrt.passes.ratio import Cuts, Ratios
from flashrt.passes.spread import Lanes, Part, Seat, Shared, Whole, spread
from flashrt.passes.units import FOLLOWERS, MOST_SETS, Unit

PREFERRED = 1e-5  # of the time: what a cut that may move is worth
HOME, SHARE, AWAY = "home", "share", "away"  # what may become of a set of products


@dataclass(frozen=True, slots=True)
class Rules:
    """What may run where.

    fixed: seats that were chosen before (pins, states, what no chosen device can run).
    seat: a node's seat when its unit is at home on a device. runs: whether a device can run a node.
    units: channels that a product is cut at multiples of, 0 where it stays whole; joint: see `units.lanes`.
    """

    fixed: Mapping[str, Whole]
    seat: Callable[[logical.Node, str], Whole]
    runs: Callable[[logical.Node, str], bool]
    units: Mapping[str, int]
    joint: Lanes


@dataclass(frozen=True, slots=True)
class Plan:
    """How a unit is placed. partners: devices that share, or the one that products go to. sets: what becomes
    of each set of products. moving: whether cuts may move, which takes the memory of all positions."""

    home: str
    partners: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    moving: bool = False


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan with its time in microseconds and the rows of weights that it holds."""

    plan: Plan
    cost: float
    held: Held = field(hash=False, compare=False)


class Placer:
    """Lays units out by plans, and prices them."""

    def __init__(
        self, rules: Rules, ratios: Ratios, prices: Prices, weights: Mapping[str, Weight]
    ) -> None:  # fmt: skip
        self._rules, self.ratios, self._prices, self._weights = rules, ratios, prices, weights
        self._moves: dict[str, tuple[float, float]] = {}  # split variable → where it may stand

    def seats(self, unit: Unit, plan: Plan) -> dict[str, Seat]:
        """Where each node of the unit sits."""
        becomes = (
            {name: plan.sets[min(i, len(plan.sets) - 1)] for i, s in enumerate(unit.sets) for name in s}
            if plan.sets
            else {}
        )
        out: dict[str, Seat] = {}
        for node in unit.nodes:
            out[node.name] = self._seat(node, plan, becomes.get(node.name, HOME), out)
        return out

    def _seat(self, node: logical.Node, plan: Plan, becomes: str, made: Mapping[str, Seat]) -> Seat:
        if node.name in self._rules.fixed:
            return self._rules.fixed[node.name]
        if node.op == "linear":
            seat = self._product(node, plan, becomes)
        else:
            seat = self._follow(node, plan, made)
        return seat or self._rules.seat(node, plan.home)

    def _product(self, node: logical.Node, plan: Plan, becomes: str) -> Seat | None:
        devices = (plan.home, *plan.partners)
        if becomes == AWAY and self._rules.runs(node, plan.partners[0]):
            return Whole(plan.partners[0])
        if (
            becomes == SHARE
            and self._rules.units[node.name]
            and all(self._rules.runs(node, d) for d in devices)
        ):
            cuts = self.ratios.cuts(node, devices)
            return None if cuts is None else Shared(devices, self._bounds(cuts, plan))
        return None

    def _bounds(self, cuts: Cuts, plan: Plan) -> tuple[Dim, ...]:
        if not plan.moving:
            return cuts.fixed
        self._moves[cuts.split.name] = (cuts.split.positions[0], cuts.split.positions[-1])
        return cuts.moving

    def _follow(self, node: logical.Node, plan: Plan, made: Mapping[str, Seat]) -> Seat | None:
        """The seat of the inputs, where they have one in common and the node may sit there, too."""
        inputs = [made.get(i[1:]) for i in node.inputs if i[0] == "%"]
        first = inputs[0] if inputs else None
        if first is None or any(i != first for i in inputs):
            return None
        if isinstance(first, Shared):
            part = node.op == "slice" and node.inputs[0][1:] in self._rules.joint
            follows = node.op in FOLLOWERS and all(self._rules.runs(node, d) for d in first.devices)
            return first if part or follows else None
        moves = node.op in FOLLOWERS or node.op in ("slice", "view")
        return Whole(first.device) if moves and self._rules.runs(node, first.device) else None

    def one(self, unit: Unit, plan: Plan, wanted: Sequence[str]) -> Priced:
        """The plan with its price: from the unit's inputs, at home, to the values that others take, at home.

        wanted: those values.
        """
        return self._priced(unit, plan, self.seats(unit, plan), wanted)

    def _priced(self, unit: Unit, plan: Plan, seats: Mapping[str, Seat], wanted: Sequence[str]) -> Priced:
        parts = spread(unit.nodes, seats, self._rules.joint, wanted)
        return Priced(plan, finish(parts, self._prices, plan.home, wanted), self._held(parts))

    def priced(self, unit: Unit, devices: Sequence[str], wanted: Sequence[str]) -> list[Priced]:
        """Every plan worth a thought, the fastest first: those that differ from each other."""
        out, seen = [], set[frozenset[tuple[str, Seat]]]()
        for plan in self._plans(unit, devices):
            seats = self.seats(unit, plan)
            if (key := frozenset(seats.items())) in seen:
                continue
            seen.add(key)
            out.append(self._priced(unit, plan, seats, wanted))
            if any(isinstance(s, Shared) for s in seats.values()):
                moving = replace(plan, moving=True)
                parts = spread(unit.nodes, self.seats(unit, moving), self._rules.joint, wanted)
                # in doubt the cut that may move
                out.append(Priced(moving, out[-1].cost * (1 - PREFERRED), self._held(parts)))
        return sorted(out, key=lambda p: p.cost)

    def _plans(self, unit: Unit, devices: Sequence[str]) -> Iterator[Plan]:
        sets = min(len(unit.sets), MOST_SETS)
        for home in devices:
            yield Plan(home)
            others = [d for d in devices if d != home] if sets else []
            for other in others:
                for becomes in product((HOME, SHARE, AWAY), repeat=sets):
                    yield Plan(home, (other,), becomes)
            if len(others) > 1:
                for becomes in product((HOME, SHARE), repeat=sets):
                    yield Plan(home, tuple(others), becomes)

    def _held(self, parts: Sequence[Part]) -> Held:
        return weights_held(map(bare, parts), self._weights, Bounds(self._moves))


def bare(part: Part) -> physical.Node:
    """A part as a node, as far as its inputs and channels go."""
    shard = None if part.lo is None or part.hi is None else physical.Range(part.lo, part.hi)
    op = "merge" if part.merge else part.node.op
    return physical.Node(part.name, op, part.inputs, part.type, part.device, part.of, shard)
