"""Groups of cores as devices of their own: `cpu:0-3` may use the logical processors 0 to 3, and no other.

`cpu:0` is the whole host; one core is `cpu:0-0`. Groups may not overlap. All of them live in the
host's memory, so what a plan may put there is divided between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from flashrt.errors import PlanError
from flashrt.machine import Device, Measured
from flashrt.probes import host

_ID = re.compile(r"cpu:(\d{1,6})-(\d{1,6})\Z")


def processors(id: str) -> tuple[int, ...] | None:
    """The logical processors that "cpu:0-3" names; None for an id that is no group's.

    Raises PlanError for a range that runs backwards.
    """
    found = _ID.match(id)
    if found is None:
        return None
    first, last = map(int, found.groups())
    if first > last:
        raise PlanError(f"device {id!r}: the range runs backwards", hint=f"write cpu:{last}-{first}")
    return tuple(range(first, last + 1))


def group(whole: Device, id: str, measured: Mapping[str, Measured], root: Path = host.ROOT) -> Device:
    """The group `id` of the host `whole`.

    measured: the group's own rates; what isn't in it is taken as the group's share of the host's.
    Raises PlanError naming the cores that this process may not use.
    """
    cpus = processors(id)
    assert cpus is not None, id
    usable = host.usable_cpus()
    if beyond := [n for n in cpus if n not in usable]:
        raise PlanError(
            f"device {id!r}: this process may not use core {ranges(beyond)}",
            hint=f"it may use {ranges(sorted(usable))} (numbers as taskset and lscpu write them)",
        )
    cores = host.cores_of(frozenset(cpus), root)
    share = cores / whole.cores
    rates = {dtype: _shared(rate, share) for dtype, rate in whole.rates.items()}
    read, gemv = _shared(whole.read, share), _shared(whole.gemv, share) if whole.gemv else None
    part = replace(whole, id=id, cpus=cpus, cores=cores, read=read, gemv=gemv, rates=rates, load=None)
    return host.with_rates(part, measured)


def _shared(rate: Measured, share: float) -> Measured:
    return Measured(rate.value * share, "assumed")


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] → "0-2,5"."""
    pieces: list[list[int]] = []
    for n in numbers:
        if pieces and n == pieces[-1][-1] + 1:
            pieces[-1].append(n)
        else:
            pieces.append([n])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in pieces)


def check(devices: Sequence[Device]) -> None:
    """Raises PlanError for a device named twice, and for two that would run on the same core."""
    ids = [d.id for d in devices]
    if twice := sorted({id for id in ids if ids.count(id) > 1}):
        raise PlanError(f"device {twice[0]!r} is named twice", hint="name each device once")
    for a, b in combinations([d for d in devices if d.kind == "cpu"], 2):
        if common := sorted(_team(a) & _team(b)):
            raise PlanError(
                f"devices {a.id!r} and {b.id!r} overlap: both would use core {ranges(common)}",
                hint=f"{host.ID} is the whole host; groups are written cpu:FIRST-LAST and share no core",
            )


def _team(device: Device) -> frozenset[int]:
    return frozenset(device.cpus) or host.usable_cpus()


def limited(devices: Sequence[Device], budgets: Mapping[str, int]) -> tuple[Device, ...]:
    """The devices with limits on their memory.

    budgets: bytes by device id. Core groups without one share what the others leave of nine tenths of
    the host's memory, by their number of cores, so that together they never promise more than there is.

    Raises PlanError for a budget of a device that isn't chosen, of nothing, or of more than there is.
    """
    by_id = {d.id: d for d in devices}
    for id, limit in budgets.items():
        _check_budget(by_id, id, limit)
    team = [d for d in devices if d.kind == "cpu"]
    open_ = [d for d in team if d.id not in budgets]
    given = sum(budgets[d.id] for d in team if d.id in budgets)
    if team and given > team[0].memory:
        raise PlanError(
            f"the budgets of {', '.join(d.id for d in team if d.id in budgets)} come to {given} bytes, "
            f"the memory they share has {team[0].memory}",
            hint="lower them until they fit together",
        )
    parts = dict(budgets)
    if len(team) > 1 and open_:
        left = max(0, team[0].memory * 9 // 10 - given)
        parts |= {d.id: left * d.cores // sum(o.cores for o in open_) for d in open_}
        if not left:
            raise PlanError(
                f"the budgets leave no memory for {open_[0].id}", hint="lower them, or give it one, too"
            )
    return tuple(replace(d, limit=parts.get(d.id, d.limit)) for d in devices)


def _check_budget(by_id: Mapping[str, Device], id: str, limit: int) -> None:
    if id not in by_id:
        raise PlanError(
            f"a budget for {id!r}, which isn't in use", hint=f"devices in use: {', '.join(by_id)}"
        )
    if limit <= 0:
        raise PlanError(f"a budget of {limit} bytes for {id}", hint="a budget is at least one byte")
    if limit > by_id[id].memory:
        raise PlanError(
            f"a budget of {limit} bytes for {id}, which has {by_id[id].memory}",
            hint="a budget is at most the memory of the device",
        )
