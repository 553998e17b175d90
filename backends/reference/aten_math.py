"""ATen arithmetic, comparisons, reductions and sorting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flashrt.backends.reference import ops
from flashrt.backends.reference.arrays import Array, real
from flashrt.backends.reference.registry import Function, Num, into
from flashrt.ir.types import TensorType

MATH: dict[str, Function] = {}
Dims = int | tuple[int, ...] | None


@into(MATH)
def add(self: Array, other: Num, alpha: float = 1) -> Any:
    return self + other * alpha


@into(MATH, "subtract")
def sub(self: Array, other: Num, alpha: float = 1) -> Any:
    return self - other * alpha


@into(MATH)
def rsub(self: Array, other: Num, alpha: float = 1) -> Any:
    return other - self * alpha


@into(MATH, "multiply")
def mul(self: Array, other: Num) -> Any:
    return self * other


@into(MATH, "true_divide", "divide")
def div(self: Num, other: Num, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return np.floor_divide(self, other)
    quotient = np.true_divide(self, other)
    return np.trunc(quotient) if rounding_mode == "trunc" else quotient


@into(MATH)
def floor_divide(self: Num, other: Num) -> Any:
    return np.floor_divide(self, other)


@into(MATH)
def remainder(self: Num, other: Num) -> Any:
    return np.remainder(self, other)


@into(MATH)
def fmod(self: Num, other: Num) -> Any:
    return np.fmod(self, other)


@into(MATH, "float_power")
def pow_(self: Num, exponent: Num) -> Any:
    return np.power(self, exponent)


@into(MATH)
def rsqrt(self: Array) -> Any:
    return 1 / np.sqrt(real(self))


@into(MATH)
def reciprocal(self: Array) -> Any:
    return 1 / real(self)


_UNARY: dict[str, Any] = {
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "floor": np.floor, "ceil": np.ceil,
    "trunc": np.trunc, "round": np.rint, "square": np.square,
    "logical_not": np.logical_not, "bitwise_not": np.invert, "isnan": np.isnan, "isinf": np.isinf,
}  # fmt: skip
_REAL: dict[str, Any] = {
    "sqrt": np.sqrt, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2,
    "log10": np.log10, "log1p": np.log1p, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh,
    "atan": np.arctan, "asin": np.arcsin, "acos": np.arccos, "sinh": np.sinh, "cosh": np.cosh,
    "sigmoid": ops.sigmoid, "silu": ops.silu, "erf": ops.erf,
    "softplus": lambda x: np.logaddexp(x, np.float32(0)),
    "mish": lambda x: x * np.tanh(np.logaddexp(x, np.float32(0))),
    "hardsigmoid": lambda x: np.clip(x / 6 + np.float32(0.5), 0, 1),
    "hardswish": lambda x: x * np.clip(x / 6 + np.float32(0.5), 0, 1),
    "relu6": lambda x: np.clip(x, 0, 6),
    "log_sigmoid": lambda x: -np.logaddexp(np.float32(0), -x),
}  # fmt: skip
_BINARY: dict[str, Any] = {
    "maximum": np.maximum, "minimum": np.minimum, "atan2": np.arctan2,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "logical_and": np.logical_and, "logical_or": np.logical_or,
    "logical_xor": np.logical_xor, "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor, "__and__": np.bitwise_and, "__or__": np.bitwise_or,
}  # fmt: skip


def _unary(function: Any, only_real: bool) -> Function:
    def apply(self: Array) -> Any:
        return function(real(self) if only_real else self)

    return apply


def _binary(function: Any) -> Function:
    def apply(self: Num, other: Num) -> Any:
        return function(self, other)

    return apply


MATH |= {name: _unary(f, False) for name, f in _UNARY.items()}
MATH |= {name: _unary(f, True) for name, f in _REAL.items()}
MATH |= {name: _binary(f) for name, f in _BINARY.items()}


@into(MATH)
def relu(self: Array) -> Any:
    return np.maximum(self, 0)


@into(MATH)
def gelu(self: Array, approximate: str = "none") -> Any:
    return ops.gelu_tanh(self) if approximate == "tanh" else ops.gelu(self)


@into(MATH)
def leaky_relu(self: Array, negative_slope: float = 0.01) -> Any:
    return np.where(self > 0, self, self * np.float32(negative_slope))


@into(MATH)
def elu(self: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    negative = np.float32(alpha) * np.expm1(np.minimum(self, 0) * np.float32(input_scale))
    return np.float32(scale) * np.where(self > 0, self, negative)


@into(MATH, "hardtanh")
def clamp(
    self: Array, min: Num | None = None, max: Num | None = None,
    min_val: float | None = None, max_val: float | None = None,
) -> Any:  # fmt: skip
    low, high = (min if min_val is None else min_val), (max if max_val is None else max_val)
    got = self if low is None else np.maximum(self, low)
    return got if high is None else np.minimum(got, high)


@into(MATH)
def clamp_min(self: Array, min: Num) -> Any:
    return np.maximum(self, min)


@into(MATH)
def clamp_max(self: Array, max: Num) -> Any:
    return np.minimum(self, max)


# ---- reductions -------------------------------------------------------------
def axes(dim: Dims) -> Any:
    """`dim` of ATen as numpy's `axis`: None and () mean all."""
    return None if dim is None or dim == () else dim


