"""`flash-monitor`: what is shown of an engine that runs, what without one, what is refused."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flashrt import engine
from flashrt.cli.monitor_view import picture
from flashrt.machine import Link, Machine, Measured
from flashrt.profiler import monitor as watching
from flashrt.profiler.monitor import Monitor
from flashrt.status import channel
from flashrt.status.record import Lane, Replanning, Splits, Status, Work
from tests.cli.calling import monitor, refused
from tests.cli.test_devices import CPUS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrt.cli.monitor.FIRST", 0.4)


@contextmanager
def running(plan: str) -> Iterator[engine.LLM]:
    """An engine that answers in a thread until the block ends."""
    with engine.LLM(plan) as llm:
        stop = threading.Event()

        def answer() -> None:
            while not stop.is_set():
                llm.generate("hello", max_tokens=20, ignore_eos=True)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            deadline = time.monotonic() + 10
            while not any(s.steps for s in channel.engines()) and time.monotonic() < deadline:
                time.sleep(0.02)
            yield llm
        finally:
            stop.set()
            thread.join()


def one_line(*args: str) -> dict:  # type: ignore[type-arg]
    result = monitor("--once", "--json", *args)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return dict(json.loads(line))


def test_without_an_engine_devices_are_shown_and_what_to_do() -> None:
    result = monitor("--once")
    assert result.exit_code == 0
    for words in ("no engine is running", "flashrt run MODEL", "cpu:0", "cores", "host memory"):
        assert words in result.stdout
    raw = one_line()
    assert raw["engine"] is None and raw["machine"]["devices"][0]["id"] == "cpu:0" and raw["tiers"]["total"]


def test_an_engine_that_runs(plan: str) -> None:
    with running(plan) as llm:
        raw = one_line("--all")
        text = monitor("--pid", str(os.getpid())).stdout  # no terminal: one picture
        llm_steps = llm.program.ran.steps
    assert raw["engine"]["pid"] == os.getpid() and 0 < raw["engine"]["steps"] <= llm_steps
    assert raw["rates"]["steps"] > 0 and raw["rates"]["rows"] > 0
    (lane,) = raw["lanes"]
    assert lane["device"] == "reference:0" and 0 < lane["busy"] <= 1 and lane["share"] > 0
    assert lane["how"] == "assumed"
    assert raw["engine"]["held"][0]["weights"] > 0
    assert raw["usage"]["resident"] > 0 and raw["hidden"]["files"]
    # the engine's thread is own load, wherever it runs
    assert sum(core["own"] for core in raw["cores"]) > 0
    for words in ("pid", "tokens/s generated", "reference:0 compute", "weights", "activations", "staging"):
        assert words in text
    assert channel.engines() == []


def test_a_stream_of_lines(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One object a refresh, until Ctrl-C."""
    left = iter([0.01] * 3)
    real = time.sleep

    def sleep(seconds: float) -> None:
        if seconds == 0.1 and next(left, None) is None:
            raise KeyboardInterrupt
        real(min(seconds, 0.05))

    monkeypatch.setattr("flashrt.cli.monitor.time.sleep", sleep)
    result = monitor("--json", "--interval", "0.1")
    assert result.exit_code == 0
    assert [json.loads(line)["engine"] for line in result.stdout.splitlines()] == [None] * 3


def test_bad_input(plan: str) -> None:
    refused(monitor("--once", "--pid", str(1 << 30)), "isn't there", "no process here runs an engine")
    refused(monitor("--once", "--pid", str(os.getppid())), "runs no flashrt engine")
    with running(plan):
        refused(monitor("--pid", str(os.getppid())), f"processes with an engine: {os.getpid()}")
    assert monitor("--pid", "0").exit_code == 2
    assert monitor("--interval", "0").exit_code == 2


def test_an_engine_that_comes_and_goes(plan: str) -> None:
    with Monitor() as eye:
        assert eye.look().engine is None
        with running(plan):
            assert eye.look().engine is not None
            time.sleep(0.3)
            rates = eye.look().rates
            assert rates is not None and rates.steps > 0
        assert eye.look().engine is None and eye.look().rates is None


