"""Puts every node on a device, and says why.

Each device is tried for the whole graph: predicted time, bytes, what it can't run. The
fastest one that fits wins. What it can't run goes to the device that can, fastest first;
what no device can run goes to a host device as a `host.<op>` row of the reference
implementation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flashrt.errors import PlanError
from flashrt.ir import logical, physical
from flashrt.ir.bounds import Bounds
from flashrt.ir.types import Env, State, Weight, evaluate
from flashrt.machine import Device, Machine
from flashrt.passes.cost import Costs, aligned, block_bytes, kernel_of
from flashrt.passes.shard import Cut

HOSTS = ("cpu", "reference", "null")  # kinds whose memory the reference implementation reads
TAGGED = ("gpu", "npu", "cpu")  # kinds that an affinity speaks of


@dataclass(frozen=True, slots=True)
class _Task:
    """What is asked: the graph, its costs, kernel names by node, the devices to choose from."""

    graph: logical.Graph
    costs: Costs
    machine: Machine
    usable: tuple[Device, ...]
    kernels: Mapping[str, str]
    env: Env  # typical values of the symbols

    def est(self, node: logical.Node, device: Device) -> float:
        """Predicted time of a node at typical sizes, in microseconds."""
        return evaluate(self.costs.of(node.name, device.id).est, self.env)


@dataclass(frozen=True, slots=True)
class _Seat:
    """Where one node sits. obstacle: why not on the device that was tried; "" when it is there."""

    device: Device
    host: bool
    obstacle: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """The whole graph with one device as first choice. lacks: why it can't be had, or ""."""

    device: Device
    seats: tuple[_Seat, ...]
    total: float
    budgets: tuple[physical.Budget, ...]
    streams: str
    lacks: str


def place(
    graph: logical.Graph,
    costs: Costs,
    machine: Machine,
    *,
    cuts: Mapping[str, Cut] | None = None,
    devices: Sequence[str] | None = None,
) -> physical.Graph:
    """The physical graph. devices: ids to choose from (all); cuts: what `shard` found, to be told.

    Raises:
        PlanError: no device can hold the graph, or nothing can run one of its operations.
    """
    candidates = machine.devices if devices is None else tuple(machine.device(d) for d in devices)
    if not candidates:
        raise PlanError("the machine has no device to plan for", hint="name one with devices=")
    weights = {w.name: w for w in graph.weights}
    kernels = {n.name: kernel_of(n, weights) for n in graph.nodes}
    task = _Task(graph, costs, machine, candidates, kernels, {s.name: s.hint for s in graph.symbols})
    plans = [_try(device, task) for device in candidates]
    fitting = [p for p in plans if not p.lacks]
    if not fitting:
        raise PlanError(
            f"{graph.name} fits no device",
            lines="\n".join(f"    {p.lacks}" for p in plans),
            hint="use a smaller weight format, a shorter context, fewer tokens a step, or another device",
        )
    best = min(fitting, key=lambda p: p.total)
    return _physical(best, [p for p in plans if p is not best], task, cuts or {})


def _try(device: Device, task: _Task) -> _Plan:
    seats = tuple(_seat(n, device, task) for n in task.graph.nodes)
    seated = list(zip(task.graph.nodes, seats, strict=True))
    total = sum(task.est(n, s.device) for n, s in seated) + _moving(seated, task)
    budgets, streams, lacks = [], [], []
    for each in dict.fromkeys(s.device.id for s in seats):
        spec = task.machine.device(each)
        budget, need = _budget(spec, [n for n, s in seated if s.device.id == each], task)
        left = budget.limit - budget.state - budget.activations
        if need > left:
            lacks.append(_short(budget, need))
        elif budget.weights > left:
            streams.append(f"weights stream through {left} of their {budget.weights} bytes")
            link = task.machine.link(*weight_road(spec, task.machine))
            total = max(total, (budget.weights - left) / link.rate.value * 1e6)
            budget = replace(budget, weights=left)
        budgets.append(budget)
    return _Plan(device, seats, total, tuple(budgets), "; ".join(streams), "; ".join(lacks))


def _moving(seated: Sequence[tuple[logical.Node, _Seat]], task: _Task) -> float:
    """Microseconds of copies between devices, each value counted once for each device."""
    made = {n.name: (n, s.device.id) for n, s in seated}
    edges = {
        (name[1:], seat.device.id): made[name[1:]]
        for node, seat in seated
        for name in node.inputs
        if name[0] == "%" and name[1:] in made and made[name[1:]][1] != seat.device.id
    }
    total = 0.0
    for (_, there), (source, here) in edges.items():
        link = task.machine.link(here, there)
        total += link.latency.value + evaluate(source.type.bytes, task.env) / link.rate.value * 1e6
    return total


def weight_road(device: Device, machine: Machine) -> tuple[str, str]:
    """The link that weights come over: from disk to a host device, from host memory to another."""
    host = next((d.id for d in machine.devices if d.kind in HOSTS), "disk")
    return ("disk" if device.kind in HOSTS else host, device.id)


