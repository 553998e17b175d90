"""Runs a stream: one thread a lane, ticks between lanes, data (not code) between steps.

A lane is cut into units: consecutive compute instructions of one region become
code that the device loaded; host rows run on the reference device; prefetch,
evict and transfer run here, but for lanes of loads that a device runs by itself.
The caller's thread runs one of the compute lanes.

Where all of a stream is one piece of code that can be `Ahead`, a step may begin while the one before it runs.
Another is finished before a third begins.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from flashrt.backend import (
    ABORT,
    I64,
    U8,
    Ahead,
    Compute,
    Move,
    Mover,
    OpenDevice,
    Place,
    Rect,
    Remote,
    Starts,
    until_reached,
)
from flashrt.errors import DeviceError, ProgramError
from flashrt.ir import micro
from flashrt.ir.ops import EXACT
from flashrt.ir.order import loaded_at_start
from flashrt.ir.types import DTYPES, product, size, symbols_of
from flashrt.runtime.arena import NUMPY, Residents, StreamMemory, host_view
from flashrt.runtime.idle import Rests
from flashrt.runtime.step import Arrays, StepWriter, read_output
from flashrt.runtime.trace import StepTrace

COMPUTE = "compute"
LOOK = 0.1  # seconds between looks at what runs by itself
NOT_FED: Mapping[str, str] = MappingProxyType({})
NONE_HERE: Mapping[int, U8] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of a lane: instructions first…last (indices into the stream) and what runs them.

    stamps: their trace of the last run. code: what may run by itself.
    """

    indices: tuple[int, ...]
    run: Callable[[int], None]
    stamps: Callable[[], I64]
    code: Starts | None = None


@dataclass(slots=True, eq=False)
class Begun:
    """A step that was begun. wanted: outputs by name, None for all. at: nanoseconds.

    outputs: once it is through. gave_up: the executor stopped before.
    """

    executor: Executor
    epoch: int
    env: Mapping[str, int]
    wanted: Collection[str] | None
    at: int
    outputs: dict[str, NDArray[Any]] | None = None
    record: StepTrace | None = None
    gave_up: bool = False

    @property
    def under_way(self) -> bool:
        """Whether the device may still run it."""
        return self.outputs is None and not self.gave_up

    @property
    def ahead(self) -> bool:
        """Whether the next step can begin while it is under way, fed with its outputs: it is the last one."""
        return self.under_way and self.epoch == self.executor.epoch

    def result(self) -> tuple[dict[str, NDArray[Any]], StepTrace | None]:
        """(outputs by name, its trace if that was asked for). Raises DeviceError when the step failed."""
        if self.under_way:
            self.executor.finish(self.epoch)
        if self.outputs is None:
            raise DeviceError(f"step {self.epoch} was given up")
        return self.outputs, self.record


