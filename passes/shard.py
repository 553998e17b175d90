"""How each node may be split by output channels, and whether that could pay.

A linear splits at whole row groups of its packed layout, so that a shard's weights are
one contiguous range of bytes. Everything else stays whole: its weights are small and its
inputs would have to travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashrt.ir import logical
from flashrt.ir.types import Env, evaluate
from flashrt.layouts import LAYOUTS
from flashrt.machine import Machine
from flashrt.passes.cost import Costs


@dataclass(frozen=True, slots=True)
class Cut:
    """unit: a shard is a multiple of so many channels; 0: the node stays whole."""

    unit: int
    because: str


def shard(graph: logical.Graph, costs: Costs, machine: Machine) -> Mapping[str, Cut]:
    """For each node, by name: how it may be split, with the cause."""
    if len(machine.devices) < 2:
        return {n.name: Cut(0, "whole: one device") for n in graph.nodes}
    env = {s.name: s.hint for s in graph.symbols}
    layouts = {w.name: w.layout or "f32" for w in graph.weights}
    return {n.name: _cut(n, layouts, costs, machine, env) for n in graph.nodes}


def _cut(node: logical.Node, layouts: Mapping[str, str], costs: Costs, machine: Machine, env: Env) -> Cut:
    layout = layouts.get(node.inputs[1][1:]) if node.op == "linear" else None
    if layout is None:
        return Cut(0, "whole: only products with weights split")
    times = sorted((evaluate(costs.of(node.name, d.id).est, env), d.id) for d in machine.devices)
    (first, here), (second, there) = times[0], times[1]
    gain = first - 1 / (1 / max(first, 1e-9) + 1 / max(second, 1e-9))
    link = machine.link(there, here)
    moving = 2 * link.latency.value + evaluate(node.type.bytes, env) / link.rate.value * 1e6
    figures = f"sharing with {there} saves at most {gain:.4g} us, moving costs {moving:.4g} us"
    if gain <= moving:
        return Cut(0, f"whole: {figures}")
    return Cut(LAYOUTS[layout].rows, f"may split: {figures}")
