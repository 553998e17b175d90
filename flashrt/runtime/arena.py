"""Where everything of a plan lies: activations, step block, weights, state.

`Residents` is what the variants of a plan share: resident weight blocks and the
state (the KV cache). `StreamMemory` is one variant's view: it adds the slots,
the ring, the words, the ticks and the block table, and is what backends are
handed (`flashrt.backend.Memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flashrt.backend import I64, U8, BlockSource, OpenDevice, Place, Remote
from flashrt.errors import DeviceError
from flashrt.ir import micro
from flashrt.ir.bounds import Bounds
from flashrt.ir.order import root_of
from flashrt.ir.types import DTYPES, Env, TensorType, Weight, size
from flashrt.layouts import aligned, packed_bytes

NUMPY: Mapping[str, np.dtype[Any]] = {
    "f64": np.dtype(np.float64), "f32": np.dtype(np.float32), "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16), "i64": np.dtype(np.int64), "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16), "i8": np.dtype(np.int8), "u8": np.dtype(np.uint8), "bool": np.dtype(np.bool_),
}  # fmt: skip
assert set(NUMPY) == set(DTYPES)

LOADERS = 4  # threads that read weights
ADOPTED = 0.75  # of an elder's weights in a memory are of use, or they are loaded anew
Owner = Literal["weights", "cache", "activations", "staging", "workspace"]


def block_bytes(weight: Weight, lo: int, hi: int) -> int:
    """Bytes of rows [lo, hi) of a weight in its layout."""
    return packed_bytes(weight.layout, tuple(size(d, {}) for d in weight.type.shape), lo, hi)


Shared = tuple[Weight, str]  # a weight, and the pool of memory it lies in


class Extent(NamedTuple):
    """Rows [lo, hi) of a weight, and a device whose memory they are in."""

    lo: int
    hi: int
    device: str


class Estate(NamedTuple):
    """What another program leaves: rows of weights, and states, by the pool of memory they lie in."""

    weights: Mapping[Shared, Sequence[tuple[Extent, Place]]]
    states: Mapping[tuple[str, str], Place]


class Residents:
    """Resident blocks and states on open devices; filled from a block source.

    streams: the variants, which take turns: they use one arena and one ring of each device.
    """

    def __init__(
        self,
        devices: Mapping[str, OpenDevice],
        source: BlockSource,
        env: Env,
        streams: Sequence[micro.Stream] = (),
    ) -> None:
        self.devices, self.source, self.env = devices, source, env
        self._kept: dict[Shared, list[tuple[Extent, Place]]] = {}
        self._states: dict[tuple[str, str], Place] = {}
        self._held: dict[tuple[str, Owner], int] = {}
        self._codes: list[tuple[str, Any]] = []  # those that say themselves what they hold
        self._remotes = {id: d for id, d in devices.items() if isinstance(d, Remote)}
        self._ways: dict[tuple[str, Weight, int, int], list[Place]] = {}  # as `pieces` has them
        self._largest: dict[tuple[str, Owner], int] = {}
        self._common: dict[tuple[str, Owner], Place] = {}
        for stream in streams:
            for device, nbytes in stream.arenas:
                self._expect(device, "activations", nbytes)
            for device, nbytes in stream.rings:
                self._expect(device, "staging", nbytes)
        self._taken: Mapping[Shared, Sequence[tuple[Extent, Place]]] = {}  # as in `Estate`
        self._taken_states: Mapping[tuple[str, str], Place] = {}
        # where rows of a weight lie of which a device keeps some, piece by piece, while `steady` is held
        self.nearby: Callable[[str, Weight, int, int], Sequence[Place]] = lambda *_: ()
        self.steady: AbstractContextManager[object] = nullcontext()

    @property
    def states(self) -> Mapping[tuple[str, str], Place]:
        """(state, device) → where it lies."""
        return self._states

    @property
    def held(self) -> dict[tuple[str, Owner], int]:
        """Bytes reserved by now, by device and owner. For any thread."""
        found = dict(self._held)
        shared = [(id, remote.held) for id, remote in self._remotes.items()]
        for device, nbytes in (*shared, *((device, code.held) for device, code in list(self._codes))):
            if nbytes:
                found[device, "workspace"] = found.get((device, "workspace"), 0) + nbytes
        return found

    def estate(self) -> Estate:
        """What lies in the host's memory now, and stays there as long as somebody has it."""
        host = {key: list(rows) for key, rows in list(self._kept.items())}
        return Estate(
            {key: rows for key, rows in host.items() if all(_on_host(place) for _, place in rows)},
            {(s, self._pool(d)): place for (s, d), place in list(self._states.items()) if _on_host(place)},
        )

    def adopt(self, estate: Estate) -> None:
        """Takes over what is needed here, before anything is loaded; whose it was may go on using it.

        Weights only where that leaves little of a memory's unused, since they lie in one piece. States as
        they are: of the same types, and as many pages.
        """
        assert not self._kept and not self._states
        self._taken, self._taken_states = dict(estate.weights), dict(estate.states)

    def let_go(self) -> None:
        """Keeps nothing of what was adopted but what is in use."""
        self._taken, self._taken_states = {}, {}

    def blocks(self, stream: micro.Stream) -> Iterator[tuple[micro.Block, Place]]:
        """The stream's resident blocks and their memory, loaded unless an earlier variant loaded them.

        Devices of one pool have one copy of what they share. What the first variant needs of a pool lies in
        one piece: large pages then cover it.
        """
        weights = {w.name: w for w in stream.weights}
        resident = [b for b in stream.blocks if b.home == "resident"]
        extents = self._extents((weights[b.name], b) for b in resident)
        self._take_over(extents)
        if not self._kept:
            self._load_in_one_piece(extents)
        for (weight, pool), extent in extents.items():
            if self._find(weight, pool, extent.lo, extent.hi) is None:
                nbytes = block_bytes(weight, extent.lo, extent.hi)
                self._load(weight, pool, extent, self.reserve(extent.device, nbytes, "weights"))
        self._lock(stream, weights)
        for block in resident:
            place = self._find(weights[block.name], self._pool(block.device), block.lo, block.hi)
            assert place is not None, block
            yield block, place

    def _take_over(self, extents: Mapping[Shared, Extent]) -> None:
        """What there is of these to be taken over, pool by pool."""
        for pool in {pool for _, pool in extents} if self._taken else ():
            there = [x for (_, p), rows in self._taken.items() if p == pool for x in rows]
            found = {
                key: (extent, place)
                for key, extent in extents.items()
                if key[1] == pool
                and self._find(*key, extent.lo, extent.hi) is None
                and (place := _within(self._taken.get(key, ()), key[0], extent.lo, extent.hi)) is not None
            }
            used = sum(place.bytes for _, place in found.values())
            if used < ADOPTED * sum(place.bytes for _, place in there):
                continue
            for key, (extent, place) in found.items():
                self._kept.setdefault(key, []).append((extent, place))
                self._count(extent.device, "weights", place.bytes)

    def _pool(self, device: str) -> str:
        """What a device's memory is part of."""
        return self.devices[device].spec.pool or device

    def _streaming(self, stream: micro.Stream) -> Iterator[micro.Block]:
        """Blocks that come and go in memory which the host doesn't see."""
        return (b for b in stream.blocks if b.home == "ring" and b.device in self._remotes)

    def _lock(self, stream: micro.Stream, weights: Mapping[str, Weight]) -> None:
        """Keeps the host's memory where it is from which the stream's blocks are copied in each step, or
        which another device reads.

        Raises DeviceError where a device couldn't read it.
        """
        found: dict[tuple[str, int], Any] = {}
        blocks = {(b.name, b.device): b for b in stream.blocks}
        for instr, name in _lent(stream):
            block, keeper = blocks[name, instr.keeper], instr.keeper
            place = self._find(weights[name], self._pool(keeper), block.lo, block.hi)
            assert place is not None, block
            if not self._remotes[instr.device].lock(place.buffer):
                raise DeviceError(
                    f"{instr.device} can't read {name} in the memory of {keeper}: the system doesn't lock it",
                    hint=f"compile the model with --pin {instr.node}={keeper}",
                )
        for block in self._streaming(stream):
            for place in self.pieces(block.device, weights[block.name], block.lo, block.hi):
                if _on_host(place):
                    found[block.device, id(place.buffer)] = place.buffer
        for (device, _), buffer in found.items():
            self._remotes[device].lock(buffer)

    def _extents(self, blocks: Iterable[tuple[Weight, micro.Block]]) -> dict[Shared, Extent]:
        """For each weight and pool: the rows that its devices keep, all together."""
        found: dict[Shared, Extent] = {}
        for weight, block in blocks:
            key = (weight, self._pool(block.device))
            lo, hi, device = found.get(key, Extent(block.lo, block.hi, block.device))
            found[key] = Extent(min(lo, block.lo), max(hi, block.hi), device)
        return found

    def _load_in_one_piece(self, extents: Mapping[Shared, Extent]) -> None:
        """All of them, side by side in one piece of memory for each pool."""
        ends: dict[str, int] = {}
        offsets: dict[Shared, int] = {}
        for (weight, pool), extent in extents.items():
            offsets[weight, pool] = ends.get(pool, 0)
            ends[pool] = aligned(offsets[weight, pool] + block_bytes(weight, extent.lo, extent.hi))
        first = {pool: extent.device for (_, pool), extent in reversed(list(extents.items()))}
        whole = {pool: self.reserve(first[pool], end, "weights").buffer for pool, end in ends.items()}

        def load(key: Shared) -> None:
            (weight, pool), extent = key, extents[key]
            nbytes = block_bytes(weight, extent.lo, extent.hi)
            self._load(weight, pool, extent, Place(whole[pool], offsets[key], nbytes))

        # laying weights out takes as long as reading them: some threads share it (sources allow that)
        with ThreadPoolExecutor(LOADERS) as loaders:
            for _ in loaders.map(load, extents):
                pass

    def _load(self, weight: Weight, pool: str, extent: Extent, place: Place) -> None:
        self.fill(extent.device, weight, extent.lo, extent.hi, place)
        self._kept.setdefault((weight, pool), []).append((extent, place))

    def _find(self, weight: Weight, pool: str, lo: int, hi: int) -> Place | None:
        """Where these rows lie in a pool."""
        return _within(self._kept.get((weight, pool), ()), weight, lo, hi)

    def place_of(self, weight: Weight, device: str) -> Place | None:
        """Where all rows of a weight lie, if a device keeps them."""
        return self._find(weight, self._pool(device), 0, size(weight.type.shape[0], {}))

    def remote(self, device: str) -> Remote | None:
        """The device, if the host can't see its memory."""
        return self._remotes.get(device)

    def state(self, name: str, device: str, nbytes: int) -> Place:
        """The state's memory on a device, zero at first."""
        key = (name, device)
        if key not in self._states:
            taken = self._taken_states.get((name, self._pool(device)))
            if taken is not None:
                self._count(device, "cache", nbytes)
            self._states[key] = taken or self.reserve(device, nbytes, "cache")
        assert self._states[key].bytes == nbytes, f"variants disagree on the size of {name}"
        return self._states[key]

    def _expect(self, device: str, owner: Owner, nbytes: int) -> None:
        self._largest[device, owner] = max(nbytes, self._largest.get((device, owner), 0))

    def in_turns(self, device: str, nbytes: int, owner: Owner) -> Any:
        """The buffer that variants use one after the other; what one leaves there, the next doesn't spare."""
        self._expect(device, owner, nbytes)
        place = self._common.get((device, owner))
        if place is None or place.bytes < nbytes:
            place = self._common[device, owner] = self.reserve(device, self._largest[device, owner], owner)
        return place.buffer

    def reserve(self, device: str, nbytes: int, owner: Owner = "activations") -> Place:
        """Fresh memory of a device. Raises DeviceError when there is none left."""
        try:
            place = Place(self._reserved(device, max(nbytes, 1), owner), 0, nbytes)
            self._count(device, owner, nbytes)
            return place
        except MemoryError as error:
            told = f" ({error})" if device in self._remotes else ""
            raise DeviceError(
                f"{device} has no room for {nbytes / 1e9:.1f} GB more{told}", hint="open it with fewer pages"
            ) from None

    def _reserved(self, device: str, nbytes: int, owner: Owner) -> Any:
        """A buffer. Results of a host device beside one that the host doesn't see cross over to that: they
        lie where it reads and writes them by itself."""
        remote = next(iter(self._remotes.values()), None)
        if owner == "activations" and remote is not None and device not in self._remotes:
            return remote.pinned(nbytes)
        return self.devices[device].reserve(nbytes)

    def count_code(self, device: str, code: Any) -> None:
        """Counts what loaded code keeps for itself: its arrays, such as tables and scratch of threads, or
        what it says itself, by then."""
        if hasattr(code, "held"):
            self._codes.append((device, code))
        else:
            self._count(device, "workspace", _array_bytes(code))

    def forget_code(self, codes: Collection[Any]) -> None:
        """What says itself what it holds is over."""
        gone = set(map(id, codes))
        self._codes = [(device, code) for device, code in self._codes if id(code) not in gone]

    def words(self, count: int) -> I64:
        """Zeroed words of 64 bits that every device sees."""
        for id, remote in self._remotes.items():
            try:
                return remote.pinned(8 * count).view(np.int64)
            except MemoryError as error:
                raise DeviceError(f"{id} has no page-locked memory for a step ({error})") from None
        return np.zeros(count, np.int64)

    def for_input(self, device: str, nbytes: int) -> Place:
        """Memory for an input, which the host writes: the device's, or pinned where the host can't see it."""
        opened = self.devices[device]
        if isinstance(opened, Remote):
            return Place(opened.pinned(max(nbytes, 1)), 0, nbytes)
        return self.reserve(device, nbytes)

    def _count(self, device: str, owner: Owner, nbytes: int) -> None:
        self._held[device, owner] = self._held.get((device, owner), 0) + nbytes

    def clear(self) -> None:
        """Drops all memory."""
        self.let_go()
        self._kept.clear()
        self._ways.clear()
        self._states.clear()
        self._common.clear()
        self._held.clear()
        self._codes.clear()

    def pieces(self, device: str, weight: Weight, lo: int, hi: int) -> Sequence[Place]:
        """Where rows [lo, hi) lie, piece by piece, in the host's memory or on the device; empty when not all
        of them do."""
        key = (device, weight, lo, hi)
        if not self._ways.get(key):
            self._ways[key] = self._found(device, weight, lo, hi)
            if not self._ways[key] and (rows := weight.in_whole(lo, hi)):
                wholes = {w for w, _ in list(self._kept) if (w.name, w.layout) == (weight.of, weight.layout)}
                ways = (self._found(device, whole, *rows) for whole in wholes)
                self._ways[key] = next(filter(None, ways), [])
        return self._ways[key]

    def _found(self, device: str, weight: Weight, lo: int, hi: int) -> list[Place]:
        pools = {d.spec.pool or id for id, d in self.devices.items() if id not in self._remotes}
        rows = [x for pool in sorted({self._pool(device), *pools})
                for x in list(self._kept.get((weight, pool), ()))]  # fmt: skip
        return _covered(rows, weight, lo, hi)

    def fill(self, device: str, weight: Weight, lo: int, hi: int, place: Place) -> None:
        """Brings rows [lo, hi) of a weight to a place: from where they lie already, else from the source."""
        if isinstance(place.buffer, np.ndarray):
            self.source.read(weight, lo, hi, host_view(place))
            return
        with self.steady:
            if pieces := self.nearby(device, weight, lo, hi) or self.pieces(device, weight, lo, hi):
                self._remotes[device].gather(pieces, place)
                return
        staging = np.empty(place.bytes, np.uint8)
        self.source.read(weight, lo, hi, staging)
        self.devices[device].write(staging, place)


