"""Threads whose core is taken sit out: the decision, and a team that grows and shrinks between runs."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt.backends.cpu.pace import Lines, Pace, idle_ticks
from tests.backends.cpu_streams import compute, cpu, prepared
from tests.backends.test_cpu_team import BLOCKS, LAYER, x

LOOK = 20_000_000


def test_a_helper_that_stands_in_line_sits_out_until_cores_are_idle() -> None:
    pace = Pace(3)
    assert not pace.worked(LOOK, [0, 0, 0])  # the first look has nothing to compare with
    assert not pace.worked(LOOK, [LOOK // 20, 0, 0])
    assert not pace.worked(LOOK, [LOOK // 20, LOOK // 2, 0])  # once is nothing
    assert not pace.worked(LOOK, [LOOK // 20, LOOK // 2, LOOK])
    assert not pace.worked(LOOK, [LOOK // 20, LOOK, LOOK])
    assert pace.worked(LOOK, [LOOK // 20, 2 * LOOK, LOOK]) and pace.resting == {1}
    assert not pace.worked(LOOK, [LOOK // 20, 3 * LOOK, LOOK])  # it rests already
    assert not pace.idled(0.4) and pace.resting == {1}
    assert pace.idled(0.9) and not pace.resting
    assert not pace.worked(LOOK, [0, 9 * LOOK, 0])  # what it waited meanwhile doesn't count


def test_where_the_system_says_nothing_everyone_works() -> None:
    pace = Pace(2)
    assert not pace.worked(LOOK, None) and not pace.worked(LOOK, None) and not pace.resting
    assert Lines([2**30]).read() is None


@given(st.lists(st.tuples(st.lists(st.integers(0, 3 * LOOK), min_size=2, max_size=2), st.floats(0, 2))))
def test_whatever_happens_those_who_rest_come_back_once_all_cores_are_idle(
    looks: list[tuple[list[int], float]],
) -> None:
    pace, waits = Pace(2), [0, 0]
    for more, idle in looks:
        waits = [a + b for a, b in zip(waits, more, strict=True)]
        pace.worked(LOOK, waits)
        assert pace.resting <= {0, 1}
        pace.idled(idle)
    pace.idled(2.0)
    assert not pace.resting


def test_the_system_counts_what_threads_wait_and_cores_idle() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this system keeps no schedstat")
    lines = Lines([threading.get_native_id()])
    waited = lines.read()
    assert waited is not None and waited[0] >= 0
    lines.close()
    assert idle_ticks({0}) is not None and idle_ticks({10**6}) is None


@pytest.mark.parametrize("threads", [2, 3])
def test_a_team_gives_the_same_bits_whoever_sits_out(threads: int) -> None:
    """Helpers leave and come back between runs, some while they are still on their way to sleep."""
    device = cpu(threads)
    team = device._team
    team._pace = None  # this test decides
    memory = prepared(device, LAYER, {0: x(16)}, BLOCKS, {"T": 16})
    code = device.load(compute(memory.stream), memory)
    device.run(code, 1)
    want, rng = memory.read(5).tobytes(), np.random.default_rng(threads)
    for epoch in range(2, 400):
        if rng.random() < 0.5:
            team._wanted[1:] = rng.integers(0, 2, threads - 1)
            team._recall(threads, team._control.ctypes.data)
        memory.read(5)[...] = 0
        device.run(code, epoch)
        assert memory.read(5).tobytes() == want, (epoch, team.working)
    device.close()
