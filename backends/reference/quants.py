"""Activation quantisation, schemes "i8/32" and "bf16": the definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from flashrt.backends.reference.arrays import F32, Array
from flashrt.layouts import BLOCK, U8


def _blocks(x: F32) -> F32:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(x.shape[0], -1, BLOCK)


def quantize(x: F32) -> U8:
    """x f32[T, K] → u8[T, K + 4*ceildiv(K,32)]: K signed bytes, then one f32 scale a block of 32.

    scale = largest magnitude / 127 (0 for a block of zeros); byte = x/scale, half to even.
    """
    blocks = _blocks(x)
    scale = np.abs(blocks).max(axis=2, initial=0).astype(np.float32) / np.float32(127)
    q = np.rint(blocks / np.where(scale == 0, np.float32(1), scale)[..., None])
    values = np.clip(q, -127, 127).astype(np.int8).reshape(x.shape[0], -1)[:, : x.shape[1]]
    return np.concatenate([np.ascontiguousarray(values).view(np.uint8), scale.view(np.uint8)], axis=1)


def dequantize(data: U8) -> F32:
    """What `quantize` made, as f32[T, K]."""
    # a block of b values takes b + 4 bytes; only the last one may be short
    k = data.shape[1] - 4 * -(-data.shape[1] // (BLOCK + 4))
    scale = np.ascontiguousarray(data[:, k:]).view(np.float32)
    values = np.ascontiguousarray(data[:, :k]).view(np.int8).astype(np.float32)
    return (_blocks(values) * scale[..., None]).reshape(data.shape[0], -1)[:, :k]


def round_bf16(x: F32) -> F32:
    """x rounded to bf16, half to even."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def padded_bf16(x: F32) -> Array:
    """x f32[T, K] → bf16, T and K rounded up to multiples of 32 with zeros."""
    t, k = x.shape
    return np.pad(x, ((0, -t % BLOCK), (0, -k % BLOCK))).astype(ml_dtypes.bfloat16)


def fake_quantize(x: F32) -> F32:
    """x rounded to what its quantised form holds."""
    return dequantize(quantize(x))


# schemes of the `quantize` instruction
SCHEMES: Mapping[str, Callable[[F32], Array]] = {"i8/32": quantize, "bf16": padded_bf16}
