"""The laws of the logical and the physical graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from flashrt.ir import logical, ops, physical
from flashrt.ir.bounds import Bounds
from flashrt.ir.law import Law, Violation
from flashrt.ir.types import TensorType, show, symbols_of

Graph = logical.Graph | physical.Graph
Node = logical.Node | physical.Node
PAGES = "P"  # the number of KV pages: a symbol of states that the runtime fills in
GRANULE = 16  # split positions are multiples of it: the row group of every packed layout


def _twice(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _nodes(graph: Graph) -> tuple[Node, ...]:
    return graph.nodes


# ---- both graphs -----------------------------------------------------------------
def bound_once(graph: Graph) -> Iterator[Violation]:
    """Every value, weight, state, symbol and output has a name of its own."""
    seen = {i.name for i in graph.inputs}
    for at, node in enumerate(_nodes(graph)):
        if node.name in seen:
            yield Violation(f"%{node.name} is bound a second time", at)
        seen.add(node.name)
    symbols = [s.name for s in graph.symbols] + [s.name for s in getattr(graph, "splits", ())]
    kinds = {
        "symbol": symbols,
        "input": [i.name for i in graph.inputs],
        "weight": [w.name for w in graph.weights],
        "state": [s.name for s in graph.states],
        "output": [o.name for o in graph.outputs],
    }
    for kind, names in kinds.items():
        for name in _twice(names):
            yield Violation(f"{kind} {name!r} is declared twice")


def known_sigils(graph: Graph) -> Iterator[Violation]:
    """An input of a node is a value (`%name`) or a weight (`@name`)."""
    for at, node in enumerate(_nodes(graph)):
        for name in node.inputs:
            if name[:1] not in ("%", "@"):
                yield Violation(f"%{node.name} takes {name!r}, which has no sigil", at)


def bound_before_use(graph: Graph) -> Iterator[Violation]:
    """A value is an input or is bound by an earlier node."""
    bound = {i.name for i in graph.inputs}
    later = {n.name for n in _nodes(graph)}
    for at, node in enumerate(_nodes(graph)):
        for name in (i[1:] for i in node.inputs if i[:1] == "%"):
            if name not in bound:
                how = "only bound later" if name in later else "bound nowhere"
                yield Violation(f"%{node.name} uses %{name}, which is {how}", at)
        bound.add(node.name)


def declared(graph: Graph) -> Iterator[Violation]:
    """The weights and states that nodes use are declared."""
    weights, states = {w.name for w in graph.weights}, {s.name for s in graph.states}
    for weight in graph.weights:
        if weight.of and weight.of not in weights:
            yield Violation(f"weight @{weight.name} is a part of @{weight.of}, which isn't declared")
    for at, node in enumerate(_nodes(graph)):
        for name in (i[1:] for i in node.inputs if i[:1] == "@"):
            if name not in weights:
                yield Violation(f"%{node.name} uses weight @{name}, which isn't declared", at)
        for name in dict.fromkeys((*node.reads, *node.writes)):
            if name not in states:
                yield Violation(f"%{node.name} uses state {name!r}, which isn't declared", at)


def symbols_declared(graph: Graph) -> Iterator[Violation]:
    """The symbols in types (and shards) are declared."""
    known = {s.name for s in graph.symbols} | {s.name for s in getattr(graph, "splits", ())}

    def unknown(type: TensorType, also: frozenset[str] = frozenset()) -> str:
        return ", ".join(sorted(frozenset().union(also, *map(symbols_of, type.shape)) - known))

    for name, type in [(r.name, r.type) for r in graph.inputs] + [(r.name, r.type) for r in graph.weights]:
        if names := unknown(type):
            yield Violation(f"the type of {name!r} has undeclared symbols: {names}")
    for state in graph.states:
        if names := unknown(state.type.with_shape(*(d for d in state.type.shape if show(d) != PAGES))):
            yield Violation(f"the type of state {state.name!r} has undeclared symbols: {names}")
    for at, node in enumerate(_nodes(graph)):
        shard = node.shard if isinstance(node, physical.Node) else None
        ends = symbols_of(shard.lo) | symbols_of(shard.hi) if shard else frozenset[str]()
        if names := unknown(node.type, ends):
            yield Violation(f"%{node.name} has undeclared symbols: {names}", at)


def parts_fit(graph: Graph) -> Iterator[Violation]:
    """A weight that is a part of another has as many rows and columns as it takes of that."""
    wholes = {w.name: w.type for w in graph.weights}
    for weight in graph.weights:
        if (whole := wholes.get(weight.of)) is None:
            continue
        want = list(whole.shape)
        for axis, ends in enumerate((weight.rows, weight.columns)):
            if ends and axis < len(want):
                if any(a > b for a, b in pairwise(ends)) or len(ends) % 2 or ends[-1] > want[axis]:  # type: ignore[operator]
                    yield Violation(f"weight @{weight.name}: {list(ends)} are no ranges of @{weight.of}")
                want[axis] = sum(ends[1::2]) - sum(ends[::2])
        if weight.turned and len(want) == 2 and isinstance(want[0], int):
            want = [want[1] * weight.turned, want[0] // weight.turned]
        if weight.type != (part := whole.with_shape(*want)):
            yield Violation(f"weight @{weight.name} is {weight.type}, its part of @{weight.of} is {part}")


def outputs_bound(graph: Graph) -> Iterator[Violation]:
    """Every output is a value of the graph."""
    bound = {i.name for i in graph.inputs} | {n.name for n in _nodes(graph)}
    for output in graph.outputs:
        if output.value not in bound:
            yield Violation(f"output {output.name!r} is {output.value!r}, which is bound nowhere")


# ---- logical ---------------------------------------------------------------------
def ops_known(graph: logical.Graph) -> Iterator[Violation]:
    """An operation is one of flashrt/ir/ops.py, or a raw operator with a dot in its name (`aten.mul`)."""
    for at, node in enumerate(graph.nodes):
        if node.op not in ops.OPS and "." not in node.op:
            known = ", ".join(get_close_matches(node.op, ops.OPS, 3) or ops.OPS)
            yield Violation(f"%{node.name} is {node.op!r}, no operation; known: {known}", at)


def types_follow(graph: logical.Graph) -> Iterator[Violation]:
    """A node has the attributes its operation needs, and the type that its rule gives."""
    types = {"%" + i.name: i.type for i in graph.inputs} | {"@" + w.name: w.type for w in graph.weights}
    for at, node in enumerate(graph.nodes):
        inputs = [types.get(i) for i in node.inputs]
        known = [t for t in inputs if t is not None]
        if len(known) == len(inputs):
            yield from _follows(node, known, at)
        types["%" + node.name] = node.type


def _follows(node: logical.Node, inputs: list[TensorType], at: int) -> Iterator[Violation]:
    try:
        want = ops.infer(node.op, inputs, node.attrs)
    except (ValueError, AssertionError, IndexError, KeyError, TypeError) as error:
        given = ", ".join(map(str, inputs))
        yield Violation(f"{node.op} of %{node.name} can't take ({given}): {error!r}", at)
        return
    if want is not None and want != node.type:
        yield Violation(f"%{node.name} is {node.type}, its inputs make it {want}", at)


# ---- physical --------------------------------------------------------------------
def decided(graph: physical.Graph) -> Iterator[Violation]:
    """Every node has a device, the value it is a shard of, an estimate and a cause."""
    for at, node in enumerate(graph.nodes):
        present = {"device": node.device, "of": node.of, "est": node.est, "because": node.because}
        missing = [name for name, value in present.items() if value in ("", 0)]
        if missing:
            yield Violation(f"%{node.name} lacks {', '.join(missing)}", at)


def transfers_between(graph: physical.Graph) -> Iterator[Violation]:
    """Only a transfer takes a value from another device; graph inputs are on every device."""
    where: dict[str, str] = {}
    for at, node in enumerate(graph.nodes):
        for name in (i[1:] for i in node.inputs if i[:1] == "%"):
            device = where.get(name, node.device)
            if device != node.device and node.op != "transfer":
                yield Violation(f"%{node.name} on {node.device} uses %{name}, which is on {device}", at)
        where[node.name] = node.device


def shards_tile(graph: physical.Graph) -> Iterator[Violation]:
    """The shards that a merge joins are of one value and tile it exactly, wherever the splits stand."""
    nodes = {n.name: n for n in graph.nodes}
    known = Bounds.of(graph)
    for at, node in enumerate(graph.nodes):
        if node.op != "merge":
            continue
        shards = [_carried(i[1:], nodes) for i in node.inputs if i[:1] == "%"]
        found = [n for n in shards if n is not None]
        if len(found) < len(node.inputs):
            continue  # bound_before_use reports it
        for fault in _tiling_faults(node, found):
            yield Violation(f"merge %{node.name}: {fault}", at)
        for part in found:
            if part.shard and not known.at_most(part.shard.lo, part.shard.hi):
                yield Violation(f"merge %{node.name}: %{part.name} may end before it starts", at)


def _carried(name: str, nodes: dict[str, physical.Node]) -> physical.Node | None:
    """The node whose shard a value is: a transfer without a shard of its own carries its input's."""
    node = nodes.get(name)
    for _ in nodes:
        if node is None or node.op != "transfer" or node.shard is not None or not node.inputs:
            break
        node = nodes.get(node.inputs[0][1:])
    return node


