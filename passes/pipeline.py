"""The whole compiler: which passes there are, in which order. Read this file first.

    recognise  raw operators → the named operations of flashrt/ir/ops.py
    fuse       products of one input become one, residuals join their product
    precision  numerics of every node
    tag        kinds of device each node may run on
    cost       time, bytes and flops of every node on every device
    shard      which nodes may be split, and whether that could pay
    place      a device for every node, or a share of it   logical → physical
    transfer   every edge between devices is a node
    lower      serial micro-instructions                   physical → micro
    ------------------------------------------------------ correct up to here; faster from here on
    prefetch   weights load before they are needed
    overlap    they load beside the computing
    elide      weights that fit stay; copies and waits that aren't needed go
    pack       slots and blocks share memory
    region     instructions that run as one launch

`elide` stands before `pack` because memory is then laid out once, for what is left:
a view's slot needs no memory, and the ring is sized for the blocks that still stream.

Passes are plain functions from values to a value. With any subset of those after the
line left out the stream still computes the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from flashrt.errors import PlanError
from flashrt.ir import logical, micro, physical
from flashrt.ir.clock import simulate, typical
from flashrt.ir.ops import ATTENTION_EXACT, LINEAR_EXACT
from flashrt.ir.types import Env, evaluate
from flashrt.machine import Machine
from flashrt.passes.budget import HOSTS, room_of, taken, weight_road
from flashrt.passes.cost import block_bytes, cost
from flashrt.passes.elide import elide, keep
from flashrt.passes.fuse import fuse
from flashrt.passes.lending import Lending
from flashrt.passes.lower import lower
from flashrt.passes.overlap import overlap
from flashrt.passes.pack import pack, staying_bytes
from flashrt.passes.pins import Pin
from flashrt.passes.place import Placement, placements
from flashrt.passes.precision import precision
from flashrt.passes.prefetch import prefetch
from flashrt.passes.recognise import recognise
from flashrt.passes.region import region
from flashrt.passes.shard import shard
from flashrt.passes.tag import tag
from flashrt.passes.task import Earlier, Settled
from flashrt.passes.transfer import transfer

GAIN = 0.01  # of a step's time, that several devices have to save
AHEAD = 4  # times as many blocks may wait in a ring where few of a step pass: it is its bytes that count then
WARM = 3  # steps until a ring is as it will always be
Check = Callable[[str, object], None]  # called with a pass's name and what it made


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose.

    numerics, few, attention, exclude, plain: how products and attention are computed, and which products stay
    exact (see `precision`).
    devices: ids to choose from (None: all). disabled: performance passes to leave out. window: blocks that
    loading may run ahead; with `repeats`, AHEAD times as many. weight_bytes: what the weights of a device
    may take, ring included (devices left out: what its budget leaves); variants that are to share their
    weights need the same. pins: what the user placed. settled: where else there is no choice. earlier: the
    variants that were planned before this one.
    sums: whether products may be sums of parts made by several devices, which rounds differently. repeats:
    whether steps of this variant follow each other.
    """

    numerics: str = LINEAR_EXACT
    few: str = ""
    attention: str = ATTENTION_EXACT
    exclude: tuple[str, ...] = ()
    plain: bool = False
    devices: tuple[str, ...] | None = None
    disabled: frozenset[str] = frozenset()
    window: int = 4
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    pins: tuple[Pin, ...] = ()
    settled: Settled = field(default_factory=Settled)
    earlier: Earlier = field(default_factory=Earlier)
    sums: bool = False
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """A graph at its three levels. logical: as it was placed."""

    logical: logical.Graph
    physical: physical.Graph
    stream: micro.Stream


Faster = Callable[[micro.Stream, Options, Mapping[str, int]], micro.Stream]
PASSES = ("recognise", "fuse", "precision", "tag", "cost", "shard", "place", "transfer", "lower")
PERFORMANCE: Mapping[str, Faster] = {
    "prefetch": lambda stream, options, room: prefetch(
        stream,
        window=options.window * (AHEAD if options.repeats else 1),
        limits=_ringed(stream, room, options),
        across=options.repeats,
    ),
    "overlap": lambda stream, options, room: overlap(stream),
    "elide": lambda stream, options, room: elide(stream, resident_bytes=_staying(room, options)),
    "pack": lambda stream, options, room: pack(stream),
    "region": lambda stream, options, room: region(stream),
}


