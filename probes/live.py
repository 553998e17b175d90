"""What a core does at this moment, read cheaply: load of this process and of others, frequency, free memory.

Files are opened once and read again with `pread`: a sample of some cores costs a fraction of a
millisecond. A figure that can't be had is None, with a reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flashrt.probes import host

IDLE = (3, 4)  # idle and iowait among the columns of /proc/stat
UNLISTED = "the system doesn't list this core"
DROPPED = "the system no longer lists this core"
COLUMNS = 8  # user nice system idle iowait irq softirq steal; guest time is in user already


@dataclass(frozen=True, slots=True)
class Core:
    """One logical processor over the last period, shares 0…1.

    busy: anything ran, time stolen by a hypervisor's other guests included. own: this process ran.
    foreign: something else did: what a plan must give way to. mhz: now. reason: why busy, own and
    foreign are None; "" when they are known. mhz_reason: the same for mhz.
    """

    cpu: int
    busy: float | None
    own: float | None
    foreign: float | None
    mhz: float | None
    reason: str = ""
    mhz_reason: str = ""


class Counter:
    """A small file that is read again and again. Opened when needed, and anew after it failed."""

    def __init__(self, path: Path, size: int = 4096) -> None:
        self.path, self.size = path, size
        self._file: int | None = None

    def read(self) -> bytes:
        """The first `size` bytes. Raises OSError when there are none to be had."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(self._file, self.size, 0)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


# ---- load --------------------------------------------------------------------------
class Cores:
    """The load of the cores that this process may use, period by period.

    root: where /proc and /sys are found. pid: whose load is `own`; None for this process.
    """

    def __init__(
        self, root: Path = host.ROOT, cpus: Iterable[int] | None = None, pid: int | None = None
    ) -> None:
        self.cpus = tuple(sorted(host.usable_cpus() if cpus is None else cpus))
        # /proc/stat begins with a line a processor; what follows them isn't read
        self._stat = Counter(
            root / "proc/stat", 160 * ((os.cpu_count() or 1) + max(self.cpus, default=0) + 2)
        )
        self._threads = _Threads(root / "proc" / ("self" if pid is None else str(pid)) / "task")
        self._clocks = _Clocks(root, self.cpus)
        self._before: Mapping[int, tuple[int, ...]] = {}
        self._at: float | None = None

    def read(self, now: float) -> tuple[Core, ...]:
        """The period since the last call; in the first one no load is known.

        now: seconds of a clock that doesn't go back.
        """
        reason, counted = "", {}
        try:
            counted = _per_core(self._stat.read())
        except OSError as error:
            reason = f"/proc/stat: {error.strerror}"
        elapsed = now - self._at if self._at is not None else 0.0
        own, own_reason = self._threads.read(elapsed)
        clocks = self._clocks.read(now)
        before, self._before, self._at = self._before, counted, now
        cores = []
        for cpu in self.cpus:
            busy, why = _busy(before.get(cpu), counted.get(cpu))
            ours = min(1.0, own.get(cpu, 0.0)) if own is not None else None
            foreign = max(0.0, busy - ours) if busy is not None and ours is not None else None
            mhz, no_mhz = clocks[cpu]
            cores.append(Core(cpu, busy, ours, foreign, mhz, reason or why or own_reason, no_mhz))
        return tuple(cores)

    def close(self) -> None:
        """Closes the files; the next reading is a first one. Idempotent."""
        self._stat.close()
        self._threads.close()
        self._clocks.close()
        self._before, self._at = {}, None


def _per_core(text: bytes) -> dict[int, tuple[int, ...]]:
    """Processor → its columns in /proc/stat (ticks since boot)."""
    found = {}
    for line in text.split(b"\n"):
        if line[:3] != b"cpu":
            break
        fields = line.split()
        if fields[0] != b"cpu" and len(fields) > COLUMNS and fields[0][3:].isdigit():
            found[int(fields[0][3:])] = tuple(map(int, fields[1 : COLUMNS + 1]))
    return found


def _busy(before: tuple[int, ...] | None, now: tuple[int, ...] | None) -> tuple[float | None, str]:
    """Share of the period that wasn't idle, or None and why."""
    if now is None:
        return None, DROPPED if before else UNLISTED
    if before is None:
        return None, "first sample"
    idle = sum(now[i] - before[i] for i in IDLE)
    total = sum(now) - sum(before)
    # (iowait alone may go back a little, as man 5 proc_stat says; with idle it must not)
    if idle < 0 or any(now[i] < before[i] for i in range(COLUMNS) if i not in IDLE):
        return None, "a counter went backwards"
    if total == 0:
        return None, "no tick has passed"
    return min(1.0, 1 - idle / total), ""


