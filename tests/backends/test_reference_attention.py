"""Paged attention against torch's, with sequences of different lengths flat in one batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flashrt.backends.reference import evaluate_node
from flashrt.backends.reference.attention import Shape, attention, kv_write
from flashrt.ir.types import TensorType

PAGE = 16
F32 = NDArray[np.float32]
RNG = np.random.default_rng(3)


def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


@dataclass
class Sequence:
    """A sequence as it grows: every q, k and v it ever had, and its pages."""

    q: F32
    k: F32
    v: F32
    pages: list[int]


LENGTHS = (5, 37, 16)
BASE = Shape(heads=4, kv_heads=4, head_dim=8, value_dim=8, scale=0.3)


def sequences(shape: Shape) -> list[Sequence]:
    """Three sequences on pages that are in no order."""
    pages = iter(RNG.permutation(np.arange(1, 9)).tolist())
    return [
        Sequence(
            r(n, shape.heads, shape.head_dim), r(n, shape.kv_heads, shape.head_dim),
            r(n, shape.kv_heads, shape.value_dim), [next(pages) for _ in range(-(-n // PAGE))],
        )
        for n in LENGTHS
    ]  # fmt: skip


def expected(s: Sequence, shape: Shape, sinks: F32 | None) -> F32:
    """Attention of a whole sequence: torch's where it can do it, the formula with softcap or sinks."""
    n, group = len(s.q), shape.heads // shape.kv_heads
    q, k, v = (torch.from_numpy(x).double().transpose(0, 1) for x in (s.q, s.k, s.v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    mask = distance >= 0 if shape.causal else torch.ones(n, n, dtype=torch.bool)
    if shape.window:
        mask &= distance < shape.window
    if not shape.softcap and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=shape.scale)
    else:
        scores = q @ k.transpose(1, 2) * shape.scale
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            column = torch.from_numpy(sinks).double()[:, None, None].expand(-1, n, 1)
            scores = torch.cat([scores, column], 2)
        out = scores.softmax(-1)[..., :n] @ v
    return np.asarray(out.transpose(0, 1).reshape(n, -1).float())


def tables(all: list[Sequence]) -> NDArray[np.int32]:
    got = np.full((len(all), 4), -1, np.int32)
    for i, s in enumerate(all):
        got[i, : len(s.pages)] = s.pages
    return got


def step(
    all: list[Sequence], spans: list[tuple[int, int, int]], kv: F32, shape: Shape, sinks: F32 | None
) -> F32:
    """One step over pieces (sequence, from, to), as the `attention` node of a logical graph."""
    take = lambda field: np.concatenate([getattr(all[i], field)[lo:hi] for i, lo, hi in spans])  # noqa: E731
    q, k, v = (take(f).reshape(sum(hi - lo for _, lo, hi in spans), -1) for f in "qkv")
    positions = np.concatenate([np.arange(lo, hi, dtype=np.int32) for _, lo, hi in spans])
    seq = np.concatenate([np.full(hi - lo, i, np.int32) for i, lo, hi in spans])
    attrs: dict[str, Any] = {name: getattr(shape, name) for name in Shape.__slots__}
    inputs = [q, k, v, positions, seq, tables(all), *([] if sinks is None else [sinks])]
    out = TensorType("f32", (len(q), shape.heads * shape.value_dim))
    return evaluate_node("attention", inputs, attrs, out, kv=kv)


VARIANTS = {
    "plain": BASE,
    "grouped": replace(BASE, heads=6, kv_heads=2),
    "window": replace(BASE, window=7),
    "softcap": replace(BASE, softcap=1.5),
    "value_dim": replace(BASE, head_dim=12, value_dim=8),
    "wide values": replace(BASE, head_dim=8, value_dim=12),
    "all": replace(BASE, heads=8, kv_heads=2, window=20, softcap=2.0),
}


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_mixed_and_decode_agree_with_whole_sequences(name: str, with_sinks: bool) -> None:
    shape = VARIANTS[name]
    sinks = r(shape.heads) if with_sinks else None
    all = sequences(shape)
    kv = np.full((9, 2, shape.kv_heads, PAGE, max(shape.head_dim, shape.value_dim)), np.nan, np.float32)
    steps = [
        [(1, 0, 20), (0, 0, 4)],  # prefill of two, one of them in part
        [(2, 0, 15), (1, 20, 36), (0, 4, 5)],  # prefill, the rest of a prefill, decode
        [(1, 36, 37), (2, 15, 16)],  # decode
    ]
    want = [expected(s, shape, sinks) for s in all]
    for spans in steps:
        got = step(all, spans, kv, shape, sinks)
        np.testing.assert_allclose(
            got, np.concatenate([want[i][lo:hi] for i, lo, hi in spans]), rtol=2e-5, atol=2e-6
        )


def test_not_causal_sees_the_whole_step() -> None:
    shape = replace(BASE, causal=False)
    all = sequences(shape)
    kv = np.full((9, 2, 4, PAGE, 8), np.nan, np.float32)
    got = step(all, [(0, 0, 5), (2, 0, 16)], kv, shape, None)
    want = np.concatenate([expected(all[0], shape, None), expected(all[2], shape, None)])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_write_touches_only_its_rows() -> None:
    kv = np.zeros((3, 2, 1, PAGE, 4), np.float32)
    shape = Shape(heads=1, kv_heads=1, head_dim=4, value_dim=2, scale=1)
    positions, seq, pages = np.array([17]), np.array([0]), np.array([[1, 2]])
    kv_write(kv, shape, np.ones((1, 4), np.float32), np.ones((1, 2), np.float32), positions, seq, pages)
    np.testing.assert_array_equal(kv[2, 0, 0, 1], 1)
    np.testing.assert_array_equal(kv[2, 1, 0, 1], [1, 1, 0, 0])
    assert kv.sum() == 6


def test_large_scores_stay_finite() -> None:
    shape = replace(BASE, scale=1e4)
    all = sequences(shape)
    kv = np.zeros((9, 2, 4, PAGE, 8), np.float32)
    step(all, [(0, 0, 5)], kv, shape, None)
    got = attention(kv, shape, all[0].q.reshape(5, -1), np.arange(5), np.zeros(5, int), tables(all))
    assert np.isfinite(got).all()


def test_tokens_give_the_same_bits_in_any_step() -> None:
    """Token by token or all at once, alone or beside other sequences."""
    shape = VARIANTS["all"]
    all = sequences(shape)
    size = (9, 2, shape.kv_heads, PAGE, 8)
    together = step(all, [(0, 0, 5), (1, 0, 37), (2, 0, 16)], np.zeros(size, np.float32), shape, None)
    kv = np.zeros(size, np.float32)
    alone = np.concatenate([step(all, [(1, i, i + 1)], kv, shape, None) for i in range(37)])
    np.testing.assert_array_equal(alone, together[5:42])


def test_latent_attention_is_that_of_keys_which_end_in_their_values() -> None:
    """Its cache holds a row once: a key's own channels, and behind them its value."""
    t, own, dv = 37, 4, 12
    q, k, v = r(t, 3 * (own + dv)), r(t, own), r(t, dv)
    positions, seq = np.arange(t), np.zeros(t, np.int64)
    pages = np.array([[2, 0, 1]])
    plain = Shape(heads=3, kv_heads=1, head_dim=own + dv, value_dim=dv, scale=0.3)
    whole, once = (
        np.zeros((3, 2, 1, PAGE, own + dv), np.float32),
        np.zeros((3, 1, 1, PAGE, own + dv), np.float32),
    )
    kv_write(whole, plain, np.concatenate([k, v], axis=1), v, positions, seq, pages)
    kv_write(once, replace(plain, latent=True), k, v, positions, seq, pages)
    assert np.array_equal(once[:, 0], whole[:, 0])
    want = attention(whole, plain, q, positions, seq, pages)
    got = attention(once, replace(plain, latent=True), q, positions, seq, pages)
    assert np.array_equal(got, want)
