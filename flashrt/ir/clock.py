"""The pretend clock: what the steps of a stream take, by its own estimates.

Each instruction takes its estimate at the step's symbols, lane by lane, after what it waits for.
The planner compares plans by it, and the null backend stamps with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashrt.errors import LawError
from flashrt.ir import micro
from flashrt.ir.order import COMPUTE
from flashrt.ir.text import show_instr
from flashrt.ir.types import Env, evaluate

Lane = tuple[str, str]  # device, lane


@dataclass(frozen=True, slots=True)
class Span:
    """One run of an instruction. index: in the stream. Times are microseconds from the first step."""

    index: int
    step: int
    arrived: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Simulated steps. steps: (begin, end) of each in microseconds, as the caller sees them."""

    spans: tuple[Span, ...]
    steps: tuple[tuple[float, float], ...]
    stream: micro.Stream

    @property
    def step_time(self) -> float:
        """Microseconds of the last step: the steady state once rings are warm."""
        begin, end = self.steps[-1]
        return end - begin

    def busy(self) -> Mapping[Lane, float]:
        """The share of the whole time that each lane spends on instructions (0…1)."""
        total = max((s.end for s in self.spans), default=0.0)
        spent: dict[Lane, float] = {}
        for span in self.spans:
            lane = lane_of(self.stream.instrs[span.index])
            spent[lane] = spent.get(lane, 0.0) + span.end - span.start
        return {lane: time / total if total else 0.0 for lane, time in spent.items()}

    def of(self, step: int) -> tuple[Span, ...]:
        """The spans of one step, in stream order."""
        return tuple(s for s in self.spans if s.step == step)


def lane_of(instr: micro.Instr) -> Lane:
    """The lane an instruction runs on."""
    return instr.device, instr.lane


class Clock:
    """Pretend time of one stream: when each lane is free and when each tick was last reached.

    Times are in microseconds. `now` is when the last step ended for the caller: when all compute
    lanes were through it; the next step starts then. Other lanes may still be busy.
    """

    def __init__(self, stream: micro.Stream) -> None:
        self.stream = stream
        self.now, self.steps = 0.0, 0
        self._lanes: dict[Lane, float] = {}
        self._reached: list[dict[int, float]] = []  # when ticks were reached, this step's first
        self._depth = 1 + max((-w.step for i in stream.instrs for w in i.waits), default=0)

    def step(self, env: Env) -> list[Span]:
        """Runs one step of the stream, which is a valid serial order.

        Raises LawError when an instruction waits for a tick that isn't signalled before it.
        """
        self.steps += 1
        self._reached = [{}, *self._reached[: self._depth - 1]]
        spans = [self._run(i, instr, env) for i, instr in enumerate(self.stream.instrs)]
        ends = [s.end for s in spans if self.stream.instrs[s.index].lane == COMPUTE]
        self.now = max(ends, default=self.now)
        return spans

    def _run(self, index: int, instr: micro.Instr, env: Env) -> Span:
        lane = lane_of(instr)
        arrived = max(self.now, self._lanes.get(lane, 0.0))
        start = max([arrived, *(self._time_of(w, instr) for w in instr.waits)])
        end = start + float(evaluate(instr.est, env))
        self._lanes[lane] = end
        if instr.signals is not None:
            self._reached[0][instr.signals] = end
        return Span(index, self.steps, arrived, start, end)

    def _time_of(self, wait: micro.Wait, instr: micro.Instr) -> float:
        """When the tick was reached; ticks of steps before the first count as reached at 0."""
        if self.steps + wait.step < 1:
            return 0.0
        times = self._reached[-wait.step]
        if wait.tick not in times:
            raise LawError(
                f"!{wait.tick} is awaited before any instruction signals it", lines=f"    {show_instr(instr)}"
            )
        return times[wait.tick]


def typical(stream: micro.Stream, env: Env) -> dict[str, int]:
    """`env`, with hints for the symbols and starts for the splits that it lacks."""
    hints = {s.name: s.hint for s in stream.symbols} | {s.name: s.start for s in stream.splits}
    return {**hints, **env}


def simulate(stream: micro.Stream, env: Env, steps: int = 2) -> Timeline:
    """The stream's steps on the pretend clock; `env` overrides symbols' hints and splits' starts."""
    clock, full = Clock(stream), typical(stream, env)
    spans: list[Span] = []
    bounds = []
    for _ in range(steps):
        begin = clock.now
        spans += clock.step(full)
        bounds.append((begin, clock.now))
    return Timeline(tuple(spans), tuple(bounds), stream)
