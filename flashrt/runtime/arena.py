"""Where everything of a plan lies: activations, step block, weights, state.

`Residents` is what the variants of a plan share: resident weight blocks and the
state (the KV cache). `StreamMemory` is one variant's view: it adds the slots,
the ring, the words, the ticks and the block table, and is what backends are
handed (`flashrt.backend.Memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from flashrt.backend import I64, U8, BlockSource, OpenDevice, Place
from flashrt.errors import DeviceError
from flashrt.ir import micro
from flashrt.ir.bounds import Bounds
from flashrt.ir.types import Env, Weight, size
from flashrt.layouts import packed_bytes


def block_bytes(weight: Weight, lo: int, hi: int) -> int:
    """Bytes of rows [lo, hi) of a weight in its layout."""
    return packed_bytes(weight.layout, tuple(size(d, {}) for d in weight.type.shape), lo, hi)


class Residents:
    """Resident blocks and states on open devices; filled from a block source.

    pages: the value of symbol P in the types of states.
    """

    def __init__(self, devices: Mapping[str, OpenDevice], source: BlockSource, env: Env) -> None:
        self.devices, self.source, self.env = devices, source, env
        self._blocks: dict[tuple[Weight, str, int, int], Place] = {}
        self._states: dict[tuple[str, str], Place] = {}

    def blocks(self, stream: micro.Stream) -> Iterator[tuple[micro.Block, Place]]:
        """The stream's resident blocks and their memory, loaded unless an earlier variant loaded them.

        What the first variant of a device needs lies in one piece, at the plan's offsets: large pages
        then cover it.
        """
        weights = {w.name: w for w in stream.weights}
        resident = [b for b in stream.blocks if b.home == "resident"]
        whole = self._pieces(resident) if not self._blocks else {}
        for block in resident:
            key = (weights[block.name], block.device, block.lo, block.hi)
            if key not in self._blocks:
                nbytes = block_bytes(weights[block.name], block.lo, block.hi)
                if block.device in whole and block.offset is not None:
                    place = Place(whole[block.device].buffer, block.offset, nbytes)
                else:
                    place = self.reserve(block.device, nbytes)
                self.fill(block.device, weights[block.name], block.lo, block.hi, place)
                self._blocks[key] = place
            yield block, self._blocks[key]

    def _pieces(self, blocks: Sequence[micro.Block]) -> dict[str, Place]:
        """One piece of memory for each device whose blocks all have offsets."""
        ends: dict[str, int] = {}
        for block in blocks:
            if block.offset is not None:
                ends[block.device] = max(ends.get(block.device, 0), block.offset + block.bytes)
        return {device: self.reserve(device, end) for device, end in ends.items()}

    def state(self, name: str, device: str, nbytes: int) -> Place:
        """The state's memory on a device, zero at first."""
        key = (name, device)
        if key not in self._states:
            self._states[key] = self.reserve(device, nbytes)
        assert self._states[key].bytes == nbytes, f"variants disagree on the size of {name}"
        return self._states[key]

    def reserve(self, device: str, nbytes: int) -> Place:
        """Fresh memory of a device. Raises DeviceError when there is none left."""
        try:
            return Place(self.devices[device].reserve(max(nbytes, 1)), 0, nbytes)
        except MemoryError:
            raise DeviceError(
                f"{device} has no room for {nbytes / 1e9:.1f} GB more", hint="open it with fewer pages"
            ) from None

    def clear(self) -> None:
        """Drops all memory."""
        self._blocks.clear()
        self._states.clear()

    def fill(self, device: str, weight: Weight, lo: int, hi: int, place: Place) -> None:
        """Reads rows [lo, hi) of a weight from the source into a place."""
        if isinstance(place.buffer, np.ndarray):
            self.source.read(weight, lo, hi, host_view(place))
            return
        staging = np.empty(place.bytes, np.uint8)
        self.source.read(weight, lo, hi, staging)
        self.devices[device].write(staging, place)


def host_view(place: Place) -> U8:
    """The bytes of a place in host memory."""
    if not isinstance(place.buffer, np.ndarray):
        raise DeviceError("this memory isn't visible to the host")
    return place.buffer[place.offset : place.offset + place.bytes]


