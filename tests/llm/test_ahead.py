"""A step that begins before the tokens of the one in front are known changes no token, and costs no page."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt.errors import DeviceError
from flashrt.ir.ops import PAGE
from flashrt.llm.generate import Completion, Generator
from flashrt.llm.request import Request, Sampling
from tests.llm.fake_model import FakeModel, expected, fake
from tests.llm.test_generate import ARRIVALS, CONTEXT, EOS, PROMPT, at_rest, plain, run_step


@dataclass(eq=False)
class Later:
    """A step of `LateModel`."""

    model: LateModel
    given: tuple[Any, Any, Any]
    fed: Mapping[str, str]
    number: int
    found: dict[str, Any] | None = None
    lost: bool = False

    @property
    def ahead(self) -> bool:
        return self.found is None and self.model.goes_ahead()

    def result(self) -> dict[str, Any]:
        self.model.run(self)
        if self.found is None:
            raise DeviceError("given up")
        return self.found


@dataclass
class LateModel:
    """A fake model in two halves. Steps run as late as they may, in order: when a result is asked for, or the
    next but one begins. fails: numbers of steps that fail, with all that are under way.

    fed: steps that began ahead.
    """

    model: FakeModel
    goes_ahead: Callable[[], bool] = lambda: True
    fails: frozenset[int] = frozenset()
    steps: deque[Later] = field(default_factory=deque)
    begun: int = 0
    fed: int = 0
    tokens: Any = None

    def begin(self, inputs: Any, symbols: Any, outputs: Any, fed: Mapping[str, str]) -> Later:
        while len(self.steps) > 1:
            self.run(self.steps[0])
        self.begun, self.fed = self.begun + 1, self.fed + bool(fed)
        self.steps.append(Later(self, (inputs, symbols, outputs), fed, self.begun))
        return self.steps[-1]

    def run(self, step: Later) -> None:
        while step.found is None and step in self.steps:
            first = self.steps.popleft()
            if first.number in self.fails:
                self.steps.clear()
                raise DeviceError("lost")
            inputs, symbols, outputs = first.given
            if first.fed:
                assert first.fed == {"ids": "tokens"} and self.tokens.shape == inputs["ids"].shape
                inputs = {**inputs, "ids": self.tokens}
            first.found = self.model(inputs, symbols, outputs)
            self.tokens = first.found["tokens"]


def never(*_: Any) -> Any:
    raise AssertionError("steps are begun")


def generator(
    model: LateModel, pages: int = 64, tokens: int = 32, sequences: int = 8, **more: Any
) -> Generator:
    limits = {"pages": pages, "max_tokens_per_step": tokens, "max_sequences": sequences}
    return Generator(never, begin=model.begin, **{"context": CONTEXT, "eos": EOS, **limits, **more})


@given(
    arrivals=ARRIVALS,
    pages=st.integers(3, 9),
    tokens=st.integers(1, 24),
    sequences=st.integers(1, 5),
    fails=st.frozensets(st.integers(1, 40), max_size=3),
    ahead=st.lists(st.booleans(), max_size=30),
)
def test_same_tokens_in_any_company(
    arrivals: list[Any], pages: int, tokens: int, sequences: int, fails: frozenset[int], ahead: list[bool]
) -> None:
    """Random arrivals, cancels, pools, budgets, failures, and turns without a step ahead."""
    choices = iter(ahead)
    model = LateModel(fake(CONTEXT, pages, tokens, sequences), lambda: next(choices, True), fails)
    engine = generator(model, pages, tokens, sequences)
    cancels: dict[str, int] = {}
    done: dict[str, Completion] = {}
    drawn: dict[str, list[int]] = {}

    def turn() -> None:
        try:
            run_step(engine, cancels, done, drawn)
        except DeviceError as error:
            assert error.what == "lost"

    for n, (prompt, how, steps, cancel_after) in enumerate(arrivals):
        engine.add(Request(str(n), prompt, how))
        drawn[str(n)] = []
        if cancel_after is not None:
            cancels[str(n)] = cancel_after
        for _ in range(steps):
            turn()
    while not engine.idle:
        turn()
    at_rest(engine)
    for n, (prompt, how, _, _) in enumerate(arrivals):
        got, (want, finish) = done[str(n)], expected(prompt, how, EOS, min(CONTEXT, pages * PAGE))
        assert list(got.tokens) == drawn[str(n)]
        if got.finish_reason == "cancelled":
            assert got.tokens == want[: len(got.tokens)]
        else:
            assert (got.tokens, got.finish_reason) == (want, finish)


STOPS = st.lists(st.text("abc", min_size=1, max_size=2), max_size=3).map(tuple)
TEXTS = st.lists(st.tuples(PROMPT, STOPS, st.sampled_from([0.0, 0.7]), st.integers(1, 40)), max_size=6)


@given(texts=TEXTS, pages=st.integers(4, 12), sequences=st.integers(1, 4))
def test_same_texts(texts: list[Any], pages: int, sequences: int) -> None:
    """Stop texts end what the next step already goes on with."""
    model = LateModel(fake(CONTEXT, pages, 24, sequences))
    here = fake(CONTEXT, pages, 24, sequences)
    limits: dict[str, Any] = {"pages": pages, "max_tokens_per_step": 24, "max_sequences": sequences}
    engines = (
        Generator(here, context=CONTEXT, eos=EOS, text=plain, **limits),
        generator(model, pages, 24, sequences, text=plain),
    )
    for n, (prompt, stop, temperature, count) in enumerate(texts):
        how = Sampling(temperature, max_tokens=count, stop=stop, seed=n)
        for engine in engines:
            engine.add(Request(str(n), prompt, how))
    done = [[(c.tokens, c.text, c.finish_reason) for c in engine.run()] for engine in engines]
    assert done[0] == done[1]
    for engine in engines:
        at_rest(engine)


def test_a_text_alone_runs_ahead_from_its_second_token() -> None:
    """And no step is begun that can't be of use: its length is known."""
    model = LateModel(fake(CONTEXT, 64, 32, 8))
    engine = generator(model)
    how = Sampling(max_tokens=20, ignore_eos=True)
    engine.add(Request("a", (1, 2, 3), how))
    assert engine.run()[0].tokens == expected((1, 2, 3), how, EOS, CONTEXT)[0]
    assert (model.begun, model.fed) == (20, 18)
    at_rest(engine)


