"""Text generation: requests in, events and completions out, one flat step of the model at a time.

`Generator` is the loop around `Program.call`: the scheduler says what goes into
a step, the model draws tokens, and each token becomes an event with the text
that is safe to show. It is used from one thread at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Generator as Yields
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flashrt.errors import DeviceError, RequestError
from flashrt.ir.ops import PAGE
from flashrt.llm.kv import PagePool
from flashrt.llm.request import Finish, Request, Sequence
from flashrt.llm.scheduler import Array, Scheduler, Step
from flashrt.llm.text import StopStrings, TextStream

F32 = NDArray[np.float32]
Call = Callable[[dict[str, Array], dict[str, int], tuple[str, ...]], Mapping[str, Array]]
NOT_FED: Mapping[str, str] = MappingProxyType({})
FED: Mapping[str, str] = MappingProxyType({"ids": "tokens"})


class Pending(Protocol):
    """A step of the model that was begun (`program.Pending`)."""

    @property
    def ahead(self) -> bool:
        """Whether it is under way still, so that the next one may begin before its result is asked for."""

    def result(self) -> Mapping[str, Array]:
        """Its outputs, once it is through. Raises DeviceError."""


Begin = Callable[[dict[str, Array], dict[str, int], tuple[str, ...], Mapping[str, str]], Pending]


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one finished request. Times in seconds, rates in tokens per second; None: not reached.

    waited: from `add` to the first step it was part of. first_token: from `add` to the first token.
    prompt_rate: prompt tokens over the time from the first step to the first token.
    rate: tokens after the first over the time they took. preempted: how often it was computed anew.
    """

    prompt_tokens: int
    generated_tokens: int
    preempted: int
    waited: float | None
    first_token: float | None
    prompt_rate: float | None
    rate: float | None


@dataclass(frozen=True, slots=True)
class Completion:
    """The outcome of a request.

    text: without end-of-sequence token and without the stop text; empty where there is no tokenizer.
    tokens: every token drawn, the one that ended it included.
    """

    request: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: Finish
    stats: Stats


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """What one step brought one request.

    token: the token drawn; None when it ended without one. text: what may be shown now, often "".
    logits: f32[V] the token was drawn from, if asked for. completion: set on the last event only.
    """

    request: str
    token: int | None
    text: str = ""
    logits: F32 | None = None
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class _Through:
    """A step that is through when it was begun."""

    found: Mapping[str, Array]
    ahead: bool = False

    def result(self) -> Mapping[str, Array]:
        return self.found


class _Text:
    """Tokens of one request → text that is safe to show: whole characters, no part of a stop text."""

    def __init__(self, stream: TextStream, stop: tuple[str, ...]) -> None:
        self._stream, self._stop = stream, StopStrings(stop)
        self._shown: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found."""
        return bool(self._stop.stopped)

    @property
    def whole(self) -> str:
        return "".join(self._shown)

    def feed(self, token: int) -> str:
        return self._show(self._stop.push(self._stream.push((token,))))

    def end(self) -> str:
        """What was held back, once it is clear that nothing follows."""
        return self._show(self._stop.push(self._stream.finish()) + self._stop.finish())

    def _show(self, text: str) -> str:
        self._shown.append(text)
        return text


@dataclass(slots=True, eq=False)
class _Live:
    """A request in work. Times are the clock's."""

    sequence: Sequence
    text: _Text | None
    added: float
    started: float | None = None
    first: float | None = None
    last: float | None = None
    inbox: deque[Event] | None = None

    def stats(self) -> Stats:
        prompt, drawn = len(self.sequence.request.prompt), self.sequence.generated
        return Stats(
            prompt,
            drawn,
            self.sequence.preempted,
            _elapsed(self.added, self.started),
            _elapsed(self.added, self.first),
            _rate(prompt, _elapsed(self.started, self.first)),
            _rate(drawn - 1, _elapsed(self.first, self.last)),
        )


