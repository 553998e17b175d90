"""Values that are known while an ONNX graph is read: shape arithmetic, folded with numpy.

ONNX files compute shapes with ordinary operators (Shape, Gather, Concat, …). Their values are numpy arrays
here; a size that the model leaves open stands in an array of objects as torch's symbol for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Known = NDArray[Any]
FOLDS: dict[str, Callable[..., Any]] = {}
MOST = 4096  # elements of what is folded; larger values are weights


def sizes(values: Sequence[Any]) -> Known:
    """Sizes as a vector: of int64 where all are numbers."""
    return settled(np.array(list(values), dtype=object))


def settled(values: Any) -> Known:
    """An array of objects that are all numbers as int64; any other as it is."""
    array = np.asarray(values)
    if array.dtype == object and not any(isinstance(v, torch.SymInt) for v in array.flat):
        return array.astype(np.int64)
    return array


def _fold(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        FOLDS.update(dict.fromkeys(names, function))
        return function

    return enter


FOLDS |= {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Neg": np.negative,
    "Equal": np.equal, "Less": np.less, "LessOrEqual": np.less_equal, "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal, "And": np.logical_and, "Or": np.logical_or, "Not": np.logical_not,
    "Xor": np.logical_xor, "Abs": np.abs, "Floor": np.floor, "Ceil": np.ceil, "Sqrt": np.sqrt,
    "Where": np.where, "Identity": np.asarray,
}  # fmt: skip


@_fold("Div")
def _divide(a: Known, b: Known) -> Any:
    """Whole numbers are cut towards zero."""
    if a.dtype.kind == "f":
        return np.true_divide(a, b).astype(a.dtype)
    if b.size and any(isinstance(v, int | np.integer) and v == 0 for v in b.flat):
        return NotImplemented
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) == (b < 0), quotient, -quotient)


@_fold("Concat")
def _concat(*parts: Known, axis: int) -> Any:
    return np.concatenate(parts, axis=axis)


@_fold("Transpose")
def _transpose(x: Known, *, perm: Sequence[int] | None = None) -> Any:
    return x.transpose(perm)


@_fold("Tile")
def _tile(x: Known, repeats: Known) -> Any:
    if repeats.dtype == object or np.prod(repeats) * x.size > MOST:
        return NotImplemented
    return np.tile(x, repeats.astype(np.int64))


@_fold("Gather")
def _gather(x: Known, index: Known, *, axis: int = 0) -> Any:
    return np.take(x, index.astype(np.int64), axis=axis)


@_fold("Squeeze")
def _squeeze(x: Known, axes: Known | None = None) -> Any:
    return np.squeeze(x, axis=None if axes is None else tuple(int(a) for a in axes))


@_fold("Unsqueeze")
def _unsqueeze(x: Known, axes: Known) -> Any:
    return np.expand_dims(x, tuple(int(a) for a in axes.reshape(-1)))


@_fold("Reshape")
def _reshape(x: Known, shape: Known, *, allowzero: int = 0) -> Any:
    wanted = [int(n) for n in shape]
    if not allowzero:
        wanted = [x.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    return x.reshape(wanted)


@_fold("Slice")
def _slice(
    x: Known, starts: Known, ends: Known, axes: Known | None = None, steps: Known | None = None
) -> Any:
    where = [slice(None)] * x.ndim
    chosen = range(len(starts)) if axes is None else [int(a) for a in axes]
    by = [1] * len(starts) if steps is None else [int(s) for s in steps]
    for lo, hi, axis, step in zip(starts, ends, chosen, by, strict=True):
        # a bound far below the first element means that a backward slice takes it in
        end = None if step < 0 and int(hi) < -x.shape[axis] else int(hi)
        where[axis] = slice(int(lo), end, step)
    return x[tuple(where)]


@_fold("Range")
def _range(start: Known, limit: Known, delta: Known) -> Any:
    if object in (start.dtype, limit.dtype, delta.dtype):
        return NotImplemented
    return np.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@_fold("ConstantOfShape")
def _constant_of_shape(shape: Known, *, value: Known | None = None) -> Any:
    filling = np.zeros(1, np.float32) if value is None else value
    if shape.dtype == object or np.prod(shape) > MOST:
        return NotImplemented
    return np.full(tuple(int(n) for n in shape), filling.reshape(-1)[0])


@_fold("Expand")
def _expand(x: Known, shape: Known) -> Any:
    if shape.dtype == object or np.prod(shape) > MOST:
        return NotImplemented
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(int(n) for n in shape)))


@_fold("ReduceProd", "ReduceSum")
def _reduce(x: Known, axes: Known | None = None, *, keepdims: int = 1, op: str) -> Any:
    if axes is not None or x.ndim != 1:
        return NotImplemented
    total = np.prod(x) if op == "ReduceProd" else np.sum(x)
    return np.array([total] if keepdims else total, dtype=x.dtype)


@_fold("Max", "Min")
def _extreme(*values: Known, op: str) -> Any:
    if any(v.dtype == object for v in values):
        return NotImplemented
    least = np.minimum if op == "Min" else np.maximum
    got = values[0]
    for value in values[1:]:
        got = least(got, value)
    return got
