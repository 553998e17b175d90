"""Experts and their routers: flashrt.moe(x, ids, weights, @gate_up, @down, …) → route, expert_linear, ….

A router that is spelled out in a known way becomes one `route`. Any other stays as it is, and its numbers
and weights are put side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashrt.ir import logical
from flashrt.ir.types import Attrs, TensorType, attrs, product
from flashrt.passes.recognise_patterns import Reading, is_vector, number, scalar
from flashrt.passes.recognise_recipes import Raw, Recipe
from flashrt.passes.recognise_views import Flat, View, dense_strides

TINY = 1e-12  # what is added to a sum of weights so that it isn't 0


def moe(r: Reading, node: logical.Node) -> Recipe | None:
    """flashrt.moe → expert_sum(down(act(gate_up(x))))"""
    if node.op != "flashrt.moe":
        return None
    x = r.flat(r.views[node.inputs[0]])
    if x is None or len(x.shape) != 2:
        return None
    experts, route = node.attr("experts"), _route(r, node)
    top_k = route.type.shape[1] // 2  # type: ignore[operator]
    gate_up, down, *biases = node.inputs[3:]
    facts = {"experts": experts, "top_k": top_k}
    both = _product(r, x, gate_up, route, biases[:1], attrs(**facts, shared=True))
    half = both.type.shape[1] // 2  # type: ignore[operator]
    assert isinstance(half, int)
    parts = tuple(_slice(both, lo, lo + half) for lo in (0, half))
    inner = _rows(parts[0].type, _gate(node), parts, _gate_attrs(node))
    out = _product(r, inner, down, route, biases[1:], attrs(**facts, shared=False))
    return Recipe("expert_sum", (out, route), node.type, dense_strides(node.type.shape), attrs(top_k=top_k))


def _rows(kind: TensorType, op: str, args: tuple[Flat | Raw | Recipe, ...], values: Attrs) -> Recipe:
    return Recipe(op, args, kind, dense_strides(kind.shape), values)


def _product(
    r: Reading, x: Flat | Recipe, weight: str, route: Recipe, bias: list[str], values: Attrs
) -> Recipe:
    """Every chosen expert's rows of the weight times its row of x."""
    given = dict(values)
    rows, tokens = r.types[weight].shape[0], route.type.shape[0]
    experts, top_k = given["experts"], given["top_k"]
    assert isinstance(experts, int) and isinstance(top_k, int) and isinstance(rows, int)
    kind = TensorType("f32", (tokens * top_k, rows // experts))
    args = (x, Raw(weight), route, *map(Raw, bias))
    return _rows(kind, "expert_linear", args, attrs(**given, bias=bool(bias)))


def _slice(x: Recipe, lo: int, hi: int) -> Recipe:
    return _rows(x.type.with_shape(x.type.shape[0], hi - lo), "slice", (x,), attrs(lo=lo, hi=hi))


def _gate(node: logical.Node) -> str:
    return "gated_clamped" if node.attr("limit") else "gated"


def _gate_attrs(node: logical.Node) -> Attrs:
    if node.attr("limit"):
        return attrs(alpha=node.attr("alpha"), limit=node.attr("limit"))
    return attrs(act=node.attr("act"))


# ---- routers ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Choice:
    """What experts are chosen by: scores of logits, perhaps with a bias, perhaps in some groups only."""

    scores: str
    bias: str | None = None
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"


def _route(r: Reading, node: logical.Node) -> Recipe:
    """The route of an experts node."""
    ids, weights = node.inputs[1:3]
    tokens, top_k = r.types[ids].shape
    kind = TensorType("f32", (tokens, top_k * 2))
    found = _router(r, ids, weights)
    if found is not None:
        logits, bias, values = found
        args = (logits, *((Raw(bias),) if bias else ()))
        return _rows(kind, "route", args, attrs(top_k=top_k, bias=bias is not None, **dict(values)))
    numbers = Recipe("aten.to", (Raw(ids),), r.types[weights], dense_strides(kind.shape), attrs(dtype="f32"))
    return _rows(kind, "aten.cat", (numbers, Raw(weights)), attrs(dim=1))


def _router(r: Reading, ids: str, weights: str) -> tuple[Flat, str | None, Attrs] | None:
    """(logits, bias, attributes) of numbers and weights that a known router gives."""
    top = r.maker(ids, "aten.topk")
    if top is None or top.attr("result") != 1 or not top.attr("largest"):
        return None
    scale, normalise, picked = _weights(r, weights)
    choice = _choice(r, top.inputs[0])
    if choice is None:
        return None
    found = _scored(r, picked, top, choice.scores)
    if found is None:
        return None
    logits, score, summed = found
    flat = r.flat(r.views[logits])
    if flat is None or len(flat.shape) != 2:
        return None
    values = attrs(
        score=score, normalise=normalise or summed, scale=scale,
        groups=choice.groups, top_groups=choice.top_groups, group_score=choice.group_score,
    )  # fmt: skip
    return flat, choice.bias, values


def _weights(r: Reading, value: str) -> tuple[float, bool, str]:
    """(scale, whether over their sum, what they were before) of weights."""
    scale = 1.0
    if (node := r.maker(value, "aten.mul")) is not None and (by := scalar(node)) is not None:
        scale, value = by, node.inputs[0]
    node = r.maker(value, "aten.div")
    if node is not None and len(node.inputs) == 2 and _is_sum(r, node.inputs[1], node.inputs[0]):
        return scale, True, node.inputs[0]
    return scale, False, value


def _is_sum(r: Reading, value: str, of: str) -> bool:
    """Whether a value is the sum of each row, perhaps plus next to nothing."""
    plus = r.maker(value, "aten.add")
    if plus is not None and (tiny := scalar(plus)) is not None and 0 <= tiny <= TINY:
        value = plus.inputs[0]
    node = r.maker(value, "aten.sum")
    same = node is not None and r.views[node.inputs[0]] == r.views[of]
    return same and node is not None and node.attr("dim") == (1,) and bool(node.attr("keepdim"))


def _choice(r: Reading, value: str) -> _Choice | None:
    """What `topk` looks at."""
    groups, top_groups, group_score = 1, 1, "max"
    masked = r.maker(value, "aten.masked_fill")
    if masked is not None:
        found = _grouped(r, masked)
        if found is None:
            return None
        value, (groups, top_groups, group_score) = masked.inputs[0], found
    plus = r.maker(value, "aten.add")
    for scores, bias in _sides(plus):
        if is_vector(r, bias):
            return _Choice(scores, r.views[bias].base, groups, top_groups, group_score)
    return _Choice(value, None, groups, top_groups, group_score)


def _sides(node: logical.Node | None) -> Iterator[tuple[str, str]]:
    if node is not None and len(node.inputs) == 2 and number(node.attr("alpha", 1)) == 1:
        yield node.inputs[0], node.inputs[1]
        yield node.inputs[1], node.inputs[0]


def _grouped(r: Reading, masked: logical.Node) -> tuple[int, int, str] | None:
    """(groups, best groups, how a group is scored) where experts of other groups are masked out.

    masked_fill(c, ~(zeros.scatter(1, topk(score of c's groups)) spread over each group), -inf)
    """
    if number(masked.attr("value")) != float("-inf"):
        return None
    inverse = r.maker(masked.inputs[1], "aten.bitwise_not", "aten.logical_not")
    cast = r.maker(inverse.inputs[0], "aten.to") if inverse is not None else None
    spread = r.maker(cast.inputs[0], "aten.view") if cast is not None else None
    if spread is None:
        return None
    each = r.views[spread.inputs[0]]  # [T, groups, experts of a group]
    mask = r.nodes.get(each.base)
    if mask is None or mask.op != "aten.scatter" or number(mask.attr("value")) != 1:
        return None
    zeros, best = r.maker(mask.inputs[0], "aten.zeros_like"), r.maker(mask.inputs[1], "aten.topk")
    if zeros is None or best is None or best.attr("result") != 1 or len(each.shape) != 3:
        return None
    groups, top_groups = mask.type.shape[-1], best.attr("k")
    assert isinstance(groups, int) and isinstance(top_groups, int)
    score = _group_score(r, best.inputs[0], masked.inputs[0], groups)
    fits = each == View(each.base, each.shape, (groups, 1, 0)) and each.shape[1] == groups
    return (groups, top_groups, score) if fits and score else None


def _group_score(r: Reading, value: str, of: str, groups: int) -> str | None:
    """sum2 or max, where a value scores the groups of `of` so."""
    node = r.maker(value, "aten.sum", "aten.amax", "aten.max")
    if node is None:
        return None
    inside = node.inputs[0]
    name = "max"
    if node.op == "aten.sum":
        two = r.maker(inside, "aten.topk")
        if (
            two is None
            or two.attr("k") != 2
            or two.attr("result") != 0
            or node.attr("dim") not in ((2,), (-1,))
        ):
            return None
        inside, name = two.inputs[0], "sum2"
    whole, part = r.views[of], r.views[inside]
    shape = r.types[inside].shape
    fits = len(shape) == 3 and shape[1] == groups and product(shape) == product(r.types[of].shape)
    return name if fits and part.base == whole.base and part.offset == whole.offset else None


def _scored(r: Reading, picked: str, top: logical.Node, scores: str) -> tuple[str, str, bool] | None:
    """(logits, softmax or sigmoid, whether weights are over their sum) of the weights picked with `top`."""
    after = r.maker(picked, "aten.softmax")
    if (
        after is not None
        and _is_picked(r, after.inputs[0], top)
        and r.views[scores] == r.views[top.inputs[0]]
    ):
        return scores, "softmax", True  # softmax of the chosen logits
    score = r.maker(scores, "aten.softmax", "aten.sigmoid")
    if score is None or (score.op == "aten.softmax" and score.attr("dim") != 1):
        return None
    if not _is_picked(r, picked, top) and not _is_gathered(r, picked, scores, top):
        return None
    if _is_picked(r, picked, top) and r.views[scores] != r.views[top.inputs[0]]:
        return None  # the weights would hold the bias, too
    return score.inputs[0], score.op.removeprefix("aten."), False


def _is_picked(r: Reading, value: str, top: logical.Node) -> bool:
    """Whether a value is the other result of the same topk."""
    node = r.maker(value, "aten.topk")
    same = node is not None and r.views[node.inputs[0]] == r.views[top.inputs[0]]
    return same and node is not None and node.attr("result") == 0 and node.attr("k") == top.attr("k")


def _is_gathered(r: Reading, value: str, scores: str, top: logical.Node) -> bool:
    node = r.maker(value, "aten.gather")
    if node is None or node.attr("dim") != 1 or r.views[node.inputs[0]] != r.views[scores]:
        return False
    return r.views[node.inputs[1]] == r.views[f"%{top.name}"]
