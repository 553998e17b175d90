"""Tokens don't depend on company, chunks or preemption; text, stops, figures and cancelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt.errors import DeviceError, RequestError
from flashrt.ir.ops import PAGE
from flashrt.llm.generate import Completion, Event, Generator
from flashrt.llm.request import Request, Sampling
from flashrt.llm.text import TextStream
from tests.llm.fake_model import FakeModel, expected, fake

CONTEXT = 5 * PAGE
EOS = (3, 77)


def generator(
    pages: int = 64, tokens: int = 32, sequences: int = 8, model: Any = None, **more: Any
) -> tuple[Generator, FakeModel]:
    """A generator over a fake model."""
    model = model or fake(CONTEXT, pages, tokens, sequences)
    limits = {"pages": pages, "max_tokens_per_step": tokens, "max_sequences": sequences}
    return Generator(model, **{"context": CONTEXT, "eos": EOS, **limits, **more}), model


def at_rest(generator: Generator) -> None:
    """Nothing in work, every page free."""
    assert generator.idle
    assert generator.scheduler.idle
    assert (generator.pool.free, generator.pool.used) == (generator.pool.total, 0)
    assert generator.step() == []


SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7]),
    top_k=st.integers(0, 3),
    top_p=st.sampled_from([1.0, 0.9]),
    penalty=st.sampled_from([1.0, 1.0, 1.2]),
    max_tokens=st.integers(0, 40),
    seed=st.integers(0, 2**63 - 1),
    ignore_eos=st.booleans(),
)
PROMPT = st.lists(st.integers(0, 250), min_size=1, max_size=2 * PAGE + 3).map(tuple)
ARRIVAL = st.tuples(PROMPT, SAMPLING, st.integers(0, 6), st.none() | st.integers(0, 12))
ARRIVALS = st.lists(ARRIVAL, max_size=6)


@given(
    arrivals=ARRIVALS,
    pages=st.integers(3, 9),
    tokens=st.integers(1, 24),
    sequences=st.integers(1, 5),
)
def test_same_tokens_in_any_company(arrivals: list[Any], pages: int, tokens: int, sequences: int) -> None:
    """Random arrivals, cancels, small pools and budgets: each gets the tokens of its definition."""
    context = min(CONTEXT, pages * PAGE)
    engine, _ = generator(pages, tokens, sequences)
    cancels: dict[str, int] = {}
    done: dict[str, Completion] = {}
    drawn: dict[str, list[int]] = {}
    for n, (prompt, how, steps, cancel_after) in enumerate(arrivals):
        engine.add(Request(str(n), prompt, how))
        drawn[str(n)] = []
        if cancel_after is not None:
            cancels[str(n)] = cancel_after
        for _ in range(steps):
            run_step(engine, cancels, done, drawn)
    while not engine.idle:
        run_step(engine, cancels, done, drawn)
    at_rest(engine)
    for n, (prompt, how, _, _) in enumerate(arrivals):
        got, (want, finish) = done[str(n)], expected(prompt, how, EOS, context)
        assert list(got.tokens) == drawn[str(n)]
        if got.finish_reason == "cancelled":
            assert got.tokens == want[: len(got.tokens)]
        else:
            assert (got.tokens, got.finish_reason) == (want, finish)


def run_step(
    engine: Generator, cancels: dict[str, int], done: dict[str, Completion], drawn: dict[str, list[int]]
) -> None:
    """One step, then the cancels that are due; the pool's books are right after each."""
    for event in engine.step():
        if event.token is not None:
            drawn[event.request].append(event.token)
        if event.completion:
            assert event.request not in done
            done[event.request] = event.completion
    for id in [id for id, left in cancels.items() if left == 0]:
        completion = engine.cancel(id)
        assert (completion is None) == (id in done)
        if completion:
            done[id] = completion
    for id in cancels:
        cancels[id] -= 1
    held = [p for s in engine.scheduler.running for p in s.table.pages]
    assert len(held) == len(set(held)) == engine.pool.used == engine.pool.total - engine.pool.free
    assert all(not s.table.pages for s in engine.scheduler.waiting)


