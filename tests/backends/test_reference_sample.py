"""Sampling: its limits, its sets, its reproducibility and its distribution."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashrt.backends.reference.sample import sample, splitmix64, uniform

RNG = np.random.default_rng(5)
LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32))


def draw(
    logits: Any, draws: int = 1, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0, penalty: float = 1.0, seed: int = 0, history: Any = (),
) -> NDArray[np.int32]:  # fmt: skip
    """Tokens for draws 0, 1, … of one row of logits."""
    rows = np.ones(draws, np.float32)
    return sample(
        np.tile(np.float32(logits), (draws, 1)),
        rows * temperature,
        np.full(draws, top_k, np.int32),
        rows * top_p,
        rows * min_p,
        rows * penalty,
        np.full(draws, seed, np.int64),
        np.arange(draws),
        np.tile(np.array([*history, -1], np.int32), (draws, 1)),
    )


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-4, 1e-2])
def test_cold_is_greedy_and_finite(temperature: float) -> None:
    for _ in range(20):
        logits = RNG.uniform(-1e4, 1e4, 50).astype(np.float32)
        assert set(draw(logits, 4, temperature=temperature)) == {int(logits.argmax())}


def test_ties_go_to_the_lower_token() -> None:
    assert draw([1, 5, 5, 5], temperature=0) == [1]
    assert set(draw([5, 1, 5, 5], 50, top_k=2)) == {0, 2}
    assert set(draw([1, 1, 1, 1], 50, top_p=0.5)) == {0, 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_do_not_crash(temperature: float) -> None:
    nan, inf = np.nan, np.inf
    assert set(draw([nan, 1, -inf, nan], 20, temperature=temperature)) == {1}
    assert set(draw([0, inf, nan], 20, temperature=temperature)) == {1}
    assert set(draw([nan, nan], 5, temperature=temperature)) == {0}
    assert set(draw([-inf, -inf], 5, temperature=temperature)) == {0}
    big = np.finfo(np.float32).max
    assert set(draw([-big, big], 5, temperature=temperature, penalty=0.1, history=[0, 1])) == {1}


def test_sets() -> None:
    assert set(draw(LOGITS, 400)) == {0, 1, 2, 3, 4}
    assert set(draw(LOGITS, 200, top_k=1)) == {1}
    assert set(draw(LOGITS, 200, top_k=3)) == {1, 3, 4}
    assert set(draw(LOGITS, 200, top_k=99)) == {0, 1, 2, 3, 4}
    assert set(draw(LOGITS, 200, min_p=0.45)) == {1, 3, 4}  # 0.2 ≥ 0.45·0.4 > 0.1
    assert set(draw(LOGITS, 200, min_p=1.0)) == {1}
    assert set(draw(LOGITS, 200, top_p=0.39)) == {1}
    assert set(draw(LOGITS, 200, top_p=0.6)) == {1, 3}
    assert set(draw(LOGITS, 200, top_p=0.0)) == {1}
    assert set(draw(LOGITS, 200, top_k=3, top_p=0.7)) == {1, 3}  # 0.65 of the 0.85 that top_k left is 0.76


def test_penalty() -> None:
    assert draw([2.0, 1.9], temperature=0, penalty=1.2, history=[0, 0]) == [1]
    assert draw([-1.0, -1.1], temperature=0, penalty=1.2, history=[0]) == [1]
    assert draw([2.0, 1.9], temperature=0, penalty=1.2) == [0]
    assert draw([2.0, 1.9], temperature=0, penalty=1.0, history=[0]) == [0]


def test_same_seed_and_draw_same_token_in_any_batch() -> None:
    logits = RNG.standard_normal(100)
    many = draw(logits, 30, seed=9)
    np.testing.assert_array_equal(many, draw(logits, 30, seed=9))
    np.testing.assert_array_equal(many[:7], draw(logits, 7, seed=9))
    assert (many != draw(logits, 30, seed=10)).any()
    assert len(set(many)) > 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution(temperature: float) -> None:
    n = 4000
    counts = Counter(draw(LOGITS, n, temperature=temperature, seed=1).tolist())
    p = np.exp(LOGITS / temperature)
    p /= p.sum()
    chi = sum((counts[i] - n * p[i]) ** 2 / (n * p[i]) for i in range(5))
    assert chi < 18.5  # 4 degrees of freedom: exceeded once in a thousand


def test_generator() -> None:
    """Known values of splitmix64 from its authors' seed 0, and negative seeds."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    numbers = np.array([uniform(-1, i) for i in range(2000)])
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.03
