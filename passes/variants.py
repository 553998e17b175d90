"""All variants of a plan: where a GPU is too small for the model, what small and large steps do about it.

Small steps are memory-bound: what doesn't fit the GPU is computed where it lies, by the processor. Large
ones are bound by arithmetic: the same weights pass through the GPU. For that, the first variant leaves it
room for a ring, and state lies on the GPU, if it can. In small steps some weights pass through that ring,
too, while the processor computes with others. Whether all this pays is judged by a prompt and its answer.

Of the experts that are then the host's, the GPU keeps some of each layer in what room is left: see `experts`.
One manner has the host compute with experts in all layers, so that more is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flashrt.errors import PlanError
from flashrt.ir import logical, micro
from flashrt.ir.clock import typical
from flashrt.ir.order import loaded_at_start
from flashrt.ir.types import evaluate
from flashrt.layouts import aligned
from flashrt.machine import Device, Link, Machine
from flashrt.passes.beside import LOOKUPS
from flashrt.passes.budget import HOSTS, pool_of, room_of, state_bytes, weight_road
from flashrt.passes.cost import block_bytes, kernel_of
from flashrt.passes.experts import able, cache_bytes, cached, layers_of, router_bytes
from flashrt.passes.lending import PASSED, ring_bytes
from flashrt.passes.parts import Parts
from flashrt.passes.pins import pinned
from flashrt.passes.pipeline import GAIN, Check, Options, Planned, plan, reserve, step_time
from flashrt.passes.spread import Seat, Whole
from flashrt.passes.task import Earlier, Settled, seats_of

PROMPT, ANSWER = 2048, 128  # tokens of the request by which manners are compared
FIRST = 0.1  # of its time, that a ring and state beside it are worth: prompts and contexts may be longer
BESIDE = 0.83  # of a link's rate is left while the processor reads the same memory: 0.80 to 0.91 measured


@dataclass(frozen=True, slots=True)
class Variant:
    """A graph prepared for one range of `T`, and how to plan it."""

    name: str
    graph: logical.Graph
    options: Options
    check: Check


@dataclass(frozen=True, slots=True)
class Manner:
    """How variants take turns. rings: device → bytes that the first one leaves for weights that pass.

    home: the device that states are to be on; "" for wherever it is best. cache: the device that may keep
    experts of the host's. experts: the device that has them all in the first variant; "" for wherever it is
    best. devices: those to choose from, as `Options` has them.
    """

    rings: Mapping[str, int] = field(default_factory=dict)
    home: str = ""
    cache: str = ""
    experts: str = ""
    devices: tuple[str, ...] | None = None


def plan_all(variants: Sequence[Variant], machine: Machine, manner: Manner) -> dict[str, Planned]:
    """Plans the variants one after the other, by name: the first decides where state and weights lie.

    Raises PlanError when one of them can't be planned.
    """
    results = reserve([v.graph for v in variants], machine)
    beside = {d: n + manner.rings.get(d, 0) for d, n in results.items()}
    first = beside if len(variants) > 1 else results
    lacking = {key for later in variants[1:] for key in _lacking(later, machine, manner)}
    earlier = Earlier((), first, manner.home, bool(manner.rings), {}, *_held_together(variants, lacking))
    planned: dict[str, Planned] = {}
    for v in variants:
        own = replace(v.options, earlier=earlier, devices=manner.devices or v.options.devices)
        if not planned and manner.cache:
            made = _with_cache(v, machine, own, manner)
        else:
            made = plan(v.graph, machine, own, check=v.check)
        streams = Earlier((made.physical,)).streaming()
        if streams and not planned and any((n.of, n.device) in lacking for n in made.physical.nodes):
            own = replace(own, earlier=replace(earlier, unable=frozenset(lacking)))
            made = plan(v.graph, machine, own, check=v.check)
            streams = Earlier((made.physical,)).streaming()
        if streams and not planned and manner.rings:
            raise PlanError(
                f"{v.name}: the host's memory keeps nothing that a ring could bring",
                hint="plan without a ring, or give the host a larger budget",
            )
        # where weights stream, the same ones stay in every variant: each needs the same room for them
        earlier = Earlier((*earlier.graphs, made.physical), earlier.reserve if streams else results)
        planned[v.name] = made
    if manner.rings:
        planned |= _passing(variants, planned, machine, results, manner)
    return planned


def _lacking(v: Variant, machine: Machine, manner: Manner) -> Iterator[tuple[str, str]]:
    """(node, device) for what a device can't compute of a variant, while another can."""
    chosen = manner.devices or v.options.devices
    devices = [d for d in machine.devices if chosen is None or d.id in chosen]
    weights = {w.name: w for w in v.graph.weights}
    for node in v.graph.nodes:
        kernel = kernel_of(node, weights)
        lack = [d.id for d in devices if not d.supports(kernel, node.numerics)]
        if len(lack) < len(devices):
            yield from ((node.name, d) for d in lack)


