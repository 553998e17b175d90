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
POISON = Knob("FLASHRT_POISON", False, _flag, "1: fill freed memory with NaN patterns (for tests)")

ALL: tuple[Knob[int] | Knob[bool] | Knob[Path | None], ...] = (THREADS, CACHE, POISON)


def cache_folder() -> Path:
    """Where compiled plans, kernels, verdicts and measured rates are kept; it need not exist yet."""
    return CACHE.get() or Path(platformdirs.user_cache_dir("flashrt"))
