"""What a law of a level is, and what breaking one looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class Violation:
    """One place that breaks a law.

    what: a sentence with the name of the node or instruction. at: its index in the level's
    nodes or instructions, None for a declaration. law: the law's name, repair: the next step
    (both set by `violations`).
    """

    what: str
    at: int | None = None
    law: str = ""
    repair: str = ""


@dataclass(frozen=True, slots=True)
class Law(Generic[L]):
    """One law of a level.

    check: finds what breaks it; its docstring is the law in words. repair: what to do about it.
    about: the instructions it speaks of (micro only; empty: all).
    """

    name: str
    check: Callable[[L], Iterator[Violation]]
    repair: str
    about: tuple[type, ...] = ()

    @property
    def statement(self) -> str:
        """The law in words."""
        return " ".join((self.check.__doc__ or "").split())
