"""The live loop's decisions on pretend devices: it leaves, comes back, moves cuts, and never thrashes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt.runtime.control import MOST, WINDOW, Controller, Ran, Switch
from flashrt.runtime.elastic import Elastic, key_of
from tests.runtime.simulated import FAR, HINTS, HOME, PERIOD, Twins, split_elastic

ELASTIC = split_elastic()
BOTH = frozenset({HOME, FAR})


def bounded(switches: list[Switch]) -> bool:
    """At most MOST in any window."""
    times = [s.at for s in switches]
    return all(sum(t <= u < t + WINDOW for u in times) <= MOST for t in times)


# ---- what is predicted -------------------------------------------------------------
def test_at_one_end_a_device_rests() -> None:
    near, far = ELASTIC.ends
    assert ELASTIC.live(near) == {HOME}
    assert ELASTIC.live(far) == ELASTIC.live(ELASTIC.start) == BOTH


def test_slower_devices_get_less() -> None:
    even = ELASTIC.best(HINTS, {})
    less = ELASTIC.best(HINTS, {FAR: 3.0})
    assert all(less[s] >= even[s] for s in even) and less["s"] > even["s"]
    assert ELASTIC.step(HINTS, less, {FAR: 3.0}) < ELASTIC.step(HINTS, even, {FAR: 3.0})


def test_busy_is_the_sum_of_the_estimates() -> None:
    start = ELASTIC.busy(HINTS, ELASTIC.start)
    near = ELASTIC.busy(HINTS, ELASTIC.ends[0])
    assert near[HOME] > start[HOME] > start[FAR] > near[FAR]


# ---- undisturbed -------------------------------------------------------------------
def test_a_quiet_machine_is_left_alone() -> None:
    twins = Twins(ELASTIC, noise=0.08)
    twins.run(60)
    assert twins.controller.count == 0 and twins.at == ELASTIC.start


def test_a_light_load_is_no_disturbance() -> None:
    twins = Twins(ELASTIC, hogs={FAR: 0.08})
    twins.run(30)
    assert twins.controller.count == 0


# ---- a core that others use --------------------------------------------------------
def test_a_disturbed_device_is_left_and_come_back_to() -> None:
    """One hog, then two, then none: the loop is near the best fixed position throughout."""
    twins = Twins(ELASTIC)
    twins.run(5)
    for hogs in (1, 2):
        twins.hogs = {FAR: hogs}
        began, held = twins.now, 1 / twins.step(ELASTIC.start)
        rate = twins.run(5)
        assert rate >= 0.9 * twins.best()
        assert hogs == 1 or rate >= 1.25 * held
        assert ELASTIC.live(twins.at) == {HOME}
    left = twins.controller.switches[0]
    assert left.at <= 5 + 2 * PERIOD + 1e-9 and FAR in left.because
    twins.hogs, began = {}, twins.now
    twins.run(5)
    back = twins.controller.switches[-1]
    assert twins.at == ELASTIC.start and back.at - began <= 1.0
    assert twins.controller.count == 2


def test_a_disturbed_home_can_not_be_left() -> None:
    """The cache is there: whatever the cuts, steps wait for it. So they stay."""
    twins = Twins(ELASTIC, hogs={HOME: 2})
    twins.run(10)
    assert twins.controller.count == 0


def test_load_that_comes_and_goes_makes_no_thrash() -> None:
    twins = Twins(ELASTIC)
    for i in range(150):
        twins.hogs = {FAR: 2.0} if i % 2 else {}
        twins.run(0.4)
    assert bounded(list(twins.controller.switches))


@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_an_invisible_disturbance_is_left_by_the_time_it_takes(seconds: float) -> None:
    """Where nobody tells the load of cores: the steps' own times have to do."""
    twins = Twins(ELASTIC, blind=True)
    twins.run(5)
    twins.hogs = {FAR: 2}
    twins.run(seconds)
    assert ELASTIC.live(twins.at) == {HOME}
    twins.run(60)
    assert bounded(list(twins.controller.switches))
    twins.hogs = {}
    twins.run(200)
    assert twins.at == ELASTIC.start


# ---- instructions that take longer -------------------------------------------------
def test_a_slower_device_gets_less_and_gets_it_back() -> None:
    twins = Twins(ELASTIC)
    twins.run(5)
    twins.slow = {FAR: 2.0}
    twins.run(10)
    assert ELASTIC.live(twins.at) == BOTH and twins.at["s"] > ELASTIC.start["s"]
    assert twins.step(twins.at) < twins.step(ELASTIC.start)
    twins.slow = {}
    twins.run(200)
    assert twins.step(twins.at) <= 1.05 * twins.step(ELASTIC.start)
    assert bounded(list(twins.controller.switches))


