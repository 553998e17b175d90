"""What `recognise` makes of a raw node: a view of an earlier value, or a recipe for a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashrt.ir import logical
from flashrt.ir.types import Attrs, Expr, TensorType, product
from flashrt.passes import recognise_patterns as patterns
from flashrt.passes.recognise_patterns import Reading
from flashrt.passes.recognise_views import (
    Flat,
    Shape,
    View,
    compact_strides,
    drop,
    expand,
    narrow,
    permute,
    reshape,
)


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


def pointwise(
    op: str, node: logical.Node, x: View, args: tuple[Flat | Raw | Recipe, ...], values: Attrs
) -> Recipe | None:
    """A recipe whose result lies in memory as `x` does."""
    first = args[0]
    assert isinstance(first, Flat)
    return Recipe(op, args, TensorType(node.type.dtype, first.shape), compact_strides(x), values)


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


def moved(r: Reading, node: logical.Node) -> View | None:
    """Where the elements of a view, transpose, slice, … of another value lie; None if it's no such thing."""
    if not node.inputs or not (node.op.startswith("aten.") or node.op == "view"):
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
            return permute(view, ints(node, "dims"))
        case "select":
            axis, index = ints(node, "dim", "index")
            size = view.shape[axis]
            if index < 0 and not isinstance(size, int):
                return None
            start = index if index >= 0 or not isinstance(size, int) else index + size
            return drop(narrow(view, axis, start, 1), axis)
        case "slice":
            if isinstance(node.attr("start"), Expr):
                return None
            axis, start, step = ints(node, "dim", "start", "step")
            return narrow(view, axis, start, shape[axis], step)
        case "expand":
            return expand(view, shape)
        case "mul" | "div" if patterns.scalar(node) == 1 and r.types[node.inputs[0]] == node.type:
            return view
        case "add" | "sub" if patterns.scalar(node) == 0 and r.types[node.inputs[0]] == node.type:
            return view
    return None


def ints(node: logical.Node, *keys: str) -> tuple[int, ...]:
    values = [node.attr(key) for key in keys]
    if len(keys) == 1 and isinstance(values[0], tuple):
        values = list(values[0])
    assert all(isinstance(v, int) for v in values), (node.name, keys, values)
    return tuple(v for v in values if isinstance(v, int))


def _transposed(view: View, node: logical.Node) -> View:
    a, b = ints(node, "dim0", "dim1")
    order = list(range(len(view.shape)))
    order[a], order[b] = order[b], order[a]
    return permute(view, order)
