"""Rates learned from instruction times: they follow, they age, and nonsense is left out."""

from __future__ import annotations

import math
import threading
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt.probes.delivered import Learner


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_bytes_over_time() -> None:
    """The sum of bytes over the sum of seconds: a burst of tiny ones doesn't outweigh the long one."""
    learner = Learner(clock=Clock())
    learner.observe("cpu:0", 9e9, 1e9, 0.9)
    for _ in range(100):
        learner.observe("cpu:0", 0, 0, 0.001)
    known = learner.rates()["cpu:0"]
    assert astuple(known) == pytest.approx((9e9, 1e9, 1.0, 0.0))


def test_an_observation_counts_half_after_the_half_life() -> None:
    clock = Clock()
    learner = Learner(half_life=2.0, clock=clock)
    learner.observe("cpu:0", 10e9, 0, 1.0)
    clock.now += 2.0
    assert astuple(learner.rates()["cpu:0"]) == pytest.approx((10e9, 0.0, 0.5, 2.0))
    learner.observe("cpu:0", 4e9, 0, 1.0)
    assert learner.rates()["cpu:0"].read == pytest.approx((0.5 * 10e9 + 4e9) / 1.5)


def test_a_change_is_seen_within_a_few_half_lives() -> None:
    clock = Clock()
    learner = Learner(half_life=0.1, clock=clock)
    for rate in [10e9] * 50 + [2e9] * 50:
        clock.now += 0.01
        learner.observe("cpu:0", rate * 0.01, 0, 0.01)
    assert learner.rates()["cpu:0"].read == pytest.approx(2e9, rel=0.2)


def test_what_ran_long_ago_is_forgotten() -> None:
    clock = Clock()
    learner = Learner(clock=clock)
    learner.observe("cpu:0", 1, 1, 0.1)
    learner.observe("gpu:0", 1, 1, 0.1)
    clock.now += 60
    learner.observe("gpu:0", 1, 1, 0.1)
    assert list(learner.rates()) == ["gpu:0"]


def test_a_clock_that_goes_back() -> None:
    clock = Clock()
    learner = Learner(clock=clock)
    learner.observe("cpu:0", 5.0, 1, 1.0)
    clock.now -= 50
    learner.observe("cpu:0", 5.0, 1, 1.0)
    assert learner.rates()["cpu:0"].read == pytest.approx(5.0)


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(numbers, numbers, numbers)
def test_nonsense_changes_nothing(bytes: float, flop: float, seconds: float) -> None:
    learner = Learner(clock=Clock())
    learner.observe("cpu:0", 6.0, 2.0, 2.0)
    before = learner.rates()["cpu:0"]
    taken = learner.observe("cpu:0", bytes, flop, seconds)
    rates = learner.rates()["cpu:0"]
    if not taken:
        assert rates == before
    assert rates.read >= 0 and rates.flops >= 0 and math.isfinite(rates.seconds)


def test_the_rates_cannot_be_changed() -> None:
    rates = Learner(clock=Clock()).rates()
    with pytest.raises(TypeError):
        rates["x"] = None  # type: ignore[index]


def test_many_threads() -> None:
    learner = Learner(clock=Clock())

    def observe() -> None:
        for _ in range(1000):
            learner.observe("cpu:0", 2.0, 1.0, 1.0)

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert learner.rates()["cpu:0"].seconds == pytest.approx(4000)