def _elapsed(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _rate(count: int, seconds: float | None) -> float | None:
    return count / seconds if seconds and count > 0 else None


def _texts(events: Yields[Event]) -> Yields[str]:
    """The texts of events, after an empty one; closing it closes them (a generator expression wouldn't)."""
    with closing(events):
        yield ""
        for event in events:
            if event.text:
                yield event.text


class Keeper(Protocol):
    """Exchanges the model between steps (`runtime.replan.Replanner`)."""

    def turn(self) -> None:
        """Called before each step is put together: the model and the pages of its cache may change now."""

    def failed(self, error: DeviceError) -> bool:
        """Called when a step failed: whether another can be tried."""


class Generator:
    """Generates for many requests at once.

    call: the model: inputs, symbols and the names of the outputs wanted → tokens i32[N], and logits f32[N,V]
    when they are wanted. It keeps the KV cache.
    begin: the same, in two halves, where steps can begin before the one in front of them is through (see
    `program.Program.begin`): then the model goes on while the host looks at the tokens of the step before.
    context: tokens of prompt and output together; the cache's pages limit it too.
    eos: token ids that end a text. pages: of the KV cache. text: makes a request's `TextStream`
    (`Chat.stream`); None for no text.
    vocabulary: number of token ids, to refuse prompts with others. clock: seconds.
    Raises KnobError for limits below 1.
    """

    def __init__(
        self,
        call: Call,
        *,
        context: int,
        eos: tuple[int, ...],
        pages: int,
        max_tokens_per_step: int = 512,
        max_sequences: int = 16,
        text: Callable[[], TextStream] | None = None,
        vocabulary: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        begin: Begin | None = None,
    ) -> None:
        self.pool = PagePool(pages)
        self.scheduler = Scheduler(max_tokens_per_step, max_sequences, self.pool)
        self._longest = context
        self.context = min(context, pages * PAGE)
        self.eos = frozenset(eos)
        self._call, self._new_text, self._vocabulary, self._clock = call, text, vocabulary, clock
        self._start = begin
        self._ahead: tuple[Step, Pending] | None = None  # begun while the last one ran
        self._alone = False  # the next step has none begun behind it
        self._live: dict[str, _Live] = {}
        self._nothing_to_draw: list[_Live] = []
        self.keeper: Keeper | None = None

    @property
    def idle(self) -> bool:
        """No request in work; then all pages are free."""
        return not self._live

    def add(self, request: Request) -> None:
        """Queues a request; the following steps work on it. Raises RequestError."""
        self._admit(request)

    def step(self) -> list[Event]:
        """Runs the model once, for every request that has its turn; [] when there is nothing to do.

        When the call fails, and the keeper has no other model, its error passes through, and the next
        `step` tries the same again.
        """
        events = self._stepped()
        events += [self._finished(live, None) for live in self._nothing_to_draw]
        self._nothing_to_draw.clear()
        return events

    def _stepped(self) -> list[Event]:
        while True:
            if self.keeper is not None:
                self.keeper.turn()
            begun, self._ahead = self._ahead, None
            alone, self._alone = self._alone, False
            try:
                if begun is None or not self.scheduler.concerns(begun[0]):
                    begun = self._begun_now()
                if begun is None:
                    return []
                step, pending = begun
                ahead = None if alone else self._begun_ahead(step, pending)
                out = pending.result()
            except DeviceError as error:
                self._alone = True  # the step may be fine, and the one begun behind it have failed
                if self.keeper is None or not self.keeper.failed(error):
                    raise
                continue
            events = self._draw(step, out)
            self._ahead = ahead  # not before: whatever fails is forgotten, and tried again from what is drawn
            return events

    def _begun_now(self) -> tuple[Step, Pending] | None:
        step = self.scheduler.next_step()
        if step is None:
            return None
        self._mark_started(step)
        return step, self._begin(step)

    def _begin(self, step: Step, fed: Mapping[str, str] = NOT_FED) -> Pending:
        inputs, symbols, wanted = step.inputs(), step.symbols(), self._wanted(step)
        if self._start is None:
            return _Through(self._call(inputs, symbols, wanted))
        return self._start(inputs, symbols, wanted, fed)

    def _begun_ahead(self, step: Step, pending: Pending) -> tuple[Step, Pending] | None:
        """The step after one that is under way, begun, if it is clear what that will be.

        A sequence that turns out to have ended has a token too many there, which nobody reads. Its pages may
        be taken by others at once: steps run in order.
        """
        following = self.scheduler.following(step) if pending.ahead else None
        return None if following is None else (following, self._begin(following, FED))

    def resettle(self, pages: int, context: int) -> dict[int, int]:
        """Goes on with a cache of another size: see `Scheduler.resettle`.

        context: tokens of one sequence that the model takes now; requests in work need no more.
        """
        self._ahead = None
        moved = self.scheduler.resettle(pages)
        self.context = min(self._longest, context, pages * PAGE)
        return moved

    def run(self) -> list[Completion]:
        """Steps until every request is finished. Completions in the order the requests were added."""
        order, done = list(self._live), {}
        while not self.idle:
            done.update({e.request: e.completion for e in self.step() if e.completion})
        return [done[id] for id in order]

    def cancel(self, id: str) -> Completion | None:
        """Ends a request now and frees its pages. None when no such request is in work (any more)."""
        live = self._live.get(id)
        if live is None:
            return None
        live.sequence.finish = "cancelled"
        if live in self._nothing_to_draw:
            self._nothing_to_draw.remove(live)
        else:
            self.scheduler.retire(live.sequence)
        return self._finished(live, None).completion

    def events(self, request: Request) -> Iterator[Event]:
        """Adds a request now and gives its events; steps whenever it has none.

        Several may be read in turn, in one thread. Closing the iterator early cancels the request.
        Raises RequestError.
        """
        return self._begun(request)

    def stream(self, request: Request) -> Iterator[str]:
        """Adds a request now and gives its text piece by piece; see `events`. Raises RequestError."""
        texts = _texts(self._begun(request))
        next(texts)  # as in `_begun`
        return texts

    def _begun(self, request: Request) -> Yields[Event]:
        live = self._admit(request)
        live.inbox = deque()
        events = self._events(live, live.inbox)
        next(events)  # enters its `try`: closing it cancels even before the first event
        return events

    def _admit(self, request: Request) -> _Live:
        self._check(request)
        sequence = Sequence(request, self.context)
        text = None if self._new_text is None else _Text(self._new_text(), request.sampling.stop)
        live = _Live(sequence, text, self._clock())
        if sequence.finish is None:
            self.scheduler.admit(sequence)
        else:
            self._nothing_to_draw.append(live)
        self._live[request.id] = live
        return live

    def _check(self, request: Request) -> None:
        if request.id in self._live:
            raise RequestError(f"request {request.id}: another one with this id is in work")
        if request.sampling.stop and self._new_text is None:
            raise RequestError(f"request {request.id}: stop texts need a tokenizer, and this model has none")
        largest = max(request.prompt)
        if self._vocabulary is not None and largest >= self._vocabulary:
            raise RequestError(
                f"request {request.id}: token id {largest} isn't in the vocabulary",
                hint=f"token ids are 0 to {self._vocabulary - 1}",
            )

    def _events(self, live: _Live, inbox: deque[Event]) -> Yields[Event]:
        id = live.sequence.id
        try:
            yield Event(id, None)
            while inbox or self._live.get(id) is live:
                if not inbox:
                    self.step()
                while inbox:
                    yield inbox.popleft()
        finally:
            if self._live.get(id) is live:
                self.cancel(id)

    def _wanted(self, step: Step) -> tuple[str, ...]:
        logits = any(self._live[id].sequence.request.logits for id in step.requests)
        return ("tokens", "logits") if logits else ("tokens",)

    def _mark_started(self, step: Step) -> None:
        now = self._clock()
        for id in step.requests:
            live = self._live[id]
            live.started = now if live.started is None else live.started

    def _draw(self, step: Step, out: Mapping[str, Array]) -> list[Event]:
        now, logits = self._clock(), out.get("logits")
        rows = {part.request: row for row, part in enumerate(step.drawing)}
        drawing = [(self._live[s.id], rows[s.id]) for s in self.scheduler.complete(step)]
        return [
            self._drawn(live, int(out["tokens"][row]), now, None if logits is None else logits[row])
            for live, row in drawing
        ]

    def _drawn(self, live: _Live, token: int, now: float, logits: Array | None) -> Event:
        sequence, ended = live.sequence, token in self.eos
        live.first, live.last = now if live.first is None else live.first, now
        sequence.append(token)
        text = live.text.feed(token) if live.text and not ended else ""
        if (ended and not sequence.request.sampling.ignore_eos) or (live.text and live.text.stopped):
            sequence.finish = "stop"
        # a copy: the next step writes over the model's output
        kept = np.array(logits, np.float32) if sequence.request.logits else None
        if sequence.finish is None:
            return self._post(live, Event(sequence.id, token, text, kept))
        self.scheduler.retire(sequence)
        return self._finished(live, token, text, kept)

    def _finished(self, live: _Live, token: int | None, text: str = "", logits: F32 | None = None) -> Event:
        """The last event, with the text that was still held back."""
        sequence = live.sequence
        assert sequence.finish is not None
        text += live.text.end() if live.text else ""
        if live.text and live.text.stopped and sequence.finish == "length":
            sequence.finish = "stop"
        whole = live.text.whole if live.text else ""
        completion = Completion(sequence.id, whole, sequence.output, sequence.finish, live.stats())
        del self._live[sequence.id]
        return self._post(live, Event(sequence.id, token, text, logits, completion))

    def _post(self, live: _Live, event: Event) -> Event:
        if live.inbox is not None:
            live.inbox.append(event)
        return event
