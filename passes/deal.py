"""Deals the units of a graph out to several devices: in order of speed, and by an integer program."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise

from flashrt.ir import logical, physical
from flashrt.ir.types import substitute, sym, symbols_of
from flashrt.layouts import aligned
from flashrt.passes.assign import Choice, Memory, Problem, Tied, assign
from flashrt.passes.budget import (
    Held,
    held_bytes,
    pool_limit,
    pool_of,
    state_bytes,
    taken,
    weight_road,
)
from flashrt.passes.choices import BUSY, HOME, Placer, Plan, Priced, Rules
from flashrt.passes.cost import block_bytes, kernel_of
from flashrt.passes.interleave import Load, interleave
from flashrt.passes.lending import PASSED, covers, largest_of_a_layer
from flashrt.passes.parts import Group, plain
from flashrt.passes.price import Prices
from flashrt.passes.ratio import Ratios
from flashrt.passes.shares import Shares, known_shares
from flashrt.passes.spread import Copied, Lanes, Parted, Seat, Shared, Summed, Whole
from flashrt.passes.task import Task
from flashrt.passes.units import Unit, lanes, signature, units, users_of

# how many times as long as copies take passing is assumed to last: in a ring none begins before there is
# room, and how often they wait for that is only known when the order of all is
WAITS = (1.1, 1.25, 1.5)
MOST = 60  # choices of a class of units that the integer program is given


@dataclass(frozen=True, slots=True)
class Dealt:
    """Seats of all nodes, what is to be said for them by node, and the split variables in use."""

    seats: Mapping[str, Seat]
    causes: Mapping[str, str]
    splits: tuple[physical.Split, ...]


@dataclass(frozen=True, slots=True)
class _Class:
    """Units that cost the same. priced: the plans of one of them; choices: the same for the program."""

    units: tuple[Unit, ...]
    priced: tuple[Priced, ...]
    choices: tuple[Choice, ...]


def deal(task: Task) -> list[Dealt]:
    """The ways found: by the integer program, if it finds any, and in order of speed. Not all may fit."""
    return _Dealer(task).ways()


class _Dealer:
    """The graph in classes of units, and their plans."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._prices = prices = Prices(task.graph, task.costs, task.machine, task.env)
        self._weights = task.weights
        self._units = units(task.graph)
        self._devices = [d.id for d in task.usable]
        self._pools = {d.id: pool_of(d) for d in task.usable}
        self._held = task.earlier.held()
        self._lending = task.earlier.lending(task.machine)
        self._kept_parts: dict[str, list[str]] = defaultdict(list)
        for name in dict.fromkeys(name for name, _ in self._held):
            if whole := self._weights[name].of:
                self._kept_parts[whole].append(name)
        self._tied = _tied(self._units)
        self._wanted = _wanted(self._units)
        prices.common = _common(self._units)
        rules = Rules(
            task.fixed, task.seat, lambda n, d: not task.obstacle(n, d), self._channels(), self._joint(),
            self._groups(), self._sums(), self._pools, BUSY if self._lending.rings else 0.0,
            task.earlier.whole,
        )  # fmt: skip
        products = [n for n in task.graph.nodes if rules.units[n.name]]
        self._ratios = Ratios(products, rules.joint, rules.units, prices, task.earlier.cuts())
        nodes = {n.name: n for n in task.graph.nodes}
        known = known_shares(task.parts.groups.values(), nodes, task.earlier.seats())
        shares = Shares(nodes, task.parts, prices, known)
        self._placer = Placer(rules, self._ratios, shares, prices, task.parts)
        self._classes = self._classify()

    def ways(self) -> list[Dealt]:
        """All ways that are worth a look."""
        plans = [self._in_order_of_speed()]
        if not self._task.earlier.whole:
            plans = [self._best(beside=True), self._best(beside=False), *plans]
        if self._task.earlier.rings:
            plans += [self._best(beside=True, waits=waits) for waits in WAITS]
        if not self._held and any(d.kind in PASSED for d in self._task.usable):
            plans.append(self._best(beside=True, streams=False))
        found = [p for p in plans if p is not None]
        return [self._dealt(p) for at, p in enumerate(found) if p not in found[:at]]

    def _channels(self) -> Mapping[str, int]:
        task = self._task
        return {
            n.name: task.cuts[n.name].unit if n.name in task.cuts and n.name not in task.fixed else 0
            for n in task.graph.nodes
        }

    def _groups(self) -> dict[str, Group]:
        """The groups that every device can make parts of, by node."""
        nodes = {n.name: n for n in self._task.graph.nodes}

        def free(name: str) -> bool:
            undivided = name in self._task.fixed or name in self._task.earlier.undivided
            return not undivided and not any(self._task.obstacle(nodes[name], d) for d in self._devices)

        groups = dict.fromkeys(self._task.parts.groups.values())
        return {name: g for g in groups if all(map(free, g.nodes)) for name in g.nodes}

    def _sums(self) -> frozenset[str]:
        """The products that may be the sum of parts, each of which any device can make."""
        task = self._task

        def able(node: logical.Node) -> bool:
            kernel = kernel_of(plain(node), self._weights)
            return not any(task.obstacle(node, d, kernel) or task.obstacle(node, d) for d in self._devices)

        products = (n for n in task.graph.nodes if task.parts.adds_up(n) and n.name not in task.fixed)
        return frozenset(n.name for n in products if able(n)) if task.sums else frozenset()

    def _joint(self) -> Lanes:
        """Joint products of which every part and every reader may sit where the shards are."""
        users = users_of(self._task.graph)

        def free(node: logical.Node) -> bool:
            obstacles = (self._task.obstacle(node, d) for d in self._devices)
            return node.name not in self._task.fixed and not any(obstacles)

        return {
            name: parts
            for name, parts in lanes(self._task.graph).items()
            if all(free(p) and all(map(free, users[p.name])) for p in parts)
        }

    def _classify(self) -> list[_Class]:
        fixed = {n: s.device if isinstance(s, Whole) else s for n, s in self._task.fixed.items()}
        alike: dict[object, list[Unit]] = defaultdict(list)
        for unit in self._units:
            alike[signature(unit, self._weights, fixed), self._kept(unit)].append(unit)
        return [self._class(tuple(us)) for us in alike.values()]

    def _kept(self, unit: Unit) -> object:
        """Where earlier plans keep the unit's weights."""
        names = [i[1:] for n in unit.nodes for i in n.inputs if i[0] == "@"] if self._held else []
        return tuple(
            (part.removeprefix(name), d, self._held.get((part, d)))
            for name in names
            for part in (name, *self._kept_parts.get(name, ()))
            for d in self._devices
        )

    def _class(self, alike: tuple[Unit, ...]) -> _Class:
        priced = self._placer.priced(alike[0], self._devices, self._wanted[alike[0].name])
        priced = list(filter(self._has_room, priced)) or priced
        kept = _worthwhile([self._choice(alike[0], p) for p in priced])
        best = [self._placer.with_copies(alike[0], priced[i], self._wanted[alike[0].name]) for i in kept]
        return _Class(alike, tuple(best), tuple(self._choice(alike[0], p) for p in best))

    def _has_room(self, priced: Priced) -> bool:
        """Whether what a ring's device doesn't keep can pass through it."""
        needs, passes = self._lending.needs_a_ring, self._lending.passes
        weights = self._weights
        return all(
            passes(weights[name], rows, d)
            for (name, d), rows in priced.held.items()
            if needs(weights[name], rows, d)
        )

    def _choice(self, unit: Unit, priced: Priced) -> Choice:
        new = {key: rows for key, rows in priced.held.items() if not covers(self._held.get(key), rows)}
        tied = frozenset((name, self._pools[d]) for name, d in new if name in self._tied)
        own = {key: rows for key, rows in new.items() if key[0] not in self._tied}
        sizes = Counter({pool: self._bytes(own, pool) for pool in set(self._pools.values())})
        for name, d in own:
            sizes[self._pools[d]] -= self._lending.copied(self._weights[name], d)
        for node in unit.nodes:
            for state in self._task.states([node]):
                whole = state_bytes(state, self._task.env)
                for device, share in _held_shares(priced.seats[node.name]):
                    sizes[self._pools.get(device, device)] += math.ceil(whole * share)
        uses = frozenset((priced.plan.home, *priced.plan.partners))
        return Choice(priced.cost, sizes, priced.plan.home, uses, tied)

    def _bytes(self, held: Held, pool: str) -> int:
        return held_bytes(held, self._weights, [d for d, p in self._pools.items() if p == pool])

    # ---- by the integer program --------------------------------------------------------
    def _best(self, *, beside: bool, streams: bool = True, waits: float = 1.0) -> dict[str, Plan] | None:
        """By the integer program. beside: as `Problem` says. streams: whether weights may. waits: how many
        times as long as copying takes it is until they have passed."""
        problem = Problem(
            [c.choices for c in self._classes], [len(c.units) for c in self._classes],
            self._memories(streams, waits), self._tied_bytes(),
            {d: (self._pools[d], self._results(d)) for d in self._devices},
            {d: self._arriving(d) for d in self._devices}, beside,
        )  # fmt: skip
        counts = assign(problem)
        if counts is None:
            return None
        chosen = [
            [p for p, n in zip(c.priced, row, strict=True) for _ in range(n)]
            for c, row in zip(self._classes, counts, strict=True)
        ]
        order = self._order_of_homes(chosen)
        for mine in chosen:
            mine.sort(key=lambda p: order.index(p.plan.home))
        if self._lending.rings:
            return self._beside_copies(chosen)
        plans: dict[str, Plan] = {}
        for c, mine in zip(self._classes, chosen, strict=True):
            if self._task.earlier.whole:
                mine = _evenly(mine)
            plans |= {u.name: p.plan for u, p in zip(c.units, mine, strict=True)}
        return plans

    def _beside_copies(self, chosen: Sequence[Sequence[Priced]]) -> dict[str, Plan]:
        """Plans of all units, those of which weights pass through a ring where these have arrived while
        others computed."""
        mine = {u.name: p for c, some in zip(self._classes, chosen, strict=True)
                for u, p in zip(c.units, _evenly(some), strict=True)}  # fmt: skip
        kinds = {u.name: at for at, c in enumerate(self._classes) for u in c.units}
        plans = [mine[u.name] for u in self._units]
        loads = [Load(p.cost, self._passing(p)) for p in plans]
        order = interleave([kinds[u.name] for u in self._units], loads, self._copying(), self._ring())
        return {u.name: plans[at].plan for u, at in zip(self._units, order, strict=True)}

    def _ring(self) -> int:
        """Bytes of the smallest ring."""
        return min(self._lending.rings.values())

    def _passing(self, priced: Priced) -> int:
        """Bytes of a unit's weights that pass through a ring."""
        needs, weights = self._lending.needs_a_ring, self._weights
        held = ((weights[name], rows, d) for (name, d), rows in priced.held.items())
        return sum(aligned(block_bytes(weight, *rows)) for weight, rows, d in held if needs(weight, rows, d))

    def _copying(self) -> float:
        """Microseconds until a byte has passed through a ring."""
        machine = self._task.machine
        roads = [weight_road(machine.device(d), machine) for d in self._lending.rings]
        return max(1e6 / machine.link(*road).rate.value for road in roads)

    def _order_of_homes(self, chosen: Sequence[Sequence[Priced]]) -> list[str]:
        """Homes so that the layers begin where the graph begins, and end where it ends."""
        homes = dict.fromkeys(p.plan.home for plans in chosen for p in plans)
        ends = {}
        for unit in (self._units[0], self._units[-1]):
            ends[unit.name] = next(
                p[0].plan.home for c, p in zip(self._classes, chosen, strict=True) if unit in c.units
            )
        first, last = ends[self._units[0].name], ends[self._units[-1].name]
        return [first, *(h for h in homes if h not in (first, last)), *([last] if last != first else [])]

    def _memories(self, streams: bool = True, waits: float = 1.0) -> dict[str, Memory]:
        machine = self._task.machine
        out: dict[str, Memory] = {}
        for device in self._task.usable:
            pool = self._pools[device.id]
            limit = pool_limit(pool, machine) - self._bytes(self._held, pool)
            rate = machine.link(*weight_road(device, machine)).rate.value
            may = streams and (not self._held or device.id in self._lending.rings)
            # larger weights than those of a layer had better stay
            ring = largest_of_a_layer(self._task.graph)
            if kept := self._task.earlier.rings.get(device.id, 0):
                limit, ring = limit - kept, 0
            out.setdefault(pool, Memory(limit, waits * 1e6 / rate if may else None, ring))
        return out

    def _tied_bytes(self) -> dict[Tied, tuple[str, int]]:
        pools = dict.fromkeys(self._pools.values())
        return {(name, pool): (pool, self._size(name)) for name in self._tied for pool in pools}

    def _size(self, weight: str) -> int:
        return aligned(block_bytes(self._weights[weight]))

    def _results(self, device: str) -> int:
        graph, spec = self._task.graph, self._task.machine.device(device)
        return max(taken(graph, spec), self._task.earlier.reserve.get(device, 0))

    def _arriving(self, device: str) -> float:
        """Microseconds until what one unit hands to the next has come from another device."""
        types = {n.name: n.type for n in self._task.graph.nodes}
        handed = [types[name] for name in self._wanted[self._units[len(self._units) // 2].name]]
        ways = (sum(self._prices.copy(t, d, device) for t in handed) for d in self._devices if d != device)
        return min(ways, default=0.0)

    # ---- in order of speed -------------------------------------------------------------
    def _in_order_of_speed(self) -> dict[str, Plan] | None:
        """Units in order, each whole on the fastest device that still has room for it."""
        whole = {u.name: self._whole(c) for c in self._classes for u in c.units}
        speed = {d: sum(w[d].cost for w in whole.values()) for d in self._devices}
        room = {pool: m.limit for pool, m in self._memories().items()}
        for pool in room:
            room[pool] -= sum(self._results(d) for d, p in self._pools.items() if p == pool)
        plans: dict[str, Plan] = {}
        there: set[Tied] = set()
        order = sorted(self._devices, key=lambda d: speed[d])
        for unit in self._units:
            while order:
                choice = whole[unit.name][order[0]]
                extra = sum(self._size(name) for name, pool in choice.tied - there)
                if choice.bytes[self._pools[order[0]]] + extra <= room[self._pools[order[0]]]:
                    break
                order.pop(0)
            if not order:
                return None
            for pool, nbytes in choice.bytes.items():
                room[pool] -= nbytes
            for name, pool in choice.tied - there:
                room[pool] -= self._size(name)
            there |= choice.tied
            plans[unit.name] = Plan(order[0])
        return plans

    def _whole(self, c: _Class) -> dict[str, Choice]:
        """The choice to have a unit whole on a device, by device."""
        unit = c.units[0]
        wanted = self._wanted[unit.name]
        return {d: self._choice(unit, self._placer.one(unit, Plan(d), wanted)) for d in self._devices}

    # ---- what comes of it --------------------------------------------------------------
    def _dealt(self, plans: Mapping[str, Plan]) -> Dealt:
        seats: dict[str, Seat] = {}
        causes: dict[str, str] = {}
        for c in self._classes:
            said: dict[Plan, str] = {}
            for unit in c.units:
                plan = plans[unit.name]
                if plan not in said:
                    said[plan] = self._cause(c.units[0], plan)
                mine = self._placer.seats(unit, plan)
                seats |= mine
                causes |= dict.fromkeys(mine, said[plan])
        seats |= self._sums_everywhere(seats)
        splits = self._splits(seats)
        names = dict(zip((s.name for s in splits), _names(splits, self._task.env), strict=True))
        new = {old: sym(name) for old, name in names.items()}
        seats = {
            n: replace(s, bounds=tuple(substitute(b, new) for b in s.bounds)) if isinstance(s, Shared) else s
            for n, s in seats.items()
        }
        return Dealt(seats, causes, tuple(replace(s, name=names[s.name]) for s in splits))

    def _sums_everywhere(self, seats: Mapping[str, Seat]) -> dict[str, Seat]:
        """Sums that the norm of the next unit takes on each of their devices are made on each."""
        out: dict[str, Seat] = {}
        for node in self._task.graph.nodes:
            if isinstance(seat := seats[node.name], Copied):
                x = node.inputs[0][1:]
                if isinstance(made := seats.get(x), Summed) and made.devices == seat.devices:
                    out[x] = replace(made, everywhere=True)
        return out

    def _cause(self, unit: Unit, plan: Plan) -> str:
        """The price of a unit's plan, and what the unit would cost whole on each device."""
        wanted = self._wanted[unit.name]
        price = self._placer.one(unit, plan, wanted).cost
        whole = [f"{self._placer.one(unit, Plan(d), wanted).cost:.4g} us whole on {d}" for d in self._devices]
        where = f"unit on {plan.home}"
        if any(becomes != HOME for becomes in plan.sets):
            where += f", products shared with {' and '.join(plan.partners)}"
        return f"{where}: {price:.4g} us ({', '.join(whole)})"

    def _splits(self, seats: Mapping[str, Seat]) -> tuple[physical.Split, ...]:
        used = {
            s
            for seat in seats.values()
            if isinstance(seat, Shared)
            for b in seat.bounds
            for s in symbols_of(b)
        }
        made = [cuts.split for cuts in self._ratios.made.values() if cuts is not None]
        return tuple(s for s in made if s.name in used)


def _evenly(plans: Sequence[Priced]) -> list[Priced]:
    """Plans of each kind evenly among the others: weights of some may pass through a device in another
    variant, while others compute."""
    kinds: dict[Plan, list[Priced]] = defaultdict(list)
    for plan in plans:
        kinds[plan.plan].append(plan)
    places = [((at + 0.5) / len(some), plan) for some in kinds.values() for at, plan in enumerate(some)]
    return [plan for _, plan in sorted(places, key=lambda place: place[0])]


def _held_shares(seat: Seat) -> Iterator[tuple[str, float]]:
    """What each device has of a node's state."""
    if isinstance(seat, Whole):
        yield seat.device, 1.0
    elif isinstance(seat, Parted):
        for device, (lo, hi) in zip(seat.devices, pairwise(seat.bounds), strict=True):
            yield device, (hi - lo) / seat.bounds[-1]


def _names(splits: Sequence[physical.Split], taken: Iterable[str]) -> Iterator[str]:
    """`s1536` for the variable that cuts up to channel 1536, `s1536_2` for a second one."""
    known = set(taken)
    for split in splits:
        base = f"s{split.positions[-1]}"
        name = next(n for n in chain([base], (f"{base}_{i}" for i in count(2))) if n not in known)
        known.add(name)
        yield name


def _wanted(all_units: Sequence[Unit]) -> dict[str, tuple[str, ...]]:
    """For each unit, the values that others take of it."""
    maker = {n.name: u.name for u in all_units for n in u.nodes}
    out: dict[str, dict[str, None]] = {u.name: {} for u in all_units}
    for unit in all_units:
        for node in unit.nodes:
            for name in node.inputs:
                by = maker.get(name[1:]) if name[0] == "%" else None
                if by is not None and by != unit.name:
                    out[by][name[1:]] = None
    return {name: tuple(values) for name, values in out.items()}


def _common(all_units: Sequence[Unit]) -> frozenset[str]:
    """Values that several other units use, such as the angles of the positions."""
    made = {n.name: u.name for u in all_units for n in u.nodes}
    users = Counter(
        name
        for u in all_units
        for name in {i[1:] for n in u.nodes for i in n.inputs if i[0] == "%"}
        if made.get(name, u.name) != u.name
    )
    return frozenset(name for name, count in users.items() if count > 1)


def _tied(all_units: Sequence[Unit]) -> set[str]:
    """Weights that several units use."""
    users = Counter(
        name for u in all_units for name in {i[1:] for n in u.nodes for i in n.inputs if i[0] == "@"}
    )
    return {name for name, count in users.items() if count > 1}


def _worthwhile(choices: Sequence[Choice]) -> list[int]:
    """Those that no other choice of the same home beats or equals in time and in every memory."""
    kept: list[int] = []
    for at, choice in enumerate(choices):
        if len(kept) < MOST and not any(_beats(choices[k], choice) for k in kept):
            kept.append(at)
    return kept


def _beats(a: Choice, b: Choice) -> bool:
    """Whether a, which is no slower, needs no more of anything than b."""
    less = all(a.bytes.get(m, 0) <= nbytes for m, nbytes in b.bytes.items())
    return a.home == b.home and less and a.tied <= b.tied and a.uses <= b.uses
