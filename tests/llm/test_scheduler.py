"""What goes into a step: decodes first, prompts in chunks, within budgets of tokens, places and pages."""

from __future__ import annotations

import pytest

from flashrt.errors import KnobError
from flashrt.ir.ops import PAGE
from flashrt.llm.kv import PagePool
from flashrt.llm.request import Request, Sampling, Sequence
from flashrt.llm.scheduler import Scheduler, Step, history_size


def sequence(id: str, prompt: int, max_tokens: int = 100, context: int = 4096, **sampling: float) -> Sequence:
    """A sequence whose prompt is 100, 101, …"""
    how = Sampling(max_tokens=max_tokens, seed=7, **sampling)  # type: ignore[arg-type]
    return Sequence(Request(id, tuple(range(100, 100 + prompt)), how), context)


def take_step(scheduler: Scheduler, token: int = 1) -> Step:
    """The next step, run by a model that always draws `token`."""
    step = scheduler.next_step()
    assert step is not None
    for drawing in scheduler.complete(step):
        drawing.append(token)
        if drawing.finish:
            scheduler.retire(drawing)
    return step


def test_prompt_in_chunks_beside_a_decode() -> None:
    """The running text goes on while a long prompt fills what its token leaves of the budget."""
    scheduler = Scheduler(8, 4, PagePool(64))
    scheduler.admit(sequence("a", 3))
    assert take_step(scheduler).one_line() == "a[0:3]+"
    scheduler.admit(sequence("b", 17))
    scheduler.admit(sequence("c", 2))
    lines = [take_step(scheduler).one_line() for _ in range(4)]
    assert lines == ["a[3]+ b[0:7]", "a[4]+ b[7:14]", "a[5]+ b[14:17]+ c[0:2]+", "a[6]+ b[17]+ c[2]+"]


def test_inputs() -> None:
    """Arrays of a step with a decode that has a penalty, a finished prompt and an unfinished one."""
    scheduler = Scheduler(24, 4, PagePool(64))
    scheduler.admit(sequence("a", 18, penalty=1.5, temperature=0.5))
    take_step(scheduler, token=9)
    scheduler.admit(sequence("b", 3, top_k=5, top_p=0.5, min_p=0.25))
    scheduler.admit(sequence("c", 40))
    step = scheduler.next_step()
    assert step is not None
    assert step.requests == ("a", "b", "c")
    got = {name: array.tolist() for name, array in step.inputs().items()}
    assert got.pop("ids") == [9, 100, 101, 102, *range(100, 120)]
    assert got.pop("positions") == [18, 0, 1, 2, *range(20)]
    assert got.pop("seq") == [0, 1, 1, 1, *[2] * 20]
    assert got.pop("rows") == [0, 3]
    assert got.pop("history") == [[*range(100, 118), 9, *[-1] * 13], [-1] * 32]
    a, b, c = (s.table.pages for s in scheduler.running)
    assert got.pop("pages") == [list(a), [*b, 0], list(c[:2])]
    assert got == {
        "temperature": [0.5, 0.0],
        "top_k": [0, 5],
        "top_p": [1.0, 0.5],
        "min_p": [0.0, 0.25],
        "penalty": [1.5, 1.0],
        "seed": [7, 7],
        "draw": [19, 3],
    }
    assert step.symbols() == {"T": 24, "N": 2, "S": 3, "M": 2, "C": 20, "H": 32}


def test_a_chunk_alone_has_a_row_nobody_reads() -> None:
    scheduler = Scheduler(4, 4, PagePool(64))
    scheduler.admit(sequence("a", 9, penalty=2.0))
    step = scheduler.next_step()
    assert step is not None
    inputs = step.inputs()
    assert step.drawing == ()
    assert (step.symbols()["N"], step.symbols()["H"]) == (1, 1)
    got = [inputs[name].tolist() for name in ("rows", "history", "penalty")]
    assert got == [[3], [[-1]], [1]]
    assert scheduler.complete(step) == ()


