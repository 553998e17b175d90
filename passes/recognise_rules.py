"""Raw operators → named, flat operations: one function a rewrite, tried in the order of `RULES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flashrt.ir import logical
from flashrt.ir.types import Attrs, Expr, TensorType, attrs, product
from flashrt.passes import recognise_patterns as patterns
from flashrt.passes.recognise_patterns import INTEGERS, Reading
from flashrt.passes.recognise_views import (
    Flat,
    Shape,
    View,
    compact_strides,
    dense_strides,
    drop,
    expand,
    narrow,
    permute,
    reshape,
    same_order,
)

GATES = frozenset({"silu", "gelu", "gelu_tanh", "relu"})
UNARY = frozenset(
    "abs neg exp expm1 log log1p sqrt rsqrt reciprocal square sin cos tanh erf sigmoid silu relu gelu floor ceil "
    "round sign clamp clamp_min clamp_max leaky_relu hardtanh elu softplus mish hardswish hardsigmoid "
    "logical_not bitwise_not to add sub rsub mul div pow eq ne lt le gt ge".split()
)
BINARY = frozenset("add sub mul div pow maximum minimum eq ne lt le gt ge logical_and logical_or".split())


@dataclass(frozen=True, slots=True)
class Raw:
    """A value (or weight) in the shape the raw graph gives it."""

    value: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a value is computed.

    strides: of the raw value's axes in the memory of the result. home: for a recipe inside another,
    the raw value beside which it is written.
    """

    op: str
    args: tuple[Flat | Raw | Recipe, ...]
    type: TensorType
    strides: Shape
    attrs: Attrs = ()
    home: str = ""


Rule = Callable[[Reading, logical.Node], Recipe | None]


# ---- views: nothing is computed -----------------------------------------------------
def moved(r: Reading, node: logical.Node) -> View | None:
    """Where the elements of a view, transpose, slice, … of another value lie; None if it computes or copies."""
    if not node.inputs:
        return None
    if node.op == "aten.cat":
        full = [i for i in node.inputs if product(r.types[i].shape) != 0]
        return r.views[full[0]] if len(full) == 1 else None
    view = r.views[node.inputs[0]]
    shape = node.type.shape
    match node.op.removeprefix("aten."):
        case "view" | "unsqueeze" | "squeeze":
            return reshape(view, shape)
        case "transpose":
            return _transposed(view, node)
        case "t":
            return permute(view, reversed(range(len(shape))))
        case "permute":
            return permute(view, _ints(node, "dims"))
        case "select":
            (axis, index), size = _ints(node, "dim", "index"), view.shape
            if index < 0 and not isinstance(size[axis], int):
                return None
            return drop(narrow(view, axis, index if index >= 0 else index + int(size[axis]), 1), axis)
        case "slice":
            if isinstance(node.attr("start"), Expr):
                return None
            axis, start, step = _ints(node, "dim", "start", "step")
            return narrow(view, axis, start, shape[axis], step)
        case "expand":
            return expand(view, shape)
        case "mul" | "div" if patterns.scalar(node) == 1 and r.types[node.inputs[0]] == node.type:
            return view
        case "add" | "sub" if patterns.scalar(node) == 0 and r.types[node.inputs[0]] == node.type:
            return view
    return None


def _ints(node: logical.Node, *keys: str) -> tuple[int, ...]:
    values = [node.attr(key) for key in keys]
    if len(keys) == 1 and isinstance(values[0], tuple):
        values = list(values[0])
    assert all(isinstance(v, int) for v in values), (node.name, keys, values)
    return tuple(v for v in values if isinstance(v, int))


def _transposed(view: View, node: logical.Node) -> View:
    a, b = _ints(node, "dim0", "dim1")
    order = list(range(len(view.shape)))
    order[a], order[b] = order[b], order[a]
    return permute(view, order)


