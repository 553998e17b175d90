"""Activation ranges of the quantised form: calibrated on what really comes in, kept on disk, only widened.

A piece that was never run is first evaluated in float on the inputs of that step; each value's range is
MARGIN times the largest magnitude seen. The graph gives the peak of every value it computes: one that
reaches the end of its range later on widens it, and the step is computed again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from flashrt.backends.npu.graph import Model
from flashrt.backends.npu.providers import PROVIDERS
from flashrt.backends.npu.sessions import compiled_path, open_session, write_whole
from flashrt.backends.reference.arrays import F32

MARGIN = 2.0  # a range leaves room for twice what was seen: it costs one of 16 bits
FULL = 0.999  # a value this near to the end of its range may have been cut


class Calibration:
    """The ranges of one piece."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.ranges: dict[str, float] = _stored(path)

    @staticmethod
    def of(model: Model) -> Calibration:
        """What is known of a piece, given as its float graph."""
        return Calibration(compiled_path(model.data, PROVIDERS["cpu"]).with_suffix(".ranges.json"))

    def fits(self, values: Mapping[str, F32]) -> bool:
        """Whether each of the values (inputs and results by name) is known to lie within its range."""
        return all(
            name in self.ranges and float(np.abs(x).max(initial=0)) < FULL * self.ranges[name]
            for name, x in values.items()
        )

    def widen(self, model: Model, inputs: Mapping[str, F32], threads: int) -> None:
        """Evaluates a float graph that gives every value, and widens the ranges to what it gives."""
        session = open_session(model.data, PROVIDERS["cpu"], threads)
        names = [o.name for o in session.get_outputs()]
        seen = {**inputs, **dict(zip(names, session.run(names, dict(inputs)), strict=True))}
        for name, value in seen.items():
            largest = MARGIN * max(float(np.abs(value).max(initial=0)), 1e-6)
            self.ranges[name] = max(self.ranges.get(name, 0.0), largest)
        with suppress(OSError):  # a cache that can't be written costs time only
            write_whole(self._path, json.dumps(self.ranges).encode())


def _stored(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_bytes())
        return {str(name): float(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
