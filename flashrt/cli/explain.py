"""`flashrt explain`: what a plan does, what it costs, and why."""

from __future__ import annotations

import re
from typing import Any

from rich.table import Table

from flashrt.cli.terminal import micros, out, size
from flashrt.ir import physical
from flashrt.ir.types import evaluate
from flashrt.program import Plan, Variant


def explanation(plan: Plan) -> dict[str, Any]:
    """The plan as data: machine, budgets, and every node with device, estimate, bytes and cause."""
    return {
        "name": plan.name,
        "devices": [
            {"id": d.id, "name": d.name, "read_gb_per_s": d.read.value / 1e9, "read_is": d.read.how}
            for d in plan.machine.devices
        ],
        "variants": [_variant(v) for v in plan.variants],
    }


def _variant(variant: Variant) -> dict[str, Any]:
    graph = variant.physical
    env = {s.name: s.hint for s in graph.symbols}
    nodes = [_node(n, env) for n in graph.nodes]
    return {
        "name": variant.name,
        "tokens": [variant.lo, variant.hi],
        "at": env,
        "estimate_us": sum(n["estimate_us"] for n in nodes),
        "budgets": [
            {"device": b.device, "limit": b.limit, "weights": b.weights, "state": b.state,
             "activations": b.activations}
            for b in graph.budgets
        ],
        "host_rows": [n["name"] for n in nodes if n["host"]],
        "nodes": nodes,
    }  # fmt: skip


def _node(node: physical.Node, env: dict[str, int]) -> dict[str, Any]:
    return {
        "name": node.name,
        "op": node.op,
        "device": node.device,
        "numerics": node.numerics,
        "estimate_us": float(evaluate(node.est, env)),
        "bytes": float(evaluate(node.bytes, env)),
        "host": "reference implementation" in node.because,
        "because": node.because,
    }


def print_explanation(facts: dict[str, Any]) -> None:
    """The same for a person: nodes that differ only in their layer number are one line."""
    for device in facts["devices"]:
        out.print(
            f"{device['id']}  {device['name']}, "
            f"reads {device['read_gb_per_s']:.1f} GB/s ({device['read_is']})",
            soft_wrap=True,
        )
    for variant in facts["variants"]:
        _print_variant(variant)


def _print_variant(variant: dict[str, Any]) -> None:
    at = ", ".join(f"{k}={variant['at'][k]}" for k in ("T", "C") if k in variant["at"])
    lo, hi = variant["tokens"]
    out.print()
    title = f"{variant['name']}: steps of {lo}…{hi} tokens" if hi else variant["name"]
    table = Table(title=f"{title}, {micros(variant['estimate_us'])} at {at}", title_justify="left")
    table.add_column("nodes", no_wrap=True)
    for name in ("device", "cause"):
        table.add_column(name)
    for name in ("count", "estimate", "share", "moves"):
        table.add_column(name, justify="right", no_wrap=True)
    total = variant["estimate_us"] or 1.0
    causes: dict[str, str] = {}
    for (name, because), group in _alike(variant["nodes"]).items():
        letter = causes.setdefault(because, _letter(len(causes)))
        cost = sum(n["estimate_us"] for n in group)
        table.add_row(
            name,
            group[0]["device"],
            letter,
            str(len(group)),
            micros(cost),
            f"{cost / total:.1%}",
            size(sum(n["bytes"] for n in group)),
        )
    out.print(table)
    for because, letter in causes.items():
        out.print(f"{letter}: {because}", soft_wrap=True)
    for budget in variant["budgets"]:
        out.print(
            f"{budget['device']}: weights {size(budget['weights'])}, state {size(budget['state'])}, "
            f"activations {size(budget['activations'])} of {size(budget['limit'])}",
            soft_wrap=True,
        )
    if variant["host_rows"]:
        out.print(
            f"on the reference implementation (slow): {', '.join(variant['host_rows'][:8])}"
            + (" …" if len(variant["host_rows"]) > 8 else ""),
            soft_wrap=True,
        )


def _letter(index: int) -> str:
    """a, b, …, z, aa, ab, …"""
    first, last = divmod(index, 26)
    return (_letter(first - 1) if first else "") + chr(ord("a") + last)


def _alike(nodes: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Nodes that differ only in their layer number and have one cause, in order."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for node in nodes:
        key = (re.sub(r"\.\d+\.", ".*.", node["name"]), node["because"])
        groups.setdefault(key, []).append(node)
    return groups