# ---- figures -----------------------------------------------------------------------
def status(machine: Machine, **changes: object) -> Status:
    from flashrt.machine import to_json

    made = Status(
        pid=os.getpid(), number=1, began=0, space="", opened=0.0, at=100.0, model="m",
        machine=to_json(machine), files=(), held=(), steps=0, tokens=0, rows=0, variant=None, symbols={},
        step=None, lanes=(), splits=(), queue=None, replanning=None,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def test_rates_of_an_engine_that_stood_still() -> None:
    """What is told again only after an hour counts from the look before, not from the hour."""
    m = Machine(())
    past = watching.deque(
        [(1000.0, status(m, at=100.0)), (1001.0, status(m, at=1001.0, steps=50, tokens=60))]
    )
    rates = watching._rates(past, 1001.0)
    assert rates is not None and rates.steps == pytest.approx(50 / 1.2) and rates.tokens == pytest.approx(50)
    still = watching.deque([(1000.0, status(m, steps=7)), (1001.0, status(m, steps=7))])
    rates = watching._rates(still, 1001.0)
    assert rates is not None and rates.steps == 0
    assert watching._rates(watching.deque([(1000.0, status(m))]), 1000.0) is None


def test_shares_of_the_limits() -> None:
    """A product is limited by its matrix rate, reading by bandwidth, a transfer by its link."""
    host = engine.with_known_rates(Machine(())).devices[0]
    fast = replace(
        host, id="cpu:0-0", read=Measured(10e9, "measured"),
        rates={"f32": Measured(1e11, "measured"), "i8": Measured(4e11, "assumed")},
    )  # fmt: skip
    link = Link("cpu:0-0", "cpu:1-1", Measured(5e9, "measured"), Measured(1.0, "measured"))
    machine = Machine((fast, replace(fast, id="null:0", kind="null")), (link,))
    read, product = Work("", "", "", 1e7, 1e6), Work("i8", "", "", 1e6, 4e9)
    compute = watching._lane(Lane("cpu:0-0", "compute", 0.022, 0.002, (read, product)), 0.025, machine)
    assert (compute.busy, compute.waiting) == (pytest.approx(0.88), pytest.approx(0.08))
    assert compute.share == pytest.approx((0.001 + 0.010) / 0.022) and compute.how == "assumed"
    moved = Lane("cpu:0-0", "copy_out", 0.004, 0.0, (Work("", "cpu:0-0", "cpu:1-1", 1e7, 0),))
    copy = watching._lane(moved, 0.025, machine)
    assert copy.share == pytest.approx(0.5) and copy.how == "measured" and copy.bytes == pytest.approx(2.5e9)
    idle = watching._lane(Lane("cpu:0-0", "compute", 0.0, 0.0, ()), 0.025, machine)
    assert idle.share is None and idle.bytes is None
    pretend = watching._lane(Lane("null:0", "compute", 5.0, 0.0, ()), 0.025, machine)
    assert pretend.busy is None and pretend.how == "a pretend clock"


@pytest.mark.parametrize("width", [80, 140])
def test_the_picture_fits(width: int, plan: str) -> None:
    """No line is wider than the terminal; splits, re-planning and the age of the plan are in it."""
    ids = [f"cpu:{CPUS[0]}-{CPUS[0]}"]
    machine = engine.machine_picture(ids)
    long = status(
        machine, model="a model with a name that is far too long for any terminal, even a wide one" * 2,
        variant="small", symbols={"T": 1}, step=0.004,
        replanning=Replanning(99.6, 3, 1, "cpu:9-9 is gone: " + "unplugged " * 20, 0.83, 12),
        splits=tuple(Splits(f"s{i}", 96, 0, 128) for i in range(20)),
        lanes=(Lane(ids[0], "compute", 0.003, 0.0005, (Work("i8", "", "", 3e7, 4e8),)),),
    )  # fmt: skip
    with Monitor(everything=True) as eye:
        eye.look()
        seen = eye.look()
    lanes = tuple(watching._lane(lane, long.step, machine) for lane in long.lanes)
    view = replace(seen, at=100.0, engine=long, machine=machine, lanes=lanes)
    console = Console(width=width, file=open(os.devnull, "w"), record=True, color_system=None)  # noqa: SIM115
    console.print(picture(view, width))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    for words in ("re-planned 0.4 s ago", "3 switches", "s0", "96", "and 12 more", f"{ids[0]} compute"):
        assert words in text
    assert "1 re-compile" in text
    assert "83% of the experts asked for are kept, 12 exchanged" in " ".join(text.split())
    assert "last re-compile because cpu:9-9 is gone: unplugged" in " ".join(text.split())


def test_the_runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flashrt import knobs

    monkeypatch.delenv("FLASHRT_RUNTIME")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert knobs.runtime_folder() == tmp_path / "flashrt"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(knobs, "SHARED_MEMORY", tmp_path)
    assert knobs.runtime_folder() == tmp_path / f"flashrt-{os.getuid()}"
