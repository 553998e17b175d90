"""Elementwise raw operators → named ones on flat values, or the same operator on flat values."""

from __future__ import annotations

from flashrt.ir import logical
from flashrt.ir.types import Attrs, attrs, product
from flashrt.passes import recognise_patterns as patterns
from flashrt.passes.recognise_patterns import Reading
from flashrt.passes.recognise_recipes import Recipe, pointwise
from flashrt.passes.recognise_views import Flat, View, compact_strides, same_order

GATES = frozenset({"silu", "gelu", "gelu_tanh", "relu"})
UNARY = frozenset({
    "abs", "neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "square", "sin", "cos",
    "tanh", "erf", "sigmoid", "silu", "relu", "gelu", "floor", "ceil", "round", "sign", "clamp",
    "clamp_min", "clamp_max", "leaky_relu", "hardtanh", "elu", "softplus", "mish", "hardswish",
    "hardsigmoid", "logical_not", "bitwise_not", "to", "add", "sub", "rsub", "mul", "div", "pow",
    "eq", "ne", "lt", "le", "gt", "ge",
})  # fmt: skip
BINARY = frozenset({
    "add", "sub", "mul", "div", "pow", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge",
    "logical_and", "logical_or",
})  # fmt: skip


def softcap(r: Reading, node: logical.Node) -> Recipe | None:
    """cap·tanh(x / cap) → softcap(x) cap"""
    found = patterns.capped(r, f"%{node.name}")
    return _unary(r, node, "softcap", found[0], attrs(cap=found[1])) if found is not None else None


def activation(r: Reading, node: logical.Node) -> Recipe | None:
    """silu(x), x·sigmoid(x), gelu in one or many operators, … → activation(x) act"""
    found = patterns.activation(r, f"%{node.name}")
    return _unary(r, node, "activation", found[1], attrs(act=found[0])) if found is not None else None


def gated(r: Reading, node: logical.Node) -> Recipe | None:
    """act(gate)·up → gated(gate, up) act"""
    for a, up in patterns.sides(node) if node.op == "aten.mul" else ():
        found = patterns.activation(r, a)
        if found is None or found[0] not in GATES or not same_order(r.views[found[1]], r.views[up]):
            continue
        gate, other = r.flat(r.views[found[1]]), r.flat(r.views[up])
        if gate is not None and other is not None and gate.shape == other.shape:
            return pointwise("gated", node, r.views[up], (gate, other), attrs(act=found[0]))
    return None


def scale(r: Reading, node: logical.Node) -> Recipe | None:
    """x·number or x/number → scale(x) by"""
    by = patterns.scalar(node) if node.op in ("aten.mul", "aten.div") else None
    if by is None or (node.op == "aten.div" and (by == 0 or node.attr("rounding_mode") is not None)):
        return None
    return _unary(r, node, "scale", node.inputs[0], attrs(by=by if node.op == "aten.mul" else 1 / by))


def add(r: Reading, node: logical.Node) -> Recipe | None:
    """a + b of one shape, or b a vector over the rows → add(a, b)"""
    return _binary(r, node, "add")


def mul(r: Reading, node: logical.Node) -> Recipe | None:
    """a · b of one shape, or b a vector over the rows → mul(a, b)"""
    return _binary(r, node, "mul")


def square(r: Reading, node: logical.Node) -> Recipe | None:
    """x² → mul(x, x)"""
    power = patterns.number(node.attr("exponent")) if node.op == "aten.pow" else None
    if len(node.inputs) != 1 or not (node.op == "aten.square" or power == 2):
        return None
    view = r.views[node.inputs[0]]
    x = r.flat(view) if view.shape == node.type.shape else None
    return pointwise("mul", node, view, (x, x), ()) if x is not None else None


def _binary(r: Reading, node: logical.Node, op: str) -> Recipe | None:
    for a, b in patterns.sides(node) if node.op == f"aten.{op}" else ():
        view = r.views[a]
        x = r.flat(view) if view.shape == node.type.shape else None
        y = _operand(r, x, view, r.views[b]) if x is not None else None
        if x is not None and y is not None:
            return pointwise(op, node, view, (x, y), ())
    return None


def _operand(r: Reading, x: Flat, a: View, b: View) -> Flat | None:
    """b as the second operand of x: in the same shape and order, a vector of its channels, or one number."""
    flat = r.flat(b)
    if flat is None:
        return None
    if same_order(a, b):
        return flat if flat.shape == x.shape else None
    size = product(b.shape)
    if size == 1:
        return flat
    channels = [axis for axis in zip(a.shape, compact_strides(a), strict=True) if axis[0] != 1][
        -len(b.axes) :
    ]
    if size == x.shape[-1] and len(x.shape) == 2 and channels == list(b.axes) and _aligned(a, b):
        return Flat(flat.base, flat.table, flat.lo, flat.hi, (size,))
    return None


def _aligned(a: View, b: View) -> bool:
    """Whether the long axes of b are the last long ones of a, and not others of those sizes."""
    pairs = [(n, m) for n, m in zip(reversed(b.shape), reversed(a.shape), strict=False) if m != 1]
    count = sum(n != 1 for n in b.shape)
    return all(n == m for n, m in pairs[:count]) and all(n == 1 for n, _ in pairs[count:])


def elementwise(r: Reading, node: logical.Node) -> Recipe | None:
    """An elementwise operator without a name of its own: the same operator on flat values"""
    op = node.op.removeprefix("aten.")
    if len(node.inputs) == 1 and op in UNARY:
        return _unary(r, node, node.op, node.inputs[0], node.attrs)
    if len(node.inputs) != 2 or op not in BINARY:
        return None
    a, b = (r.views[i] for i in node.inputs)
    x, y = r.flat(a), r.flat(b)
    if x is None or y is None or x.shape != y.shape or not same_order(a, b):
        return None
    return pointwise(node.op, node, a, (x, y), node.attrs)


def _unary(r: Reading, node: logical.Node, op: str, value: str, values: Attrs) -> Recipe | None:
    view = r.views[value]
    x = r.flat(view)
    return (
        pointwise(op, node, view, (x,), values) if x is not None and view.shape == node.type.shape else None
    )
