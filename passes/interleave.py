"""Which of units that are alike compute, and for which weights pass through a ring meanwhile.

The planner says how many units of a kind do which; how well copies and computing take turns is a matter of
their order. A unit whose weights pass begins when they have arrived; they leave the ring when it ends, and
the next ones arrive beside them as far as there is room.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from flashrt.backend import I64

SWAPS = 40  # at most
GAIN = 1e-3  # of the time, that a swap has to save


@dataclass(frozen=True, slots=True)
class Load:
    """What a unit takes: microseconds of computing, and bytes that pass for it."""

    cost: float
    nbytes: int = 0


def interleave(kinds: Sequence[Hashable], loads: Sequence[Load], each: float, ring: int) -> list[int]:
    """For each place the index of the load that comes there: one of a unit of the same kind.

    kinds: of the units, in the order of the step. each: microseconds of copying a byte. ring: bytes.
    The best swap of two is made, again and again.
    """
    order = np.arange(len(loads))
    best = float(step_times(loads, order[None], each, ring)[0])
    for _ in range(SWAPS):
        pairs = [
            (i, j)
            for i, j in combinations(range(len(loads)), 2)
            if kinds[i] == kinds[j] and loads[order[i]] != loads[order[j]]
        ]
        if not pairs:
            break
        tried = np.repeat(order[None], len(pairs), axis=0)
        rows, (left, right) = np.arange(len(pairs)), np.array(pairs).T
        tried[rows, left], tried[rows, right] = order[right], order[left]
        times = step_times(loads, tried, each, ring)
        if (took := float(times.min())) >= best * (1 - GAIN):
            break
        best, order = took, tried[int(times.argmin())]
    return [int(at) for at in order]


def step_times(loads: Sequence[Load], orders: I64, each: float, ring: int) -> NDArray[np.float64]:
    """Microseconds of a step with each of some orders, [orders, units]; its last units compute while the next
    one's first weights arrive."""
    costs = np.array([load.cost for load in loads])[orders].T
    sizes = np.array([load.nbytes for load in loads], np.float64)[orders].T
    now, copied, used, before, began = np.zeros((5, len(orders)))
    for _ in range(2):
        began = now
        for cost, nbytes in zip(costs, sizes, strict=True):
            passes = nbytes > 0
            # behind the copies before, and what has no room beside those when they have been used
            rest = np.maximum(0, nbytes + before - ring)
            copied = np.where(passes, np.maximum(copied + nbytes * each, used + rest * each), copied)
            now = np.where(passes, np.maximum(now, copied), now) + cost
            used = np.where(passes, now, used)
            before = np.where(passes, nbytes, before)
    return now - began
