"""A piece at fixed shapes, opened on a provider: in float, or quantised with ranges that widen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import onnxruntime as ort

from flashrt.backends.npu.graph import Model, Ranges
from flashrt.backends.npu.providers import Provider
from flashrt.backends.npu.ranges import Calibration
from flashrt.backends.npu.sessions import open_session
from flashrt.backends.reference.arrays import F32

Values = Mapping[str, F32]


class Build(Protocol):
    """Makes the graph of a piece at its shapes; arguments as of `graph.build`."""

    def __call__(self, *, ranges: Ranges | None = None, every: bool = False) -> Model: ...


class FloatLaunch:
    """A float graph; whether it is computed in half floats is the provider's affair."""

    def __init__(self, model: Model, provider: Provider, threads: int) -> None:
        self.model = model
        self._session = open_session(model.data, provider, threads)

    def run(self, given: Values) -> Values:
        """Results by the names of the model's outputs."""
        return _run(self._session, given)


class QuantisedLaunch:
    """A graph in 16-bit activations and 8-bit weights. model: in float, whose names it shares."""

    def __init__(self, build: Build, calibration: Calibration, provider: Provider, threads: int) -> None:
        self.model = build()
        self._build, self._calibration = build, calibration
        self._provider, self._threads = provider, threads
        self._opened_with: Ranges = {}
        self._session: ort.InferenceSession | None = None

    def run(self, given: Values) -> Values:
        """Results by the names of the model's outputs, and the peaks of what lies between; computed again
        when a range was too small."""
        if not self._calibration.fits(given):
            self._widen(given)
        results = self._compute(given)
        if self._calibration.fits(results):
            return results
        self._widen(given)
        return self._compute(given)

    def _widen(self, given: Values) -> None:
        self._calibration.widen(self._build(every=True), given, self._threads)

    def _compute(self, given: Values) -> Values:
        if self._session is None or self._opened_with != self._calibration.ranges:
            self._opened_with = dict(self._calibration.ranges)
            model = self._build(ranges=self._opened_with)
            self._session = open_session(model.data, self._provider, self._threads)
        return {name.partition(".")[0]: value for name, value in _run(self._session, given).items()}


def _run(session: ort.InferenceSession, given: Values) -> Values:
    results = session.run(None, dict(given))
    return dict(zip((o.name for o in session.get_outputs()), results, strict=True))
