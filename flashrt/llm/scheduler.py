"""Which tokens of which sequences go into the next step.

Continuous batching: every step takes one token of each sequence that decodes,
oldest first, then fills its token budget with chunks of prompts. A sequence is
admitted when its known tokens have pages; pages for later tokens are taken as
they come. When none is free, the youngest running sequence gives up its own and
is computed again later: sampling depends on seed and position alone, so its
tokens stay the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flashrt.errors import KnobError
from flashrt.llm.kv import EMPTY, OutOfPages, PagePool, Table, pages_for
from flashrt.llm.request import Sampling, Sequence

Array = NDArray[np.generic]
I32 = NDArray[np.int32]
A = TypeVar("A", bound=NDArray[np.generic])
GREEDY = Sampling()
NO_HISTORY = np.empty(0, np.int32)
UNKNOWN = np.zeros(1, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Consecutive tokens of one request in a step.

    tokens: i32 ids of positions start … end - 1. draws: whether a token is drawn after the last.
    history: i32, every token up to end where the repetition penalty needs them, else empty.
    """

    request: str
    tokens: I32
    start: int
    end: int
    table: Table
    sampling: Sampling
    seed: int
    draws: bool
    history: I32


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One call of the model: parts of several sequences, flat, one after the other. Never empty."""

    parts: tuple[Part, ...]

    @property
    def requests(self) -> tuple[str, ...]:
        return tuple(p.request for p in self.parts)

    @property
    def drawing(self) -> tuple[Part, ...]:
        """The parts that draw a token, in the order of the model's rows."""
        return tuple(p for p in self.parts if p.draws)

    def inputs(self) -> dict[str, Array]:
        """The model's inputs by name, with the shapes that `symbols` gives.

        i32[T]: ids, positions, seq (row of `pages` of each token). pages: i32[S,M], unused entries 0.
        rows: i32[N], the tokens that give logits. history: i32[N,H], -1 where empty. The rest: [N].
        """
        ends = list(accumulate(p.end - p.start for p in self.parts))
        last = [end - 1 for part, end in zip(self.parts, ends, strict=True) if part.draws]
        return {
            "ids": np.concatenate([p.tokens for p in self.parts]),
            "positions": np.array([n for p in self.parts for n in range(p.start, p.end)], np.int32),
            "seq": _rows_of(tuple(p.end - p.start for p in self.parts)),
            "pages": _pages(tuple((p.table, pages_for(p.end)) for p in self.parts)),
            # a step that draws nothing still has one row, whose token nobody reads
            "rows": _numbers(tuple(last or [ends[-1] - 1])),
            **self._sampling(),
        }

    def symbols(self) -> dict[str, int]:
        """The sizes of this step; C is its longest context."""
        rows, longest = self.drawing, max(p.end for p in self.parts)
        return {
            "T": sum(p.end - p.start for p in self.parts),
            "N": max(1, len(rows)),
            "S": len(self.parts),
            "M": pages_for(longest),
            "C": longest,
            "H": history_size(max((len(p.history) for p in rows), default=0)),
        }

    def one_line(self) -> str:
        """`a[0:512] b[17]+ c[80]+`: positions of each request; + where a token is drawn."""
        return " ".join(
            f"{p.request}[{p.start}{f':{p.end}' if p.end - p.start > 1 else ''}]{'+' * p.draws}"
            for p in self.parts
        )

    def _sampling(self) -> dict[str, Array]:
        rows = self.drawing
        how = tuple((p.sampling, p.seed) for p in rows) or ((GREEDY, 0),)
        return {
            **_parameters(how),
            "draw": np.array([p.end for p in rows] or [0], np.int64),
            "history": self._history(len(how)),
        }

    def _history(self, count: int) -> I32:
        rows = self.drawing
        longest = max((len(p.history) for p in rows), default=0)
        if not longest:
            return _no_history(count)
        history = np.full((count, history_size(longest)), -1, np.int32)
        for row, part in zip(history, rows, strict=True):
            row[: len(part.history)] = part.history
        return history


