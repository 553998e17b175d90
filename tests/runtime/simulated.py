"""Two devices that exist only as arithmetic: what their steps take, and what a sampler would see of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flashrt.ir import text
from flashrt.passes.elide import elide
from flashrt.passes.lower import lower
from flashrt.passes.overlap import overlap
from flashrt.runtime.control import Controller, Ran
from flashrt.runtime.elastic import Elastic, Positions, elastic
from flashrt.runtime.idle import Rests

PERIOD = 0.2
HOME, FAR = "reference:0", "reference:1"
SPLIT = Path(__file__).parents[1] / "spine" / "split.physical"


def split_elastic() -> Elastic:
    """The tiny model over two devices, its mlps and its head split."""
    stream = lower(text.read_physical(SPLIT.read_text(), path=str(SPLIT)))
    stream = elide(overlap(stream), resident_bytes={HOME: 1 << 30, FAR: 1 << 30})
    found = elastic(stream, Rests(stream))
    assert found is not None
    return found


@dataclass(slots=True)
class Twins:
    """The machine under a loop. hogs: programs on each device's core. slow: its instructions' slowness.

    scale: real seconds by predicted ones. exchange: seconds that a step of both devices takes besides.
    penalty: position-dependent extra factor. blind: the load on cores can't be seen.
    """

    elastic: Elastic
    controller: Controller = field(init=False)
    hogs: dict[str, float] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    scale: float = 20.0
    exchange: float = 0.0
    noise: float = 0.03
    blind: bool = False
    penalty: Callable[[Positions], float] = lambda at: 1.0
    now: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(7))
    done: list[tuple[float, float]] = field(default_factory=list)  # (time, steps a second)

    def __post_init__(self) -> None:
        self.controller = Controller({"v": self.elastic})

    @property
    def at(self) -> Positions:
        return self.controller.positions["v"]

    def step(self, at: Positions) -> float:
        """Seconds of a step with the splits there: a device that shares its core stops everyone."""
        live = self.elastic.live(at)
        share = math.prod(1 / (1 + self.hogs.get(d, 0.0)) for d in live)
        together = self.exchange if len(live) > 1 else 0.0
        return (
            (self.elastic.step({**HINTS, **at}, at, self.slow) * self.scale + together)
            * self.penalty(at)
            / share
        )

    def best(self) -> float:
        """Steps a second at the best of all positions that move together."""
        ends = self.elastic.ends
        return 1 / min(
            self.step(at) for at in (*ends, self.elastic.start, self.elastic.best(HINTS, self.slow))
        )

    def foreign(self) -> Mapping[str, float | None]:
        live, seen = self.elastic.live(self.at), {}
        for d in (HOME, FAR):
            n = self.hogs.get(d, 0.0)
            seen[d] = None if self.blind else n / (1 + n) if d in live else min(1.0, n)
        return seen

    def sample(self) -> None:
        """One period of steps, then one decision."""
        self.now += PERIOD
        seconds = self.step(self.at) * self.random.uniform(1, 1 + self.noise)
        expected = self.elastic.busy(HINTS, self.at)
        busy = {
            d: s * self.scale * self.slow.get(d, 1.0) * (1 + self.hogs.get(d, 0.0) * self.random.random())
            for d, s in expected.items()
            if d in self.elastic.live(self.at)
        }
        self.done.append((self.now, 1 / seconds))
        self.controller.decide(
            self.now, self.foreign(), {"v": Ran(HINTS, round(PERIOD / seconds), seconds, busy)}
        )

    def run(self, seconds: float) -> float:
        """Steps a second over that time."""
        first = len(self.done)
        for _ in range(round(seconds / PERIOD)):
            self.sample()
        rates = [rate for _, rate in self.done[first:]]
        return sum(rates) / len(rates)


HINTS: dict[str, int] = {"T": 1, "N": 1, "S": 1, "M": 1, "C": 64, "P": 64, "H": 1}
