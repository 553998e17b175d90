"""Sampling, defined: from a row of logits and its parameters to one token.

For each row, in this order; a comparison that ties always prefers the lower token id.

1. A NaN or −inf logit can't be drawn; +inf counts as the largest float32. A row without any
   finite logit gives token 0.
2. Every distinct id in `history` (−1 is empty): its logit is divided by `penalty` when positive,
   multiplied by it otherwise.
3. temperature < 1e-5: the largest logit's token. Otherwise logits become
   (logit − largest) / temperature, which can't overflow.
4. top_k > 0 keeps the top_k largest. Softmax.
5. min_p drops tokens with p < min_p · p_max.
6. top_p keeps the shortest run of tokens, in descending order of p, whose sum reaches top_p of
   what step 5 left; at least one.
7. u = uniform(seed, draw); the token is the first in descending order whose running sum exceeds
   u · total.

Probabilities and sums are float64, so that a sum over 100 000 tokens means something.
"""

from __future__ import annotations

import numpy as np

from flashrt.backends.reference.arrays import F32, Array, real

GREEDY = 1e-5  # temperatures below this are greedy
LARGEST = np.finfo(np.float32).max
_MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """One step of the splitmix64 generator: 64 bits to 64 bits (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, draw: int) -> float:
    """A number in [0, 1) that depends on (seed, draw) alone."""
    return (splitmix64((seed & _MASK) ^ splitmix64(draw & _MASK)) >> 11) / (1 << 53)


def sample(
    logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array,
    penalty: Array, seed: Array, draw: Array, history: Array,
) -> Array:  # fmt: skip
    """logits [N,V], one parameter a row (history [N,H]) → tokens i32[N]."""
    rows = [
        sample_row(
            real(logits[n]), float(temperature[n]), int(top_k[n]), float(top_p[n]), float(min_p[n]),
            float(penalty[n]), uniform(int(seed[n]), int(draw[n])), history[n],
        )
        for n in range(len(logits))
    ]  # fmt: skip
    return np.array(rows, np.int32)


def sample_row(
    logits: F32, temperature: float, top_k: int, top_p: float, min_p: float,
    penalty: float, u: float, history: Array,
) -> int:  # fmt: skip
    """Steps 1 to 7 for one row, with `u` the uniform number."""
    logits = penalised(drawable(logits), history, penalty)
    if temperature < GREEDY or not np.isfinite(logits).any():
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    scaled = (logits[order].astype(np.float64) - float(logits[order[0]])) / temperature
    if top_k > 0:
        scaled = scaled[:top_k]
    p = np.exp(scaled)
    p /= p.sum()
    p = p[p >= min_p * p[0]]
    sums = np.cumsum(p)
    kept = int(np.searchsorted(sums, top_p * sums[-1], side="left")) + 1
    sums = sums[: max(1, min(kept, len(sums)))]
    return int(order[min(int(np.searchsorted(sums, u * sums[-1], side="right")), len(sums) - 1)])


def drawable(logits: F32) -> F32:
    """NaN as −inf, +inf as the largest float32."""
    return np.where(np.isnan(logits), np.float32(-np.inf), np.minimum(logits, LARGEST))


def penalised(logits: F32, history: Array, penalty: float) -> F32:
    """Logits of the ids in `history` divided by the penalty when positive, else multiplied."""
    ids = np.unique(history[(history >= 0) & (history < len(logits))])
    if penalty == 1.0 or not len(ids):
        return logits
    out, seen = logits.copy(), logits[ids]
    with np.errstate(all="ignore"):  # what overflows is cut back below
        out[ids] = np.where(seen > 0, seen / np.float32(penalty), seen * np.float32(penalty))
    return np.where(np.isinf(logits), logits, np.clip(out, -LARGEST, LARGEST))
