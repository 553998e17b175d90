"""What an engine tells of itself: the file, who finds it, and that it costs the program nothing."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flashrt.backends.reference import ReferenceBackend
from flashrt.compiler import CompileOptions, compile_model
from flashrt.errors import ParseError, RequestError
from flashrt.ir.types import evaluate
from flashrt.llm.generate import Generator
from flashrt.llm.request import Request, Sampling
from flashrt.machine import Device, Machine, Measured
from flashrt.program import Program
from flashrt.status import channel, publisher
from flashrt.status.publisher import Publisher, publish
from flashrt.status.record import Replanning, Status, dump, read
from flashrt.status.work import work_of
from tests.tiny import CONTEXT, tiny_graph, tiny_import, tiny_source

PAGES = 12
BACKEND = ReferenceBackend()
MACHINE = Machine(
    (
        Device(
            "reference:0", "reference", "numpy", 1 << 30, Measured(1e10, "assumed"),
            {"f32": Measured(1e11, "assumed")}, Measured(1.0, "assumed"), kernels=BACKEND.kernels(),
        ),
    )
)  # fmt: skip
PLAN = compile_model(tiny_import(), MACHINE, CompileOptions(tokens=64))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime folder, not there yet."""
    monkeypatch.setenv("FLASHRT_RUNTIME", str(tmp_path / "runtime"))
    return tmp_path / "runtime"


@pytest.fixture
def program() -> Iterator[Program]:
    with Program(
        PLAN,
        {"reference:0": BACKEND.open(MACHINE.devices[0])},
        BACKEND.open(replace(MACHINE.devices[0], id="host")),
        pages=PAGES,
        source=tiny_source(tiny_graph()),
    ) as opened:
        yield opened


def generator(program: Program) -> Generator:
    return Generator(program.call, context=CONTEXT, eos=(), pages=PAGES, max_tokens_per_step=32)


def run(made: Generator, prompt: int, tokens: int) -> None:
    made.add(Request("a", tuple(range(1, prompt + 1)), Sampling(max_tokens=tokens)))
    made.run()


def only() -> Status:
    (status,) = channel.engines()
    return status


def test_counters_owners_and_lanes(program: Program) -> None:
    """Steps and tokens as they were run; bytes as the plan and the cache have them."""
    made = generator(program)
    told = Publisher(program, made, lambda: Replanning(5.0, 2))
    told.tell()
    assert told.reason == ""
    before = only()
    assert (before.steps, before.variant, before.step, before.lanes, before.held) == (0, None, None, (), ())
    run(made, prompt=5, tokens=4)
    told.tell()
    status = only()
    # one step reads the prompt and draws, three more draw
    assert (status.steps, status.tokens, status.rows) == (4, 5 + 3, 4)
    assert status.variant == "small" and status.symbols["T"] == 1
    assert status.replanning == Replanning(5.0, 2)
    assert status.queue is not None and (status.queue.running, status.queue.pages) == (0, PAGES)
    (held,) = status.held
    assert (held.device, held.staging) == ("reference:0", 0)
    assert held.cache == sum(int(evaluate(s.type.bytes, {"P": PAGES})) for s in tiny_graph().states)
    assert held.weights >= max(v.physical.budgets[0].weights for v in PLAN.variants)
    assert held.activations >= sum(nbytes for _, nbytes in PLAN.variants[0].stream.arenas) > 0
    (lane,) = status.lanes
    assert (lane.device, lane.lane) == ("reference:0", "compute")
    assert status.step is not None and 0 < lane.busy <= status.step * 1.01
    assert sum(w.bytes for w in lane.work) > held.weights / 2
    assert status.picture().devices[0].id == "reference:0" and not status.picture().devices[0].kernels
    told.close()
    assert channel.engines() == []


def test_work_is_the_sum_over_instructions() -> None:
    stream, env = PLAN.variants[0].stream, {s.name: 3 for s in PLAN.variants[0].stream.symbols}
    total = sum(sums.at(env).flops for lane in work_of(stream).values() for sums in lane)
    assert total == sum(evaluate(getattr(i, "flops", 0), env) for i in stream.instrs) > 0


def test_a_program_that_stands_still_is_told_of_once(program: Program, folder: Path) -> None:
    told = Publisher(program)
    told.tell()
    (path,) = folder.iterdir()
    first = path.stat().st_mtime_ns, path.stat().st_ino
    told.tell()
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == first
    run(generator(program), prompt=1, tokens=1)
    told.tell()
    assert path.stat().st_ino != first[1]  # another file in its place, never half of one
    told.close()


def test_the_thread_tells_and_ends_with_the_program(program: Program, folder: Path) -> None:
    made = publish(program)
    deadline = time.monotonic() + 5
    while not channel.engines() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert only().pid == os.getpid() and folder.stat().st_mode & 0o777 == 0o700
    program.close()
    assert list(folder.iterdir()) == [] and made._thread is not None and not made._thread.is_alive()


