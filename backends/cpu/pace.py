"""How many threads of a team work: one whose core others use would make all the rest wait for it.

The system says how long each thread stood in line for its core. A helper that does so for more than
WAITING of the time that the team works, at two looks in a row (a moment's company is nothing), sits out
until the team's cores have been idle again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

LOOK_NS = 20_000_000  # of work between two looks at the helpers
IDLE_NS = 200_000_000  # between two looks at the cores, while a helper sits out
WAITING = 0.15  # share of the work's time
TICKS = os.sysconf("SC_CLK_TCK")  # a second, of the idle times
IDLE = 0.7  # of a core, from which it is ours again


@dataclass(slots=True)
class Pace:
    """Which helpers work. helpers: how many there are.

    Told what it needs by `worked` and `idled`; knows no clock and no files.
    """

    helpers: int
    resting: set[int] = field(default_factory=set)
    _late: set[int] = field(default_factory=set)
    _waits: Sequence[int] | None = None

    def worked(self, ns: int, waits: Sequence[int] | None) -> bool:
        """After a look: `ns` of work since the last one, and how long each helper has stood in line, in all.

        waits: None where the system doesn't say. Whether the helpers at work changed.
        """
        before, self._waits = self._waits, waits
        if waits is None or before is None:
            return False
        late = {
            i for i in range(self.helpers) if i not in self.resting and waits[i] - before[i] > WAITING * ns
        }
        again, self._late = late & self._late, late
        self.resting |= again
        return bool(again)

    def idled(self, cores: float) -> bool:
        """So many of the team's cores were idle of late, together. Whether the helpers at work changed."""
        if not self.resting or cores < IDLE * len(self.resting):
            return False
        self.resting.clear()
        self._late.clear()
        self._waits = None  # what a helper waited while it was called back says nothing
        return True


class Lines:
    """How long threads stood in line for a core: /proc/self/task/*/schedstat, kept open."""

    def __init__(self, threads: Sequence[int]) -> None:
        """threads: their ids in the system."""
        self._files: list[int] = []
        with contextlib.suppress(OSError):
            for thread in threads:
                self._files.append(os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY))
        self._whole = len(self._files) == len(threads)

    def read(self) -> list[int] | None:
        """Nanoseconds of each; None where the system doesn't say."""
        if not self._whole:
            return None
        try:
            return [int(os.pread(file, 64, 0).split()[1]) for file in self._files]
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        """Idempotent."""
        while self._files:
            os.close(self._files.pop())


def idle_ticks(cpus: set[int]) -> int | None:
    """TICKS that these processors have been idle, together; None where nobody says.

    What polite programs use counts, too, unless this one is polite itself: it gives way to us.
    """
    total, found, polite = 0, 0, os.getpriority(os.PRIO_PROCESS, 0) > 0
    try:
        with open("/proc/stat", encoding="ascii") as file:
            for line in file:
                name, *counts = line.split()
                if not name.startswith("cpu"):
                    break
                if name[3:].isdigit() and int(name[3:]) in cpus:
                    total += int(counts[3]) + int(counts[4]) + (0 if polite else int(counts[1]))
                    found += 1
    except (OSError, ValueError, IndexError):
        return None
    return total if found else None