class StreamMemory:
    """Memory of one stream. Slots are sized for the symbols' upper bounds."""

    def __init__(self, stream: micro.Stream, residents: Residents) -> None:
        self.stream, self.residents = stream, residents
        names = [s.name for s in stream.symbols] + [s.name for s in stream.splits]
        self._word_of = {name: i + 1 for i, name in enumerate(names)}
        self.words: I64 = np.zeros(len(names) + 1, np.int64)
        for name, value in residents.env.items():
            if name in self._word_of:
                self.words[self._word_of[name]] = value
        ticks = [i.signals for i in stream.instrs if i.signals is not None]
        self.ticks: I64 = np.zeros(max(ticks, default=0) + 1, np.int64)
        self.weights = {w.name: w for w in stream.weights}
        self._blocks = {(b.name, b.device): i for i, b in enumerate(stream.blocks)}
        self.table: I64 = np.zeros(max(len(stream.blocks), 1), np.int64)
        self._where: list[Place | None] = [None] * len(stream.blocks)
        self._limits: dict[str, int] = {s.name: s.hi for s in stream.symbols} | dict(residents.env)
        self._bounds = Bounds.of(stream)
        self._slots = self._lay_out_slots()
        self._rings = self._lay_out_rings()
        self._states = self._lay_out_states()
        for block, place in residents.blocks(stream):
            self.place(block, place)

    # ---- flashrt.backend.Memory
    def word_of(self, symbol: str) -> int:
        return self._word_of[symbol]

    def slot(self, slot: int) -> Place:
        return self._slots[slot]

    def block_of(self, block: str, device: str) -> int:
        return self._blocks[block, device]

    def block(self, block: str, device: str) -> Place | None:
        return self._where[self._blocks[block, device]]

    def state(self, state: str, device: str) -> Place:
        return self._states[state, device]

    # ---- for the executor
    def place(self, block: micro.Block, place: Place | None) -> None:
        """Writes the block table: where a block lies from now on, or None."""
        index = self._blocks[block.name, block.device]
        self._where[index] = place
        if place is None:
            self.table[index] = 0
        elif isinstance(place.buffer, np.ndarray):
            self.table[index] = place.buffer.ctypes.data + place.offset

    def ring(self, block: micro.Block) -> Place:
        """The ring memory a block is prefetched into."""
        return self._rings[self._blocks[block.name, block.device]]

    def arenas(self) -> Iterable[Place]:
        """Every piece of activation memory, for poisoning between steps."""
        inputs = {s.id for s in self.stream.slots if s.input}
        return [place for slot, place in self._slots.items() if slot not in inputs]

    def clear_ring(self) -> None:
        """Forgets every ring block: after an aborted step nothing there can be trusted."""
        for block in self.stream.blocks:
            if block.home == "ring":
                self.place(block, None)

    def _lay_out_slots(self) -> dict[int, Place]:
        by_id = {s.id: s for s in self.stream.slots}
        arenas = {
            device: self.residents.reserve(device, nbytes).buffer for device, nbytes in self.stream.arenas
        }
        places: dict[int, Place] = {}

        def find(slot: micro.Slot) -> Place:
            if slot.id not in places:
                places[slot.id] = self._place_slot(slot, by_id, arenas, find)
            return places[slot.id]

        for slot in self.stream.slots:
            find(slot)
        return places

    def _place_slot(self, slot, by_id, arenas, find) -> Place:  # type: ignore[no-untyped-def]
        nbytes = int(self._bounds.interval(slot.type.bytes)[1])
        if slot.alias is not None:
            base = find(by_id[slot.alias])
            return Place(base.buffer, base.offset, nbytes)
        if slot.offset is not None:
            return Place(arenas[slot.device], slot.offset, nbytes)
        return self.residents.reserve(slot.device, nbytes)

    def _lay_out_rings(self) -> dict[int, Place]:
        rings = {d: self.residents.reserve(d, nbytes).buffer for d, nbytes in self.stream.rings}
        out = {}
        for index, block in enumerate(self.stream.blocks):
            if block.home != "ring":
                continue
            nbytes = block_bytes(self.weights[block.name], block.lo, block.hi)
            if block.offset is None:
                out[index] = self.residents.reserve(block.device, nbytes)
            else:
                out[index] = Place(rings[block.device], block.offset, nbytes)
        return out

    def _lay_out_states(self) -> dict[tuple[str, str], Place]:
        types = {s.name: s.type for s in self.stream.states}
        used = {
            (state, i.device)
            for i in self.stream.instrs
            if isinstance(i, micro.Dispatch)
            for state in (*i.reads, *i.writes)
        }
        return {
            (state, device): self.residents.state(state, device, size(types[state].bytes, self._limits))
            for state, device in sorted(used)
        }