# ---- normalisation --------------------------------------------------------------------
def rms_norm(r: Reading, node: logical.Node) -> Recipe | None:
    """x·rsqrt(mean(x², -1) + eps)·(offset + w) → rms_norm(x, @w) eps width offset; without a weight too."""
    found = None
    for a, b in patterns.sides(node) if node.op == "aten.mul" else ():
        weight, inner = patterns.gain(r, b), patterns.normed(r, a)
        if weight is not None and inner is not None and r.types[weight[0]].shape == inner.x.shape[-1:]:
            found = (inner, weight)
    bare = patterns.normed(r, f"%{node.name}") if found is None else None
    inner, weight = found if found is not None else (bare, None)
    x = r.flat(inner.x) if inner is not None else None
    if inner is None or x is None or inner.x.strides[-1] != 1:
        return None
    width = inner.x.shape[-1]
    assert not isinstance(width, Expr)
    values = attrs(eps=inner.eps, width=width, offset=weight[1] if weight else 0.0, weight=weight is not None)
    return _pointwise("rms_norm", node, inner.x, (x, Raw(weight[0])) if weight else (x,), values)


def layer_norm(r: Reading, node: logical.Node) -> Recipe | None:
    """aten.layer_norm(x, @w, @b) over the last axis → layer_norm(x, @w, @b) eps"""
    if node.op != "aten.layer_norm" or len(node.inputs) != 3:
        return None
    x = r.views[node.inputs[0]]
    rows = r.flat(x)
    if rows is None or node.attr("normalized_shape") != rows.shape[-1:] != x.shape[-1:] or x.strides[-1] != 1:
        return None
    if not all(patterns.is_vector(r, i) for i in node.inputs[1:]):
        return None
    args = (rows, *(Raw(i) for i in node.inputs[1:]))
    return _pointwise("layer_norm", node, x, args, attrs(eps=node.attr("eps")))


# ---- rotary positions -------------------------------------------------------------------
def rope(r: Reading, node: logical.Node) -> Recipe | None:
    """x·cos + cat(-x[D/2:], x[:D/2])·sin → rope(x, rope_table(positions, @inv_freq) scale) head_dim"""
    found = patterns.rotated(r, f"%{node.name}") if node.op == "aten.add" else None
    return _rope(r, node, found.x, found) if found is not None else None


def partial_rope(r: Reading, node: logical.Node) -> Recipe | None:
    """cat(rotated x[:D], x[D:]) of each head → rope of the whole heads, whose table has D channels"""
    if node.op != "aten.cat" or len(node.inputs) != 2:
        return None
    found = patterns.rotated(r, node.inputs[0])
    whole = patterns.joined(found.x, r.views[node.inputs[1]]) if found is not None else None
    return _rope(r, node, whole, found) if whole is not None and found is not None else None


def _rope(r: Reading, node: logical.Node, x: View, found: patterns.Rotated) -> Recipe | None:
    angles = found.angles
    length, half = r.types[angles.positions].shape[0], r.types[angles.inv_freq].shape[0]
    flat = r.flat(x)
    if flat is None or flat.shape[0] != length or len(flat.shape) != 2 or x.strides[-1] != 1:
        return None
    if found.x.shape[-1] != half * 2:
        return None
    table = Recipe(
        "rope_table", (Raw(angles.positions), Raw(angles.inv_freq)), TensorType("f32", (length, half * 2)), (),
        attrs(scale=angles.scale), angles.home,
    )  # fmt: skip
    head_dim = x.shape[-1]
    assert not isinstance(head_dim, Expr)
    return _pointwise("rope", node, x, (flat, table), attrs(head_dim=head_dim))


# ---- products, tables ---------------------------------------------------------------------
def linear(r: Reading, node: logical.Node) -> Recipe | None:
    """aten.linear(x, @w, @b), or a matrix product with a transposed weight → linear(x, @w, @b)"""
    parts = _product(r, node)
    if parts is None:
        return None
    x, w, bias = parts
    view, shape = r.views[x], r.types[w].shape
    flat = _matrix(r, view)
    if w[0] != "@" or len(shape) != 2 or flat is None or shape[1] != view.shape[-1]:
        return None
    if bias is not None and not (patterns.is_vector(r, bias) and r.types[bias].shape == shape[:1]):
        return None
    args = (flat, Raw(w)) if bias is None else (flat, Raw(w), Raw(bias))
    kind = TensorType("f32", (flat.shape[0], shape[0]))
    return Recipe(
        "linear", args, kind, compact_strides(view, node.type.shape), attrs(bias=True) if bias is not None else ()
    )