# A step that decodes is mostly like the one before. What is equal in both is one read-only array, made once
# and, by the runtime, written once.
def _read_only(array: A) -> A:
    array.flags.writeable = False
    return array


@lru_cache(maxsize=64)
def _numbers(values: tuple[int, ...]) -> I32:
    return _read_only(np.array(values, np.int32))


@lru_cache(maxsize=64)
def _rows_of(lengths: tuple[int, ...]) -> I32:
    """Which sequence each token is of."""
    return _read_only(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))


@lru_cache(maxsize=64)
def _no_history(count: int) -> I32:
    return _read_only(np.full((count, 1), -1, np.int32))


@lru_cache(maxsize=64)
def _pages(used: tuple[tuple[Table, int], ...]) -> I32:
    """i32[S,M]: so many pages of each table, zeros behind."""
    pages = np.zeros((len(used), max(count for _, count in used)), np.int32)
    for row, (table, count) in zip(pages, used, strict=True):
        row[:count] = table.row[:count]
    return _read_only(pages)


@lru_cache(maxsize=64)
def _parameters(how: tuple[tuple[Sampling, int], ...]) -> dict[str, Array]:
    """Arrays of each row's sampling and seed."""
    arrays: dict[str, Array] = {
        "temperature": np.array([s.temperature for s, _ in how], np.float32),
        "top_k": np.array([s.top_k for s, _ in how], np.int32),
        "top_p": np.array([s.top_p for s, _ in how], np.float32),
        "min_p": np.array([s.min_p for s, _ in how], np.float32),
        "penalty": np.array([s.penalty for s, _ in how], np.float32),
        "seed": np.array([seed for _, seed in how], np.int64),
    }
    return {name: _read_only(array) for name, array in arrays.items()}


def history_size(tokens: int) -> int:
    """Columns of `history` for that many tokens: a power of two, so that few sizes occur."""
    return 1 << (tokens - 1).bit_length() if tokens > 1 else 1


