"""`flash-monitor`: a live view of the devices and of the engine that runs on them."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from flashrt.cli.monitor_view import picture
from flashrt.cli.options import Json
from flashrt.cli.terminal import Command, console, say
from flashrt.errors import RequestError

if TYPE_CHECKING:
    from flashrt.profiler.monitor import Monitor

FIRST = 1.0  # seconds that a single picture is taken over

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=Command)
def monitor(
    pid: Annotated[
        int | None, typer.Option(min=1, help="the process whose engine to watch (default: the newest engine)")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="also mapped files, page cache and huge pages, which driver tools hide"),
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="one picture, taken over a second")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=60, metavar="SECONDS", help="time between two pictures")
    ] = 0.5,
    as_json: Json = False,
) -> None:
    """Shows devices, loads, rates against their limits, memory by owner, lanes, splits and the plan's age.

    Attaches to an engine that runs (flashrt run, or a program that uses the library); without one it
    shows the devices and waits for one. Ctrl-C ends it. With --json each picture is one line. Where there
    is no terminal one picture is printed.
    """
    from flashrt.profiler.monitor import Monitor

    with Monitor(pid, everything=everything) as watching:
        watching.look()  # loads and rates are known from the second look on
        try:
            if as_json:
                _lines(watching, interval, once)
            elif once or not console().is_terminal:
                time.sleep(FIRST)
                view = watching.look()
                console().print(picture(view, console().width))
            else:
                _live(watching, interval)
        except KeyboardInterrupt:
            return  # the usual end
        except RequestError as ended:  # it was there when this began
            say(ended.what)


def _lines(watching: Monitor, interval: float, once: bool) -> None:
    """One JSON object a line for each picture."""
    from flashrt.profiler.monitor import as_json

    while True:
        time.sleep(FIRST if once else interval)
        sys.stdout.write(json.dumps(as_json(watching.look()), ensure_ascii=False) + "\n")
        sys.stdout.flush()
        if once:
            return


def _live(watching: Monitor, interval: float) -> None:
    """The picture on the whole screen, again and again."""
    out = console()
    with Live(console=out, screen=True, auto_refresh=False, vertical_overflow="crop") as shown:
        while True:
            shown.update(picture(watching.look(), out.width), refresh=True)
            time.sleep(interval)


def main() -> None:
    """The entry point of `flash-monitor`."""
    app()
