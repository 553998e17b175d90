"""How fast a language model reads and generates, in llama-bench's terms: pp512, tg128, tg128 @ d512.

Rates are wall-clock time of the whole loop: scheduling, the model's steps, sampling and text.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flashrt.engine import LLM, vocabulary
from flashrt.errors import RequestError
from flashrt.ir.micro import BlockRef, Dispatch
from flashrt.ir.types import evaluate, product
from flashrt.llm.generate import Generator
from flashrt.llm.kv import pages_for
from flashrt.llm.request import Request, Sampling
from flashrt.program import Plan


@dataclass(frozen=True, slots=True)
class Test:
    """One question.

    kind: "pp" reads a prompt of so many tokens, "tg" generates so many, one a step.
    depth: tokens that are in the context before. sequences: how many do so at once.
    """

    kind: Literal["pp", "tg"]
    tokens: int
    depth: int = 0
    sequences: int = 1

    @property
    def name(self) -> str:
        """As llama-bench writes it."""
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def prompt(self) -> int:
        """Tokens of each request's prompt."""
        return self.depth + self.tokens if self.kind == "pp" else max(self.depth, 1)

    def drawn(self, step: int) -> int:
        """Tokens that each request may draw, with steps of so many tokens.

        The first ends the prompt. Sequences whose prompts are through go on while others are read.
        """
        if self.kind == "pp":
            return 1
        reading = -(-self.sequences * self.prompt // max(step - self.sequences, 1))
        return 1 + self.tokens + (reading if self.sequences > 1 else 0)

    def context(self, step: int) -> int:
        """Tokens that a sequence needs room for."""
        return self.prompt + self.drawn(step)


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured, in tokens per second: all sequences together, a figure for each run."""

    test: Test
    threads: int
    rates: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    def share(self, weights: int, limit: float) -> float | None:
        """Part of the read rate `limit` (bytes/s) that a "tg" test takes, reading `weights` bytes a step."""
        return self.median / self.test.sequences * weights / limit if self.test.kind == "tg" else None


# ---- the plan ----------------------------------------------------------------------
def most_sequences(plan: Plan) -> int:
    """How many sequences one step takes."""
    return max(s.hi for v in plan.variants for s in v.stream.symbols if s.name == "S")


def most_tokens(plan: Plan) -> int:
    """How many tokens one step takes."""
    return max(v.hi for v in plan.variants)


def check(plan: Plan, tests: Sequence[Test]) -> None:
    """Raises RequestError for a plan without a tokenizer, and tests that don't fit it."""
    if plan.chat is None:
        raise RequestError(
            f"{plan.name} isn't a language model with a tokenizer",
            hint="there are no tokens to count: time flashrt.load(...).call(inputs) instead",
        )
    most, step = most_sequences(plan), most_tokens(plan)
    for test in tests:
        if test.sequences > most:
            raise RequestError(f"--batch {test.sequences}: {plan.name} takes {most} sequences in a step")
        if (needed := test.context(step)) > plan.chat.context:
            together = f" with {test.sequences} sequences" if test.sequences > 1 else ""
            raise RequestError(
                f"{test.name}{together} needs a context of {needed} tokens, "
                f"{plan.name} holds {plan.chat.context}",
                hint="ask for fewer tokens, or compile the model with a longer --context",
            )


def whole_contexts(plan: Plan, tests: Sequence[Test]) -> int:
    """How many sequences of the whole context the cache must hold for the largest test."""
    assert plan.chat is not None
    return -(-max(_pages(t, most_tokens(plan)) for t in tests) // pages_for(plan.chat.context))


def _pages(test: Test, step: int) -> int:
    """Pages that a test takes; one to spare for each sequence, or the scheduler lets the next one wait."""
    return test.sequences * (pages_for(test.context(step)) + 1)


def parameters(plan: Plan) -> int:
    """Elements of all weights."""
    return sum(int(evaluate(product(w.type.shape), {})) for w in plan.logical.weights)


def token_bytes(plan: Plan) -> int:
    """Bytes of weights that a step of one token reads: not the embedding's other rows, nor other experts."""
    stream = next(v.stream for v in plan.variants if v.lo <= 1 <= v.hi)
    read = {
        (instr.device, arg.block): _share(instr)
        for instr in stream.instrs
        if isinstance(instr, Dispatch) and "embedding" not in instr.kernel
        for arg in instr.args
        if isinstance(arg, BlockRef)
    }
    return round(sum(b.bytes * read.get((b.device, b.name), 0) for b in stream.blocks))


def _share(instr: Dispatch) -> float:
    """Of the weights of an instruction, what one token reads."""
    top_k, experts = instr.attr("top_k"), instr.attr("experts")
    return top_k / experts if isinstance(top_k, int) and isinstance(experts, int) else 1.0


# ---- measuring ---------------------------------------------------------------------
def measure(
    llm: LLM,
    tests: Sequence[Test],
    *,
    threads: int,
    repeats: int = 5,
    warm_up: int = 1,
    on_run: Callable[[Test, int], None] = lambda test, turn: None,
) -> list[Speed]:
    """Runs the tests in turn, `repeats` times over, after `warm_up` rounds that don't count.

    threads: of the team of `llm`, to be told with the result. on_run: (test, round), before each run.
    Raises RequestError when the KV cache is too small for a test.
    """
    pool, step = llm.generator.pool.total, llm.program.max_tokens
    for test in tests:
        if _pages(test, step) > pool:
            raise RequestError(
                f"no room in memory for {test.name} with {test.sequences} sequences: it takes "
                f"{_pages(test, step)} pages of KV cache, and there are {pool}"
            )
    rates: dict[Test, list[float]] = {test: [] for test in tests}
    for turn in range(-warm_up, repeats):
        for test in tests:
            on_run(test, turn)
            rate = (_read if test.kind == "pp" else _generate)(llm, test)
            if turn >= 0:
                rates[test].append(rate)
    return [Speed(test, threads, tuple(measured)) for test, measured in rates.items()]


def _read(llm: LLM, test: Test) -> float:
    """Prompt tokens per second; what the depth asks for is read before, in steps that end where it ends."""
    generator = llm.generator
    _add(llm, test)
    step, left = generator.scheduler.max_tokens_per_step, test.depth
    while left:
        generator.scheduler.max_tokens_per_step = min(step, left)
        generator.step()
        left -= min(step, left)
    generator.scheduler.max_tokens_per_step = step
    begun = time.perf_counter()
    generator.run()
    return test.sequences * test.tokens / (time.perf_counter() - begun)


def _generate(llm: LLM, test: Test) -> float:
    """Generated tokens per second, from the moment that every sequence has its first token."""
    generator = llm.generator
    ids = _add(llm, test)
    _until_all_began(generator, ids)
    begun = time.perf_counter()
    drawn = sum(len(generator.step()) for _ in range(test.tokens))
    seconds = time.perf_counter() - begun
    assert drawn == test.tokens * test.sequences, (test, drawn)
    for id in ids:
        generator.cancel(id)
    return drawn / seconds


def _until_all_began(generator: Generator, ids: set[str]) -> None:
    began: set[str] = set()
    while began != ids:
        began |= {event.request for event in generator.step()}


_numbers = itertools.count()


def _add(llm: LLM, test: Test) -> set[str]:
    """Adds the test's requests, of token ids that stand for any text; gives their names."""
    known = vocabulary(llm.plan)
    how = Sampling(max_tokens=test.drawn(llm.program.max_tokens), ignore_eos=True)
    added = set()
    for sequence in range(test.sequences):
        numbers = range(sequence, sequence + test.prompt)
        request = Request(f"bench{next(_numbers)}", tuple((7 * i * i + 13 * i) % known for i in numbers), how)
        llm.generator.add(request)
        added.add(request.id)
    return added


def read_rate(nbytes: int, threads: int, seconds: float = 1.0) -> float:
    """Bytes per second read from a working set of `nbytes`, all threads together; the best of many times."""
    data = np.ones(max(nbytes // 8, threads), np.int64)
    parts = np.array_split(data, threads)
    best, end = 0.0, time.perf_counter() + seconds
    with ThreadPoolExecutor(threads) as pool:
        while time.perf_counter() < end:
            begun = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, data.nbytes / (time.perf_counter() - begun))
    return best