class Scheduler:
    """Keeps the waiting and the running sequences, and what pages they hold.

    max_tokens_per_step: the T of a step at most. max_sequences: how many run at once at most.
    Waiting sequences are admitted in the order they came; running ones stand oldest first.
    Raises KnobError for limits below 1.
    """

    def __init__(self, max_tokens_per_step: int, max_sequences: int, pool: PagePool) -> None:
        for name, value in (("max_tokens_per_step", max_tokens_per_step), ("max_sequences", max_sequences)):
            if value < 1:
                raise KnobError(f"{name}={value}: expected a whole number, 1 or more")
        self.max_tokens_per_step, self.max_sequences, self.pool = max_tokens_per_step, max_sequences, pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def admit(self, sequence: Sequence) -> None:
        """Queues it; it runs once there are pages and a place."""
        assert pages_for(sequence.known + sequence.limit - 1) <= self.pool.total, sequence.id
        self.waiting.append(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Takes it out, waiting or running, finished or not, and frees its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._free(sequence)
        else:
            self.waiting.remove(sequence)

    def next_step(self) -> Step | None:
        """The next step, or None when nothing is in work. Change nothing until `complete`."""
        self._start_waiting()
        parts, budget = [], self.max_tokens_per_step
        decoding = [s for s in self.running if s.todo == 1]
        for sequence in decoding:
            if budget and self._grow(sequence):
                parts.append(_part(sequence, 1))
                budget -= 1
        for sequence in self.running:
            if budget and sequence.todo > 1:
                parts.append(_part(sequence, min(sequence.todo, budget)))
                budget -= len(parts[-1].tokens)
        assert parts or self.idle, "work that can never run"
        return Step(tuple(parts)) if parts else None

    def following(self, step: Step) -> Step | None:
        """The step after one that isn't complete, whose tokens are its ids: they are 0 here. None unless all
        that run decode, each can go on, and `next_step` would take the very same, as far as is known."""
        running = {s.id: s for s in self.running}
        sequences = [running.get(p.request) for p in step.parts if len(p.tokens) == 1 and p.draws]
        going_on = [s for s in sequences if s is not None and _goes_on(s)]
        if not len(going_on) == len(step.parts) == len(running) or self._can_start:
            return None
        missing = sum(max(0, pages_for(s.known + 1) - len(s.table.pages)) for s in going_on)
        if missing > self.pool.free:
            return None
        return Step(tuple(self._next_part(s) for s in going_on))

    def _next_part(self, sequence: Sequence) -> Part:
        table = self.pool.grow(sequence.table, sequence.known + 1)
        assert isinstance(table, Table), table
        sequence.table = table
        how, start = sequence.request.sampling, sequence.known
        return Part(
            sequence.id, UNKNOWN, start, start + 1, table, how, sequence.seed, draws=True, history=NO_HISTORY
        )

    def concerns(self, step: Step) -> bool:
        """Whether any sequence of a step is still running."""
        return not {s.id for s in self.running}.isdisjoint(step.requests)

    def complete(self, step: Step) -> tuple[Sequence, ...]:
        """Marks the step's tokens as computed. The sequences that draw, in the order of its rows; those that
        ended before it was through don't."""
        by_id = {s.id: s for s in self.running}
        parts = [p for p in step.parts if p.request in by_id]
        for part in parts:
            by_id[part.request].computed = part.end
        return tuple(by_id[p.request] for p in parts if p.draws)

    @property
    def least_pages(self) -> int:
        """The fewest pages with which all that is in work can be finished."""
        longest = (len(s.request.prompt) + s.limit - 1 for s in (*self.running, *self.waiting))
        return pages_for(max(longest, default=1))

    def resettle(self, pages: int) -> dict[int, int]:
        """Goes on with a cache of another size, `least_pages` at least. Gives the pages whose contents are
        wanted there: old number → new number.

        Where there are too few, the youngest give up theirs, and are computed again.
        """
        assert pages >= self.least_pages, (pages, self.least_pages)
        while self.pool.used > pages:
            self._preempt(self.running[-1])
        used = [page for s in self.running for page in s.table.pages]
        left = iter(sorted(set(range(pages)) - set(used)))
        moved = {page: page if page < pages else next(left) for page in used}
        for sequence in self.running:
            sequence.table = Table(tuple(moved[page] for page in sequence.table.pages))
        self.pool.resize(pages, moved.values())
        return moved

    def restart(self) -> None:
        """What the cache holds is lost: all that runs gives up its pages, and is computed again."""
        while self.running:
            self._preempt(self.running[-1])

    @property
    def _can_start(self) -> bool:
        """Whether the first that waits has a place and pages."""
        if not self.waiting or len(self.running) >= self.max_sequences:
            return False
        # A page to spare for each that runs already: else the newcomer would soon be thrown out again.
        return pages_for(self.waiting[0].known) + len(self.running) <= self.pool.free

    def _start_waiting(self) -> None:
        while self._can_start:
            first = self.waiting.popleft()
            table = self.pool.grow(EMPTY, first.known)
            assert isinstance(table, Table), table
            first.table = table
            self.running.append(first)

    def _grow(self, sequence: Sequence) -> bool:
        """Room for its known tokens, at the cost of the youngest. False when that is itself."""
        while sequence in self.running:
            table = self.pool.grow(sequence.table, sequence.known)
            if not isinstance(table, OutOfPages):
                sequence.table = table
                return True
            self._preempt(self.running[-1])
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.preempted += 1
        self.waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.table.pages)
        sequence.table, sequence.computed = EMPTY, 0


def _goes_on(sequence: Sequence) -> bool:
    """Whether there is a token after the next one, unless that ends the text, and it can be drawn by whoever
    doesn't know the next one."""
    plain = sequence.request.sampling.penalty == 1 and not sequence.request.logits
    return plain and sequence.generated + 1 < sequence.limit


def _part(sequence: Sequence, count: int) -> Part:
    start, end = sequence.computed, sequence.computed + count
    draws = end == sequence.known
    penalised = draws and sequence.request.sampling.penalty != 1
    return Part(
        sequence.id,
        sequence.tokens(start, end),
        start,
        end,
        sequence.table,
        sequence.request.sampling,
        sequence.seed,
        draws,
        sequence.tokens(0, end) if penalised else NO_HISTORY,
    )