class Executor:
    """One stream on open devices.

    host: the reference device that runs host rows. poison: fill freed and
    unwritten memory with NaN patterns, to show that nothing stale is read.
    rests: which lanes rest, where it is known already.
    """

    def __init__(
        self,
        stream: micro.Stream,
        residents: Residents,
        host: OpenDevice | None,
        *,
        poison: bool = False,
        rests: Rests | None = None,
    ) -> None:
        self.stream, self.devices, self.host, self.poison = stream, residents.devices, host, poison
        self.memory = StreamMemory(stream, residents)
        self._writer = StepWriter(self.memory)
        self._residents = residents
        self._outputs = {o.name: int(o.value.removeprefix("%")) for o in stream.outputs}
        self._inputs = [(s.input, s.id) for s in stream.slots if s.input]
        self._types = {s.id: s.type for s in stream.slots}
        self._blocks = {(b.name, b.device): b for b in stream.blocks}
        self._codes: list[Any] = []
        self._carried = [self._blocks[key] for key in sorted(loaded_at_start(stream))]
        self._env: Mapping[str, int] = {}
        self._error: BaseException | None = None
        self.failed_on = ""  # the device in whose lane the last failure began; "" when it began in none
        self._ready = False
        self.epoch = 0
        self.took = 0  # nanoseconds of the last step
        self._lanes = [
            _Lane(device, lane, self._units(device, indices), _signals(stream, indices))
            for (device, lane), indices in lanes_of(stream).items()
        ]
        self._rests, self._resting = rests or Rests(stream), frozenset[_Lane]()
        self._alone = len(self._lanes) == 1
        self._whole = self._codes[0] if self._is_whole() else None
        self._flights = deque[Begun]()
        self._ended = 0  # when the last step of those was through
        if not self._alone:
            self._start()

    def _start(self) -> None:
        try:
            for lane in self._lanes:
                lane.start(partial(self._failed, lane.device))
        except BaseException:
            self.close()
            raise

    def _is_whole(self) -> bool:
        """Whether a piece of code is all of the stream, and can be `Ahead`."""
        return (
            self._alone and len(self._lanes[0].units) == 1 and any(isinstance(c, Ahead) for c in self._codes)
        )

    # ---- one step
    def step(
        self,
        arrays: Arrays,
        env: Mapping[str, int],
        *,
        wanted: Collection[str] | None = None,
        trace: bool = False,
    ) -> tuple[dict[str, NDArray[Any]], StepTrace | None]:
        """Runs one step: `begin` and its result."""
        return self.begin(arrays, env, wanted=wanted, trace=trace).result()

    def begin(
        self,
        arrays: Arrays,
        env: Mapping[str, int],
        *,
        wanted: Collection[str] | None = None,
        trace: bool = False,
        fed: Mapping[str, str] = NOT_FED,
    ) -> Begun:
        """Begins one step; unless it can run beside the host, it is through then.

        Args:
            arrays: the graph's inputs, dtypes as theirs, shapes as their types at `env`.
            env: symbols and split variables.
            wanted: names of the outputs to be given; None for all.
            fed: inputs that are outputs of the step before, where `feeds` says that they can be.

        Raises:
            RequestError: an input is outside its bounds; nothing ran.
            DeviceError: a device failed or the step was interrupted, or one before it that is under way; the
                next step starts clean.
        """
        if not self._ready:
            self._make_ready()
        if self.poison:
            self.drain()
            for device, place in self.memory.arenas():
                self._spoil(device, place)
        if self._whole is not None:
            with self._stopped_on_failure():
                self._finish(self.epoch - 1)
                with self._lane_failing():
                    self._whole.until_read()
        self._env = self._writer.write(arrays, {**env, **self._residents.env})
        begun = Begun(self, self.epoch + 1, self._env, wanted, time.perf_counter_ns())
        with self._stopped_on_failure():
            self.epoch += 1
            if self._whole is None:
                self._run(self.epoch)
                begun.outputs = self._read(begun, NONE_HERE)
                self.took = time.perf_counter_ns() - begun.at
            else:
                with self._lane_failing():
                    self._whole.begin(self.epoch, self._slots_fed(fed))
                self._flights.append(begun)
                # what isn't brought to the host lies where the next step may write
                if trace or not self._whole.results(self.epoch).keys() >= set(self._asked(wanted).values()):
                    self._finish(self.epoch)
        if trace:
            self.drain()
            begun.record = self._trace(begun.at, time.perf_counter_ns())
        return begun

    def feeds(self, fed: Mapping[str, str], arrays: Arrays) -> bool:
        """Whether a step can have inputs that are outputs of the last one without the host's knowing them.
        arrays: of the inputs' dtypes and shapes."""
        here = NONE_HERE if self._whole is None or not self._ready else self._whole.results(self.epoch)
        return all(self._fits(arrays[input], self._outputs[output], here) for input, output in fed.items())

    def _fits(self, array: NDArray[Any], slot: int, here: Mapping[int, U8]) -> bool:
        """Whether an output that the last step left somewhere is like an array."""
        type = self._types[slot]
        shape = tuple(size(d, self._env) for d in type.shape) if slot in here else None
        return shape == array.shape and NUMPY[type.dtype] == array.dtype

    def _slots_fed(self, fed: Mapping[str, str]) -> dict[int, int]:
        return {slot: self._outputs[fed[name]] for name, slot in self._inputs if name in fed}

    def finish(self, epoch: int) -> None:
        """Until a step that was begun is through, and those before it. Raises DeviceError."""
        with self._stopped_on_failure():
            self._finish(epoch)

    def _finish(self, epoch: int) -> None:
        while self._flights and self._flights[0].epoch <= epoch:
            begun = self._flights[0]
            assert self._whole is not None
            with self._lane_failing():
                self._whole.finish(begun.epoch)
            begun.outputs = self._read(begun, self._whole.results(begun.epoch))
            self._flights.popleft()
            now = time.perf_counter_ns()
            self.took, self._ended = now - max(begun.at, self._ended), now

    @contextmanager
    def _lane_failing(self) -> Iterator[None]:
        """An error is that of the one lane."""
        try:
            yield
        except Exception as error:
            self._failed(self._lanes[0].device, error)
        self._raise()

    def _asked(self, wanted: Collection[str] | None) -> dict[str, int]:
        """Outputs and their slots."""
        return {name: slot for name, slot in self._outputs.items() if wanted is None or name in wanted}

    def _read(self, begun: Begun, here: Mapping[int, U8]) -> dict[str, NDArray[Any]]:
        return {
            name: read_output(self.memory, slot, self._types[slot], begun.env, here.get(slot))
            for name, slot in self._asked(begun.wanted).items()
        }

    def _run(self, epoch: int) -> None:
        if self._alone:
            self._run_here(self._lanes[0].device, partial(self._lanes[0].run, epoch))
            self._raise()
            return
        self._let_rest(epoch)
        awake = [lane for lane in self._lanes if lane not in self._resting]
        # what is waited for anyway is begun here, and one lane runs here: threads less to be woken
        begun = [lane for lane in awake if self._begins_here(lane, epoch)]
        others = [lane for lane in awake if lane not in begun]
        mine = next((lane for lane in others if lane.lane == COMPUTE), None)
        ends = [(lane.lane, lane.post(epoch)) for lane in others if lane is not mine]
        if mine is not None:
            self._run_here(mine.device, partial(mine.run, epoch))
        for lane in begun:
            self._run_here(lane.device, partial(lane.end, epoch))
        for name, end in ends:
            if name == COMPUTE:
                end.wait()
        self._raise()

    def _run_here(self, device: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._failed(device, error)

    def _begins_here(self, lane: _Lane, epoch: int) -> bool:
        """Whether a lane runs by itself from now on, or has failed."""
        try:
            return lane.lane == COMPUTE and lane.begin(epoch)
        except Exception as error:
            self._failed(lane.device, error)
            return True

    def _let_rest(self, epoch: int) -> None:
        """Finds the lanes that have nothing to do in this step, and reaches their ticks for them."""
        if not self.stream.splits:
            return
        idle = self._rests.at(self._env)
        resting = frozenset(lane for lane in self._lanes if (lane.device, lane.lane) in idle)
        for lane in resting - self._resting:
            if lane.lane != COMPUTE:
                lane.settle()  # it may be in the step before, and would take its ticks back
        self._resting = resting
        for lane in resting:
            self.memory.ticks[lane.ticks] = epoch

    @property
    def env(self) -> Mapping[str, int]:
        """Symbols and split variables of the last step."""
        return self._env

    def spent(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(device, lane) → nanoseconds that it was busy and that it waited in its last step.

        For an onlooker: asks nothing of the lanes, and may see part of the step that runs.
        """
        out = {}
        for lane in self._lanes:
            if lane in self._resting:
                out[lane.device, lane.lane] = (0, 0)
                continue
            stamps = np.concatenate([unit.stamps() for unit in lane.units])
            # a row that is being written may have its stamps out of order
            waited, ran = np.maximum(np.diff(stamps, axis=1), 0).sum(axis=0).tolist()
            out[lane.device, lane.lane] = (ran, waited)
        return out

    def drain(self) -> None:
        """Waits until every lane is through; between variants and before memory is looked at."""
        with self._stopped_on_failure():
            self._finish(self.epoch)
            for lane in self._lanes:
                lane.settle()
            self._raise()

    def leave(self) -> None:
        """Drains, for another variant to run: it has the same arena and ring."""
        self.drain()
        self._ready = self._ready and not self._carried

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _failed(self, device: str, error: BaseException) -> None:
        """Called in a lane's thread: keeps the first error (the others follow from it), stops the rest."""
        if self._error is None:
            self._error, self.failed_on = error, device
        self.memory.words[ABORT] = 1

    @contextmanager
    def _stopped_on_failure(self) -> Iterator[None]:
        """Whatever happens (Ctrl-C too), no lane runs on when an error leaves the executor."""
        try:
            yield
        except BaseException:
            self._ready = False
            self._stop()
            raise

    def _stop(self) -> None:
        """Makes every lane give up the step it is in, and forgets why."""
        self.memory.words[ABORT] = 1
        self._give_up()
        for lane in self._lanes:
            lane.settle()
        self._error = None

    def _give_up(self) -> None:
        """Waits for steps that are under way, and forgets them."""
        for begun in self._flights:
            begun.gave_up = True
        self._flights.clear()
        own = (lane.alone for lane in self._lanes)
        for code in (self._whole, *(code for code in own if code is not self._whole)):
            if code is not None:
                with suppress(DeviceError):  # which the step that failed tells of
                    code.drop()

    def _make_ready(self) -> None:
        """Before the first step and after a failure: every tick is reached, and of the ring only those
        blocks are loaded that a step finds loaded."""
        self._stop()
        self.failed_on = ""
        self.memory.ticks[:] = self.epoch
        self.memory.clear_ring()
        for block in self._carried:
            self._load(block)
        self.memory.words[ABORT] = 0
        self._ready = True

    def close(self) -> None:
        """Ends the lane threads and lets go of loaded code and of the memory it runs in. Idempotent."""
        self._give_up()
        self._residents.forget_code(self._codes)
        self._codes, self._whole = [], None
        for lane in self._lanes:
            lane.stop()
            # they know the executor: nothing would be freed before the next collection
            lane.units, lane.alone = [], None
        self.memory.let_go()

    def _trace(self, begun: int, ended: int) -> StepTrace:
        stamps = np.zeros((len(self.stream.instrs), 3), np.int64)
        for lane in self._lanes:
            for unit in lane.units if lane not in self._resting else ():
                stamps[list(unit.indices)] = unit.stamps()
        return StepTrace(self.stream.name, self.epoch, begun, ended, dict(self._env), stamps)

    # ---- units
    def _units(self, id: str, indices: Sequence[int]) -> list[Unit]:
        device = self.devices[id]
        if isinstance(device, Mover) and not self.poison and (moves := self._moves(indices)) is not None:
            code = device.moves(moves, self.memory)
            if code is not None:
                self._codes.append(code)
                return [Unit(tuple(indices), lambda e: device.run(code, e), lambda: device.stamps(code))]
        return [self._unit(group) for group in self._groups(indices)]

    def _moves(self, indices: Sequence[int]) -> list[Move] | None:
        """A lane that only brings blocks which lie somewhere for good, and gives them back; else None.
        Experts may lie elsewhere in the next step."""
        if any(isinstance(i, micro.Dispatch) and i.kernel.startswith("expert_") for i in self.stream.instrs):
            return None
        moves = []
        for instr in (self.stream.instrs[i] for i in indices):
            if not isinstance(instr, micro.Prefetch | micro.Evict):
                return None
            block = self._blocks[instr.block, instr.device]
            pieces, to = list[Place](), None
            if isinstance(instr, micro.Prefetch):
                weight = self.memory.weights[block.name]
                pieces += self._residents.pieces(block.device, weight, block.lo, block.hi)
                to = self.memory.ring(block.name, block.device)
                if not pieces:
                    return None
            moves.append(Move(instr.waits, instr.signals, tuple(pieces), to))
        return moves

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
        instrs = [_as_row(self.stream.instrs[i]) for i in indices]
        first = instrs[0]
        if isinstance(first, micro.Dispatch | micro.Quantize | micro.Bias):
            compute = [i for i in instrs if isinstance(i, Compute)]
            device = self._runs(compute)
            code = device.load(compute, self.memory)
            self._codes.append(code)
            self._residents.count_code(first.device, code)
            alone = code if isinstance(code, Starts) else None
            return Unit(tuple(indices), lambda e: device.run(code, e), lambda: device.stamps(code), alone)
        work = self._transfer(first) if isinstance(first, micro.Transfer) else partial(self._move, first)
        return self._moving_unit(indices[0], first, work)

    def _runs(self, instrs: Sequence[Compute]) -> OpenDevice:
        """The device that runs instructions loaded together: their own, or the reference for host rows."""
        device = self.devices[instrs[0].device]
        row = next(
            (i.kernel for i in instrs if isinstance(i, micro.Dispatch) and i.kernel[:5] == "host."), None
        )
        if row is None:
            return device
        if isinstance(device, Remote):
            raise ProgramError(
                f"{row} stands on {device.spec.id}: it runs in the host's memory",
                hint="place it on a host device, such as cpu:0, with transfers before and behind it",
            )
        assert self.host is not None, "a program with host rows has a host"
        return self.host

    def _moving_unit(
        self, index: int, instr: micro.Prefetch | micro.Evict | micro.Transfer, work: Callable[[], None]
    ) -> Unit:
        stamps = np.zeros((1, 3), np.int64)

        def run(epoch: int) -> None:
            stamps[0, 0] = time.perf_counter_ns()
            for wait in instr.waits:
                until_reached(self.memory, wait, epoch, "interrupted")
            stamps[0, 1] = time.perf_counter_ns()
            work()
            if instr.signals is not None:
                self.memory.ticks[instr.signals] = epoch
            stamps[0, 2] = time.perf_counter_ns()

        return Unit((index,), run, lambda: stamps)

    def _transfer(self, instr: micro.Transfer) -> Callable[[], None]:
        """What copies a slot: where from and to is worked out when a size that it depends on has changed."""
        copier = self._copier(instr)
        names = sorted(self._symbols(instr.src) | self._symbols(instr.dst))
        known: list[tuple[list[int], Rect, Rect]] = []

        def run() -> None:
            at = [self._env[name] for name in names]
            if not known or known[0][0] != at:
                known[:] = [(at, self._rect(instr.src), self._rect(instr.dst))]
            _, src, dst = known[0]
            if src.row_bytes and src.rows:
                copier.copy(src, dst)

        return run

    def _symbols(self, ref: micro.SlotRef) -> set[str]:
        dims = [*self._types[ref.slot].shape, *(d for d in (ref.lo, ref.hi) if d is not None)]
        return {name for dim in dims for name in symbols_of(dim)}

    def _move(self, instr: micro.Prefetch | micro.Evict) -> None:
        match instr:
            case micro.Prefetch():
                self._load(self._blocks[instr.block, instr.device])
            case micro.Evict():
                block = self._blocks[instr.block, instr.device]
                self.memory.place(block, None)
                if self.poison:
                    self._spoil(block.device, self.memory.ring(block.name, block.device))
            case _:
                assert_never(instr)

    def _spoil(self, device: str, place: Place) -> None:
        """Fills memory with NaN patterns."""
        if isinstance(place.buffer, np.ndarray):
            host_view(place)[:] = 0xFF
        else:
            self.devices[device].write(np.full(place.bytes, 0xFF, np.uint8), place)

    def _copier(self, instr: micro.Transfer) -> OpenDevice:
        """The end of a copy that can reach the other one's memory."""
        source, target = self.devices[instr.source or instr.device], self.devices[instr.to]
        return target if isinstance(target, Remote) else source

    def _load(self, block: micro.Block) -> None:
        place, weight = self.memory.ring(block.name, block.device), self.memory.weights[block.name]
        self._residents.fill(block.device, weight, block.lo, block.hi, place)
        self.memory.place(block, place)

    def _rect(self, ref: micro.SlotRef) -> Rect:
        type, env = self._types[ref.slot], self._env
        item = DTYPES[type.dtype]
        rows, width = size(product(type.shape[:-1]), env), size(type.shape[-1] if type.shape else 1, env)
        lo = 0 if ref.lo is None else size(ref.lo, env)
        hi = width if ref.hi is None else size(ref.hi, env)
        return Rect(self.memory.slot(ref.slot), lo * item, rows, (hi - lo) * item, width * item)


class _Lane:
    """One lane's units and, when there are several lanes, its thread. ticks: those that it signals; alone:
    its code, where that may run by itself."""

    def __init__(self, device: str, lane: str, units: list[Unit], ticks: I64) -> None:
        self.device, self.lane, self.units, self.ticks = device, lane, units, ticks
        self.alone = units[0].code if len(units) == 1 else None
        self._began = self._seen = 0  # steps: the last one that runs by itself, and the last one looked after
        self._watched = self._under_way = False
        self._posted: queue.SimpleQueue[tuple[int, threading.Event] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, epoch: int) -> None:
        for unit in self.units:
            unit.run(epoch)

    def begin(self, epoch: int) -> bool:
        """Has a step run by itself, where it can; `end` waits for it. The lane's thread looks after it."""
        if self.alone is None or not self.alone.start(epoch):
            return False
        self._began, self._under_way = epoch, True
        if not self._watched:
            self._watched = True
            self.post(0)
        return True

    def end(self, epoch: int) -> None:
        assert self.alone is not None
        self.alone.end(epoch)
        self._under_way = False

    def start(self, failed: Callable[[BaseException], None]) -> None:
        thread = threading.Thread(
            target=self._serve, args=(failed,), name=f"flashrt {self.device} {self.lane}", daemon=True
        )
        thread.start()
        self._thread = thread

    def _serve(self, failed: Callable[[BaseException], None]) -> None:
        while True:
            try:
                posted = self._posted.get(timeout=LOOK if self._watched else None)
            except queue.Empty:
                self._look(failed)
                continue
            if posted is None:
                return
            epoch, end = posted
            try:
                if epoch:
                    self.run(epoch)
            except BaseException as error:
                failed(error)
            end.set()

    def _look(self, failed: Callable[[BaseException], None]) -> None:
        """Whether what runs by itself has failed, which those that wait for its ticks can't see. It is the
        last look when nothing is under way and no step has begun since the one before."""
        began, self._watched = self._began, False
        if self._under_way or self._seen != began or self._began != began:  # asked after it was set to False
            self._seen, self._watched = began, True
        try:
            if self.alone is not None:
                self.alone.look()
        except Exception as error:
            self._watched = self._under_way = False
            failed(error)

    def post(self, epoch: int) -> threading.Event:
        """Lets the thread run a step (0: none) after those posted before; the event is set at its end."""
        end = threading.Event()
        self._posted.put((epoch, end))
        return end

    def settle(self) -> None:
        """Until the lane is through everything posted."""
        if self._thread is not None:
            self.post(0).wait()

    def stop(self) -> None:
        if self._thread is not None:
            self._posted.put(None)
            self._thread.join()
            self._thread = None


def _as_row(instr: micro.Instr) -> micro.Instr:
    """A transfer that is part of a region as what the device's kernels make of it: times one, the same bits.

    transfer src=%3[0:s] dst=%4[0:s] → dispatch kernel=scale args=[%3[0:s]] dst=%4[0:s] attrs={by=1}
    """
    if not isinstance(instr, micro.Transfer) or instr.region is None:
        return instr
    return micro.Dispatch(
        device=instr.device, lane=instr.lane, waits=instr.waits, signals=instr.signals, kernel="scale",
        args=(instr.src,), dst=instr.dst, attrs=(("by", 1.0),), numerics=EXACT, est=instr.est,
        bytes=2 * instr.bytes, node=instr.node, region=instr.region,
    )  # fmt: skip


def _signals(stream: micro.Stream, indices: Sequence[int]) -> I64:
    """The ticks that instructions signal."""
    found = [stream.instrs[i].signals for i in indices]
    return np.array([tick for tick in found if tick is not None], np.int64)


def lanes_of(stream: micro.Stream) -> dict[tuple[str, str], list[int]]:
    """Instruction indices by (device, lane), in order."""
    lanes: dict[tuple[str, str], list[int]] = {}
    for index, instr in enumerate(stream.instrs):
        lanes.setdefault((instr.device, instr.lane), []).append(index)
    return lanes
