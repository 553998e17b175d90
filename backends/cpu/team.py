"""The team of threads that walks tables: the caller is thread 0, helpers are made once.

Helpers run compiled code for their whole life, without Python's lock. Between
steps they spin for two milliseconds, then sleep in the kernel until
the next run wakes them: an idle team uses no processor time.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np

from flashrt.backend import U8
from flashrt.backends.cpu.cache import Library
from flashrt.backends.cpu.encode import aligned
from flashrt.backends.cpu.pace import IDLE_NS, LOOK_NS, TICKS, Lines, Pace, idle_ticks
from flashrt.backends.cpu.rows import CONTROL_BYTES, MAX_THREADS, WANTED


class Team:
    """`threads` threads, the caller of `run` included. One run at a time.

    cpus: logical processors of a core group. Each thread then has one of its own, the caller too while
    it runs; without a group the caller stays where it is.
    A helper whose core other programs use sits out for as long (pace.py): `working` says how many don't.
    """

    def __init__(self, threads: int, library: Library, cpus: Sequence[int] = ()) -> None:
        assert 1 <= threads <= MAX_THREADS, threads
        self.threads, self._own = threads, set(cpus[:1])
        self._control = aligned(CONTROL_BYTES)
        self._wanted = self._control[WANTED:].view(np.int64)[:threads]
        self._wanted[:] = 1
        self._run, quit = library.function("team_run"), library.function("team_quit")
        self._recall = library.function("team_recall")
        self._helpers: list[threading.Thread] = []
        self._close = weakref.finalize(self, _send_home, quit, threads, self._control, self._helpers)
        cores = list(cpus) or sorted(os.sched_getaffinity(0))
        alone = threads <= len(cores)  # each on a core of its own
        help = library.function("team_help") if threads > 1 else None
        for tid in range(1, threads):
            args = (help, tid, threads, self._control, cores[tid] if alone else None)
            helper = threading.Thread(target=_help, args=args, name=f"flashrt-cpu-{tid}", daemon=True)
            helper.start()
            self._helpers.append(helper)
        self._pace = Pace(threads - 1) if alone and threads > 1 else None
        self._lines = Lines([int(h.native_id or 0) for h in self._helpers])
        self._cores, self._work, self._idle = set(cores[:threads]), 0, (0, 0)

    @property
    def working(self) -> int:
        """Threads that the next run has."""
        return int(self._wanted.sum())

    def run(self, code: int, epoch: int) -> int:
        """Walks the code whose words lie at `code`; 0, or why the walk stopped (walk.ABORTED, …)."""
        assert self._close.alive, "the team is closed"
        begun = time.perf_counter_ns()
        try:
            return self._walk(code, epoch)
        finally:
            if self._pace is not None:
                now = time.perf_counter_ns()
                self._look(self._pace, now, now - begun)

    def _walk(self, code: int, epoch: int) -> int:
        if not self._own:
            return self._run(self.threads, self._control.ctypes.data, code, epoch)
        before = os.sched_getaffinity(0)
        if before != self._own:
            os.sched_setaffinity(0, self._own)
        try:
            return self._run(self.threads, self._control.ctypes.data, code, epoch)
        finally:
            if before != self._own:
                os.sched_setaffinity(0, before)

    def _look(self, pace: Pace, now: int, ns: int) -> None:
        """Every so often: whether helpers stand in line for their cores, whether cores are free again."""
        self._work += ns
        if self._work >= LOOK_NS:
            if pace.worked(self._work, self._lines.read()):
                self._wanted[1:] = [i not in pace.resting for i in range(pace.helpers)]
                self._idle = now, idle_ticks(self._cores) or 0
            self._work = 0
        since, ticks = self._idle
        if pace.resting and now - since >= IDLE_NS:
            free = (idle_ticks(self._cores) or 0) - ticks
            self._idle = now, ticks + free
            if pace.idled(free * 1e9 / TICKS / (now - since)):
                self._wanted[1:] = 1
                self._recall(self.threads, self._control.ctypes.data)

    def close(self) -> None:
        """Ends the helpers. Idempotent."""
        self._close()
        self._lines.close()


def _help(function, tid: int, threads: int, control: U8, core: int | None) -> None:
    """A helper's thread: on a core of its own, so that it never shares one with another helper."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    function(tid, threads, control.ctypes.data)


def _send_home(quit, threads: int, control: U8, helpers: list[threading.Thread]) -> None:
    quit(threads, control.ctypes.data)
    for helper in helpers:
        helper.join()