def compile_graph(
    graph: logical.Graph, machine: Machine, options: Options | None = None, *, check: Check | None = None
) -> Planned:
    """Plans one variant: the graph for the range of `T` that its symbols declare.

    check: called after each pass, to check laws, dump or time.

    Raises:
        PlanError: no plan can be made, or an option names nothing known.
    """
    options = options or Options()
    check = check or _unchecked
    return plan(prepare(graph, options, check=check), machine, options, check=check)


def _unchecked(name: str, value: object) -> None:
    """Looks at nothing."""


def prepare(graph: logical.Graph, options: Options, *, check: Check = _unchecked) -> logical.Graph:
    """The passes on the logical graph: what is placed. Raises PlanError as `compile_graph` does."""
    check_names(options.disabled)
    for name, rewrite in _rewrites(options):
        graph = rewrite(graph)
        check(name, graph)
    return graph


def plan(graph: logical.Graph, machine: Machine, options: Options, *, check: Check = _unchecked) -> Planned:
    """Places a prepared graph and lowers it. Raises PlanError as `compile_graph` does."""
    placed = _placed(graph, machine, options, check)
    stream = _lowered(placed, machine, options, check)
    _within(placed.budgets, stream, options.earlier)
    return Planned(graph, replace(placed, budgets=_stated(placed.budgets, options)), stream)


def _room(budgets: Sequence[physical.Budget], options: Options) -> dict[str, int]:
    """Bytes that each device has for weights, in every variant."""
    return room_of(budgets, options.earlier.reserve) | dict(options.weight_bytes)


def _staying(room: Mapping[str, int], options: Options) -> dict[str, int]:
    """The same without what others need for their rings."""
    return {d: n - options.earlier.rings.get(d, 0) for d, n in room.items()}


def _ringed(stream: micro.Stream, room: Mapping[str, int], options: Options) -> dict[str, int]:
    """The same with no larger rings than others have, where they take turns with those."""
    kept, rings = staying_bytes(stream), options.earlier.rings
    return {d: min(n, kept[d] + rings[d]) if d in rings else n for d, n in room.items()}


def _stated(budgets: Sequence[physical.Budget], options: Options) -> tuple[physical.Budget, ...]:
    """The budgets without the room for weights that another variant has taken for its results."""
    room = _room(budgets, options)
    return tuple(replace(b, weights=min(b.weights, room[b.device] - b.shared)) for b in budgets)


def _lowered(
    placed: physical.Graph, machine: Machine, options: Options, check: Check = _unchecked
) -> micro.Stream:
    stream = lower(placed, machine)
    check("lower", stream)
    lending = options.earlier.lending(machine)
    if "elide" not in options.disabled:
        stream = keep(stream, lambda b: lending.stays(b.name, (b.lo, b.hi), b.device, b.bytes))
        stream = replace(stream, blocks=(*stream.blocks, *lending.lenders(stream)))
    beside = options.earlier.beside(stream.blocks)
    room = {d: n - beside[d] for d, n in _room(placed.budgets, options).items()}
    for name, faster in PERFORMANCE.items():
        if name not in options.disabled:
            stream = faster(stream, options, room)
            check(name, stream)
    return _eased(stream, lending)


def _eased(stream: micro.Stream, lending: Lending) -> micro.Stream:
    """The stream with less to bring where a device keeps some experts of what passes through it."""
    weights = {w.name: w for w in stream.weights}

    def eased(instr: micro.Instr) -> micro.Instr:
        if not isinstance(instr, micro.Prefetch):
            return instr
        weight = weights[instr.block]
        left = 1 - lending.copied(weight, instr.device) / block_bytes(weight)
        return replace(instr, est=instr.est * left, bytes=instr.bytes * left) if left < 1 else instr

    return replace(stream, instrs=tuple(map(eased, stream.instrs)))


def check_names(disabled: Iterable[str]) -> None:
    """Raises PlanError for a pass that can't be left out."""
    if unknown := set(disabled) - PERFORMANCE.keys():
        raise PlanError(
            f"can't leave out {', '.join(sorted(unknown))}",
            hint=f"passes that may be left out: {', '.join(PERFORMANCE)}",
        )


