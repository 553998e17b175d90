"""ONNX operators on elements, and reductions, as torch functions. How to read them: `onnx_module`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from flashrt.errors import UnsupportedModel
from flashrt.frontend.onnx_known import Known

Tensor: TypeAlias = torch.Tensor
OPS: dict[str, Callable[..., Any]] = {}


def operator(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a function under the names of ONNX operators."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        OPS.update(dict.fromkeys(names, function))
        return function

    return enter


def unsupported(argument: str, value: object) -> UnsupportedModel:
    """The error for the value of an attribute or input."""
    return UnsupportedModel(f"{argument}={value!r} isn't supported")


# ---- elementwise -----------------------------------------------------------------------
def _unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def apply(x: Tensor) -> Tensor:
        return function(x)

    return apply


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def apply(a: Tensor, b: Tensor) -> Tensor:
        return function(a, b)

    return apply


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Neg": torch.neg, "Sign": torch.sign, "Floor": torch.floor, "Ceil": torch.ceil,
    "Round": torch.round, "Sqrt": torch.sqrt, "Exp": torch.exp, "Log": torch.log, "Sin": torch.sin,
    "Cos": torch.cos, "Tan": torch.tan, "Asin": torch.asin, "Acos": torch.acos, "Atan": torch.atan,
    "Sinh": torch.sinh, "Cosh": torch.cosh, "Tanh": torch.tanh, "Asinh": torch.asinh, "Acosh": torch.acosh,
    "Atanh": torch.atanh, "Sigmoid": torch.sigmoid, "Erf": torch.erf, "Relu": F.relu,
    "Softplus": F.softplus, "HardSwish": F.hardswish, "Mish": F.mish, "Not": torch.logical_not,
    "BitwiseNot": torch.bitwise_not, "IsNaN": torch.isnan, "Reciprocal": torch.reciprocal,
    "Identity": lambda x: x, "Softsign": lambda x: x / (1 + x.abs()),
}  # fmt: skip
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Equal": torch.eq, "Less": torch.lt,
    "LessOrEqual": torch.le, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "And": torch.logical_and,
    "Or": torch.logical_or, "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
    "PRelu": lambda x, slope: torch.where(x >= 0, x, x * slope),
}  # fmt: skip
OPS |= {name: _unary(f) for name, f in _UNARY.items()}
OPS |= {name: _binary(f) for name, f in _BINARY.items()}


@operator("Div")
def divide(a: Tensor, b: Tensor) -> Tensor:
    """Whole numbers are cut towards zero."""
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


@operator("Pow")
def power(x: Tensor, y: Tensor) -> Tensor:
    """The result has the dtype of the base."""
    return torch.pow(x, y).to(x.dtype)


@operator("Mod")
def modulo(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def apply(*xs: Tensor) -> Tensor:
        return functools.reduce(function, xs)

    return apply


OPS |= {"Max": _folded(torch.maximum), "Min": _folded(torch.minimum), "Sum": _folded(torch.add)}


@operator("Mean")
def mean(*xs: Tensor) -> Tensor:
    return functools.reduce(torch.add, xs) / len(xs) if len(xs) > 1 else xs[0]


@operator("Where")
def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition, x, y)


@operator("Clip")
def clip(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    if all(v is None or isinstance(v, np.ndarray) for v in (min, max)) and not (min is None is max):
        low, high = (None if v is None else v.item() for v in (min, max))
        return torch.clamp(x, low, high)
    if min is not None:
        x = torch.maximum(x, torch.as_tensor(min))
    return x if max is None else torch.minimum(x, torch.as_tensor(max))


@operator("IsInf")
def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    found = torch.isinf(x)
    if not detect_negative:
        found = found & (x > 0)
    return found if detect_positive else found & (x < 0)


@operator("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@operator("Elu")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


@operator("Selu")
def selu(
    x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> Tensor:
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


@operator("Celu")
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x / alpha))


@operator("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return torch.clamp(x * alpha + beta, 0, 1)


@operator("ThresholdedRelu")
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > alpha, x, torch.zeros_like(x))


@operator("Shrink")
def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    moved = torch.where(x > lambd, x - bias, torch.zeros_like(x))
    return torch.where(x < -lambd, x + bias, moved).to(x.dtype)


@operator("Gelu")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@operator("Swish")
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)


@operator("Dropout")
def dropout(x: Tensor, ratio: Any = None, training_mode: Any = None, *, seed: int = 0) -> Tensor:
    """Off, as in inference."""
    if training_mode is not None and not (isinstance(training_mode, np.ndarray) and not training_mode.item()):
        raise unsupported("training_mode", True)
    return x


# ---- reductions ----------------------------------------------------------------------
def _extreme(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(x: Tensor, dims: list[int], keep: bool) -> Tensor:
        if x.dtype == torch.bool:
            return function(x.to(torch.uint8), dims, keep).to(torch.bool)
        return function(x, dims, keep)

    return apply


def _product(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    for dim in sorted(dims, reverse=True):
        x = torch.prod(x, dim, keep)
    return x


def _mean(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    if not x.is_floating_point():
        raise unsupported("dtype", str(x.dtype).removeprefix("torch."))
    return torch.mean(x, dims, keep)


def _sum(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return torch.sum(x, dims, keep, dtype=x.dtype)


_REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceSum": _sum, "ReduceMean": _mean,
    "ReduceMax": _extreme(torch.amax), "ReduceMin": _extreme(torch.amin), "ReduceProd": _product,
    "ReduceL1": lambda x, d, k: _sum(x.abs(), d, k),
    "ReduceL2": lambda x, d, k: torch.sqrt(_sum(x * x, d, k)).to(x.dtype),
    "ReduceSumSquare": lambda x, d, k: _sum(x * x, d, k),
    "ReduceLogSum": lambda x, d, k: torch.log(_sum(x, d, k)),
    "ReduceLogSumExp": lambda x, d, k: torch.logsumexp(x, d, k),
}  # fmt: skip


def _reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Any]:
    def apply(
        x: Tensor,
        chosen: Known | None = None,
        *,
        axes: Any = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        given = axes if chosen is None else chosen.tolist()
        if not given and noop_with_empty_axes:
            raise unsupported("noop_with_empty_axes", 1)
        dims = [int(a) % x.dim() for a in given or range(x.dim())] if x.dim() else []
        if any(isinstance(x.shape[d], int) and x.shape[d] == 0 for d in dims):
            raise UnsupportedModel(f"nothing to reduce: its input is {list(x.shape)}")
        return function(x, dims, bool(keepdims)) if dims else function(x.reshape(1), [0], False)

    return apply


OPS |= {name: _reduction(f) for name, f in _REDUCTIONS.items()}


@operator("ArgMax", "ArgMin")
def arg_extreme(
    x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0, op: str
) -> Tensor:
    extreme = torch.argmax if op == "ArgMax" else torch.argmin
    if select_last_index:  # the first from behind
        return x.shape[axis] - 1 - extreme(x.flip(axis), axis, bool(keepdims))
    return extreme(x, axis, bool(keepdims))


@operator("Softmax", "LogSoftmax")
def softmax(x: Tensor, *, axis: int = -1, op: str) -> Tensor:
    return F.softmax(x, axis) if op == "Softmax" else F.log_softmax(x, axis)


@operator("Hardmax")
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    best = torch.argmax(x, axis, True)
    return torch.zeros_like(x).scatter(axis, best, 1.0)


@operator("CumProd")
def cumprod(x: Tensor, axis: Known, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    dim = int(axis.item())
    if reverse:
        x = x.flip(dim)
    if exclusive:  # a one in front, and the last factor left out
        x = torch.cat([torch.ones_like(x.narrow(dim, 0, 1)), x.narrow(dim, 0, x.shape[dim] - 1)], dim)
    product = torch.cumprod(x, dim, dtype=x.dtype)
    return product.flip(dim) if reverse else product


@operator("CumSum")
def cumsum(x: Tensor, axis: Known, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    dim = int(axis.item())
    if reverse:
        x = x.flip(dim)
    total = torch.cumsum(x, dim, dtype=x.dtype)
    if exclusive:
        total = total - x
    return total.flip(dim) if reverse else total


@operator("TopK")
def topk(x: Tensor, k: Known, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> Any:
    values, indices = torch.topk(x, int(k.item()), axis, bool(largest), True)
    return values, indices


@operator("LpNormalization")
def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    if p not in (1, 2):
        raise unsupported("p", p)
    norm = x.abs().sum(axis, True) if p == 1 else torch.sqrt((x * x).sum(axis, True))
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


# ---- quantised numbers -----------------------------------------------------------------
def _along(x: Tensor, of: Tensor, axis: int) -> Tensor:
    """A scale or zero point of each channel, in the shape that broadcasts over x."""
    if x.dim() == 0 or x.numel() == 1:
        return x.reshape(())
    if x.dim() > 1:
        raise UnsupportedModel("scales of blocks aren't supported")
    shape = [1] * of.dim()
    shape[axis] = -1
    return x.reshape(shape)


@operator("DequantizeLinear")
def dequantize(
    x: Tensor, scale: Tensor, zero: Tensor | None = None, *, axis: int = 1, block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:  # fmt: skip
    if block_size or output_dtype:
        raise unsupported("block_size" if block_size else "output_dtype", block_size or output_dtype)
    by = _along(scale, x, axis)
    wide = x.to(scale.dtype)
    return (wide if zero is None else wide - _along(zero, x, axis).to(scale.dtype)) * by


@operator("QuantizeLinear")
def quantize(
    x: Tensor, scale: Tensor, zero: Tensor | None = None, *, axis: int = 1, block_size: int = 0,
    output_dtype: int = 0, saturate: int = 1, precision: int = 0,
) -> Tensor:  # fmt: skip
    if block_size or output_dtype or precision:
        raise UnsupportedModel("block_size, output_dtype and precision aren't supported")
    kind = torch.uint8 if zero is None else zero.dtype
    start = 0 if zero is None else _along(zero, x, axis).to(torch.float32)
    limits = torch.iinfo(kind)
    # the division is one of float32, whatever the input, as in ONNX
    return torch.clamp(torch.round(x / _along(scale, x, axis)) + start, limits.min, limits.max).to(kind)


@operator("DynamicQuantizeLinear")
def dynamic_quantize(x: Tensor) -> Any:
    low = torch.clamp(x.amin(), max=0.0)
    scale = (torch.clamp(x.amax(), min=0.0) - low) / 255
    zero = torch.clamp(torch.round(-low / scale), 0, 255)
    values = torch.clamp(torch.round(x / scale) + zero, 0, 255)
    return values.to(torch.uint8), scale, zero.to(torch.uint8)