def _lent(stream: micro.Stream) -> Iterator[tuple[micro.Dispatch, str]]:
    """Dispatches that read a block where another device keeps it, and its name."""
    for instr in stream.instrs:
        if isinstance(instr, micro.Dispatch) and instr.keeper != instr.device:
            yield from ((instr, arg.block) for arg in instr.args if isinstance(arg, micro.BlockRef))


def _on_host(place: Place) -> bool:
    return isinstance(place.buffer, np.ndarray)


def _within(kept: Iterable[tuple[Extent, Place]], weight: Weight, lo: int, hi: int) -> Place | None:
    """Where rows [lo, hi) of a weight lie in what is kept of it."""
    for extent, place in kept:
        if extent.lo <= lo and hi <= extent.hi:
            before = block_bytes(weight, extent.lo, lo)
            return Place(place.buffer, place.offset + before, block_bytes(weight, lo, hi))
    return None


def _covered(kept: Sequence[tuple[Extent, Place]], weight: Weight, lo: int, hi: int) -> list[Place]:
    """Rows [lo, hi), piece by piece, from what is kept of a weight; empty where some are missing."""
    found, first = list[Place](), lo
    while lo < hi:
        end = min(hi, max((extent.hi for extent, _ in kept if extent.lo <= lo), default=lo))
        place = _within(kept, weight, lo, end)
        if end <= lo or place is None:
            return []
        found.append(place)
        lo = end
    whole = sum(place.bytes for place in found) == block_bytes(weight, first, hi)
    return found if whole else []  # pieces that end within a group of rows