def test_a_forgotten_publisher_leaves_nothing(program: Program, folder: Path) -> None:
    """The thread doesn't keep it alive."""
    made = Publisher(program)
    made.start()
    thread = made._thread
    deadline = time.monotonic() + 5
    while not channel.engines() and time.monotonic() < deadline:
        time.sleep(0.01)
    del made
    deadline = time.monotonic() + 5
    while thread is not None and thread.is_alive() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert list(folder.iterdir()) == []


def test_trouble_stays_with_the_publisher(program: Program, folder: Path) -> None:
    """No folder, another's folder, a link, a listener that fails: the program runs on."""
    folder.write_text("a file where the folder should be")
    told = Publisher(program)
    told.tell()
    assert "FileExistsError" in told.reason
    folder.unlink()
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")
    told.tell()
    assert "belongs to someone else" in told.reason and not list((folder.parent / "elsewhere").iterdir())
    folder.unlink()

    def broken() -> Replanning:
        raise ZeroDivisionError("loop")

    ill = Publisher(program, replanning=broken)
    ill.tell()
    assert ill.reason == "ZeroDivisionError: loop"
    run(generator(program), prompt=1, tokens=1)


def test_threads_that_tell_at_once_wait_for_each_other(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is put together beside the one it replaces: two writers would take it from each other."""
    write, inside, most = channel.Outlet.write, list[int](), list[int]()

    def slow(outlet: channel.Outlet, status: Status) -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        write(outlet, status)
        inside.pop()

    monkeypatch.setattr(channel.Outlet, "write", slow)
    ages = itertools.count()  # always news
    told = Publisher(program, replanning=lambda: Replanning(float(next(ages)), 0))
    threads = [threading.Thread(target=told.tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4 and told.reason == ""
    told.close()


# ---- who is there ------------------------------------------------------------------
def planted(folder: Path, status: Status, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(dump(status))
    return path


def test_stale_files_go_and_strange_ones_stay(program: Program, folder: Path) -> None:
    """A dead process, a pid used again, another pid namespace, another version, half a file."""
    told = Publisher(program)
    told.tell()
    mine = only()
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    dead = planted(folder, replace(mine, pid=gone.pid), "dead-1.json")
    reused = planted(folder, replace(mine, began=mine.began - 1), "reused-1.json")
    elsewhere = planted(folder, replace(mine, pid=gone.pid, space="pid:[1]"), "elsewhere-1.json")
    newer = folder / "newer-1.json"
    newer.write_text('{"format": 99}')
    half = folder / "half-1.json"
    half.write_text(dump(mine)[:100])
    left = folder / "1-1.part"
    left.write_text("")
    os.utime(left, (1, 1))
    assert only().pid == os.getpid()
    assert not dead.exists() and not reused.exists() and not left.exists()
    assert elsewhere.exists() and newer.exists() and half.exists()
    told.close()


def test_one_engine_of_several(program: Program, folder: Path) -> None:
    first, second = Publisher(program), Publisher(program)
    first.tell()
    second.tell()
    assert [s.number for s in channel.engines()] == [second._still.number, first._still.number]
    assert channel.engine(os.getpid()).number == second._still.number
    with pytest.raises(RequestError, match=f"process {os.getppid()} runs no flashrt engine") as error:
        channel.engine(os.getppid())
    assert str(os.getpid()) in error.value.hint
    with pytest.raises(RequestError, match="isn't there"):
        channel.engine(1 << 30)
    first.close()
    second.close()


def test_a_child_leaves_its_parents_file(program: Program, folder: Path) -> None:
    told = Publisher(program)
    told.tell()
    pid = os.fork()
    if pid == 0:
        told._outlet.remove()
        os._exit(0)
    os.waitpid(pid, 0)
    assert only().pid == os.getpid()
    told.close()


def test_a_process_that_ends_takes_its_file_along(folder: Path) -> None:
    code = (
        "from tests.status.test_status import *\n"
        "from flashrt.status.record import Status\n"
        "p = Program(PLAN, {'reference:0': BACKEND.open(MACHINE.devices[0])},"
        " BACKEND.open(MACHINE.devices[0]), pages=4, source=tiny_source(tiny_graph()))\n"
        "t = publish(p); t.tell(); print(len(channel.engines()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stdout == "1\n" and list(folder.iterdir()) == []


def test_text_both_ways(program: Program) -> None:
    run(generator(program), prompt=3, tokens=2)
    status = Publisher(program).status(replanning=Replanning(1.5, 3))
    assert read(dump(status)) == status
    for bad in ("", "[]", "{}", '{"format": 1}', dump(status).replace('"steps"', '"stops"')):
        with pytest.raises(ParseError, match="not a status"):
            read(bad)


def test_told_at_most_five_times_a_second() -> None:
    assert publisher.PERIOD >= 0.2
