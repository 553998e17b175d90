"""`flashrt devices`: what is known of this machine, and how."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from flashrt.cli.options import Budgets, Devices, Json, budgets_of, device_ids
from flashrt.cli.terminal import micros, progress, say, show, size

if TYPE_CHECKING:
    from flashrt.machine import Device, Link, Measured
    from flashrt.probes.disk import Disk
    from flashrt.probes.nvidia import Gpu
    from flashrt.probes.survey import Survey

Facts = Iterable[tuple[str, str]]


def devices(
    device: Devices = None,
    budget: Budgets = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="measure rates, links and the disk now (some seconds a device) and remember them",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Shows the devices of this machine, its links, GPUs, NPU providers and disks.

    Each figure says how it is known: measured, reported by a driver or the system, or assumed.
    """
    from flashrt import engine
    from flashrt.machine import to_json

    ids, budgets = device_ids(device), budgets_of(budget)
    remarks: tuple[str, ...] = ()
    if measure:
        with progress("measuring") as step:
            remarks = engine.measure_devices(ids, on_step=step)
    survey = engine.survey(ids, budgets)
    if as_json:
        sys.stdout.write(
            json.dumps({**json.loads(to_json(survey.machine)), **_beside(survey)}, indent=1) + "\n"
        )
    else:
        _print(survey)
    for remark in remarks:
        say(remark)


def _beside(survey: Survey) -> dict[str, Any]:
    """What stands beside the machine picture in the JSON."""
    gpus = [
        {**{k: getattr(g, k) for k in g.__slots__ if k != "reasons"}, "reasons": dict(g.reasons)}
        for g in survey.gpus.gpus
    ]
    for gpu in gpus:
        gpu["processes"] = [asdict(p) for p in gpu["processes"] or ()]
    return {
        "ages": dict(survey.ages),
        "gpus": {"reason": survey.gpus.reason, "driver": survey.gpus.driver, "gpus": gpus},
        "providers": asdict(survey.providers),
        "disks": [asdict(d) for d in survey.disks],
        "system": asdict(survey.system),
    }


# ---- for a person ------------------------------------------------------------------
def _print(survey: Survey) -> None:
    gpus = {gpu.id: gpu for gpu in survey.gpus.gpus}
    for device in survey.machine.devices:
        facts = [*_device(device, survey)]
        if device.id in gpus:
            facts += _gpu(gpus[device.id])
        _section(f"{device.id}  {device.name}", facts)
    if survey.machine.links:
        _section("links", (_link(link, survey) for link in survey.machine.links))
    lost = [
        (gpu.id, gpu.lost or gpu.reasons.get("memory", "")) for gpu in gpus.values() if gpu.memory is None
    ]
    if survey.gpus.reason or lost:
        _section("NVIDIA GPUs", lost or [("none", survey.gpus.reason)])
    _section("onnxruntime providers and neural processors", _neural(survey))
    _section("disks", (_disk(disk) for disk in survey.disks))
    _advise(survey)


def _section(title: str, facts: Facts) -> None:
    show(title)
    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(Text(f"  {name}"), Text(value))
    show(grid)


def _device(device: Device, survey: Survey) -> Iterator[tuple[str, str]]:
    if device.kind in ("cpu", "reference", "null"):
        which = device.cpus or None
        load = "" if device.load is None else f", {device.load:.0%} busy in the last minute"
        yield "cores", f"{device.cores}, logical processors {_team(which) or survey.system.cpus}{load}"
    free = "" if device.free is None else f", {size(device.free)} free"
    yield "memory", f"{size(device.memory)}{free}, a plan may use {size(device.budget)}"
    yield "reads", f"{device.read.value / 1e9:,.1f} GB/s ({_how(device.read, f'{device.id}/read', survey)})"
    if gemv := device.gemv:
        how = _how(gemv, f"{device.id}/gemv", survey)
        yield "products", f"of one token read {gemv.value / 1e9:,.1f} GB/s of weights ({how})"
    for dtype, rate in device.rates.items():
        yield dtype, f"{rate.value / 1e9:,.0f} Gflop/s ({_how(rate, f'{device.id}/{dtype}', survey)})"
    yield "kernels", f"{len(device.kernels)}" if device.kernels else "none: nothing can be placed here yet"
    yield "features", " ".join(device.features) or "none known"
    if device.id == "cpu:0" and (hint := _halves(survey.system.cpus)):
        yield "groups", f"--device {hint} makes two devices of it"


