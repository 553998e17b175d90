"""What a running engine tells about itself, as a value that goes through JSON.

Sizes are bytes, times seconds; moments are seconds since 1970.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flashrt.errors import ParseError
from flashrt.machine import Machine, from_json

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Held:
    """What the program keeps on a device. limit: the most the plan may use there."""

    device: str
    limit: int
    weights: int
    cache: int
    activations: int
    staging: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations + self.staging + self.workspace


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one kind in a step. dtype: what a product's activations are rounded to ("i8"); "" for others.
    src, dst: of what moves over a link ("disk" for weights that are fetched); both "" for computing."""

    dtype: str
    src: str
    dst: str
    bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane in its last step: seconds that it was busy and that it waited for others."""

    device: str
    lane: str
    busy: float
    waiting: float
    work: tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class Splits:
    """Where a split variable stands between its first and last position."""

    name: str
    at: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Queue:
    """Sequences in work and waiting for their turn, and pages of the KV cache."""

    running: int
    waiting: int
    pages_used: int
    pages: int


@dataclass(frozen=True, slots=True)
class Replanning:
    """The live loop: when it last decided where the splits should stand, and how often it moved them.

    planned_at: None where there are none. recompiles: how often another plan took over; last_recompile:
    why it did, or why the last attempt came to nothing. hit_share: of the experts that tokens chose lately,
    the share that a GPU had which keeps some; None where none does. exchanged: how many it was given;
    not_exchanged: why others weren't.
    """

    planned_at: float | None
    switches: int
    recompiles: int = 0
    last_recompile: str = ""
    hit_share: float | None = None
    exchanged: int = 0
    not_exchanged: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """One engine at one moment.

    number: which of the process's engines. began: the process's start, in ticks since boot (0: not
    known). space: the namespace its pid counts in. at: when this was told; opened: since when it is there.
    machine: its devices without their kernels, as `machine.to_json` writes them.
    files: where its weights come from.
    steps, tokens, rows: since it was opened; sums of T and N for a model with a KV cache, else None.
    variant, symbols, step: of the last step; None, {} and None before the first. step: seconds it took.
    queue: None for a program that isn't a language model. replanning: None while nothing re-plans.
    """

    pid: int
    number: int
    began: int
    space: str
    opened: float
    at: float
    model: str
    machine: str
    files: tuple[str, ...]
    held: tuple[Held, ...]
    steps: int
    tokens: int | None
    rows: int | None
    variant: str | None
    symbols: Mapping[str, int]
    step: float | None
    lanes: tuple[Lane, ...]
    splits: tuple[Splits, ...]
    queue: Queue | None
    replanning: Replanning | None

    def picture(self) -> Machine:
        """The machine. Raises ParseError."""
        return from_json(self.machine, path=f"the status of process {self.pid}")


def dump(status: Status) -> str:
    """The status as JSON text."""
    return json.dumps({"format": FORMAT, **asdict(status)}, separators=(",", ":"))


def as_facts(status: Status) -> dict[str, Any]:
    """The status as plain data."""
    return {**asdict(status), "machine": json.loads(status.machine)}


def read(text: str, *, path: str = "") -> Status:
    """Reads `dump`. Raises ParseError for what isn't one of this format."""
    try:
        raw = json.loads(text)
        if raw.pop("format") != FORMAT:
            raise ValueError("another flashrt wrote it")
        return Status(**{**raw, **_parts(raw)})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ParseError(f"{path}: not a status: {error!r}") from None


def _parts(raw: Mapping[str, Any]) -> dict[str, Any]:
    queue, replanning = raw["queue"], raw["replanning"]
    return {
        "files": tuple(raw["files"]),
        "held": tuple(Held(**x) for x in raw["held"]),
        "lanes": tuple(Lane(**{**x, "work": tuple(Work(**w) for w in x["work"])}) for x in raw["lanes"]),
        "splits": tuple(Splits(**x) for x in raw["splits"]),
        "queue": Queue(**queue) if queue else None,
        "replanning": Replanning(**replanning) if replanning else None,
    }
