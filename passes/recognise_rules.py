"""Raw operators → named, flat operations: one function a rewrite, tried in the order of `RULES`."""

from __future__ import annotations

from collections.abc import Callable

from flashrt.ir import logical
from flashrt.ir.types import Expr, TensorType, attrs, product
from flashrt.passes import recognise_patterns as patterns
from flashrt.passes import recognise_rotary as rotary
from flashrt.passes.recognise_elementwise import (
    activation,
    add,
    elementwise,
    gated,
    mul,
    scale,
    softcap,
    square,
)
from flashrt.passes.recognise_latent import latent_attention
from flashrt.passes.recognise_moe import moe
from flashrt.passes.recognise_patterns import Reading
from flashrt.passes.recognise_recipes import Raw, Recipe, ints, pointwise
from flashrt.passes.recognise_views import Flat, View, compact_strides, dense_strides, permute

F32_EPSILON = 2.0**-23  # what torch takes where an eps is left out
OTHER_DTYPES = frozenset(
    {"aten.embedding", "aten.index", "aten.index_select", "flashrt.attention", "flashrt.moe"}
)

Rule = Callable[[Reading, logical.Node], Recipe | None]


# ---- normalisation --------------------------------------------------------------------
def rms_norm(r: Reading, node: logical.Node) -> Recipe | None:
    """x·rsqrt(mean(x², -1) + eps)·(offset + w) → rms_norm(x, @w) eps width offset; without a weight too."""
    found = None
    for a, b in patterns.sides(node) if node.op == "aten.mul" else ():
        weight, inner = patterns.gain(r, b), patterns.normed(r, a)
        if weight is not None and inner is not None and r.types[weight[0]].shape == inner.x.shape[-1:]:
            found = (inner, weight)
    inner, weight = found or _whole_rms_norm(r, node) or (patterns.normed(r, f"%{node.name}"), None)
    x = r.flat(inner.x) if inner is not None else None
    if inner is None or x is None or inner.x.strides[-1] != 1:
        return None
    width = inner.x.shape[-1]
    assert not isinstance(width, Expr)
    values = attrs(eps=inner.eps, width=width, offset=weight[1] if weight else 0.0, weight=weight is not None)
    return pointwise("rms_norm", node, inner.x, (x, Raw(weight[0])) if weight else (x,), values)


def _whole_rms_norm(
    r: Reading, node: logical.Node
) -> tuple[patterns.Normed, tuple[str, float] | None] | None:
    """aten.rms_norm over the last axis."""
    if node.op != "aten.rms_norm" or node.attr("normalized_shape") != r.views[node.inputs[0]].shape[-1:]:
        return None
    eps = patterns.number(node.attr("eps"))
    inner = patterns.Normed(r.views[node.inputs[0]], F32_EPSILON if eps is None else eps)
    if len(node.inputs) == 1:
        return inner, None
    return (inner, (r.views[node.inputs[1]].base, 0.0)) if patterns.is_vector(r, node.inputs[1]) else None


def layer_norm(r: Reading, node: logical.Node) -> Recipe | None:
    """aten.layer_norm over the last axis, or spelled out → layer_norm(x, @w, @b) eps; @b or both may lack"""
    found = _whole_layer_norm(r, node) or _spelled_layer_norm(r, node)
    if found is None:
        return None
    x, eps, vectors = found
    rows = r.flat(x)
    if rows is None or x.shape[-1:] != rows.shape[-1:] or x.strides[-1] != 1:
        return None
    return pointwise("layer_norm", node, x, (rows, *(Raw(v) for v in vectors)), attrs(eps=eps))


def _whole_layer_norm(r: Reading, node: logical.Node) -> tuple[View, float, tuple[str, ...]] | None:
    """(x, eps, weight and bias) of aten.layer_norm."""
    if node.op != "aten.layer_norm" or (len(node.inputs) == 2 and node.attr("weight", 0) is None):
        return None
    x, eps = r.views[node.inputs[0]], patterns.number(node.attr("eps"))
    if node.attr("normalized_shape") != x.shape[-1:] or eps is None:
        return None
    return (x, eps, node.inputs[1:]) if all(patterns.is_vector(r, i) for i in node.inputs[1:]) else None


def _spelled_layer_norm(r: Reading, node: logical.Node) -> tuple[View, float, tuple[str, ...]] | None:
    """(x, eps, weight) of (x - mean(x, -1))·rsqrt(variance + eps)·w, or without w."""
    for a, b in patterns.sides(node) if node.op == "aten.mul" else ():
        inner = patterns.centred_norm(r, a)
        if inner is not None and patterns.is_vector(r, b) and r.types[b].shape == inner.x.shape[-1:]:
            return inner.x, inner.eps, (b,)
    inner = patterns.centred_norm(r, f"%{node.name}")
    return (inner.x, inner.eps, ()) if inner is not None else None


