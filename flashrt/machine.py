"""What is known of the hardware, as a value: `Machine`, its `Device`s and `Link`s.

Every number says how it is known: measured (by us), reported (by a driver or
the operating system) or assumed. JSON both ways, so that a placement can be
reproduced elsewhere from two files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from flashrt.errors import ParseError, PlanError

How = Literal["measured", "reported", "assumed"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A number and how it is known."""

    value: float
    how: How


class Workspace(NamedTuple):
    """Bytes that the code of an operation sets aside at most, beside its operands.

    team: once; core: for each core; channel: for each core and channel (of its first input; of an
    attention, those of a head). Uses with the same number of channels share it.
    device: once, for all code of a device. element: for each element of its first input in the largest
    step; all uses share it. transient: as `element`, but only while it runs, and up to `backend.TRANSIENT`.
    """

    team: int = 0
    core: int = 0
    channel: int = 0
    device: int = 0
    element: int = 0
    transient: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    id: "cpu:0". kind: "cpu", "gpu", "npu", "reference" or "null". name: as the vendor writes it.
    memory: bytes it has. read: bytes per second from its memory. rates: dtype → flop per second.
    launch: microseconds to start one instruction. cores: what its team may use.
    kernels: (kernel, numerics) pairs it can run, from its backend. features: processor features.
    free: bytes free now; load: share busy now (0…1); None when not known.
    cpus: logical processors its team is pinned to; () when it may use all that the process may.
    limit: the most bytes a plan may use; None when nobody said.
    pool: devices with the same pool have one memory between them and can share a copy of the weights;
    "" when the memory is its own.
    workspace: what the code of operations sets aside for itself, by operation, from its backend.
    gemv: bytes per second of packed weights that products of one token read; None when not measured: then
    `read`.
    """

    id: str
    kind: str
    name: str
    memory: int
    read: Measured
    rates: Mapping[str, Measured]
    launch: Measured
    cores: int = 1
    kernels: tuple[tuple[str, str], ...] = ()
    features: tuple[str, ...] = ()
    free: int | None = None
    load: float | None = None
    cpus: tuple[int, ...] = ()
    limit: int | None = None
    pool: str = ""
    workspace: Mapping[str, Workspace] = field(default_factory=dict)
    gemv: Measured | None = None

    def supports(self, kernel: str, numerics: str) -> bool:
        """Whether a compiled kernel with these numerics exists (epilogues after '+' included)."""
        return (kernel, numerics) in self.kernels

    @property
    def figures(self) -> dict[str, Measured]:
        """Its rates by the names under which they are remembered, those that are known."""
        return {"read": self.read, **({"gemv": self.gemv} if self.gemv else {}), **self.rates}

    def measurable(self, rate: str) -> bool:
        """Whether a rate of this name can be measured: a type's of activations where a kernel takes them."""
        return rate in ("read", "gemv", "f32") or any(f"act={rate}" in n for _, n in self.kernels)

    def rate(self, numerics: str) -> float | None:
        """Flop per second of what numerics such as "act=i8/32 acc=f32" ask for; float32's where unknown."""
        dtype = numerics.partition("act=")[2].partition(" ")[0].partition("/")[0]
        found = self.rates.get(dtype) or self.rates.get("f32")
        return found.value if found else None

    @property
    def budget(self) -> int:
        """Bytes a plan may use: the limit, or nine tenths of the memory."""
        return self.memory * 9 // 10 if self.limit is None else self.limit


@dataclass(frozen=True, slots=True)
class Link:
    """A way from one device's memory to another's. rate: bytes per second; latency: microseconds."""

    src: str
    dst: str
    rate: Measured
    latency: Measured


@dataclass(frozen=True, slots=True)
class Machine:
    """The picture at one moment. taken_at: seconds since 1970 (0 for a recorded picture)."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    taken_at: float = field(default=0.0, compare=False)

    def device(self, id: str) -> Device:
        """The device, or PlanError naming those there are."""
        for device in self.devices:
            if device.id == id:
                return device
        raise PlanError(f"no device {id!r}", hint=f"devices: {', '.join(d.id for d in self.devices)}")

    def link(self, src: str, dst: str) -> Link:
        """The link, or an assumed one where none is known: near within a pool, slow otherwise."""
        for link in self.links:
            if (link.src, link.dst) == (src, dst):
                return link
        ends = [d for d in self.devices if d.id in (src, dst)]
        if len(ends) == 2 and ends[0].pool and ends[0].pool == ends[1].pool:
            copied = min(d.read.value for d in ends) / 2  # a copy reads and writes
            return Link(src, dst, Measured(copied, "assumed"), Measured(2.0, "assumed"))
        return Link(src, dst, Measured(1e9, "assumed"), Measured(50.0, "assumed"))

    def fingerprint(self) -> str:
        """Identifies the hardware a plan was made for: no load, free memory, rate or time in it."""
        still = [
            (
                *(d.id, d.kind, d.name, d.memory, d.cores, sorted(d.kernels), sorted(d.features)),
                *(d.cpus, d.limit, d.pool, sorted(d.workspace.items())),
            )
            for d in self.devices
        ]
        return hashlib.sha256(json.dumps(still).encode()).hexdigest()[:16]

    def with_kernels(
        self,
        kernels: Mapping[str, tuple[tuple[str, str], ...]],
        workspace: Mapping[str, Mapping[str, Workspace]] = MappingProxyType({}),
    ) -> Machine:
        """The picture with each device's kernels, and what they set aside, filled in, by kind."""
        return replace(
            self,
            devices=tuple(
                replace(
                    d,
                    kernels=kernels.get(d.kind, d.kernels),
                    workspace=workspace.get(d.kind, d.workspace),
                )
                for d in self.devices
            ),
        )


def to_json(machine: Machine) -> str:
    """The picture as JSON text."""
    return json.dumps(asdict(machine), indent=1)


def from_json(text: str, *, path: str = "machine.json") -> Machine:
    """Reads `to_json`. Raises ParseError."""
    try:
        raw = json.loads(text)
        return Machine(
            devices=tuple(_device(d) for d in raw["devices"]),
            links=tuple(
                Link(x["src"], x["dst"], Measured(**x["rate"]), Measured(**x["latency"]))
                for x in raw["links"]
            ),
            taken_at=raw["taken_at"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ParseError(f"{path}: not a machine picture: {error!r}") from None


def _device(raw: dict[str, Any]) -> Device:
    return Device(
        **{
            **raw,
            "read": Measured(**raw["read"]),
            "launch": Measured(**raw["launch"]),
            "rates": {k: Measured(**v) for k, v in raw["rates"].items()},
            "kernels": tuple((k, n) for k, n in raw["kernels"]),
            "features": tuple(raw["features"]),
            "cpus": tuple(raw.get("cpus", ())),  # pictures from before there were groups of cores
            "workspace": {op: Workspace(*sizes) for op, sizes in raw.get("workspace", {}).items()},
            "gemv": Measured(**raw["gemv"]) if raw.get("gemv") else None,
        }
    )
