"""The picture of the machine at this moment, and the rates measured here before.

Measured rates are kept as one JSON file a machine in the cache folder. They are
keyed `device/rate`: `cpu:0/read` and `cpu:0/gemv` in bytes per second, `cpu:0/f32` in
flop per second; those of links as `links.key` writes them.
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
from flashrt.probes import groups, host

Rates = Mapping[str, Measured]
STALE = 30 * 86400.0  # seconds after which a measured rate had better be measured again


@dataclass(frozen=True, slots=True)
class Recalled:
    """Rates measured before. age: seconds since the last of them; ages: of each."""

    rates: Rates
    age: float
    ages: Mapping[str, float]


def snapshot(*, measured: Rates | None = None) -> Machine:
    """The host as it is now; no kernels (`Machine.with_kernels`) and no links yet.

    measured: rates to take instead of assumed ones; None takes those remembered, {} none.
    """
    device = host.host()
    known = remembered(device) if measured is None else measured
    return Machine((host.with_rates(device, own_rates(device.id, known)),), taken_at=time.time())


def core_group(machine: Machine, id: str) -> Device:
    """A group of the host's cores as a device, with what is remembered of its rates.

    Raises PlanError as `groups.group` does.
    """
    whole = machine.devices[0]
    return groups.group(whole, id, own_rates(id, remembered(whole)))


def remembered(device: Device | None = None) -> Rates:
    """The rates of this machine that were kept; {} where there are none."""
    recalled = recall(device)
    return recalled.rates if recalled else {}


def own_rates(id: str, measured: Rates) -> Rates:
    """A device's part of them, without its name: "read", "f32"."""
    prefix = f"{id}/"
    return {key.removeprefix(prefix): rate for key, rate in measured.items() if key.startswith(prefix)}


def measure(seconds: float = 0.5) -> dict[str, Measured]:
    """Measures the host's rates in about that many seconds."""
    read, f32 = host.measure_host(seconds)
    return {f"{host.ID}/read": read, f"{host.ID}/f32": f32}


def remember(measured: Rates, *, device: Device | None = None, folder: Path | None = None) -> Path:
    """Keeps the measured ones of these rates for this machine, beside those kept before; gives the file.

    device: whose machine, None for this one. folder: None for the cache folder.
    Raises KnobError when the folder can't be written.
    """
    device = device or host.host()
    path, now = _file(device, folder), time.time()
    before = recall(device, folder=folder) or Recalled({}, 0.0, {})
    new = {key: rate for key, rate in measured.items() if rate.how == "measured"}
    rates = {key: rate.value for key, rate in {**before.rates, **new}.items()}
    at = {key: now - age for key, age in before.ages.items()} | dict.fromkeys(new, now)
    text = json.dumps({"taken_at": now, "rates": rates, "at": at}, indent=1)
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
        now, last = time.time(), float(kept["taken_at"])
        # a file from before rates were aged one by one: all are as old as the file
        ages = {key: max(0.0, now - float(kept.get("at", {}).get(key, last))) for key in rates}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    good = all(0 < rate.value < math.inf for rate in rates.values())
    return Recalled(rates, max(0.0, now - last), ages) if good else None


def _file(device: Device, folder: Path | None) -> Path:
    """One file a machine: rates of fewer cores or another processor don't count here."""
    name = json.dumps([device.name, device.cores, device.features])
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return (folder or knobs.cache_folder()) / "rates" / f"{digest}.json"
