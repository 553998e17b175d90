"""How each node may be split by output channels, and whether that could pay.

A linear splits at whole row groups of its packed layout, so that a shard's weights are
one contiguous range of bytes. Everything else stays whole, or goes with the products it
follows: its weights are small and its inputs would have to travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashrt.ir import logical
from flashrt.ir.graph_laws import GRANULE
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
    """Whole only where not even the fastest way to and fro is shorter than what sharing could save."""
    layout = layouts.get(node.inputs[1][1:]) if node.op == "linear" else None
    if layout is None:
        return Cut(0, "whole: only products with weights split")
    times = sorted((max(evaluate(costs.of(node.name, d.id).est, env), 1e-9), d.id) for d in machine.devices)
    first, here = times[0]
    gain = first - 1 / sum(1 / t for t, _ in times)
    moving = min(
        machine.link(here, d).latency.value + machine.link(d, here).latency.value for _, d in times[1:]
    )
    others = times[1][1] if len(times) == 2 else "the others"
    figures = f"sharing with {others} saves at most {gain:.4g} us, moving takes {moving:.4g} us at least"
    if gain <= moving:
        return Cut(0, f"whole: {figures}")
    return Cut(max(LAYOUTS[layout].rows, GRANULE), f"may split: {figures}")
