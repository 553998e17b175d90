"""Load and free memory from pretend /proc trees, sample by sample: whose load, and what can't be known."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from flashrt.probes import live
from flashrt.probes.live import Cores, Counter, FreeMemory
from tests.probes.test_host import tree

TASK = "proc/self/task"


def stat(*cores: tuple[int, ...]) -> str:
    """/proc/stat: for each core its columns; an empty tuple leaves the core out."""
    lines = [f"cpu{n} " + " ".join(map(str, c)) for n, c in enumerate(cores) if c]
    return "\n".join(["cpu  1 1 1 1 1 1 1 1 0 0", *lines, "intr 12345 0 0", "ctxt 1", ""])


def columns(user: int, idle: int, iowait: int = 0, steal: int = 0) -> tuple[int, ...]:
    return (user, 0, 0, idle, iowait, 0, 0, steal, 0, 0)


def thread(root: Path, number: int, ran: float, cpu: int) -> None:
    """A thread of ours that ran so many seconds, on this core last."""
    fields = ["R", *["0"] * 35, str(cpu), "0", "0"]
    tree(root, {
        f"{TASK}/{number}/schedstat": f"{int(ran * 1e9)} 5 1\n",
        f"{TASK}/{number}/stat": f"{number} (a (b) c) {' '.join(fields)}\n",
    })  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two cores and one thread of ours, which runs on core 0."""
    thread(tmp_path, 10, 1.0, 0)
    return tree(tmp_path, {"proc/stat": stat(columns(100, 900), columns(100, 900))})


def test_own_load_is_told_apart_from_foreign(root: Path) -> None:
    cores = Cores(root, [0, 1])
    first = cores.read(0.0)
    assert [(c.busy, c.own, c.foreign, c.reason) for c in first] == [(None, None, None, "first sample")] * 2
    tree(root, {"proc/stat": stat(columns(120, 900), columns(105, 910, iowait=2, steal=3))})
    thread(root, 10, 1.15, 0)  # 0.15 of the 0.2 seconds
    zero, one = cores.read(0.2)
    assert (zero.busy, zero.reason) == (1.0, "")
    assert (zero.own, zero.foreign) == (pytest.approx(0.75), pytest.approx(0.25))
    assert (one.busy, one.own, one.foreign) == (pytest.approx(0.4), 0.0, pytest.approx(0.4))
    cores.close()
    assert cores.read(0.4)[0].reason == "first sample"


def test_threads_come_go_and_move(root: Path) -> None:
    cores = Cores(root, [0, 1])
    cores.read(0.0)
    tree(root, {"proc/stat": stat(columns(120, 900), columns(120, 900))})
    thread(root, 10, 1.1, 1)  # moved
    thread(root, 11, 0.1, 0)  # new: all that it ever ran was in this period
    assert [c.own for c in cores.read(0.2)] == [pytest.approx(0.5), pytest.approx(0.5)]
    for name in ("schedstat", "stat"):
        (root / TASK / "10" / name).unlink()
    (root / TASK / "10").rmdir()
    tree(root, {"proc/stat": stat(columns(140, 900), columns(140, 900))})
    assert [(c.own, c.foreign) for c in cores.read(0.4)] == [(0.0, 1.0)] * 2
    assert list(cores._threads._open) == ["11"]


def test_a_thread_that_ends_while_it_is_read(root: Path) -> None:
    cores = Cores(root, [0])
    cores.read(0.0)
    (root / TASK / "12").mkdir()  # listed, but its files are gone
    tree(root, {"proc/stat": stat(columns(120, 900), ())})
    assert cores.read(0.2)[0].own == 0.0


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        (stat(columns(50, 950), columns(1, 1)), "a counter went backwards"),
        (stat(columns(110, 880), columns(1, 1)), "a counter went backwards"),
        (stat(columns(100, 900), columns(1, 1)), "no tick has passed"),
        (stat((), columns(1, 1)), "the system no longer lists this core"),
        ("", "the system no longer lists this core"),
    ],
)
def test_what_a_counter_may_do(root: Path, later: str, reason: str) -> None:
    """It goes back, stands still, or the core goes offline: no load, and why; then it is known again."""
    cores = Cores(root, [0])
    cores.read(0.0)
    tree(root, {"proc/stat": later})
    (core,) = cores.read(0.2)
    assert (core.busy, core.foreign, core.reason) == (None, None, reason)
    tree(root, {"proc/stat": stat(columns(200, 1000))})
    cores.read(0.4)
    tree(root, {"proc/stat": stat(columns(210, 1010))})
    (core,) = cores.read(0.6)
    assert (core.busy, core.reason) == (pytest.approx(0.5), "")