# ---- rotary positions -------------------------------------------------------------------
def rope(r: Reading, node: logical.Node) -> Recipe | None:
    """x·cos + cat(-x[D/2:], x[:D/2])·sin → rope(x, rope_table(positions, @inv_freq) scale) head_dim

    Of pairs of channels: rope_pairs.
    """
    found = rotary.rotated(r, f"%{node.name}") if node.op == "aten.add" else None
    return _rope(r, node, found.x, found) if found is not None else None


def partial_rope(r: Reading, node: logical.Node) -> Recipe | None:
    """cat(rotated x[:D], x[D:]) of each head → rope of the whole heads, whose table has D channels"""
    if node.op != "aten.cat" or len(node.inputs) != 2:
        return None
    found = rotary.rotated(r, node.inputs[0])
    whole = rotary.joined(found.x, r.views[node.inputs[1]]) if found is not None else None
    return _rope(r, node, whole, found) if whole is not None and found is not None else None


def rope_of_halves(r: Reading, node: logical.Node) -> Recipe | None:
    """cat(x1·cos - x2·sin, x2·cos + x1·sin) of the halves of each head → rope"""
    found = rotary.rotated_halves(r, f"%{node.name}") if node.op == "aten.cat" else None
    return _rope(r, node, found.x, found) if found is not None else None


def _rope(r: Reading, node: logical.Node, x: View, found: rotary.Rotated) -> Recipe | None:
    angles = found.angles
    length, half = r.types[angles.positions].shape[0], r.types[angles.inv_freq].shape[0]
    flat = r.flat(x)
    if flat is None or flat.shape[0] != length or len(flat.shape) != 2 or x.strides[-1] != 1:
        return None
    if found.x.shape[-1] != half * 2:
        return None
    kind = TensorType("f32", (length, half * 2))
    sources = (Raw(angles.positions), Raw(angles.inv_freq))
    table = Recipe("rope_table", sources, kind, (), attrs(scale=angles.scale), angles.home)
    head_dim = x.shape[-1]
    assert not isinstance(head_dim, Expr)
    op = "rope_pairs" if found.pairs else "rope"
    return pointwise(op, node, x, (flat, table), attrs(head_dim=head_dim))


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
        "linear",
        args,
        kind,
        compact_strides(view, node.type.shape),
        attrs(bias=True) if bias is not None else (),
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
    # of the smaller integers, u8 is a mask
    if flat is None or numbers is None or r.types[node.inputs[1]].dtype not in ("i32", "i64"):
        return None
    if numbers.base[0] == "@":  # kernels read an index from a slot
        return None
    if len(flat.shape) != 2 or len(numbers.shape) != 1 or len(index.shape) != 1:
        return None
    if (view.shape[axis], view.strides[axis]) != flat.table:
        return None
    kind = TensorType("f32", (*numbers.shape, flat.shape[1]))
    return Recipe("rows", (flat, numbers), kind, compact_strides(view, node.type.shape))


def _indexed_axis(node: logical.Node) -> int | None:
    """The one axis that a gather of rows takes its index on."""
    if node.op == "aten.index_select":
        return ints(node, "dim")[0]
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


def unrecognised(r: Reading, node: logical.Node) -> Recipe:
    """op(raw values) → the same, in the raw shapes"""
    args = tuple(Raw(i) for i in node.inputs)
    return Recipe(node.op, args, node.type, dense_strides(node.type.shape), node.attrs)


# Larger patterns first. They end in float32: a graph of another precision keeps its operators.
RULES: tuple[Rule, ...] = (
    layer_norm, rms_norm, rope, partial_rope, rope_of_halves, linear, embedding, rows, latent_attention,
    attention, moe, softcap, activation, gated, scale, add, mul, square,
)  # fmt: skip


def recipe(r: Reading, node: logical.Node) -> Recipe:
    """The first rule that fits."""
    inputs = () if node.op in OTHER_DTYPES else node.inputs
    plain = all(kind.dtype == "f32" for kind in (node.type, *(r.types[i] for i in inputs)))
    for rule in RULES if plain else ():
        found = rule(r, node)
        if found is not None and _reads_values(r, found):
            return found
    return elementwise(r, node) or unrecognised(r, node)


def _reads_values(r: Reading, made: Recipe) -> bool:
    """Whether an operation's operands are values, after the first also vectors: matrices may be packed."""
    flats = [(i, a.base) for i, a in enumerate(made.args) if isinstance(a, Flat)]
    return all(base[0] == "%" or (i > 0 and len(r.types[base].shape) <= 1) for i, base in flats)
