"""torch's symbolic sizes → ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from flashrt.errors import UnsupportedModel
from flashrt.ir.types import Dim, ceildiv, maximum, minimum, product, sym


def _floordiv(a: Dim, b: Dim) -> Dim:
    return ceildiv(a - b + 1, b)


def _mod(a: Dim, b: Dim) -> Dim:
    return a - _floordiv(a, b) * b


# by class name: torch's own sympy functions move between its modules
_FUNCTIONS: Mapping[str, Callable[[Dim, Dim], Dim]] = {
    "FloorDiv": _floordiv, "CleanDiv": _floordiv, "Mod": _mod, "PythonMod": _mod,
}  # fmt: skip
_OF_VALUES = re.compile(r"u\d+")  # torch's name for a size that it doesn't know beforehand
_FOLDS: Mapping[str, Callable[..., Dim]] = {"Max": maximum, "Min": minimum}


def read_expr(expr: Any, names: Mapping[str, str]) -> Dim:
    """A sympy expression over torch's symbols (`s77`) as a size over ours.

    Raises:
        UnsupportedModel: it uses a function that sizes don't have, or depends on values.
    """
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol and _OF_VALUES.fullmatch(expr.name) and expr.name not in names:
        raise UnsupportedModel("the size of a traced value depends on other values, not on sizes alone")
    if expr.is_Symbol:
        return sym(names.get(expr.name, expr.name))
    args = [read_expr(a, names) for a in expr.args]
    kind = type(expr).__name__
    if expr.is_Add:
        return sum(args[1:], args[0])
    if expr.is_Mul:
        return product(args)
    if expr.is_Pow and isinstance(args[1], int) and args[1] > 0:
        return product([args[0]] * args[1])
    if kind in _FOLDS:
        return _FOLDS[kind](*args)
    if kind in _FUNCTIONS:
        return _FUNCTIONS[kind](*args)
    raise UnsupportedModel(f"the size {expr} of a traced value uses {kind}, which sizes don't have")


def read_size(value: Any, names: Mapping[str, str]) -> Dim:
    """An int or SymInt as a size."""
    if isinstance(value, int):
        return value
    return read_expr(value.node.expr, names)
