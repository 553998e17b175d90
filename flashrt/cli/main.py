"""`flashrt`: compile, run, bench, explain, devices."""

from __future__ import annotations

from typing import Annotated

import typer

from flashrt import __version__
from flashrt.cli.bench import bench
from flashrt.cli.compile import compile_
from flashrt.cli.devices import devices
from flashrt.cli.explain import explain
from flashrt.cli.run import run_
from flashrt.cli.terminal import Commands, show
from flashrt.cli.values import PlainCommand

app = typer.Typer(
    cls=Commands,
    help="Compiles a model into an execution plan for this machine and runs it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("compile", cls=PlainCommand)(compile_)
app.command("run", cls=PlainCommand)(run_)
app.command("bench", cls=PlainCommand)(bench)
app.command("explain", cls=PlainCommand)(explain)
app.command("devices", cls=PlainCommand)(devices)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        show(__version__)
        raise typer.Exit


def main() -> None:
    """The entry point of `flashrt`."""
    app()