def _tiling_faults(merge: physical.Node, shards: list[physical.Node]) -> Iterator[str]:
    for other in shards:
        if other.of != shards[0].of:
            yield f"%{other.name} is a shard of {other.of!r}, %{shards[0].name} one of {shards[0].of!r}"
        if other.shard is None:
            yield f"%{other.name} has no shard"
    spans = [(n.name, n.shard) for n in shards if n.shard is not None]
    if len(spans) < len(shards) or not spans:
        return
    end = merge.shard.hi if merge.shard else (merge.type.shape[-1] if merge.type.shape else 0)
    at = merge.shard.lo if merge.shard else 0
    for name, shard in spans:
        if shard.lo != at:
            yield f"%{name} starts at channel {show(shard.lo)}, expected {show(at)}"
        at = shard.hi
    if at != end:
        yield f"the shards end at channel {show(at)}, the value at {show(end)}"


def splits_move(graph: physical.Graph) -> Iterator[Violation]:
    """A split's positions ascend, are multiples of 16 channels and within the value it cuts; it starts at
    one of them."""
    sizes = _sizes_cut(graph)
    for split in graph.splits:
        size = sizes.get(split.name)
        for fault in _position_faults(split, size):
            yield Violation(f"split {split.name!r}: {fault}")


def _position_faults(split: physical.Split, size: float | None) -> Iterator[str]:
    positions = split.positions
    if not positions:
        yield "has no positions"
        return
    if any(a >= b for a, b in pairwise(positions)):
        yield "positions don't ascend"
    odd = [p for p in positions if p % GRANULE and p != size]
    if odd:
        yield f"positions {odd} aren't multiples of {GRANULE}"
    if min(positions) < 0:
        yield "positions are negative"
    if size is not None and max(positions) > size:
        yield f"positions go beyond the {size:.0f} channels of the value"
    if split.start not in positions:
        yield f"start {split.start} is none of the positions"


