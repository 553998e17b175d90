"""Memory of a plan: everything has a place of its own, variants share what outlives a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt.backend import U8, Place
from flashrt.backends.reference import ReferenceBackend
from flashrt.errors import DeviceError
from flashrt.ir import micro
from flashrt.ir.order import root_of
from flashrt.ir.types import Weight
from flashrt.passes.lower import lower
from flashrt.passes.pipeline import PERFORMANCE, Options
from flashrt.runtime.arena import Residents, StreamMemory, host_view
from tests.passes.examples import device, serial, split_mlp

SUBSETS = [frozenset(c) for c in chain.from_iterable(combinations(PERFORMANCE, n) for n in range(6))]
STREAMS = {"one device": serial(), "two devices": lower(split_mlp())}
HOME = {"one device": "cpu:0", "two devices": "gpu:0"}  # of the state
PAGES = 4


class CountingSource:
    """Fills a weight with a number of its own, and counts what is read."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()

    def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
        self.reads[weight.name] += 1
        out[:] = self.value(weight.name)

    @staticmethod
    def value(name: str) -> int:
        return sum(name.encode()) % 255 + 1


def planned(name: str, disabled: frozenset[str], room: int) -> micro.Stream:
    """The stream after the performance passes left on. room: bytes for the weights of a device."""
    stream = STREAMS[name]
    for each, faster in PERFORMANCE.items():
        if each not in disabled:
            stream = faster(stream, Options(window=2), {"cpu:0": room, "gpu:0": room})
    return stream


def residents(source: CountingSource) -> Residents:
    backend = ReferenceBackend()
    return Residents({id: backend.open(device(id)) for id in ("cpu:0", "gpu:0")}, source, {"P": PAGES})


def spans(places: list[Place]) -> list[tuple[int, int]]:
    """Addresses [from, to) in host memory, in order."""
    return sorted(
        (p.buffer.ctypes.data + p.offset, p.buffer.ctypes.data + p.offset + p.bytes) for p in places
    )


def apart(found: list[tuple[int, int]]) -> bool:
    return all(a[1] <= b[0] for a, b in pairwise(found))


plans = st.tuples(st.sampled_from(list(STREAMS)), st.sampled_from(SUBSETS), st.integers(12_000, 60_000))


@settings(max_examples=60)
@given(plans)
def test_everything_has_its_place(plan: tuple[str, frozenset[str], int]) -> None:
    """Slots lie whole in their buffers, on cache lines; inputs, weights, rings and state share no byte
    with them or each other."""
    stream, source = planned(*plan), CountingSource()
    memory = StreamMemory(stream, residents(source))
    slots = {s.id: s for s in stream.slots}
    roots = {i: slots[root_of(i, slots)] for i in slots}
    for slot in stream.slots:
        place, root = memory.slot(slot.id), memory.slot(roots[slot.id].id)
        assert place.offset + place.bytes <= len(place.buffer)
        assert (place.buffer.ctypes.data + place.offset) % 64 == 0
        assert place.buffer is root.buffer and place.offset == root.offset
    buffers = {id(p.buffer): p.buffer for p in map(memory.slot, slots)}
    rings = (memory.ring(b.name, b.device) for b in _ring(stream))
    buffers |= {id(p.buffer): p.buffer for p in rings}
    kept = [memory.block(b.name, b.device) for b in stream.blocks if b.home == "resident"]
    states = [memory.state(s.name, HOME[plan[0]]) for s in stream.states]
    whole = [Place(buffer, 0, len(buffer)) for buffer in buffers.values()]
    assert apart(spans([*whole, *states, *(p for p in kept if p is not None)]))
    inputs = {id(memory.slot(s.id).buffer) for s in stream.slots if s.input}
    assert inputs.isdisjoint(id(memory.slot(i).buffer) for i, s in slots.items() if not roots[i].input)


@settings(max_examples=40)
@given(plans)
def test_the_block_table(plan: tuple[str, frozenset[str], int]) -> None:
    """It holds the address of what is loaded: resident blocks at once, ring blocks between load and evict."""
    stream, source = planned(*plan), CountingSource()
    memory = StreamMemory(stream, residents(source))
    for block in stream.blocks:
        index, place = memory.block_of(block.name, block.device), memory.block(block.name, block.device)
        if block.home == "ring":
            assert place is None and memory.table[index] == 0
            place = memory.ring(block.name, block.device)
            memory.place(block, place)
        assert place is not None and place.bytes == block.bytes
        assert memory.table[index] == place.buffer.ctypes.data + place.offset
        if block.home == "resident":
            assert (host_view(place) == source.value(block.name)).all()
    memory.clear_ring()
    gone = [b for b in stream.blocks if memory.table[memory.block_of(b.name, b.device)] == 0]
    assert gone == _ring(stream)


