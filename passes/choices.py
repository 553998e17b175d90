"""The ways one unit can be placed: on a home device, with some of its products elsewhere or shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from flashrt.ir import logical, physical
from flashrt.ir.bounds import Bounds
from flashrt.ir.types import Dim
from flashrt.passes.budget import Held, weights_held
from flashrt.passes.parts import Group, Parts
from flashrt.passes.price import Prices, finish
from flashrt.passes.ratio import Cuts, Ratios
from flashrt.passes.shares import Shares
from flashrt.passes.spread import Copied, Lanes, Part, Parted, Seat, Shared, Summed, Whole, spread
from flashrt.passes.units import FOLLOWERS, MOST_SETS, Unit

PREFERRED = 1e-5  # of the time: what a cut that may move is worth
# of the time: what parts have to save, for nothing of them can move; more between devices of one memory,
# where all else moves freely, so that a device can be left when others want its cores
FIXED, FIXED_IN_A_POOL = 0.03, 0.2
BUSY = (
    0.1  # of the time: what sharing has to save with a processor whose memory another device reads meanwhile
)
COPIED = ("rms_norm", "layer_norm")
MOVED = ("slice", "view", "gated_clamped", "route", "expert_sum")  # stay with their input, as FOLLOWERS do
# what may become of a set of products
HOME, SHARE, AWAY, PART, SUM = "home", "share", "away", "part", "sum"


@dataclass(frozen=True, slots=True)
class Rules:
    """What may run where.

    fixed: seats that were chosen before (pins, states, what no chosen device can run).
    seat: a node's seat when its unit is at home on a device. runs: whether a device can run a node.
    units: channels that a product is cut at multiples of, 0 where it stays whole; joint: see `units.lanes`.
    groups: by node, those that may be made in parts; sums: products that may be the sum of parts.
    pools: the memory of each device. reluctant: what products that devices share have to save, of a unit's
    time. whole: whether products are shared only where the cut may move: both devices then have all of them.
    """

    fixed: Mapping[str, Seat]
    seat: Callable[[logical.Node, str], Seat]
    runs: Callable[[logical.Node, str], bool]
    units: Mapping[str, int]
    joint: Lanes
    groups: Mapping[str, Group] = field(default_factory=dict)
    sums: frozenset[str] = frozenset()
    pools: Mapping[str, str] = field(default_factory=dict)
    reluctant: float = 0.0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How a unit is placed. partners: devices that share, or the one that products go to. sets: what becomes
    of each set of products. moving: whether cuts may move, which takes the memory of all positions. copies:
    whether each device that shares products computes their norm itself. near: whether each of them has the
    inputs and wants the results, so that none waits for another between units that are placed alike."""

    home: str
    partners: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    moving: bool = False
    copies: bool = False
    near: bool = False

    @property
    def homes(self) -> tuple[str, ...]:
        """The devices that have the unit's inputs, and shall have its results."""
        return (self.home, *self.partners) if self.near else (self.home,)


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan with its time in microseconds, the rows of weights that it holds, and where its nodes sit."""

    plan: Plan
    cost: float
    held: Held = field(hash=False, compare=False)
    seats: Mapping[str, Seat] = field(hash=False, compare=False)


class Placer:
    """Lays units out by plans, and prices them."""

    def __init__(self, rules: Rules, ratios: Ratios, shares: Shares, prices: Prices, parts: Parts) -> None:
        self._rules, self.ratios, self._shares, self._prices = rules, ratios, shares, prices
        self._parts = parts
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
        if plan.copies:
            out |= self._copies(unit, out)
        return out

    def _copies(self, unit: Unit, seats: Mapping[str, Seat]) -> dict[str, Seat]:
        """Seats of the norms that each device which shares their products computes itself, and of the sums
        that these take."""
        out: dict[str, Seat] = {}
        for node in unit.nodes:
            if node.op not in COPIED or node.name in self._rules.fixed:
                continue
            users = {seats[n.name] for n in unit.nodes if f"%{node.name}" in n.inputs}
            seat = users.pop() if len(users) == 1 else None
            if isinstance(seat, Shared | Parted) and all(self._rules.runs(node, d) for d in seat.devices):
                out[node.name] = Copied(seat.devices)
                x = node.inputs[0][1:]
                if isinstance(made := seats.get(x), Summed) and made.devices == seat.devices:
                    out[x] = replace(made, everywhere=True)
        return out

    def _seat(self, node: logical.Node, plan: Plan, becomes: str, made: Mapping[str, Seat]) -> Seat:
        if node.name in self._rules.fixed:
            return self._rules.fixed[node.name]
        if node.op in ("linear", "expert_linear"):
            seat = self._product(node, plan, becomes)
            x = made.get(node.inputs[0][1:])
            if becomes == SUM and isinstance(x, Parted) and node.name in self._rules.sums:
                seat = Summed(x.devices, x.bounds)
        else:
            seat = self._follow(node, plan, made)
        return seat or self._rules.seat(node, plan.home)

    def _product(self, node: logical.Node, plan: Plan, becomes: str) -> Seat | None:
        devices = (plan.home, *plan.partners)
        if becomes == PART and node.name in self._rules.groups:
            return self._parted(self._rules.groups[node.name], devices, near=plan.near)
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

    def _parted(self, group: Group, devices: tuple[str, ...], *, near: bool) -> Parted | None:
        bounds = self._shares.bounds(group, devices, near=near)
        return None if bounds is None else Parted(devices, bounds)

    def _bounds(self, cuts: Cuts, plan: Plan) -> tuple[Dim, ...]:
        if not plan.moving:
            return cuts.fixed
        self._moves[cuts.split.name] = (cuts.split.positions[0], cuts.split.positions[-1])
        return cuts.moving

    def _follow(self, node: logical.Node, plan: Plan, made: Mapping[str, Seat]) -> Seat | None:
        """The seat of the inputs, where they have one in common and the node may sit there, too."""
        inputs = [made.get(i[1:]) for i in node.inputs if i[0] == "%"]
        first = inputs[0] if inputs else None
        if node.op == "expert_sum" and isinstance(first, Whole):
            inputs = inputs[:1]  # the experts' results are many, their weights few
        if isinstance(first, Summed | Copied):
            return None
        if isinstance(first, Parted):
            own = self._rules.groups.get(node.name)
            return first if own is not None and own == self._rules.groups.get(node.inputs[0][1:]) else None
        if first is None or any(i != first for i in inputs):
            return None
        if isinstance(first, Shared):
            part = node.op == "slice" and node.inputs[0][1:] in self._rules.joint
            follows = node.op in FOLLOWERS and all(self._rules.runs(node, d) for d in first.devices)
            return first if part or follows else None
        moves = node.op in FOLLOWERS or node.op in MOVED
        return Whole(first.device) if moves and self._rules.runs(node, first.device) else None

    def one(self, unit: Unit, plan: Plan, wanted: Sequence[str]) -> Priced:
        """The plan with its price: from the unit's inputs, at home, to the values that others take, at home.

        wanted: those values.
        """
        return self._priced(unit, plan, self.seats(unit, plan), wanted)

    def _priced(self, unit: Unit, plan: Plan, seats: Mapping[str, Seat], wanted: Sequence[str]) -> Priced:
        homes = plan.homes if plan.near else ("",)
        parts = spread(unit.nodes, seats, self._rules.joint, self._parts, wanted, homes)
        time = finish(parts, self._prices, plan.homes, wanted)
        if any(isinstance(s, Parted) for name, s in seats.items() if name not in self._rules.fixed):
            time *= 1 + self._stiffness(plan)
        elif any(isinstance(s, Shared) for s in seats.values()):
            time *= 1 + self._rules.reluctant
        return Priced(plan, time, self._held(parts), seats)

    def _stiffness(self, plan: Plan) -> float:
        devices = (plan.home, *plan.partners)
        apart = len({self._rules.pools.get(d, d) for d in devices}) == len(devices)
        return FIXED if apart else FIXED_IN_A_POOL

    def with_copies(self, unit: Unit, priced: Priced, wanted: Sequence[str]) -> Priced:
        """The plan, or the same with copies of norms, if that is no slower."""
        best = priced
        for near in (False, True):
            plan = replace(priced.plan, copies=True, near=near)
            seats = self.seats(unit, plan)
            if not any(isinstance(seat, Copied) for seat in seats.values()):
                break
            for name in wanted if near else ():
                if isinstance(seat := seats.get(name), Summed):
                    seats[name] = replace(seat, everywhere=True)
            copied = self._priced(unit, plan, seats, wanted)
            best = copied if copied.cost <= best.cost * (1 + PREFERRED) else best
        return best

    def priced(self, unit: Unit, devices: Sequence[str], wanted: Sequence[str]) -> list[Priced]:
        """Every plan worth a thought, the fastest first: those that differ from each other."""
        out, seen = [], set[frozenset[tuple[str, Seat]]]()
        for plan in self._plans(unit, devices):
            seats = self.seats(unit, plan)
            if (key := frozenset(seats.items())) in seen:
                continue
            seen.add(key)
            fixed = self._priced(unit, plan, seats, wanted)
            shared = any(isinstance(s, Shared) for s in seats.values())
            if not shared or not self._rules.whole:
                out.append(fixed)
            if shared:
                moving = replace(plan, moving=True)
                seats = self.seats(unit, moving)
                parts = spread(unit.nodes, seats, self._rules.joint, self._parts, wanted)
                # in doubt the cut that may move
                out.append(Priced(moving, fixed.cost * (1 - PREFERRED), self._held(parts), seats))
        return sorted(out, key=lambda p: p.cost)

    def _plans(self, unit: Unit, devices: Sequence[str]) -> Iterator[Plan]:
        sets = min(len(unit.sets), MOST_SETS)
        parted = [] if self._rules.whole else list(self._in_parts(unit))
        for home in devices:
            yield Plan(home)
            others = [d for d in devices if d != home] if sets else []
            for other in others:
                for becomes in product((HOME, SHARE, AWAY), repeat=sets):
                    yield Plan(home, (other,), becomes)
                for becomes in parted:
                    yield Plan(home, (other,), becomes)
            if len(others) > 1:
                for becomes in product((HOME, SHARE), repeat=sets):
                    yield Plan(home, tuple(others), becomes)
                for becomes in parted:
                    yield Plan(home, tuple(others), becomes)

    def _in_parts(self, unit: Unit) -> Iterator[tuple[str, ...]]:
        """What may become of the sets where at least one is made in parts."""
        if len(unit.sets) > MOST_SETS:
            return
        able = [all(name in self._rules.groups for name in names) for names in unit.sets]
        ways = [
            (HOME, SHARE, *([PART] if part else []), *([SUM] if self._rules.sums.issuperset(names) else []))
            for names, part in zip(unit.sets, able, strict=True)
        ]
        feeds = [self._feeds(unit, at) for at in range(len(unit.sets))]
        for becomes in product(*ways):
            fed = (becomes[feeds[at]] == PART for at, b in enumerate(becomes) if b == SUM)
            if PART in becomes and all(fed):
                yield becomes

    def _feeds(self, unit: Unit, at: int) -> int:
        """The set whose products a set takes what comes of, if they may be made in parts; else itself."""
        x = next(n for n in unit.nodes if n.name == unit.sets[at][0]).inputs[0][1:]
        products = set(self._rules.groups[x].products) if x in self._rules.groups else set()
        return next((i for i, names in enumerate(unit.sets) if products & set(names)), at)

    def _held(self, parts: Sequence[Part]) -> Held:
        return weights_held(map(bare, parts), self._parts.weights, Bounds(self._moves))


def bare(part: Part) -> physical.Node:
    """A part as a node, as far as its inputs and channels go."""
    shard = None if part.lo is None or part.hi is None else physical.Range(part.lo, part.hi)
    share = physical.Range(*part.shares[:2]) if part.shares else None
    op = "merge" if part.merge else part.node.op
    return physical.Node(part.name, op, part.inputs, part.type, part.device, part.of, shard, share)
