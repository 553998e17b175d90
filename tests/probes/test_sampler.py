"""The sampler's loop: it goes on whatever a probe or a listener does, and stops when it is told."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from flashrt.probes import sampler as module
from flashrt.probes.nvidia import Nvidia
from flashrt.probes.sampler import Live, Sampler
from tests.probes.fake_nvml import FakeNvml
from tests.probes.test_delivered import Clock
from tests.probes.test_groups import WHOLE
from tests.probes.test_host import tree
from tests.probes.test_live import MEMINFO, columns, stat, thread


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two cores, which this process may use."""
    monkeypatch.setattr(module.host, "usable_cpus", lambda: frozenset({0, 1}))
    thread(tmp_path, 10, 1.0, 0)
    return tree(tmp_path, {"proc/stat": stat(columns(0, 0), columns(0, 0)), "proc/meminfo": MEMINFO})


def made(root: Path, *gpus: dict[str, Any], clock: Clock | None = None, **options: Any) -> Sampler:
    starts = None if gpus else FakeNvml.NVMLError("no driver")
    nvidia = Nvidia(FakeNvml(*gpus, starts=starts))
    return Sampler(root=root, nvidia=nvidia, clock=clock or time.monotonic, **options)


def until(true: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def test_two_samples_by_hand(root: Path) -> None:
    clock = Clock()
    sampler = made(root, {}, clock=clock)
    assert sampler.latest is None and sampler.age == math.inf
    first = sampler.sample()
    assert (first.number, first.free, first.reasons["cores"]) == (1, 800 * 1024, "first sample")
    assert first.gpus[0].load == 0.4
    clock.now += 0.2
    tree(root, {"proc/stat": stat(columns(20, 0), columns(10, 10))})
    thread(root, 10, 1.2, 0)
    sampler.observe("cpu:0", 2e9, 0, 0.1)
    second = sampler.sample()
    assert [c.foreign for c in second.cores] == [pytest.approx(0, abs=1e-9), 0.5]
    assert second.delivered["cpu:0"].read == pytest.approx(2e10)
    assert dict(second.reasons) == {}
    clock.now += 1.5
    assert sampler.age == 1.5
    sampler.stop()


def test_foreign_load_of_a_device(root: Path) -> None:
    """A team is as slow as its slowest member; where one core isn't known nothing is."""
    clock = Clock()
    sampler = made(root, clock=clock)
    assert sampler.sample().foreign(WHOLE) is None
    clock.now += 0.2
    tree(root, {"proc/stat": stat(columns(20, 0), columns(5, 15))})
    live = sampler.sample()
    assert live.foreign(WHOLE) == 1.0
    assert live.foreign(replace(WHOLE, cpus=(1,))) == pytest.approx(0.25)
    assert live.foreign(replace(WHOLE, cpus=(5,))) is None
    assert live.foreign(replace(WHOLE, pool="")) is None
    sampler.stop()


def test_a_sample_is_immutable(root: Path) -> None:
    live = made(root).sample()
    with pytest.raises(FrozenInstanceError):
        live.free = 3  # type: ignore[misc]
    for mapping in (live.reasons, live.delivered):
        with pytest.raises(TypeError):
            mapping["x"] = ""  # type: ignore[index]


def test_the_loop(root: Path) -> None:
    """Listeners get each sample once, in order; start and stop may be called twice."""
    got: list[Live] = []
    sampler = made(root, period=0.01)
    end = sampler.listen(got.append)
    sampler.start()
    sampler.start()
    assert [t.name for t in threading.enumerate()].count(module.THREAD) == 1
    until(lambda: len(got) >= 3)
    assert sampler.age < 1 and sampler.running
    end()
    seen = len(got)
    until(lambda: sampler.latest is not None and sampler.latest.number > seen + 3)
    assert len(got) <= seen + 1
    assert [live.number for live in got] == list(range(1, len(got) + 1))
    sampler.stop()
    sampler.stop()
    assert not sampler.running
    number = sampler.latest and sampler.latest.number
    time.sleep(0.03)
    assert sampler.latest is not None and sampler.latest.number == number
    sampler.start()
    until(lambda: sampler.latest is not None and sampler.latest.number > (number or 0))
    sampler.stop()


def test_the_watchdog_sees_a_loop_that_stands(root: Path) -> None:
    stuck = threading.Event()
    sampler = made(root, period=0.01)

    def wait(live: Live) -> None:
        stuck.wait(5)

    sampler.listen(wait)
    with sampler:
        until(lambda: sampler.latest is not None)
        time.sleep(0.1)
        assert sampler.age > 0.08
        stuck.set()
        until(lambda: sampler.age < 0.05)


def test_a_failing_probe_becomes_a_reason(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = made(root, {})
    sampler.sample()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("what is this")

    for part, method, name in (
        ("_cores", "read", "cores"),
        ("_memory", "read", "free"),
        ("_nvidia", "read", "gpus"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(sampler, part), method, broken)
            live = sampler.sample()
            assert live.reasons[name] == "RuntimeError: what is this"
        assert name not in sampler.sample().reasons or name == "cores"
    assert sampler.sample().number == 8


def test_a_failing_listener_becomes_a_reason(root: Path) -> None:
    sampler = made(root)
    got: list[Live] = []

    def deaf(live: Live) -> None:
        raise KeyError("x")

    end = sampler.listen(deaf)
    sampler.listen(got.append)
    sampler.sample()
    assert sampler.sample().reasons["listener"] == "KeyError: 'x'"
    end()
    sampler.sample()
    assert "listener" not in sampler.sample().reasons
    assert len(got) == 4


def test_a_listener_may_stop_the_sampler(root: Path) -> None:
    sampler = made(root, period=0.01)
    sampler.listen(lambda live: sampler.stop())
    sampler.start()
    until(lambda: not any(t.name == module.THREAD for t in threading.enumerate()))
    assert sampler.latest is not None and not sampler.running


def test_a_gpu_that_disappears(root: Path) -> None:
    sampler = made(root, {}, {})
    assert [g.load for g in sampler.sample().gpus] == [0.4, 0.4]
    sampler._nvidia._library.gpus.pop()
    live = sampler.sample()
    assert live.gpus[1].load is None and live.reasons["gpu:1"]
    sampler.stop()


def test_a_driver_that_is_not_there_is_asked_now_and_then(root: Path) -> None:
    clock = Clock()
    sampler = made(root, clock=clock)
    for _ in range(3):
        assert "no driver" in sampler.sample().reasons["gpus"]
        clock.now += 0.2
    sampler._nvidia._library.starts = None
    assert "no driver" in sampler.sample().reasons["gpus"]
    clock.now += module.RETRY
    assert "lists no GPU" in sampler.sample().reasons["gpus"]
    sampler.stop()


def test_the_real_machine() -> None:
    with Sampler(period=0.02) as sampler:
        until(lambda: sampler.latest is not None and sampler.latest.number > 3)
        live = sampler.latest
    assert live is not None and live.free
    assert all(c.busy is None or 0 <= c.busy <= 1 for c in live.cores)