@settings(max_examples=40)
@given(plans, st.sampled_from(SUBSETS))
def test_variants_share_what_outlives_a_step(
    plan: tuple[str, frozenset[str], int], other: frozenset[str]
) -> None:
    """Two programs over one `Residents`: a weight both keep is read once, a state has one memory, zero at
    first, and but for the arena, which they use in turns, nothing else is common."""
    name, disabled, room = plan
    source = CountingSource()
    shared = residents(source)
    first, second = (StreamMemory(planned(name, d, room), shared) for d in (disabled, other))
    keeping = [{(b.name, b.device) for b in m.stream.blocks if b.home == "resident"} for m in (first, second)]
    for block, on in keeping[0] & keeping[1]:
        one, two = first.block(block, on), second.block(block, on)
        assert one is not None and two is not None
        assert one.buffer is two.buffer and (one.offset, one.bytes) == (two.offset, two.bytes)
    assert source.reads == Counter(block for block, _ in keeping[0] | keeping[1])
    for state in first.stream.states:
        assert first.state(state.name, HOME[name]) is second.state(state.name, HOME[name])
        assert not host_view(first.state(state.name, HOME[name])).any()
    places = [{s: m.slot(s).buffer.ctypes.data for s in _roots(m)} for m in (first, second)]
    packed = [{s.id for s in m.stream.slots if s.offset is not None} for m in (first, second)]
    alone = [{at for s, at in p.items() if s not in q} for p, q in zip(places, packed, strict=True)]
    assert alone[0].isdisjoint(places[1].values()) and alone[1].isdisjoint(places[0].values())


def test_variants_take_turns_with_arena_and_ring() -> None:
    """Both use one piece of memory of the larger one's size, whichever comes first."""
    streams = [planned("one device", frozenset(), 12000)]
    wide = {d: 2 * n for d, n in streams[0].arenas}
    streams.append(replace(streams[0], arenas=tuple(wide.items())))
    assert streams[0].rings and streams[0].arenas
    plain = residents(CountingSource())
    shared = Residents(plain.devices, plain.source, plain.env, streams)
    memories = [StreamMemory(s, shared) for s in streams]
    inputs = sum(m.slot(s.id).bytes for m in memories for s in m.stream.slots if s.input)
    held = {owner: n for (_, owner), n in shared.held.items()}
    assert held["staging"] == sum(dict(streams[0].rings).values())
    assert held["activations"] == sum(wide.values()) + inputs


def test_devices_of_one_pool_have_one_copy_of_their_weights() -> None:
    """Both shards' rows overlap, so that the split may move; nothing of that takes memory twice."""
    stream = planned("two devices", frozenset(), 10**9)
    both = {b.name for b in stream.blocks if b.device == "cpu:0"} & {
        b.name for b in stream.blocks if b.device == "gpu:0"
    }
    assert both
    held = {}
    for pool in ("", "host"):
        source, backend = CountingSource(), ReferenceBackend()
        devices = {id: backend.open(replace(device(id), pool=pool)) for id in ("cpu:0", "gpu:0")}
        shared = Residents(devices, source, {"P": PAGES})
        memory = StreamMemory(stream, shared)
        held[pool] = sum(n for (_, owner), n in shared.held.items() if owner == "weights")
        for block in stream.blocks:
            place = memory.block(block.name, block.device)
            assert place is not None and (host_view(place) == source.value(block.name)).all()
        assert all(source.reads[name] == (1 if pool else 2) for name in both)
    assert held["host"] < held[""]


def _ring(stream: micro.Stream) -> list[micro.Block]:
    return [b for b in stream.blocks if b.home == "ring"]


def _roots(memory: StreamMemory) -> list[int]:
    return [s.id for s in memory.stream.slots if s.alias is None]


def test_words_hold_symbols_and_splits() -> None:
    """Each symbol and split has a word of its own, none is the abort word; known ones are filled in."""
    stream = STREAMS["two devices"]
    memory = StreamMemory(stream, residents(CountingSource()))
    names = [s.name for s in stream.symbols] + [s.name for s in stream.splits]
    words = [memory.word_of(name) for name in names]
    assert len(set(words)) == len(names) and 0 not in words
    assert memory.words[memory.word_of("P")] == PAGES
    assert not np.delete(memory.words, memory.word_of("P")).any()


def test_memory_of_another_device_has_no_host_view() -> None:
    with pytest.raises(DeviceError, match="isn't visible to the host"):
        host_view(Place(object(), 0, 8))
