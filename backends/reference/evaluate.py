"""Evaluating nodes and whole logical graphs: the meaning of a graph."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flashrt.backends.reference import aten, registry
from flashrt.backends.reference import attention as paged
from flashrt.backends.reference.arrays import DTYPE, Array, AttrMap, attr_at, shape_at, widen
from flashrt.backends.reference.experts import EXPERTS, expert_cache, expert_linear
from flashrt.backends.reference.ops import NAMED, linear
from flashrt.errors import PlanError
from flashrt.ir import logical
from flashrt.ir.ops import PRODUCTS
from flashrt.ir.types import SYMBOL, TensorType, Weight, show

STATEFUL = ("kv_write", "attention", "flashrt.attention", "expert_cache")


def known(op: str) -> bool:
    """Whether the reference can compute this operation."""
    return op in PRODUCTS or op in NAMED or op in EXPERTS or op in STATEFUL or aten.find(op) is not None


def unknown(op: str) -> PlanError:
    """The error for an operation the reference can't compute."""
    names = [*NAMED, *EXPERTS, *PRODUCTS, *STATEFUL, *(f"aten.{name}" for name in aten.ATEN)]
    close = difflib.get_close_matches(op, names, 6, 0.5) or sorted(NAMED)
    return PlanError(
        f"the reference has no operation {op!r}",
        hint=f"close to it: {', '.join(close)}; all: flashrt/ir/ops.py and backends/reference/aten.py",
    )


def evaluate_node(
    op: str,
    inputs: Sequence[Array],
    attrs: AttrMap,
    out: TensorType,
    numerics: str = "",
    kv: Array | None = None,
) -> Array:
    """The value of one node.

    Args:
        op: an operation of flashrt/ir/ops.py, or `aten.<name>` without overload.
        inputs: its values and weights. Half floats are computed on in float32.
        attrs: its attributes with sizes as numbers. For aten: the arguments that aren't tensors.
        out: its type with a shape of numbers; the result has exactly this dtype and shape.
        numerics: the node's; matters to products and `attention`.
        kv: the state of an attention, f32[P,2,Hk,16,D], or of an `expert_cache`; written in place.

    Raises:
        PlanError: an unknown operation, or a result of another shape.
    """
    wide = [widen(np.asarray(x)) for x in inputs]
    with np.errstate(all="ignore"):
        if op == "linear":
            got: Array = linear(wide, numerics)
        elif op == "expert_linear":
            got = expert_linear(wide, attrs, numerics)
        elif op == "expert_cache":
            assert kv is not None, f"{op} needs its state"
            got = expert_cache(wide, attrs, kv)
        elif op in EXPERTS:
            got = EXPERTS[op](wide, attrs, out)
        elif op in NAMED:
            got = NAMED[op](wide, attrs, out)
        elif op in ("attention", "flashrt.attention"):
            assert kv is not None, f"{op} needs its state"
            got = paged.step(wide, kv, paged.Shape.of(attrs), numerics).reshape(_numbers(out))
        else:
            function = aten.find(op)
            if function is None:
                raise unknown(op)
            got = registry.bind(function, wide, attrs, out)
        return _typed(got, op, out)


def _numbers(out: TensorType) -> tuple[int, ...]:
    return shape_at(out, {})


def _typed(got: Array, op: str, out: TensorType) -> Array:
    got = np.asarray(got)
    if got.shape != _numbers(out):
        raise PlanError(f"{op} gives {list(got.shape)}, its node says {out}")
    return got.astype(DTYPE[out.dtype], copy=False)


def evaluate_graph(
    graph: logical.Graph,
    inputs: Mapping[str, Array],
    weights: Callable[[Weight], Array],
    states: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """Runs a logical graph, raw or recognised, node by node.

    Args:
        inputs: the graph's inputs by name; their shapes say what the symbols are.
        weights: a weight's value in its type (f32, or whole numbers), whatever its layout.
        states: f32 arrays by name; written in place. Missing ones start as zeros with
            one page for each entry of the input `pages`.

    Returns:
        Output name → value.

    Raises:
        PlanError: naming the node: an input is missing, an operation is unknown or doesn't fit.
    """
    env = symbols_of_step(graph, inputs)
    values: dict[str, Array] = {f"%{i.name}": np.asarray(inputs[i.name]) for i in graph.inputs}
    declared = {f"@{w.name}": w for w in graph.weights}
    held = new_states(graph, inputs, env) | dict(states or {})
    for node in graph.nodes:
        args = [values[a] if a[0] == "%" else weights(declared[a]) for a in node.inputs]
        values[f"%{node.name}"] = _evaluate(node, args, env, held)
    return {o.name: values[f"%{o.value}"] for o in graph.outputs}


def _evaluate(
    node: logical.Node, args: Sequence[Array], env: Mapping[str, int], held: Mapping[str, Array]
) -> Array:
    out = TensorType(node.type.dtype, shape_at(node.type, env))
    attrs = {k: attr_at(v, env) for k, v in node.attrs}
    kv = held[node.reads[0]] if node.reads else None
    try:
        return evaluate_node(node.op, args, attrs, out, node.numerics, kv)
    except (PlanError, ValueError, IndexError, TypeError, KeyError) as error:
        shapes = ", ".join(f"{a}: {x.dtype}{list(x.shape)}" for a, x in zip(node.inputs, args, strict=True))
        raise PlanError(f"node %{node.name} ({node.op}): {error}", lines=f"    {shapes}") from error


def symbols_of_step(graph: logical.Graph, inputs: Mapping[str, Array]) -> dict[str, int]:
    """What each symbol is, by the shapes of the inputs. Raises PlanError when one is missing or misshapen."""
    missing = [i.name for i in graph.inputs if i.name not in inputs]
    if missing:
        names = ", ".join(i.name for i in graph.inputs)
        raise PlanError(f"input {missing[0]!r} of {graph.name} is missing", hint=f"inputs: {names}")
    env: dict[str, int] = {}
    for declared in graph.inputs:
        for dim, n in zip(declared.type.shape, np.shape(inputs[declared.name]), strict=False):
            if SYMBOL.match(show(dim)):
                env.setdefault(show(dim), n)
    for declared in graph.inputs:
        shape = np.shape(inputs[declared.name])
        if shape != shape_at(declared.type, env):
            raise PlanError(f"input {declared.name} is {list(shape)}, expected {declared.type} with {env}")
    return env


def new_states(graph: logical.Graph, inputs: Mapping[str, Array], env: Mapping[str, int]) -> dict[str, Array]:
    """Zeros for every state; as many pages as the input `pages` names."""
    pages = int(np.max(inputs["pages"], initial=0)) + 1 if "pages" in inputs else 1
    return {
        s.name: np.zeros(shape_at(s.type, {"P": pages, **env}), DTYPE[s.type.dtype]) for s in graph.states
    }
