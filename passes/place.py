"""Puts every node on a device, or shares it out among some, and says why.

Each device is tried for the whole graph: predicted time, bytes, what it can't run. Several devices
are tried together as `deal` says. What fits and ends first wins. What a device can't run goes to
the one that can, fastest first; what no device can run goes to a host device as a `host.<op>` row of
the reference implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from flashrt.errors import PlanError
from flashrt.ir import logical, physical
from flashrt.ir.bounds import Bounds
from flashrt.ir.types import State, Weight
from flashrt.layouts import aligned
from flashrt.machine import Machine
from flashrt.passes.beside import beside_their_takers, beside_their_values
from flashrt.passes.budget import (
    HOSTS,
    Held,
    Need,
    Rows,
    charge_pools,
    held_bytes,
    peak_activations,
    peak_weights,
    state_bytes,
    transient,
    weight_road,
    weights_held,
    workspace,
)
from flashrt.passes.cost import Costs, block_bytes, kernel_of
from flashrt.passes.deal import deal
from flashrt.passes.lending import covers
from flashrt.passes.parts import Parts
from flashrt.passes.pieces import EVEN, cut_at, cuttable, in_pieces, is_piece
from flashrt.passes.pins import Pin, pinned
from flashrt.passes.price import Prices, finish
from flashrt.passes.rows import rows_of
from flashrt.passes.shard import Cut
from flashrt.passes.spread import Copied, Lanes, Part, Parted, Seat, Shared, Summed, Whole, spread
from flashrt.passes.task import Earlier, Settled, Task, seats_of
from flashrt.passes.transfer import transfer
from flashrt.passes.units import lanes, users_of

NONE, FREE = Earlier(), Settled()
BEFORE = ("rope", "rope_pairs", "rms_norm", "slice", "view")  # may stand between products and their attention
CLEARLY = 1.05  # times as long: figures are estimates
NO_SUMS = "its input is in parts, but no sums: they would round differently (numerics=fast allows them)"


@dataclass(frozen=True, slots=True)
class Placement:
    """A physical graph, and the microseconds that a step of it takes at least."""

    graph: physical.Graph
    total: float


@dataclass(frozen=True, slots=True)
class _Plan:
    """One way to place the whole graph. name: its devices; causes: of nodes, by name.

    total: microseconds of a step. lacks: why it can't be had, or "".
    """

    name: str
    seats: Mapping[str, Seat]
    graph: physical.Graph
    total: float
    streams: str = ""
    lacks: str = ""
    causes: Mapping[str, str] = field(default_factory=dict)


def place(
    graph: logical.Graph,
    costs: Costs,
    machine: Machine,
    *,
    cuts: Mapping[str, Cut] | None = None,
    devices: Sequence[str] | None = None,
    pins: Sequence[Pin] = (),
) -> physical.Graph:
    """The first of `placements`."""
    return placements(graph, costs, machine, cuts=cuts, devices=devices, pins=pins)[0].graph


def placements(
    graph: logical.Graph,
    costs: Costs,
    machine: Machine,
    *,
    cuts: Mapping[str, Cut] | None = None,
    devices: Sequence[str] | None = None,
    pins: Sequence[Pin] = (),
    settled: Settled = FREE,
    earlier: Earlier = NONE,
    sums: bool = False,
) -> list[Placement]:
    """The ways that fit, the one that is predicted to be the fastest first.

    devices: ids to choose from (all); cuts: what `shard` found, to be told and used. pins: what the user
    placed. settled: where else there is no choice; for all nodes, and there is but one way. earlier: plans of
    the same model for other sizes of a step, with which this one takes turns. sums: whether products may be
    sums of parts, which rounds differently.

    Raises:
        PlanError: no device can hold the graph, nothing runs one of its operations, or a pin can't be kept.
    """
    usable = machine.devices if devices is None else tuple(machine.device(d) for d in devices)
    if not usable:
        raise PlanError("the machine has no device to plan for", hint="name one with devices=")
    weights = {w.name: w for w in graph.weights}
    kernels = {n.name: kernel_of(n, weights) for n in graph.nodes}
    env = {s.name: s.hint for s in graph.symbols}
    parts = Parts(graph, earlier.weights())
    task = Task(graph, costs, machine, usable, kernels, env, parts, cuts or {}, earlier, sums=sums)
    held_by = pinned(graph, pins, [d.id for d in usable])
    free = {name: seat for name, seat in settled.seats.items() if name not in held_by}
    task = replace(task, fixed={**_fixed(task, held_by), **free})
    plans = _Plans(task).all(settled.splits)
    fitting = sorted((p for p in plans if not p.lacks), key=lambda p: p.total)
    if not fitting:
        raise _nothing_fits(graph, plans, held_by)
    return [Placement(_told(each, [p for p in plans if p is not each], task), each.total) for each in fitting]


def _fixed(task: Task, pins: Mapping[str, Pin]) -> dict[str, Seat]:
    """Seats of the nodes that pins or the states of earlier variants hold."""
    out: dict[str, Seat] = {}
    homes, before, wanted = task.earlier.states(), task.earlier.seats(), task.earlier.home
    for node in task.graph.nodes:
        states = [s for s in (*node.reads, *node.writes) if s in homes]
        if states:
            out[node.name] = Whole(homes[states[0]], False, "its state is there in every variant")
        elif wanted and (node.reads or node.writes) and not task.obstacle(node, wanted):
            out[node.name] = Whole(wanted, False, "its state is beside the weights that large steps bring")
        elif (node.reads or node.writes) and isinstance(seat := before.get(node.name), Parted):
            out |= dict.fromkeys(task.parts.groups[node.name].nodes, seat)
    out |= _leading(task, out)
    for node in task.graph.nodes:
        if (pin := pins.get(node.name)) is not None:
            out[node.name] = _at_pin(node, pin, task, out.get(node.name))
    return out


def _leading(task: Task, fixed: Mapping[str, Seat]) -> dict[str, Seat]:
    """Seats of what only an attention takes, between the products and it: beside it, so that what crosses
    between devices is one value, the products' result."""
    nodes, users = {n.name: n for n in task.graph.nodes}, users_of(task.graph)
    out: dict[str, Seat] = {}
    for name, seat in fixed.items():
        ahead = [i[1:] for i in nodes[name].inputs[:3]] if nodes[name].op == "attention" else []
        while ahead and isinstance(seat, Whole):
            node = nodes.get(ahead.pop())
            if node is None or node.op not in BEFORE or task.obstacle(node, seat.device):
                continue
            if all(u.name == name or u.name in out for u in users[node.name]):
                out[node.name] = Whole(seat.device, False, "beside the attention that takes it")
                ahead.append(node.inputs[0][1:])
    return out


