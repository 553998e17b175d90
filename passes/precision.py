"""Chooses how each operation is computed, and checks how each weight is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from flashrt.errors import PlanError
from flashrt.ir import logical
from flashrt.ir.bounds import Bounds
from flashrt.ir.ops import (
    ATTENTION_EXACT,
    EXACT,
    LINEAR_BF16,
    LINEAR_EXACT,
    LINEAR_F16,
    LINEAR_I8,
    OPS,
    PRODUCTS,
)
from flashrt.ir.text import show_node
from flashrt.ir.types import Weight
from flashrt.layouts import LAYOUTS
from flashrt.passes.cost import settings

FEW_ROWS = 16  # too few for matrix units to pay for what they need first
NUMERICS = (LINEAR_EXACT, LINEAR_I8, LINEAR_BF16, LINEAR_F16)


def precision(
    graph: logical.Graph,
    *,
    numerics: str = LINEAR_EXACT,
    few: str = "",
    attention: str = ATTENTION_EXACT,
    exclude: Sequence[str] = (),
    plain: bool = False,
) -> logical.Graph:
    """node, weight → node numerics=…, weight layout=…

    numerics: how linears are computed. With "act=i8/32 acc=f32" those whose weights are
    quantised round their input to INT8 in blocks of 32, with "act=bf16 acc=f32" they round
    both sides to bf16, with "act=f16 acc=f32" to f16 (only NPUs have that); products with
    plain weights stay exact.
    few: the same for linears that have FEW_ROWS rows at most in every step, such as the last one of a
    language model ("": as the others).
    attention: how attention is computed. With "kv=bf16" keys and values are kept in bf16, with "act=bf16"
    queries and weights are rounded to it, too.
    exclude: operations or names, or dotted parts of names (`lm_head`, `layers.0`); linears among them
    stay exact, and so does a joint linear with such a part.
    plain: with "act=bf16 acc=f32" products with bf16 weights round their input, too.

    Raises:
        PlanError: unknown numerics, an `exclude` that nothing fits, or a matrix in no known layout.
    """
    for asked in (numerics, few or numerics):
        if asked not in NUMERICS:
            raise PlanError(f"unknown numerics {asked!r}", hint=f"known: {', '.join(map(repr, NUMERICS))}")
    if settings(attention).get("kv") == "bf16":
        kept = {name for n in graph.nodes if n.op == "attention" for name in n.writes}
        states = tuple(
            replace(s, type=replace(s.type, dtype="bf16")) if s.name in kept else s for s in graph.states
        )
        graph = replace(graph, states=states)
    weights = {f"@{w.name}": _stored(w, graph) for w in graph.weights}
    exact, known = _excluded(graph, exclude), Bounds.of(graph)

    def chosen(node: logical.Node) -> str:
        if node.op == "attention":
            return attention
        short = node.op == "linear" and known.interval(node.type.shape[0])[1] <= FEW_ROWS
        return _numerics(node, weights, few if few and short else numerics, exact, plain)

    nodes = tuple(replace(n, numerics=chosen(n)) for n in graph.nodes)
    return replace(graph, weights=tuple(weights.values()), nodes=nodes)


def _numerics(
    node: logical.Node, weights: Mapping[str, Weight], numerics: str, exact: Set[str], plain: bool
) -> str:
    if node.op not in OPS:
        return EXACT
    if node.op not in PRODUCTS or numerics == LINEAR_EXACT:
        return OPS[node.op].numerics
    layout = LAYOUTS[weights[node.inputs[1]].layout]
    rounds = layout.bits > 0 or (plain and numerics == LINEAR_BF16 and layout.name == "bf16")
    return numerics if rounds and node.name not in exact else LINEAR_EXACT


def _excluded(graph: logical.Graph, exclude: Sequence[str]) -> set[str]:
    """Names of the nodes that `exclude` means, and of the linears they are slices of."""
    found: set[str] = set()
    for part in exclude:
        fits = [n for n in graph.nodes if part == n.op or f".{part}." in f".{n.name}."]
        if not fits:
            linears = (n.name for n in graph.nodes if n.op == "linear")
            known = dict.fromkeys(p for name in linears for p in name.split(".") if not p.isdigit())
            raise PlanError(
                f"nothing is called {part!r}", hint=f"parts of the linears' names: {', '.join(known)}"
            )
        found.update(n.name for n in fits)
        found.update(n.inputs[0][1:] for n in fits if n.op == "slice")
    return found


def _stored(weight: Weight, graph: logical.Graph) -> Weight:
    """The weight with a known layout: vectors and what isn't a matrix in f32."""
    if len(weight.type.shape) != 2:
        return replace(weight, layout="f32")
    if weight.layout in LAYOUTS:
        return weight
    user = next((n for n in graph.nodes if f"@{weight.name}" in n.inputs), None)
    what = f"the unknown layout {weight.layout!r}" if weight.layout else "no layout"
    raise PlanError(
        f"weight {weight.name!r} has {what}",
        lines=f"    {show_node(user)}" if user is not None else "",
        hint=f"layouts: {', '.join(LAYOUTS)}",
    )
