"""Drives a language model's program by hand: steps with given tokens, or generation that keeps the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt.llm.generate import Generator
from flashrt.llm.kv import pages_for
from flashrt.llm.request import Request, Sampling
from flashrt.llm.scheduler import history_size
from flashrt.program import Program

F32 = NDArray[np.float32]
Part = tuple[str, int]  # a sequence, and how many of its next tokens the step computes
Generated = dict[str, tuple[tuple[int, ...], F32]]


def generate(generator: Generator, prompts: Mapping[str, Sequence[int]], how: Sampling) -> Generated:
    """Runs the prompts together: tokens drawn for each, and logits [tokens, V] they were drawn from."""
    for name, ids in prompts.items():
        generator.add(Request(name, tuple(ids), how, logits=True))
    drawn: dict[str, list[int]] = {name: [] for name in prompts}
    logits: dict[str, list[F32]] = {name: [] for name in prompts}
    while not generator.idle:
        for event in generator.step():
            assert event.token is not None and event.logits is not None
            drawn[event.request].append(event.token)
            logits[event.request].append(event.logits)
    assert generator.pool.used == 0, "a finished request kept its pages"
    return {name: (tuple(drawn[name]), np.stack(logits[name])) for name in prompts}


def assert_same_bits(got: Generated, want: Generated) -> None:
    """Each generation of `got` is how that of `want` begins, bit for bit."""
    for name, (tokens, logits) in got.items():
        assert tokens == want[name][0][: len(tokens)], name
        differ = np.abs(logits - want[name][1][: len(tokens)])
        assert logits.tobytes() == want[name][1][: len(tokens)].tobytes(), f"{name}: up to {differ.max():.1e}"


class Flat:
    """Sequences whose tokens are known beforehand, in one KV cache with scattered pages.

    step([("a", 5), ("b", 1)]) computes the next 5 tokens of a and the next one of b.
    """

    def __init__(self, program: Program, tokens: Mapping[str, Sequence[int]], *, seed: int = 0) -> None:
        self.program, self.tokens = program, tokens
        self.done = dict.fromkeys(tokens, 0)
        free = list(np.random.default_rng(seed).permutation(program.pages))
        self.pages = {name: [int(free.pop()) for _ in range(pages_for(len(t)))] for name, t in tokens.items()}

    def step(self, parts: Sequence[Part]) -> dict[str, F32]:
        """One call of the program: logits [count, V] of each part's tokens."""
        spans = [(name, self.done[name], self.done[name] + count) for name, count in parts]
        assert all(end <= len(self.tokens[name]) for name, _, end in spans)
        inputs, symbols = self._inputs(spans)
        logits = self.program.call(inputs, symbols)["logits"]
        self.done.update({name: end for name, _, end in spans})
        ends = np.cumsum([count for _, count in parts])
        return {name: logits[end - n : end].copy() for (name, n), end in zip(parts, ends, strict=True)}

    def _inputs(self, spans: Sequence[tuple[str, int, int]]) -> tuple[dict[str, Any], dict[str, int]]:
        total = sum(end - start for _, start, end in spans)
        longest = max(end for _, _, end in spans)
        pages = np.zeros((len(spans), pages_for(longest)), np.int32)
        for row, (name, _, end) in zip(pages, spans, strict=True):
            row[: pages_for(end)] = self.pages[name][: pages_for(end)]
        inputs = {
            "ids": np.concatenate([np.array(self.tokens[n][a:b], np.int32) for n, a, b in spans]),
            "positions": np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in spans]),
            "seq": np.repeat(np.arange(len(spans), dtype=np.int32), [b - a for _, a, b in spans]),
            "pages": pages,
            "rows": np.arange(total, dtype=np.int32),
            "temperature": np.zeros(total, np.float32),
            "top_k": np.zeros(total, np.int32),
            "top_p": np.ones(total, np.float32),
            "min_p": np.zeros(total, np.float32),
            "penalty": np.ones(total, np.float32),
            "seed": np.zeros(total, np.int64),
            "draw": np.zeros(total, np.int64),
            "history": np.full((total, history_size(0)), -1, np.int32),
        }
        sizes = {"T": total, "N": total, "S": len(spans), "M": pages.shape[1], "C": longest}
        return inputs, sizes
