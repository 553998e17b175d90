"""Cuts a graph into units that are planned alike: its layers, and what stands before and behind them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashrt.ir import logical
from flashrt.ir.types import Weight

MOST_SETS = 4  # sets of products in a unit outside the layers
EXPERTS = "experts"  # the set of all expert products of a unit
_LAYER = re.compile(r"(.*?(?:^|\.)\d+)(?:\.|$)")  # layers.3.mlp.up → layers.3

# operations on channels that may be computed where the shards of their inputs are
FOLLOWERS = frozenset({"gated", "add", "mul", "activation", "scale", "softcap"})


@dataclass(frozen=True, slots=True)
class Unit:
    """Nodes in order, which one choice places. name: `layers.3`, or that of its first node.

    sets: its products, those of one input together, first of all those of experts: one decision for a layer.
    """

    name: str
    nodes: tuple[logical.Node, ...]
    sets: tuple[tuple[str, ...], ...]


def units(graph: logical.Graph) -> tuple[Unit, ...]:
    """The graph in units. A node outside the layers that stands between two of a layer belongs to it."""
    return tuple(_unit(run) for run in _runs(graph.nodes))


def _unit(nodes: Sequence[logical.Node]) -> Unit:
    sets: dict[str, list[str]] = defaultdict(list)
    if experts := [n.name for n in nodes if n.op == "expert_linear"]:
        sets[EXPERTS] = experts
    for node in nodes:
        if node.op == "linear":
            sets[node.inputs[0]].append(node.name)
    layer = _LAYER.match(nodes[0].name)
    return Unit(layer[1] if layer else nodes[0].name, tuple(nodes), tuple(map(tuple, sets.values())))


def _runs(nodes: Sequence[logical.Node]) -> Iterator[list[logical.Node]]:
    layers = [m[1] if (m := _LAYER.match(n.name)) else "" for n in nodes]
    last = max((i for i, layer in enumerate(layers) if layer), default=-1)
    run: list[logical.Node] = []
    current, inputs = "", set[str]()
    for at, (node, layer) in enumerate(zip(nodes, layers, strict=True)):
        mine = layer or (current if at < last else "")
        product = {node.inputs[0]} if node.op == "linear" else set()
        if run and (mine != current or (not mine and len(inputs | product) > MOST_SETS)):
            yield run
            run, inputs = [], set()
        current = mine
        inputs |= product
        run.append(node)
    if run:
        yield run


def signature(unit: Unit, weights: Mapping[str, Weight], fixed: Mapping[str, object]) -> object:
    """Equal for units that cost the same wherever they are put. fixed: where nodes without a choice are."""

    def of(name: str) -> object:
        return (weights[name[1:]].type, weights[name[1:]].layout) if name[0] == "@" else ""

    return tuple(
        (n.op, n.numerics, n.attrs, n.type, n.affinity, tuple(map(of, n.inputs)), fixed.get(n.name))
        for n in unit.nodes
    )


def lanes(graph: logical.Graph) -> Mapping[str, tuple[logical.Node, ...]]:
    """Joint products whose parts may be cut at the same channel: product → the slices that it consists of.

    They are as wide as each other, and only read side by side, as by `gated`.
    """
    users = users_of(graph)
    outputs = {o.value for o in graph.outputs}
    found = {}
    for node in graph.nodes:
        parts = users[node.name]
        if node.op == "linear" and len(parts) > 1 and _tile(node, parts) and node.name not in outputs:
            names = {p.name for p in parts}
            readers = [u for p in parts for u in users[p.name]]
            if not names & outputs and all(_side_by_side(u, names) for u in readers):
                found[node.name] = tuple(parts)
    return found


def users_of(graph: logical.Graph) -> dict[str, list[logical.Node]]:
    """Value → the nodes that take it."""
    users: dict[str, list[logical.Node]] = defaultdict(list)
    for node in graph.nodes:
        for name in dict.fromkeys(i for i in node.inputs if i[0] == "%"):
            users[name[1:]].append(node)
    return users


def _tile(node: logical.Node, parts: Sequence[logical.Node]) -> bool:
    """Whether slices of one width make up the node."""
    width = parts[0].type.shape[-1]
    at: object = 0
    for part in parts:
        if part.op != "slice" or part.type.shape[-1] != width or part.attr("lo") != at:
            return False
        at = part.attr("hi")
    return at == node.type.shape[-1]


def _side_by_side(user: logical.Node, parts: set[str]) -> bool:
    return user.op in FOLLOWERS and all(i[1:] in parts for i in user.inputs if i[0] == "%")
