"""What a caller asks for (`Sampling`, `Request`) and how far it has got (`Sequence`).

Requests are frozen. A `Sequence` changes while text is generated: it waits, runs
(when it holds pages), may be preempted back to waiting, and finishes once.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flashrt.errors import RequestError
from flashrt.llm.kv import EMPTY, Table

Finish = Literal["stop", "length", "cancelled"]
I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when to stop. Raises RequestError for a value outside its range.

    temperature: 0 takes the likeliest token. top_k: 0 keeps all. top_p, min_p: shares of probability.
    penalty: repetition penalty over prompt and output, 1 for none. max_tokens: how many tokens at most.
    stop: texts that end the output and are no part of it. seed: None draws one, a number repeats.
    ignore_eos: go on after an end-of-sequence token, to exactly max_tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, 1e30)
        _whole("top_k", self.top_k, 2**31)
        _number("top_p", self.top_p, 0, 1, above=True)
        _number("min_p", self.min_p, 0, 1)
        _number("penalty", self.penalty, 0, 1e30, above=True)
        _whole("max_tokens", self.max_tokens, 2**31)
        if self.seed is not None:
            _whole("seed", self.seed, 2**63)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop={self.stop!r}: expected a tuple of texts, none of them empty")


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    # written so that NaN, which compares false with everything, is refused
    if not (number and low <= value <= high and not (above and value == low)):  # type: ignore[operator]
        raise RequestError(
            f"{name}={value!r}: expected a number {'above' if above else 'from'} {low} to {high}"
        )


def _whole(name: str, value: object, end: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 0 <= value < end:
        raise RequestError(f"{name}={value!r}: expected a whole number from 0 to {end - 1}")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to go on from. Raises RequestError for an empty prompt or an id that is no token.

    id: the caller's name for it, unique among the requests in work. prompt: token ids.
    logits: whether each token's event carries its logits.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    logits: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError(f"request {self.id}: the prompt is empty", hint="give one token or more")
        if min(self.prompt) < 0 or max(self.prompt) >= 2**31:
            at = next(n for n, token in enumerate(self.prompt) if not 0 <= token < 2**31)
            raise RequestError(
                f"request {self.id}: prompt[{at}]={self.prompt[at]}: expected a token id, 0 to {2**31 - 1}"
            )


class Sequence:
    """A request in work: its tokens so far, how many of them the cache holds, and its pages.

    tokens: prompt, then output. computed: tokens whose keys and values are in `table`.
    limit: output tokens at most, cut where the context ends. preempted: how often it lost its pages.
    Raises RequestError when the prompt is longer than the context.
    """

    __slots__ = (
        "_buffer", "_view", "computed", "finish", "known", "limit", "preempted", "request", "seed", "table",
    )  # fmt: skip

    def __init__(self, request: Request, context: int) -> None:
        length = len(request.prompt)
        if length > context:
            raise RequestError(
                f"request {request.id}: the prompt has {length} tokens, the context holds {context}",
                hint="shorten the prompt, or open the model with a longer context",
            )
        drawn = request.sampling.seed
        self.request = request
        self.seed = secrets.randbits(63) if drawn is None else drawn
        self.limit = min(request.sampling.max_tokens, context - length)
        self.known, self.computed, self.preempted = length, 0, 0
        self.table: Table = EMPTY
        self.finish: Finish | None = None if self.limit else "length"
        self._buffer: I32 = np.empty(length + self.limit, np.int32)
        self._buffer[:length] = request.prompt
        self._view = self._buffer.view()
        self._view.flags.writeable = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def todo(self) -> int:
        """Known tokens that aren't in the cache yet: 1 while decoding, more while prefilling."""
        return self.known - self.computed

    @property
    def generated(self) -> int:
        return self.known - len(self.request.prompt)

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens(len(self.request.prompt), self.known).tolist())

    def tokens(self, lo: int, hi: int) -> I32:
        """Token ids [lo, hi) as a read-only view; known tokens never change."""
        assert 0 <= lo <= hi <= self.known, (self.id, lo, hi, self.known)
        return self._view[lo:hi]

    def append(self, token: int) -> None:
        """The token drawn after the last known one; reaching the limit finishes with "length"."""
        assert self.finish is None and self.todo == 0, (self.id, self.finish, self.todo)
        self._buffer[self.known] = token
        self.known += 1
        if self.generated == self.limit:
            self.finish = "length"
