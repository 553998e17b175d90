"""Rotary positions as models spell them out, found by looking back from a value (see recognise_patterns)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flashrt.ir import logical
from flashrt.ir.types import Dim, Expr
from flashrt.passes.recognise_patterns import Reading, is_last_axis, is_vector, scalar, sides
from flashrt.passes.recognise_views import View, narrow, reshape

INTEGERS = frozenset({"i64", "i32", "i16", "i8", "u8"})


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
            or not is_last_axis(twice.attr("dim", 0), len(twice.type.shape))
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


def repeated(r: Reading, value: str, op: str) -> Angles | None:
    """As `trigonometric`, each angle standing twice side by side; repeated before or after cos or sin."""
    node = r.maker_of_axes(value, "aten.repeat_interleave")
    if node is None:
        return _of_repeated(r, value, op)
    half = r.views[node.inputs[0]]
    found = trigonometric(r, half.base, op) if _is_twice(node) else None
    if found is None:
        return None
    whole, size = r.views[half.base].axes, r.types[found.inv_freq].shape[0]
    if half.offset != 0 or half.axes[:-1] != whole[:-1] or half.axes[-1] != (size, whole[-1][1]):
        return None
    return replace(found, doubled=True)


def _of_repeated(r: Reading, value: str, op: str) -> Angles | None:
    """cos or sin of the repeated angles, times a factor."""
    scale = 1.0
    node = r.maker_of_axes(value, "aten.mul", op)
    if node is not None and node.op == "aten.mul":
        factor = scalar(node)
        scale, node = factor or 0.0, r.maker_of_axes(node.inputs[0], op)
    twice = r.maker_of_axes(node.inputs[0], "aten.repeat_interleave") if node is not None else None
    found = _angles(r, twice.inputs[0]) if twice is not None and _is_twice(twice) and scale else None
    return Angles(*found, scale, True, r.views[value].base) if found is not None else None


def _is_twice(node: logical.Node) -> bool:
    """Whether a repeat_interleave writes each element of the last axis twice."""
    rank = len(node.type.shape)
    return len(node.inputs) == 1 and node.attr("repeats") == 2 and is_last_axis(node.attr("dim"), rank)


@dataclass(frozen=True, slots=True)
class Rotated:
    """`x` [.., T, D] rotated by the angles of each position; `x` may be part of each head.

    pairs: channels 2i and 2i+1 turn together, not i and i + D/2.
    """

    x: View
    angles: Angles
    pairs: bool


def rotated(r: Reading, value: str) -> Rotated | None:
    """x·cos + cat(-x[D/2:], x[:D/2])·sin, the angles doubled; or the same of pairs."""
    return _rotated(r, value, False) or _rotated(r, value, True)


def _rotated(r: Reading, value: str, pairs: bool) -> Rotated | None:
    turn, angles = (_pair_turn, repeated) if pairs else (_half_turn, trigonometric)
    node = r.maker(value, "aten.add")
    for a, b in sides(node) if node is not None else ():
        first, second = r.maker(a, "aten.mul"), r.maker(b, "aten.mul")
        if first is None or second is None:
            continue
        for half, sine in sides(second):
            x = turn(r, half)
            sin = angles(r, sine, "aten.sin") if x is not None else None
            if x is None or sin is None or not sin.doubled:
                continue
            for same, cosine in sides(first):
                if r.views[same] == x and angles(r, cosine, "aten.cos") == sin:
                    along = _along_rows(r, cosine, x) and _along_rows(r, sine, x)
                    return Rotated(x, sin, pairs) if along else None
    return None


def _pair_turn(r: Reading, value: str) -> View | None:
    """x of (-x[1], x[0], -x[3], x[2], …) on the last axis."""
    view = r.views[value]
    node = r.nodes.get(view.base)
    if node is None or node.op != "aten.stack" or len(node.inputs) != 2:
        return None
    rank = len(node.type.shape)
    if not is_last_axis(node.attr("dim", 0), rank) or reshape(r.views[view.base], view.shape) != view:
        return None
    minus = r.maker(node.inputs[0], "aten.neg")
    even = r.views[node.inputs[1]]
    n, step = even.shape[-1], even.strides[-1]
    if minus is None or not isinstance(n, int) or not isinstance(step, int) or step % 2:
        return None
    axis = len(even.shape) - 1
    x = View(even.base, (*even.shape[:-1], 2 * n), (*even.strides[:-1], step // 2), even.offset)
    both = narrow(x, axis, 0, n, 2), narrow(x, axis, 1, n, 2)
    return x if both == (even, r.views[minus.inputs[0]]) else None


def _half_turn(r: Reading, value: str) -> View | None:
    """x of cat(-x[D/2:], x[:D/2]) on the last axis."""
    node = r.maker(value, "aten.cat")
    rank = len(r.types[value].shape)
    if node is None or len(node.inputs) != 2 or not is_last_axis(node.attr("dim", 0), rank):
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


def rotated_halves(r: Reading, value: str) -> Rotated | None:
    """cat(x1·cos - x2·sin, x2·cos + x1·sin) of the halves x1, x2 of x."""
    node = r.maker(value, "aten.cat")
    if node is None or len(node.inputs) != 2 or not is_last_axis(node.attr("dim", 0), len(node.type.shape)):
        return None
    minus, plus = r.maker(node.inputs[0], "aten.sub"), r.maker(node.inputs[1], "aten.add")
    terms = [r.maker(i, "aten.mul") for n in (minus, plus) if n is not None and _plain(n) for i in n.inputs]
    first = [_turned(r, term) for term in terms if term is not None]
    if len(first) != 4 or None in first:
        return None
    (x1, cos, a), (x2, sin, b), (x3, cos2, c), (x4, sin2, d) = (f for f in first if f is not None)
    if (a, b, c, d) != ("aten.cos", "aten.sin", "aten.cos", "aten.sin"):
        return None
    x = joined(x1, x2, equal=True) if (x1, x2) == (x4, x3) and cos == sin == cos2 == sin2 else None
    return Rotated(x, cos, False) if x is not None and not cos.doubled else None


def _plain(node: logical.Node) -> bool:
    return len(node.inputs) == 2 and node.attr("alpha", 1) == 1


def _turned(r: Reading, node: logical.Node) -> tuple[View, Angles, str] | None:
    """(x, angles, "aten.cos" or "aten.sin") of x times a cosine or sine, whose rows run along x's."""
    for x, table in sides(node):
        for op in ("aten.cos", "aten.sin"):
            found = trigonometric(r, table, op)
            if found is not None and _along_rows(r, table, r.views[x]):
                return r.views[x], found, op
    return None


