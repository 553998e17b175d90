"""A lane of copies to the device: the next one is under way before the one in front of it is through.

The host waits for what a copy needs; that it is through is told by the device itself, which writes the tick
that others wait for. So the link goes on while threads of Python sleep.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from flashrt.backend import I64, Memory, Move, Place, Rect, until_reached
from flashrt.backends.cuda.driver import Driver


class Moves:
    """What `CudaDevice.moves` makes. stamps: [moves, 3] ns: arrived, started, ended."""

    def __init__(self, moves: Sequence[Move], memory: Memory, device: str, driver: Driver) -> None:
        self._moves, self._memory, self._device = tuple(moves), memory, device
        self._copies = driver.copier(len(moves))
        self.stamps: I64 = np.zeros((len(moves), 3), np.int64)
        self._pairs = [tuple(side_by_side(m.pieces, m.to)) if m.to else () for m in moves]

    def run(self, epoch: int) -> None:
        """Waits, copies, signals; returns when all is through. Raises DeviceError when it is interrupted."""
        first, told = int(self._memory.ticks.ctypes.data), f"{self._device}: interrupted in step {epoch}"
        self._copies.begin()
        try:
            for at, (move, pairs) in enumerate(zip(self._moves, self._pairs, strict=True)):
                self.stamps[at, 0] = time.perf_counter_ns()
                for wait in move.waits:
                    until_reached(self._memory, wait, epoch, told)
                self.stamps[at, 1:] = time.perf_counter_ns()
                if pairs:
                    self._copies.copy(pairs, at)
                if move.signals is not None:
                    self._copies.signal(first + 8 * move.signals, epoch)
        finally:
            ended = self._copies.wait()
        before = 0
        for at, (arrived, started, over) in enumerate(self.stamps.tolist()):
            # the lane comes to a copy when the one in front of it is through
            arrived = max(arrived, before)
            started = max(started, arrived)
            before = max(ended.get(at, over), started)
            self.stamps[at] = arrived, started, before


def side_by_side(pieces: Sequence[Place], to: Place) -> Iterator[tuple[Rect, Rect]]:
    """Each piece, and where it goes."""
    ends = accumulate((piece.bytes for piece in pieces), initial=to.offset)
    for at, piece in zip(ends, pieces, strict=False):
        yield line(piece), line(Place(to.buffer, at, piece.bytes))


def line(place: Place, nbytes: int | None = None) -> Rect:
    """The first bytes of a place, None for all, as one row."""
    count = place.bytes if nbytes is None else nbytes
    return Rect(place, 0, 1, count, count)
