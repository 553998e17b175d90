"""Which experts of each layer a GPU keeps: those that were asked for most lately.

The kernels of a step count what is asked for in a state, and read where experts lie from an input, which a
step has from its beginning to its end. So experts can be exchanged beside the steps, with each sample of the
live loop. What has to go is in the table of no step that begins from then on; once those are over that began
before, its slot is filled, and the steps that begin then find the new expert there. Whatever isn't in the
table, the other device computes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashrt.backend import Place
from flashrt.ir import micro
from flashrt.ir.ops import EXPERT_TABLE, EXPERTS_ASKED
from flashrt.ir.types import Weight, size
from flashrt.runtime.arena import Residents, block_bytes, host_view
from flashrt.runtime.executor import Begun

I32 = NDArray[np.int32]
F64 = NDArray[np.float64]
MOST = 64 << 20  # bytes that are copied with one sample, unless one expert has more
HALF = 20.0  # seconds of steps after which a choice counts half
GAIN = 1.25  # an expert takes another's place when it is asked for so much more often,
NOISE = 2.0  # and by so many standard deviations of what chance makes of two counts


class Move(NamedTuple):
    """An expert that gets a slot, and the one that had it; -1 where it was free."""

    layer: int
    slot: int
    expert: int
    gone: int


def moves(asked: F64, table: I32, slots: int, most: int) -> list[Move]:
    """What to load, and in whose place, the most useful first. Pure.

    asked: [layer, expert], how often; table: 1 + the expert's slot, 0 without one; most: moves at most.
    """
    layers = np.arange(len(table))[:, None]
    owner = np.full((len(table), slots), -1)
    at = np.nonzero(table)
    owner[at[0], table[at] - 1] = at[1]
    held = np.where(owner < 0, -1.0, asked[layers, owner])
    worst = np.argsort(held, axis=1, kind="stable")
    absent = np.where(table == 0, asked, -1.0)
    best = np.argsort(-absent, axis=1, kind="stable")[:, :slots]
    worst = worst[:, : best.shape[1]]
    come, go = absent[layers, best], held[layers, worst]
    other = np.maximum(go, 0.0)
    better = come > np.maximum(GAIN * other, other + NOISE * np.sqrt(np.maximum(come, 0.0) + other))
    worth = np.where((come > 0) & (better | (go < 0)), come - other, 0.0)
    order = np.argsort(-worth, axis=None, kind="stable")[:most]
    return [
        Move(int(i), int(worst[i, j]), int(best[i, j]), int(owner[i, worst[i, j]]))
        for i, j in zip(*np.unravel_index(order, worth.shape), strict=True)
        if worth[i, j] > 0
    ]


@dataclass(frozen=True, slots=True)
class Metrics:
    """A cache at one moment.

    layers, slots, experts: of `experts` of each layer it keeps `slots`. hit_share: of the choices counted
    lately, how many it had; None before the first. exchanged: experts that were loaded since it was opened.
    holding: why nothing is exchanged, or one couldn't be loaded; "" while all is well.
    """

    layers: int
    slots: int
    experts: int
    hit_share: float | None
    exchanged: int
    holding: str


class _Part(NamedTuple):
    """A weight of a layer's experts. cache: of it; whole: with all experts; rows, bytes: of each."""

    layer: int
    cache: Weight
    whole: Weight
    rows: int
    bytes: int