def rotated_apart(r: Reading, value: str) -> Rotated | None:
    """cat(x1·cos - x2·sin, x2·cos + x1·sin) of the even channels x1 and the odd ones x2 of x.

    So pairs turn, and are then put apart; `Rotated` doesn't say the latter.
    """
    node = r.maker(value, "aten.cat")
    if node is None or len(node.inputs) != 2 or not is_last_axis(node.attr("dim", 0), len(node.type.shape)):
        return None
    minus, plus = r.maker(node.inputs[0], "aten.sub"), r.maker(node.inputs[1], "aten.add")
    if minus is None or plus is None or not _plain(minus) or not _plain(plus):
        return None
    (a, b), (c, d) = (_terms(r, n) for n in (minus, plus))
    if a is None or b is None or c is None or d is None:
        return None
    (x1, cos, _), (x2, sin, _) = a, b
    if {c, d} != {(x2, cos, "aten.cos"), (x1, sin, "aten.sin")} or (a[2], b[2]) != ("aten.cos", "aten.sin"):
        return None
    x = _interleaved(x1, x2) if cos == sin else None
    return Rotated(x, cos, True) if x is not None else None


def _terms(r: Reading, node: logical.Node) -> tuple[tuple[View, Angles, str] | None, ...]:
    """x, angles and function of both products that a node adds or subtracts."""
    makers = (r.maker(i, "aten.mul") for i in node.inputs)
    return tuple(_turned_by_half(r, m) if m is not None else None for m in makers)


def _turned_by_half(r: Reading, node: logical.Node) -> tuple[View, Angles, str] | None:
    """As `_turned`, where the table may be one half of doubled angles."""
    for x, table in sides(node):
        for op in ("aten.cos", "aten.sin"):
            found = _half_of(r, table, op)
            if found is not None and _along_rows(r, table, r.views[x]):
                return r.views[x], found, op
    return None


def _half_of(r: Reading, value: str, op: str) -> Angles | None:
    """cos or sin of angles, whether they were doubled before or not."""
    view = r.views[value]
    whole, found = r.views[view.base].axes, trigonometric(r, view.base, op)
    if found is None or not found.doubled:
        return found if found is not None and trigonometric(r, value, op) == found else None
    half = r.types[found.inv_freq].shape[0]
    one_half = view.axes == (*whole[:-1], (half, 1)) and view.offset in (0, half)
    return replace(found, doubled=False) if one_half else None


def _interleaved(even: View, odd: View) -> View | None:
    """The view of whose last axis these are the even and the odd channels."""
    n, step = even.shape[-1], even.strides[-1]
    if not isinstance(n, int) or not isinstance(step, int) or step % 2:
        return None
    x = View(even.base, (*even.shape[:-1], 2 * n), (*even.strides[:-1], step // 2), even.offset)
    axis = len(even.shape) - 1
    both = narrow(x, axis, 0, n, 2), narrow(x, axis, 1, n, 2)
    return x if both == (even, odd) else None
