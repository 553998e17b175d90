"""Fewer, larger products: linears that read one value become one, and a residual sum joins its linear.

Both give the same bits as before: an output channel of a linear doesn't depend
on its neighbours, and a residual is added last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flashrt.ir import logical
from flashrt.ir.types import TensorType, Weight, attrs
from flashrt.layouts import LAYOUTS

ALIGN = 16  # output channels in a record of the packed layouts
JOINED: Mapping[tuple[str, ...], str] = {
    ("q_proj", "k_proj", "v_proj"): "qkv",
    ("q_proj", "k_proj"): "qk",
    ("k_proj", "v_proj"): "kv",
    ("query", "key", "value"): "qkv",
    ("gate_proj", "up_proj"): "gate_up",
}


def fuse(graph: logical.Graph) -> logical.Graph:
    """linears of one value → one linear and slices; add(x, linear(y)) → linear(y) with residual x"""
    return fuse_residuals(fuse_siblings(graph))


# ---- linears side by side -----------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Group:
    """Linears that read one value, and the linear they become."""

    parts: tuple[logical.Node, ...]
    name: str
    weight: Weight
    bias: Weight | None

    @property
    def nodes(self) -> list[logical.Node]:
        """The joint linear, and slices under the names of the parts."""
        first = self.parts[0]
        width = self.weight.type.shape[0]
        weights = [f"@{w.name}" for w in (self.weight, self.bias) if w is not None]
        kind = first.type.with_shape(first.type.shape[0], width)
        out = [replace(first, name=self.name, inputs=(first.inputs[0], *weights), type=kind)]
        lo = 0
        for part in self.parts:
            hi = lo + _channels(part)
            values = attrs(lo=lo, hi=hi)
            out.append(
                logical.Node(part.name, "slice", (f"%{self.name}",), part.type, values, origin=part.origin)
            )
            lo = hi
        return out


def fuse_siblings(graph: logical.Graph) -> logical.Graph:
    """q(x), k(x), v(x) → qkv(x) and a slice for each; the weights are joined along axis 0"""
    weights = {f"@{w.name}": w for w in graph.weights}
    groups = _groups(graph, weights)
    first = {g.parts[0].name: g for g in groups}
    gone = {p.name for g in groups for p in g.parts}
    nodes: list[logical.Node] = []
    for node in graph.nodes:
        if node.name in first:
            nodes += first[node.name].nodes
        elif node.name not in gone:
            nodes.append(node)
    return replace(graph, weights=_joined_weights(graph, groups), nodes=tuple(nodes))


def _groups(graph: logical.Graph, weights: Mapping[str, Weight]) -> list[_Group]:
    reads = Counter(a for n in graph.nodes for a in n.inputs)
    siblings: dict[object, list[logical.Node]] = {}
    for node in graph.nodes:
        if (
            node.op == "linear"
            and node.attr("residual") is not True
            and all(reads[a] == 1 for a in node.inputs[1:])
        ):
            w = weights[node.inputs[1]]
            if _channels(node) % _group_rows(w.layout) == 0:
                alike = (node.inputs[0], w.layout, w.type.shape[1], node.attrs, node.numerics)
                siblings.setdefault(alike, []).append(node)
    taken = {n.name for n in graph.nodes} | {i.name for i in graph.inputs}
    return [_group(parts, weights, taken) for parts in siblings.values() if len(parts) > 1]


def _group_rows(layout: str) -> int:
    """Output channels that a layout stores as one record: where a weight may be cut."""
    return LAYOUTS[layout].rows if layout in LAYOUTS else ALIGN


def _channels(node: logical.Node) -> int:
    width = node.type.shape[-1]
    assert isinstance(width, int), node.name
    return width


def _group(parts: Sequence[logical.Node], weights: Mapping[str, Weight], taken: set[str]) -> _Group:
    name = joint_name([p.name for p in parts])
    while name in taken:
        name += "+"
    taken.add(name)
    columns = list(zip(*(p.inputs[1:] for p in parts), strict=True))
    weight = _join(f"{name}.weight", [weights[a] for a in columns[0]])
    bias = _join(f"{name}.bias", [weights[a] for a in columns[1]]) if len(columns) > 1 else None
    return _Group(tuple(parts), name, weight, bias)


def _join(name: str, parts: Sequence[Weight]) -> Weight:
    rows = sum(size for p in parts if isinstance(size := p.type.shape[0], int))
    kind = parts[0].type.with_shape(rows, *parts[0].type.shape[1:])
    return Weight(name, kind, tuple(s for p in parts for s in p.sources), parts[0].layout)


def joint_name(names: Sequence[str]) -> str:
    """`layers.3.self_attn.qkv` for its q_proj, k_proj and v_proj; others as `a+b` behind what they share."""
    families: dict[str, list[str]] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        families.setdefault(module, []).append(last)
    modules = [m.split(".") if m else [] for m in families]
    shared = 0
    while all(len(m) > shared and m[shared] == modules[0][shared] for m in modules):
        shared += 1
    parts = [JOINED.get(tuple(family), "+".join(family)) for family in families.values()]
    own = [".".join([*m[shared:], part]) for m, part in zip(modules, parts, strict=True)]
    return ".".join([*modules[0][:shared], "+".join(own)])


def _joined_weights(graph: logical.Graph, groups: Iterable[_Group]) -> tuple[Weight, ...]:
    """The declarations, a joint weight where the first of its parts stood."""
    at: dict[str, Weight] = {}
    gone: set[str] = set()
    for group in groups:
        for place, joint in ((1, group.weight), (2, group.bias)):
            if joint is not None:
                parts = [p.inputs[place][1:] for p in group.parts]
                at[parts[0]] = joint
                gone.update(parts)
    return tuple(at.get(w.name, w) for w in graph.weights if w.name in at or w.name not in gone)


# ---- residual sums ------------------------------------------------------------------------
def fuse_residuals(graph: logical.Graph) -> logical.Graph:
    """add(x, linear(y)) → linear(y, residual=x), where nothing else reads the linear"""
    reads = Counter(a for n in graph.nodes for a in n.inputs)
    reads.update(f"%{o.value}" for o in graph.outputs)
    makers = {f"%{n.name}": n for n in graph.nodes}
    order = {f"%{n.name}": i for i, n in enumerate(graph.nodes)}
    joined: dict[str, logical.Node] = {}  # name of the add → the linear with residual
    for node in graph.nodes:
        candidates = [a for a in node.inputs if _takes_residual(makers.get(a), node, reads)]
        if node.op == "add" and candidates:
            chosen = max(candidates, key=lambda a: order[a])
            other = node.inputs[1] if node.inputs[0] == chosen else node.inputs[0]
            if _type_of(other, graph, makers) == node.type:
                joined[node.name] = _with_residual(makers[chosen], other)
    return _replaced(graph, joined)


def _takes_residual(maker: logical.Node | None, add: logical.Node, reads: Counter[str]) -> bool:
    return (
        maker is not None
        and maker.op == "linear"
        and maker.attr("residual") is not True
        and reads[f"%{maker.name}"] == 1
        and maker.type == add.type
    )


def _type_of(value: str, graph: logical.Graph, makers: Mapping[str, logical.Node]) -> TensorType | None:
    if value in makers:
        return makers[value].type
    return next((i.type for i in graph.inputs if value == f"%{i.name}"), None)


def _with_residual(linear: logical.Node, residual: str) -> logical.Node:
    values = attrs(**dict(linear.attrs), residual=True)
    return replace(linear, inputs=(*linear.inputs, residual), attrs=values)


def _replaced(graph: logical.Graph, joined: Mapping[str, logical.Node]) -> logical.Graph:
    """Each linear in the place of its add, whose readers now read the linear."""
    names = {add: linear.name for add, linear in joined.items()}
    moved = set(names.values())

    def refer(value: str) -> str:
        return f"%{names.get(value[1:], value[1:])}" if value[0] == "%" else value

    nodes = []
    for node in graph.nodes:
        if node.name not in moved:
            node = joined.get(node.name, node)
            nodes.append(replace(node, inputs=tuple(map(refer, node.inputs))))
    outputs = tuple(replace(o, value=names.get(o.value, o.value)) for o in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)