class _Threads:
    """Processor time of this process's threads, by the core each ran on last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, tuple[Counter, Counter]] = {}
        self._before: dict[str, int] = {}  # nanoseconds on a processor

    def read(self, elapsed: float) -> tuple[dict[int, float] | None, str]:
        """Core → share of the last `elapsed` seconds that our threads ran there; or None and why."""
        try:
            names = os.listdir(self._folder)
        except OSError as error:
            return None, f"{self._folder}: {error.strerror}"
        own: dict[int, float] = {}
        first = elapsed <= 0
        for name in names:
            try:
                ran, cpu = self._ran(name)
            except (OSError, ValueError, IndexError):
                continue  # the thread has ended
            if cpu is not None and not first and ran > 0:
                own[cpu] = own.get(cpu, 0.0) + ran / 1e9 / elapsed
        for name in self._open.keys() - set(names):
            self._forget(name)
        return (None, "first sample") if first else (own, "")

    def _ran(self, name: str) -> tuple[int, int | None]:
        """(nanoseconds since the last call, core); the core is looked up only for one that ran."""
        if name not in self._open:
            folder = self._folder / name
            self._open[name] = Counter(folder / "schedstat", 64), Counter(folder / "stat", 1024)
        time, place = self._open[name]
        total = int(time.read().split(b" ", 1)[0])
        ran = total - self._before.get(name, 0)
        self._before[name] = total
        if ran <= 0:
            return 0, None
        # the name in brackets may hold spaces; field 39 of man 5 proc_pid_stat is the processor
        return ran, int(place.read().rpartition(b")")[2].split()[36])

    def _forget(self, name: str) -> None:
        for counter in self._open.pop(name):
            counter.close()
        self._before.pop(name, None)

    def close(self) -> None:
        for name in list(self._open):
            self._forget(name)


class _Clocks:
    """Frequencies; asked once a second, since each answer costs the kernel a question to that core."""

    def __init__(self, root: Path, cpus: Iterable[int]) -> None:
        folder = root / "sys/devices/system/cpu"
        self._files = {n: Counter(folder / f"cpu{n}/cpufreq/scaling_cur_freq", 32) for n in cpus}
        self._known: dict[int, tuple[float | None, str]] = {}
        self._at = float("-inf")

    def read(self, now: float) -> Mapping[int, tuple[float | None, str]]:
        """Core → (MHz, why it isn't known)."""
        if now - self._at >= 1.0:
            self._known = {n: self._clock(file) for n, file in self._files.items()}
            self._at = now
        return self._known

    def _clock(self, file: Counter) -> tuple[float | None, str]:
        try:
            return int(file.read()) / 1e3, ""
        except (OSError, ValueError) as error:
            return None, f"no frequency from the system ({getattr(error, 'strerror', None) or error})"

    def close(self) -> None:
        for file in self._files.values():
            file.close()


# ---- memory ------------------------------------------------------------------------
class FreeMemory:
    """Bytes this process could still have: what the system could give, within its control groups."""

    def __init__(self, root: Path = host.ROOT) -> None:
        self._meminfo = Counter(root / "proc/meminfo", 256)
        self._groups = [
            (limit, Counter(current, 64), Counter(current.with_name("memory.stat")))
            for limit, current in host.memory_limits(root)
        ]

    def read(self) -> tuple[int | None, str]:
        """(bytes, "") or (None, why)."""
        try:
            free = _available(self._meminfo.read())
        except (OSError, ValueError) as error:
            return None, f"/proc/meminfo: {getattr(error, 'strerror', None) or error}"
        for limit, current, stat in self._groups:
            with suppress(OSError, ValueError):  # the group went away: its limit went with it
                free = min(free, max(0, limit - int(current.read()) + host.reclaimable(stat.read().decode())))
        return free, ""

    def close(self) -> None:
        """Closes the files. Idempotent."""
        self._meminfo.close()
        for _, current, stat in self._groups:
            current.close()
            stat.close()


def _available(text: bytes) -> int:
    _, found, rest = text.partition(b"MemAvailable:")
    if not found:
        raise ValueError("it doesn't tell what is available")
    return int(rest.partition(b"kB")[0]) * 1024