def _at_pin(node: logical.Node, pin: Pin, task: Task, before: Seat | None) -> Whole:
    if isinstance(before, Parted):
        among = " and ".join(before.devices)
        raise PlanError(
            f"{pin}: every variant shares {node.name} among {among}", hint="pin it in all of them"
        )
    seat = task.whole(node, pin.device)
    if seat.device != pin.device:
        raise PlanError(
            f"{pin}: {node.name} can't be there: {seat.obstacle}", hint="pin it elsewhere, or not"
        )
    if isinstance(before, Whole) and before.device != pin.device:
        raise PlanError(f"{pin}: {node.name} is on {before.device}: {before.obstacle}", hint="pin it there")
    return replace(seat, obstacle="; ".join(filter(None, (f"pinned by {pin}", seat.obstacle))))


def _nothing_fits(graph: logical.Graph, plans: Sequence[_Plan], pins: Mapping[str, Pin]) -> PlanError:
    lines = "\n".join(f"    {p.lacks}" for p in plans)
    tight = dict.fromkeys(p for p in pins.values() if all(f"{p.device} needs" in x.lacks for x in plans))
    if tight:
        return PlanError(
            f"{graph.name} doesn't fit with {', '.join(map(str, tight))}", lines=lines,
            hint="pin less to the device, or give it a larger budget",
        )  # fmt: skip
    return PlanError(
        f"{graph.name} fits no device", lines=lines,
        hint="use a smaller weight format, a shorter context, fewer tokens a step, or another device",
    )  # fmt: skip


