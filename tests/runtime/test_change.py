"""When a plan is made anew: what lasts counts, what flickers doesn't, and never in a hurry twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from flashrt.machine import Device, Link, Machine, Measured
from flashrt.runtime.change import BACK_FOR, FLOOR, GONE_FOR, SHORT_FOR, Change, Judge, Picture, Taken

PERIOD = 0.2
GIB, MIB = 1 << 30, 1 << 20


def some(value: float) -> Measured:
    return Measured(value, "assumed")


def device(id: str, pool: str = "host", limit: int | None = None) -> Device:
    kind = id.partition(":")[0]
    return Device(id, kind, id, 16 * GIB, some(1e10), {}, some(1.0), pool=pool, limit=limit)


HOST = Machine((device("cpu:0-0", limit=6 * GIB), device("cpu:1-1", limit=2 * GIB), device("gpu:0", "")))
WHOLE = {"host": 4 * GIB, "gpu:0": 8 * GIB}
TAKEN = {"host": Taken(3 * GIB, 1 * GIB), "gpu:0": Taken(8 * GIB, 0)}


class Watched:
    """A judge, and the clock of its samples."""

    def __init__(
        self, machine: Machine = HOST, used: tuple[str, ...] = ("cpu:0-0", "cpu:1-1", "gpu:0")
    ) -> None:
        self.judge, self.now, self.changes = Judge(machine, used, WHOLE), 0.0, list[Change]()

    def see(
        self,
        samples: int = 1,
        gone: Mapping[str, str] | None = None,
        host: int | None = 8 * GIB,
        gpu: int = 2 * GIB,
        taken: Mapping[str, Taken] = TAKEN,
    ) -> list[Change]:
        """What these samples, all the same, ask for; each is done at once."""
        free = {"gpu:0": gpu} | ({} if host is None else {"host": host})
        asked = []
        for _ in range(samples):
            change = self.judge.look(Picture(self.now, gone or {}, free), taken)
            self.now += PERIOD
            if change is not None:
                asked.append(change)
                self.judge.settled(d.id for d in change.machine(HOST).devices)
        self.changes += asked
        return asked


# ---- devices ---------------------------------------------------------------------------
def test_a_device_that_is_missed_for_a_moment_is_there() -> None:
    watched = Watched()
    watched.see(5)
    for _ in range(20):
        assert watched.see(GONE_FOR - 1, {"gpu:0": "reset"}) == []
        assert watched.see(1) == []


def test_a_device_that_is_gone_is_planned_without() -> None:
    watched = Watched()
    watched.see(5)
    (change,) = watched.see(GONE_FOR + 5, {"gpu:0": "the driver no longer lists it"})
    assert change.because == "gpu:0 is gone: the driver no longer lists it"
    assert change.lost == {"gpu:0"} and not change.short
    assert [d.id for d in change.machine(HOST).devices] == ["cpu:0-0", "cpu:1-1"]


def test_a_device_that_was_never_listed_is_not_gone() -> None:
    """Where the system doesn't tell, a device that runs counts."""
    assert Watched().see(50, {"cpu:1-1": "not listed"}) == []


def test_a_device_that_the_plan_does_not_compute_on_may_go() -> None:
    watched = Watched(used=("cpu:0-0",))
    watched.see(5)
    assert watched.see(50, {"gpu:0": "gone"}) == []


def test_a_device_comes_back_when_it_stays() -> None:
    watched = Watched()
    watched.see(5)
    watched.see(5, {"gpu:0": "gone"})
    watched.now += 100
    assert watched.see(BACK_FOR - 1) == []
    (change,) = watched.see(1)
    assert change.because == "gpu:0 is back" and change.machine(HOST) == HOST


def test_one_that_failed_comes_back_only_when_it_was_seen_to_go() -> None:
    """The driver may go on listing a device on which every step fails."""
    watched = Watched()
    watched.see(5)
    change = watched.judge.failed("gpu:0", "it has fallen off the bus")
    assert change is not None and change.lost == {"gpu:0"}
    watched.judge.settled(("cpu:0-0", "cpu:1-1"))
    watched.now += 1000
    assert watched.see(200) == []
    watched.see(5, {"gpu:0": "gone"})
    assert [c.because for c in watched.see(BACK_FOR)] == ["gpu:0 is back"]


def test_the_last_device_is_not_left() -> None:
    judge = Judge(Machine((device("cpu:0-0"),)), ("cpu:0-0",), {})
    assert judge.failed("cpu:0-0", "too hot") is None
    assert judge.holding == "no device is left: cpu:0-0 fails: too hot"


