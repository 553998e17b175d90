"""Mixtures of experts: routing, products with each token's experts, and their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flashrt.backends.reference.arrays import F32, I64, Array, AttrMap, Op, real
from flashrt.backends.reference.ops import activate, linear, sigmoid
from flashrt.ir.types import TensorType


def route(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> F32:
    """logits [T,E], bias [E] → [T, 2k]: numbers of the k best experts, best first, then their weights.

    Of equal experts (and groups) those of lower number come first.
    """
    logits, *bias = (real(a) for a in inputs)
    scores = _softmax(logits) if attrs["score"] == "softmax" else sigmoid(logits)
    choice = scores + bias[0] if bias else scores
    if attrs["groups"] > 1:
        choice = _in_best_groups(choice, attrs)
    ids = _best(choice, attrs["top_k"])
    weights = np.take_along_axis(scores, ids, axis=1)
    if attrs["normalise"]:
        weights = weights / weights.sum(axis=1, keepdims=True, dtype=np.float32)
    return np.concatenate([ids.astype(np.float32), weights * np.float32(attrs["scale"])], axis=1)


def _softmax(x: F32) -> F32:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return real(e / e.sum(axis=1, keepdims=True, dtype=np.float32))


def _best(x: F32, count: int) -> I64:
    return np.argsort(-x, axis=1, kind="stable")[:, :count]


def _in_best_groups(choice: F32, attrs: AttrMap) -> F32:
    """The scores of experts in the best groups, -inf for the others."""
    groups = choice.reshape(len(choice), attrs["groups"], -1)
    best = -np.sort(-groups, axis=2)
    score = best[:, :, :2].sum(axis=2) if attrs["group_score"] == "sum2" else best[:, :, 0]
    kept = np.zeros(score.shape, np.bool_)
    np.put_along_axis(kept, _best(score, attrs["top_groups"]), True, axis=1)
    return np.where(kept[:, :, None], groups, np.float32(-np.inf)).reshape(choice.shape)


def expert_linear(inputs: Sequence[Array], attrs: AttrMap, numerics: str) -> F32:
    """x [T,K] if shared, else [T*k,K], w [E*N,K], route [T,2k], bias [E*N] → [T*k,N], NaN for no expert.

    Rows of x beyond those are padding.
    """
    x, w, table, *bias = (real(a) for a in inputs)
    top_k, experts = attrs["top_k"], attrs["experts"]
    ids = _numbers(table[:, :top_k], experts).reshape(-1)
    each = np.arange(len(ids)) // (top_k if attrs["shared"] else 1)
    n = len(w) // experts
    out = np.full((len(ids), n), np.nan, np.float32)
    for e in np.unique(ids[ids >= 0]):
        rows, own = np.flatnonzero(ids == e), slice(e * n, (e + 1) * n)
        out[rows] = linear([x[each[rows]], w[own], *(b[own] for b in bias)], numerics)
    return out


def _numbers(chosen: F32, experts: int) -> I64:
    """Numbers of experts, -1 where there is no such expert."""
    return np.where((chosen >= 0) & (chosen < experts), chosen, np.float32(-1)).astype(np.int64)


def expert_cache(inputs: Sequence[Array], attrs: AttrMap, asked: Array) -> F32:
    """route [T,2k], table [L*E] → [T,4k]: routes to the cache and past it. asked [L*E]: counts choices."""
    route, table = real(inputs[0]), inputs[1].reshape(-1, attrs["experts"])[attrs["layer"]]
    chosen, weights = np.split(route, [attrs["top_k"]], axis=1)
    ids = _numbers(chosen, attrs["experts"])
    np.add.at(asked.reshape(-1, attrs["experts"])[attrs["layer"]], ids[ids >= 0], 1)
    slots = np.where(ids >= 0, table[ids] - 1, -1).astype(np.float32)
    far = np.where(slots < 0, chosen, np.float32(-1))
    return np.concatenate([slots, weights, far, weights], axis=1)


def _expert_join(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> F32:
    near, far, route = (real(a) for a in inputs)
    cached = route[:, : attrs["top_k"]].reshape(-1, 1) >= 0
    return _expert_sum([np.where(cached, near, far), route], attrs, out)


def _expert_sum(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> F32:
    y, table = (real(a) for a in inputs)
    top_k = attrs["top_k"]
    total = np.zeros((len(table), y.shape[1]), np.float32)
    for j in range(top_k):
        total += table[:, top_k + j, None] * y[j::top_k]
    return total


def _gated_clamped(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> F32:
    limit, alpha = np.float32(attrs["limit"]), np.float32(attrs["alpha"])
    gate, up = np.minimum(real(inputs[0]), limit), np.clip(real(inputs[1]), -limit, limit)
    return (up + np.float32(1)) * gate * sigmoid(alpha * gate)


def _moe(inputs: Sequence[Array], attrs: AttrMap, out: TensorType) -> F32:
    """What a raw graph has: x [T,H], ids [T,k], weights [T,k], gate_up, down and their biases."""
    x, ids, weights, gate_up, down, *biases = inputs
    facts = {"top_k": ids.shape[1], "experts": attrs["experts"], "shared": True}
    table = np.concatenate([real(ids), real(weights)], axis=1)
    both = expert_linear([x, gate_up, table, *biases[:1]], facts, "")
    gate, up = np.split(both, 2, axis=1)
    clamped = attrs["limit"] > 0
    inner = _gated_clamped([gate, up], attrs, out) if clamped else activate(attrs["act"], gate) * up
    y = expert_linear([inner, down, table, *biases[1:]], facts | {"shared": False}, "")
    return _expert_sum([y, table], facts, out)


# flashrt.backends.reference.evaluate computes `expert_linear`, which needs its numerics, and `expert_cache`,
# which needs its state
EXPERTS: Mapping[str, Op] = {
    "route": route,
    "expert_sum": _expert_sum,
    "expert_join": _expert_join,
    "gated_clamped": _gated_clamped,
    "flashrt.moe": _moe,
}
