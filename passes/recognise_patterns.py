"""Shapes of computation that models spell out in small operators, found by looking back from a value.

Each function answers for one value: the parts of the pattern that ends in it,
or None. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashrt.ir import logical
from flashrt.ir.types import TensorType, Value
from flashrt.passes.recognise_views import Flat, View, flat

GELU_TANH_INNER, GELU_TANH_CUBE = 0.7978845608028654, 0.044715  # sqrt(2/pi), and the cubic term


@dataclass(frozen=True, slots=True)
class Reading:
    """A raw graph with, for each value, its type and where its elements lie. Names carry their sigil."""

    nodes: Mapping[str, logical.Node]
    types: Mapping[str, TensorType]
    views: Mapping[str, View]

    def maker(self, value: str, *ops: str) -> logical.Node | None:
        """The node (one of `ops`) that computes exactly this value; casts and views between don't count."""
        view = self.views[value]
        node = self.nodes.get(view.base)
        if node is None or node.op not in ops or self.views[view.base] != view:
            return None
        return node

    def maker_of_axes(self, value: str, *ops: str) -> logical.Node | None:
        """As `maker`, with axes of size 1 anywhere."""
        view = self.views[value]
        node = self.nodes.get(view.base)
        if node is None or node.op not in ops:
            return None
        own = self.views[view.base]
        return node if (own.axes, own.offset) == (view.axes, view.offset) else None

    def flat(self, view: View) -> Flat | None:
        """The view as rows and channels of its base, None where it isn't that. A weight only as a whole."""
        found = flat(view, self.views[view.base].shape)
        return None if found is not None and view.base[0] == "@" and not found.whole else found


