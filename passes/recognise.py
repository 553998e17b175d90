"""Names what a model computes: raw `aten.*` operators → the flat operations of flashrt/ir/ops.py.

A raw graph spells RMSNorm, RoPE or a gated activation out in small operators
and carries batch and head axes along ([1,H,T,D]). Here it is read forwards once:
each node is either a view (its elements lie in the memory of an earlier value,
see recognise_views) or has a recipe (recognise_rules). Then the recipes that an
output needs are written, found backwards, written forwards. What no rule fits
stays an `aten.*` node, with explicit views around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flashrt.ir import logical
from flashrt.ir.types import Attrs, TensorType, attrs
from flashrt.passes.latent import latent
from flashrt.passes.recognise_names import module_of, named
from flashrt.passes.recognise_patterns import Reading
from flashrt.passes.recognise_recipes import Raw, Recipe, bases, moved
from flashrt.passes.recognise_rules import recipe
from flashrt.passes.recognise_views import Flat, Shape, View, dense, memory_order

NORMS = frozenset({"rms_norm", "layer_norm"})


def recognise(graph: logical.Graph) -> logical.Graph:
    """raw aten graph → the same outputs in named, flat operations"""
    r, made = _read(graph)
    wanted = _wanted(graph, r, made)
    writer = _Writer(r, made, {v: t for v, t in r.types.items() if v not in r.nodes})
    homes = _homes(made, wanted)
    for value, node in r.nodes.items():
        for nested in homes.get(value, ()):
            writer.argument(nested, node)
        if value in wanted:
            writer.root(node)
    outputs = tuple(replace(o, value=writer.raw(f"%{o.value}")[1:]) for o in graph.outputs)
    used = {a for n in writer.nodes for a in n.inputs}
    used |= {f"@{w.of}" for w in graph.weights if w.of and f"@{w.name}" in used}
    weights = tuple(w for w in graph.weights if f"@{w.name}" in used)
    written = replace(graph, weights=weights, nodes=tuple(writer.nodes), outputs=outputs)
    return latent(named(sink_rows(written), writer.modules))


def _read(graph: logical.Graph) -> tuple[Reading, dict[str, Recipe]]:
    """Every value's type and view, and the recipe of each that isn't a view of another."""
    types = {f"%{i.name}": i.type for i in graph.inputs} | {f"@{w.name}": w.type for w in graph.weights}
    views = {name: dense(name, kind.shape) for name, kind in types.items()}
    nodes: dict[str, logical.Node] = {}
    made: dict[str, Recipe] = {}
    r = Reading(nodes, types, views)
    for node in graph.nodes:
        value = f"%{node.name}"
        nodes[value], types[value] = node, node.type
        view = moved(r, node)
        if view is None:
            views[value] = dense(value, node.type.shape)  # so that rules find the node they look at
            made[value] = recipe(r, node)
            view = View(value, node.type.shape, made[value].strides)
        views[value] = view
    return r, made


def _wanted(graph: logical.Graph, r: Reading, made: Mapping[str, Recipe]) -> set[str]:
    """The values that outputs, or operations that write a state, need."""
    wanted = {r.views[f"%{o.value}"].base for o in graph.outputs}
    for value, node in reversed(list(r.nodes.items())):
        if value in made and (value in wanted or node.writes):
            wanted.add(value)
            wanted.update(bases(made[value], r.views))
    return wanted


def _homes(made: Mapping[str, Recipe], wanted: set[str]) -> dict[str, list[Recipe]]:
    """Recipes inside others, by the raw value beside which they are written."""
    out: dict[str, list[Recipe]] = {}
    for value, one in made.items():
        for arg in one.args if value in wanted else ():
            if isinstance(arg, Recipe) and arg.home:
                out.setdefault(arg.home, []).append(arg)
    return out


@dataclass(slots=True)
class _Writer:
    """The nodes written so far.

    types: of all that can be read. done: what a Flat, Recipe or raw value was written as.
    modules: node → module of the model it belongs to, for those that may get another name.
    """

    r: Reading
    made: Mapping[str, Recipe]
    types: dict[str, TensorType]
    nodes: list[logical.Node] = field(default_factory=list)
    done: dict[object, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)

    def root(self, node: logical.Node) -> None:
        """Writes the recipe of a raw node under the node's own name."""
        made = self.made[f"%{node.name}"]
        inputs = tuple(self.argument(a, node) for a in made.args)
        self.nodes.append(replace(node, op=made.op, inputs=inputs, type=made.type, attrs=made.attrs))
        self.types[f"%{node.name}"] = made.type
        if made.op != node.op or made.op.startswith("aten."):
            self.modules[node.name] = module_of(node)

    def argument(self, arg: Flat | Raw | Recipe, near: logical.Node) -> str:
        """The value that an argument of a recipe stands for, written if it wasn't yet."""
        if isinstance(arg, Raw):
            return self.raw(arg.value)
        if isinstance(arg, Flat):
            return self.flat(arg)
        if arg not in self.done:
            inputs = tuple(self.argument(a, near) for a in arg.args)
            self.done[arg] = self.add(near, arg.op, inputs, arg.type, arg.attrs)
        return self.done[arg]

    def add(
        self,
        near: logical.Node | None,
        op: str,
        inputs: tuple[str, ...],
        kind: TensorType,
        values: Attrs = (),
    ) -> str:
        """One more node, named after its first input until `named` finds a better one."""
        value = f"%{inputs[0][1:]}.{op}"
        while value in self.types or value in self.r.types:
            value += "_"
        return self.write(near, value, op, inputs, kind, values)

    def write(
        self,
        near: logical.Node | None,
        value: str,
        op: str,
        inputs: tuple[str, ...],
        kind: TensorType,
        values: Attrs = (),
    ) -> str:
        """A node that isn't the recipe of a raw node, but belongs to where one stands."""
        self.nodes.append(
            logical.Node(value[1:], op, inputs, kind, values, origin=near.origin if near else "")
        )
        self.types[value] = kind
        self.modules[value[1:]] = module_of(near) if near else ""
        return value

    def flat(self, want: Flat) -> str:
        """A value as rows and channels: itself, or a view or slice of it."""
        if want not in self.done:
            near = self.r.nodes.get(want.base)
            value = want.base
            if not want.whole:
                value = self.view(value, want.table, near)
                kind = self.types[value].with_shape(*want.table[:-1], want.hi - want.lo)
                value = self.add(near, "slice", (value,), kind, attrs(lo=want.lo, hi=want.hi))
            self.done[want] = self.view(value, want.shape, near)
        return self.done[want]

    def view(self, value: str, shape: Shape, near: logical.Node | None) -> str:
        """The value in another shape."""
        kind = self.types[value].with_shape(*shape)
        if kind == self.types[value]:
            return value
        if (value, shape) not in self.done:
            op = "aten.view" if value[0] == "@" else "view"  # a weight may be packed
            self.done[value, shape] = self.add(near, op, (value,), kind)
        return self.done[value, shape]

    def raw(self, value: str) -> str:
        """A raw value in its raw shape: a view of what was written, transposed where that lies otherwise."""
        if value not in self.done:
            self.done[value] = self._raw(value)
        return self.done[value]

    def _raw(self, value: str) -> str:
        view, near = self.r.views[value], self.r.nodes.get(value)
        flat = self.r.flat(view)
        if flat is None:
            assert near is not None, value
            inputs = tuple(self.raw(i) for i in near.inputs)
            return self.write(near, value, near.op, inputs, near.type, near.attrs)
        order = memory_order(view)
        inside = self.flat(replace(flat, shape=tuple(view.shape[i] for i in order)))
        if order == tuple(range(len(order))):
            return inside
        kind = self.types[inside].with_shape(*view.shape)
        dims = attrs(dims=tuple(order.index(i) for i in range(len(order))))
        if value in self.types:  # a result that lies transposed: `value` names it as it lies
            return self.add(near, "aten.permute", (inside,), kind, dims)
        return self.write(near, value, "aten.permute", (inside,), kind, dims)