def test_preemption_changes_no_token() -> None:
    """Three texts in a pool for one and a half: some are computed anew, none differs."""
    engine, model = generator(pages=6, tokens=16, sequences=3)
    how = [Sampling(max_tokens=60, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 0.8, 0.0)]
    for n, sampling in enumerate(how):
        engine.add(Request(str(n), (n + 1, 20, 30), sampling))
    done = engine.run()
    assert sum(c.stats.preempted for c in done) > 0
    assert max(s["S"] for s in model.steps) == 3
    for n, completion in enumerate(done):
        got = completion.tokens, completion.finish_reason
        assert got == expected((n + 1, 20, 30), how[n], EOS, CONTEXT)
    at_rest(engine)


def first_eos(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens up to an end-of-sequence token that is chosen to be the fourth."""
    return expected(prompt, Sampling(max_tokens=4, ignore_eos=True), (), CONTEXT)[0]


@pytest.mark.parametrize("which", [0, 1])
def test_stops_at_each_end_of_sequence_token(which: int) -> None:
    tokens = first_eos((9, 8, 7))
    eos = (250, tokens[3]) if which else (tokens[3], 250)
    engine, _ = generator(eos=eos, text=letters)
    engine.add(Request("a", (9, 8, 7), Sampling(max_tokens=30)))
    (done,) = engine.run()
    assert (done.tokens, done.finish_reason) == (tokens, "stop")
    assert done.text == spell(tokens[:3])
    at_rest(engine)


@pytest.mark.parametrize("wanted", [0, 1, 2, 30])
def test_ignore_eos_gives_exactly_what_was_asked(wanted: int) -> None:
    tokens = first_eos((9, 8, 7))
    engine, _ = generator(eos=(tokens[0], tokens[3]))
    engine.add(Request("a", (9, 8, 7), Sampling(max_tokens=wanted, ignore_eos=True)))
    (done,) = engine.run()
    assert (len(done.tokens), done.finish_reason) == (wanted, "length")
    at_rest(engine)


@pytest.mark.parametrize(
    ("prompt", "pages", "generated"), [(70, 64, 10), (80, 64, 0), (30, 2, 2), (1, 1, 15)]
)
def test_cut_at_the_context(prompt: int, pages: int, generated: int) -> None:
    """Prompt and output end where the context or the pool does, as "length"."""
    engine, _ = generator(pages=pages)
    engine.add(Request("a", (5,) * prompt, Sampling(max_tokens=1000, ignore_eos=True)))
    (done,) = engine.run()
    assert (len(done.tokens), done.finish_reason) == (generated, "length")
    at_rest(engine)


def letters() -> TextStream:
    """Two-byte characters: an even token starts one, an odd token ends it; some halves stay alone."""
    return TextStream(lambda token: b"\xc3" if token % 2 == 0 else bytes([0x80 + token % 64]))


def spell(tokens: tuple[int, ...]) -> str:
    stream = letters()
    return stream.push(tokens) + stream.finish()


def plain() -> TextStream:
    """One letter a token."""
    return TextStream(lambda token: bytes([97 + token % 26]))


def test_text_of_events_is_the_whole_text() -> None:
    engine, _ = generator(text=letters)
    engine.add(Request("a", (1, 2), Sampling(max_tokens=50, ignore_eos=True)))
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
    done = events[-1].completion
    assert done is not None
    assert (
        "".join(e.text for e in events) == done.text == spell(tuple(t for t in done.tokens if t not in EOS))
    )
    assert [e.token for e in events] == list(done.tokens)
    assert [e.completion is None for e in events] == [True] * 49 + [False]


def test_a_stop_text_is_never_shown() -> None:
    """The stop text, cut from the middle of the real output, ends it; what precedes it is shown."""
    free, _ = generator(text=plain, eos=())
    free.add(Request("a", (4, 5), Sampling(max_tokens=40)))
    text = free.run()[0].text
    stop = text[20:24]
    assert text.index(stop) == 20
    engine, _ = generator(text=plain, eos=())
    pieces = list(engine.stream(Request("a", (4, 5), Sampling(max_tokens=40, stop=("#", stop)))))
    assert "".join(pieces) == text[:20]
    engine.add(Request("b", (4, 5), Sampling(max_tokens=40, stop=(stop,))))
    (done,) = engine.run()
    assert (done.text, len(done.tokens), done.finish_reason) == (text[:20], 24, "stop")
    at_rest(engine)


def test_held_text_is_flushed_at_the_end() -> None:
    """Output that ends within what might have become a stop text is all shown."""
    free, _ = generator(text=plain, eos=())
    free.add(Request("a", (4, 5), Sampling(max_tokens=10)))
    text = free.run()[0].text
    engine, _ = generator(text=plain, eos=())
    how = Sampling(max_tokens=10, stop=(text[-3:] + "!",))
    assert "".join(engine.stream(Request("a", (4, 5), how))) == text


def test_a_stop_text_that_only_the_end_completes() -> None:
    """Half a character is shown as U+FFFD once nothing follows; as a stop text it is cut off like others."""
    outputs = {t: expected((t,), Sampling(max_tokens=3), (), CONTEXT)[0] for t in range(250)}
    begun = {t: spell(tokens) for t, tokens in outputs.items() if tokens[-1] % 2 == 0}
    prompt, text = next((t, text) for t, text in begun.items() if text.index("\ufffd") == len(text) - 1)
    engine, _ = generator(text=letters, eos=())
    engine.add(Request("a", (prompt,), Sampling(max_tokens=3)))
    engine.add(Request("b", (prompt,), Sampling(max_tokens=3, stop=("\ufffd",))))
    a, b = engine.run()
    assert (a.text, b.text) == (text, text[:-1])
    assert (a.finish_reason, b.finish_reason) == ("length", "stop")


def test_streams_in_turn() -> None:
    """Two streams read alternately and a plain request beside them all get their own tokens."""
    engine, _ = generator()
    how = Sampling(max_tokens=12, ignore_eos=True)
    engine.add(Request("c", (3,), how))
    a, b = engine.events(Request("a", (1,), how)), engine.events(Request("b", (2,), how))
    got: Mapping[str, list[Any]] = {"a": [], "b": []}
    for _ in range(12):
        got["a"].append(next(a).token)
        got["b"].append(next(b).token)
    for id, token in (("a", 1), ("b", 2)):
        assert tuple(got[id]) == expected((token,), how, EOS, CONTEXT)[0]
    assert (next(a, None), next(b, None)) == (None, None)
    at_rest(engine)


@pytest.mark.parametrize("read", [0, 3])
def test_closing_a_stream_cancels(read: int) -> None:
    engine, _ = generator(text=plain)
    stream = engine.stream(Request("a", (1,), Sampling(max_tokens=50, ignore_eos=True)))
    for _ in range(read):
        next(stream)
    assert not engine.idle
    stream.close()  # type: ignore[attr-defined]
    at_rest(engine)


def test_cancel() -> None:
    """What was drawn so far comes back; unknown and finished requests give None."""
    engine, _ = generator()
    for id in "ab":
        engine.add(Request(id, (1,), Sampling(max_tokens=20, ignore_eos=True)))
    events = engine.events(Request("c", (1,), Sampling(max_tokens=20, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    done = engine.cancel("a")
    assert done is not None
    assert (len(done.tokens), done.finish_reason) == (3, "cancelled")
    engine.cancel("c")
    tail = list(events)
    assert [e.token is None for e in tail] == [False] * 3 + [True]
    assert tail[-1].completion is not None
    assert (engine.cancel("a"), engine.cancel("nobody")) == (None, None)
    assert len(engine.run()[0].tokens) == 20
    at_rest(engine)


def test_cancel_before_the_first_step() -> None:
    engine, _ = generator()
    engine.add(Request("a", (1,)))
    engine.add(Request("b", (1,), Sampling(max_tokens=0)))
    for id in "ab":
        done = engine.cancel(id)
        assert done is not None
        assert (done.tokens, done.finish_reason, done.stats.first_token) == ((), "cancelled", None)
    at_rest(engine)


def test_refused_requests_leave_no_trace() -> None:
    engine, _ = generator(vocabulary=251)
    engine.add(Request("a", (1,), Sampling(max_tokens=2, ignore_eos=True)))
    for request, message in (
        (Request("a", (1,)), "in work"),
        (Request("b", (1,) * (CONTEXT + 1)), f"{CONTEXT + 1} tokens, the context holds {CONTEXT}"),
        (Request("c", (1, 251)), "251 isn't in the vocabulary"),
        (Request("d", (1,), Sampling(stop=("x",))), "tokenizer"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add(request)
        with pytest.raises(RequestError, match=message):
            engine.stream(request)
    assert [c.request for c in engine.run()] == ["a"]
    at_rest(engine)


def test_logits_when_asked() -> None:
    """The row the token came from, and a copy: later steps don't change it."""
    engine, _ = generator()
    how = Sampling(max_tokens=5, ignore_eos=True)
    engine.add(Request("quiet", (2,), how))
    events = list(engine.events(Request("a", (1,), how, logits=True)))
    assert [int(np.argmax(e.logits)) for e in events if e.logits is not None] == [e.token for e in events]
    assert len(events) == 5


def test_a_failed_step_can_be_tried_again() -> None:
    model = fake(CONTEXT, 64, 4, 8)
    calls = 0

    def flaky(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
        nonlocal calls
        calls += 1
        out = model(inputs, symbols, outputs)
        if calls in (2, 4):
            raise DeviceError("lost")
        return out

    engine, _ = generator(tokens=4, model=flaky)
    how = Sampling(max_tokens=6, ignore_eos=True)
    engine.add(Request("a", (1, 2, 3, 4, 5, 6, 7, 8, 9), how))
    done: list[Completion] = []
    failures = 0
    while not engine.idle:
        try:
            done += [e.completion for e in engine.step() if e.completion]
        except DeviceError:
            failures += 1
    assert failures == 2
    assert done[0].tokens == expected((1, 2, 3, 4, 5, 6, 7, 8, 9), how, EOS, CONTEXT)[0]
    at_rest(engine)


def test_figures() -> None:
    """A clock that the model moves by a tenth of a second a step."""
    model, now = fake(CONTEXT, 64, 8, 1), [0.0]

    def slow(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
        now[0] += 0.1
        return model(inputs, symbols, outputs)

    engine, _ = generator(tokens=8, sequences=1, model=slow, clock=lambda: now[0])
    how = Sampling(max_tokens=5, ignore_eos=True)
    engine.add(Request("a", tuple(range(20)), how))
    engine.add(Request("b", (1,), Sampling(max_tokens=1)))
    a, b = (c.stats for c in engine.run())
    assert (a.prompt_tokens, a.generated_tokens, a.preempted) == (20, 5, 0)
    assert (a.waited, a.first_token, a.prompt_rate, a.rate) == pytest.approx((0, 0.3, 20 / 0.3, 10))
    assert (b.waited, b.first_token, b.prompt_rate) == pytest.approx((0.7, 0.8, 10))
    assert b.rate is None


def test_run_keeps_the_order_of_adding() -> None:
    engine, _ = generator()
    for id, count in (("long", 9), ("none", 0), ("short", 1)):
        engine.add(Request(id, (1,), Sampling(max_tokens=count, ignore_eos=True)))
    assert [(c.request, len(c.tokens)) for c in engine.run()] == [("long", 9), ("none", 0), ("short", 1)]