@into(MATH)
def sum_(self: Array, dim: Dims = None, keepdim: bool = False) -> Any:
    return np.sum(self, axis=axes(dim), keepdims=keepdim)


@into(MATH)
def mean(self: Array, dim: Dims = None, keepdim: bool = False) -> Any:
    return np.mean(real(self), axis=axes(dim), keepdims=keepdim)


@into(MATH)
def prod(self: Array, dim: Dims = None, keepdim: bool = False) -> Any:
    return np.prod(self, axis=axes(dim), keepdims=keepdim)


@into(MATH)
def amax(self: Array, dim: Dims = None, keepdim: bool = False) -> Any:
    return np.max(self, axis=axes(dim), keepdims=keepdim)


@into(MATH)
def amin(self: Array, dim: Dims = None, keepdim: bool = False) -> Any:
    return np.min(self, axis=axes(dim), keepdims=keepdim)


@into(MATH)
def any_(self: Array, dim: Dims = None, keepdim: bool = False) -> Any:
    return np.any(self, axis=axes(dim), keepdims=keepdim)


@into(MATH)
def all_(self: Array, dim: Dims = None, keepdim: bool = False) -> Any:
    return np.all(self, axis=axes(dim), keepdims=keepdim)


@into(MATH)
def argmax(self: Array, dim: int | None = None, keepdim: bool = False) -> Any:
    return np.argmax(self, axis=dim, keepdims=keepdim)


@into(MATH)
def argmin(self: Array, dim: int | None = None, keepdim: bool = False) -> Any:
    return np.argmin(self, axis=dim, keepdims=keepdim)


@into(MATH)
def max_(self: Array, other: Array | None = None, dim: int | None = None, keepdim: bool = False) -> Any:
    if other is not None:
        return np.maximum(self, other)
    return amax(self, dim, keepdim) if dim is None else (amax(self, dim, keepdim), argmax(self, dim, keepdim))


@into(MATH)
def min_(self: Array, other: Array | None = None, dim: int | None = None, keepdim: bool = False) -> Any:
    if other is not None:
        return np.minimum(self, other)
    return amin(self, dim, keepdim) if dim is None else (amin(self, dim, keepdim), argmin(self, dim, keepdim))


@into(MATH)
def var(
    self: Array, dim: Dims = None, unbiased: bool = True, correction: float | None = None,
    keepdim: bool = False,
) -> Any:  # fmt: skip
    by = float(unbiased) if correction is None else correction
    return np.var(real(self), axis=axes(dim), ddof=by, keepdims=keepdim)


@into(MATH)
def std(
    self: Array, dim: Dims = None, unbiased: bool = True, correction: float | None = None,
    keepdim: bool = False,
) -> Any:  # fmt: skip
    return np.sqrt(var(self, dim, unbiased, correction, keepdim))


@into(MATH)
def linalg_vector_norm(self: Array, ord: float = 2, dim: Dims = None, keepdim: bool = False) -> Any:
    x, axis = np.abs(real(self)), axes(dim)
    if math.isinf(ord):
        return (np.max if ord > 0 else np.min)(x, axis=axis, keepdims=keepdim)
    return np.sum(x**ord, axis=axis, keepdims=keepdim) ** (1 / ord)


@into(MATH)
def cumsum(self: Array, dim: int, out: TensorType) -> Any:
    return np.cumsum(self, axis=dim, dtype=np.float32 if out.dtype.startswith(("f", "bf")) else None)


@into(MATH)
def cumprod(self: Array, dim: int, out: TensorType) -> Any:
    return np.cumprod(self, axis=dim, dtype=np.float32 if out.dtype.startswith(("f", "bf")) else None)


@into(MATH)
def logsumexp(self: Array, dim: Dims, keepdim: bool = False) -> Any:
    top = np.max(real(self), axis=axes(dim), keepdims=True)
    total = np.log(np.sum(np.exp(real(self) - top), axis=axes(dim), keepdims=True)) + top
    return total if keepdim else np.squeeze(total, axis=axes(dim))


@into(MATH, "_softmax")
def softmax(self: Array, dim: int) -> Any:
    weights = np.exp(real(self) - np.max(real(self), axis=dim, keepdims=True))
    return weights / weights.sum(axis=dim, keepdims=True)


@into(MATH, "_log_softmax")
def log_softmax(self: Array, dim: int) -> Any:
    return real(self) - logsumexp(self, dim, True)


# ---- order ------------------------------------------------------------------
def order(self: Array, dim: int, largest_first: bool) -> Array:
    """Indices that sort along `dim`; equal values keep their order."""
    if not largest_first:
        return np.argsort(self, axis=dim, kind="stable")
    back = np.argsort(np.flip(self, axis=dim), axis=dim, kind="stable")
    return np.asarray(self.shape[dim] - 1 - np.flip(back, axis=dim))


@into(MATH)
def argsort(self: Array, dim: int = -1, descending: bool = False) -> Any:
    return order(self, dim, descending)


@into(MATH)
def sort(self: Array, dim: int = -1, descending: bool = False) -> Any:
    index = order(self, dim, descending)
    return np.take_along_axis(self, index, axis=dim), index


@into(MATH)
def topk(self: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    index = np.take(order(self, dim, largest), np.arange(k), axis=dim)
    return np.take_along_axis(self, index, axis=dim), index
