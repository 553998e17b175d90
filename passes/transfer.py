"""Makes every edge between devices a node of its own.

%a … device=gpu:0          %a … device=gpu:0
%b = f(%a) device=cpu:0 →  %a@cpu:0 = transfer(%a) device=cpu:0
                           %b = f(%a@cpu:0) device=cpu:0
"""

from __future__ import annotations

from dataclasses import replace

from flashrt.ir import physical
from flashrt.ir.types import evaluate, show
from flashrt.machine import Machine


def transfer(graph: physical.Graph, machine: Machine) -> physical.Graph:
    """Inserts `value@device` once for each value and device that needs it, right after the value.

    Graph inputs need none: they are on every device.
    """
    made = {n.name: n for n in graph.nodes}
    wanted: dict[str, list[str]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            if _crosses(name, node, made) and node.device not in wanted.setdefault(name[1:], []):
                wanted[name[1:]].append(node.device)
    nodes: list[physical.Node] = []
    for node in graph.nodes:
        inputs = tuple(f"{i}@{node.device}" if _crosses(i, node, made) else i for i in node.inputs)
        nodes.append(replace(node, inputs=inputs))
        nodes += (_copy(node, device, graph, machine) for device in wanted.get(node.name, ()))
    return replace(graph, nodes=tuple(nodes))


def _crosses(name: str, node: physical.Node, made: dict[str, physical.Node]) -> bool:
    source = made.get(name[1:]) if name[0] == "%" else None
    return source is not None and source.device != node.device and node.op != "transfer"


def _copy(source: physical.Node, device: str, graph: physical.Graph, machine: Machine) -> physical.Node:
    link = machine.link(source.device, device)
    nbytes = source.type.bytes
    est = nbytes * float(f"{1e6 / link.rate.value:.4g}") + link.latency.value
    env = {s.name: s.hint for s in graph.symbols} | {s.name: s.start for s in graph.splits}
    took = f"{evaluate(est, env):.4g} us at {link.rate.value / 1e9:.4g} GB/s ({link.rate.how})"
    return physical.Node(
        name=f"{source.name}@{device}", op="transfer", inputs=(f"%{source.name}",), type=source.type,
        device=device, of=source.of, shard=source.shard, est=est, bytes=nbytes,
        because=f"{show(nbytes)} bytes from {source.device} are needed on {device}: {took}",
    )  # fmt: skip