# ---- the ways to place a graph -----------------------------------------------------------
class _Plans:
    """Makes and measures the ways to place one graph."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._joint: Lanes = lanes(task.graph)
        self._kept = task.earlier.held()
        self._streaming_before = task.earlier.streaming()
        self._lending = task.earlier.lending(task.machine)
        # through which weights may pass in pieces; not those of other plans, which small steps use, too
        self._rings = {} if task.earlier.rings else self._lending.rings

    def all(self, splits: tuple[physical.Split, ...]) -> list[_Plan]:
        """Each device by itself, then several together. splits: in seats that are settled."""
        if (before := self._streaming_before) is not None:
            # what stays of its weights has to be the same in every variant
            return [self._plan(seats_of(before), before.splits)]
        nodes = self._task.graph.nodes
        if all(n.name in self._task.fixed for n in nodes):
            return [self._plan(self._task.fixed, splits)]
        ways = {d.id: {n.name: self._task.seat(n, d.id) for n in nodes} for d in self._task.usable}
        plans = [self._plan(seats, name=name) for name, seats in ways.items()]
        if len(ways) > 1:
            for dealt in deal(self._task):
                seats = beside_their_takers(beside_their_values(dealt.seats, self._task), self._task)
                if all(_devices(seats) != _devices(p.seats) for p in plans):
                    causes = {name: c for name, c in dealt.causes.items() if seats[name] == dealt.seats[name]}
                    plans.append(self._plan(seats, dealt.splits, causes))
                    if shared := self._with_the_link(seats):
                        told = dict.fromkeys(
                            shared, "the host computes some while the link brings the weights of others"
                        )
                        plans.append(self._plan({**seats, **shared}, dealt.splits, causes | told))
        return plans

    def _with_the_link(self, seats: Mapping[str, Seat]) -> dict[str, Seat]:
        """Large products of a host of which a ring's device makes some channels: the link brings their
        weights while the host computes the others."""
        out: dict[str, Seat] = {}
        there = {gpu: ring * self._arrived(gpu, seats) for gpu, ring in self._rings.items()}
        for node in self._task.graph.nodes:
            seat = seats.get(node.name)
            if not isinstance(seat, Whole) or node.name in self._task.fixed or not cuttable(node):
                continue
            if self._task.kind(seat.device) not in HOSTS:
                continue
            for gpu in self._rings:
                able = not self._task.obstacle(node, gpu)
                if able and (cut := self._rows_by_the_link(node, seat.device, gpu, there[gpu])):
                    out[node.name] = Shared((gpu, seat.device), (0, cut, node.type.shape[-1]))
                    break
        return out

    def _arrived(self, gpu: str, seats: Mapping[str, Seat]) -> float:
        """How much of a ring the link has filled when the device is through with what stands in front: all of
        it where that computes clearly longer than the link takes for what it brings, else half."""
        task, machine = self._task, self._task.machine
        here = {
            name for name, s in seats.items() if isinstance(s, Whole) and s.device == gpu and not s.lender
        }
        own = [n for n in task.graph.nodes if n.name in here]
        weights = {i[1:]: task.weights[i[1:]] for n in own for i in n.inputs if i[0] == "@"}
        lent = sum(block_bytes(w) for w in weights.values() if self._lending.lends(w, (0, rows_of(w)), gpu))
        rate = machine.link(*weight_road(machine.device(gpu), machine)).rate.value
        return 1.0 if sum(task.est(n, gpu) for n in own) > CLEARLY * 1e6 * lent / rate else 0.5

    def _rows_by_the_link(self, node: logical.Node, host: str, gpu: str, there: float) -> int:
        """How many rows of a product's weight the link can have brought when the host is through with the
        others; 0 where the weight is smaller than the ring, or its rows are too large for that. there: bytes
        that have arrived when the host begins."""
        weight, machine = self._task.weights[node.inputs[1][1:]], self._task.machine
        ring = self._rings[gpu]
        rows, nbytes, spec = rows_of(weight), block_bytes(weight), machine.device(host)
        if nbytes < ring or not self._lending.lends(weight, (0, rows), gpu):
            return 0
        brings = machine.link(*weight_road(machine.device(gpu), machine)).rate.value
        computes = (spec.gemv or spec.read).value
        share = (brings + there / nbytes * computes) / (brings + computes)
        cut = int(rows * share) // EVEN * EVEN
        return cut if cut and cut_at(weight, 0, cut, ring) else 0

    def _plan(
        self,
        seats: Mapping[str, Seat],
        splits: tuple[physical.Split, ...] = (),
        causes: Mapping[str, str] | None = None,
        name: str = "",
    ) -> _Plan:
        graph = self._task.graph
        outputs = [o.value.removeprefix("%") for o in graph.outputs]
        parts = spread(graph.nodes, seats, self._joint, self._task.parts, outputs)
        if self._rings:
            parts = in_pieces(parts, self._task.parts, self._lending)
        env = dict(self._task.env) | {s.name: s.start for s in splits}
        prices = Prices(graph, self._task.costs, self._task.machine, env)
        nodes = tuple(_node(part, prices) for part in parts)
        whole = physical.Graph(
            graph.name, graph.symbols, splits, graph.inputs, self._weights(nodes), self._states(nodes), (),
            nodes, graph.outputs,
        )  # fmt: skip
        used = dict.fromkeys(d for n in whole.nodes for d in (n.device, n.keeper))
        total = self._total(parts, prices)
        needs = self._needs(whole)
        streams = []
        for need in needs:
            if need.least <= need.left < need.budget.weights:
                streams.append(_streaming(need))
                total = max(total, self._loading(need))
        budgets = tuple(
            replace(n.budget, weights=min(n.budget.weights, n.left)) if n.least <= n.left else n.budget
            for n in needs
        )
        lenders = {n.keeper for n in nodes if n.keeper != n.device}
        lacks = "; ".join(
            n.short() if n.least > n.left else f"{n.budget.device} doesn't keep what it would lend"
            for n in needs
            if n.least > n.left or (n.budget.device in lenders and n.left < n.budget.weights)
        )
        whole = replace(whole, budgets=budgets)
        return _Plan(name or " and ".join(used), seats, whole, total, "; ".join(streams), lacks, causes or {})

    def _weights(self, nodes: Sequence[physical.Node]) -> tuple[Weight, ...]:
        """The graph's weights, and the parts of them in use."""
        used = dict.fromkeys(i[1:] for n in nodes for i in n.inputs if i[0] == "@")
        parts = {name: w for name in used if (w := self._task.weights[name]).of}
        return tuple(({w.name: w for w in self._task.graph.weights} | parts).values())

    def _states(self, nodes: Sequence[physical.Node]) -> tuple[State, ...]:
        """The states in use: whole, or in parts."""
        return tuple(self._task.states(nodes))

    def _total(self, parts: Sequence[Part], prices: Prices) -> float:
        if len(self._task.usable) > 1:
            return finish(parts, prices)
        return sum(self._task.est(p.node, p.device) for p in parts)

    # ---- memory ----------------------------------------------------------------------
    def _needs(self, whole: physical.Graph) -> list[Need]:
        """What each device would hold; devices of one memory count together what they share."""
        known = Bounds.of(whole)
        held = weights_held(whole.nodes, self._task.weights, known)
        used = dict.fromkeys(d for n in whole.nodes for d in (n.device, n.keeper))
        moved = transfer(whole, self._task.machine) if len(used) > 1 else whole
        needs = [self._need(d, [n for n in moved.nodes if n.device == d], held, moved) for d in used]
        both = {
            key: (min(lo, held.get(key, (lo, hi))[0]), max(hi, held.get(key, (lo, hi))[1]))
            for key, (lo, hi) in {**held, **self._kept}.items()
        }
        charged = charge_pools([n.budget for n in needs], both, self._task.weights, self._task.machine)
        shared = [
            replace(n, budget=b, least=min(n.least, b.weights)) for n, b in zip(needs, charged, strict=True)
        ]
        # weights that stream are each device's own
        return needs if any(n.budget.weights > n.left and not n.passing for n in shared) else shared

    def _need(self, id: str, nodes: Sequence[physical.Node], held: Held, whole: physical.Graph) -> Need:
        task = self._task
        own = {name: self._rows(name, rows, id) for (name, d), rows in held.items() if d == id}
        kept = {key: r for key, r in self._kept.items() if key[1] == id and own.get(key[0]) != r}
        beside = held_bytes(kept, task.weights, [id])
        passes = {name for name, rows in own.items() if self._lending.passes(task.weights[name], rows, id)}
        sizes = {name: aligned(block_bytes(task.weights[name], *rows)) for name, rows in own.items()}
        budget = physical.Budget(
            device=id,
            limit=task.machine.device(id).budget,
            weights=sum(sizes.values()) + beside,
            state=sum(state_bytes(s, task.env) for s in task.states(nodes)),
            activations=peak_activations(nodes, whole) + transient(nodes, whole, task.machine.device(id)),
            workspace=workspace(nodes, whole, task.machine.device(id)),
        )
        # beside variants of which all weights stay, all have to stay
        stays = task.earlier.graphs and self._streaming_before is None
        passing = {name: size * (name in passes) for name, size in sizes.items()}
        through = sum(passing.values())
        least = budget.weights - through if stays else 0
        readers = [n for n in whole.nodes if n.keeper == id]
        least += peak_weights(readers, passing if stays else sizes)
        through -= sum(self._lending.copied(task.weights[name], id) for name in passes)
        return Need(budget, least, task.earlier.reserve.get(id, 0), through)

    def _rows(self, weight: str, rows: Rows, device: str) -> Rows:
        """The rows of a weight that a device has which needs these: what earlier plans keep, if that does."""
        kept = self._kept.get((weight, device), rows)
        return kept if covers(kept, rows) else rows

    def _loading(self, need: Need) -> float:
        """Microseconds of loading what doesn't stay."""
        machine = self._task.machine
        link = machine.link(*weight_road(machine.device(need.budget.device), machine))
        return (need.passing or need.budget.weights - need.left) / link.rate.value * 1e6


