"""The picture of the machine at this moment, and the rates measured here before.

Measured rates are kept as one JSON file a machine in the cache folder. They are
keyed `device/rate`: `cpu:0/read` in bytes per second, `cpu:0/f32` in flop per second.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flashrt import knobs
from flashrt.errors import KnobError
from flashrt.machine import Device, Machine, Measured
from flashrt.probes import host

Rates = Mapping[str, Measured]


@dataclass(frozen=True, slots=True)
class Recalled:
    """Rates measured before. age: seconds since then."""

    rates: Rates
    age: float


def snapshot(*, measured: Rates | None = None) -> Machine:
    """The host as it is now; no kernels (`Machine.with_kernels`) and no links yet.

    measured: rates to take instead of assumed ones; None takes those remembered, {} none.
    """
    device = host.host()
    if measured is None:
        recalled = recall(device)
        measured = recalled.rates if recalled else {}
    own = {key.removeprefix(f"{device.id}/"): rate for key, rate in measured.items()}
    return Machine((host.with_rates(device, own),), taken_at=time.time())


def measure(seconds: float = 0.5) -> dict[str, Measured]:
    """Measures the host's rates in about that many seconds."""
    read, f32 = host.measure_host(seconds)
    return {f"{host.ID}/read": read, f"{host.ID}/f32": f32}


def remember(measured: Rates, *, device: Device | None = None, folder: Path | None = None) -> Path:
    """Keeps the measured ones of these rates for this machine; gives the file.

    device: whose machine, None for this one. folder: None for the cache folder.
    Raises KnobError when the folder can't be written.
    """
    path = _file(device or host.host(), folder)
    rates = {key: rate.value for key, rate in measured.items() if rate.how == "measured"}
    text = json.dumps({"taken_at": time.time(), "rates": rates}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise KnobError(
            f"measured rates can't be kept: {error}", hint=f"{knobs.CACHE.name}: {knobs.CACHE.meaning}"
        ) from None
    return path


def recall(device: Device | None = None, *, folder: Path | None = None) -> Recalled | None:
    """What `remember` kept for this machine; None where there is nothing that can be read."""
    try:
        kept = json.loads(_file(device or host.host(), folder).read_text(encoding="utf-8"))
        rates = {str(key): Measured(float(value), "measured") for key, value in kept["rates"].items()}
        age = max(0.0, time.time() - float(kept["taken_at"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return Recalled(rates, age) if all(0 < rate.value < math.inf for rate in rates.values()) else None


def _file(device: Device, folder: Path | None) -> Path:
    """One file a machine: rates of fewer cores or another processor don't count here."""
    name = json.dumps([device.name, device.cores, device.features])
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return (folder or knobs.cache_folder()) / "rates" / f"{digest}.json"
