"""Loaded instructions: pieces between waits, and for each bucket of the symbols what a piece launches.

A bucket's launches are made, and enqueued one by one, when it first runs; at the second time they are
recorded as a graph, which is one launch from then on. What changes between steps within a bucket is data:
inputs and sizes are pulled from pinned memory by the first kernel of each run. Positions of splits aren't:
they are part of a bucket's key, and the buckets of a piece that ran longest ago are dropped.

Where kernels may wait for the host (`Driver.polls`), all instructions are one piece: kernels look at ticks
from outside and set those that others wait for, and a step is one launch. Elsewhere pieces are cut at such
ticks: they follow each other on the device, and the host looks at them only there.

A library is never called while a kernel may wait for the host, as what it loads or allocates may have to wait
until no kernel runs: between recorded stretches the host looks until all is there that those in front wait
for, which is some kernels before they are through. When a bucket runs for the first time, it looks before
each launch.

Code that is a whole stream may be given a step while the one before it runs (`flashrt.backend.Ahead`): `pull`
says when the host may write again, and `push` brings small outputs to where the host and the next step find
them.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt.backend import ABORT, I64, U8, Compute, Memory, Pause, Place, until_reached
from flashrt.backends.cuda import args
from flashrt.backends.cuda.args import Launch, Live, Step, Work, launch
from flashrt.backends.cuda.driver import Driver, Mark
from flashrt.backends.cuda.encode import alone, encode
from flashrt.backends.cuda.fuse import Fuser, Joint, rows_of
from flashrt.backends.cuda.kernels import KIND
from flashrt.backends.cuda.linear import few, joined, takes
from flashrt.backends.cuda.operands import Operands, Scratch, Sizes, Twin, address_of
from flashrt.backends.cuda.sample import greedy_only
from flashrt.backends.cuda.ticks import AT_ONCE, Ticks, carries
from flashrt.backends.cuda.tiles import in_tiles
from flashrt.errors import DeviceError
from flashrt.ir import micro
from flashrt.ir.order import root_of
from flashrt.ir.types import DTYPES, Dim, Env, size, symbols_of

MOST_SIZES = 512
PULLED = 1 << 10  # bytes that a block of `pull` brings at a time
PULLING = 64  # blocks of it, at most
PUSHED = 4 << 10  # bytes of an output that a kernel brings to the host, at most
KEPT = 64  # buckets of a piece
NOTHING: Mapping[int, int] = MappingProxyType({})
Key = tuple[int, ...]
Replay = Callable[[int], object]  # takes the step's number


@dataclass(slots=True)
class Bucket:
    """The launches of a piece for one bucket, and how they are enqueued: one by one, then recorded.

    table: what its first kernel reads, [sizes and inputs, 3]: from, to, bytes. fed: inputs that come from
    results there. replay: recorded stretches, and what is done live between them. recorded: whether all is.
    """

    steps: list[Work]
    keep: list[Any]
    table: I64
    fed: Mapping[int, int] | None = field(default_factory=dict)
    replay: list[Replay] = field(default_factory=list)
    recorded: bool = False
    runs: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Instructions without a wait for others but at their begin, or a tick for others but at their end.

    ticks: what kernels make of those; None where the host does.
    """

    instrs: tuple[Compute, ...]
    indices: tuple[int, ...]
    ticks: Ticks | None


@dataclass(frozen=True, slots=True)
class Told:
    """What kernels tell of the parts of a piece.

    times: [parts, 3], pinned: came, went on, ended, by the device's clock. waits, signals: whether a part
    tells the first two, and the last one. first: its first instruction; part_of: that of each instruction.
    """

    times: I64
    waits: NDArray[np.bool_]
    signals: NDArray[np.bool_]
    first: I64
    part_of: I64

    @staticmethod
    def of(cuts: Sequence[Sequence[int]], driver: Driver) -> Told:
        """For parts of these instructions; what each tells is still missing."""
        times = driver.pinned(24 * len(cuts)).view(np.int64).reshape(-1, 3)
        part_of = np.repeat(np.arange(len(cuts)), [len(cut) for cut in cuts])
        none = np.zeros((2, len(cuts)), bool)
        return Told(times, none[0], none[1], np.array([cut[0] for cut in cuts], np.int64), part_of)


