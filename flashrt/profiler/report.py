"""From trace records to tables: what each instruction, kernel or layer cost.

Every figure comes from the stamps taken while the program ran. For each lane,
instruction time, waiting and the rest add up to the wall time of the steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flashrt.ir import micro
from flashrt.ir.types import evaluate
from flashrt.machine import Device, Machine
from flashrt.runtime.trace import StepTrace

By = Literal["instruction", "kernel", "layer"]
Phase = Literal["all", "prefill", "decode"]
Streams = Mapping[str, micro.Stream]  # by variant


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Times in microseconds.

    total, mean, p50, p99: of running, waiting not included. estimate: what the plan predicted in total.
    share: of what the device can do, whichever of bandwidth and matrix rate it comes closer to, 0…1.
    """

    name: str
    device: str
    count: int
    total: float
    mean: float
    p50: float
    p99: float
    waiting: float
    bytes: float
    gb_per_s: float
    share: float
    estimate: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane's account over all steps, in microseconds: busy + waiting + rest = time inside steps.

    rest: no instruction ran and none waited: starting, gaps between launches, the end of the step.
    """

    name: str
    busy: float
    waiting: float
    rest: float


@dataclass(frozen=True, slots=True)
class Account:
    """wall = steps + between, in microseconds.

    wall: first step's begin to last step's end. steps: time inside steps. between: host time between
    steps (scheduling, sampling parameters, detokenising).
    """

    count: int
    wall: float
    steps: float
    between: float
    lanes: tuple[Lane, ...]


def of_phase(steps: Sequence[StepTrace], phase: Phase) -> list[StepTrace]:
    """The steps of a phase: decode steps have one token a sequence, prefill steps have more."""
    if phase == "all":
        return list(steps)
    return [s for s in steps if (s.env.get("T", 0) > s.env.get("S", 0)) == (phase == "prefill")]


# ---- rows --------------------------------------------------------------------------
def rows(steps: Sequence[StepTrace], streams: Streams, machine: Machine, by: By) -> list[Row]:
    """The table, most expensive first; a device's rows are its own."""
    groups: dict[tuple[str, str], list[_Sample]] = {}
    for sample in _samples(steps, streams, machine):
        groups.setdefault((_KEYS[by](sample.instr), sample.instr.device), []).append(sample)
    table = [_row(name, device, group) for (name, device), group in groups.items()]
    return sorted(table, key=lambda r: -r.total)


@dataclass(frozen=True, slots=True)
class _Sample:
    """One run of one instruction; times in microseconds."""

    instr: micro.Instr
    time: float
    waiting: float
    bytes: float
    share: float
    estimate: float


def _samples(steps: Sequence[StepTrace], streams: Streams, machine: Machine) -> Iterator[_Sample]:
    for step in steps:
        for instr, arrived, started, ended in _ran(step, streams):
            time = (ended - started) / 1e3
            moved = float(evaluate(getattr(instr, "bytes", 0), step.env))
            flops = float(evaluate(getattr(instr, "flops", 0), step.env))
            yield _Sample(
                instr,
                time,
                (started - arrived) / 1e3,
                moved,
                _share(machine.device(instr.device), getattr(instr, "numerics", ""), moved, flops, time),
                float(evaluate(instr.est, step.env)),
            )


def _ran(step: StepTrace, streams: Streams) -> Iterator[tuple[micro.Instr, int, int, int]]:
    """(instruction, arrived, started, ended) of what ran in the step, in nanoseconds."""
    instrs = streams[step.variant].instrs
    for instr, (arrived, started, ended) in zip(instrs, step.stamps.tolist(), strict=True):
        if ended:
            yield instr, arrived, started, ended


def _share(device: Device, numerics: str, moved: float, flops: float, time: float) -> float:
    if time <= 0:
        return 0.0
    rate = device.rate(numerics)
    matrix = flops / rate if rate else 0.0
    return max(moved / device.read.value, matrix) / (time / 1e6)


