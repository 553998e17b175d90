"""Outputs that no operation computes: a step has at least one, and writes only what one makes."""

from __future__ import annotations

from dataclasses import replace

from flashrt.ir.logical import Graph, Node
from flashrt.ir.types import Output, TensorType

COPY = "aten.clone"
_VIEWS = frozenset({"aten.view", "aten.squeeze", "aten.unsqueeze"})  # the same elements in another shape


def copied(graph: Graph) -> Graph:
    """Output that is a weight → a copy of it; of a graph of nothing but views, all outputs → copies."""
    computes = any(n.op not in _VIEWS for n in graph.nodes)
    types = {f"@{w.name}": w.type for w in graph.weights}
    types |= {i.name: i.type for i in graph.inputs} | {n.name: n.type for n in graph.nodes}
    outputs, nodes = [], list(graph.nodes)
    taken = {i.name for i in graph.inputs} | {n.name for n in graph.nodes}
    for output in graph.outputs:
        if computes and not output.value.startswith("@"):
            outputs.append(output)
            continue
        node = _copy(output, types[output.value], taken)
        nodes.append(node)
        outputs.append(replace(output, value=node.name))
    return replace(graph, nodes=tuple(nodes), outputs=tuple(outputs))


def _copy(output: Output, kind: TensorType, taken: set[str]) -> Node:
    name = f"{output.name}.copy"
    while name in taken:
        name += "_"
    taken.add(name)
    source = output.value if output.value.startswith("@") else f"%{output.value}"
    return Node(name, COPY, (source,), kind, origin="flashrt")