@dataclass(slots=True)
class Piece:
    """Instructions that run without the host's looking at ticks.

    parts: the stretches between ticks that kernels look at. waits: of the first instruction, for ticks from
    outside that the host looks at; signals: ticks, those that somebody outside waits for at the end, which
    the device sets behind it, or the host. symbols: and splits that its sizes depend on. inputs: slots.
    samples: whether it draws tokens. end: stands behind the last run. told: where kernels look at ticks, what
    they tell. buckets: by key, the one that ran last at the end.
    """

    parts: tuple[Part, ...]
    waits: tuple[micro.Wait, ...]
    signals: tuple[int, ...]
    symbols: tuple[str, ...]
    inputs: tuple[int, ...]
    samples: bool
    end: Mark
    told: Told | None = None
    buckets: OrderedDict[Key, Bucket] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class Result:
    """An output that a kernel brings to the host. slot, bytes: of it.

    places: [2, bytes], pinned, for steps of even and of odd numbers. kept: the last one, on the device, with
    room for any bucket of the input that it may become.
    """

    slot: int
    bytes: Dim
    places: U8
    kept: Any


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was enqueued. end: behind it. arrived, started: nanoseconds."""

    epoch: int
    end: Mark
    arrived: int
    started: int


class Code:
    """What `load` makes."""

    def __init__(
        self, instrs: Sequence[Compute], memory: Memory, device: str, driver: Driver, scratch: Scratch
    ) -> None:
        self._memory, self._device, self._driver = memory, device, driver
        self._stamps: I64 = np.zeros((len(instrs), 3), np.int64)
        self._since = self._over = 0  # when the last step was enqueued, and when it was through
        stream = memory.stream
        self._slots = {s.id: s for s in stream.slots}
        self._blocks = {(b.name, b.device): b for b in stream.blocks}
        self._scratch = scratch
        self._twins = {id: self._twin(id) for id in self._inputs(instrs)}
        here = driver.pinned(8 * MOST_SIZES)
        self._sizes_there = driver.alloc(8 * MOST_SIZES)
        self._sizes_here = here
        self._sizes = Sizes(here.view(np.int64), int(self._sizes_there.data_ptr()))
        self._sampled = self._sampling(instrs)
        self._most = {s.name: s.hi for s in stream.symbols}
        self._symbols = [*self._most, *(s.name for s in stream.splits)]
        self._words_of = np.array([memory.word_of(name) for name in self._symbols], np.int64)
        rows_of(instrs)  # finds what is wrong with biases now
        # what else computes wants the cores that a thread would spend on looking at the device
        self._alone = all(i.device == device for i in stream.instrs if isinstance(i, Compute))
        self._begun = driver.pinned(8).view(np.int64)  # when a step's first kernel ran, by the device's clock
        self._pulled = driver.pinned(8).view(np.int64)  # the last step whose inputs were read
        self._whole = len(instrs) == len(stream.instrs)
        self._results = {r.slot: r for r in self._small_outputs(instrs)} if self._whole else {}
        self._flights = deque[Flight]()
        self._ends = (driver.mark(), driver.mark())
        self._pieces = tuple(self._cut(instrs))

    @property
    def held(self) -> int:
        """Bytes of device memory that it has for itself now: inputs, sizes and scratch that only its
        buckets still know. For any thread."""
        buckets = [b for piece in self._pieces for b in list(piece.buckets.values())]
        own = [self._sizes_there, *(twin.there.buffer for twin in self._twins.values())]
        own += [result.kept for result in self._results.values()]
        own += [m for b in buckets for m in b.keep if not self._scratch.has(m)]
        return sum({id(m): len(m) for m in own if not isinstance(m, np.ndarray)}.values())

    # ---- one step
    def run(self, epoch: int) -> None:
        """Waits, computes, signals.

        Raises DeviceError when the step is interrupted, or memory is lacking; then nothing is under way.
        """
        if self._whole:
            self.begin(epoch)
            self.finish(epoch)
            return
        env, running = self._env(), deque[Piece]()
        self._sizes.write(env, epoch)
        with self._driver.at_work(), self._stopped_on_failure():
            for piece in self._pieces:
                arrived = time.perf_counter_ns()
                self._await(piece, epoch, running)
                started = time.perf_counter_ns()
                self._enqueue(piece, env, epoch)
                for tick in piece.signals if self._driver.signals else ():
                    # the host, which may sleep, only sets them again
                    self._driver.signal(int(self._memory.ticks[tick:].ctypes.data), epoch)
                piece.end.set()
                running.append(piece)
                self._since = started
                if piece.told is None:
                    self._stamps[piece.parts[0].indices[0]] = arrived, started, started
            while running:
                if self._alone and len(running) == 1:
                    self._driver.wait()
                running[0].end.wait()
                self._ended(running.popleft(), epoch)

    # ---- flashrt.backend.Starts
    def start(self, epoch: int) -> bool:
        env, piece = self._env(), self._pieces[0]
        if piece.told is None or not self._driver.apart:
            return False
        found = piece.buckets.get(key := self._key(piece, env))
        if found is None or not found.recorded:
            return False
        piece.buckets.move_to_end(key)
        self._sizes.write(env, epoch)
        with self._stopped_on_failure():
            try:
                self._since = time.perf_counter_ns()
                for work in found.replay:  # which needs no `at_work`
                    work(epoch)
                piece.end.set()
            except BaseException:
                self._memory.words[ABORT] = 1  # those that kernels wait for haven't begun
                raise
        return True

    def look(self) -> None:
        self._pieces[0].end.through()

    def end(self, epoch: int) -> None:
        (piece,) = self._pieces
        with self._stopped_on_failure():
            if self._alone:
                self._driver.wait()
            piece.end.wait()
            self._ended(piece, epoch)

    @contextmanager
    def _stopped_on_failure(self) -> Iterator[None]:
        """What fails leaves nothing under way; lack of memory and a library's errors become DeviceErrors."""
        try:
            yield
        except BaseException as error:
            self.drop()
            if self._driver.lacks(error):
                self._forget()  # for the next one to find room
                raise DeviceError(f"{self._device} has no room for a step: {error}") from None
            if isinstance(error, RuntimeError):  # a library's
                raise DeviceError(f"{self._device}: {error}") from None
            raise

    # ---- flashrt.backend.Ahead
    def begin(self, epoch: int, fed: Mapping[int, int] = NOTHING) -> None:
        assert self._whole and len(self._flights) < len(self._ends)
        env, (piece,) = self._env(), self._pieces
        self._sizes.write(env, epoch)
        with self._driver.at_work(), self._stopped_on_failure():
            arrived = time.perf_counter_ns()
            self._await(piece, epoch, deque())
            started = time.perf_counter_ns()
            self._enqueue(piece, env, epoch, fed)
            end = self._ends[epoch % len(self._ends)]
            end.set()
            self._flights.append(Flight(epoch, end, arrived, started))

    def until_read(self) -> None:
        pause = Pause()
        with self._stopped_on_failure():
            while self._flights and self._pulled[0] < self._flights[-1].epoch:
                if self._flights[-1].end.through():  # which raises where the device failed
                    return
                pause()

    def finish(self, epoch: int) -> None:
        with self._stopped_on_failure():
            while self._flights and self._flights[0].epoch <= epoch:
                flight = self._flights[0]
                if len(self._flights) == 1:
                    self._driver.wait()
                flight.end.wait()
                self._flights.popleft()
                if self._memory.words[ABORT]:
                    raise DeviceError(f"{self._device}: interrupted in step {flight.epoch}")
                now, before = time.perf_counter_ns(), int(self._stamps[-1, 2])
                self._stamps[0] = flight.arrived, max(flight.started, before), now
                self._stamps[1:] = now

    def results(self, epoch: int) -> dict[int, U8]:
        return {slot: result.places[epoch % 2] for slot, result in self._results.items()}

    def drop(self) -> None:
        self._flights.clear()
        self._driver.wait()

    def _ended(self, piece: Piece, epoch: int) -> None:
        """A piece is through: its time, from the end of the one before at the earliest, and its ticks."""
        now = time.perf_counter_ns()
        if piece.told is not None:
            self._over = now
            if self._memory.words[ABORT]:  # kernels gave up waiting
                raise DeviceError(f"{self._device}: interrupted")
        else:
            first, *others = piece.parts[0].indices
            if first:
                self._stamps[first, 1] = max(self._stamps[first, 1], self._stamps[first - 1, 2])
            self._stamps[first, 2] = now
            self._stamps[others] = now
        for tick in piece.signals:
            self._memory.ticks[tick] = epoch

    @property
    def stamps(self) -> I64:
        """[instructions, 3] ns: arrived, started, ended. For any thread."""
        told = self._pieces[0].told
        return self._stamps if told is None or self._whole else self._told(told)

    def _told(self, told: Told) -> I64:
        """The times of parts as their kernels told them."""
        # the first kernel begins when it is launched, or some microseconds later
        begun = int(self._begun[0])
        apart = self._since - begun
        came, went_on, ended = told.times.T
        # a part that signals nothing ends when the next one, which waits then, comes, or is the last one
        ended = np.where(told.signals, ended, np.append(came[1:], self._over - apart))
        before = np.append(begun, ended[:-1])
        stamps = np.repeat(ended[told.part_of, None] + apart, 3, axis=1)
        stamps[told.first, 0] = np.where(told.waits, came, before) + apart
        stamps[told.first, 1] = np.where(told.waits, went_on, before) + apart
        return stamps

    def _env(self) -> dict[str, int]:
        return dict(zip(self._symbols, self._memory.words[self._words_of].tolist(), strict=True))

    def _await(self, piece: Piece, epoch: int, running: deque[Piece]) -> None:
        """Until what a piece needs from outside is there; those under way signal meanwhile."""
        memory, pause = self._memory, Pause()
        for awaited in piece.waits:
            while memory.ticks[awaited.tick] < epoch + awaited.step and not memory.words[ABORT]:
                if running and running[0].end.through():
                    self._ended(running.popleft(), epoch)
                else:
                    pause()
        if memory.words[ABORT]:
            raise DeviceError(f"{self._device}: interrupted in step {epoch}")

    def _enqueue(self, piece: Piece, env: Env, epoch: int, fed: Mapping[int, int] = NOTHING) -> None:
        key = self._key(piece, env)
        found = piece.buckets.get(key)
        if found is None:
            sizes = dict(zip(piece.symbols, key, strict=False))
            found = piece.buckets[key] = self._made(piece, sizes, bool(key[-1]))
            self._sizes.write(env, epoch)  # pieces under way may read them, too: as they were
            if len(piece.buckets) > KEPT:
                self._driver.wait()  # it may be under way
                piece.buckets.popitem(last=False)
        piece.buckets.move_to_end(key)
        if found.fed != fed:
            found.fed = None  # first: Ctrl-C may strike while the table changes
            found.table[1:, 0] = [self._source(slot, fed) for slot in piece.inputs]
            found.fed = dict(fed)
        found.runs += 1
        if found.runs == 2:
            found.replay = self._recording(found.steps)
            found.recorded = bool(found.replay) and not any(isinstance(step, Live) for step in found.steps)
        for work in found.replay:
            work(epoch)
        if not found.replay:
            self._launch_each(found.steps, epoch)

    def _key(self, piece: Piece, env: Env) -> Key:
        """Of a bucket: sizes in the order of `piece.symbols`, and whether all tokens are the likeliest."""
        sizes = (bucket(env[n], self._most[n]) if n in self._most else env[n] for n in piece.symbols)
        return (*sizes, piece.samples and self._greedy(env))

    def _launch_each(self, steps: Sequence[Work], epoch: int) -> None:
        """Enqueues steps one by one; kernels that wait for the host when they need to wait no more."""
        for step in steps:
            if isinstance(step, Launch) and isinstance(step.fields, args.Carry):
                self._until_reached(step.fields, epoch)
            _launch(self._driver, [step])

    def _until_reached(self, carry: args.Carry, epoch: int) -> None:
        ticks, pairs = self._memory.ticks, zip(carry[:AT_ONCE], carry[AT_ONCE : 2 * AT_ONCE], strict=True)
        waits = [micro.Wait((at - int(ticks.ctypes.data)) // 8, step) for at, step in pairs if at]
        missing = [wait for wait in waits if ticks[wait.tick] < epoch + wait.step]
        if missing:
            mark = self._driver.mark()  # raises where the device failed
            mark.set()
            told = f"{self._device}: interrupted in step {epoch}"
            for wait in missing:
                until_reached(self._memory, wait, epoch, told, mark.through)

    def _made(self, piece: Piece, env: Env, greedy: bool) -> Bucket:
        """A new bucket; where memory is lacking, without any of the old ones."""
        made = self._with_room(piece, env, greedy)
        for step in made.steps:  # loading a kernel may wait for those under way, and they for ticks
            if isinstance(step, Launch):
                self._driver.prepare(step)
        return made

    def _with_room(self, piece: Piece, env: Env, greedy: bool) -> Bucket:
        try:
            return self._bucket(piece, env, greedy)
        except Exception as error:
            if not self._driver.lacks(error):
                raise
        self._driver.wait()
        self._forget()
        return self._bucket(piece, env, greedy)

    def _forget(self) -> None:
        """Drops all buckets; nothing may be under way."""
        for piece in self._pieces:
            piece.buckets.clear()
        self._driver.trim()

    def _recording(self, steps: Sequence[Work]) -> list[Replay]:
        """The steps as they are enqueued from now on; none where there is no memory for that."""
        try:
            return list(self._recorded(steps))
        except Exception as error:
            if not self._driver.lacks(error):
                raise
            return []

    def _recorded(self, steps: Sequence[Work]) -> Iterator[Replay]:
        waits = list[args.Carry]()
        for live, stretch in groupby(steps, lambda step: isinstance(step, Live)):
            some = list(stretch)
            work = partial(_launch, self._driver, some)
            if live:
                yield partial(self._live, work, waits)
                waits = []
            else:
                launches = (step.fields for step in some if isinstance(step, Launch))
                waits += [fields for fields in launches if isinstance(fields, args.Carry) and fields.tick_0]
                yield partial(_replay, self._driver.record(work))

    def _live(self, work: Callable[[], None], waits: Sequence[args.Carry], epoch: int) -> None:
        """Work of a library, when no kernel in front of it waits for the host any more."""
        for carry in waits:
            self._until_reached(carry, epoch)
        work()

    # ---- pieces
    def _cut(self, instrs: Sequence[Compute]) -> Iterator[Piece]:
        mine, inner = set(map(id, instrs)), {i.signals for i in instrs if i.signals is not None}
        others = (i for i in self._memory.stream.instrs if id(i) not in mine)
        asked = {w.tick for i in others for w in i.waits} & inner
        cuts = [tuple(cut) for cut in _cuts(instrs, inner, asked)]
        # recording waits until all GPUs are through: one would wait for a kernel that waits for another
        gpus = {i.device for i in self._memory.stream.instrs if i.device.startswith(f"{KIND}:")}
        if self._driver.polls and len(gpus) == 1:
            told = Told.of(cuts, self._driver)
            loads = {i.signals for i in self._memory.stream.instrs if isinstance(i, micro.Prefetch)}
            parts = []
            for at, (cut, stamps) in enumerate(zip(cuts, told.times, strict=True)):
                some = tuple(instrs[i] for i in cut)
                signals = tuple(i.signals for i in some if i.signals in asked and i.signals is not None)
                ticks = Ticks(self._memory, _outside(some, inner), signals, stamps, loads)
                parts.append(Part(some, cut, ticks))
                told.waits[at], told.signals[at] = bool(ticks.waits), bool(signals)
            yield replace(self._piece(tuple(parts), (), ()), told=told)
            return
        for cut in cuts:
            some = tuple(instrs[i] for i in cut)
            signals = tuple(i.signals for i in some if i.signals is not None)
            yield self._piece((Part(some, cut, None),), _outside(some, inner), signals)

    def _piece(
        self, parts: tuple[Part, ...], waits: tuple[micro.Wait, ...], signals: tuple[int, ...]
    ) -> Piece:
        some = tuple(i for part in parts for i in part.instrs)
        return Piece(
            parts,
            waits,
            signals,
            tuple(sorted(self._sizes_of(some))),
            tuple(self._inputs(some)),
            any(isinstance(i, micro.Dispatch) and i.kernel == "sample" for i in some),
            self._driver.mark(),
        )

    def _sizes_of(self, instrs: Sequence[Compute]) -> set[str]:
        """The symbols and splits in the types and ranges of operands."""
        refs: list[micro.Arg] = []
        for instr in instrs:
            refs += [*_slots_of(instr), *_written(instr), *_rows_of(instr)]
        dims = [d for ref in refs for d in (ref.lo, ref.hi) if d is not None]
        named = {ref.slot for ref in refs if isinstance(ref, micro.SlotRef)}
        slots = named | {root_of(slot, self._slots) for slot in named}
        dims += [dim for slot in slots for dim in self._slots[slot].type.shape]
        return {name for dim in dims for name in symbols_of(dim)}

    # ---- a bucket
    def _bucket(self, piece: Piece, env: Env, greedy: bool) -> Bucket:
        keep: dict[int, Any] = {}

        def scratch(what: str, nbytes: int) -> Any:
            memory = self._scratch(what, nbytes)
            keep[id(memory)] = memory  # a launch has its address, also when a larger one has taken its place
            return memory

        ops = Operands(
            self._memory, self._device, self._driver.limits, env, greedy, self._sizes, self._twins,
            scratch, self._slots, self._blocks,
        )  # fmt: skip
        fuser = Fuser(
            self._memory, lambda instr: few(instr, ops), lambda instr: takes(instr, ops),
            lambda instr: alone(instr, ops),
        )  # fmt: skip
        joints = [fuser.join(rows_of(part.instrs)) for part in piece.parts]
        there = replace(ops, moved=fuser.moved)
        there = replace(there, tiled=in_tiles(chain.from_iterable(joints), fuser.readers, there))
        parts = zip(piece.parts, joints, strict=True)
        steps = joined((step for part, some in parts for step in _encoded(part, some, there)), there)
        table, pull = self._pull(piece, env)
        push = [self._push(result, env) for result in self._results.values()]
        return Bucket([pull, *steps, *push], [table, *keep.values()], table)

    def _pull(self, piece: Piece, env: Env) -> tuple[I64, Work]:
        """The launch that brings sizes and a piece's inputs onto the device, and the table that it reads."""
        entries = [(self._sizes_here.ctypes.data, self._sizes.address, self._sizes.bytes)]
        for slot in piece.inputs:
            twin = self._twins[slot]
            nbytes = -(-size(twin.bytes, env) // 4) * 4
            entries.append((self._source(slot, NOTHING), address_of(twin.there), nbytes))
        table = self._driver.pinned(24 * len(entries)).view(np.int64).reshape(-1, 3)
        table[:] = entries
        fields = args.Pull(
            table.ctypes.data, len(entries), self._begun.ctypes.data, self._sizes.epoch,
            int(self._scratch("pull through", 4).data_ptr()), self._pulled.ctypes.data,
        )  # fmt: skip
        blocks = -(-sum(nbytes for *_, nbytes in entries) // PULLED)
        return table, launch("pull", (min(blocks, PULLING),), PULLED // 4, fields)

    def _source(self, slot: int, fed: Mapping[int, int]) -> int:
        """Where an input comes from."""
        if slot in fed:
            return int(self._results[fed[slot]].kept.data_ptr())
        return int(self._twins[slot].here.ctypes.data)

    def _push(self, result: Result, env: Env) -> Work:
        """The launch that brings an output to the host."""
        source, (_, apart) = self._memory.slot(result.slot), result.places.shape
        fields = args.Push(
            address_of(source), result.places.ctypes.data, apart // 4, int(result.kept.data_ptr()),
            size(result.bytes, env) // 4, self._sizes.epoch,
        )  # fmt: skip
        return launch("push", (1,), 256, fields)

    # ---- inputs
    def _inputs(self, instrs: Sequence[Compute]) -> list[int]:
        """The slots of inputs that the instructions read."""
        read = (root_of(ref.slot, self._slots) for i in instrs for ref in _slots_of(i))
        return [id for id in dict.fromkeys(read) if self._slots[id].input]

    def _twin(self, slot: int) -> Twin:
        place = self._memory.slot(slot)
        here: U8 = place.buffer[place.offset : place.offset + place.bytes]
        padded = -(-place.bytes // 64) * 64
        return Twin(here, Place(self._driver.alloc(padded), 0, padded), self._slots[slot].type.bytes)

    def _small_outputs(self, instrs: Sequence[Compute]) -> Iterator[Result]:
        """Outputs that the instructions write, of words of 4 bytes or 8, and not many."""
        written = {ref.slot for instr in instrs for ref in _written(instr)}
        for output in self._memory.stream.outputs:
            slot = self._slots[int(output.value.removeprefix("%"))]
            most = -(-self._memory.slot(slot.id).bytes // 64) * 64
            if slot.id in written and DTYPES[slot.type.dtype] % 4 == 0 and most <= PUSHED:
                places = self._driver.pinned(2 * most).reshape(2, -1)
                # a bucket has less than twice the elements that are asked for
                yield Result(slot.id, slot.type.bytes, places, self._driver.alloc(2 * most))

    def _sampling(self, instrs: Sequence[Compute]) -> tuple[tuple[Any, Dim], ...]:
        """(temperatures, penalties, rows) of each `sample` whose parameters the host writes."""
        out = []
        for instr in instrs:
            if isinstance(instr, micro.Dispatch) and instr.kernel == "sample":
                slots = [root_of(instr.args[i].slot, self._slots) for i in (1, 5)]  # type: ignore[union-attr]
                known = all(slot in self._twins for slot in slots)
                values = tuple(self._twins[s].here.view(np.float32) for s in slots) if known else ()
                out.append((values, self._slots[slots[0]].type.elements))
        return tuple(out)

    def _greedy(self, env: Env) -> bool:
        return all(
            values and greedy_only(values[0][: size(n, env)], values[1][: size(n, env)])
            for values, n in self._sampled
        )


def _replay(recorded: Callable[[], None], epoch: int) -> None:
    recorded()


def _launch(driver: Driver, steps: Sequence[Work]) -> None:
    for step in steps:
        match step:
            case Launch():
                driver.launch(step)
            case Live():
                step.work()
            case _:
                step()


def _encoded(part: Part, joints: Sequence[Joint], ops: Operands) -> list[Step]:
    """The launches of a part."""
    if part.ticks is None:
        return [step for joint in joints for step in encode(joint, ops)]
    encoded = [[] if carries(joint, ops) else encode(joint, ops) for joint in joints]
    return part.ticks.around(joints, encoded, ops)


def _outside(instrs: Sequence[Compute], inner: set[int]) -> tuple[micro.Wait, ...]:
    """Waits for ticks that others signal."""
    return tuple(w for i in instrs for w in i.waits if w.tick not in inner)


def bucket(value: int, most: int) -> int:
    """What a symbol is rounded up to: powers of two up to 64, then steps of a quarter, at most `most`."""
    if value <= 64:
        rounded = 1 << max(value - 1, 0).bit_length()
    else:
        step = max(64, 1 << (value.bit_length() - 3))
        rounded = -(-value // step) * step
    return min(rounded, most)


def _cuts(instrs: Sequence[Compute], inner: set[int], asked: set[int]) -> Iterator[list[int]]:
    """Indices of instructions, cut before what waits for another lane's tick and behind what another lane
    waits for; a bias stays with its dispatch.

    inner: ticks that the instructions signal themselves; asked: those that others wait for.
    """
    open_: list[int] = []
    for index, instr in enumerate(instrs):
        behind_bias = bool(open_) and isinstance(instrs[open_[-1]], micro.Bias)
        if open_ and not behind_bias and any(w.tick not in inner for w in instr.waits):
            yield open_
            open_ = []
        open_.append(index)
        if instr.signals in asked and not isinstance(instr, micro.Bias):
            yield open_
            open_ = []
    if open_:
        yield open_


def _slots_of(instr: Compute) -> list[micro.SlotRef]:
    match instr:
        case micro.Dispatch():
            return [a for a in instr.args if isinstance(a, micro.SlotRef)]
        case micro.Quantize():
            return [instr.src]
    return []


def _written(instr: Compute) -> list[micro.SlotRef]:
    return [] if isinstance(instr, micro.Bias) or instr.dst is None else [instr.dst]


def _rows_of(instr: Compute) -> list[micro.BlockRef]:
    match instr:
        case micro.Bias():
            return [instr.block]
        case micro.Dispatch():
            return [a for a in instr.args if isinstance(a, micro.BlockRef)]
    return []