def _held_together(
    variants: Sequence[Variant], lacking: Collection[tuple[str, str]]
) -> tuple[frozenset[tuple[str, str]], frozenset[str]]:
    """Of what devices lack, nodes whose state is where every variant looks for it; and nodes that divide with
    others of which a device lacks one."""
    nodes = variants[0].graph.nodes
    stateful = {n.name for n in nodes if n.reads or n.writes}
    short = {name for name, _ in lacking}
    groups = set(Parts(variants[0].graph).groups.values())
    undivided = (name for group in groups if not short.isdisjoint(group.nodes) for name in group.nodes)
    return frozenset(key for key in lacking if key[0] in stateful), frozenset(undivided)


def _passing(
    variants: Sequence[Variant],
    planned: Mapping[str, Planned],
    machine: Machine,
    results: Mapping[str, int],
    manner: Manner,
) -> dict[str, Planned]:
    """The first variant again, with weights that the host keeps on their way through the others' rings while
    all compute; nothing where that isn't quicker."""
    v, before = variants[0], planned[variants[0].name]
    rings = dict(planned[variants[-1].name].stream.rings)
    if before.logical is not v.graph or not rings:
        return {}  # the host's experts pass one by one
    earlier = Earlier((before.physical,), results, rings=rings)
    devices = manner.devices or v.options.devices
    options = replace(v.options, earlier=earlier, devices=devices, repeats=True)
    said: list[tuple[str, object]] = []
    shared = _memory_shared(machine)
    try:
        made = plan(v.graph, shared, options, check=lambda name, value: said.append((name, value)))
    except PlanError:
        return {}
    if step_time(made.stream, shared) * (1 + GAIN) > step_time(before.stream, machine):
        return {}
    for name, value in said:
        v.check(name, value)
    return {v.name: made}


def _memory_shared(machine: Machine) -> Machine:
    """The machine while GPUs copy from the memory in which the processor reads weights: what it can give is
    shared."""
    hosts = {d.id for d in machine.devices if d.kind in HOSTS}
    gpus = [d.id for d in machine.devices if d.kind in PASSED]
    taken, read, slow = Counter[str](), Counter[str](), dict[tuple[str, str], Link]()
    for gpu in gpus:
        link = machine.link(*weight_road(machine.device(gpu), machine))
        if link.src in hosts:
            slow[link.src, gpu] = link = replace(
                link, rate=replace(link.rate, value=link.rate.value * BESIDE)
            )
            taken[pool_of(machine.device(link.src))] += round(link.rate.value)
    for host in map(machine.device, hosts):
        read[pool_of(host)] += round(host.read.value)

    def shared(device: Device) -> Device:
        if device.id not in hosts or not taken[pool := pool_of(device)]:
            return device
        alone = device.gemv or device.read
        left = device.read.value * max(0.0, 1 - taken[pool] / read[pool])
        # the link rests in some of the time, and a memory may give more than the processor can read
        return replace(device, gemv=replace(alone, value=(alone.value + min(alone.value, left)) / 2))

    others = (link for link in machine.links if (link.src, link.dst) not in slow)
    return replace(machine, devices=tuple(map(shared, machine.devices)), links=(*others, *slow.values()))


def _with_cache(v: Variant, machine: Machine, options: Options, manner: Manner) -> Planned:
    """The first variant, with experts of the host's on a GPU where that is quicker."""
    chosen = Settled(_apart(v.graph, machine.device(manner.experts)) if manner.experts else {})
    without = plan(v.graph, machine, replace(options, settled=chosen), check=v.check)
    graph, seats = _cached(v.graph, without, machine, options, manner.cache)
    if graph is v.graph:
        return without
    settled = Settled(seats, without.physical.splits)
    try:
        made = plan(graph, machine, replace(options, settled=settled), check=v.check)
    except PlanError:
        return without
    if step_time(made.stream, machine) * (1 + GAIN) > step_time(without.stream, machine):
        return without
    causes = {(n.name, n.op): n.because for n in without.physical.nodes}
    nodes = tuple(replace(n, because=causes.get((n.name, n.op), n.because)) for n in made.physical.nodes)
    return Planned(v.graph, replace(made.physical, nodes=nodes), made.stream)


def _apart(graph: logical.Graph, device: Device) -> dict[str, Seat]:
    """Seats of all products with experts that a device can make."""
    weights = {w.name: w for w in graph.weights}
    mixed = (n for n in graph.nodes if n.op == "expert_linear")
    return {n.name: Whole(device.id) for n in mixed if device.supports(kernel_of(n, weights), n.numerics)}