def test_without_a_plan_it_is_tried_again_ever_more_rarely() -> None:
    watched = Watched()
    watched.see(5)
    tries = []
    for _ in range(20_000):
        picture = Picture(watched.now, {"gpu:0": "gone"}, {})
        if watched.judge.look(picture, {}) is not None:
            tries.append(watched.now)
            watched.judge.given_up()
        watched.now += PERIOD
    apart = [b - a for a, b in itertools.pairwise(tries)]
    assert 60 <= apart[0] < 61 and all(b > 1.9 * a for a, b in itertools.pairwise(apart[:4]))
    assert watched.judge.holding


# ---- memory ----------------------------------------------------------------------------
def test_memory_that_is_short_for_a_while() -> None:
    """What is left then is what was left at worst, without what others need."""
    watched = Watched()
    watched.see(20)
    assert watched.see(SHORT_FOR - 1, host=600 * MIB) == []
    assert watched.see(1) == [] and watched.see(SHORT_FOR - 1, host=600 * MIB) == []
    (change,) = watched.see(1, host=500 * MIB)
    assert change.short and not change.lost
    assert change.caps == {"host": 3 * GIB + 500 * MIB - FLOOR}
    assert change.because == "host has 3.61 GB left for the plan, which takes 4.29 GB"
    left = change.machine(HOST)
    near, far, gpu = left.devices
    assert near.budget + far.budget <= change.caps["host"] and near.budget == 3 * far.budget
    assert gpu == HOST.devices[2]


def test_a_plan_for_little_less_is_not_worth_it() -> None:
    watched = Watched()
    nearly = {"host": Taken(3 * GIB, 1 * GIB)}
    assert watched.see(100, host=1 * GIB + FLOOR - 10 * MIB, taken=nearly) == []
    assert "no plan takes 10.5 MB less" in watched.judge.holding


def test_memory_comes_back() -> None:
    watched = Watched()
    watched.see(SHORT_FOR, host=500 * MIB)
    capped = {"host": Taken(3 * GIB, 0)}
    watched.now += 200
    assert watched.see(3 * BACK_FOR, host=1 * GIB, taken=capped) == []
    assert watched.see(BACK_FOR - 1, taken=capped) == []
    (change,) = watched.see(1, taken=capped)
    assert not change.caps and not change.short and change.machine(HOST) == HOST


def test_memory_that_nobody_knows_of_is_not_short() -> None:
    assert Watched().see(50, host=None) == []


@pytest.mark.parametrize(
    ("free", "plans"),
    [(600 * MIB, 1), (1 * GIB, 1), (1 * GIB + FLOOR + 100 * MIB, 0), (2 * GIB, 0)],
)
def test_a_storm(free: int, plans: int) -> None:
    """A neighbour takes and gives back 256 MiB every 150 ms, for ten minutes: a plan is made where memory is
    short at any moment of it, and then one for the worst of them."""
    watched, dice = Watched(), random.Random(free)
    taken = dict(TAKEN)
    for n in range(3000):
        storm = 256 * MIB * (int(n * PERIOD / 0.15) % 2)
        for change in watched.see(1, host=free - storm - dice.randrange(MIB), taken=taken):
            taken["host"] = Taken(min(3 * GIB, change.caps["host"]), 0)
    assert len(watched.changes) == plans
    assert watched.judge.holding == ""


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_plans_keep_their_distance(seed: int) -> None:
    """Random weather for an hour: the more plans, the rarer; a device that has gone is the exception."""
    watched, dice = Watched(), random.Random(seed)
    watched.see(5)
    times: list[float] = []
    while watched.now < 3600:
        gone = {"gpu:0": "gone"} if dice.random() < 0.3 else {}
        host = dice.choice((400 * MIB, 900 * MIB, 8 * GIB))
        for change in watched.see(dice.randrange(1, 60), gone, host):
            if not change.lost:
                times.append(watched.now)
    apart = [b - a for a, b in itertools.pairwise(times)]
    assert all(gap >= 59 for gap in apart) and len(watched.changes) <= 20


# ---- what is left ----------------------------------------------------------------------
def test_what_a_lost_device_was_allowed_passes_to_its_neighbours() -> None:
    change = Change("", {"cpu:1-1": "gone"}, frozenset({"cpu:1-1"}), {}, False)
    near, gpu = change.machine(HOST).devices
    assert near.budget == 8 * GIB and gpu.limit is None


def test_links_of_a_lost_device_go_with_it() -> None:
    links = (Link("cpu:0-0", "gpu:0", some(1), some(1)), Link("cpu:0-0", "cpu:1-1", some(1), some(1)))
    change = Change("", {"gpu:0": "gone"}, frozenset(), {}, False)
    assert change.machine(replace(HOST, links=links)).links == links[1:]