def _sizes_cut(graph: physical.Graph) -> dict[str, float]:
    """For each split: the channels of the (smallest) value it cuts."""
    known = Bounds.of(graph)
    groups: dict[str, list[physical.Range]] = defaultdict(list)
    for node in graph.nodes:
        if node.shard is not None:
            groups[node.of].append(node.shard)
    sizes: dict[str, float] = {}
    splits = {s.name for s in graph.splits}
    for shards in groups.values():
        fixed = [known.interval(s.hi)[1] for s in shards if not symbols_of(s.hi) & splits]
        for name in {n for s in shards for n in symbols_of(s.lo) | symbols_of(s.hi)} & splits:
            if fixed:
                sizes[name] = min(max(fixed), sizes.get(name, max(fixed)))
    return sizes


def within_budget(graph: physical.Graph) -> Iterator[Violation]:
    """What the plan puts on a device is within its budget; every device in use has one."""
    for name in _twice(b.device for b in graph.budgets):
        yield Violation(f"device {name} has two budgets")
    for budget in graph.budgets:
        if budget.peak > budget.limit:
            yield Violation(f"device {budget.device} holds {budget.peak} bytes, its budget is {budget.limit}")
    known = {b.device for b in graph.budgets}
    for at, node in enumerate(graph.nodes):
        if known and node.device not in known:
            yield Violation(f"%{node.name} is on {node.device}, which has no budget", at)


def states_stay(graph: physical.Graph) -> Iterator[Violation]:
    """A state is used on one device only."""
    where: dict[str, tuple[str, str]] = {}
    for at, node in enumerate(graph.nodes):
        for state in dict.fromkeys((*node.reads, *node.writes)):
            first, device = where.setdefault(state, (node.name, node.device))
            if device != node.device:
                yield Violation(
                    f"%{node.name} uses state {state!r} on {node.device}, %{first} uses it on {device}", at
                )


# what holds for both levels of graphs
_BOTH: tuple[Law[Any], ...] = (
    Law("bound-once", bound_once, "give it a name of its own"),
    Law("known-sigils", known_sigils, "write %name for a value and @name for a weight"),
    Law(
        "bound-before-use", bound_before_use, "sort the nodes so that every value is bound before it is used"
    ),
    Law("declared", declared, "declare it, or remove the node that uses it"),
    Law(
        "symbols-declared",
        symbols_declared,
        "add a `symbol` line (a `split` line for a split variable) or correct the size",
    ),
    Law("parts-fit", parts_fit, "correct the ranges or the type of the part"),
    Law("outputs-bound", outputs_bound, "name an input or a node, without a sigil"),
)
LOGICAL: tuple[Law[logical.Graph], ...] = (
    *_BOTH,
    Law("ops-known", ops_known, "correct the name, or write a raw operator as aten.<name>"),
    Law("types-follow", types_follow, "correct type, inputs or attributes, or the pass that made the node"),
)
PHYSICAL: tuple[Law[physical.Graph], ...] = (
    *_BOTH,
    Law("decided", decided, "let `place` (or the pass that made the node) fill the fields in"),
    Law("transfers-between", transfers_between, "put a transfer node between the two devices"),
    Law("shards-tile", shards_tile, "make each shard start where the one before it ends, from 0 to the size"),
    Law("splits-move", splits_move, f"use ascending multiples of {GRANULE} from 0 to the value's size"),
    Law("within-budget", within_budget, "place less on the device, or raise its limit"),
    Law("states-stay", states_stay, "place every user of the state on one device"),
)