def _array_bytes(code: object) -> int:
    """Bytes of the arrays in the fields of a dataclass, and of those in tuples there."""
    values = [getattr(code, f.name) for f in fields(code)] if is_dataclass(code) else []
    flat = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
    return sum(v.nbytes for v in flat if isinstance(v, np.ndarray))


def host_view(place: Place) -> U8:
    """The bytes of a place in host memory."""
    if not isinstance(place.buffer, np.ndarray):
        raise DeviceError("this memory isn't visible to the host")
    return place.buffer[place.offset : place.offset + place.bytes]


def typed_view(place: Place, type: TensorType) -> NDArray[Any]:
    """The elements of a place in host memory, flat."""
    return host_view(place).view(NUMPY[type.dtype])


class StreamMemory:
    """Memory of one stream. Slots are sized for the symbols' upper bounds."""

    def __init__(self, stream: micro.Stream, residents: Residents) -> None:
        self.stream, self.residents = stream, residents
        names = [s.name for s in stream.symbols] + [s.name for s in stream.splits]
        self._word_of = {name: i + 1 for i, name in enumerate(names)}
        self.words: I64 = residents.words(len(names) + 1)
        for name, value in residents.env.items():
            if name in self._word_of:
                self.words[self._word_of[name]] = value
        ticks = [i.signals for i in stream.instrs if i.signals is not None]
        self.ticks: I64 = residents.words(max(ticks, default=0) + 1)
        self.weights = {w.name: w for w in stream.weights}
        self._blocks = {(b.name, b.device): i for i, b in enumerate(stream.blocks)}
        self.table: I64 = np.zeros(max(len(stream.blocks), 1), np.int64)
        self._where: list[Place | None] = [None] * len(stream.blocks)
        self._limits: dict[str, int] = {s.name: s.hi for s in stream.symbols} | dict(residents.env)
        self._bounds = Bounds.of(stream)
        self._slots = self._lay_out_slots()
        self.inputs = tuple((s.input, typed_view(self._slots[s.id], s.type)) for s in stream.slots if s.input)
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

    def ring(self, block: str, device: str) -> Place:
        return self._rings[self._blocks[block, device]]

    def state(self, state: str, device: str) -> Place:
        return self._states[state, device]

    # ---- for the executor
    def remote(self, slot: int) -> Remote:
        """The device of a slot that the host can't see."""
        device = next(s.device for s in self.stream.slots if s.id == slot)
        opened = self.residents.devices[device]
        assert isinstance(opened, Remote), device
        return opened

    def place(self, block: micro.Block, place: Place | None) -> None:
        """Writes the block table: where a block lies from now on, or None."""
        index = self._blocks[block.name, block.device]
        self._where[index] = place
        if place is None:
            self.table[index] = 0
        elif isinstance(place.buffer, np.ndarray):
            self.table[index] = place.buffer.ctypes.data + place.offset

    def arenas(self) -> Iterable[tuple[str, Place]]:
        """Every piece of activation memory and its device, for poisoning between steps: all but inputs."""
        slots = {s.id: s for s in self.stream.slots}
        return [
            (slots[slot].device, place)
            for slot, place in self._slots.items()
            if not slots[root_of(slot, slots)].input
        ]

    def clear_ring(self) -> None:
        """Forgets every ring block: after an aborted step nothing there can be trusted."""
        for block in self.stream.blocks:
            if block.home == "ring":
                self.place(block, None)

    def let_go(self) -> None:
        """Gives all memory free, whoever still knows this; nothing can run in it any more."""
        self._where, self._slots, self._states, self._rings, self.inputs = [], {}, {}, {}, ()

    def _lay_out_slots(self) -> dict[int, Place]:
        by_id = {s.id: s for s in self.stream.slots}
        arenas = {
            device: self.residents.in_turns(device, nbytes, "activations")
            for device, nbytes in self.stream.arenas
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
        if slot.input:
            return self.residents.for_input(slot.device, nbytes)
        return self.residents.reserve(slot.device, nbytes)

    def _lay_out_rings(self) -> dict[int, Place]:
        rings = {d: self.residents.in_turns(d, nbytes, "staging") for d, nbytes in self.stream.rings}
        out = {}
        for index, block in enumerate(self.stream.blocks):
            if block.home != "ring":
                continue
            nbytes = block_bytes(self.weights[block.name], block.lo, block.hi)
            if block.offset is None:
                out[index] = self.residents.reserve(block.device, nbytes, "staging")
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
