"""The laws of the three levels, and the check at a pass's doors.

Each level has one table; a pass is checked on entering and on leaving, so that
a broken one is caught where it broke, with the lines around the place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from flashrt.errors import LawError
from flashrt.ir import logical, micro, physical
from flashrt.ir.graph_laws import LOGICAL, PHYSICAL
from flashrt.ir.law import Law, Violation
from flashrt.ir.memory import MemoryMap
from flashrt.ir.stream_laws import MICRO
from flashrt.ir.text import Level, show_instr, show_node

__all__ = ["LOGICAL", "MICRO", "PHYSICAL", "Law", "Violation", "check", "check_variants", "violations"]

L = TypeVar("L")
CONTEXT = 2  # lines shown before and after the place


def violations(level: Level) -> list[Violation]:
    """Everything in the level that breaks a law, in the order of the laws."""
    return list(_found(level))


def check(level: Level, *, stage: str = "") -> None:
    """Does nothing when the level keeps its laws.

    stage: where in the pipeline the level stands, for the message ("after place").

    Raises:
        LawError: with the law, the place, the lines around it and the repair.
    """
    found = next(_found(level), None)
    if found is None:
        return
    where = f"{_level_name(level)} {level.name!r}" + (f" {stage}" if stage else "")
    raise LawError(
        f"{where}: {found.what} (law {found.law})",
        lines="" if found.at is None else around(level, found.at),
        hint=f"next step: {found.repair}",
    )


def check_variants(streams: Sequence[micro.Stream]) -> None:
    """Does nothing when the streams can take turns at any step: a state is on one device, of one type.

    Raises:
        LawError: with the state, and the first instruction that looks for it elsewhere.
    """
    homes: dict[str, tuple[str, str, str]] = {}  # state → device, type, the stream that said so first
    for stream in streams:
        types = {s.name: str(s.type) for s in stream.states}
        for at, instr in enumerate(stream.instrs):
            if not isinstance(instr, micro.Dispatch):
                continue
            for state in (*instr.reads, *instr.writes):
                device, type, first = homes.setdefault(state, (instr.device, types[state], stream.name))
                if (device, type) != (instr.device, types[state]):
                    raise LawError(
                        f"state {state!r} is {types[state]} on {instr.device} in {stream.name!r}, "
                        f"{type} on {device} in {first!r} (law variants-agree)",
                        lines=around(stream, at),
                        hint="next step: keep the state where every variant of the plan looks for it",
                    )


def around(level: Level, at: int) -> str:
    """Node or instruction `at` with the lines before and after it; a `>` marks it."""
    first = max(at - CONTEXT, 0)
    records = level.instrs if isinstance(level, micro.Stream) else level.nodes
    lines = map(_line, islice(records, first, at + CONTEXT + 1))
    return "\n".join(
        f"  {'>' if number == at else ' '} {number:>4}  {line}" for number, line in enumerate(lines, first)
    )


def _line(record: logical.Node | physical.Node | micro.Instr) -> str:
    return show_node(record) if isinstance(record, logical.Node | physical.Node) else show_instr(record)


def _level_name(level: Level) -> str:
    if isinstance(level, logical.Graph):
        return "logical graph"
    return "physical graph" if isinstance(level, physical.Graph) else "micro stream"


def _found(level: Level) -> Iterator[Violation]:
    if isinstance(level, logical.Graph):
        yield from _broken(level, LOGICAL)
    elif isinstance(level, physical.Graph):
        yield from _broken(level, PHYSICAL)
    else:
        yield from _broken(MemoryMap(level), MICRO)


def _broken(level: L, laws: tuple[Law[L], ...]) -> Iterator[Violation]:
    for law in laws:
        for violation in law.check(level):
            yield replace(violation, law=law.name, repair=law.repair)
