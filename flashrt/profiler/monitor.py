"""What `flash-monitor` shows, as data: the machine at this moment and one engine that runs on it.

The engine tells its own part (`flashrt.status`); loads and memory come from the probes. Nothing here
disturbs the engine: it isn't asked, its file is read.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from flashrt import engine
from flashrt.machine import How, Machine, to_json
from flashrt.status import channel
from flashrt.status.publisher import PERIOD
from flashrt.status.record import Lane, Status, Work, as_facts

if TYPE_CHECKING:
    from flashrt.probes.memory import MappedFile, Tiers, Usage
    from flashrt.probes.sampler import Live

WINDOW = 2.0  # seconds that rates are taken over
SELDOM = 2.0  # seconds between looks at what the kernel must search for


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second over the last moments: steps, tokens read (prompts included) and rows drawn from."""

    steps: float
    tokens: float | None
    rows: float | None


@dataclass(frozen=True, slots=True)
class LaneRate:
    """A lane while it is busy, against what is known of its limit.

    busy, waiting: shares of its last step, 0…1. bytes, flops: per second. share: of the limit, 0…1, for
    each kind of work by whichever of bandwidth and matrix rate it needs longer for. how: the weakest
    way in which one of those limits is known, "measured", "reported" or "assumed". None: not known, or
    it did nothing.
    """

    device: str
    lane: str
    busy: float | None
    waiting: float | None
    bytes: float | None
    flops: float | None
    share: float | None
    how: str


@dataclass(frozen=True, slots=True)
class Hidden:
    """What drivers' tools don't show: mapped files and the page cache, huge pages, by process."""

    usage: Usage | None
    files: tuple[MappedFile, ...]


@dataclass(frozen=True, slots=True)
class View:
    """One look. at: seconds since 1970. machine: the engine's devices, or the host, with rates as they are
    known now. engine: None while none runs. others: processes with engines beside it. rates: None until
    there are two moments to compare. usage: of the engine's process. hidden: when asked for."""

    at: float
    machine: Machine
    live: Live
    tiers: Tiers
    engine: Status | None
    others: tuple[int, ...]
    rates: Rates | None
    lanes: tuple[LaneRate, ...]
    usage: Usage | None
    hidden: Hidden | None


class Monitor:
    """Looks at the machine and at an engine again and again. Close it, or use it in a `with`.

    pid: whose engine; None for the newest there is, and another one when it ends.
    everything: look for what is hidden, too. Raises RequestError for a process without an engine.
    """

    def __init__(self, pid: int | None = None, *, everything: bool = False) -> None:
        self._pid, self._everything = pid, everything
        self._probe = engine.memory_probe()
        self._key: object = None
        self._past: deque[tuple[float, Status]] = deque()
        self._hidden: tuple[float, Hidden] | None = None
        self._begin(self._engines()[0])

    def look(self) -> View:
        """The machine now. Loads are over the time since the last look, unknown in the first.

        Raises RequestError when the process that was asked for has ended.
        """
        status, others = self._engines()
        if _key(status) != self._key:
            self.close()
            self._begin(status)
        live, now = self._sampler.sample(), time.time()
        if status is not None:
            self._past.append((now, status))
            while len(self._past) > 2 and now - self._past[1][0] > WINDOW:
                self._past.popleft()
        usage = self._probe.process(status.pid) if status else None
        return View(
            at=now,
            machine=self._machine,
            live=live,
            tiers=self._probe.tiers(),
            engine=status,
            others=others,
            rates=_rates(self._past, now),
            lanes=tuple(_lane(lane, status.step, self._machine) for lane in status.lanes) if status else (),
            usage=usage,
            hidden=self._look_deeper(status) if self._everything else None,
        )

    def _engines(self) -> tuple[Status | None, tuple[int, ...]]:
        """(the one to look at, pids of the others)."""
        known = channel.engines()
        if self._pid is not None:
            chosen: Status | None = channel.engine(self._pid)
        else:
            chosen = next((s for s in known if _key(s) == self._key), known[0] if known else None)
        return chosen, tuple(s.pid for s in known if _key(s) != _key(chosen))

    def _begin(self, status: Status | None) -> None:
        """With this engine, or none."""
        self._sampler = engine.sampler(status.pid if status else None)
        self._key, self._hidden = _key(status), None
        self._past.clear()
        self._machine = engine.with_known_rates(status.picture() if status else Machine(()))

    def _look_deeper(self, status: Status | None) -> Hidden:
        """At most every SELDOM seconds."""
        now = time.monotonic()
        if self._hidden is None or now - self._hidden[0] >= SELDOM:
            pid, files = (status.pid, status.files) if status else (None, ())
            usage = self._probe.process(pid, whole=True) if pid is not None else None
            found = self._probe.files(pid, files) if pid is not None else ()
            self._hidden = now, Hidden(usage, found)
        return self._hidden[1]

    def close(self) -> None:
        """Closes the probes' files. Idempotent."""
        self._sampler.stop()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _key(status: Status | None) -> object:
    return status and (status.pid, status.number)


