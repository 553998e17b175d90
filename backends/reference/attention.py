"""Paged attention, in two kernels: `kv_write`, then `attention`.

State kv f32 or bf16 [P, 2, Hk, 16, D]: P pages of 16 tokens; index 0 keys, 1 values; D = max(head_dim,
value_dim), of which keys use the first head_dim and values the first value_dim channels. Latent attention's
has no second index, [P, 1, Hk, 16, head_dim]: the value of a key is its last value_dim channels.

Token t belongs to sequence row seq[t]. Position p of sequence s lies in page pages[s, p // 16],
row p % 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flashrt.backends.reference.arrays import F32, Array, AttrMap, real
from flashrt.backends.reference.quants import round_bf16
from flashrt.ir.ops import ATTENTION_BF16, ATTENTION_EXACT, PAGE


@dataclass(frozen=True, slots=True)
class Shape:
    """The attributes of an attention node."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    causal: bool = True
    latent: bool = False

    @property
    def own(self) -> int:
        """Channels of k: of a key, without those that its value is."""
        return self.head_dim - self.value_dim * self.latent

    @staticmethod
    def of(attrs: AttrMap) -> Shape:
        """Reads the attributes; window, softcap, causal and latent may be left out."""
        given = {k: v for k, v in attrs.items() if k in Shape.__slots__}
        return Shape(**{**given, "window": given.get("window") or 0, "softcap": given.get("softcap") or 0.0})


def step(inputs: Sequence[Array], kv: F32, shape: Shape, numerics: str = ATTENTION_EXACT) -> F32:
    """Both kernels: inputs are q, k, v, positions, seq, pages and, with sinks, sinks."""
    q, k, v, positions, seq, pages, *sinks = inputs
    kv_write(kv, shape, k, v, positions, seq, pages)
    return attention(kv, shape, q, positions, seq, pages, sinks[0] if sinks else None, numerics=numerics)


def kv_write(kv: F32, shape: Shape, k: Array, v: Array, positions: Array, seq: Array, pages: Array) -> None:
    """Writes the step's keys k[T, Hk*own] and values v[T, Hk*value_dim] into their pages of `kv`."""
    page, row = pages[seq, positions // PAGE], positions % PAGE
    t, heads = len(positions), shape.kv_heads
    kv[page, 0, :, row, : shape.own] = k.reshape(t, heads, shape.own)
    if shape.latent:
        kv[page, 0, :, row, shape.own :] = v.reshape(t, heads, shape.value_dim)
    else:
        kv[page, 1, :, row, : shape.value_dim] = v.reshape(t, heads, shape.value_dim)


def attention(
    kv: F32,
    shape: Shape,
    q: Array,
    positions: Array,
    seq: Array,
    pages: Array,
    sinks: Array | None = None,
    numerics: str = ATTENTION_EXACT,
) -> F32:
    """q[T, Hq*head_dim] → [T, Hq*value_dim]: each token attends to the written keys of its sequence.

    causal: to positions p ≤ its own; otherwise to every position up to the largest that its
    sequence has in this step. window > 0: only to p > own − window. Scores are q·k·scale, then
    softcap·tanh(score/softcap) when softcap > 0; softmax in f32. Query head h reads key head
    h // (Hq/Hk). sinks[Hq]: one more logit per head, which takes probability but has no value.
    With "act=bf16 …" queries and weights are rounded to bf16 before their products, as keys and values were
    when they were written.
    """
    out = np.zeros((len(positions), shape.heads * shape.value_dim), np.float32)
    for s in np.unique(seq):
        tokens = np.flatnonzero(seq == s)
        length = int(positions[tokens].max()) + 1
        table = kv[pages[s, : -(-length // PAGE)]]  # [pages, 2, Hk, 16, D]
        rows = table.transpose(1, 2, 0, 3, 4).reshape(kv.shape[1], shape.kv_heads, -1, kv.shape[-1])
        keys, values = rows[0, :, :length, : shape.head_dim], rows[-1, :, :length, : shape.value_dim]
        if shape.latent:
            values = keys[..., shape.own :]
        rounded = round_bf16 if numerics == ATTENTION_BF16 else real
        keys, values, asked = real(keys), real(values), rounded(real(q))
        # token by token, over the keys it sees: its sums don't depend on what else is in the step
        for t in tokens:
            end = int(positions[t]) + 1 if shape.causal else length
            start = max(0, int(positions[t]) + 1 - shape.window) if shape.window > 0 else 0
            out[t] = attend(asked[t], keys[:, start:end], values[:, start:end], shape, sinks, rounded)
    return out


def attend(
    q: F32, keys: F32, values: F32, shape: Shape, sinks: Array | None, rounded: Callable[[Array], F32]
) -> F32:
    """One token: q[Hq*d] over keys[Hk, L, d], values[Hk, L, dv] → [Hq*dv]. rounded: of weights."""
    group = shape.heads // shape.kv_heads
    grouped = q.reshape(shape.kv_heads, group, shape.head_dim)
    scores = np.einsum("hgd,hld->hgl", grouped, keys) * np.float32(shape.scale)
    if shape.softcap > 0:
        scores = np.float32(shape.softcap) * np.tanh(scores / np.float32(shape.softcap))
    sink = np.full((shape.kv_heads, group, 1), -np.inf, np.float32)
    if sinks is not None:
        sink = real(sinks).reshape(sink.shape)
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    return (np.einsum("hgl,hld->hgd", rounded(weights), values) / total).reshape(-1)
