"""Loaded instructions: pieces between waits, and for each bucket of the symbols what a piece launches.

A bucket's launches are made, and enqueued one by one, when it first runs; at the second time they are
recorded as a graph, which is one launch from then on. What changes between steps within a bucket is data:
inputs and sizes are pulled from pinned memory by the first kernel of each run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from flashrt.backend import ABORT, I64, U8, Compute, Memory, Place
from flashrt.backends.cuda import args
from flashrt.backends.cuda.args import Launch, Live, Step, launch
from flashrt.backends.cuda.driver import Driver
from flashrt.backends.cuda.encode import encode
from flashrt.backends.cuda.fuse import Fuser, rows_of
from flashrt.backends.cuda.linear import few, takes
from flashrt.backends.cuda.operands import Operands, Sizes, Twin, address_of
from flashrt.backends.cuda.sample import greedy_only
from flashrt.errors import DeviceError
from flashrt.ir import micro
from flashrt.ir.order import root_of
from flashrt.ir.types import Dim, Env, size

MOST_SIZES = 512
PULLING = (8, 16)  # blocks that pull inputs
_NAP = 20e-6  # seconds between two looks at a tick
Key = tuple[object, ...]


@dataclass(slots=True)
class Bucket:
    """The launches of a piece for one bucket, and how they are enqueued: one by one, then recorded.

    replay: recorded stretches, and what is done live between them.
    """

    steps: list[Step]
    keep: list[Any]
    replay: list[Callable[[], None]] = field(default_factory=list)
    runs: int = 0


@dataclass(slots=True)
class Piece:
    """Instructions that run without looking at ticks. buckets: by key."""

    instrs: tuple[Compute, ...]
    indices: tuple[int, ...]
    buckets: dict[Key, Bucket] = field(default_factory=dict)


class Code:
    """What `load` makes. stamps: [instructions, 3] ns: arrived, started, ended."""

    def __init__(self, instrs: Sequence[Compute], memory: Memory, device: str, driver: Driver) -> None:
        self._memory, self._device, self._driver = memory, device, driver
        self.stamps: I64 = np.zeros((len(instrs), 3), np.int64)
        stream = memory.stream
        self._slots = {s.id: s for s in stream.slots}
        self._blocks = {b.name: b for b in stream.blocks if b.device == device}
        self._twins = {id: self._twin(id) for id in self._inputs(instrs)}
        here = driver.pinned(8 * MOST_SIZES)
        self._sizes_there = driver.alloc(8 * MOST_SIZES)
        self._sizes_here = here
        self._sizes = Sizes(here.view(np.int64), int(self._sizes_there.data_ptr()))
        self._scratch: dict[str, Any] = {}
        self._ringed = [
            name for name in dict.fromkeys(_blocks_of(instrs)) if self._blocks[name].home != "resident"
        ]
        self._sampled = self._sampling(instrs)
        self._symbols = tuple(stream.symbols)
        self._splits = tuple(s.name for s in stream.splits)
        rows_of(instrs)  # finds what is wrong with biases now
        self._pieces = tuple(_pieces(instrs))

    # ---- one step
    def run(self, epoch: int) -> None:
        """Waits, computes, signals, piece by piece."""
        env = self._env()
        self._driver.begin()
        for piece in self._pieces:
            arrived = time.perf_counter_ns()
            self._await(piece, epoch)
            started = time.perf_counter_ns()
            self._enqueue(piece, env)
            self._driver.wait()
            ended = time.perf_counter_ns()
            self.stamps[list(piece.indices)] = ended
            self.stamps[piece.indices[0]] = arrived, started, ended
            for instr in piece.instrs:
                if instr.signals is not None:
                    self._memory.ticks[instr.signals] = epoch

    def _env(self) -> dict[str, int]:
        names = [s.name for s in self._symbols] + list(self._splits)
        return {name: int(self._memory.words[self._memory.word_of(name)]) for name in names}

    def _await(self, piece: Piece, epoch: int) -> None:
        memory = self._memory
        for instr in piece.instrs:
            for awaited in instr.waits:
                while memory.ticks[awaited.tick] < epoch + awaited.step and not memory.words[ABORT]:
                    time.sleep(_NAP)
        if memory.words[ABORT]:
            raise DeviceError(f"{self._device}: interrupted in step {epoch}")

    def _enqueue(self, piece: Piece, env: Env) -> None:
        rounded = {s.name: bucket(env[s.name], s.hi) for s in self._symbols}
        at = {**env, **rounded}
        key: Key = (*at.values(), self._greedy(env), *self._addresses())
        found = piece.buckets.get(key)
        if found is None:
            found = piece.buckets[key] = self._bucket(piece, at, self._greedy(env))
        self._sizes.write(env)
        found.runs += 1
        if found.runs == 2:
            found.replay = list(self._recorded(found.steps))
        for work in found.replay:
            work()
        if not found.replay:
            self._launch(found.steps)

    def _recorded(self, steps: Sequence[Step]) -> Iterator[Callable[[], None]]:
        for live, stretch in groupby(steps, lambda step: isinstance(step, Live)):
            some = list(stretch)
            yield partial(self._launch, some) if live else self._driver.record(partial(self._launch, some))

    def _launch(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Launch():
                    self._driver.launch(step)
                case Live():
                    step.work()
                case _:
                    step()

    # ---- a bucket
    def _bucket(self, piece: Piece, env: Env, greedy: bool) -> Bucket:
        keep: list[Any] = []
        ops = Operands(
            self._memory, self._device, self._driver.limits, env, greedy, self._sizes, self._twins,
            self._shared, self._slots, self._blocks,
        )  # fmt: skip
        fuser = Fuser(self._memory, lambda instr: few(instr, ops), lambda instr: takes(instr, ops))
        steps = [step for joint in fuser.join(rows_of(piece.instrs)) for step in encode(joint, ops)]
        keep += self._scratch.values()
        pulled = self._pull(env, keep)
        return Bucket([pulled, *steps], keep)

    def _shared(self, what: str, nbytes: int) -> Any:
        """Zeroed memory; a larger one takes the place of a smaller, which the launches that have it keep."""
        if what not in self._scratch or len(self._scratch[what]) < nbytes:
            self._scratch[what] = self._driver.alloc(max(nbytes, 16))
        return self._scratch[what]

    def _pull(self, env: Env, keep: list[Any]) -> Step:
        """The launch that brings sizes and inputs onto the device."""
        entries = [(self._sizes_here.ctypes.data, self._sizes.address, 8 * MOST_SIZES)]
        for twin in self._twins.values():
            entries.append(
                (twin.here.ctypes.data, address_of(twin.there), -(-size(twin.bytes, env) // 4) * 4)
            )
        table = self._driver.pinned(24 * len(entries))
        table.view(np.int64)[:] = np.array(entries, np.int64).reshape(-1)
        keep.append(table)
        return launch("pull", PULLING, 256, args.Pull(table.ctypes.data, len(entries)))

    def _addresses(self) -> tuple[int, ...]:
        """Where blocks lie that come and go."""
        places = (self._memory.block(name, self._device) for name in self._ringed)
        return tuple(0 if place is None else address_of(place) for place in places)

    # ---- inputs
    def _inputs(self, instrs: Sequence[Compute]) -> list[int]:
        """The slots of inputs that the instructions read."""
        read = (root_of(ref.slot, self._slots) for i in instrs for ref in _slots_of(i))
        return [id for id in dict.fromkeys(read) if isinstance(self._memory.slot(id).buffer, np.ndarray)]

    def _twin(self, slot: int) -> Twin:
        place = self._memory.slot(slot)
        here: U8 = place.buffer[place.offset : place.offset + place.bytes]
        padded = -(-place.bytes // 64) * 64
        return Twin(here, Place(self._driver.alloc(padded), 0, padded), self._slots[slot].type.bytes)

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


def bucket(value: int, most: int) -> int:
    """What a symbol is rounded up to: powers of two up to 64, then steps of a quarter, at most `most`."""
    if value <= 64:
        rounded = 1 << max(value - 1, 0).bit_length()
    else:
        step = max(64, 1 << (value.bit_length() - 3))
        rounded = -(-value // step) * step
    return min(rounded, most)


def _pieces(instrs: Sequence[Compute]) -> Iterator[Piece]:
    """Cuts before what waits and behind what signals; a bias stays with its dispatch."""
    open_: list[int] = []
    for index, instr in enumerate(instrs):
        behind_bias = bool(open_) and isinstance(instrs[open_[-1]], micro.Bias)
        if instr.waits and open_ and not behind_bias:
            yield Piece(tuple(instrs[i] for i in open_), tuple(open_))
            open_ = []
        open_.append(index)
        if instr.signals is not None and not isinstance(instr, micro.Bias):
            yield Piece(tuple(instrs[i] for i in open_), tuple(open_))
            open_ = []
    if open_:
        yield Piece(tuple(instrs[i] for i in open_), tuple(open_))


def _slots_of(instr: Compute) -> list[micro.SlotRef]:
    match instr:
        case micro.Dispatch():
            return [a for a in instr.args if isinstance(a, micro.SlotRef)]
        case micro.Quantize():
            return [instr.src]
    return []


def _blocks_of(instrs: Sequence[Compute]) -> Iterator[str]:
    for instr in instrs:
        if isinstance(instr, micro.Bias):
            yield instr.block.block
        elif isinstance(instr, micro.Dispatch):
            yield from (a.block for a in instr.args if isinstance(a, micro.BlockRef))