def sink_rows(graph: logical.Graph) -> logical.Graph:
    """rows(norm(x), index) → norm(rows(x, index)), where nothing else reads norm(x)"""
    users: dict[str, int] = {}
    for name in (a for n in graph.nodes for a in n.inputs):
        users[name] = users.get(name, 0) + 1
    for output in graph.outputs:
        users[f"%{output.value}"] = users.get(f"%{output.value}", 0) + 1
    norms = {f"%{n.name}": n for n in graph.nodes if n.op in NORMS and users.get(f"%{n.name}") == 1}
    nodes: list[logical.Node] = []
    moved_to: dict[str, str] = {}
    for node in graph.nodes:
        norm = norms.get(node.inputs[0]) if node.op == "rows" else None
        node = replace(node, inputs=tuple(moved_to.get(a, a) for a in node.inputs))
        if norm is None:
            nodes.append(node)
            continue
        nodes.remove(norm)
        nodes.append(replace(node, inputs=(norm.inputs[0], *node.inputs[1:])))
        nodes.append(replace(norm, inputs=(f"%{node.name}", *norm.inputs[1:]), type=node.type))
        moved_to[f"%{node.name}"] = f"%{norm.name}"
    outputs = tuple(replace(o, value=moved_to.get(f"%{o.value}", f"%{o.value}")[1:]) for o in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)