def _product(r: Reading, node: logical.Node) -> tuple[str, str, str | None] | None:
    """(x, @w [N,K], bias) of a product with a weight."""
    if node.op == "aten.linear":
        return node.inputs[0], node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if node.op in ("aten.mm", "aten.matmul") and (w := _turned(r, node.inputs[1])):
        return node.inputs[0], w, None
    if node.op == "aten.addmm" and node.attr("alpha", 1) == 1 == node.attr("beta", 1):
        w = _turned(r, node.inputs[2])
        return (node.inputs[1], w, node.inputs[0]) if w else None
    return None


def _turned(r: Reading, value: str) -> str | None:
    """@w [N,K] where the value is its transpose [K,N]."""
    view = r.views[value]
    own = r.views[view.base]
    same = len(own.shape) == 2 and view == permute(own, (1, 0))
    return view.base if same and view.base[0] == "@" else None


def _matrix(r: Reading, view: View) -> Flat | None:
    """The view as [rows, K], K its last axis."""
    flat = r.flat(view)
    if flat is None or not view.shape or (view.strides[-1] != 1 and view.shape[-1] != 1):
        return None
    rows = product(view.shape[:-1])
    return Flat(flat.base, flat.table, flat.lo, flat.hi, (rows, view.shape[-1]))


def embedding(r: Reading, node: logical.Node) -> Recipe | None:
    """aten.embedding(@table, ids) → embedding(ids, @table)"""
    if node.op != "aten.embedding" or node.inputs[0][0] != "@":
        return None
    ids = r.flat(r.views[node.inputs[1]])
    if ids is None or len(ids.shape) != 1:
        return None
    kind = TensorType("f32", (*ids.shape, r.types[node.inputs[0]].shape[1]))
    return Recipe("embedding", (ids, Raw(node.inputs[0])), kind, dense_strides(node.type.shape))


def rows(r: Reading, node: logical.Node) -> Recipe | None:
    """x[:, index] along the rows → rows(x, index)"""
    axis = _indexed_axis(node)
    if axis is None:
        return None
    view, index = r.views[node.inputs[0]], r.views[node.inputs[1]]
    flat, numbers = r.flat(view), r.flat(index)
    if flat is None or numbers is None or r.types[node.inputs[1]].dtype not in INTEGERS:
        return None
    if len(flat.shape) != 2 or len(numbers.shape) != 1 or len(index.shape) != 1 or view.shape[axis] != flat.shape[0]:
        return None
    kind = TensorType("f32", (*numbers.shape, flat.shape[1]))
    return Recipe("rows", (flat, numbers), kind, compact_strides(view, node.type.shape))


def _indexed_axis(node: logical.Node) -> int | None:
    """The one axis that a gather of rows takes its index on."""
    if node.op == "aten.index_select":
        return _ints(node, "dim")[0]
    places = node.attr("indices", (1,))
    if node.op != "aten.index" or len(node.inputs) != 2 or not isinstance(places, tuple):
        return None
    return places.index(1) if places.count(None) == len(places) - 1 and 1 in places else None


# ---- attention -----------------------------------------------------------------------------
def attention(r: Reading, node: logical.Node) -> Recipe | None:
    """flashrt.attention(q[T,H,D], k, v, …) → attention(q[T,H*D], k, v, …)"""
    if node.op != "flashrt.attention":
        return None
    args = (*(_side_by_side(r, i) for i in node.inputs[:3]), *(Raw(i) for i in node.inputs[3:]))
    shape = node.type.shape
    kind = TensorType("f32", (shape[0], shape[1] * shape[2]))
    return Recipe("attention", args, kind, dense_strides(shape), node.attrs)