def test_a_core_that_never_was(root: Path) -> None:
    assert Cores(root, [5]).read(0.0)[0].reason == "the system doesn't list this core"


def test_no_proc(tmp_path: Path) -> None:
    cores = Cores(tmp_path, [0])
    cores.read(0.0)
    (core,) = cores.read(0.2)
    assert (core.busy, core.own, core.foreign, core.mhz) == (None, None, None, None)
    assert "/proc/stat" in core.reason and "frequency" in core.mhz_reason


def test_own_threads_unknown(root: Path) -> None:
    """Then busy is known, but not whose it is."""
    cores = Cores(root, [0])
    cores.read(0.0)
    tree(root, {"proc/stat": stat(columns(120, 900))})
    (root / TASK).rename(root / "elsewhere")
    (core,) = cores.read(0.2)
    assert (core.busy, core.own, core.foreign) == (1.0, None, None)
    assert str(TASK) in core.reason


def test_frequency_is_asked_once_a_second(root: Path) -> None:
    file = "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
    tree(root, {file: "2100000\n"})
    cores = Cores(root, [0, 1])
    assert [c.mhz for c in cores.read(0.0)] == [2100.0, None]
    tree(root, {file: "800000\n"})
    assert cores.read(0.5)[0].mhz == 2100.0
    assert cores.read(1.0)[0].mhz == 800.0
    tree(root, {file: "<unknown>\n"})
    (zero, _) = cores.read(2.0)
    assert zero.mhz is None and zero.mhz_reason


def test_this_process_is_seen() -> None:
    """A thread that computes shows as own load, about as much of it as the process's clock says."""
    cores = Cores()
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            pass

    threading.Thread(target=work, daemon=True).start()
    cores.read(time.monotonic())
    began = time.thread_time(), time.monotonic(), time.process_time()
    time.sleep(0.3)
    found = cores.read(time.monotonic())
    share = (time.process_time() - began[2]) / (time.monotonic() - began[1])
    over.set()
    cores.close()
    own = sum(c.own or 0.0 for c in found)
    assert share * 0.5 < own < share * 1.5 + 0.1


def test_a_counter_opens_again(tmp_path: Path) -> None:
    path = tmp_path / "x"
    counter = Counter(path)
    with pytest.raises(OSError):
        counter.read()
    path.write_text("1")
    assert counter.read() == b"1"
    path.write_text("22")
    assert counter.read() == b"22"
    assert counter._file is not None
    os.close(counter._file)  # the device behind it is gone
    with pytest.raises(OSError):
        counter.read()
    assert counter.read() == b"22"
    counter.close()
    counter.close()


# ---- memory ------------------------------------------------------------------------
MEMINFO = "MemTotal: 1000 kB\nMemFree: 5 kB\nMemAvailable:     800 kB\nBuffers: 1 kB\n"


def test_free_memory_follows_the_tightest_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(total=10**6, available=8 * 10**5)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    group = "sys/fs/cgroup/a"
    root = tree(tmp_path, {
        "proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n", f"{group}/memory.max": "500000\n",
        f"{group}/memory.current": "300000\n", f"{group}/memory.stat": "anon 1\ninactive_file 50000\n",
    })  # fmt: skip
    free = FreeMemory(root)
    assert free.read() == (250_000, "")
    tree(root, {f"{group}/memory.current": "900000\n"})
    assert free.read() == (0, "")
    tree(root, {f"{group}/memory.current": "gone"})  # no limit can be told any more
    assert free.read() == (800 * 1024, "")
    free.close()


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB\n", "MemAvailable: x\n", "MemAvailable:"])
def test_free_memory_unknown(tmp_path: Path, text: str) -> None:
    value, reason = FreeMemory(tree(tmp_path, {"proc/meminfo": text})).read()
    assert value is None and "/proc/meminfo" in reason
    value, reason = FreeMemory(tmp_path / "none").read()
    assert value is None and "/proc/meminfo" in reason


def test_reading_past_the_cores_of_a_large_machine(tmp_path: Path) -> None:
    """The buffer is large enough for the line of the last core, with counters of years."""
    line = columns(10**12, 10**12)
    text = stat(*[line] * 300)
    cores = Cores(tree(tmp_path, {"proc/stat": text}), [299])
    assert cores.read(0.0)[0].reason == "first sample"
    assert len(live._per_core(text.encode())) == 300
