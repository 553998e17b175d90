"""`flash-diagnose`: what keeps this machine from its speed, and the repair."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from flashrt import __version__, knobs
from flashrt.cli.options import Budgets, Devices, Json, budgets_of, device_ids
from flashrt.cli.terminal import Command, progress, say, show
from flashrt.errors import RequestError

if TYPE_CHECKING:
    from flashrt.profiler.diagnose import Check, Subject

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
COLOURS = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red", "SKIP": "dim"}


@app.command(cls=Command)
def diagnose(
    device: Devices = None,
    budget: Budgets = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="measure rates first (some seconds a device)")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write one self-contained page, too")
    ] = None,
    as_json: Json = False,
) -> None:
    """Checks environment, processor, memory, disks, drivers, providers and rates of this machine.

    PASS: as it should be. WARN: slower than it could be. FAIL: must be repaired. SKIP: not known here,
    and why. The exit code is 1 when something FAILs, 0 otherwise, 2 for a wrong request.
    """
    from flashrt.profiler import diagnose as checking

    ids, budgets = device_ids(device), budgets_of(budget)
    subject = _subject(ids, budgets, measure)
    checks = checking.diagnose(subject)
    if html is not None:
        _write(html, checks, subject)
    if as_json:
        facts = {"flashrt": __version__, "machine": subject.cpu.name, "failed": checking.failed(checks)}
        sys.stdout.write(json.dumps({**facts, "checks": [asdict(c) for c in checks]}, indent=1) + "\n")
    else:
        _print(checks)
    if checking.failed(checks):
        raise typer.Exit(1)


def _subject(ids: tuple[str, ...], budgets: dict[str, int], measure: bool) -> Subject:
    from flashrt import engine
    from flashrt.profiler.diagnose import Subject

    remarks: tuple[str, ...] = ()
    with progress("looking at the machine") as step:
        if measure:
            remarks = engine.measure_devices(ids, on_step=step)
        survey = engine.survey(ids, budgets)
    for remark in remarks:
        say(remark)
    folder = knobs.cache_folder()
    return Subject(survey, str(folder), _problem(folder), survey.disk_of(folder))


def _problem(folder: Path) -> str:
    """Why a file can't be made in a folder, which need not exist yet; "" when it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".flashrt-writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _write(path: Path, checks: list[Check], subject: Subject) -> None:
    from flashrt.profiler.page import page

    when = f"{time.strftime('%Y-%m-%d %H:%M %Z')}, flashrt {__version__}, {subject.survey.system.os}"
    cpus = subject.survey.system.cpus
    title = f"{subject.cpu.name}, logical processors {cpus}, {subject.cpu.memory / 1e9:.0f} GB"
    try:
        path.write_text(page(checks, title=title, when=when), encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"the page can't be written: {error}", hint="name a file in a folder that exists"
        ) from None


def _print(checks: Sequence[Check]) -> None:
    for area, rows in groupby(checks, key=lambda c: c.area):
        show(area)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=6)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for check in rows:
            verdict = Text(f"  {check.verdict}", COLOURS[check.verdict])
            grid.add_row(verdict, Text(check.name), Text(check.found))
            if check.repair:
                grid.add_row("", "", Text(f"→ {check.repair}", "bold"))
        show(grid)
    counts = [(v, sum(c.verdict == v for c in checks)) for v in COLOURS]
    show(", ".join(f"{count} {verdict}" for verdict, count in counts if count))


def main() -> None:
    """The entry point of `flash-diagnose`."""
    app()