class ExpertCache:
    """The experts that one device keeps, in the steps of one stream.

    stream: one that takes the table of experts.
    """

    def __init__(self, stream: micro.Stream, residents: Residents) -> None:
        self._residents = residents
        found = [i for i in stream.instrs if isinstance(i, micro.Dispatch) and i.kernel == "expert_cache"]
        self.device = found[0].device
        self.experts, self.slots = (_whole(found[0], key) for key in ("experts", "slots"))
        table = np.zeros((len(found), self.experts), np.int32)
        table[:, : self.slots] = np.arange(1, self.slots + 1)
        self.table: I32 = _final(table)
        self._asked, self._counted = np.zeros(table.shape), np.zeros(table.shape, np.int32)
        self._hits = self._all = 0.0
        self._at: float | None = None
        self._number, self._steps = 0, dict[int, Begun | None]()  # None: it is just beginning
        self._moves, self._since = list[Move](), 0  # under way, and the last step that may read what goes
        self._exchanged, self._failed, self._lost, self._closed = 0, "", "", False
        self._parts = tuple(self._parts_of(stream))
        self._lock = threading.RLock()
        residents.steady, residents.nearby = self._lock, self.nearby

    def _parts_of(self, stream: micro.Stream) -> Iterator[_Part]:
        weights, seen = {w.name: w for w in stream.weights}, set[str]()
        for instr in stream.instrs:
            if isinstance(instr, micro.Dispatch) and instr.kernel.startswith("expert_linear"):
                blocks = {a.block for a in instr.args if isinstance(a, micro.BlockRef)} - seen
                for cache in (weights[name] for name in sorted(blocks) if instr.attr("layer") is not None):
                    rows = size(cache.type.shape[0], {}) // self.slots
                    whole = weights[cache.of]
                    yield _Part(_whole(instr, "layer"), cache, whole, rows, block_bytes(whole, 0, rows))
                seen |= blocks

    @property
    def _rows(self) -> I32:
        """The table, a row for each layer. Nobody writes to it."""
        return self.table.reshape(self._asked.shape)

    # ---- for the steps (`program.Program`)
    def enter(self) -> tuple[int, I32]:
        """A step begins: its number, and its table."""
        self._sweep()
        self._number += 1
        self._steps[self._number] = None  # before it reads the table
        return self._number, self.table

    def entered(self, number: int, step: Begun | None) -> None:
        """The step has begun, or is given up."""
        if step is None or not step.under_way:
            self._steps.pop(number, None)
        else:
            self._steps[number] = step

    def _sweep(self) -> None:
        for number, step in list(self._steps.items()):
            if step is not None and not step.under_way:
                self._steps.pop(number, None)

    # ---- for the sampler
    def sampled(self, now: float) -> None:
        """Counts, finishes the exchange that is under way, and begins the next one. now: seconds.

        An exception is kept for `metrics`; steps go on with the experts that are there.
        """
        with self._lock:
            if self._closed:
                return
            try:
                if self._count(now) and self._load():
                    self._choose()
                self._failed = ""
            except Exception as error:  # whatever it is: what isn't in the table isn't read
                self._failed = f"{type(error).__name__}: {error}"

    def _count(self, now: float) -> bool:
        """Adds what was asked for since the last sample. Whether anything ever was."""
        place = self._residents.states.get((EXPERTS_ASKED, self.device))
        if place is None:
            return False
        counts, remote = np.empty(place.bytes, np.uint8), self._residents.remote(self.device)
        if remote is None:
            counts[:] = host_view(place)
        else:
            remote.read(place, counts)
        found = counts.view(np.int32).reshape(self._counted.shape)
        new = (found - self._counted).astype(np.float64)  # counters may pass their largest number
        self._counted = found
        if (total := float(new.sum())) > 0:
            kept = 0.5 ** ((now - self._at) / HALF) if self._at is not None else 1.0
            self._asked = kept * self._asked + new
            self._hits = kept * self._hits + float(new[self._rows > 0].sum())
            self._all = kept * self._all + total
        self._at = now
        return self._all > 0

    def _load(self) -> bool:
        """Fills the slots of what had to go, unless a step may still read it. Whether that is done."""
        self._sweep()
        if not self._moves:
            return True
        if any(number <= self._since for number in list(self._steps)):
            return False
        table, self._lost = self._rows.copy(), ""
        for move in self._moves:
            try:
                for part in (p for p in self._parts if p.layer == move.layer):
                    first = move.expert * part.rows
                    slot = self._slot(part, move.slot)
                    self._residents.fill(self.device, part.whole, first, first + part.rows, slot)
            except Exception as error:  # whatever it is: its slot stays free, the others are filled
                self._lost = f"{type(error).__name__}: {error}"
                continue
            table[move.layer, move.expert] = move.slot + 1
            self._exchanged += 1
        self._moves = []
        self.table = _final(table)
        return True

    def _choose(self) -> None:
        """Takes experts that have to go out of the table."""
        each = max(sum(p.bytes for p in self._parts if p.layer == n) for n in range(len(self._asked)))
        self._moves = moves(self._asked, self._rows, self.slots, max(1, MOST // each))
        table = self._rows.copy()
        for move in self._moves:
            if move.gone >= 0:
                table[move.layer, move.gone] = 0
        if self._moves:
            self.table = _final(table)
        self._since = self._number  # after that: a later step has this table

    def _slot(self, part: _Part, slot: int) -> Place:
        place = self._residents.place_of(part.cache, self.device)
        assert place is not None, f"{part.cache.name} isn't loaded"
        return Place(place.buffer, place.offset + slot * part.bytes, part.bytes)

    # ---- for the other variants' rings (`arena.Residents`)
    def nearby(self, device: str, weight: Weight, lo: int, hi: int) -> Sequence[Place]:
        """Where a whole weight's experts lie: those that the device keeps there, the others with the host.

        Nothing where that can't be told. It stays so as long as `Residents.steady` is held.
        """
        part = next((p for p in self._parts if p.whole == weight), None)
        if part is None or device != self.device or (lo, hi) != (0, part.rows * self.experts):
            return ()
        whole = self._residents.pieces(device, weight, lo, hi)
        if len(whole) != 1 or self._residents.place_of(part.cache, device) is None:
            return ()
        found, first, row = list[Place](), 0, self._rows[part.layer].tolist()
        for expert, slot in enumerate((*row, 1)):
            if slot and first < expert:
                at = whole[0].offset + first * part.bytes
                found.append(Place(whole[0].buffer, at, (expert - first) * part.bytes))
            if slot and expert < self.experts:
                found.append(self._slot(part, slot - 1))
            first = expert + 1 if slot else first
        return found

    # ---- for those who look on
    def metrics(self) -> Metrics:
        """How the cache is."""
        share = self._hits / self._all if self._all else None
        holding = "it has ended" if self._closed else self._failed or self._lost
        layers = len(self._asked)
        return Metrics(layers, self.slots, self.experts, share, self._exchanged, holding)

    def close(self) -> None:
        """The experts stay as they are; nothing is copied any more. Idempotent."""
        with self._lock:
            self._closed = True
            self._steps.clear()


def takes_table(stream: micro.Stream) -> bool:
    """Whether steps of a stream ask which experts a device keeps."""
    return any(i.name == EXPERT_TABLE for i in stream.inputs)


def _final(table: I32) -> I32:
    """The table as a step takes it: nobody writes to it any more."""
    flat = table.reshape(-1).copy()
    flat.setflags(write=False)
    return flat


def _whole(instr: micro.Dispatch, key: str) -> int:
    value = instr.attr(key)
    assert isinstance(value, int), (instr.kernel, key)
    return value
