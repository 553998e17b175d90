"""Reading and writing slots, blocks and states of a stream's memory as numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from flashrt.backend import Memory, Place
from flashrt.backends.reference.arrays import DTYPE, Array, shape_at, widen
from flashrt.errors import DeviceError
from flashrt.ir import micro
from flashrt.ir.types import Dim, Env, TensorType, Weight, product, size
from flashrt.layouts import LAYOUTS, unpack


def array_at(place: Place, dtype: str, shape: tuple[int, ...]) -> Array:
    """The first bytes of a place as an array: a view, so writing to it writes memory."""
    kind = DTYPE[dtype]
    nbytes = int(product(shape)) * kind.itemsize  # type: ignore[arg-type]
    assert nbytes <= place.bytes, f"{dtype}{list(shape)} is {nbytes} bytes, its place has {place.bytes}"
    got: Array = place.buffer[place.offset : place.offset + nbytes].view(kind).reshape(shape)
    return got


def channels(width: int, lo: Dim | None, hi: Dim | None, env: Env) -> slice:
    """A range of the last axis or of rows, whole where it isn't given."""
    return slice(0 if lo is None else size(lo, env), width if hi is None else size(hi, env))


@dataclass(slots=True)
class Access:
    """One stream's memory. Slots and states lie still while code is loaded; blocks move, so they
    are looked up each time."""

    memory: Memory
    slots: Mapping[int, micro.Slot] = field(init=False)
    weights: Mapping[str, Weight] = field(init=False)
    blocks: Mapping[tuple[str, str], micro.Block] = field(init=False)

    def __post_init__(self) -> None:
        stream = self.memory.stream
        self.slots = {s.id: s for s in stream.slots}
        self.weights = {w.name: w for w in stream.weights}
        self.blocks = {(b.name, b.device): b for b in stream.blocks}

    def env(self) -> dict[str, int]:
        """The symbols and split variables of the step."""
        stream = self.memory.stream
        names = [s.name for s in stream.symbols] + [s.name for s in stream.splits]
        return {name: int(self.memory.words[self.memory.word_of(name)]) for name in names}

    def slot(self, ref: micro.SlotRef, env: Env) -> Array:
        """A slot, or channels of it: a view."""
        type = self.slots[ref.slot].type
        whole = array_at(self.memory.slot(ref.slot), type.dtype, shape_at(type, env))
        if ref.lo is None:
            return whole
        return whole[..., channels(whole.shape[-1], ref.lo, ref.hi, env)]

    def block(self, ref: micro.BlockRef, device: str, env: Env) -> Array:
        """Rows [lo, hi) of a weight, counted from the weight's first row, in the weight's own type."""
        data, weight, first = self._block_bytes(ref.block, device)
        _, *rest = shape_at(weight.type, {}) or (1,)
        held = self.blocks[ref.block, device]
        want = channels(held.hi, held.lo if ref.lo is None else ref.lo, ref.hi, env)
        assert first <= want.start <= want.stop <= held.hi, f"rows {want} of {held}"
        if len(rest) != 1:
            return _plain(data, weight, rest, want.start - first, want.stop - first)
        layout = LAYOUTS[weight.layout or "f32"]
        k, lo = rest[0], (want.start - first) // layout.rows * layout.rows
        hi = want.stop - first
        part = (
            unpack(layout, data[layout.span(lo, hi, k)], hi - lo, k)
            if hi > lo
            else np.empty((0, k), np.float32)
        )
        return part[want.start - first - lo :]

    def rows(self, ref: micro.BlockRef, device: str, ids: Array) -> Array:
        """The rows `ids` of a packed matrix, counted from its first row → f32 [len(ids), K]."""
        data, weight, first = self._block_bytes(ref.block, device)
        layout, k = LAYOUTS[weight.layout or "f32"], shape_at(weight.type, {})[1]
        place = ids.astype(np.int64) - first
        records = data[: len(data) // layout.group_bytes(k) * layout.group_bytes(k)]
        groups = records.reshape(-1, layout.group_bytes(k))[place // layout.rows]
        unpacked = unpack(layout, groups.reshape(-1), len(ids) * layout.rows, k)
        return unpacked.reshape(len(ids), layout.rows, k)[np.arange(len(ids)), place % layout.rows]

    def _block_bytes(self, name: str, device: str) -> tuple[Array, Weight, int]:
        place = self.memory.block(name, device)
        if place is None:
            raise DeviceError(f"block {name} is used on {device} while it isn't loaded")
        data: Array = place.buffer[place.offset : place.offset + place.bytes]
        return data, self.weights[name], self.blocks[name, device].lo

    def state(self, name: str, device: str) -> Array:
        """A state on a device: a view. Its leading size is what its place has room for."""
        type = next(s.type for s in self.memory.stream.states if s.name == name)
        place = self.memory.state(name, device)
        rest = shape_at(TensorType(type.dtype, type.shape[1:]), {})
        entry = int(product(rest)) * DTYPE[type.dtype].itemsize  # type: ignore[arg-type]
        return array_at(place, type.dtype, (place.bytes // entry, *rest))


def _plain(data: Array, weight: Weight, rest: list[int], lo: int, hi: int) -> Array:
    """Rows of a vector or tensor: row-major elements of the layout, given in the weight's type."""
    element = LAYOUTS[weight.layout or "f32"].element
    assert element is not None, f"{weight.name} isn't a matrix and can't be {weight.layout}"
    row = int(product(rest)) * element.itemsize  # type: ignore[arg-type]
    got: Array = data[lo * row : hi * row].view(element).reshape(hi - lo, *rest)
    return (
        widen(got)
        .astype(DTYPE[weight.type.dtype], copy=False)
        .reshape(got.shape if weight.type.shape else ())
    )