def _streaming(need: Need) -> str:
    """What is said of a device where not all weights stay."""
    if need.passing:
        return f"{need.passing} bytes of weights pass through {need.budget.device}, from the host's memory"
    return f"weights stream through {need.left} of their {need.budget.weights} bytes"


def _node(part: Part, prices: Prices) -> physical.Node:
    """The part as a node of the physical graph; the cause is still missing."""
    node, cost = part.node, prices.cost(part)
    shard = None if part.lo is None or part.hi is None else physical.Range(part.lo, part.hi)
    share = physical.Range(*part.shares[:2]) if part.shares else None
    attrs = (*node.attrs, ("lender", part.lender)) if part.lender else node.attrs
    if part.merge:
        return physical.Node(
            name=part.name, op="merge", inputs=part.inputs, type=part.type, device=part.device,
            of=part.of, shard=shard, est=cost.est, origin=node.origin,
        )  # fmt: skip
    return physical.Node(
        name=part.name, op=f"host.{node.op}" if part.host else node.op, inputs=part.inputs,
        type=part.type, device=part.device, of=part.of, shard=shard, part=share, attrs=attrs,
        numerics=node.numerics, reads=node.reads, writes=node.writes,
        est=cost.est, bytes=cost.bytes, flops=cost.flops, origin=node.origin,
    )  # fmt: skip


