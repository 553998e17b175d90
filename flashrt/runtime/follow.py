"""The live loop of an open program: with every sample of the machine it decides where the splits stand.

The decisions are made on the sampler's thread; a step only reads one dictionary when it begins and leaves
its time when it ends. Whatever goes wrong in the loop, steps go on with the last positions, and `Metrics`
says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flashrt.ir.order import COMPUTE
from flashrt.ir.types import Env, evaluate
from flashrt.machine import Device
from flashrt.program import Program
from flashrt.runtime.control import Controller, Ran, Switch
from flashrt.runtime.elastic import Elastic, Positions, elastic
from flashrt.runtime.executor import Executor

OVERDUE = 5  # periods without a sample after which the loop is said to stand still
NOWHERE: Positions = {}


class Sample(Protocol):
    """The machine over one period (`probes.sampler.Live`)."""

    @property
    def at(self) -> float:
        """Seconds, of the clock that the follower has."""

    def foreign(self, device: Device) -> float | None:
        """The largest share that others have of any of the device's cores; None when not known."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The loop at one moment.

    age_of_last_plan: seconds since it last decided, staying included; None before the first time.
    plan_switches: how often it moved the splits. positions: by variant and split. last: the last switch.
    holding: why it doesn't decide now and the last positions are kept; "" while it works.
    recompiles: how often another plan took over (`runtime.replan`). last_recompile: why it did, or why the
    last attempt came to nothing.
    """

    age_of_last_plan: float | None
    plan_switches: int
    positions: Mapping[str, Positions]
    last: Switch | None
    holding: str
    recompiles: int = 0
    last_recompile: str = ""


class _Steps(NamedTuple):
    """Steps of one variant since the last sample, with the splits at `at`. A value: threads swap it whole."""

    env: Env
    at: Positions
    number: int = 0
    seconds: float = 0.0


class Follower:
    """Moves the splits of a program, between steps, as `source` sees the machine change.

    It takes the program's place for a mover, and ends when the program is closed or by `close`.
    clock: that of the samples. period: seconds between them, for the watchdog.
    """

    def __init__(self, program: Program, period: float, clock: Callable[[], float] = time.monotonic) -> None:
        found = ((v.name, elastic(v.stream, program.rests[v.name])) for v in program.plan.variants)
        self.variants: dict[str, Elastic] = {name: e for name, e in found if e is not None}
        self.controller = Controller(self.variants)
        self._devices = {d: program.plan.machine.device(d) for e in self.variants.values() for d in e.devices}
        self._clock, self._period = clock, period
        self._at: Mapping[str, Positions] = self.controller.positions
        self._steps: dict[str, _Steps] = {}
        self._inside = "", 0.0  # the variant of which a step runs, and since when
        self._executors: dict[str, Executor] = {}
        self._decided: float | None = None
        self._begun: float = clock()
        self._failed, self._closed = "", False
        self.recompiled: Callable[[], tuple[int, str]] = lambda: (0, "")
        for e in self.variants.values():
            for end in e.ends:
                e.live(end)  # now, since it takes a while, and not when a step waits

    @property
    def needed(self) -> bool:
        """Whether anything can move."""
        return bool(self.variants)

    # ---- for the steps (`program.Mover`)
    def at(self, variant: str) -> Positions:
        """Where the splits of a variant stand in the step that begins."""
        self._inside = variant, self._clock()
        return self._at.get(variant, NOWHERE)

    def stepped(self, variant: str, executor: Executor) -> None:
        """Counts a step, unless its splits stood elsewhere than they do now."""
        self._inside = "", 0.0
        at, env = self._at.get(variant), executor.env
        if at is None or not at.items() <= env.items():
            return
        self._executors[variant] = executor
        before = self._steps.get(variant)
        if before is None or before.at is not at or before.env.get("T") != env.get("T"):
            before = _Steps(env, at)
        self._steps[variant] = _Steps(env, at, before.number + 1, before.seconds + executor.took * 1e-9)

    # ---- for the sampler
    def sampled(
        self, sample: Sample, observe: Callable[[str, float, float, float], object] | None = None
    ) -> None:
        """Decides, after a sample. An exception is kept for `metrics`, and the splits stay."""
        if self._closed:
            return
        try:
            ran = self._ran(observe)
            foreign = {id: sample.foreign(device) for id, device in self._devices.items()}
            if self.controller.decide(sample.at, foreign, ran) is not None:
                self._at = self.controller.positions
                self._steps = {}
            self._decided, self._failed = sample.at, ""
        except Exception as error:  # whatever it is: steps go on where they are
            self._failed = f"{type(error).__name__}: {error}"

    def _ran(self, observe: Callable[[str, float, float, float], object] | None) -> dict[str, Ran]:
        steps, self._steps = self._steps, {}
        out = {}
        inside, since = self._inside
        running = max(0.0, self._clock() - since)
        if inside in self.variants:
            out[inside] = Ran(None, 0, 0.0, running=running)
        for name, s in steps.items():
            if s.at is not self._at[name]:
                continue
            busy = self._busy(name)
            out[name] = Ran(s.env, s.number, s.seconds / s.number, busy, running if name == inside else 0.0)
            if observe is not None:
                self._tell(name, s.env, busy, observe)
        return out

    def _busy(self, variant: str) -> dict[str, float]:
        spent = self._executors[variant].spent()
        return {device: ran * 1e-9 for (device, lane), (ran, _) in spent.items() if lane == COMPUTE}

    def _tell(
        self, variant: str, env: Env, busy: Mapping[str, float], observe: Callable[..., object]
    ) -> None:
        """What the devices delivered in the last step."""
        e = self.variants[variant]
        for id, seconds in busy.items():
            if id in e.moved:
                observe(id, float(evaluate(e.moved[id], env)), float(evaluate(e.flops[id], env)), seconds)

    # ---- for those who look on
    def metrics(self) -> Metrics:
        """How the loop is."""
        now, decided = self._clock(), self._decided
        last = self.controller.switches[-1] if self.controller.switches else None
        age = None if decided is None else max(0.0, now - decided)
        return Metrics(age, self.controller.count, self._at, last, self._holding(now), *self.recompiled())

    def _holding(self, now: float) -> str:
        if self._closed:
            return "the loop has ended"
        if self._failed:
            return self._failed
        quiet = now - (self._begun if self._decided is None else self._decided)
        if quiet > OVERDUE * self._period:
            return f"no sample of the machine for {quiet:.1f} s"
        return ""

    def close(self) -> None:
        """The splits stay where they are from now on. Idempotent."""
        self._closed = True
