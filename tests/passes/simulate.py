"""Runs a stream on pretend devices, lanes in a random order that the ticks allow, for several steps.

Memory is what the stream says it is: slots at their offsets, ring blocks over each other.
Evicted blocks and fresh memory hold 0xFF bytes (NaN as floats), so that a read which nothing
ordered or loaded shows in the results.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt.backend import Place
from flashrt.backends.reference.access import Access
from flashrt.backends.reference.device import Row, compute
from flashrt.backends.reference.kernels import read_kernel
from flashrt.ir import micro
from flashrt.ir.bounds import Bounds
from flashrt.ir.order import root_of
from flashrt.ir.types import Weight
from flashrt.layouts import LAYOUTS, pack_plain, pack_quants
from flashrt.passes.cost import block_bytes
from flashrt.weights.parts import PartSource
from flashrt.weights.source import flat

Array = NDArray[Any]
Bytes = Mapping[str, NDArray[np.uint8]]  # packed weights


def poison(nbytes: int) -> NDArray[np.uint8]:
    return np.full(nbytes, 255, np.uint8)


@dataclass
class PretendMemory:
    """The runtime's memory (`flashrt.backend.Memory`), in numpy."""

    stream: micro.Stream
    weights: Bytes
    words: NDArray[np.int64] = field(init=False)
    ticks: NDArray[np.int64] = field(init=False)
    table: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        s = self.stream
        self.bounds = Bounds.of(s)
        self.slots = {x.id: x for x in s.slots}
        self.blocks = {(b.name, b.device): b for b in s.blocks}
        self.declared = {w.name: w for w in s.weights}
        self.names = ["abort", *(x.name for x in s.symbols), *(x.name for x in s.splits)]
        self.words = np.zeros(len(self.names), np.int64)
        self.ticks = np.zeros(1 + max((i.signals or 0 for i in s.instrs), default=0), np.int64)
        self.table = np.zeros(len(self.blocks), np.int64)
        self.buffers: dict[tuple[str, object], NDArray[np.uint8]] = {}
        self.loaded: dict[tuple[str, str], Place] = {}
        for kind, sizes in (("arena", s.arenas), ("ring", s.rings)):
            for device, size in sizes:
                self.buffers[kind, device] = poison(size)
        for block in s.blocks:
            if block.home == "resident":
                self.load(block.name, block.device)

    def word_of(self, symbol: str) -> int:
        return self.names.index(symbol)

    def _buffer(self, kind: str, key: object, nbytes: int) -> NDArray[np.uint8]:
        return self.buffers.setdefault((kind, key), poison(nbytes))

    def slot(self, slot: int) -> Place:
        root = self.slots[root_of(slot, self.slots)]
        nbytes = math.ceil(self.bounds.interval(root.type.bytes)[1])
        if root.offset is None:
            return Place(self._buffer("slot", root.id, nbytes), 0, nbytes)
        arena = self.buffers["arena", root.device]
        assert root.offset + nbytes <= len(arena), root
        return Place(arena, root.offset, nbytes)

    def block_of(self, block: str, device: str) -> int:
        return list(self.blocks).index((block, device))

    def block(self, block: str, device: str) -> Place | None:
        return self.loaded.get((block, device))

    def ring(self, block: str, device: str) -> Place:
        raise NotImplementedError

    def load(self, name: str, device: str) -> None:
        block = self.blocks[name, device]
        assert (name, device) not in self.loaded, f"{name} is loaded twice"
        if block.offset is None or block.home == "resident":
            place = Place(poison(block.bytes), 0, block.bytes)
        else:
            place = Place(self.buffers["ring", device], block.offset, block.bytes)
        data = self.weights[name]
        weight = self.declared[name]
        per_row = len(data) // (weight.type.shape[0] if weight.type.shape else 1)  # type: ignore[operator]
        part = data[int(block.lo * per_row) : int(block.lo * per_row) + block.bytes]
        place.buffer[place.offset : place.offset + block.bytes] = part
        self.loaded[name, device] = place

    def evict(self, name: str, device: str) -> None:
        place = self.loaded.pop((name, device))
        place.buffer[place.offset : place.offset + place.bytes] = 255

    def state(self, state: str, device: str) -> Place:
        entry = next(s for s in self.stream.states if s.name == state)
        nbytes = math.ceil(self.bounds.interval(entry.type.bytes)[1])
        key = ("state", (state, device))
        if key not in self.buffers:
            self.buffers[key] = np.zeros(nbytes, np.uint8)
        return Place(self.buffers[key], 0, nbytes)


@dataclass
class Step:
    """symbols: values of symbols and splits; inputs: by name."""

    symbols: Mapping[str, int]
    inputs: Mapping[str, Array]


