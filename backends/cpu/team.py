"""The team of threads that walks tables: the caller is thread 0, helpers are made once.

Helpers run compiled code for their whole life, without Python's lock. Between
steps they spin for a fraction of a millisecond, then sleep in the kernel until
the next run wakes them: an idle team uses no processor time.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence

from flashrt.backend import U8
from flashrt.backends.cpu.cache import Library
from flashrt.backends.cpu.encode import aligned
from flashrt.backends.cpu.rows import CONTROL_BYTES


class Team:
    """`threads` threads, the caller of `run` included. One run at a time.

    cpus: logical processors of a core group. Each thread then has one of its own, the caller too while
    it runs; without a group the caller stays where it is.
    """

    def __init__(self, threads: int, library: Library, cpus: Sequence[int] = ()) -> None:
        assert threads >= 1, threads
        self.threads, self._own = threads, set(cpus[:1])
        self._control = aligned(CONTROL_BYTES)
        self._run, quit = library.function("team_run"), library.function("team_quit")
        self._helpers: list[threading.Thread] = []
        self._close = weakref.finalize(self, _send_home, quit, threads, self._control, self._helpers)
        cores = list(cpus) or sorted(os.sched_getaffinity(0))
        help = library.function("team_help") if threads > 1 else None
        for tid in range(1, threads):
            core = cores[tid] if threads <= len(cores) else None
            args = (help, tid, threads, self._control, core)
            helper = threading.Thread(target=_help, args=args, name=f"flashrt-cpu-{tid}", daemon=True)
            helper.start()
            self._helpers.append(helper)

    def run(self, code: int, epoch: int) -> int:
        """Walks the code whose words lie at `code`; 0, or why the walk stopped (walk.ABORTED, …)."""
        assert self._close.alive, "the team is closed"
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

    def close(self) -> None:
        """Ends the helpers. Idempotent."""
        self._close()


def _help(function, tid: int, threads: int, control: U8, core: int | None) -> None:
    """A helper's thread: on a core of its own, so that it never shares one with another helper."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    function(tid, threads, control.ctypes.data)


def _send_home(quit, threads: int, control: U8, helpers: list[threading.Thread]) -> None:
    quit(threads, control.ctypes.data)
    for helper in helpers:
        helper.join()