def _team(cpus: tuple[int, ...] | None) -> str:
    if not cpus:
        return ""
    return f"{cpus[0]}-{cpus[-1]}" if len(cpus) > 1 else str(cpus[0])


def _halves(cpus: str) -> str:
    """ "0-7" → "cpu:0-3,cpu:4-7"; "" for what isn't one range of two cores or more."""
    first, dash, last = cpus.partition("-")
    if not dash or not last.isdigit():
        return ""
    middle = (int(first) + int(last)) // 2
    return f"cpu:{first}-{middle},cpu:{middle + 1}-{last}"


def _how(figure: Measured, key: str, survey: Survey) -> str:
    """How a figure is known, and since when: "measured 3 days ago"."""
    if figure.how != "measured" or key not in survey.ages:
        return figure.how
    stale = ": stale, measure again" if survey.stale(key) else ""
    return f"measured {_ago(survey.ages[key])}{stale}"


def _ago(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"


def _link(link: Link, survey: Survey) -> tuple[str, str]:
    key = f"{link.src}>{link.dst}" if link.src != "disk" else "disk>cpu:0"  # one disk for all of the host
    rate = f"{link.rate.value / 1e9:,.1f} GB/s ({_how(link.rate, f'{key}/rate', survey)})"
    late = f"{micros(link.latency.value)} ({_how(link.latency, f'{key}/latency', survey)})"
    return f"{link.src} → {link.dst}", f"{rate}, starts in {late}"


def _gpu(gpu: Gpu) -> Iterator[tuple[str, str]]:
    """What the driver says beyond the machine picture; what it doesn't say, with the reason."""
    if gpu.load is not None:
        memory = "" if gpu.memory_load is None else f", memory {gpu.memory_load:.0%}"
        yield "load", f"{gpu.load:.0%}{memory}"
    if gpu.sm_mhz is not None:
        most = f" of {gpu.max_sm_mhz}" if gpu.max_sm_mhz else ""
        yield "clocks", f"{gpu.sm_mhz}{most} MHz, memory {gpu.memory_mhz or '?'} MHz"
    if gpu.throttle is not None:
        yield "held back", ", ".join(gpu.throttle) or "by nothing"
    if gpu.width is not None:
        most = f" of {gpu.max_generation} x{gpu.max_width}" if gpu.max_width else ""
        yield "PCIe", f"generation {gpu.generation} x{gpu.width}{most}{_traffic(gpu)}"
    if gpu.processes is not None:
        yield "processes", ", ".join(f"{p.pid} ({size(p.memory or 0)})" for p in gpu.processes) or "none"
    reasons = {why: [k for k, w in gpu.reasons.items() if w == why] for why in gpu.reasons.values()}
    for why, names in reasons.items():
        yield "not known", f"{', '.join(names)}: {why}"


def _traffic(gpu: Gpu) -> str:
    if gpu.sent is None or gpu.received is None:
        return ""
    return f", sends {gpu.sent / 1e9:.1f} and receives {gpu.received / 1e9:.1f} GB/s"


def _neural(survey: Survey) -> Iterator[tuple[str, str]]:
    found = survey.providers
    if found.reason:
        yield "none", found.reason
    for provider in found.providers:
        what = {"remote": "computes elsewhere", "unknown": "unknown"}.get(
            provider.kind, provider.kind.upper()
        )
        stand_in = f"; {provider.stand_in}" if provider.stand_in else ""
        yield provider.name, f"{what}, {provider.package} {provider.version}{stand_in}"
    for chip in found.chips:
        yield chip.node, f"{chip.name}, driver {chip.driver}"
    if not found.chips:
        yield "neural processor", "none that the system knows of"


def _disk(disk: Disk) -> tuple[str, str]:
    kinds = {True: "rotational, as the system says", False: "solid state", None: disk.reason}
    room = "" if disk.size is None else f", {size(disk.size)}, {size(disk.free or 0)} free"
    over = ", over a network" if disk.remote else ""
    return disk.mount, f"{disk.device} {disk.filesystem}{room}, {kinds[disk.rotational]}{over}"


def _advise(survey: Survey) -> None:
    own = [d for d in survey.machine.devices if d.kind == "cpu"]
    figures = [(f"{d.id}/{name}", r) for d in own for name, r in d.figures.items() if d.measurable(name)]
    if any(rate.how == "assumed" for _, rate in figures):
        say("assumed rates make poor estimates: flashrt devices --measure takes some seconds")
    elif any(survey.stale(key) for key, _ in figures):
        say("some rates were measured long ago: flashrt devices --measure measures them again")
