"""Names of recognised nodes: where in the model they stand, and what they are there.

A raw graph names its nodes `<module>.<operator>`; the node that stands for a
whole module takes the module's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashrt.ir import logical

MODULES = frozenset(
    {"linear", "embedding", "rms_norm", "layer_norm", "rope_table", "activation", "expert_sum"}
)
SHORT = {"self_attn": "attn"}
Use = tuple[logical.Node, int]


def module_of(node: logical.Node) -> str:
    """The path of the module a raw node belongs to, as far as the node's name repeats it: `layers.3.mlp`."""
    path, _, operator = node.origin.partition(" ")
    if not operator:
        return ""
    while path and node.name != path and not node.name.startswith(f"{path}."):
        path = path.partition(".")[2]
    return path


def named(graph: logical.Graph, modules: Mapping[str, str]) -> logical.Graph:
    """Every node under its final name. modules: node → its module; others keep their name."""
    names = _Names(graph, modules)
    return rename(graph, {n.name: names.claim(n) for n in graph.nodes if n.name in modules})


def rename(graph: logical.Graph, names: Mapping[str, str]) -> logical.Graph:
    """Nodes, and what reads them, under other names."""

    def refer(value: str) -> str:
        return f"%{names.get(value[1:], value[1:])}" if value[0] == "%" else value

    nodes = tuple(
        replace(n, name=names.get(n.name, n.name), inputs=tuple(map(refer, n.inputs))) for n in graph.nodes
    )
    outputs = tuple(replace(o, value=names.get(o.value, o.value)) for o in graph.outputs)
    return replace(graph, nodes=nodes, outputs=outputs)


class _Names:
    """Chooses names in the order of the nodes; each is given once."""

    def __init__(self, graph: logical.Graph, modules: Mapping[str, str]) -> None:
        self.modules = modules
        self.taken = {i.name for i in graph.inputs} | {n.name for n in graph.nodes if n.name not in modules}
        self.final: dict[str, str] = {}
        self.makers = {n.name: n for n in graph.nodes}
        self.users: dict[str, list[Use]] = {}
        for node in graph.nodes:
            for place, value in enumerate(node.inputs):
                self.users.setdefault(value[1:], []).append((node, place))

    def claim(self, node: logical.Node) -> str:
        """A name for the node that no other has."""
        want = self.wish(node)
        name, count = want, 1
        while name in self.taken:
            count += 1
            name = f"{want}.{count}"
        self.taken.add(name)
        self.final[node.name] = name
        return name

    def wish(self, node: logical.Node) -> str:
        """What the node should be called."""
        module = self.modules[node.name]
        match node.op:
            case op if op in MODULES and module:
                return module
            case "expert_linear":
                return node.inputs[1][1:].removesuffix("_proj")
            case "attention" | "gated" | "gated_clamped" | "softcap" | "route":
                return f"{module}.{node.op}".lstrip(".")
            case "rope" | "rope_pairs":
                role = self.role(node)
                return f"{module}.rope_{role}" if role else f"{module}.rope"
            case "rows":
                return "logit_rows"
            case "slice":
                return self.wish_slice(node)
            case "view":
                return f"{self.final.get(node.inputs[0][1:], node.inputs[0][1:])}.view"
            case "add":
                return self.wish_residual(node, module)
        return f"{module}.{node.op.removeprefix('aten.')}" if node.name == module else node.name

    def role(self, node: logical.Node) -> str:
        """q, k or v by the place where attention reads it, gate or up by that of `gated`; else ""."""
        users = self.users.get(node.name, [])
        if len(users) != 1:
            return ""
        user, place = users[0]
        if user.op == "attention":
            return "qkv"[place] if place < 3 else ""
        if user.op in ("gated", "gated_clamped"):
            return ("gate", "up")[place]
        return self.role(user) if user.op in ("rope", "rope_pairs", "rms_norm", "view") and place == 0 else ""

    def wish_slice(self, node: logical.Node) -> str:
        source = self.final.get(node.inputs[0][1:], node.inputs[0][1:])
        role = self.role(node)
        if role:
            return f"{source.rpartition('.')[0]}.{role}".lstrip(".")
        return f"{source}.{node.attr('lo')}_{node.attr('hi')}"

    def wish_residual(self, node: logical.Node, module: str) -> str:
        """`layers.3.attn_residual`: the module, and the part of it whose result is added."""
        for value in reversed(node.inputs):
            maker = self.makers.get(value[1:])
            path = self.modules.get(maker.name, "") if maker is not None and maker.op != "add" else ""
            if module and path.startswith(f"{module}."):
                part = path.removeprefix(f"{module}.").partition(".")[0].removesuffix("_layernorm")
                return f"{module}.{SHORT.get(part, part)}_residual"
        return f"{module}.add" if node.name == module else node.name
