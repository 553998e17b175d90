"""Runs a stream: one thread a lane, ticks between lanes, data (not code) between steps.

A lane is cut into units: consecutive compute instructions of one region become
code that the device loaded; host rows run on the reference device; prefetch,
evict and transfer run here. A stream with a single lane runs in the caller's
thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np

from flashrt.backend import ABORT, I64, Compute, OpenDevice, Rect
from flashrt.errors import DeviceError
from flashrt.ir import micro
from flashrt.ir.types import DTYPES, TensorType, product, size
from flashrt.runtime.arena import Residents, StreamMemory, host_view
from flashrt.runtime.step import Arrays, bounds_of, read_output, write_step
from flashrt.runtime.trace import StepTrace

COMPUTE = "compute"
SPINS = 200  # polls before a waiting Python lane gives up its time slice
NAP = 20e-6  # seconds


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of a lane: instructions first…last (indices into the stream) and what runs them.

    stamps: their trace of the last run.
    """

    indices: tuple[int, ...]
    run: Callable[[int], None]
    stamps: Callable[[], I64]


class Executor:
    """One stream on open devices.

    host: the reference device that runs host rows. poison: fill freed and
    unwritten memory with NaN patterns, to show that nothing stale is read.
    """

    def __init__(
        self,
        stream: micro.Stream,
        residents: Residents,
        host: OpenDevice,
        *,
        poison: bool = False,
    ) -> None:
        self.stream, self.devices, self.host, self.poison = stream, residents.devices, host, poison
        self.memory = StreamMemory(stream, residents)
        self._bounds = bounds_of(stream)
        self._residents = residents
        self._outputs = {o.name: _output(o.value) for o in stream.outputs}
        self._types = {s.id: s.type for s in stream.slots}
        self._blocks = {(b.name, b.device): b for b in stream.blocks}
        self._error: BaseException | None = None
        self.epoch = 0
        self._lanes = [
            _Lane(device, lane, self._units(indices)) for (device, lane), indices in lanes_of(stream).items()
        ]
        self._alone = len(self._lanes) == 1
        if not self._alone:
            for lane in self._lanes:
                lane.start(self._failed)

    # ---- one step
    def step(self, arrays: Arrays, env: Mapping[str, int], *, trace: bool = False) -> Any:
        """Runs one step.

        Args:
            arrays: the graph's inputs, shapes as their types at `env`.
            env: symbols and split variables.

        Returns:
            (outputs by name, StepTrace or None).

        Raises:
            RequestError: an input is outside its bounds; nothing ran.
            DeviceError: a device failed or the step was interrupted; the next step starts clean.
        """
        env = {**{s.name: s.start for s in self.stream.splits}, **env, **self._residents.env}
        write_step(self.memory, self._bounds, arrays, env)
        if self.poison:
            self.drain()
            for place in self.memory.arenas():
                host_view(place)[:] = 0xFF
        self.epoch += 1
        begun = time.perf_counter_ns()
        try:
            self._run(self.epoch)
        except BaseException:
            self._recover()
            raise
        outputs = {name: read_output(self.memory, ref, env) for name, ref in self._outputs.items()}
        if not trace:
            return outputs, None
        self.drain()
        return outputs, self._trace(begun, time.perf_counter_ns(), env)

    def _run(self, epoch: int) -> None:
        if self._alone:
            self._lanes[0].run(epoch)
            return
        for lane in self._lanes:
            lane.post(epoch)
        self._finish([lane for lane in self._lanes if lane.lane == COMPUTE])

    def drain(self) -> None:
        """Waits until every lane is through; between variants and before memory is looked at."""
        if not self._alone:
            self._finish(self._lanes)

    def _finish(self, lanes: Sequence[_Lane]) -> None:
        for lane in lanes:
            lane.wait(self.epoch)
        if self._error is not None:
            raise self._error

    def _failed(self, error: BaseException) -> None:
        """Called in a lane's thread: keeps the first error (the others follow from it), stops the rest."""
        if self._error is None:
            self._error = error
        self.memory.words[ABORT] = 1

    def _recover(self) -> None:
        """After a failure: stop all lanes, forget the ring, pretend the step was finished."""
        self.memory.words[ABORT] = 1
        if not self._alone:
            for lane in self._lanes:
                lane.wait(self.epoch)
        self._error = None
        self.memory.ticks[:] = self.epoch
        self.memory.clear_ring()
        self.memory.words[ABORT] = 0

    def close(self) -> None:
        """Ends the lane threads. Idempotent."""
        if not self._alone:
            for lane in self._lanes:
                lane.stop()

    def _trace(self, begun: int, ended: int, env: Mapping[str, int]) -> StepTrace:
        stamps = np.zeros((len(self.stream.instrs), 3), np.int64)
        for lane in self._lanes:
            for unit in lane.units:
                stamps[list(unit.indices)] = unit.stamps()
        return StepTrace(self.stream.name, self.epoch, begun, ended, dict(env), stamps)

    # ---- units
    def _units(self, indices: Sequence[int]) -> list[Unit]:
        return [self._unit(group) for group in self._groups(indices)]

    def _groups(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Instructions that are loaded together: a region, or a bias with its dispatch, or one alone."""
        group: list[int] = []
        for i in indices:
            instr = self.stream.instrs[i]
            last = self.stream.instrs[group[-1]] if group else None
            joined = last is not None and (
                (instr.region is not None and instr.region == last.region) or isinstance(last, micro.Bias)
            )
            if group and not joined:
                yield group
                group = []
            group.append(i)
        if group:
            yield group

    def _unit(self, indices: list[int]) -> Unit:
        instrs = [self.stream.instrs[i] for i in indices]
        first = instrs[0]
        if isinstance(first, micro.Dispatch | micro.Quantize | micro.Bias):
            compute = [i for i in instrs if isinstance(i, Compute)]
            on_host = any(isinstance(i, micro.Dispatch) and i.kernel.startswith("host.") for i in compute)
            device = self.host if on_host else self.devices[first.device]
            code = device.load(compute, self.memory)
            return Unit(tuple(indices), lambda e: device.run(code, e), lambda: device.stamps(code))
        return self._moving_unit(indices[0], first)

    def _moving_unit(self, index: int, instr: micro.Prefetch | micro.Evict | micro.Transfer) -> Unit:
        stamps = np.zeros((1, 3), np.int64)

        def run(epoch: int) -> None:
            stamps[0, 0] = time.perf_counter_ns()
            for wait in instr.waits:
                self._await(wait, epoch)
            stamps[0, 1] = time.perf_counter_ns()
            self._move(instr)
            if instr.signals is not None:
                self.memory.ticks[instr.signals] = epoch
            stamps[0, 2] = time.perf_counter_ns()

        return Unit((index,), run, lambda: stamps)

    def _await(self, wait: micro.Wait, epoch: int) -> None:
        spins = 0
        while self.memory.ticks[wait.tick] < epoch + wait.step:
            if self.memory.words[ABORT]:
                raise DeviceError("interrupted")
            spins += 1
            if spins > SPINS:
                time.sleep(NAP)

    def _move(self, instr: micro.Prefetch | micro.Evict | micro.Transfer) -> None:
        match instr:
            case micro.Prefetch():
                block = self._blocks[instr.block, instr.device]
                place = self.memory.ring(block)
                weight = self.memory.weights[instr.block]
                self._residents.fill(instr.device, weight, block.lo, block.hi, place)
                self.memory.place(block, place)
            case micro.Evict():
                block = self._blocks[instr.block, instr.device]
                self.memory.place(block, None)
                if self.poison:
                    host_view(self.memory.ring(block))[:] = 0xFF
            case micro.Transfer():
                src, dst = self._rect(instr.src), self._rect(instr.dst)
                if src.row_bytes and src.rows:
                    self.devices[instr.device].copy(src, dst)
            case _:
                assert_never(instr)

    def _rect(self, ref: micro.SlotRef) -> Rect:
        env = _Words(self.memory)
        type: TensorType = self._types[ref.slot]
        item = DTYPES[type.dtype]
        rows, width = size(product(type.shape[:-1]), env), size(type.shape[-1] if type.shape else 1, env)
        lo = 0 if ref.lo is None else size(ref.lo, env)
        hi = width if ref.hi is None else size(ref.hi, env)
        return Rect(self.memory.slot(ref.slot), lo * item, rows, (hi - lo) * item, width * item)


class _Words(Mapping[str, int]):
    """The step's symbols, read from memory when asked for."""

    def __init__(self, memory: StreamMemory) -> None:
        self._memory = memory

    def __getitem__(self, name: str) -> int:
        return int(self._memory.words[self._memory.word_of(name)])

    def __iter__(self) -> Iterator[str]:
        stream = self._memory.stream
        return iter([*(s.name for s in stream.symbols), *(s.name for s in stream.splits)])

    def __len__(self) -> int:
        return len(self._memory.words) - 1


class _Lane:
    """One lane's units and, when there are several lanes, its thread."""

    def __init__(self, device: str, lane: str, units: list[Unit]) -> None:
        self.device, self.lane, self.units = device, lane, units
        self._posted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done = threading.Condition()
        self._reached = 0
        self._thread: threading.Thread | None = None

    def run(self, epoch: int) -> None:
        for unit in self.units:
            unit.run(epoch)

    def start(self, failed: Callable[[BaseException], None]) -> None:
        self._thread = threading.Thread(
            target=self._serve, args=(failed,), name=f"flashrt {self.device} {self.lane}", daemon=True
        )
        self._thread.start()

    def _serve(self, failed: Callable[[BaseException], None]) -> None:
        while (epoch := self._posted.get()) is not None:
            try:
                self.run(epoch)
            except BaseException as error:
                failed(error)
            with self._done:
                self._reached = epoch
                self._done.notify_all()

    def post(self, epoch: int) -> None:
        self._posted.put(epoch)

    def wait(self, epoch: int) -> None:
        """Until the lane is through `epoch`."""
        with self._done:
            self._done.wait_for(lambda: self._reached >= epoch)

    def stop(self) -> None:
        if self._thread is not None:
            self._posted.put(None)
            self._thread.join()
            self._thread = None


def lanes_of(stream: micro.Stream) -> dict[tuple[str, str], list[int]]:
    """Instruction indices by (device, lane), in order."""
    lanes: dict[tuple[str, str], list[int]] = {}
    for index, instr in enumerate(stream.instrs):
        lanes.setdefault((instr.device, instr.lane), []).append(index)
    return lanes


def _output(value: str) -> micro.SlotRef:
    assert value.startswith("%"), value
    return micro.SlotRef(int(value[1:]))
