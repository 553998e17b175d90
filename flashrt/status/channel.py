"""The channel from engines to onlookers: one small JSON file an engine, in a folder that is the user's own.

A file is written under another name and renamed, so that a reader sees all of it or none. It goes when
its engine is closed or its process ends; what a killed process left is removed by whoever looks next.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from flashrt import knobs
from flashrt.errors import ParseError, RequestError
from flashrt.status.record import Status, dump, read

PROC = Path("/proc")
STARTED = 22  # field of /proc/PID/stat: ticks from boot to the process's start
ABANDONED = 60.0  # seconds after which a file that wasn't renamed is a killed process's


def began(pid: int) -> int | None:
    """When a process started, in ticks since boot: with the pid it names the process for good.

    0 where the system doesn't tell; None when there is no such process.
    """
    try:
        text = (PROC / str(pid) / "stat").read_text("utf-8", "replace")
        # the name in brackets may hold spaces; after it stands field 3
        return int(text.rpartition(")")[2].split()[STARTED - 3])
    except (OSError, ValueError, IndexError):
        return 0 if not PROC.is_dir() and _alive(pid) else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def space() -> str:
    """The namespace that pids of this process count in; "" where there is no such thing."""
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""


class Outlet:
    """The file of one engine. Methods raise OSError when the folder can't be used.

    number: which of this process's engines.
    """

    def __init__(self, number: int) -> None:
        self._pid = os.getpid()
        self.path = knobs.runtime_folder() / f"{self._pid}-{number}.json"
        self._unfinished = self.path.with_suffix(".part")

    def write(self, status: Status) -> None:
        """Puts the status in place of the last one."""
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _own(folder):
            raise PermissionError(f"{folder} belongs to someone else")
        self._unfinished.write_text(dump(status), encoding="utf-8")
        self._unfinished.replace(self.path)

    def remove(self) -> None:
        """Takes the file away. Idempotent; a forked child leaves its parent's alone."""
        if os.getpid() == self._pid:
            for path in (self.path, self._unfinished):
                with suppress(OSError):
                    path.unlink()


def _own(folder: Path) -> bool:
    """Whether it is this user's and no link: where all may write, someone else could have made it."""
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()


# ---- looking -----------------------------------------------------------------------
def engines() -> list[Status]:
    """What every engine that runs here told last, the newest engine first. Removes what is stale."""
    return sorted(_all(), key=lambda s: -s.opened)


def engine(pid: int) -> Status:
    """The newest engine of a process. Raises RequestError when it has none."""
    known = engines()
    for status in known:
        if status.pid == pid:
            return status
    others = ", ".join(str(p) for p in dict.fromkeys(s.pid for s in known))
    what = "runs no flashrt engine" if began(pid) is not None else "isn't there"
    raise RequestError(
        f"process {pid} {what}",
        hint=f"processes with an engine: {others}" if others else "no process here runs an engine",
    )


def _all() -> Iterator[Status]:
    here, folder = space(), knobs.runtime_folder()
    if not _own(folder):
        return
    for path in folder.glob("*.json"):
        try:
            status = read(path.read_text("utf-8"), path=str(path))
        except (OSError, ParseError):
            continue  # it went this moment, or another version wrote it
        if status.space != here:
            continue  # its pid means nothing here, so nobody can say whether it lives
        if began(status.pid) == status.began:
            yield status
        else:
            _remove(path)
    for path in folder.glob("*.part"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
