"""One stream, step after step: lanes that run ahead, lanes that fail, Ctrl-C anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from flashrt.backend import ABORT, U8
from flashrt.backends.reference import ReferenceBackend
from flashrt.errors import DeviceError, ModelError
from flashrt.ir import laws
from flashrt.ir.text import read_micro
from flashrt.ir.types import Weight
from flashrt.runtime import executor as module
from flashrt.runtime.arena import Residents
from flashrt.runtime.executor import Executor
from tests.passes.examples import device

HEAD = """\
micro t
symbol T lo=1 hi=4 hint=1
input x f32[T,4]
weight w f32[4,4] sources=[w] layout=f32
weight v f32[4,4] sources=[v] layout=f32
slot %0 cpu:0 f32[T,4] input=x
slot %1 cpu:0 f32[T,4]
block w cpu:0 lo=0 hi=4 bytes=64
block v cpu:0 lo=0 hi=4 bytes=64
output y %1
"""
# the next step's `v` is loaded beside this one's end: no compute lane waits for it
AHEAD = (
    HEAD
    + """\
prefetch device=cpu:0 lane=copy_in waits=[!1@-1] signals=!0 block=w
dispatch device=cpu:0 lane=compute waits=[!0] signals=!1 kernel=linear.f32 args=[%0,@w] dst=%1
evict device=cpu:0 lane=copy_in waits=[!1] block=w
prefetch device=cpu:0 lane=copy_in block=v
evict device=cpu:0 lane=copy_in block=v
"""
)
# `w` stays loaded from one step to the next
CARRIED = (
    HEAD
    + """\
