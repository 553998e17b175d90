"""What `place` is asked: a graph, its costs, the devices, and what has been settled before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flashrt.errors import PlanError
from flashrt.ir import logical, micro, physical
from flashrt.ir.bounds import Bounds
from flashrt.ir.types import Dim, Env, State, Weight, evaluate
from flashrt.layouts import aligned
from flashrt.machine import Device, Machine
from flashrt.passes.budget import HOSTS, Held, held_bytes, weights_held
from flashrt.passes.cost import Costs, Node, block_bytes
from flashrt.passes.lending import Lending, covers
from flashrt.passes.parts import Parts
from flashrt.passes.pieces import is_piece
from flashrt.passes.shard import Cut
from flashrt.passes.spread import Copied, Parted, Seat, Shared, Summed, Whole

TAGGED = ("gpu", "npu", "cpu")  # kinds that an affinity speaks of


@dataclass(frozen=True, slots=True)
class Earlier:
    """Plans of the same model for other sizes of a step, with which the new one takes turns.

    reserve: device → bytes that results, code, and blocks that pass through it, take in a plan that is still
    to come. home: the device that all states shall be on; "" for wherever it is best. whole: weights may pass
    through a device in a plan that is still to come, so that none is cut for good. rings: device → bytes that
    these plans leave for blocks which pass in others: nothing else may take them. unable: (node, device) that
    a plan still to come can't have, of nodes whose state is where all plans look for it; undivided: nodes of
    which some device can't make parts there.
    """

    graphs: tuple[physical.Graph, ...] = ()
    reserve: Mapping[str, int] = field(default_factory=dict)
    home: str = ""
    whole: bool = False
    rings: Mapping[str, int] = field(default_factory=dict)
    unable: frozenset[tuple[str, str]] = frozenset()
    undivided: frozenset[str] = frozenset()

    def states(self) -> dict[str, str]:
        """State → its device."""
        return {s: n.device for g in self.graphs for n in g.nodes for s in (*n.reads, *n.writes)}

    def held(self) -> Held:
        """The rows of weights that the plans keep. Where two keep different rows, those of the last."""
        out: dict[tuple[str, str], tuple[int, int]] = {}
        for graph in self.graphs:
            out |= weights_held(graph.nodes, {w.name: w for w in graph.weights}, Bounds.of(graph))
        return out

    def beside(self, blocks: Iterable[micro.Block]) -> Counter[str]:
        """Bytes that the plans keep on each device and that aren't among these blocks."""
        if self.streaming() is not None:
            return Counter()  # the same blocks everywhere
        here = {(b.name, b.device): b for b in blocks}
        weights = {w.name: w for w in self.weights()}
        out = Counter[str]()
        for (name, device), rows in self.held().items():
            out[device] += aligned(block_bytes(weights[name], *rows))
            block = here.get((name, device))
            if block is not None and covers(rows, (block.lo, block.hi)):
                out[device] -= aligned(block.bytes)
        return out

    def weights(self) -> list[Weight]:
        """All weights of the plans, parts of others among them."""
        return list({w.name: w for g in self.graphs for w in g.weights}.values())

    def seats(self) -> dict[str, Seat]:
        """Where each node sits, in the last plan that has it."""
        return {name: seat for g in self.graphs for name, seat in seats_of(g).items()}

    def cuts(self) -> dict[tuple[int, tuple[str, ...]], tuple[int, ...]]:
        """(width, devices) → where products are cut for good."""
        found: dict[tuple[int, tuple[str, ...]], tuple[int, ...]] = {}
        for graph in self.graphs:
            for seat in seats_of(graph).values():
                if isinstance(seat, Shared):
                    bounds = [b for b in seat.bounds if isinstance(b, int)]
                    if len(bounds) == len(seat.bounds):
                        found[bounds[-1], seat.devices] = tuple(bounds)
        return found

    def lending(self, machine: Machine) -> Lending:
        """What the plans lend of the weights that they keep."""
        if not self.graphs or self.streaming() is not None:
            return Lending()
        return Lending.of(self.graphs[-1], self.held(), machine, self.reserve)

    def streaming(self) -> physical.Graph | None:
        """The plan of which weights don't stay."""
        for graph in self.graphs:
            held = weights_held(graph.nodes, {w.name: w for w in graph.weights}, Bounds.of(graph))
            if any(b.weights + b.shared < _bytes(held, graph, b.device) for b in graph.budgets):
                return graph
        return None


@dataclass(frozen=True, slots=True)
class Settled:
    """Seats of nodes that have no choice, and the split variables in them."""

    seats: Mapping[str, Seat] = field(default_factory=dict)
    splits: tuple[physical.Split, ...] = ()


def _bytes(held: Held, graph: physical.Graph, device: str) -> int:
    return held_bytes(held, {w.name: w for w in graph.weights}, [device])


