"""Requests in work move to a cache of another size, or to an empty one."""

from __future__ import annotations

import numpy as np
import pytest

from flashrt.errors import DeviceError
from flashrt.llm.generate import Generator
from flashrt.llm.kv import PagePool, pages_for
from flashrt.llm.request import Request, Sampling, Sequence
from flashrt.llm.scheduler import Scheduler
from tests.llm.fake_model import fake

PAGES = 12


def running(*known: int, pages: int = PAGES) -> Scheduler:
    """Sequences s0, s1, … that have their prompts of so many tokens in the cache."""
    scheduler = Scheduler(1024, 8, PagePool(pages))
    for n, length in enumerate(known):
        scheduler.admit(Sequence(Request(f"s{n}", (1,) * length, Sampling(max_tokens=8)), 1024))
    step = scheduler.next_step()
    assert step is not None
    scheduler.complete(step)
    return scheduler


def tables(scheduler: Scheduler) -> dict[str, tuple[int, ...]]:
    return {s.id: s.table.pages for s in scheduler.running}


def rests(scheduler: Scheduler) -> bool:
    """Whether the pool knows of exactly the pages that sequences hold."""
    held = [page for pages in tables(scheduler).values() for page in pages]
    pool = scheduler.pool
    return len(set(held)) == len(held) == pool.used and pool.free + pool.used == pool.total


def test_pages_that_stay_in_range_stay() -> None:
    scheduler = running(20, 40)
    before = tables(scheduler)
    moved = scheduler.resettle(30)
    assert all(a == b for a, b in moved.items()) and tables(scheduler) == before
    assert scheduler.pool.total == 30 and rests(scheduler)


def test_pages_out_of_range_move_down() -> None:
    scheduler = running(40, 40, 40)
    scheduler.retire(scheduler.running[0])  # leaves a gap
    before = tables(scheduler)
    moved = scheduler.resettle(scheduler.pool.used)
    assert sorted(moved.values()) == list(range(scheduler.pool.total))
    assert tables(scheduler) == {id: tuple(moved[p] for p in pages) for id, pages in before.items()}
    assert rests(scheduler) and scheduler.pool.free == 0


def test_the_youngest_give_way() -> None:
    scheduler = running(40, 40, 40)
    per = pages_for(40)
    moved = scheduler.resettle(2 * per)
    assert list(tables(scheduler)) == ["s0", "s1"] and len(moved) == 2 * per
    assert [s.id for s in scheduler.waiting] == ["s2"] and scheduler.waiting[0].computed == 0
    assert rests(scheduler)


def test_what_is_in_work_could_be_finished() -> None:
    scheduler = running(40, 90)
    assert scheduler.least_pages == pages_for(90 + 8 - 1)
    with pytest.raises(AssertionError):
        scheduler.resettle(scheduler.least_pages - 1)
    assert Scheduler(8, 1, PagePool(4)).least_pages == 1


def test_all_are_computed_again_in_their_order() -> None:
    scheduler = running(20, 40, 30)
    scheduler.restart()
    assert not scheduler.running and [s.id for s in scheduler.waiting] == ["s0", "s1", "s2"]
    assert scheduler.pool.free == PAGES and rests(scheduler)
    step = scheduler.next_step()
    assert step is not None and step.requests == ("s0", "s1", "s2")


class Keeper:
    """Counts, and says whether a failed step may be tried again."""

    def __init__(self, again: bool) -> None:
        self.again, self.turns, self.errors = again, 0, list[DeviceError]()

    def turn(self) -> None:
        self.turns += 1

    def failed(self, error: DeviceError) -> bool:
        self.errors.append(error)
        return self.again


@pytest.mark.parametrize("again", [True, False])
def test_the_keeper_is_asked_before_each_step_and_after_one_that_failed(again: bool) -> None:
    model, keeper, failures = fake(128, 8, 16, 4), Keeper(again), iter([False, True])

    def call(*given: object) -> dict[str, np.ndarray]:
        if next(failures, False):
            raise DeviceError("lost")
        return model(*given)  # type: ignore[arg-type, no-any-return]

    generator = Generator(
        call,
        context=128,
        eos=(),
        pages=8,
        max_tokens_per_step=16,
        max_sequences=4,  # type: ignore[arg-type]
    )
    generator.keeper = keeper
    generator.add(Request("a", (1, 2, 3), Sampling(max_tokens=4)))
    if again:
        assert len(generator.run()[0].tokens) == 4
        assert keeper.turns == 5 and len(keeper.errors) == 1
        return
    generator.step()
    with pytest.raises(DeviceError, match="lost"):
        generator.step()
    assert keeper.turns == 2