dispatch device=cpu:0 lane={lane} waits=[{wait}] signals=!0 kernel=linear.f32 args=[%0,@w] dst=%1
evict device=cpu:0 lane={copies} waits=[!0] block=w
prefetch device=cpu:0 lane={copies} signals=!1 block=w
"""
)
X = np.arange(4, dtype=np.float32).reshape(1, 4)


class Source:
    """Both weights are the unit matrix. `before` is called with the name of each weight read."""

    def __init__(self) -> None:
        self.before: Callable[[str], None] = lambda name: None

    def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
        self.before(weight.name)
        out[:] = np.eye(4, dtype=np.float32)[lo:hi].reshape(-1).view(np.uint8)


@pytest.fixture
def run() -> Iterator[Callable[..., tuple[Executor, Source]]]:
    """Opens a text on the reference device; whatever a test does, no thread is left."""
    before, opened = threading.active_count(), []

    def start(text: str, *, poison: bool = False) -> tuple[Executor, Source]:
        stream, source, backend = read_micro(text), Source(), ReferenceBackend()
        laws.check(stream)
        residents = Residents({"cpu:0": backend.open(device())}, source, {})
        opened.append(Executor(stream, residents, backend.open(device("host")), poison=poison))
        return opened[-1], source

    yield start
    for each in opened:
        each.close()
        each.close()
    assert threading.active_count() == before


def steps(executor: Executor, count: int = 3) -> None:
    """Some right steps, with and without a trace."""
    for i in range(count):
        outputs, record = executor.step({"x": X + i}, {"T": 1}, trace=i % 2 == 1)
        assert (outputs["y"] == X + i).all()
        assert record is None or (record.stamps[:, 2] >= record.stamps[:, 0]).all()


@pytest.mark.parametrize("poison", [False, True])
def test_lanes_that_run_ahead(run: Any, poison: bool) -> None:
    executor, source = run(AHEAD, poison=poison)
    source.before = lambda name: time.sleep(0.005)
    steps(executor, 6)
    executor.drain()
    assert set(executor.memory.ticks[:2].tolist()) == {6} and executor.memory.words[ABORT] == 0


@pytest.mark.parametrize(
    ("lane", "copies", "wait"), [("compute", "compute", ""), ("compute", "copy_in", "!1@-1")]
)
def test_a_block_that_a_step_finds_loaded(run: Any, lane: str, copies: str, wait: str) -> None:
    """The first step too, and the one after a failure."""
    executor, source = run(CARRIED.format(lane=lane, copies=copies, wait=wait))
    steps(executor)
    source.before = fails("w")
    with pytest.raises(ModelError, match="disk"):
        for _ in range(3):  # on a lane of its own the failure shows one step later
            executor.step({"x": X}, {"T": 1})
    with pytest.raises(ModelError, match="disk"):
        executor.step({"x": X}, {"T": 1})  # it can't be loaded again either
    source.before = lambda name: None
    steps(executor)


def fails(name: str) -> Callable[[str], None]:
    def before(read: str) -> None:
        if read == name:
            raise ModelError("the disk is gone")

    return before


@pytest.mark.parametrize("trace", [False, True])
def test_a_failure_after_the_step_is_told_once(run: Any, trace: bool) -> None:
    executor, source = run(AHEAD)
    source.before = fails("v")
    with pytest.raises(ModelError, match="disk"):
        executor.step({"x": X}, {"T": 1}, trace=trace)
        executor.drain()
    source.before = lambda name: None
    executor.drain()
    steps(executor)


def test_it_is_told_by_the_next_step_if_nobody_asked(run: Any) -> None:
    executor, source = run(AHEAD)

    def late(name: str) -> None:
        if name == "v":
            time.sleep(0.05)
            raise ModelError("the disk is gone")

    source.before = late
    heard = []
    for _ in range(4):
        try:
            executor.step({"x": X}, {"T": 1})
            heard.append(False)
        except ModelError:
            heard.append(True)
        time.sleep(0.1)
    assert heard == [False, True, False, True], "the step after a failure starts clean"


# ---- Ctrl-C ---------------------------------------------------------------------------
class Pressed:
    """Raises KeyboardInterrupt at the n-th call, then never again."""

    def __init__(self, wrapped: Callable[..., Any], at: int) -> None:
        self._wrapped, self._left = wrapped, at

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return self._wrapped(*args, **options)


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("where", ["post", "_run", "_raise", "_stop", "write", "read_output"])
def test_ctrl_c(run: Any, monkeypatch: pytest.MonkeyPatch, where: str, at: int) -> None:
    """Wherever it strikes, once or while the first is dealt with, the next step is right."""
    executor, _ = run(AHEAD)
    steps(executor, 1)
    if where == "post":
        lane = next(lane for lane in executor._lanes if lane.lane != "compute")
        monkeypatch.setattr(lane, "post", Pressed(lane.post, at))
    elif where.startswith("_"):
        monkeypatch.setattr(executor, where, Pressed(getattr(executor, where), at))
        if where == "_stop":  # the second Ctrl-C, while lanes are being stopped
            monkeypatch.setattr(executor, "_run", Pressed(executor._run, 1))
    elif where == "write":
        monkeypatch.setattr(executor._writer, where, Pressed(executor._writer.write, at))
    else:
        monkeypatch.setattr(module, where, Pressed(getattr(module, where), at))
    pressed = 0
    for _ in range(4):
        try:
            assert (executor.step({"x": X}, {"T": 1})[0]["y"] == X).all()
        except KeyboardInterrupt:
            pressed += 1
    assert pressed >= 1
    steps(executor)


def test_threads_end_when_one_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    start = Pressed(threading.Thread.start, 2)
    monkeypatch.setattr(threading.Thread, "start", lambda self: start(self))
    backend = ReferenceBackend()
    residents = Residents({"cpu:0": backend.open(device())}, Source(), {})
    with pytest.raises(KeyboardInterrupt):
        Executor(read_micro(AHEAD), residents, backend.open(device("host")))
    assert threading.active_count() == before


def test_no_room(run: Any) -> None:
    backend = ReferenceBackend()
    residents = Residents({"cpu:0": backend.open(device())}, Source(), {})
    with pytest.raises(DeviceError, match=r"no room for 1000000000\.0 GB"):
        residents.reserve("cpu:0", 10**18)
