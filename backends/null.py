"""The null backend: computes nothing, and keeps a pretend clock.

The clock adds up each instruction's own estimate at the step's symbols, lane by
lane, honouring waits. All null devices of one backend share it, so a plan for
any machine can be timed here; `simulate` does the same without any device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from flashrt.backend import I64, U8, Compute, Memory, Place, Rect
from flashrt.backends.reference.access import Access
from flashrt.backends.reference.device import aligned, signal, wait
from flashrt.backends.reference.kernels import kernels, read_kernel
from flashrt.ir import micro
from flashrt.ir.clock import Clock, Span, Timeline, lane_of, simulate, typical
from flashrt.ir.types import Env
from flashrt.machine import Device

__all__ = ["Clock", "NullBackend", "NullDevice", "Span", "Timeline", "lane_of", "simulate", "typical"]


# ---- the backend --------------------------------------------------------------
class _Shared:
    """The clock of one stream's memory, asked by every lane (thread) that runs a part of it."""

    def __init__(self, stream: micro.Stream) -> None:
        self._lock, self._clock = threading.Lock(), Clock(stream)
        self._spans: dict[int, list[Span]] = {}

    def spans(self, epoch: int, env: Env) -> list[Span]:
        """The spans of step `epoch`; the first lane to ask makes the clock run it."""
        with self._lock:
            while self._clock.steps < epoch:
                spans = self._clock.step(env)
                self._spans[self._clock.steps] = spans
                self._spans.pop(self._clock.steps - 2, None)
            return self._spans[epoch]


@dataclass(frozen=True, slots=True)
class Code:
    """Loaded instructions and their indices in the stream."""

    instrs: tuple[Compute, ...]
    indices: tuple[int, ...]
    access: Access
    shared: _Shared
    stamps: I64


class NullDevice:
    """A device that computes and copies nothing. Its memory stays as it was reserved: zeros."""

    def __init__(self, spec: Device, clocks: WeakKeyDictionary[Memory, _Shared]) -> None:
        self.spec, self._clocks = spec, clocks

    def reserve(self, nbytes: int) -> U8:
        """Zeros that take no real memory until something is written to them."""
        return aligned(nbytes)

    def load(self, instrs: Sequence[Compute], memory: Memory) -> Code:
        """Finds the instructions in the memory's stream. PlanError for an unknown kernel."""
        for instr in instrs:
            if isinstance(instr, micro.Dispatch):
                read_kernel(instr.kernel)
        whole = memory.stream.instrs
        places = {id(i): index for index, i in enumerate(whole)}
        # a transfer of a region comes as a dispatch between the same slots
        copies: dict[object, int] = {
            (i.src, i.dst): index for index, i in enumerate(whole) if isinstance(i, micro.Transfer)
        }
        copied = {id(i): (i.args[0], i.dst) for i in instrs if isinstance(i, micro.Dispatch) and i.args}
        shared = self._clocks.setdefault(memory, _Shared(memory.stream))
        indices = tuple(places[id(i)] if id(i) in places else copies[copied[id(i)]] for i in instrs)
        return Code(tuple(instrs), indices, Access(memory), shared, np.zeros((len(instrs), 3), np.int64))

    def run(self, code: Code, epoch: int) -> None:
        """Waits and signals in real time; the stamps are those of the pretend clock."""
        spans = code.shared.spans(epoch, code.access.env())
        for instr, index, stamp in zip(code.instrs, code.indices, code.stamps, strict=True):
            wait(instr, code.access.memory, epoch)
            span = spans[index]
            stamp[:] = [round(1000 * t) for t in (span.arrived, span.start, span.end)]
            signal(instr, code.access.memory, epoch)

    def stamps(self, code: Code) -> I64:
        """[instructions, 3]: arrived, started, ended, in nanoseconds of the pretend clock (0 at first)."""
        return code.stamps

    def copy(self, src: Rect, dst: Rect) -> None:
        """Copies nothing."""

    def write(self, data: U8, dst: Place) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """Nothing to end."""


class NullBackend:
    """Kind "null": claims every kernel of the reference."""

    kind = "null"

    def __init__(self) -> None:
        self._clocks: WeakKeyDictionary[Memory, _Shared] = WeakKeyDictionary()

    def kernels(self) -> tuple[tuple[str, str], ...]:
        """Those of the reference."""
        return kernels()

    def open(self, spec: Device) -> NullDevice:
        """Opens a device on this backend's clocks."""
        return NullDevice(spec, self._clocks)
