"""Measures devices of the host, one after the other, and remembers what came out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flashrt.machine import Device, Machine, Measured
from flashrt.probes import disk, host, links, snapshot
from flashrt.probes.live import Cores

COMPANY = 0.15  # share of a device's cores that others may use while it is measured
MeasureHost = Callable[[float], dict[str, Measured]]


def measure(
    picture: Machine,
    measure_host: MeasureHost,
    *,
    folder: Path,
    seconds: float = 0.5,
    on_step: Callable[[str], None] = lambda what: None,
) -> tuple[str, ...]:
    """Rates of the picture's cpu devices, of the links between them, and of the disk under `folder`.

    measure_host: `engine.measure_host`; it is called here for "cpu:0", and in a process of its own for
    a core group. seconds: for each figure, about. on_step: told what is measured next.
    Gives remarks: what couldn't be measured and why, and what had company while it was.
    """
    remarks = []
    own = {d.id: d for d in picture.devices if d.kind == "cpu"}
    for spec in own.values():
        on_step(spec.id)
        if (share := _foreign(spec)) > COMPANY:
            remarks.append(
                f"others kept {spec.id} {share:.0%} busy: its rates are too low, measure them again"
            )
        try:
            snapshot.remember(_measured_apart(spec, seconds) if spec.cpus else measure_host(seconds))
        except (OSError, ValueError) as error:
            remarks.append(f"{spec.id} isn't measured: {error}")
    for src, dst in [(own[x.src], own[x.dst]) for x in picture.links if {x.src, x.dst} <= own.keys()]:
        on_step(f"{src.id} to {dst.id}")
        found = links.measure(src, dst, seconds)
        snapshot.remember(found)
        if links.key(src.id, dst.id, "latency") not in found:
            remarks.append(f"{src.id} to {dst.id}: no latency, the word that was sent never came back")
    on_step("disk")
    rate, why = disk.measure(folder, 2 * seconds)
    if rate is None:
        remarks.append(f"the disk isn't measured: {why}")
    else:
        snapshot.remember({links.key(links.DISK, host.ID, "rate"): rate})
    return tuple(remarks)


def _foreign(spec: Device) -> float:
    """The average share of the device's cores that others use now, over a fifth of a second; 0 if unknown."""
    cores = Cores(cpus=spec.cpus or None)
    cores.read(time.monotonic())
    time.sleep(0.2)
    shares = [core.foreign for core in cores.read(time.monotonic()) if core.foreign is not None]
    cores.close()
    return sum(shares) / len(shares) if shares else 0.0


# In a process that may use only the group's cores, the group is the host.
_APART = """
import json, os, sys
cpus, seconds = json.loads(sys.argv[1])
os.sched_setaffinity(0, cpus)
from flashrt import engine
measured = engine.measure_host(seconds)
print(json.dumps({key: rate.value for key, rate in measured.items() if rate.how == "measured"}))
"""


def _measured_apart(spec: Device, seconds: float) -> dict[str, Measured]:
    """What `engine.measure_host` gives in a process confined to a core group. Raises OSError if it fails."""
    command = [sys.executable, "-c", _APART, json.dumps([spec.cpus, seconds])]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["it ended without a word"])[-1])
    found = json.loads(done.stdout)
    return {key.replace(f"{host.ID}/", f"{spec.id}/", 1): Measured(v, "measured") for key, v in found.items()}