# ---- rates -------------------------------------------------------------------------
def _rates(past: deque[tuple[float, Status]], now: float) -> Rates | None:
    """Over the looks that are kept. What is written last held until a period ago: else it were rewritten."""
    if not past:
        return None
    (seen, first), (_, last) = past[0], past[-1]
    seconds = max(last.at, now - PERIOD) - max(first.at, seen - PERIOD)
    if seconds <= 0:
        return None
    tokens = None if last.tokens is None else (last.tokens - (first.tokens or 0)) / seconds
    rows = None if last.rows is None else (last.rows - (first.rows or 0)) / seconds
    return Rates((last.steps - first.steps) / seconds, tokens, rows)


def _lane(lane: Lane, step: float | None, machine: Machine) -> LaneRate:
    if machine.device(lane.device).kind == "null":
        return LaneRate(lane.device, lane.lane, None, None, None, None, None, "a pretend clock")
    busy, moved, done = lane.busy, sum(w.bytes for w in lane.work), sum(w.flops for w in lane.work)
    limits = [_limit(work, lane.device, machine) for work in lane.work]
    shortest = sum(seconds for seconds, _ in limits)
    return LaneRate(
        lane.device,
        lane.lane,
        min(1.0, busy / step) if step else None,
        min(1.0, lane.waiting / step) if step else None,
        moved / busy if busy else None,
        done / busy if busy else None,
        shortest / busy if busy and limits else None,
        _weakest([how for _, how in limits]),
    )


def _limit(work: Work, device: str, machine: Machine) -> tuple[float, How]:
    """(seconds that the work takes at the least, how its limit is known)."""
    if work.src:
        rate = machine.link(work.src, work.dst).rate
        return work.bytes / rate.value, rate.how
    spec = machine.device(device)
    reading = (work.bytes / spec.read.value, spec.read.how)
    matrix = spec.rates.get(work.dtype) or spec.rates.get("f32")
    return max(reading, (work.flops / matrix.value, matrix.how)) if matrix else reading


def _weakest(ways: list[How]) -> str:
    order: tuple[How, ...] = ("assumed", "reported", "measured")
    return next((how for how in order if how in ways), "")


# ---- JSON --------------------------------------------------------------------------
def as_json(view: View) -> dict[str, Any]:
    """The view as plain data; what isn't known is null."""
    live = view.live
    return {
        "at": view.at,
        "engine": as_facts(view.engine) if view.engine else None,
        "others": list(view.others),
        "machine": json.loads(to_json(view.machine)),
        "cores": [asdict(core) for core in live.cores],
        "gpus": [{f.name: getattr(g, f.name) for f in fields(g) if f.name != "reasons"} for g in live.gpus],
        "reasons": dict(live.reasons),
        "tiers": asdict(view.tiers),
        "rates": asdict(view.rates) if view.rates else None,
        "lanes": [asdict(lane) for lane in view.lanes],
        "usage": asdict(view.usage) if view.usage else None,
        "hidden": asdict(view.hidden) if view.hidden else None,
    }
