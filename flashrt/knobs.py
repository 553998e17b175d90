"""Every environment variable flashrt reads: name, type, default, one sentence.

A bad value is an error at first use, never a silent default.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import platformdirs

from flashrt.errors import KnobError

V = TypeVar("V")
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Knob(Generic[V]):
    """One environment variable: `read` turns its text into a value or raises ValueError."""

    name: str
    default: V
    read: Callable[[str], V]
    meaning: str

    def get(self) -> V:
        """The value in force. Raises KnobError when the variable doesn't parse."""
        text = os.environ.get(self.name, "")
        if text == "":
            return self.default
        try:
            return self.read(text)
        except ValueError as error:
            raise KnobError(f"{self.name}={text!r}: {error}", hint=f"{self.name}: {self.meaning}") from None


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError("expected a whole number, 1 or more")
    return int(text)


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


def _folder(text: str) -> Path:
    return Path(text).expanduser()


THREADS = Knob("FLASHRT_THREADS", 0, _count, "threads of the CPU team (default: one per physical core)")
CACHE = Knob[Path | None](
    "FLASHRT_CACHE", None, _folder, "folder for compiled plans, kernels and measured rates"
)
RUNTIME = Knob[Path | None](
    "FLASHRT_RUNTIME", None, _folder, "folder in which running engines tell flash-monitor about themselves"
)
POISON = Knob("FLASHRT_POISON", False, _flag, "1: fill freed memory with NaN patterns (for tests)")
LIVE = Knob("FLASHRT_LIVE", True, _flag, "0: plans stay as they were made, whatever the machine does")

ALL: tuple[Knob[int] | Knob[bool] | Knob[Path | None], ...] = (THREADS, CACHE, RUNTIME, POISON, LIVE)


def cache_folder() -> Path:
    """Where compiled plans, kernels, verdicts and measured rates are kept; it need not exist yet."""
    return CACHE.get() or Path(platformdirs.user_cache_dir("flashrt"))


def runtime_folder() -> Path:
    """Where running engines tell about themselves; it need not exist yet.

    The session's folder, or where there is none (containers) one in shared memory: files there cost no disk.
    """
    if (chosen := RUNTIME.get()) is not None:
        return chosen
    if not os.environ.get("XDG_RUNTIME_DIR") and os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return SHARED_MEMORY / f"flashrt-{os.getuid()}"
    return Path(platformdirs.user_runtime_dir("flashrt"))
