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


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Times in microseconds; share is of the device's bandwidth or matrix rate,
    whichever it comes closer to; estimate is what the plan predicted in total."""

    name: str
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
    """One lane's account over all steps, in microseconds: busy + waiting + rest = wall."""

    name: str
    busy: float
    waiting: float
    rest: float


@dataclass(frozen=True, slots=True)
class Account:
    """wall: first step's begin to last step's end. steps: time inside steps. between: host time between
    steps (scheduling, sampling parameters, detokenising). All in microseconds."""

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


def rows(
    steps: Sequence[StepTrace], streams: Mapping[str, micro.Stream], machine: Machine, by: By
) -> list[Row]:
    """The table, most expensive first."""
    groups: dict[str, list[_Sample]] = {}
    for sample in _samples(steps, streams, machine):
        groups.setdefault(_KEYS[by](sample.instr), []).append(sample)
    return sorted((_row(name, group) for name, group in groups.items()), key=lambda r: -r.total)


@dataclass(frozen=True, slots=True)
class _Sample:
    instr: micro.Instr
    time: float
    waiting: float
    bytes: float
    share: float
    estimate: float


def _samples(
    steps: Sequence[StepTrace], streams: Mapping[str, micro.Stream], machine: Machine
) -> Iterator[_Sample]:
    for step in steps:
        for instr, (arrived, started, ended) in zip(
            streams[step.variant].instrs, step.stamps.tolist(), strict=True
        ):
            if not ended:
                continue
            time = (ended - started) / 1e3
            moved = float(evaluate(getattr(instr, "bytes", 0), step.env))
            flops = float(evaluate(getattr(instr, "flops", 0), step.env))
            device = machine.device(instr.device)
            yield _Sample(
                instr,
                time,
                (started - arrived) / 1e3,
                moved,
                _share(device, moved, flops, time),
                float(evaluate(instr.est, step.env)),
            )


def _share(device: Device, moved: float, flops: float, time: float) -> float:
    if time <= 0:
        return 0.0
    rate = device.rates.get("f32")
    matrix = flops / rate.value if rate else 0.0
    return max(moved / device.read.value, matrix) / (time / 1e6)


def _row(name: str, group: Sequence[_Sample]) -> Row:
    times = np.array([s.time for s in group])
    total, moved = float(times.sum()), sum(s.bytes for s in group)
    return Row(
        name=name,
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


def account(steps: Sequence[StepTrace], streams: Mapping[str, micro.Stream]) -> Account:
    """Where the wall time went. `steps` are consecutive."""
    inside = sum(s.ended - s.begun for s in steps) / 1e3
    wall = (steps[-1].ended - steps[0].begun) / 1e3 if steps else 0.0
    busy: dict[str, float] = {}
    waiting: dict[str, float] = {}
    for step in steps:
        for instr, (arrived, started, ended) in zip(
            streams[step.variant].instrs, step.stamps.tolist(), strict=True
        ):
            lane = f"{instr.device} {instr.lane}"
            busy[lane] = busy.get(lane, 0.0) + (ended - started) / 1e3
            waiting[lane] = waiting.get(lane, 0.0) + (started - arrived) / 1e3
    lanes = tuple(Lane(n, busy[n], waiting[n], inside - busy[n] - waiting[n]) for n in busy)
    return Account(len(steps), wall, inside, wall - inside, lanes)


def perfetto(steps: Sequence[StepTrace], streams: Mapping[str, micro.Stream]) -> dict[str, Any]:
    """The trace in the Trace Event Format that Perfetto and chrome://tracing open.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (complete events, µs)
    """
    events: list[dict[str, Any]] = []
    start = steps[0].begun if steps else 0
    for step in steps:
        events.append(_event("step", "runtime", "steps", step.begun, step.ended, start, dict(step.env)))
        for instr, (arrived, started, ended) in zip(
            streams[step.variant].instrs, step.stamps.tolist(), strict=True
        ):
            if started - arrived > 1000:
                events.append(_event("wait", instr.device, instr.lane, arrived, started, start, {}))
            if ended:
                facts = {"node": instr.node, "estimate_us": float(evaluate(instr.est, step.env))}
                events.append(_event(_kernel(instr), instr.device, instr.lane, started, ended, start, facts))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _event(
    name: str, device: str, lane: str, begun: int, ended: int, zero: int, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name, "ph": "X", "pid": device, "tid": lane, "args": facts,
        "ts": (begun - zero) / 1e3, "dur": (ended - begun) / 1e3,
    }  # fmt: skip
