"""The pretend clock: its arithmetic, and null devices that share it."""

from __future__ import annotations

import threading
from typing import cast

import numpy as np
import pytest

from flashrt.backend import Compute
from flashrt.backends.null import NullBackend, simulate
from flashrt.backends.reference import ReferenceBackend
from flashrt.errors import LawError
from flashrt.ir.text import read_micro
from flashrt.machine import Device, Measured
from tests.backends.memory import HandMemory

GUESS = Measured(1.0, "assumed")

STREAM = """micro test
symbol T lo=1 hi=8 hint=2
split s positions=[0,16,32] start=16
weight w f32[32,4] sources=[w] layout=f32
slot 0 a:0 f32[T,4]
slot 1 a:0 f32[T,4]
slot 2 b:0 f32[T,4]
block w a:0 lo=0 hi=32 bytes=512
prefetch device=a:0 lane=copy_in waits=[!3@-1] signals=!0 block=w bytes=512 est=(2*s)us
dispatch device=a:0 lane=compute signals=!1 kernel=scale args=[%0] dst=%1 attrs={by=2.0} est=(10*T)us
dispatch device=b:0 lane=compute waits=[!1] signals=!2 kernel=scale args=[%1] dst=%2 attrs={by=2.0} est=7us
dispatch device=a:0 lane=compute waits=[!0] signals=!3 kernel=scale args=[%1] dst=%0 attrs={by=2.0} est=5us
evict device=a:0 lane=copy_in waits=[!3] block=w est=1us
"""


def times(stream: str, **env: int) -> list[tuple[float, float]]:
    return [(s.start, s.end) for s in simulate(read_micro(stream), env).spans]


def test_arithmetic_of_two_steps() -> None:
    """T=2, s=16: the second step starts when both compute lanes are through the first (37 us), and its
    prefetch when the copy lane's evict is too (38 us)."""
    assert times(STREAM) == [
        (0, 32), (0, 20), (20, 27), (32, 37), (37, 38),
        (38, 70), (37, 57), (57, 64), (70, 75), (75, 76),
    ]  # fmt: skip


def test_estimates_follow_symbols_and_splits() -> None:
    line = simulate(read_micro(STREAM), {"T": 8, "s": 0}, steps=1)
    assert [(s.start, s.end) for s in line.spans] == [(0, 0), (0, 80), (80, 87), (80, 85), (85, 86)]
    assert line.step_time == 87


def test_busy_and_step_time() -> None:
    line = simulate(read_micro(STREAM), {})
    assert line.steps == ((0, 37), (37, 75)) and line.step_time == 38
    assert line.busy() == {
        ("a:0", "copy_in"): pytest.approx(66 / 76),
        ("a:0", "compute"): pytest.approx(50 / 76),
        ("b:0", "compute"): pytest.approx(14 / 76),
    }
    assert [s.index for s in line.of(2)] == [0, 1, 2, 3, 4]


def test_wait_for_a_later_tick_is_refused() -> None:
    with pytest.raises(LawError, match="!3 is awaited"):
        times(STREAM.replace("waits=[!1]", "waits=[!3]"))


def test_devices_share_the_clock() -> None:
    """Two null devices in threads, awaiting each other, stamp the times of `simulate`."""
    stream, backend = read_micro(STREAM), NullBackend()
    devices = {d: backend.open(Device(d, "null", "test", 1 << 30, GUESS, {}, GUESS)) for d in ("a:0", "b:0")}
    memory = HandMemory(stream, devices, {"T": 2, "s": 16})
    codes = {
        d: on.load([cast(Compute, i) for i in stream.instrs if (i.device, i.lane) == (d, "compute")], memory)
        for d, on in devices.items()
    }
    spans = simulate(stream, {}).spans
    for epoch in (1, 2):
        memory.ticks[0] = epoch  # the copy lane, which the executor runs
        threads = [threading.Thread(target=on.run, args=(codes[d], epoch)) for d, on in devices.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
        assert memory.ticks.tolist() == [epoch] * 4
        for d, indices in {"a:0": [1, 3], "b:0": [2]}.items():
            want = [spans[5 * (epoch - 1) + i] for i in indices]
            got = devices[d].stamps(codes[d])
            np.testing.assert_array_equal(
                got, [[1000 * s.arrived, 1000 * s.start, 1000 * s.end] for s in want]
            )
    assert not memory.read(1).any()  # nothing was computed


def test_claims_the_kernels_of_the_reference() -> None:
    assert NullBackend().kernels() == ReferenceBackend().kernels()