def _row(name: str, device: str, group: Sequence[_Sample]) -> Row:
    times = np.array([s.time for s in group])
    total, moved = float(times.sum()), sum(s.bytes for s in group)
    return Row(
        name=name,
        device=device,
        count=len(group),
        total=total,
        mean=float(times.mean()),
        p50=float(np.percentile(times, 50)),
        p99=float(np.percentile(times, 99)),
        waiting=sum(s.waiting for s in group),
        bytes=moved,
        gb_per_s=moved / total / 1e3 if total else 0.0,
        share=sum(s.share * s.time for s in group) / total if total else 0.0,
        estimate=sum(s.estimate for s in group),
    )


def _kernel(instr: micro.Instr) -> str:
    return instr.kernel if isinstance(instr, micro.Dispatch) else type(instr).__name__.lower()


def _layer(instr: micro.Instr) -> str:
    match = re.search(r"(?:^|\.)(layers|h|blocks)\.(\d+)\.", instr.node + ".")
    return f"{match[1]}.{match[2]}" if match else (instr.node or "-")


_KEYS: Mapping[str, Callable[[micro.Instr], str]] = {
    "instruction": lambda i: f"{i.node or '-'} {_kernel(i)}",
    "kernel": _kernel,
    "layer": _layer,
}


# ---- account -----------------------------------------------------------------------
def account(steps: Sequence[StepTrace], streams: Streams) -> Account:
    """Where the wall time went. `steps` are consecutive, one or more."""
    inside = sum(s.ended - s.begun for s in steps) / 1e3
    wall = (steps[-1].ended - steps[0].begun) / 1e3
    busy: dict[str, float] = {}
    waiting: dict[str, float] = {}
    for step in steps:
        for instr, arrived, started, ended in _ran(step, streams):
            lane = f"{instr.device} {instr.lane}"
            busy[lane] = busy.get(lane, 0.0) + (ended - started) / 1e3
            waiting[lane] = waiting.get(lane, 0.0) + (started - arrived) / 1e3
    lanes = tuple(Lane(n, busy[n], waiting[n], inside - busy[n] - waiting[n]) for n in busy)
    return Account(len(steps), wall, inside, wall - inside, lanes)


# ---- Perfetto ----------------------------------------------------------------------
def perfetto(steps: Sequence[StepTrace], streams: Streams) -> dict[str, Any]:
    """The trace in the Trace Event Format that Perfetto and chrome://tracing open.

    A device is a process, a lane a thread; the steps have a process of their own. Waits under a
    microsecond are left out.
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (complete events, µs)
    """
    tracks = _Tracks()
    zero = steps[0].begun if steps else 0
    events: list[dict[str, Any]] = []

    def add(name: str, track: tuple[str, str], begun: int, ended: int, facts: Mapping[str, Any]) -> None:
        pid, tid = tracks.number(*track)
        events.append(
            {
                "name": name, "ph": "X", "pid": pid, "tid": tid,
                "ts": (begun - zero) / 1e3, "dur": (ended - begun) / 1e3, "args": dict(facts),
            }
        )  # fmt: skip

    for step in steps:
        add(f"step {step.epoch} ({step.variant})", ("runtime", "steps"), step.begun, step.ended, step.env)
        for instr, arrived, started, ended in _ran(step, streams):
            lane = (instr.device, instr.lane)
            if started - arrived > 1000:
                add("wait", lane, arrived, started, {"ticks": [w.tick for w in instr.waits]})
            estimate = float(evaluate(instr.est, step.env))
            add(_kernel(instr), lane, started, ended, {"node": instr.node, "estimate_us": estimate})
    return {"traceEvents": [*tracks.names(), *events], "displayTimeUnit": "ns"}


class _Tracks:
    """Numbers for devices and lanes, and the events that give them their names."""

    def __init__(self) -> None:
        self._devices: dict[str, dict[str, int]] = {}

    def number(self, device: str, lane: str) -> tuple[int, int]:
        """(process, thread), both from 1."""
        lanes = self._devices.setdefault(device, {})
        tid = lanes.setdefault(lane, len(lanes) + 1)
        return list(self._devices).index(device) + 1, tid

    def names(self) -> Iterator[dict[str, Any]]:
        for pid, (device, lanes) in enumerate(self._devices.items(), 1):
            yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": device}}
            for lane, tid in lanes.items():
                yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane}}