def test_one_step_too_many_at_the_end_of_a_text() -> None:
    tokens = expected((9, 8, 7), Sampling(max_tokens=6, ignore_eos=True), (), CONTEXT)[0]
    model = LateModel(fake(CONTEXT, 64, 32, 8))
    engine = generator(model, eos=(tokens[-1],))
    engine.add(Request("a", (9, 8, 7), Sampling(max_tokens=30)))
    engine.add(Request("b", (1,), Sampling(max_tokens=30, ignore_eos=True)))
    a, b = engine.run()
    assert (a.tokens, a.finish_reason, len(b.tokens)) == (tokens, "stop", 30)
    assert model.begun == 30  # those of b
    model = LateModel(fake(CONTEXT, 64, 32, 8))
    engine = generator(model, eos=(tokens[-1],))
    engine.add(Request("a", (9, 8, 7), Sampling(max_tokens=30)))
    assert engine.run()[0].tokens == tokens
    assert (model.begun, len(model.model.steps)) == (7, 6)
    engine.add(Request("c", (9, 8, 7), Sampling(max_tokens=6)))
    assert len(engine.step()) == 1  # behind the step that nobody asked for
    assert engine.run()[0].tokens == tokens
    at_rest(engine)


@pytest.mark.parametrize(
    ("how", "more"), [(Sampling(max_tokens=9, penalty=1.1), {}), (Sampling(max_tokens=9), {"logits": True})]
)
def test_what_needs_each_token_or_its_logits_waits(how: Sampling, more: dict[str, Any]) -> None:
    model = LateModel(fake(CONTEXT, 64, 32, 8))
    engine = generator(model, eos=())
    engine.add(Request("a", (1,), Sampling(max_tokens=9)))
    engine.add(Request("b", (2,), how, **more))
    engine.run()
    assert model.fed == 0


def test_who_waits_for_a_place_is_let_in_first() -> None:
    """A newcomer joins after the step that is under way; one that finds no place holds nobody up."""
    model = LateModel(fake(CONTEXT, 64, 32, 2))
    engine = generator(model, sequences=2)
    how = Sampling(max_tokens=12, ignore_eos=True)
    engine.add(Request("a", (1,), how))
    for _ in range(3):
        engine.step()
    assert model.fed == 3
    for id in "bc":
        engine.add(Request(id, (2,), how))
    engine.step()  # was begun before
    assert [s.id for s in engine.scheduler.running] == ["a"] and model.fed == 3
    engine.step()
    assert [s.id for s in engine.scheduler.running] == ["a", "b"]
    fed = model.fed
    engine.step()
    assert len(engine.scheduler.waiting) == 1 and model.fed == fed + 1
    assert [c.tokens for c in engine.run()] == [expected((n,), how, EOS, CONTEXT)[0] for n in (1, 2, 2)]
    at_rest(engine)


@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_an_interrupted_step_is_taken_again(when: int) -> None:
    """Ctrl-C while a step is waited for."""
    model = LateModel(fake(CONTEXT, 64, 32, 8))
    engine, asked, run = generator(model), 0, model.run

    def interrupted(step: Later) -> None:
        nonlocal asked
        asked += 1
        if asked == when:
            model.steps.clear()
            raise KeyboardInterrupt
        run(step)

    model.run = interrupted  # type: ignore[method-assign]
    how = Sampling(max_tokens=8, ignore_eos=True)
    engine.add(Request("a", (1, 2), how))
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert engine.run()[0].tokens == expected((1, 2), how, EOS, CONTEXT)[0]
    at_rest(engine)


class Mover:
    """A keeper that moves the cache to one of another size before each step, after what is under way; every
    other time that is lost."""

    def __init__(self, engine: Generator, model: LateModel, sizes: list[int]) -> None:
        self.engine, self.model, self.sizes = engine, model, sizes

    def turn(self) -> None:
        if not self.sizes:
            return
        pages, cache = self.sizes.pop(0), self.model.model.cache
        if len(self.sizes) % 2:
            self.model.steps.clear()
        for step in list(self.model.steps):
            step.result()
        moved = self.engine.resettle(pages, CONTEXT)
        self.model.model.cache = np.random.default_rng(pages).integers(0, 1 << 60, (pages, PAGE))
        for old, new in moved.items():
            self.model.model.cache[new] = cache[old]

    def failed(self, error: DeviceError) -> bool:
        return False


def test_the_cache_moves_while_a_step_is_under_way() -> None:
    model = LateModel(fake(CONTEXT, 12, 32, 4))
    engine = generator(model, 12, 32, 4)
    engine.keeper = Mover(engine, model, [9, 6, 12, 5, 8, 11, 5, 12] * 3)
    how = Sampling(max_tokens=30, ignore_eos=True)
    for n in range(3):
        engine.add(Request(str(n), (n, 5), how))
    done = [c.tokens for c in engine.run()]
    assert done == [expected((n, 5), how, EOS, CONTEXT)[0] for n in range(3)]
    assert model.fed
    at_rest(engine)