def _rewrites(options: Options) -> Sequence[tuple[str, Callable[[logical.Graph], logical.Graph]]]:
    """The passes on the logical graph. Raw operators have a dot (`aten.mul`); without any there is
    nothing to recognise."""
    return (
        ("recognise", lambda g: recognise(g) if any("." in n.op for n in g.nodes) else g),
        ("fuse", fuse),
        (
            "precision",
            partial(
                precision,
                numerics=options.numerics,
                few=options.few,
                attention=options.attention,
                exclude=options.exclude,
                plain=options.plain,
            ),
        ),
        ("tag", tag),
    )


def _placed(graph: logical.Graph, machine: Machine, options: Options, check: Check) -> physical.Graph:
    costs = cost(graph, machine)
    check("cost", costs)
    cuts = shard(graph, costs, machine)
    check("shard", cuts)
    ways = placements(
        graph, costs, machine, cuts=cuts, devices=options.devices, pins=options.pins,
        settled=options.settled, earlier=options.earlier, sums=options.sums,
    )  # fmt: skip
    whole = ways[0].graph if len(ways) == 1 else _quickest(ways, machine, options)
    check("place", whole)
    placed = transfer(whole, machine)
    check("transfer", placed)
    return placed


def reserve(prepared: Sequence[logical.Graph], machine: Machine) -> dict[str, int]:
    """Bytes to leave free on each device for results and code of any variant, wherever it is placed."""
    return {d.id: max(taken(g, d) for g in prepared) for d in machine.devices}


def _quickest(ways: Sequence[Placement], machine: Machine, options: Options) -> physical.Graph:
    """The way whose steps take the least time by the clock; several devices only where they gain by it.

    Raises PlanError when none is within the budgets once its memory is laid out.
    """
    best: tuple[float, physical.Graph] | None = None
    beyond: PlanError | None = None
    for way in ways:  # none takes less than was predicted, but for what is left out of the stream
        if best is not None and way.total > best[0] * (1 + GAIN):
            break
        try:
            placed = transfer(way.graph, machine)
            stream = _lowered(placed, machine, options)
            _within(placed.budgets, stream, options.earlier)
        except PlanError as error:
            beyond = beyond or error
            continue
        several = len({n.device for n in way.graph.nodes}) > 1
        time = step_time(stream, machine) * (1 + GAIN * several)
        if best is None or time < best[0]:
            best = time, way.graph
    if best is None:
        assert beyond is not None
        raise beyond
    return best[1]


def step_time(stream: micro.Stream, machine: Machine, env: Env | None = None) -> float:
    """Microseconds of a step by the clock, but no less than its reads take of the host's memory.

    What a device brings over its link is read there, too, and the clock doesn't know that the rate is the
    one that the processor's cores have together.
    """
    full = typical(stream, env or {})
    read: dict[str, float] = defaultdict(float)
    kinds = {d.id: d.kind for d in machine.devices}
    for instr in stream.instrs:
        match instr:
            case micro.Dispatch() if kinds[instr.device] in HOSTS:
                read[instr.device] += evaluate(instr.bytes, full)
            case micro.Prefetch() if kinds[instr.device] not in HOSTS:
                read[weight_road(machine.device(instr.device), machine)[0]] += evaluate(instr.bytes, full)
    rates = {d.id: d.read.value for d in machine.devices}
    memory = max((1e6 * n / rates[d] for d, n in read.items() if d in rates), default=0.0)
    return max(simulate(stream, full, WARM).step_time, memory)


def _within(budgets: Sequence[physical.Budget], stream: micro.Stream, earlier: Earlier) -> None:
    """Raises PlanError when a packed stream, beside what earlier variants keep, takes more memory than the
    plan allows."""
    held: Counter[str] = Counter({b.device: b.state + b.workspace for b in budgets})
    held += earlier.beside(stream.blocks)
    for device, size in (*stream.arenas, *stream.rings):
        held[device] += size
    held += staying_bytes(stream)
    for budget in budgets:
        taken = held[budget.device] - budget.shared
        if taken > budget.limit:
            raise PlanError(
                f"{stream.name} takes {taken} bytes of {budget.device}, its budget is {budget.limit}",
                hint="give its weights less room (weight_bytes), or plan fewer tokens a step",
            )


def weight_room(budgets: Sequence[physical.Budget]) -> dict[str, int]:
    """Bytes that state and activations leave for the weights of each device."""
    return dict(room_of(budgets, {}))
