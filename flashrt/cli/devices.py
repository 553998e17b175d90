"""`flashrt devices`: what is known of this machine, and how."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from flashrt.cli.options import Json
from flashrt.cli.terminal import progress, say, show, size

if TYPE_CHECKING:
    from flashrt.machine import Device, Machine


def devices(
    measure: Annotated[bool, typer.Option("--measure", help="measure rates now and remember them")] = False,
    as_json: Json = False,
) -> None:
    """Shows the devices of this machine, and how each figure is known."""
    from flashrt import engine
    from flashrt.machine import to_json

    if measure:
        with progress("measuring"):
            machine = engine.measure()
    else:
        machine = engine.machine_picture()
    if as_json:
        sys.stdout.write(to_json(machine) + "\n")
    else:
        _print(machine)


def _print(machine: Machine) -> None:
    for device in machine.devices:
        show(f"{device.id}  {device.name}")
        grid = Table.grid(padding=(0, 2))
        for name, value in _facts(device):
            grid.add_row(Text(f"  {name}"), Text(value))
        show(grid)
    if any(rate.how == "assumed" for d in machine.devices for rate in (d.read, *d.rates.values())):
        say("assumed rates make poor estimates: flashrt devices --measure takes a second")


def _facts(device: Device) -> list[tuple[str, str]]:
    load = "" if device.load is None else f", {device.load:.0%} busy"
    free = "" if device.free is None else f", {size(device.free)} free"
    rates = [(name, f"{r.value / 1e9:,.0f} Gflop/s ({r.how})") for name, r in device.rates.items()]
    return [
        ("cores", f"{device.cores}{load}"),
        ("memory", size(device.memory) + free),
        ("reads", f"{device.read.value / 1e9:.1f} GB/s ({device.read.how})"),
        *rates,
        ("kernels", f"{len(device.kernels)}"),
        ("features", " ".join(device.features) or "none known"),
    ]
