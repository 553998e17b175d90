"""Shapes of computation that models spell out in small operators, found by looking back from a value.

Each function answers for one value: the parts of the pattern that ends in it,
or None. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flashrt.ir import logical
from flashrt.ir.types import Dim, Expr, TensorType, Value
from flashrt.passes.recognise_views import Flat, View, flat, narrow

GELU_TANH_INNER, GELU_TANH_CUBE = 0.7978845608028654, 0.044715  # sqrt(2/pi), and the cubic term
INTEGERS = frozenset({"i64", "i32", "i16", "i8", "u8"})


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
    if mean is None or not _last_axis(mean.attr("dim"), len(x.shape)) or not mean.attr("keepdim"):
        return None
    square = r.maker(mean.inputs[0], "aten.pow", "aten.mul")
    if square is None or any(r.views[i] != x for i in square.inputs):
        return None
    if square.op == "aten.pow" and number(square.attr("exponent")) != 2:
        return None
    return eps if square.op == "aten.pow" or len(square.inputs) == 2 else None


def _last_axis(dims: Value, rank: int) -> bool:
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


@dataclass(frozen=True, slots=True)
class Angles:
    """`scale` times a function of positions[T] · inv_freq[D/2].

    doubled: the D/2 angles stand twice. home: the value that this was read from.
    """

    positions: str
    inv_freq: str
    scale: float
    doubled: bool
    home: str = field(compare=False)


def trigonometric(r: Reading, value: str, op: str) -> Angles | None:
    """cos or sin (`op`) of position·inv_freq, or of cat(them, them); a factor before or after."""
    scale = 1.0
    node = r.maker_of_axes(value, "aten.mul", op)
    if node is not None and node.op == "aten.mul":
        factor = scalar(node)
        if factor is None:
            return None
        scale, node = factor, r.maker_of_axes(node.inputs[0], op)
    if node is None:
        return None
    twice = r.maker_of_axes(node.inputs[0], "aten.cat")
    if twice is not None:
        parts = {r.views[i] for i in twice.inputs}
        if (
            len(twice.inputs) != 2
            or len(parts) != 1
            or not _last_axis(twice.attr("dim", 0), len(twice.type.shape))
        ):
            return None
    found = _angles(r, twice.inputs[0] if twice is not None else node.inputs[0])
    return Angles(*found, scale, twice is not None, r.views[value].base) if found is not None else None


def _angles(r: Reading, value: str) -> tuple[str, str] | None:
    """(positions, @inv_freq) of an outer product, made by multiplication or as a matrix product."""
    view = r.views[value]
    node = r.nodes.get(view.base)
    if node is None or node.op not in ("aten.mul", "aten.matmul", "aten.bmm"):
        return None
    if set(view.axes) != set(r.views[view.base].axes) or view.offset != 0:
        return None
    for a, b in sides(node):
        w = r.views[b]
        positions = _positions(r, a)
        if positions is None or not is_vector(r, b):
            continue
        axes = [n for n in r.types[value].shape if n != 1]
        if axes == [r.types[positions].shape[0], *(n for n, _ in w.axes)]:
            return positions, w.base
    return None


def _positions(r: Reading, value: str) -> str | None:
    """An integer vector [T] under casts to float."""
    while (node := r.maker_of_axes(value, "aten.to")) is not None:
        value = node.inputs[0]
    view = r.views[value]
    if r.types[view.base].dtype not in INTEGERS or len(view.axes) != 1:
        return None
    return view.base if r.types[view.base].shape == (view.axes[0][0],) else None


@dataclass(frozen=True, slots=True)
class Rotated:
    """`x` [.., T, D] rotated by the angles of each position; `x` may be part of each head."""

    x: View
    angles: Angles


def rotated(r: Reading, value: str) -> Rotated | None:
    """x·cos + cat(-x[D/2:], x[:D/2])·sin, the angles doubled."""
    node = r.maker(value, "aten.add")
    for a, b in sides(node) if node is not None else ():
        first, second = r.maker(a, "aten.mul"), r.maker(b, "aten.mul")
        if first is None or second is None:
            continue
        for half, sine in sides(second):
            x = _half_turn(r, half)
            sin = trigonometric(r, sine, "aten.sin") if x is not None else None
            if x is None or sin is None or not sin.doubled:
                continue
            for same, cosine in sides(first):
                if r.views[same] == x and trigonometric(r, cosine, "aten.cos") == sin:
                    return Rotated(x, sin) if _along_rows(r, cosine, x) and _along_rows(r, sine, x) else None
    return None


def _half_turn(r: Reading, value: str) -> View | None:
    """x of cat(-x[D/2:], x[:D/2]) on the last axis."""
    node = r.maker(value, "aten.cat")
    rank = len(r.types[value].shape)
    if node is None or len(node.inputs) != 2 or not _last_axis(node.attr("dim", 0), rank):
        return None
    minus = r.maker(node.inputs[0], "aten.neg")
    if minus is None:
        return None
    high, low = r.views[minus.inputs[0]], r.views[node.inputs[1]]
    return joined(low, high, equal=True)


def joined(low: View, high: View, *, equal: bool = False) -> View | None:
    """The view of which `low` and `high` are the two parts along the last axis."""
    n, m = low.shape[-1], high.shape[-1]
    if equal and n != m:
        return None
    whole: Dim = n + m
    both = View(low.base, (*low.shape[:-1], whole), low.strides, low.offset)
    axis = len(low.shape) - 1
    if not isinstance(n, int) or narrow(both, axis, n, m) != high:
        return None
    return both


def _along_rows(r: Reading, table: str, x: View) -> bool:
    """Whether the rows of cos or sin run along the axis of x that is its rows in memory."""
    shape = r.types[table].shape
    shape = (1,) * (len(x.shape) - len(shape)) + shape
    if len(shape) != len(x.shape) or shape[-1] != x.shape[-1]:
        return False
    long = [i for i, n in enumerate(shape[:-1]) if n != 1]
    if len(long) != 1 or shape[long[0]] != x.shape[long[0]]:
        return False
    return isinstance(x.shape[long[0]], Expr)


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