def _cached(
    graph: logical.Graph, planned: Planned, machine: Machine, options: Options, gpu: str
) -> tuple[logical.Graph, Mapping[str, Seat]]:
    """The graph with as large a cache as a plan leaves room for, and where its nodes sit."""
    seats, weights = seats_of(planned.physical), {w.name: w for w in graph.weights}
    hosts = [Whole(d.id) for d in machine.devices if d.kind in HOSTS]
    held = pinned(
        graph, options.pins, [d.id for d in machine.devices]
    )  # a pin fits what is made of a node, too
    layers = [
        layer
        for layer in layers_of(graph)
        if all(seats[n.name] in hosts for n in layer.nodes)
        and able(layer, machine.device(gpu), weights)
        and not any(n.name in held for n in (*layer.router, *layer.nodes, layer.last))
    ]
    if not layers:
        return graph, seats
    kept = sum(aligned(b.bytes) for b in planned.stream.blocks if (b.device, b.home) == (gpu, "resident"))
    left = room_of(planned.physical.budgets, options.earlier.reserve)[gpu] - kept
    left -= router_bytes([a for a in layers if any(seats[n.name] != Whole(gpu) for n in a.router)], weights)
    slots = min(left // cache_bytes(layers, weights, 1), layers[0].experts - 1)
    return cached(graph, layers, slots, gpu, seats) if slots > 0 else (graph, seats)


def choose(variants: Sequence[Variant], machine: Machine) -> tuple[Manner, int | None]:
    """The manner in which a prompt and its answer take the least time, and the largest step that the first
    variant runs sooner than the second; None where weights pass through no device."""
    gpu = _too_small(variants, machine)
    if gpu is None:
        return Manner(), None
    quiet = [replace(v, check=lambda name, value: None) for v in variants]
    found = list(_tried(quiet, machine, gpu))
    if not found:
        return Manner(), None
    _, manner, planned = min(found, key=lambda f: f[0])
    small, large = (planned[v.name] for v in variants)
    passes = any(device == gpu for device, _ in large.stream.rings)
    return manner, _border(small, large, machine) if passes else None


def _too_small(variants: Sequence[Variant], machine: Machine) -> str | None:
    """The one GPU, if the model doesn't fit it and there is a processor that could compute the rest."""
    gpus = [d for d in machine.devices if d.kind in PASSED]
    hosts = [d for d in machine.devices if d.kind in HOSTS]
    if len(variants) != 2 or len(gpus) != 1 or not hosts:
        return None
    graph = variants[0].graph
    env = {s.name: s.hint for s in graph.symbols}
    weights = {w.name: w for w in graph.weights}
    used = {i[1:] for n in graph.nodes if n.op not in LOOKUPS for i in n.inputs if i[0] == "@"}
    needed = sum(aligned(block_bytes(weights[name])) for name in used)
    needed += sum(state_bytes(s, env) for s in graph.states)
    needed += reserve([v.graph for v in variants], machine)[gpus[0].id]
    return gpus[0].id if needed > gpus[0].budget else None


def _tried(
    variants: Sequence[Variant], machine: Machine, gpu: str
) -> Iterator[tuple[float, Manner, dict[str, Planned]]]:
    """What a prompt and its answer take, by manner: with a ring, and state on the GPU or, if it can't be,
    wherever it is best; as if nothing passed through; each device alone."""
    rings = {gpu: ring_bytes(variants[0].graph)}
    alone = [(Manner(devices=(d.id,)),) for d in machine.devices]
    host = next(d.id for d in machine.devices if d.kind in HOSTS)
    mixed = any(n.op == "expert_linear" for n in variants[0].graph.nodes)
    ways = [(Manner(rings, gpu, gpu), Manner(rings, cache=gpu)), (Manner(cache=gpu),), *alone]
    if mixed:
        ways.insert(1, (Manner(rings, gpu, gpu, host),))
    for manners in ways:
        for manner in manners:
            try:
                planned = plan_all(variants, machine, manner)
            except PlanError:
                continue
            small, large = (planned[v.name] for v in variants)
            took = _request(small, large, machine)
            yield took * (1 + FIRST * (not manner.rings and manner.devices is None)), manner, planned
            break


def _request(small: Planned, large: Planned, machine: Machine) -> float:
    """Microseconds of a prompt and its answer, and of loading what the answer's first step finds loaded."""
    steps = max(1.0, PROMPT / _tokens(large)[1])
    there, usual = loaded_at_start(small.stream), typical(small.stream, {})
    moves = (i for i in small.stream.instrs if isinstance(i, micro.Prefetch) and (i.block, i.device) in there)
    first = sum(float(evaluate(i.est, usual)) for i in moves)
    return steps * step_time(large.stream, machine) + first + ANSWER * step_time(small.stream, machine)


def _tokens(planned: Planned) -> tuple[int, int]:
    return next((s.lo, s.hi) for s in planned.logical.symbols if s.name == "T")


def _border(small: Planned, large: Planned, machine: Machine) -> int:
    """The most tokens of a step for which the first variant is sooner done, at least one."""
    lo, hi = _tokens(small)[0], _tokens(large)[1] - 1
    while lo < hi:
        middle = (lo + hi + 1) // 2
        first, second = (step_time(p.stream, machine, {"T": middle}) for p in (small, large))
        lo, hi = (middle, hi) if first <= second else (lo, middle - 1)
    return lo
