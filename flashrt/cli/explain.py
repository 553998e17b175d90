"""`flashrt explain`: what a plan does, what it costs, and why."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

from flashrt.cli.compile import estimate, told_rounded
from flashrt.cli.options import (
    Budgets,
    Chosen,
    Context,
    Devices,
    Fresh,
    Json,
    Model,
    Numerics,
    Placed,
    Tokens,
    Without,
    obtain,
)
from flashrt.cli.terminal import micros, show, show_table, size

if TYPE_CHECKING:
    from flashrt.ir import physical
    from flashrt.program import Plan, Variant

SHOWN = 8  # names of a list in a line of text


def explain(
    model: Model,
    context: Context = None,
    tokens: Tokens = None,
    without: Without = None,
    numerics: Numerics = None,
    device: Devices = None,
    budget: Budgets = None,
    place: Placed = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Shows the plan with the cost and the cause of every placement; loads no weights."""
    compiled = obtain(model, Chosen(context, tokens, without, numerics, device, budget, place), fresh=fresh)
    facts = explanation(compiled.plan)
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    else:
        _print(facts)


def explanation(plan: Plan) -> dict[str, Any]:
    """The plan as data: machine, budgets, and every node with device, estimate, bytes and cause.

    Of a variant, `estimate_us` is what a step takes; `nodes_us` is the sum over its nodes as they were
    placed, before the performance passes.
    """
    from flashrt.weights.index import rounded

    return {
        "name": plan.name,
        "devices": [
            {"id": d.id, "name": d.name, "read_gb_per_s": d.read.value / 1e9, "read_is": d.read.how}
            for d in plan.machine.devices
        ],
        "rounded": rounded(plan.logical.weights, plan.weights),
        "variants": [_variant(v) for v in plan.variants],
    }


def _variant(variant: Variant) -> dict[str, Any]:
    from flashrt.ir.show import typical

    graph, env = variant.physical, dict(typical(variant.physical))
    nodes = [_node(n, env) for n in graph.nodes]
    return {
        "name": variant.name,
        "tokens": [variant.lo, variant.hi],
        "at": env,
        "estimate_us": estimate(variant),
        "nodes_us": sum(n["estimate_us"] for n in nodes),
        "budgets": [
            {"device": b.device, "limit": b.limit, "weights": b.weights, "state": b.state,
             "activations": b.activations, "shared": b.shared, "workspace": b.workspace, "peak": b.peak}
            for b in graph.budgets
        ],
        "host_rows": [n["name"] for n in nodes if n["host"]],
        "nodes": nodes,
    }  # fmt: skip


def _node(node: physical.Node, env: dict[str, int]) -> dict[str, Any]:
    from flashrt.ir.types import evaluate

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


# ---- for a person ------------------------------------------------------------------
def _print(facts: dict[str, Any]) -> None:
    for device in facts["devices"]:
        rate = f"reads {device['read_gb_per_s']:.1f} GB/s ({device['read_is']})"
        show(f"{device['id']}  {device['name']}, {rate}")
    if facts["rounded"]:
        show(told_rounded(facts["rounded"]))
    for variant in facts["variants"]:
        show("")
        _print_variant(variant)


def _print_variant(variant: dict[str, Any]) -> None:
    """One line for nodes that differ only in their layer; columns that would say the same everywhere go."""
    groups = _alike(variant["nodes"])
    causes = {because: _letter(at) for at, because in enumerate(dict.fromkeys(b for _, _, b in groups))}
    devices = {device for _, device, _ in groups}
    total = variant["nodes_us"] or 1.0
    columns = ["node", "device", "cause", "count", "estimate", "share", "bytes"]
    rows = []
    for (name, device, because), nodes in groups.items():
        cost = sum(n["estimate_us"] for n in nodes)
        moved = size(sum(n["bytes"] for n in nodes))
        rows.append(
            [name, device, causes[because], str(len(nodes)), micros(cost), f"{cost / total:.1%}", moved]
        )
    dropped = [1] * (len(devices) == 1) + [2] * (len(causes) == 1)
    kept = [i for i in range(len(columns)) if i not in dropped]
    show_table(
        _title(variant),
        [columns[i] for i in kept],
        [[row[i] for i in kept] for row in rows],
        less=("bytes", "share"),
    )
    if len(causes) == 1:
        show(f"cause: {next(iter(causes))}")
    else:
        for because, letter in causes.items():
            show(f"cause {letter}: {because}")
    _print_sums(variant)


def _title(variant: dict[str, Any]) -> str:
    lo, hi = variant["tokens"]
    steps = f"{variant['name']}, steps of {lo}…{hi} tokens" if hi else variant["name"]
    at = ", ".join(f"{k}={variant['at'][k]}" for k in ("T", "C") if k in variant["at"])
    return f"{steps}: {micros(variant['estimate_us'])}" + (f" at {at}" if at else "")


def _print_sums(variant: dict[str, Any]) -> None:
    placed, after = variant["nodes_us"], variant["estimate_us"]
    if abs(placed - after) > 0.005 * placed:
        show(f"nodes {micros(placed)}, after the performance passes {micros(after)}")
    for budget in variant["budgets"]:
        owners = [o for o in ("weights", "state", "activations", "workspace") if budget[o]]
        show(f"{budget['device']}: " + ", ".join(f"{owner} {size(budget[owner])}" for owner in owners))
        show(
            f"  {size(budget['peak'])} at most, of {size(budget['limit'])}"
            + (f"; {size(budget['shared'])} of weights shared" if budget["shared"] else "")
        )
    if rows := variant["host_rows"]:
        more = " …" if len(rows) > SHOWN else ""
        show(f"on the reference implementation (slow): {', '.join(rows[:SHOWN])}{more}")


def _letter(index: int) -> str:
    """a, b, …, z, aa, ab, …"""
    first, last = divmod(index, 26)
    return (_letter(first - 1) if first else "") + chr(ord("a") + last)


def _alike(nodes: list[dict[str, Any]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Nodes of one device and one cause that differ only in their layer number, in order."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for node in nodes:
        key = (re.sub(r"\.\d+\.", ".*.", node["name"]), node["device"], node["because"])
        groups.setdefault(key, []).append(node)
    return groups
