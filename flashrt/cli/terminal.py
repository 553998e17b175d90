"""What the commands share: where text goes, how errors end, progress.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 2 the
request was wrong (bad input, no such model, it doesn't fit), 130 interrupted;
1 is left to defects of ours, which show their traceback.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from flashrt.errors import FlashrtError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def run(app: Callable[[], object]) -> None:
    """Runs a command line and turns what the user can repair into one message and exit code 2."""
    try:
        app()
    except FlashrtError as error:
        err.print(f"[bold red]error:[/] {escape(error.what)}", soft_wrap=True)
        for part in (error.lines, error.hint):
            if part:
                err.print(escape(part), soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        # the reader has gone (`| head`): nothing more to say, and Python must not try at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr while something takes its time, only on a terminal. Gives a setter for its text."""
    if not err.is_terminal:
        yield lambda text: None
        return
    with err.status(what) as status:
        yield lambda text: status.update(f"{what}: {text}")


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
    """Microseconds as people read them: 82.1 µs, 3.41 ms, 1.2 s."""
    if value < 1000:
        return f"{value:.1f} µs"
    if value < 1e6:
        return f"{value / 1e3:.2f} ms"
    return f"{value / 1e6:.2f} s"
