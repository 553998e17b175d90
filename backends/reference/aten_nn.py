"""ATen matrix products, normalisations, convolutions and pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashrt.backends.reference import ops
from flashrt.backends.reference.arrays import F32, Array, real
from flashrt.backends.reference.aten_math import softmax
from flashrt.backends.reference.registry import Arrays, Function, into
from flashrt.errors import PlanError

NN: dict[str, Function] = {}
Pair = int | Sequence[int]


@into(NN)
def linear(input: Array, weight: Array, bias: Array | None = None) -> Any:
    y = real(input) @ real(weight).T
    return y if bias is None else y + real(bias)


@into(NN, "mm", "bmm", "mv", "dot")
def matmul(
    self: Array, other: Array | None = None, mat2: Array | None = None, vec: Array | None = None
) -> Any:
    right = next(x for x in (other, mat2, vec) if x is not None)
    return real(self) @ real(right)


@into(NN)
def addmm(self: Array, mat1: Array, mat2: Array, beta: float = 1, alpha: float = 1) -> Any:
    return np.float32(beta) * real(self) + np.float32(alpha) * (real(mat1) @ real(mat2))


@into(NN)
def baddbmm(self: Array, batch1: Array, batch2: Array, beta: float = 1, alpha: float = 1) -> Any:
    return addmm(self, batch1, batch2, beta, alpha)


@into(NN)
def einsum(equation: str, tensors: Arrays) -> Any:
    return np.einsum(equation.replace(" ", ""), *map(real, tensors), optimize=True)


def _affine(x: F32, weight: Array | None, bias: Array | None) -> F32:
    if weight is not None:
        x = x * real(weight)
    return x if bias is None else x + real(bias)


@into(NN, "native_layer_norm")
def layer_norm(
    input: Array, normalized_shape: Sequence[int], weight: Array | None = None, bias: Array | None = None,
    eps: float = 1e-5,
) -> Any:  # fmt: skip
    axes = tuple(range(-len(normalized_shape), 0))
    return _affine(ops.normalise(real(input), eps, axes), weight, bias)


@into(NN, "_fused_rms_norm")
def rms_norm(
    input: Array, normalized_shape: Sequence[int], weight: Array | None = None, eps: float | None = None
) -> Any:
    width = math.prod(normalized_shape)
    floor = float(np.finfo(np.float32).eps) if eps is None else eps
    flat = real(input).reshape(-1, width)
    return _affine(ops.rms(flat, width, floor).reshape(input.shape), weight, None)


@into(NN, "native_group_norm")
def group_norm(
    input: Array, num_groups: int, weight: Array | None = None, bias: Array | None = None, eps: float = 1e-5
) -> Any:
    groups = real(input).reshape(input.shape[0], num_groups, -1)
    y = ops.normalise(groups, eps).reshape(input.shape)
    return _affine(y, _channels(weight, y.ndim), _channels(bias, y.ndim))


def _channels(x: Array | None, ndim: int) -> Array | None:
    return None if x is None else x.reshape(-1, *[1] * (ndim - 2))


@into(NN, "_native_batch_norm_legit_no_training", "native_batch_norm", "cudnn_batch_norm")
def batch_norm(
    input: Array, weight: Array | None, bias: Array | None, running_mean: Array, running_var: Array,
    training: bool = False, eps: float = 1e-5,
) -> Any:  # fmt: skip
    if training:
        raise PlanError("aten.batch_norm in training mode; export the model in eval mode")
    mean, variance = (real(x).reshape(-1, *[1] * (input.ndim - 2)) for x in (running_mean, running_var))
    y = (real(input) - mean) * (1 / np.sqrt(variance + np.float32(eps)))
    return _affine(y, _channels(weight, y.ndim), _channels(bias, y.ndim))


def _each(value: Pair, n: int) -> tuple[int, ...]:
    got = (value,) * n if isinstance(value, int) else tuple(value)
    return got * n if len(got) == 1 else got


def windows(
    x: Array, kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair, fill: float
) -> Array:
    """x [N, C, *size] → every window [N, C, *out, *kernel]."""
    n = len(kernel)
    pad = [(0, 0), (0, 0), *((p, p) for p in _each(padding, n))]
    x = np.pad(x, pad, constant_values=fill)
    steps = _each(dilation, n)
    span = tuple((k - 1) * d + 1 for k, d in zip(kernel, steps, strict=True))
    seen = np.lib.stride_tricks.sliding_window_view(x, span, axis=tuple(range(2, 2 + n)))
    pick = [slice(None, None, s) for s in _each(stride, n)] + [slice(None, None, d) for d in steps]
    return seen[(slice(None), slice(None), *pick)]


@into(NN, "conv1d", "conv2d", "conv3d")
def convolution(
    input: Array, weight: Array, bias: Array | None = None, stride: Pair = 1, padding: Any = 0,
    dilation: Pair = 1, transposed: bool = False, groups: int = 1,
) -> Any:  # fmt: skip
    if transposed or isinstance(padding, str):
        raise PlanError(f"aten.convolution: transposed={transposed} padding={padding!r} isn't covered")
    n, kernel = weight.ndim - 2, weight.shape[2:]
    seen = windows(real(input), kernel, stride, padding, dilation, 0)
    per_in, per_out = weight.shape[1], weight.shape[0] // groups
    last = [1, *range(2 + n, 2 + 2 * n)]  # channels and kernel of a window
    parts = [
        np.tensordot(
            seen[:, g * per_in : (g + 1) * per_in],
            real(weight)[g * per_out : (g + 1) * per_out],
            (last, list(range(1, n + 2))),
        )
        for g in range(groups)
    ]
    y = np.moveaxis(np.concatenate(parts, axis=-1), -1, 1)
    return _affine(y, None, _channels(bias, y.ndim))


@into(NN)
def max_pool2d(
    self: Array, kernel_size: Pair, stride: Pair = (), padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Any:  # fmt: skip
    return _max_pool(self, _each(kernel_size, 2), stride, padding, dilation, ceil_mode)


@into(NN)
def max_pool3d(
    self: Array, kernel_size: Pair, stride: Pair = (), padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Any:  # fmt: skip
    return _max_pool(self, _each(kernel_size, 3), stride, padding, dilation, ceil_mode)


def _max_pool(
    x: Array, kernel: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> Any:
    if ceil_mode:
        raise PlanError(f"aten.max_pool{len(kernel)}d: ceil_mode isn't covered")
    seen = windows(x, kernel, stride or kernel, padding, dilation, -np.inf)
    return seen.max(axis=tuple(range(-len(kernel), 0)))


@into(NN)
def max_pool2d_with_indices(
    self: Array, kernel_size: Pair, stride: Pair = (), padding: Pair = 0, dilation: Pair = 1
) -> Any:
    return max_pool2d(self, kernel_size, stride, padding, dilation)  # the indices serve training only


@into(NN)
def avg_pool2d(
    self: Array, kernel_size: Pair, stride: Pair = (), padding: Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    kernel = _each(kernel_size, 2)
    if ceil_mode or (not count_include_pad and any(_each(padding, 2))):
        raise PlanError("aten.avg_pool2d: ceil_mode and count_include_pad=False aren't covered")
    seen = windows(real(self), kernel, stride or kernel, padding, 1, 0)
    return seen.sum(axis=(-2, -1)) / np.float32(divisor_override or math.prod(kernel))


@into(NN, "_adaptive_avg_pool2d")
def adaptive_avg_pool2d(self: Array, output_size: Pair) -> Any:
    x = real(self)
    for axis, n in zip((-2, -1), _each(output_size, 2), strict=True):
        extent = x.shape[axis]
        edges = [(i * extent // n, -(-(i + 1) * extent // n)) for i in range(n)]
        x = np.stack([np.take(x, range(lo, hi), axis=axis).mean(axis=axis) for lo, hi in edges], axis=axis)
    return x


@into(NN)
def scaled_dot_product_attention(
    query: Array, key: Array, value: Array, attn_mask: Array | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    group = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    k, v = (np.repeat(real(x), group, axis=-3) if group > 1 else real(x) for x in (key, value))
    by = np.float32(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (real(query) @ k.swapaxes(-1, -2)) * by
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, np.float32(-np.inf))
    if attn_mask is not None:
        added = np.where(attn_mask, 0, -np.inf) if attn_mask.dtype == np.bool_ else attn_mask
        scores = scores + real(added)
    return softmax(scores, -1) @ v
