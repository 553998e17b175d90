"""What a device would hold: weights, state and results alive at once; and what a plan may take of it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flashrt.backend import TRANSIENT
from flashrt.errors import PlanError
from flashrt.ir import logical, physical
from flashrt.ir.bounds import Bounds
from flashrt.ir.types import Env, State, TensorType, Weight, evaluate
from flashrt.layouts import aligned
from flashrt.machine import Device, Machine, Workspace
from flashrt.passes.cost import Node, block_bytes
from flashrt.passes.rows import rows_used

HOSTS = ("cpu", "reference", "null")  # kinds whose memory the reference implementation reads
TURNS = 2  # variants that take turns: each has inputs and code of its own
Rows = tuple[int, int]  # of a weight: first, behind the last
Held = Mapping[tuple[str, str], Rows]  # (weight, device) → rows that the device keeps


def weight_road(device: Device, machine: Machine) -> tuple[str, str]:
    """The link that weights come over: from disk to a host device, from host memory to another."""
    host = next((d.id for d in machine.devices if d.kind in HOSTS), "disk")
    return ("disk" if device.kind in HOSTS else host, device.id)


def pool_of(device: Device) -> str:
    """The memory of a device: its pool's, or its own."""
    return device.pool or device.id


def pool_limit(pool: str, machine: Machine) -> int:
    """Bytes that plans may take of a memory: what its devices may take together, and never all of it."""
    members = [d for d in machine.devices if pool_of(d) == pool]
    whole = max(d.memory * 9 // 10 if len(members) > 1 else d.budget for d in members)
    return min(whole, sum(d.budget for d in members))


# ---- what a placement holds ----------------------------------------------------------
def weights_held(nodes: Iterable[physical.Node], weights: Mapping[str, Weight], known: Bounds) -> Held:
    """The rows of each weight that each device needs for these nodes, wherever the splits stand."""
    held: dict[tuple[str, str], Rows] = {}
    for node in nodes:
        for index, name in enumerate(node.inputs):
            if name[0] == "@":
                lo, hi = rows_used(node, index, weights[name[1:]], known)
                low, high = held.get((name[1:], node.keeper), (lo, hi))
                held[name[1:], node.keeper] = min(lo, low), max(hi, high)
    return held


def held_bytes(held: Held, weights: Mapping[str, Weight], devices: Iterable[str]) -> int:
    """Bytes of the weights of some devices that share a memory: each row counts once."""
    spans: dict[str, list[Rows]] = defaultdict(list)
    members = set(devices)
    for (name, device), rows in held.items():
        if device in members:
            spans[name].append(rows)
    return sum(_span_bytes(weights[name], rows) for name, rows in spans.items())


def _span_bytes(weight: Weight, spans: Sequence[Rows]) -> int:
    lo, hi = min(s[0] for s in spans), max(s[1] for s in spans)
    return aligned(block_bytes(weight, lo, hi))


def state_bytes(state: State, env: Env) -> int:
    """Bytes of a state when the symbols are `env`."""
    return math.ceil(evaluate(state.type.bytes, env))


def peak_activations(nodes: Sequence[Node], graph: logical.Graph | physical.Graph) -> int:
    """The most bytes of results alive at once, at the largest step, and a quarter more for gaps; and the
    inputs, which variants don't share."""
    known = Bounds.of(graph)
    read = {name[1:] for n in nodes for name in n.inputs}
    inputs = sum(_most(known, i.name, i.type) for i in graph.inputs if i.name in read)
    first = {n.type: n.name for n in reversed(nodes)}
    most = {type: _most(known, name, type) for type, name in first.items()}
    sizes = {n.name: most[n.type] for n in nodes}
    uses = [{i[1:] for i in n.inputs if i[1:] in sizes} | {n.name} for n in nodes]
    kept = {o.value.removeprefix("%") for o in graph.outputs}
    return aligned(_peak(uses, sizes, kept) * 5 // 4) + TURNS * inputs


def _most(known: Bounds, name: str, type: TensorType) -> int:
    """Bytes of a value in the largest step. Raises PlanError when nothing bounds them."""
    most = known.interval(type.bytes)[1]
    if math.isinf(most):
        raise PlanError(
            f"%{name} is {type}: nothing bounds its size within the ranges of the model's open sizes",
            hint="give the model's open sizes (batch, sequence) numbers before it is exported",
        )
    return aligned(math.ceil(most))


def peak_weights(nodes: Sequence[Node], sizes: Mapping[str, int]) -> int:
    """The most bytes of weights alive at once when each is loaded for its uses only."""
    uses = [{i[1:] for i in n.inputs if i[0] == "@"} for n in nodes]
    return _peak(uses, sizes, ())


def workspace(nodes: Sequence[Node], whole: logical.Graph | physical.Graph, device: Device) -> int:
    """The most bytes that the code of these nodes sets aside on a device, in two variants."""
    if not device.workspace:
        return 0
    known, none, types = Bounds.of(whole), Workspace(), _types(whole)
    every = device.workspace.get("", none)
    uses = {(_code(n, device), _channels(n, types, known)) for n in nodes}
    of_one = len(nodes) * every.team
    for op, channels in uses:
        each = device.workspace.get(op, none)
        of_one += each.team + device.cores * aligned(each.core + each.channel * channels)
    elements: dict[str, int] = {}
    for node in nodes:
        if by := device.workspace.get(op := _code(node, device), none).element:
            elements[op] = max(elements.get(op, 0), by * _elements(node, types, known))
    once = every.device + sum(device.workspace.get(op, none).device for op in {op for op, _ in uses})
    return once + TURNS * (of_one + sum(elements.values()))


def transient(nodes: Iterable[Node], graph: logical.Graph | physical.Graph, device: Device) -> int:
    """The most bytes that the code of one of these nodes sets aside on a device only while it runs."""
    known, types, most = Bounds.of(graph), _types(graph), 0
    for node in nodes:
        if by := device.workspace.get(_code(node, device), Workspace()).transient:
            most = max(most, by * _elements(node, types, known))
    return min(most, TRANSIENT)


def taken(graph: logical.Graph, device: Device) -> int:
    """The most bytes of results and code, where all of a graph is on a device."""
    own = peak_activations(graph.nodes, graph) + transient(graph.nodes, graph, device)
    return own + workspace(graph.nodes, graph, device)


def _types(graph: logical.Graph | physical.Graph) -> Mapping[str, TensorType]:
    return {i.name: i.type for i in graph.inputs} | {n.name: n.type for n in graph.nodes}


def _code(node: Node, device: Device) -> str:
    """The name under which a device says what memory the code of a node takes."""
    if f"{node.op} {node.numerics}" in device.workspace:
        return f"{node.op} {node.numerics}"
    return "attention+latent" if node.op == "attention" and node.attr("latent") else node.op


def _elements(node: Node, types: Mapping[str, TensorType], known: Bounds) -> int:
    """Of a node's first input, in the largest step."""
    first = types.get(node.inputs[0][1:]) if node.inputs else None
    return math.ceil(known.interval(first.elements)[1]) if first else 0


def _channels(node: Node, types: Mapping[str, TensorType], known: Bounds) -> int:
    """Of a node's first input; of an attention, those of a head, of keys and of values."""
    if node.op == "attention":
        dims = (node.attr("head_dim"), node.attr("value_dim"))
        return sum(d for d in dims if isinstance(d, int))
    first = types.get(node.inputs[0][1:]) if node.inputs else None
    return math.ceil(known.interval(first.shape[-1])[1]) if first and first.shape else 0


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


# ---- the budgets of a plan -------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Need:
    """A device's budget as far as a placement fills it. least: bytes its weights need when they stream.

    reserve: what results and code of another variant may take. passing: bytes of weights that don't stay
    because the host's memory keeps them.
    """

    budget: physical.Budget
    least: int
    reserve: int = 0
    passing: int = 0

    @property
    def left(self) -> int:
        """Bytes for weights."""
        b = self.budget
        return b.limit - b.state - max(b.activations + b.workspace, self.reserve)

    def short(self) -> str:
        """What is lacking, in figures."""
        b = self.budget
        total = self.least + b.state + b.activations + b.workspace
        return (
            f"{b.device} needs {total} bytes at least ({self.least} for weights that stream, "
            f"{b.state} state, {b.activations} activations"
            + (f", {b.workspace} workspace" if b.workspace else "")
            + f") of {b.limit}"
        )


def charge_pools(budgets: Sequence[physical.Budget], held: Held, weights: Mapping[str, Weight],
                 machine: Machine) -> list[physical.Budget]:  # fmt: skip
    """Budgets in which devices of one memory count what they share once.

    Each counts weights up to its own limit, the first one first; the rest is `shared` with those.
    """
    pools: dict[str, list[physical.Budget]] = defaultdict(list)
    for budget in budgets:
        pools[pool_of(machine.device(budget.device))].append(budget)
    out: dict[str, physical.Budget] = {}
    for members in pools.values():
        left = held_bytes(held, weights, [b.device for b in members])
        for at, b in enumerate(members):
            own = b.weights
            room = _beside(b)
            later = sum(map(_beside, members[at + 1 :]))
            count = own if len(members) == 1 else min(own, left, room)
            count = max(count, min(own, left - later))  # nobody behind it could count these
            left -= count
            out[b.device] = replace(b, weights=count, shared=own - count)
    return [out[b.device] for b in budgets]


def _beside(budget: physical.Budget) -> int:
    """Bytes that a budget leaves for weights."""
    return max(0, budget.limit - budget.state - budget.activations - budget.workspace)


def room_of(budgets: Iterable[physical.Budget], reserve: Mapping[str, int]) -> Counter[str]:
    """Bytes that state and results leave for the weights of each device, shared ones included.

    reserve: results and code of other variants, by device, where they take more.
    """
    return Counter(
        {
            b.device: b.limit
            - b.state
            + b.shared
            - max(b.activations + b.workspace, reserve.get(b.device, 0))
            for b in budgets
        }
    )
