"""Tables of ATen operations as functions with the schema's parameter names, and how a node binds to one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from flashrt.backends.reference.arrays import Array, AttrMap
from flashrt.errors import PlanError
from flashrt.ir.types import TensorType

Num = Array | int | float  # a tensor or a scalar: aten.mul.Tensor, aten.mul.Scalar
Arrays = Sequence[Array]
Function = Callable[..., Any]
F = TypeVar("F", bound=Function)

_TENSOR = frozenset({"Array", "Array | None", "Num", "Num | None"})


def into(table: dict[str, Function], *also: str) -> Callable[[F], F]:
    """Enters a function under its name (less a trailing `_`, which avoids builtins) and other names."""

    def enter(function: F) -> F:
        for name in (function.__name__.rstrip("_"), *also):
            table[name] = function
        return function

    return enter


@cache
def _parameters(function: Function) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())


def bind(function: Function, inputs: Arrays, attrs: AttrMap, out: TensorType) -> Any:
    """Calls the function: tensors fill the tensor parameters in order, attributes fill theirs by name.

    A parameter annotated `Arrays` takes every tensor left; `out` is the node's type. Attributes
    the function doesn't name (dtype, padding_idx, …) are already in the type or mean nothing here.
    Of several results, the attribute `result` picks one.
    """
    left, given = list(inputs), dict[str, Any]()
    for p in _parameters(function):
        if p.name == "out":
            given[p.name] = out
        elif p.annotation == "Arrays":
            given[p.name], left = left, []
        elif p.name in attrs:
            given[p.name] = attrs[p.name]
        elif p.annotation in _TENSOR and left:
            given[p.name] = left.pop(0)
        elif p.default is p.empty:
            raise PlanError(f"aten.{function.__name__.rstrip('_')} lacks its argument {p.name!r}")
    if left:
        raise PlanError(f"aten.{function.__name__.rstrip('_')} has {len(left)} tensors too many")
    got = function(**given)
    results = got if isinstance(got, tuple) else (got,)
    if (wanted := attrs.get("result", 0)) >= len(results):
        raise PlanError(f"aten.{function.__name__.rstrip('_')}: result {wanted} isn't computed")
    return results[wanted]