def test_a_move_that_does_not_pay_is_taken_back_once() -> None:
    """The model says that other cuts are faster, and they aren't: one try, then peace for a while."""
    slow = {FAR: 1.6}
    twins = Twins(ELASTIC, slow=slow, penalty=lambda at: 1.0 if at == ELASTIC.start else 1.5)
    twins.run(50)
    assert twins.at == ELASTIC.start
    assert twins.controller.count == 2


def test_sharing_that_does_not_pay_is_given_up() -> None:
    """Exchanges take longer than the plan thought: alone is faster, and it stays so."""
    twins = Twins(ELASTIC, exchange=0.02)
    assert twins.step(ELASTIC.ends[0]) < twins.step(ELASTIC.start)
    twins.run(60)
    assert ELASTIC.live(twins.at) == {HOME} and twins.controller.count == 1


# ---- anything at all ---------------------------------------------------------------
shares = st.none() | st.floats(0, 1)
samples = st.tuples(
    st.floats(0.001, 1.0),  # since the last
    st.fixed_dictionaries({HOME: shares, FAR: shares}),
    st.none() | st.tuples(st.integers(0, 100), st.floats(1e-5, 10), st.floats(0, 10), st.floats(0, 10)),
)


def told(sample: tuple[int, float, float, float] | None) -> Mapping[str, Ran]:
    if sample is None:
        return {}
    steps, seconds, home, far = sample
    return {"v": Ran(HINTS if steps else None, steps, seconds, {HOME: home, FAR: far} if steps else {})}


@settings(max_examples=60, deadline=None)
@given(st.lists(samples, max_size=80))
def test_whatever_is_seen_positions_are_legal_and_switches_few(seen: list[Any]) -> None:
    controller, now, before = Controller({"v": ELASTIC}), 0.0, ELASTIC.start
    for elapsed, foreign, ran in seen:
        now += elapsed
        switch = controller.decide(now, foreign, told(ran))
        at = controller.positions["v"]
        assert ELASTIC.allows(at)
        assert (switch is None) == (key_of(at) == key_of(before))
        before = at
    assert bounded(list(controller.switches))
    assert all(a.at < b.at for a, b in pairwise(controller.switches))


def test_two_variants_move_at_once() -> None:
    """Also the one that didn't run: it stands right when its turn comes."""
    variants: dict[str, Elastic] = {"small": ELASTIC, "large": ELASTIC}
    controller = Controller(variants)
    ran = {"small": Ran(HINTS, 50, 0.004, {HOME: 0.003, FAR: 0.002})}
    for i in range(1, 10):
        controller.decide(i * PERIOD, {HOME: 0.0, FAR: 0.0}, ran)
    slow = {"small": Ran(HINTS, 15, 0.012, {HOME: 0.003, FAR: 0.006})}
    switches = [controller.decide((10 + i) * PERIOD, {HOME: 0.0, FAR: 0.67}, slow) for i in range(2)]
    assert switches[0] is None and switches[1] is not None
    assert set(switches[1].positions) == {"small", "large"}
    assert all(ELASTIC.live(at) == {HOME} for at in switches[1].positions.values())


def test_a_process_that_was_stopped_for_a_while_learns_nothing_from_it() -> None:
    controller = Controller({"v": ELASTIC})
    ran = {"v": Ran(HINTS, 50, 0.004, {HOME: 0.003, FAR: 0.002})}
    for i in range(1, 10):
        controller.decide(i * PERIOD, {HOME: 0.0, FAR: 0.0}, ran)
    hung = {"v": Ran(HINTS, 5, 7.0, {HOME: 0.003, FAR: 30.0}, running=35.0)}
    assert controller.decide(40.0, {HOME: 0.5, FAR: 0.9}, hung) is None
    for i in range(1, 10):
        assert controller.decide(40.0 + i * PERIOD, {HOME: 0.0, FAR: 0.0}, ran) is None


def test_nothing_is_switched_while_nothing_runs() -> None:
    controller = Controller({"v": ELASTIC})
    for i in range(1, 50):
        assert controller.decide(i * PERIOD, {HOME: 0.0, FAR: 1.0}, {}) is None
    ran = {"v": Ran(HINTS, 10, 0.02, {})}
    assert controller.decide(51 * PERIOD, {HOME: 0.0, FAR: 0.67}, ran) is not None