def _seat(node: logical.Node, device: Device, task: _Task) -> _Seat:
    kernel = task.kernels[node.name]
    obstacle = _obstacle(node, kernel, device)
    if not obstacle:
        return _Seat(device, False, "")
    able = [d for d in task.usable if not _obstacle(node, kernel, d)]
    if able:
        return _Seat(min(able, key=lambda d: task.est(node, d)), False, obstacle)
    hosts = [d for d in (device, *task.usable, *task.machine.devices) if d.kind in HOSTS]
    if not hosts:
        raise PlanError(
            f"{node.name}: {obstacle}, and there is no host device for the reference implementation",
            hint="add a cpu, reference or null device to the machine",
        )
    return _Seat(hosts[0], True, f"{obstacle}: runs on the reference implementation")


def _obstacle(node: logical.Node, kernel: str, device: Device) -> str:
    """Why a device can't run a node, or ""."""
    if not any(name == kernel for name, _ in device.kernels):
        return f"no {kernel} kernel on {device.id}"
    if not device.supports(kernel, node.numerics):
        return f"no {kernel} kernel with {node.numerics or 'unset numerics'} on {device.id}"
    if device.kind in TAGGED and node.affinity and device.kind not in node.affinity:
        return f"{device.id} isn't for {node.op}: {node.why}"
    return ""


def _budget(device: Device, nodes: Sequence[logical.Node], task: _Task) -> tuple[physical.Budget, int]:
    """What the device would hold, and the least that its weights need when they stream."""
    graph = task.graph
    by_name = {w.name: w for w in graph.weights}
    used = {i[1:]: by_name[i[1:]] for n in nodes for i in n.inputs if i[0] == "@"}
    own = {name for n in nodes for name in (*n.reads, *n.writes)}
    budget = physical.Budget(
        device=device.id,
        limit=device.budget,
        weights=sum(aligned(block_bytes(w)) for w in used.values()),
        state=sum(_state_bytes(s, task.env) for s in graph.states if s.name in own),
        activations=_peak_activations(nodes, graph),
    )
    return budget, _peak_weights(nodes, used)


def _state_bytes(state: State, env: Env) -> int:
    return math.ceil(evaluate(state.type.bytes, env))


def _peak_activations(nodes: Sequence[logical.Node], graph: logical.Graph) -> int:
    """The most bytes of results alive at once, at the largest step, and a quarter more for gaps."""
    known = Bounds.of(graph)
    sizes = {n.name: aligned(math.ceil(known.interval(n.type.bytes)[1])) for n in nodes}
    uses = [{i[1:] for i in n.inputs if i[1:] in sizes} | {n.name} for n in nodes]
    kept = {o.value.removeprefix("%") for o in graph.outputs}
    return aligned(_peak(uses, sizes, kept) * 5 // 4)


def _peak_weights(nodes: Sequence[logical.Node], used: Mapping[str, Weight]) -> int:
    """The most bytes of weights alive at once when each is loaded for its uses only."""
    uses = [{i[1:] for i in n.inputs if i[0] == "@"} for n in nodes]
    return _peak(uses, {name: aligned(block_bytes(w)) for name, w in used.items()}, ())


def _peak(uses: Sequence[set[str]], sizes: Mapping[str, int], kept: Iterable[str]) -> int:
    """Largest sum of sizes alive at once; alive from the first use to the last (`kept`: to the end)."""
    last = {name: i for i, names in enumerate(uses) for name in names} | dict.fromkeys(kept, len(uses))
    alive: set[str] = set()
    now = peak = 0
    for i, names in enumerate(uses):
        now += sum(sizes[name] for name in names - alive)
        alive |= names
        peak = max(peak, now)
        over = {name for name in names if last[name] == i}
        now -= sum(sizes[name] for name in over)
        alive -= over
    return peak


def _short(budget: physical.Budget, need: int) -> str:
    total = need + budget.state + budget.activations
    return (
        f"{budget.device} needs {total} bytes at least ({need} for weights that stream, "
        f"{budget.state} state, {budget.activations} activations) of {budget.limit}"
    )


def _physical(plan: _Plan, others: Sequence[_Plan], task: _Task, cuts: Mapping[str, Cut]) -> physical.Graph:
    graph = task.graph
    verdict = _verdict(plan, others, graph)
    nodes = []
    for node, seat in zip(graph.nodes, plan.seats, strict=True):
        own = task.costs.of(node.name, seat.device.id)
        reasons = [seat.obstacle or verdict]
        if node.name in cuts:
            reasons.append(cuts[node.name].because)
        nodes.append(
            physical.Node(
                name=node.name, op=f"host.{node.op}" if seat.host else node.op, inputs=node.inputs,
                type=node.type, device=seat.device.id, of=node.name, attrs=node.attrs,
                numerics=node.numerics, reads=node.reads, writes=node.writes,
                est=own.est, bytes=own.bytes, flops=own.flops,
                because="; ".join(reasons), origin=node.origin,
            )
        )  # fmt: skip
    return physical.Graph(
        name=graph.name, symbols=graph.symbols, splits=(), inputs=graph.inputs, weights=graph.weights,
        states=graph.states, budgets=plan.budgets, nodes=tuple(nodes), outputs=graph.outputs,
    )  # fmt: skip


def _verdict(plan: _Plan, others: Sequence[_Plan], graph: logical.Graph) -> str:
    """The cause that all nodes on the chosen device share, with figures."""
    at = " ".join(f"{s.name}={s.hint}" for s in graph.symbols)
    parts = [f"{plan.total:.4g} us a step on {plan.device.id}" + (f" at {at}" if at else "")]
    parts += [o.lacks or f"{o.total:.4g} us on {o.device.id}" for o in others]
    return "; ".join([*parts, *([plan.streams] if plan.streams else [])])
