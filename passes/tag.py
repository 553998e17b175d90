"""Says which kinds of device may run each operation, best first, and why."""

from __future__ import annotations

from dataclasses import replace

from flashrt.ir import logical
from flashrt.ir.ops import OPS

NO_KERNEL = "no compiled kernel: runs on the reference implementation"


def tag(graph: logical.Graph) -> logical.Graph:
    """node → node affinity=[…] why=…"""
    return replace(graph, nodes=tuple(map(_tagged, graph.nodes)))


def _tagged(node: logical.Node) -> logical.Node:
    if node.op not in OPS:
        return replace(node, affinity=("cpu",), why=NO_KERNEL)
    return replace(node, affinity=OPS[node.op].affinity, why=OPS[node.op].why)
