"""Plans made anew while requests run: the same tokens before and after, and nothing left behind."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from flashrt import engine, program
from flashrt.compiler import CompileOptions, compile_model
from flashrt.engine import LLM
from flashrt.errors import DeviceError, PlanError, RequestError
from flashrt.frontend.imported import Imported
from flashrt.ir import text
from flashrt.ir.ops import PAGE
from flashrt.llm.request import Request, Sampling
from flashrt.machine import Device, Machine
from flashrt.program import Plan
from flashrt.recompile import Recompilation, remake, whole
from flashrt.runtime.change import FLOOR
from flashrt.runtime.replan import THREAD, Replanner, computing, planned
from flashrt.status import channel
from tests.cli.tiny_plan import chat, constants, graph
from tests.runtime.test_follow import REFERENCE, generate, opened, split_plan
from tests.tiny import CONTEXT, tiny_import

NEAR, FAR = "reference:0", "reference:1"
TOKENS = 24


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where everything temporary goes; the machine isn't watched."""
    for name in ("cache", "runtime", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHRT_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("flashrt.probes.sampler.Sampler.start", lambda self: None)
    monkeypatch.setattr(engine, "ALONE", 1e6)
    return tmp_path


def machine(*ids: str, pool: str = "host") -> Machine:
    return Machine(tuple(replace(d, pool=pool) for d in engine.machine_picture(ids).devices))


def two(pool: str = "host", near: str = NEAR, far: str = FAR) -> Plan:
    """Layer 0 near, layer 1 far."""
    pins = (f"layers.0={near}", f"layers.1={far}")
    model = Imported(graph(), tiny_import().weights, constants(), chat())
    return compile_model(model, machine(near, far, pool=pool), CompileOptions(tokens=32, pins=pins))


def one() -> Plan:
    model = Imported(graph(), tiny_import().weights, constants(), chat())
    return compile_model(model, machine(NEAR), CompileOptions(tokens=32))


def requests() -> list[Request]:
    """Three prompts, the longest in chunks."""
    return [
        Request(
            name,
            tuple((11 * i + n) % 96 for i in range(n)),
            Sampling(max_tokens=TOKENS, temperature=0.7, seed=n, ignore_eos=True),
        )
        for name, n in (("a", 5), ("b", 70), ("c", 1))
    ]


Tokens = dict[str, tuple[int, ...]]


def run(llm: LLM, before: Callable[[int], None] = lambda step: None) -> Tokens:
    """Tokens of every request. before: called before each step."""
    done: Tokens = {}
    for request in requests():
        llm.generator.add(request)
    step = 0
    while not llm.generator.idle:
        before(step)
        for event in llm.generator.step():
            if event.completion:
                done[event.request] = event.completion.tokens
        step += 1
    assert llm.generator.pool.used == 0 and llm.generator.pool.free == llm.program.pages
    return done


def undisturbed(plan: Plan) -> Tokens:
    with LLM("tiny", plan=plan, sequences=3, live=False) as llm:
        return run(llm)


@dataclass
class Seen:
    """A sample of a machine."""

    at: float
    gone: Mapping[str, str] = field(default_factory=dict)
    free: int | None = 1 << 40

    def lost(self, device: Device) -> str:
        return self.gone.get(device.id, "")

    def room(self, device: Device) -> int | None:
        return self.free


def break_down(llm: LLM, device: str) -> None:
    """From now on every step of a device fails."""

    def run(code: Any, epoch: int) -> None:
        raise DeviceError(f"{device}: it has fallen off the bus")

    llm.program.devices[device].run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("pool", ["host", ""], ids=["its memory is there", "its memory is gone"])
def test_a_device_is_lost_while_requests_run(
    pool: str, folders: Path, request: pytest.FixtureRequest
) -> None:
    """With the process that makes the plan, once."""
    if not pool:
        request.getfixturevalue("inline")
    plan = two(pool)
    want = undisturbed(plan)
    with LLM("tiny", plan=plan, sequences=3, live=True) as llm:
        assert run(llm, lambda step: break_down(llm, FAR) if step == 7 else None) == want
        assert llm.replanner is not None
        metrics = llm.replanner.metrics()
        assert metrics.recompiles == 1 and metrics.failed == ""
        assert told(llm) == (1, metrics.last)
        assert f"{FAR} fails: {FAR}: it has fallen off the bus" in metrics.last
        assert ("computed again" in metrics.last) == (pool == "")
        assert {d.id for d in llm.program.plan.machine.devices} == {NEAR}
        assert run(llm) == want
    assert not list((folders / "temporary").iterdir())


# ---- by samples ------------------------------------------------------------------------
class Inline:
    """A plan that is made in this process, where that isn't what is looked at."""

    def __init__(self, plan: Plan, machine: Machine, least: int) -> None:
        self.run = lambda: remake(plan, machine, least)

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._Rooms, "compile", lambda self, *given, urgent: Inline(*given))


