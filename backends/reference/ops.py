"""The named operations of flashrt/ir/ops.py: what each one means, on flat float32 arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flashrt.backends.reference.arrays import F32, Array, AttrMap, Op, real, shape_at
from flashrt.backends.reference.quants import fake_quantize, round_bf16
from flashrt.backends.reference.sample import sample
from flashrt.errors import PlanError
from flashrt.ir.ops import LINEAR_BF16, LINEAR_I8
from flashrt.ir.types import TensorType

_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: Any) -> F32:
    """The error function, elementwise (numpy has none; slow but exact)."""
    return np.asarray(_erf(x)).astype(np.float32)


def sigmoid(x: Any) -> F32:
    """1 / (1 + e^-x); exp runs over to infinity for very negative x, which gives the right 0."""
    return real(1 / (1 + np.exp(-real(x))))


def silu(x: Any) -> F32:
    """x · sigmoid(x)"""
    return real(x) * sigmoid(x)


def gelu(x: Any) -> F32:
    """x · Φ(x), Φ the normal distribution function."""
    return real(x) * (1 + erf(real(x) * np.float32(math.sqrt(0.5)))) * np.float32(0.5)


def gelu_tanh(x: Any) -> F32:
    """gelu with Φ approximated: x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))"""
    x = real(x)
    return (
        x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + 0.044715 * x * x * x))) * np.float32(0.5)
    )


def relu(x: Any) -> F32:
    """max(x, 0)"""
    return np.maximum(real(x), 0)


ACTIVATIONS: Mapping[str, Callable[[Any], F32]] = {
    "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu,
    "tanh": lambda x: np.tanh(real(x)), "sigmoid": sigmoid,
}  # fmt: skip


def activate(name: str, x: Array) -> F32:
    """The activation `name` of x; PlanError naming the known ones."""
    if name not in ACTIVATIONS:
        raise PlanError(f"unknown activation {name!r}", hint=f"activations: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name](x)


def rms(x: F32, width: int, eps: float) -> F32:
    """x [..., C]: each group of `width` channels over its root mean square."""
    groups = x.reshape(*x.shape[:-1], -1, width)
    mean = np.mean(groups * groups, axis=-1, keepdims=True, dtype=np.float32)
    return real(groups * (1 / np.sqrt(mean + np.float32(eps)))).reshape(x.shape)


def normalise(x: F32, eps: float, axes: tuple[int, ...] = (-1,)) -> F32:
    """x to mean 0 and variance 1 over `axes`."""
    centred = x - x.mean(axis=axes, keepdims=True, dtype=np.float32)
    variance = np.mean(centred * centred, axis=axes, keepdims=True, dtype=np.float32)
    return centred * (1 / np.sqrt(variance + np.float32(eps)))


def rotate(x: F32, table: F32, head_dim: int) -> F32:
    """x [T, H*head_dim], table [T, D] = D/2 cosines, D/2 sines: rotates channels [0, D) of each head.

    With x1, x2 the halves of those channels: x1·cos − x2·sin, x2·cos + x1·sin.
    """
    t, half = x.shape[0], table.shape[1] // 2
    out = x.reshape(t, -1, head_dim).copy()
    x1, x2 = out[..., :half].copy(), out[..., half : 2 * half].copy()
    cos, sin = table[:, None, :half], table[:, None, half:]
    out[..., :half] = x1 * cos - x2 * sin
    out[..., half : 2 * half] = x2 * cos + x1 * sin
    return out.reshape(x.shape)


def _embedding(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> Array:
    return inputs[1][inputs[0]]


def linear(inputs: Sequence[Array], numerics: str) -> F32:
    """x·wᵀ, then + bias, then + residual; with "act=i8/32 …" x is quantised first, with
    "act=bf16 …" x and w are rounded to bf16 first.

    einsum, not a BLAS product: an element's sum is then taken in the same order however many
    rows and channels stand beside it, so that any batch and any column split give the same bits.
    """
    x, w, *rest = (real(a) for a in inputs)
    if numerics == LINEAR_I8:
        x = fake_quantize(x)
    elif numerics == LINEAR_BF16:
        x, w = round_bf16(x), round_bf16(w)
    y = np.einsum("...k,nk->...n", x, w)
    for addend in rest:
        y = y + addend
    return y


def _head_linear(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> Array:
    x, w = real(inputs[0]), real(inputs[1])
    heads, k = attrs["heads"], w.shape[1]
    x, w = x.reshape(len(x), heads, -1), w.reshape(heads, -1, k)
    y = np.concatenate([x[..., k:], np.einsum("thk,hnk->thn", x[..., :k], w)], axis=-1)
    return y.reshape(len(x), -1)


def _rms_norm(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> Array:
    x = real(inputs[0])
    width = int(attrs.get("width") or x.shape[-1])
    y = rms(x, width, attrs["eps"])
    if len(inputs) == 1:
        return y
    w = np.float32(attrs.get("offset", 0)) + real(inputs[1])
    return (y.reshape(*x.shape[:-1], -1, w.size) * w).reshape(x.shape)


def _layer_norm(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> Array:
    y = normalise(real(inputs[0]), attrs["eps"])
    if len(inputs) > 1:
        y = y * real(inputs[1])
    return y + real(inputs[2]) if len(inputs) > 2 else y


def _rope_table(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> Array:
    angle = real(inputs[0])[:, None] * real(inputs[1])
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * np.float32(attrs.get("scale", 1))


def _rope(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> Array:
    return rotate(real(inputs[0]), real(inputs[1]), attrs["head_dim"])


def _rope_pairs(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> Array:
    x, table = real(inputs[0]), real(inputs[1])
    half, dim = table.shape[1] // 2, attrs["head_dim"]
    heads = x.reshape(len(x), -1, dim)
    cos, sin = table[:, None, :half], table[:, None, half:]
    even, odd = heads[..., : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    y = heads.copy()
    y[..., : 2 * half : 2], y[..., 1 : 2 * half : 2] = even * cos - odd * sin, odd * cos + even * sin
    return y.reshape(x.shape)


def _gated(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> Array:
    return activate(attrs["act"], inputs[0]) * real(inputs[1])


def _activation(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> Array:
    return activate(attrs["act"], inputs[0])


def _softcap(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> Array:
    cap = np.float32(attrs["cap"])
    return cap * np.tanh(real(inputs[0]) / cap)


def _sample(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> Array:
    return sample(*inputs)


# `linear` and `attention` are computed by flashrt.backends.reference.evaluate: they need more than this
NAMED: Mapping[str, Op] = {
    "embedding": _embedding,
    "head_linear": _head_linear,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rope_table": _rope_table,
    "rope": _rope,
    "rope_pairs": _rope_pairs,
    "gated": _gated,
    "activation": _activation,
    "add": lambda inputs, attrs, out: inputs[0] + inputs[1],
    "mul": lambda inputs, attrs, out: inputs[0] * inputs[1],
    "scale": lambda inputs, attrs, out: inputs[0] * np.float32(attrs["by"]),
    "softcap": _softcap,
    "slice": lambda inputs, attrs, out: inputs[0][..., attrs["lo"] : attrs["hi"]],
    "view": lambda inputs, attrs, out: inputs[0].reshape(shape_at(out, {})),
    "rows": lambda inputs, attrs, out: inputs[0][inputs[1]],
    "sample": _sample,
}
