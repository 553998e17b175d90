"""Everything the probes can tell, at one moment: for `flashrt devices` and `flash-diagnose`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashrt.machine import Machine
from flashrt.probes import disk, npu, nvidia, snapshot, system
from flashrt.probes.disk import Disk
from flashrt.probes.npu import Providers
from flashrt.probes.nvidia import Gpus
from flashrt.probes.system import System


@dataclass(frozen=True, slots=True)
class Survey:
    """machine: the devices plans can be made for, and GPUs beside them. ages: seconds since each rate
    was measured, by the keys of `snapshot`."""

    machine: Machine
    ages: Mapping[str, float]
    gpus: Gpus
    providers: Providers
    disks: tuple[Disk, ...]
    system: System

    def disk_of(self, path: Path) -> Disk | None:
        """The disk that a path lies on; None when it isn't one of the known ones."""
        return disk.holding(path, self.disks)

    def stale(self, key: str) -> bool:
        """Whether a rate was measured too long ago to be relied on."""
        return self.ages.get(key, 0.0) > snapshot.STALE


def survey(machine: Machine, *, library: Any = None) -> Survey:
    """Adds to a machine picture the GPUs that the driver knows, and what else there is.

    library: as for `nvidia.Nvidia`.
    """
    driver = nvidia.Nvidia(library)
    gpus = driver.read()
    driver.close()
    known = {d.id for d in machine.devices}
    found = [(g, d) for g in gpus.gpus if (d := nvidia.device(g)) and d.id not in known]
    recalled = snapshot.recall()
    return Survey(
        machine=replace(
            machine,
            devices=(*machine.devices, *(d for _, d in found)),
            links=(*machine.links, *(link for g, _ in found for link in nvidia.links(g))),
        ),
        ages=recalled.ages if recalled else {},
        gpus=gpus,
        providers=npu.read(),
        disks=disk.disks(),
        system=system.system(),
    )