def replanner(llm: LLM) -> Replanner:
    assert llm.replanner is not None
    return llm.replanner


def see(llm: LLM, at: float, samples: int = 30, **seen: Any) -> None:
    """Shows so many samples, five a second, and waits until what comes of them is ready to take over."""
    for n in range(samples):
        replanner(llm).sampled(Seen(at + n / 5, **seen))
    while replanner(llm).metrics().making:
        time.sleep(0.005)


def told(llm: LLM) -> tuple[int, str]:
    """What onlookers see of it: one engine, whichever program runs."""
    llm._told.tell()
    (status,) = channel.engines()
    assert llm._told.reason == "" and status.steps == llm.program.ran.steps
    assert [d.id for d in status.picture().devices] == [d.id for d in llm.plan.machine.devices]
    assert status.replanning is not None
    return status.replanning.recompiles, status.replanning.last_recompile


def scarce(llm: LLM, share: float = 0.8) -> int:
    """Free bytes that leave the program this share of what its plan takes."""
    (takes,) = planned(llm.program.plan, llm.program.pages).values()
    (taken,) = replanner(llm)._taken().values()
    return FLOOR + int(takes * share) - taken.held


@pytest.mark.parametrize(
    ("near", "far"),
    [pytest.param("cpu:0-0", "cpu:1-1", marks=pytest.mark.slow), ("null:0", "null:1")],
)
def test_other_devices_are_lost(inline: None, near: str, far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if far == "cpu:1-1" and not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("needs processors 0 and 1")
    monkeypatch.delenv("FLASHRT_CACHE")  # where compiled kernels are
    plan = two(near=near, far=far)
    want = undisturbed(plan)
    with LLM("tiny", plan=plan, sequences=3, live=True) as llm:
        assert run(llm, lambda step: break_down(llm, far) if step == 7 else None) == want
        assert replanner(llm).metrics().recompiles == 1
        assert computing(llm.program.plan) == {near}


def test_ctrl_c_while_another_plan_takes_over(inline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it strikes, the requests can go on afterwards, with the same tokens."""
    plan = two(pool="")
    want = undisturbed(plan)
    for place in ("read", "write"):
        with LLM("tiny", plan=plan, sequences=3, live=True) as llm, monkeypatch.context() as patched:
            see(llm, 0.0, 1)
            done: Tokens = {}
            for request in requests():
                llm.generator.add(request)
            for step in itertools.count():
                if step == 6:
                    see(llm, 9.0, 3, gone={FAR: "unplugged"})
                    replace_lost(llm)
                    patched.setattr(f"flashrt.runtime.swap.{place}", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        llm.generator.step()
                    patched.undo()
                if llm.generator.idle:
                    break
                done |= {e.request: e.completion.tokens for e in llm.generator.step() if e.completion}
            assert done == want and llm.generator.pool.used == 0
            assert THREAD not in {t.name for t in threading.enumerate()}


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def replace_lost(llm: LLM) -> None:
    """What stands ready takes over as if the lost device could still be read."""
    ready = replanner(llm)._ready
    assert ready is not None
    replanner(llm)._ready = replace(ready, change=replace(ready.change, lost=frozenset()))


def test_memory_is_gone_and_comes_back(inline: None) -> None:
    """Weights then stream in a ring, until there is room for all of them again."""
    plan = one()
    want = undisturbed(plan)

    def before(step: int) -> None:
        if step == 6:
            see(llm, 10.0, free=scarce(llm, 0.5))
        if step == 12:
            assert replanner(llm).metrics().recompiles == 1, replanner(llm).metrics()
            assert any(v.stream.rings for v in llm.program.plan.variants)
            see(llm, 400.0)

    with LLM("tiny", plan=plan, sequences=3, live=True) as llm:
        assert not any(v.stream.rings for v in llm.program.plan.variants)
        takes = planned(llm.program.plan, llm.program.pages)
        assert run(llm, before) == want
        metrics = replanner(llm).metrics()
        assert metrics.recompiles == 2 and metrics.failed == "", metrics
        assert metrics.last == "host has memory for the first plan again"
        assert not any(v.stream.rings for v in llm.program.plan.variants)
        assert planned(llm.program.plan, llm.program.pages) == takes


def test_a_device_goes_and_comes_back(inline: None) -> None:
    plan = two()
    want = undisturbed(plan)
    seen: list[frozenset[str]] = []

    def before(step: int) -> None:
        if step == 3:
            see(llm, 10.0)
            see(llm, 20.0, 3, gone={FAR: "unplugged"})
        if step == 9:
            see(llm, 400.0)
        seen.append(computing(llm.program.plan))

    with LLM("tiny", plan=plan, sequences=3, live=True) as llm:
        assert run(llm, before) == want
        assert replanner(llm).metrics().recompiles == 2
        assert replanner(llm).metrics().last == f"{FAR} is back"
        assert list(dict.fromkeys(seen)) == [{NEAR, FAR}, {NEAR}]
        assert computing(llm.program.plan) == {NEAR, FAR}  # the pins are as they were


@pytest.mark.parametrize(("step", "pool"), [(0, "host"), (1, ""), (2, "host"), (9, "")])
def test_a_plan_gets_ready_while_a_step_runs(inline: None, step: int, pool: str) -> None:
    """While prompts are read in chunks, and while tokens are drawn: it waits for the step's end."""
    plan = two(pool)
    want = undisturbed(plan)
    with LLM("tiny", plan=plan, sequences=3, live=True) as llm:
        first, begin, steps = llm.program, llm.program.begin, itertools.count()

        def disturbed(*given: Any) -> Any:
            if next(steps) == step:
                see(llm, 10.0, 3)
                see(llm, 11.0, 3, gone={FAR: "unplugged"})
                assert replanner(llm).metrics().ready and llm.program is first
            return begin(*given)

        first.begin = disturbed  # type: ignore[method-assign, assignment]
        assert run(llm) == want
        assert first.closed and llm.program is not first
        assert replanner(llm).metrics().recompiles == 1


@pytest.mark.slow
def test_many_changes_one_after_the_other(inline: None) -> None:
    """Every few steps another: never a token that differs, pages that leak, or a program left open."""
    plan = two()
    want = undisturbed(plan)
    programs: list[Any] = []

    def before(step: int) -> None:
        if llm.program not in programs:
            programs.append(llm.program)
        at = step * 10_000.0
        match step % 6:
            case 1:
                see(llm, at, 3, gone={FAR: "unplugged"})
            case 3:
                see(llm, at)
            case 5:
                see(llm, at, free=scarce(llm))

    with LLM("tiny", plan=plan, sequences=3, live=True) as llm:
        see(llm, 0.0, 1)
        assert run(llm, before) == want
        assert replanner(llm).metrics().recompiles >= 6, replanner(llm).metrics()
    assert all(x.closed for x in programs) and len(programs) >= 6


def test_fewer_pages(inline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages in use move together; who has none left is computed again; what is in work fits always."""
    plan = one()
    want = undisturbed(plan)
    monkeypatch.setattr(engine._Rooms, "pages", lambda self, plan, spare: 4)
    with LLM("tiny", plan=plan, sequences=3, live=True) as llm:
        many = llm.program.pages
        assert run(llm, lambda step: see(llm, 10.0, free=scarce(llm)) if step == 8 else None) == want
        assert llm.program.pages < many
        assert llm.generator.context == llm.program.pages * PAGE
        assert f"{llm.program.pages}" and replanner(llm).metrics().recompiles == 1


def test_a_smaller_context(inline: None) -> None:
    """Where there is no room for the cache of a whole one: as many tokens as the requests in work need."""
    plan = one()
    first = requests()[0]
    with LLM("tiny", plan=plan, live=False) as llm:
        llm.generator.add(first)
        (want,) = llm.generator.run()
    with LLM("tiny", plan=plan, live=True) as llm:
        llm.generator.add(first)
        llm.generator.step()
        least = llm.generator.scheduler.least_pages * PAGE
        see(llm, 10.0, free=scarce(llm, 0.4))
        assert llm.generator.run()[0].tokens == want.tokens
        metrics = replanner(llm).metrics()
        assert metrics.recompiles == 1, metrics
        assert least <= llm.generator.context < CONTEXT
        assert metrics.last.endswith(f"; the context is {llm.generator.context} tokens now")
        with pytest.raises(RequestError, match=f"the context holds {llm.generator.context}"):
            llm.generator.add(Request("long", (1,) * (llm.generator.context + 1)))
        see(llm, 400.0)
        llm.generator.step()
        assert llm.generator.context == CONTEXT


def test_requests_that_came_meanwhile_do_not_fit(inline: None) -> None:
    """Then the plan in force goes on."""
    with LLM("tiny", plan=one(), live=True) as llm:
        first = llm.program
        llm.generator.add(requests()[0])
        llm.generator.step()
        see(llm, 10.0, free=scarce(llm, 0.4))
        llm.generator.add(Request("long", (1,) * 240, Sampling(max_tokens=16, ignore_eos=True)))
        assert [len(c.tokens) for c in llm.generator.run()] == [TOKENS, 16]
        metrics = replanner(llm).metrics()
        assert metrics.recompiles == 0 and llm.program is first
        assert metrics.failed.endswith("the requests in work need 16")


# ---- that come to nothing ----------------------------------------------------------------
def test_no_plan_fits(inline: None) -> None:
    """The plan in force goes on, and the reason is told, to onlookers too."""
    plan = two()
    want = undisturbed(plan)
    pinned = replace(plan, options={**plan.options, "without": ("nonsense",)})
    with LLM("tiny", plan=pinned, sequences=3, live=True) as llm:
        first = llm.program
        see(llm, 0.0, 1)
        assert run(llm, lambda n: see(llm, 9.0, 3, gone={FAR: "unplugged"}) if n == 4 else None) == want
        metrics = replanner(llm).metrics()
        assert metrics.recompiles == 0 and llm.program is first
        assert metrics.failed.startswith(f"{FAR} is gone: unplugged; no plan for that: can't leave out")
        assert told(llm) == (0, metrics.failed)


def test_a_plan_that_can_not_be_opened(inline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = one()
    want = undisturbed(plan)
    with LLM("tiny", plan=plan, sequences=3, live=True) as llm:
        whole, tried = engine.open_plan, []

        def refuse(made: Plan, **given: Any) -> Any:
            tried.append(made)
            if len(tried) == 1:
                raise DeviceError("no memory for that")
            return whole(made, **given)

        monkeypatch.setattr(engine, "open_plan", refuse)
        assert run(llm, lambda n: see(llm, 10.0, free=scarce(llm)) if n == 6 else None) == want
        metrics = replanner(llm).metrics()
        assert metrics.recompiles == 0 and metrics.failed.endswith("no memory for that")
        assert len(tried) == 2 and not any(v.stream.rings for v in llm.program.plan.variants)


def test_no_device_is_left() -> None:
    """The step's own error comes through; nothing is compiled for nothing."""
    with LLM("tiny", plan=one(), sequences=3, live=True) as llm:
        break_down(llm, NEAR)
        llm.generator.add(requests()[0])
        for _ in range(2):
            with pytest.raises(DeviceError, match="it has fallen off the bus"):
                llm.generator.step()
        assert replanner(llm).metrics().holding.startswith(f"no device is left: {NEAR} fails")
        assert llm.generator.cancel("a") is not None


def test_a_step_that_fails_once_is_tried_again() -> None:
    plan = two()
    want = undisturbed(plan)
    with LLM("tiny", plan=plan, sequences=3, live=True) as llm:
        whole = llm.program.devices[FAR].run
        once = iter([None])

        def run_(code: Any, epoch: int) -> None:
            if next(steps) == 15 and next(once, 0) is None:
                raise DeviceError("a hiccup")
            whole(code, epoch)

        steps = itertools.count()
        llm.program.devices[FAR].run = run_  # type: ignore[method-assign]
        assert run(llm) == want
        assert next(once, 0) == 0 and replanner(llm).metrics().recompiles == 0


def test_closed_while_a_plan_is_made(folders: Path) -> None:
    """The process ends with the engine, and its files go."""
    with LLM("tiny", plan=two(), sequences=3, live=True) as llm:
        see(llm, 0.0, 1)
        for n in range(3):
            replanner(llm).sampled(Seen(1.0 + n, gone={FAR: "unplugged"}))
        making = replanner(llm)._making
        assert isinstance(making, Recompilation)
        while making._process is None:
            time.sleep(0.005)
        assert list((folders / "temporary").iterdir())
        process = making._process
    assert process.returncode is not None and not list((folders / "temporary").iterdir())
    assert THREAD not in {t.name for t in threading.enumerate()}
    assert replanner(llm).metrics().failed == ""


def test_closed_when_a_plan_stands_ready(inline: None) -> None:
    with LLM("tiny", plan=two(), sequences=3, live=True) as llm:
        see(llm, 0.0, 1)
        see(llm, 1.0, 3, gone={FAR: "unplugged"})
        ready = replanner(llm)._ready
        assert ready is not None and ready.program is not None and not ready.program.closed
    assert ready.program.closed


# ---- the process ---------------------------------------------------------------------
def test_the_process_breaks(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last words are told; nothing is left."""
    monkeypatch.setenv("PYTHONHASHSEED", "nonsense")
    with (
        Recompilation(two(), machine(NEAR), 256, urgent=False) as making,
        pytest.raises(PlanError, match="PYTHONHASHSEED"),
    ):
        making.run()
    assert not list((folders / "temporary").iterdir())


@pytest.mark.slow
def test_a_refusal_comes_across(folders: Path) -> None:
    small = replace(machine(NEAR), devices=(replace(machine(NEAR).devices[0], limit=1000),))
    with (
        Recompilation(two(), small, 256, urgent=False) as making,
        pytest.raises(PlanError, match=r"needs \d+ bytes at least"),
    ):
        making.run()
    assert not list((folders / "temporary").iterdir())


ABANDONED = """
import os, sys, threading, time
from pathlib import Path
from flashrt import program
from flashrt.recompile import Recompilation
plan = program.load(Path(sys.argv[1]))
threading.Thread(target=Recompilation(plan, plan.machine, 256, urgent=False).run, daemon=True).start()
while not list(Path(os.environ["TMPDIR"]).glob("*/machine.json")):
    time.sleep(0.01)
os._exit(9)
"""


@pytest.mark.slow
def test_an_engine_that_is_killed_leaves_nothing(folders: Path) -> None:
    """The process notices by itself."""
    temporary = folders / "temporary"
    saved = program.save(two(), folders / "plan")
    command = [sys.executable, "-c", ABANDONED, str(saved.folder)]
    ended = subprocess.run(command, env={**os.environ, "TMPDIR": str(temporary)}, timeout=50)
    assert ended.returncode == 9
    deadline = time.monotonic() + 30
    while list(temporary.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(temporary.iterdir())


def test_a_plan_made_anew_for_the_same_machine_is_the_same() -> None:
    plan = two()
    again = remake(plan, plan.machine, 256)
    assert [text.to_text(v.stream) for v in again.variants] == [text.to_text(v.stream) for v in plan.variants]
    assert whole(plan).symbols[0].hi == 32 and plan.logical.symbols[0].hi == 16


# ---- a probe storm -------------------------------------------------------------------
STORM = """
import time
while True:
    kept = bytearray(256 << 20)
    kept[::4096] = b"x" * len(kept[::4096])
    time.sleep(0.15)
    del kept
    time.sleep(0.15)
"""


@contextmanager
def storm() -> Iterator[subprocess.Popen[bytes]]:
    blowing = subprocess.Popen([sys.executable, "-c", STORM])
    try:
        yield blowing
        assert blowing.poll() is None
    finally:
        blowing.kill()
        blowing.wait()


@pytest.mark.slow
def test_a_storm_while_a_plan_is_made_and_run(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour's memory jumps by 256 MiB every 150 ms while the machine is really watched: the tokens are
    the same, and hardly anything moves."""
    monkeypatch.undo()
    monkeypatch.setenv("FLASHRT_CACHE", str(folders / "cache"))
    monkeypatch.setenv("FLASHRT_RUNTIME", str(folders / "runtime"))
    with storm():
        plan = two()
        want = undisturbed(plan)
        with LLM("tiny", plan=plan, sequences=3, live=True) as llm:
            began = time.monotonic()
            while time.monotonic() - began < 6:
                assert run(llm) == want
            metrics = replanner(llm).metrics()
    assert metrics.recompiles <= 1 and not metrics.making, metrics


@pytest.mark.slow
def test_a_storm_while_splits_may_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with storm(), opened(split_plan(REFERENCE)) as program:
        want = generate(program.call)
        follower = engine.follow(program)
        assert follower is not None
        began = time.monotonic()
        while time.monotonic() - began < 6:
            assert generate(program.call) == want
        metrics = follower.metrics()
    assert metrics.plan_switches <= 5 and metrics.holding == "", metrics
