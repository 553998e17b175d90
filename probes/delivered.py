"""What devices really deliver, learned from how long their instructions took.

Bytes, flop and seconds are summed with exponential ageing, so that a rate follows the last seconds and
a burst of tiny instructions weighs no more than the time it took.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

HALF_LIFE = 1.0  # seconds after which an observation counts half
FORGOTTEN = 1e-6  # seconds of observed time, aged, below which a device isn't known any more


@dataclass(frozen=True, slots=True)
class Delivered:
    """read: bytes per second; flops: flop per second; both over the time instructions ran.

    seconds: of observed time, aged: how much the figures rest on. age: seconds since the last one.
    """

    read: float
    flops: float
    seconds: float
    age: float


@dataclass(slots=True)
class _Sums:
    bytes: float
    flop: float
    seconds: float
    at: float  # the moment the sums are aged to
    last: float  # the moment of the last observation

    def aged(self, now: float, half_life: float) -> _Sums:
        weight = 0.5 ** (max(0.0, now - self.at) / half_life)
        return _Sums(self.bytes * weight, self.flop * weight, self.seconds * weight, now, self.last)


class Learner:
    """One estimate a device. `observe` may be called from any thread.

    clock: seconds, never going back.
    """

    def __init__(self, half_life: float = HALF_LIFE, clock: Callable[[], float] = time.monotonic) -> None:
        self._half_life, self._clock = half_life, clock
        self._sums: dict[str, _Sums] = {}
        self._lock = threading.Lock()

    def observe(self, device: str, bytes: float, flop: float, seconds: float) -> bool:
        """One instruction, or the sums of several: what it moved and computed, and how long it ran.

        False for what can't be (no time, less than nothing, not finite): it is left out.
        """
        if not (seconds > 0 and bytes >= 0 and flop >= 0 and math.isfinite(seconds + bytes + flop)):
            return False
        now = self._clock()
        with self._lock:
            sums = self._sums.get(device, _Sums(0.0, 0.0, 0.0, now, now)).aged(now, self._half_life)
            sums.bytes += bytes
            sums.flop += flop
            sums.seconds += seconds
            sums.last = now
            self._sums[device] = sums
        return True

    def rates(self) -> Mapping[str, Delivered]:
        """What is known now, by device; a device that ran nothing for long isn't in it."""
        now = self._clock()
        with self._lock:
            aged = {id: sums.aged(now, self._half_life) for id, sums in self._sums.items()}
            self._sums = {id: sums for id, sums in aged.items() if sums.seconds > FORGOTTEN}
            known = dict(self._sums)
        return MappingProxyType(
            {
                id: Delivered(s.bytes / s.seconds, s.flop / s.seconds, s.seconds, max(0.0, now - s.last))
                for id, s in known.items()
            }
        )
