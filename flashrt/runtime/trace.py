"""Trace records: when each instruction arrived, started and ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from flashrt.backend import I64


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step. stamps: i64 [instructions, 3], nanoseconds of time.perf_counter_ns: arrived at the
    instruction, started it (its waits were over), ended it; zeros where an instruction didn't run."""

    variant: str
    epoch: int
    begun: int
    ended: int
    env: Mapping[str, int]
    stamps: I64


@dataclass(slots=True)
class Trace:
    """The steps recorded since it was switched on."""

    steps: list[StepTrace] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """One JSON object a step."""
        for s in self.steps:
            yield json.dumps(
                {
                    "variant": s.variant, "epoch": s.epoch, "begun": s.begun, "ended": s.ended,
                    "env": dict(s.env), "stamps": s.stamps.tolist(),
                }
            )  # fmt: skip


def read_trace(lines: Iterator[str]) -> Trace:
    """Reads what `Trace.lines` gives."""
    trace = Trace()
    for line in lines:
        raw = json.loads(line)
        stamps = np.array(raw.pop("stamps"), np.int64).reshape(-1, 3)
        trace.steps.append(StepTrace(stamps=stamps, **raw))
    return trace
