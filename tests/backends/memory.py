"""A hand-laid memory for device tests: every slot, block and state in a buffer of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt.backend import I64, OpenDevice, Place
from flashrt.backends.reference.arrays import DTYPE, shape_at
from flashrt.ir import micro
from flashrt.ir.types import size


class HandMemory:
    """`flashrt.backend.Memory` of one stream, for one setting of its symbols.

    env: symbols and splits. pages: P of the states.
    """

    def __init__(
        self, stream: micro.Stream, devices: Mapping[str, OpenDevice], env: Mapping[str, int], pages: int = 1
    ) -> None:
        self.stream, self.devices = stream, devices
        self.names = [s.name for s in stream.symbols] + [s.name for s in stream.splits]
        self.words: I64 = np.zeros(1 + len(self.names), np.int64)
        self.set(env)
        ticks = [i.signals for i in stream.instrs if i.signals is not None]
        self.ticks: I64 = np.zeros(1 + max(ticks, default=0), np.int64)
        self.table: I64 = np.zeros(len(stream.blocks), np.int64)
        largest = {s.name: s.hi for s in stream.symbols} | {"P": pages}
        self.places: dict[int, Place] = {}
        for slot in stream.slots:
            shared = self.places.get(slot.alias) if slot.alias is not None else None
            self.places[slot.id] = shared or self.fresh(slot.device, size(slot.type.bytes, largest))
        self.blocks: dict[tuple[str, str], Place | None] = {(b.name, b.device): None for b in stream.blocks}
        self.states = {
            (s.name, d): self.fresh(d, size(s.type.bytes, largest)) for s in stream.states for d in devices
        }

    def fresh(self, device: str, nbytes: int) -> Place:
        """A place of its own, behind 64 bytes that nobody may touch."""
        return Place(self.devices[device].reserve(nbytes + 64), 64, nbytes)

    def set(self, env: Mapping[str, int]) -> None:
        """Sets symbols and splits."""
        for name, value in env.items():
            self.words[self.word_of(name)] = value

    def put(self, slot: int, value: NDArray[Any]) -> None:
        """Fills a slot."""
        self.read(slot)[...] = value

    def read(self, slot: int) -> NDArray[Any]:
        """A slot at the present symbols: a view."""
        type = next(s.type for s in self.stream.slots if s.id == slot)
        env = {name: int(self.words[i + 1]) for i, name in enumerate(self.names)}
        shape, place = shape_at(type, env), self.places[slot]
        count = int(np.prod(shape)) * DTYPE[type.dtype].itemsize
        view: NDArray[Any] = place.buffer[place.offset : place.offset + count].view(DTYPE[type.dtype])
        return view.reshape(shape)

    def load_block(self, name: str, device: str, data: NDArray[np.uint8] | None) -> None:
        """Puts a block's bytes somewhere new, or takes it away."""
        place = None
        if data is not None:
            place = self.fresh(device, len(data))
            self.devices[device].write(data, place)
        self.blocks[name, device] = place
        self.table[self.block_of(name, device)] = (
            0 if place is None else place.buffer.ctypes.data + place.offset
        )

    # ---- flashrt.backend.Memory
    def word_of(self, symbol: str) -> int:
        return 1 + self.names.index(symbol)

    def slot(self, slot: int) -> Place:
        return self.places[slot]

    def block_of(self, block: str, device: str) -> int:
        return [(b.name, b.device) for b in self.stream.blocks].index((block, device))

    def block(self, block: str, device: str) -> Place | None:
        return self.blocks[block, device]

    def ring(self, block: str, device: str) -> Place:
        place = self.blocks[block, device]
        assert place is not None, f"{block} isn't loaded"
        return place

    def state(self, state: str, device: str) -> Place:
        return self.states[state, device]