def number(value: Value) -> float | None:
    """A number, or None."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def scalar(node: logical.Node) -> float | None:
    """The number that a binary operator takes beside its one tensor."""
    return number(node.attr("other")) if len(node.inputs) == 1 else None


def sides(node: logical.Node) -> Iterator[tuple[str, str]]:
    """Both readings of a commutative operator."""
    if len(node.inputs) == 2 and number(node.attr("alpha", 1)) == 1:
        a, b = node.inputs
        yield a, b
        yield b, a


@dataclass(frozen=True, slots=True)
class Normed:
    """`x` over the root mean square of its last axis."""

    x: View
    eps: float


def normed(r: Reading, value: str) -> Normed | None:
    """x·rsqrt(mean(x², -1) + eps), with rsqrt(v), v^-0.5 or a division by sqrt(v)."""
    if (node := r.maker(value, "aten.mul")) is not None:
        pairs = list(sides(node))
    elif (node := r.maker(value, "aten.div")) is not None and len(node.inputs) == 2:
        pairs = [(node.inputs[0], node.inputs[1])]
    else:
        return None
    for x, factor in pairs:
        mean = _root_of(r, factor, divides=node.op == "aten.div")
        if mean is not None and (eps := _mean_square(r, mean, r.views[x])) is not None:
            return Normed(r.views[x], eps)
    return None


def centred_norm(r: Reading, value: str) -> Normed | None:
    """(x - mean(x, -1)) over the root mean square of that."""
    found = normed(r, value)
    minus = r.nodes.get(found.x.base) if found is not None else None
    if found is None or minus is None or minus.op != "aten.sub" or r.views[found.x.base] != found.x:
        return None
    if len(minus.inputs) != 2 or number(minus.attr("alpha", 1)) != 1:
        return None
    x, mean = r.views[minus.inputs[0]], r.maker(minus.inputs[1], "aten.mean")
    if mean is None or not is_last_axis(mean.attr("dim"), len(x.shape)) or not mean.attr("keepdim"):
        return None
    return Normed(x, found.eps) if r.views[mean.inputs[0]] == x else None


def _root_of(r: Reading, value: str, *, divides: bool) -> str | None:
    """v of rsqrt(v) (a factor) or sqrt(v) (a divisor)."""
    root = r.maker(value, "aten.sqrt" if divides else "aten.rsqrt", "aten.pow")
    if root is None or (
        root.op == "aten.pow" and number(root.attr("exponent")) != (0.5 if divides else -0.5)
    ):
        return None
    return root.inputs[0]


def _mean_square(r: Reading, value: str, x: View) -> float | None:
    """eps of mean(x², -1) + eps."""
    plus = r.maker(value, "aten.add")
    eps = scalar(plus) if plus is not None else None
    if plus is None or eps is None:
        return None
    mean = r.maker(plus.inputs[0], "aten.mean")
    if mean is None or not is_last_axis(mean.attr("dim"), len(x.shape)) or not mean.attr("keepdim"):
        return None
    square = r.maker(mean.inputs[0], "aten.pow", "aten.mul")
    if square is None or not all(_equal(r, r.views[i], x) for i in square.inputs):
        return None
    if square.op == "aten.pow" and number(square.attr("exponent")) != 2:
        return None
    return eps if square.op == "aten.pow" or len(square.inputs) == 2 else None


def _equal(r: Reading, a: View, b: View) -> bool:
    """Whether two values are one, or the same difference computed twice."""
    if a == b:
        return True
    one, other = (r.nodes.get(view.base) for view in (a, b))
    if one is None or other is None or (one.op, one.attrs) != (other.op, other.attrs) or one.op != "aten.sub":
        return False
    whole = (r.views[a.base], r.views[b.base]) == (a, b)
    return whole and [r.views[i] for i in one.inputs] == [r.views[i] for i in other.inputs]


def is_last_axis(dims: Value, rank: int) -> bool:
    return dims in ((-1,), (rank - 1,), -1, rank - 1)


def gain(r: Reading, value: str) -> tuple[str, float] | None:
    """(@w, offset) of a vector w, or offset + w."""
    if is_vector(r, value):
        return r.views[value].base, 0.0
    node = r.maker(value, "aten.add")
    if node is None or (offset := scalar(node)) is None or not is_vector(r, node.inputs[0]):
        return None
    return r.views[node.inputs[0]].base, offset


def is_vector(r: Reading, value: str) -> bool:
    """Whether a value is a whole weight with one axis longer than 1, or none."""
    view = r.views[value]
    own = r.views[view.base]
    return view.base[0] == "@" and len(own.shape) <= 1 and (view.axes, view.offset) == (own.axes, 0)


ACTIVATIONS = {"aten.silu": "silu", "aten.relu": "relu", "aten.tanh": "tanh", "aten.sigmoid": "sigmoid"}


def activation(r: Reading, value: str) -> tuple[str, str] | None:
    """(name, x) of an activation: one operator, x·sigmoid(x), or the tanh form of GELU spelled out."""
    node = r.maker(value, *ACTIVATIONS, "aten.gelu", "aten.mul")
    if node is None:
        return None
    if node.op == "aten.gelu":
        return ("gelu_tanh" if node.attr("approximate", "none") == "tanh" else "gelu"), node.inputs[0]
    if node.op != "aten.mul":
        return ACTIVATIONS[node.op], node.inputs[0]
    for a, b in sides(node):
        gate = r.maker(b, "aten.sigmoid")
        if gate is not None and r.views[gate.inputs[0]] == r.views[a]:
            return "silu", a
        if (x := _gelu_tanh(r, a, b)) is not None:
            return "gelu_tanh", x
    return None


def _gelu_tanh(r: Reading, half: str, one_plus: str) -> str | None:
    """x of (0.5·x)·(1 + tanh(sqrt(2/pi)·(x + 0.044715·x³)))."""
    x = _times(r, half, 0.5)
    tanh = _plus(r, one_plus, 1.0)
    node = r.maker(tanh, "aten.tanh") if tanh is not None else None
    inner = _times(r, node.inputs[0], GELU_TANH_INNER) if node is not None else None
    total = r.maker(inner, "aten.add") if inner is not None else None
    if x is None or total is None:
        return None
    for a, b in sides(total):
        cube = _times(r, b, GELU_TANH_CUBE)
        power = r.maker(cube, "aten.pow") if cube is not None else None
        if power is None or number(power.attr("exponent")) != 3:
            continue
        if r.views[a] == r.views[x] == r.views[power.inputs[0]]:
            return x
    return None


def _times(r: Reading, value: str, factor: float) -> str | None:
    node = r.maker(value, "aten.mul")
    got = scalar(node) if node is not None else None
    return node.inputs[0] if node is not None and got is not None and abs(got - factor) < 1e-7 else None


def _plus(r: Reading, value: str, term: float) -> str | None:
    node = r.maker(value, "aten.add")
    return node.inputs[0] if node is not None and scalar(node) == term else None


def capped(r: Reading, value: str) -> tuple[str, float] | None:
    """(x, cap) of cap·tanh(x / cap)."""
    node = r.maker(value, "aten.mul")
    cap = scalar(node) if node is not None else None
    tanh = r.maker(node.inputs[0], "aten.tanh") if node is not None and cap else None
    inner = r.maker(tanh.inputs[0], "aten.div", "aten.mul") if tanh is not None else None
    by = scalar(inner) if inner is not None else None
    if inner is None or not by or cap is None:
        return None
    divisor = by if inner.op == "aten.div" else 1 / by
    return (inner.inputs[0], cap) if abs(divisor - cap) <= 1e-6 * abs(cap) else None