def _side_by_side(r: Reading, value: str) -> Flat | Recipe:
    """[T,H,D] as [T,H*D]: as it lies, or copied."""
    view = r.views[value]
    flat, shape = r.flat(view), (view.shape[0], view.shape[1] * view.shape[2])
    lies = [s for n, s in zip(view.shape[1:], dense_strides(view.shape)[1:], strict=True) if n != 1]
    if flat is not None and flat.shape == shape and [s for n, s in view.axes[1:]] == lies:
        return flat
    return Recipe("view", (Raw(value),), TensorType("f32", shape), dense_strides(shape))


# ---- elementwise --------------------------------------------------------------------------
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
            return _pointwise("gated", node, r.views[up], (gate, other), attrs(act=found[0]))
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


def _binary(r: Reading, node: logical.Node, op: str) -> Recipe | None:
    for a, b in patterns.sides(node) if node.op == f"aten.{op}" else ():
        view = r.views[a]
        x = r.flat(view) if view.shape == node.type.shape else None
        y = _operand(r, x, view, r.views[b]) if x is not None else None
        if x is not None and y is not None:
            return _pointwise(op, node, view, (x, y), ())
    return None


def _operand(r: Reading, x: Flat, a: View, b: View) -> Flat | None:
    """b as the second operand of x: of the same shape and order, a vector along its channels, or one number."""
    flat = r.flat(b)
    if flat is None:
        return None
    if same_order(a, b):
        return flat if flat.shape == x.shape else None
    size = product(b.shape)
    if size == 1:
        return flat
    channels = [axis for axis in zip(a.shape, compact_strides(a), strict=True) if axis[0] != 1][-len(b.axes) :]
    if size == x.shape[-1] and len(x.shape) == 2 and channels == list(b.axes) and _aligned(a, b):
        return Flat(flat.base, flat.table, flat.lo, flat.hi, (size,))
    return None


def _aligned(a: View, b: View) -> bool:
    """Whether the long axes of b stand where a has axes of those sizes."""
    return all(n in (1, m) for n, m in zip(reversed(b.shape), reversed(a.shape), strict=False))


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
    return _pointwise(node.op, node, a, (x, y), node.attrs)


def _unary(r: Reading, node: logical.Node, op: str, value: str, values: Attrs) -> Recipe | None:
    view = r.views[value]
    x = r.flat(view)
    return _pointwise(op, node, view, (x,), values) if x is not None and view.shape == node.type.shape else None


def _pointwise(
    op: str, node: logical.Node, x: View, args: Sequence[Flat | Raw | Recipe], values: Attrs
) -> Recipe | None:
    """A recipe whose result lies in memory as `x` does."""
    first = args[0]
    assert isinstance(first, Flat)
    return Recipe(op, tuple(args), TensorType(node.type.dtype, first.shape), compact_strides(x), values)


def unrecognised(r: Reading, node: logical.Node) -> Recipe:
    """op(raw values) → the same, in the raw shapes"""
    args = tuple(Raw(i) for i in node.inputs)
    return Recipe(node.op, args, node.type, dense_strides(node.type.shape), node.attrs)


# Larger patterns first. They end in float32: a graph of another precision keeps its operators.
RULES: tuple[Rule, ...] = (
    rms_norm, layer_norm, rope, partial_rope, linear, embedding, rows, attention,
    softcap, activation, gated, scale, add, mul,
)  # fmt: skip


def recipe(r: Reading, node: logical.Node) -> Recipe:
    """The first rule that fits."""
    for rule in RULES if node.type.dtype == "f32" else ():
        found = rule(r, node)
        if found is not None:
            return found
    return elementwise(r, node) or unrecognised(r, node)


def bases(made: Recipe, views: Mapping[str, View]) -> list[str]:
    """The values (with sigil) that a recipe needs."""
    out: list[str] = []
    for arg in made.args:
        match arg:
            case Flat(base=base):
                out.append(base)
            case Raw(value=value):
                out.append(views[value].base)
            case Recipe():
                out += bases(arg, views)
    return out
