"""What the commands share: where text goes, how errors end, progress, tables, units.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 2 the
request was wrong (bad input, no such model, it doesn't fit), 130 interrupted;
1 is left to defects of ours, which show their traceback.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashrt import knobs
from flashrt.cli.values import PlainCommand, PlainGroup
from flashrt.errors import FlashrtError

WIDE = 160  # columns of a table where there is no terminal to fit


# ---- errors ------------------------------------------------------------------------
class Commands(PlainGroup):
    """A command line whose errors a user can repair are one message and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        with _ended_well():
            return super().invoke(ctx)


class Command(PlainCommand):
    """The same for a program that is one command."""

    def invoke(self, ctx: Any) -> Any:
        with _ended_well():
            return super().invoke(ctx)


@contextmanager
def _ended_well() -> Iterator[None]:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
    try:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
        for knob in knobs.ALL:
            knob.get()
        yield
        sys.stdout.flush()
    except FlashrtError as error:
        complain(error)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        _give_up_stdout()  # the reader has gone (`| head`): nothing more to say
        raise typer.Exit(0) from None
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:
            _give_up_stdout()
        say(Text.assemble(("error: ", "bold red"), str(error)))
        raise typer.Exit(2) from None


def keep_for_results() -> None:
    """What libraries in C print, now or when the process ends, goes to stderr from here on.

    Not where stdout is a terminal.
    """
    try:
        if sys.stdout.fileno() != 1 or sys.stdout.isatty():
            return
        sys.stdout.flush()
        own = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError):  # not a file, as in tests
        return
    sys.stdout = open(own, "w", encoding=sys.stdout.encoding)  # noqa: SIM115 - as long as the process


def _give_up_stdout() -> None:
    """What is left to print goes nowhere: Python would try once more at exit, and end with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(error: FlashrtError) -> None:
    """What is wrong, the lines around it, the next step."""
    say(Text.assemble(("error: ", "bold red"), error.what))
    for part in (error.lines, error.hint):
        if part:
            say(part)


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag, which is given as a function; pressed again it interrupts as usual."""
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


# ---- text --------------------------------------------------------------------------
class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves a closed pipe to `_ended_well`; rich would end the program with 1."""
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """stdout or stderr as it is now. Where no stream is a terminal nothing is cut to 80 columns."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    bare = "COLUMNS" not in os.environ and not any(s is not None and s.isatty() for s in streams)
    return _Console(stderr=stderr, highlight=False, markup=False, width=WIDE if bare else None)


def show(what: str | Table) -> None:
    """A result, on stdout. Text isn't wrapped: that is the terminal's work."""
    console().print(what, soft_wrap=isinstance(what, str))


def say(what: str | Text, style: str = "") -> None:
    """A message, on stderr."""
    sys.stdout.flush()  # where both go to one place they keep their order
    console(stderr=True).print(what, style=style, soft_wrap=True)


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, less: Sequence[str] = ()
) -> None:
    """A light table on stdout: the first column is a name, the others are figures.

    less: columns that may go when the terminal is too narrow, in this order.
    """
    left_out: list[str] = []
    kept = dict(enumerate(columns))
    width = console().width
    for column in less:
        if _width(kept, rows) <= width:
            break
        left_out.append(column)
        kept.pop(columns.index(column))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for at, name in kept.items():
        table.add_column(name, justify="right" if at else "left", no_wrap=bool(at), overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[at]) for at in kept))
    show(title)
    show(table)
    if left_out:
        say(f"left out to fit {width} columns: {', '.join(left_out)}", "dim")


def _width(kept: dict[int, str], rows: Sequence[Sequence[str]]) -> int:
    """Columns that a table takes on the screen: two between any two of its own, one at each side."""
    return sum(max(len(name), *(len(row[at]) for row in rows)) for at, name in kept.items()) + 2 * len(kept)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr while something takes its time, only on a terminal. Gives a setter for its text."""
    stderr = console(stderr=True)
    if not stderr.is_terminal:
        yield lambda text: None
        return
    with stderr.status(Text(what)) as status:
        yield lambda text: status.update(Text(f"{what}: {text}"))


# ---- units -------------------------------------------------------------------------
def peak_memory() -> int:
    """The most bytes this process has had in memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def size(nbytes: float) -> str:
    """Bytes as people read them: 98.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def micros(value: float) -> str:
    """Microseconds as people read them: 82.1 µs, 3.41 ms, 1.20 s."""
    if value < 1000:
        return f"{value:.1f} µs"
    if value < 1e6:
        return f"{value / 1e3:.2f} ms"
    return f"{value / 1e6:.2f} s"