def seats_of(graph: physical.Graph) -> dict[str, Seat]:
    """Where each node of the logical graph sits in a physical one."""
    out: dict[str, Seat] = {}
    shards: dict[tuple[str, str], list[physical.Node]] = {}
    parts: dict[str, list[physical.Node]] = {}
    pieces = {f"%{n.name}" for n in graph.nodes if is_piece(n)}
    for node in graph.nodes:
        # what is in pieces sits where these are merged
        whole = node.op == "merge" and not pieces.isdisjoint(node.inputs)
        if f"%{node.name}" in pieces or (node.op in ("transfer", "merge") and not whole):
            continue
        if node.part is not None:
            parts.setdefault(node.of, []).append(node)
        elif node.shard is None and node.of in out:
            out[node.of] = _copied(out[node.of], node.device)
        elif node.shard is None:
            out[node.of] = Whole(
                node.device, node.op.startswith("host."), lender=str(node.attr("lender", ""))
            )
        else:
            shards.setdefault((node.of, node.name.rpartition("#")[0]), []).append(node)
    for (value, piece), nodes in shards.items():
        base = nodes[0].shard.lo if nodes[0].shard else 0
        bounds: list[Dim] = [0] + [n.shard.hi - base for n in nodes if n.shard]
        out[value] = out[piece] = Shared(tuple(n.device for n in nodes), tuple(bounds))
    columns = {f"@{w.name}" for w in graph.weights if w.columns}
    for value, nodes in parts.items():
        ends = [_whole(n.part.hi) for n in nodes if n.part]
        shares, devices = (0, *ends), tuple(n.device for n in nodes)
        if columns & {i for n in nodes for i in n.inputs}:
            out[value] = Summed(devices, shares, isinstance(out.get(value), Copied))
        else:
            out[value] = Parted(devices, shares)
    return out


def _copied(seat: Seat, device: str) -> Seat:
    """A seat, and the device beside it, if that is another."""
    devices = (seat.device,) if isinstance(seat, Whole) else seat.devices
    return seat if device in devices else Copied((*devices, device))


def _whole(value: Dim) -> int:
    assert isinstance(value, int), value
    return value


@dataclass(frozen=True, slots=True)
class Task:
    """kernels: names by node. env: typical values of the symbols. cuts: what `shard` found.

    fixed: seats of nodes that have no choice, with the cause as obstacle. parts: see `parts`. sums: whether
    products may be sums of parts, which rounds differently.
    """

    graph: logical.Graph
    costs: Costs
    machine: Machine
    usable: tuple[Device, ...]
    kernels: Mapping[str, str]
    env: Env
    parts: Parts
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    earlier: Earlier = field(default_factory=Earlier)
    fixed: Mapping[str, Seat] = field(default_factory=dict)
    sums: bool = False
    known: dict[object, str] = field(default_factory=dict)  # obstacles found so far

    @property
    def weights(self) -> dict[str, Weight]:
        """By name, with the parts of weights that were made so far."""
        return self.parts.weights

    def kind(self, device: str) -> str:
        """A device's."""
        return self.machine.device(device).kind

    def states(self, nodes: Iterable[Node]) -> list[State]:
        """The states that the nodes use, or parts of states."""
        own = dict.fromkeys(name for n in nodes for name in (*n.reads, *n.writes))
        return [self.parts.states[name] for name in own]

    def est(self, node: logical.Node, device: str) -> float:
        """Predicted time of a node at typical sizes, in microseconds."""
        return evaluate(self.costs.of(node.name, device).est, self.env)

    def seat(self, node: logical.Node, device: str) -> Seat:
        """Where a node sits when a device is tried for it. Raises PlanError when nothing runs it."""
        return self.fixed.get(node.name) or self.whole(node, device)

    def whole(self, node: logical.Node, device: str) -> Whole:
        """The same for a node that isn't fixed."""
        obstacle = self.obstacle(node, device)
        if not obstacle:
            return Whole(device)
        able = [d.id for d in self.usable if not self.obstacle(node, d.id)]
        if able:
            return Whole(min(able, key=lambda d: self.est(node, d)), False, obstacle)
        tried = (self.machine.device(device), *self.usable, *self.machine.devices)
        host = next((d.id for d in tried if d.kind in HOSTS), None)
        if host is None:
            raise PlanError(
                f"{node.name}: {obstacle}, and there is no host device for the reference implementation",
                hint="add a cpu, reference or null device to the machine",
            )
        return Whole(host, True, f"{obstacle}: runs on the reference implementation")

    def obstacle(self, node: logical.Node, id: str, kernel: str = "") -> str:
        """Why a device can't run a node, or "". kernel: another name for it than the graph's."""
        if (node.name, id) in self.earlier.unable:
            return f"large steps compute {node.op} in a way that {id} can't, and its state is there"
        kernel = kernel or self.kernels[node.name]
        key = (kernel, node.op, node.numerics, node.affinity, id)
        if key not in self.known:
            self.known[key] = self._obstacle(node, id, kernel)
        return self.known[key]

    def _obstacle(self, node: logical.Node, id: str, kernel: str) -> str:
        device = self.machine.device(id)
        if not any(name == kernel for name, _ in device.kernels):
            return f"no {kernel} kernel on {id}"
        if not device.supports(kernel, node.numerics):
            return f"no {kernel} kernel with {node.numerics or 'unset numerics'} on {id}"
        if device.kind in TAGGED and node.affinity and device.kind not in node.affinity:
            return f"{id} isn't for {node.op}: {node.why}"
        return ""