def run(
    stream: micro.Stream, weights: Bytes, steps: Sequence[Step], rng: random.Random | None = None
) -> list[dict[str, Array]]:
    """The outputs of each step. Without `rng` the lanes take turns in the order of the stream.

    Raises AssertionError when no lane can go on.
    """
    memory = PretendMemory(stream, weights)
    access = Access(memory)
    lanes: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for lane, row in _rows(stream):
        lanes[lane].append(row)
    at = dict.fromkeys(lanes, 0)  # instructions done, over all steps
    outputs = []
    for epoch, step in enumerate(steps, 1):
        for name, value in step.symbols.items():
            memory.words[memory.word_of(name)] = value
        env = access.env()
        for slot in stream.slots:
            if slot.input:
                access.slot(micro.SlotRef(slot.id), env)[...] = step.inputs[slot.input]
        # the step is over when the compute lanes are; the others may lag, at the last step too
        while any(n < epoch * len(lanes[lane]) for lane, n in at.items() if lane[1] == "compute"):
            ready = [k for k, n in at.items() if n < epoch * len(lanes[k]) and _ready(lanes[k], n, memory)]
            assert ready, f"step {epoch}: every lane waits"
            lane = rng.choice(ready) if rng else ready[0]
            row = lanes[lane][at[lane] % len(lanes[lane])]
            _do(row, access, env)
            if row.instr.signals is not None:
                memory.ticks[row.instr.signals] = at[lane] // len(lanes[lane]) + 1
            at[lane] += 1
        outputs.append({o.name: _output(o.value, access, env) for o in stream.outputs})
    return outputs


def _output(value: str, access: Access, env: Mapping[str, int]) -> Array:
    return np.array(access.slot(micro.SlotRef(int(value[1:])), env))


def _ready(rows: Sequence[Row], done: int, memory: PretendMemory) -> bool:
    epoch = done // len(rows) + 1
    return all(memory.ticks[w.tick] >= epoch + w.step for w in rows[done % len(rows)].instr.waits)


def _rows(stream: micro.Stream) -> Iterator[tuple[tuple[str, str], Row]]:
    bias: dict[tuple[str, str], micro.BlockRef] = {}
    for instr in stream.instrs:
        lane = (instr.device, instr.lane)
        if isinstance(instr, micro.Bias):
            bias[lane] = instr.block
        kernel = read_kernel(instr.kernel) if isinstance(instr, micro.Dispatch) else None
        yield lane, Row(instr, kernel, bias.pop(lane, None) if kernel else None)  # type: ignore[arg-type]


def _do(row: Row, access: Access, env: Mapping[str, int]) -> None:
    memory = access.memory
    assert isinstance(memory, PretendMemory)
    instr: micro.Instr = row.instr
    match instr:
        case micro.Prefetch():
            memory.load(instr.block, instr.device)
        case micro.Evict():
            memory.evict(instr.block, instr.device)
        case micro.Transfer():
            access.slot(instr.dst, env)[...] = access.slot(instr.src, env)
        case _:
            compute(row, access, env)


@dataclass
class _Packed:
    """A `BlockSource` over packed weights."""

    weights: Bytes

    def read(self, weight: Weight, lo: int, hi: int, out: NDArray[np.uint8]) -> None:
        row = block_bytes(weight) // flat(weight)[0]
        out[:] = self.weights[weight.name][lo * row : hi * row]


def packed(weights: Sequence[Weight], seed: int = 0) -> dict[str, NDArray[np.uint8]]:
    """Random weights in their layouts, by name."""
    rng = np.random.default_rng(seed)
    out = {}
    for w in (w for w in weights if not w.of):
        shape = tuple(int(d) for d in w.type.shape)  # type: ignore[arg-type]
        layout = LAYOUTS[w.layout]
        if layout.element is not None:
            out[w.name] = pack_plain(layout, (rng.standard_normal(shape) * 0.2).astype(np.float32))
            continue
        n, k = shape
        low, high = (-8, 8) if layout.bits == 8 else (0, 16)
        q = rng.integers(low, high, (n, -(-k // 32), 32))
        scale = rng.uniform(0.01, 0.03, q.shape[:2]).astype(np.float16)
        out[w.name] = pack_quants(layout, q, scale)
    return with_parts(out, weights)


def with_parts(whole: Bytes, weights: Sequence[Weight]) -> dict[str, NDArray[np.uint8]]:
    """Packed weights, and those that are parts of them."""
    source = PartSource(_Packed(whole), {w.name: w for w in weights})
    out = dict(whole)
    for w in (w for w in weights if w.of):
        out[w.name] = np.empty(block_bytes(w), np.uint8)
        source.read(w, 0, flat(w)[0], out[w.name])
    return out