def _devices(seats: Mapping[str, Seat]) -> dict[str, object]:
    """What tells two ways apart, whatever was said for them."""
    return {name: (s.device, s.lender) if isinstance(s, Whole) else s for name, s in seats.items()}


# ---- causes ------------------------------------------------------------------------------
def _told(plan: _Plan, others: Sequence[_Plan], task: Task) -> physical.Graph:
    """The plan's graph with a cause for each node."""
    verdict = _verdict(plan, others, task.graph)
    nodes = tuple(replace(n, because=_because(n, plan, verdict, task)) for n in plan.graph.nodes)
    return replace(plan.graph, nodes=nodes)


def _because(node: physical.Node, plan: _Plan, verdict: str, task: Task) -> str:
    seat = plan.seats[node.of]
    if is_piece(node):
        verdict = f"a piece, since its weight passes through {node.device}; {verdict}"
    if node.op == "merge":
        return f"its shards are needed together on {node.device}; {verdict}"
    reasons = [seat.obstacle or verdict] if isinstance(seat, Whole) else [verdict]
    if node.of in plan.causes:
        reasons = [*filter(None, (_manner(node, seat), plan.causes[node.of])), verdict]
    elif node.of in task.cuts:
        reasons.append(task.cuts[node.of].because)
    if node.op == "linear" and not task.sums and isinstance(seat, Whole | Shared):
        x = plan.seats.get(node.inputs[0][1:])
        reasons += [NO_SUMS] if isinstance(x, Parted) else []
    return "; ".join(reasons)


def _manner(node: physical.Node, seat: Seat) -> str:
    """How a node is shared, or why it is where it is."""
    if isinstance(seat, Whole):
        return seat.obstacle
    among = " and ".join(seat.devices)
    if isinstance(seat, Copied):
        return f"computed on each of {among}"
    if isinstance(seat, Parted | Summed):
        each = " and ".join(str(b - a) for a, b in pairwise(seat.bounds))
        what = "sum of parts" if isinstance(seat, Summed) else "made in parts"
        return f"{what} by {among}, {each} of {seat.bounds[-1]} shares"
    return f"channels shared by {among}"


def _verdict(plan: _Plan, others: Sequence[_Plan], graph: logical.Graph) -> str:
    """The cause that all nodes share, with figures."""
    at = " ".join(f"{s.name}={s.hint}" for s in graph.symbols)
    parts = [f"{plan.total:.4g} us a step on {plan.name}" + (f" at {at}" if at else "")]
    parts += [o.lacks or f"{o.total:.4g} us on {o.name}" for o in others]
    return "; ".join([*parts, *([plan.streams] if plan.streams else [])])