def test_more_decodes_than_the_budget() -> None:
    """The oldest go first, and the rest follow."""
    scheduler = Scheduler(2, 4, PagePool(64))
    for id in "abc":
        scheduler.admit(sequence(id, 1, max_tokens=2))
    lines = [take_step(scheduler).one_line() for _ in range(3)]
    assert lines == ["a[0]+ b[0]+", "a[1]+ b[1]+", "c[0]+"]


def test_places_are_given_in_order() -> None:
    scheduler = Scheduler(8, 1, PagePool(64))
    for id in "ab":
        scheduler.admit(sequence(id, 1, max_tokens=2))
    assert [take_step(scheduler).requests for _ in range(4)] == [("a",), ("a",), ("b",), ("b",)]
    assert scheduler.idle
    assert scheduler.next_step() is None


def test_admission_waits_for_pages() -> None:
    """A prompt starts when all its pages are free, and one to spare for each that runs."""
    pool = PagePool(4)
    scheduler = Scheduler(64, 4, pool)
    first = sequence("a", PAGE, max_tokens=3)
    scheduler.admit(first)
    scheduler.admit(sequence("b", 2 * PAGE, max_tokens=1))
    scheduler.admit(sequence("c", 1, max_tokens=1))
    assert take_step(scheduler).requests == ("a", "b")
    assert (pool.used, len(scheduler.waiting)) == (1, 1)  # b is done; c is not in yet
    assert take_step(scheduler).requests == ("a", "c")
    scheduler.retire(first)
    assert pool.free == 4


def test_the_youngest_gives_way() -> None:
    """When the pool is empty the youngest is computed anew later, output included, before any newcomer."""
    pool = PagePool(3)
    scheduler = Scheduler(64, 2, pool)
    a, b, c = sequence("a", 3, context=48), sequence("b", PAGE - 1, context=48), sequence("c", 1, context=48)
    for each in (a, b, c):
        scheduler.admit(each)
    while a.known <= PAGE:
        assert take_step(scheduler).requests == ("a", "b")
    assert (len(a.table.pages), len(b.table.pages), pool.free) == (1, 2, 0)
    known = b.known
    while a.finish is None:
        assert take_step(scheduler).requests == ("a",)
        assert (b.computed, b.table.pages, list(scheduler.waiting)) == (0, (), [b, c])
    assert take_step(scheduler).one_line() == f"b[0:{known}]+"
    assert (a.preempted, b.preempted) == (0, 1)


def test_a_sequence_may_throw_out_itself() -> None:
    """The one that lacks a page is the youngest: it waits, the older one goes on."""
    pool = PagePool(4)
    scheduler = Scheduler(64, 4, pool)
    a, b = sequence("a", PAGE + 1, context=64), sequence("b", PAGE, context=64)
    scheduler.admit(a)
    take_step(scheduler)
    scheduler.admit(b)
    take_step(scheduler)
    pool.take(pool.free)
    assert take_step(scheduler).requests == ("a",)
    assert (a.preempted, b.preempted) == (0, 1)
    assert scheduler.waiting[0] is b


@pytest.mark.parametrize("waiting", [False, True])
def test_retire_frees_pages(waiting: bool) -> None:
    pool = PagePool(8)
    scheduler = Scheduler(8, 1, pool)
    a, b = sequence("a", 20), sequence("b", 20)
    scheduler.admit(a)
    scheduler.admit(b)
    take_step(scheduler)
    scheduler.retire(b if waiting else a)
    scheduler.retire(a if waiting else b)
    assert scheduler.idle
    assert pool.free == 8


@pytest.mark.parametrize(("tokens", "size"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_history_size(tokens: int, size: int) -> None:
    assert history_size(tokens) == size


@pytest.mark.parametrize("limits", [(0, 1), (1, 0)])
def test_limits_below_one(limits: tuple[int, int]) -> None:
    with pytest.raises(KnobError, match="=0"):
        Scheduler(*limits, PagePool(1))
