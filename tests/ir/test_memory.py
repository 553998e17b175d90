"""The scan for unordered accesses finds what the plain formulation of it finds, in near-linear time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hypothesis import given, settings

from flashrt.ir import micro
from flashrt.ir.memory import (
    Hazard,
    MemoryMap,
    Owner,
    Use,
    conflict,
    hazards,
    output_slots,
    supersedes,
    timed_uses,
)
from flashrt.ir.order import Access, HappensBefore
from flashrt.ir.types import Dim
from flashrt.passes.pack import pack
from tests.ir.streams import streamed
from tests.ir.test_laws import packed_streams


@dataclass
class Piece:
    """Everything that later accesses of a piece are compared with, one by one."""

    writes: dict[Use, tuple[int, int]] = field(default_factory=dict)
    reads: dict[tuple[Use, int], tuple[int, int]] = field(default_factory=dict)
    owner: Owner = ()
    spans: dict[tuple[Dim, tuple[Dim, Dim]], None] = field(default_factory=dict)


def one_by_one(memory: MemoryMap) -> Iterator[Hazard]:
    """The definition: each access against each earlier one that nothing later stands for."""
    stream, known = memory.stream, memory.bounds
    order = HappensBefore(stream)
    pieces: dict[int, Piece] = defaultdict(Piece)
    inputs = [memory.use(Access("slot", s.device, s.id)) for s in stream.slots if s.input]
    outputs = [memory.use(Access("slot", "", slot)) for slot in output_slots(stream)]

    def against(kind, earlier, step, i, use):  # type: ignore[no-untyped-def]
        for old, (old_step, first) in earlier:
            steps = step - old_step
            same = first == i and steps == 0
            if not same and conflict(old, use, known) and not order.before(first, i, steps):
                yield Hazard(kind, first, i, steps, use.owner)

    def forget(piece: Piece, use: Use) -> None:
        piece.writes = {w: at for w, at in piece.writes.items() if not supersedes(use, w, known)}
        piece.reads = {r: at for r, at in piece.reads.items() if not supersedes(use, r[0], known)}
        if piece.owner != use.owner:
            piece.owner, piece.spans = use.owner, {}
        if use.span is not None:
            piece.spans[use.axis, use.span] = None
            if known.covered((0, use.axis), [span for axis, span in piece.spans if axis == use.axis]):
                piece.writes = {w: at for w, at in piece.writes.items() if w.owner == use.owner}
                piece.reads = {r: at for r, at in piece.reads.items() if r[0].owner == use.owner}

    for step in (0, 1):
        everything = [(order.host, [], inputs), *((i, r, w) for i, (r, w) in enumerate(timed_uses(memory)))]
        for i, reads, writes in everything:
            found: list[Hazard] = []
            for use in reads:
                for piece in (pieces[number] for number in use.pieces):
                    found += against("read-after-write", piece.writes.items(), step, i, use)
                    piece.reads[use, order.lane(i)] = (step, i)
            for use in writes:
                for piece in (pieces[number] for number in use.pieces):
                    found += against("write-after-write", piece.writes.items(), step, i, use)
                    earlier = [(old, at) for (old, _), at in piece.reads.items()]
                    found += against("write-after-read", earlier, step, i, use)
                    forget(piece, use)
                    piece.writes[use] = (step, i)
            yield from (h for h in found if h.steps == step)
        for use in outputs if step == 0 else ():
            for number in use.pieces:
                yield from against("read-after-write", pieces[number].writes.items(), 1, order.host, use)


@given(packed_streams())
@settings(max_examples=400)
def test_the_same_hazards_as_one_by_one(stream: micro.Stream) -> None:
    assert set(hazards(MemoryMap(stream))) == set(one_by_one(MemoryMap(stream)))


def seconds(layers: int) -> float:
    """Of scanning a stream whose second device writes only parts of its slots, which share their memory."""
    memory = MemoryMap(pack(replace(streamed(layers), arenas=())))
    assert len(memory.uses) == 8 * layers
    start = time.process_time()
    assert not list(hazards(memory))
    return time.process_time() - start


def test_time_grows_with_the_stream() -> None:
    """Four times the layers take less than eight times as long (16 times, one by one)."""
    short, long = (min(seconds(layers) for _ in range(4)) for layers in (100, 400))
    assert long < 8 * short
