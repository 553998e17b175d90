"""A model without weights whose next token depends on everything its cache holds.

Each token leaves in its page a digest of itself, its position and the digest
before it, read back through the page table; a drawn token is a digest of all of
them. So a wrong page, position, row, order or a page shared by two sequences
changes the tokens that follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashrt.ir.ops import PAGE
from flashrt.llm.kv import pages_for
from flashrt.llm.request import Sampling
from flashrt.llm.scheduler import history_size

MODULUS = (1 << 61) - 1
DTYPES = {
    "ids": "i4", "positions": "i4", "rows": "i4", "seq": "i4", "pages": "i4", "temperature": "f4",
    "top_k": "i4", "top_p": "f4", "min_p": "f4", "penalty": "f4", "seed": "i8", "draw": "i8", "history": "i4",
}  # fmt: skip


def digest(*numbers: int) -> int:
    """A number that depends on every one of `numbers` and their order."""
    state = 0x9E3779B9
    for number in numbers:
        state = ((state ^ (state >> 29)) * 0xBF58476D1CE4E5B9 + int(number) + 1) % MODULUS
    return state


def link(before: int, token: int, position: int) -> int:
    """What a token leaves in the cache."""
    return digest(before, token, position)


def draw(links: list[int], sampling: tuple[float, ...], seed: int, at: int, history: list[int]) -> int:
    """The token after a prefix, before it is folded into the vocabulary."""
    numbers = [digest(*links)]
    if sampling[0] > 0:
        numbers += [hash(sampling[:4]) % MODULUS, seed, at]
    if sampling[4] != 1:
        numbers += [hash(sampling[4]) % MODULUS, *history]
    return digest(*numbers)


@dataclass
class FakeModel:
    """call(inputs, symbols, outputs) like a compiled model's. limits: what its memory is sized for."""

    pages: int
    limits: Mapping[str, int]
    vocabulary: int = 251
    steps: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        poison = np.random.default_rng(5)
        self.cache = poison.integers(0, MODULUS, (self.pages, PAGE))
        self.logits = np.zeros((self.limits["N"], self.vocabulary), np.float32)

    def __call__(
        self, inputs: dict[str, Any], symbols: dict[str, int], outputs: tuple[str, ...]
    ) -> dict[str, Any]:
        self._check(inputs, symbols)
        self.steps.append(symbols)
        for token, position, seq in zip(inputs["ids"], inputs["positions"], inputs["seq"], strict=True):
            before = self._read(inputs["pages"][seq], position - 1) if position else 0
            page = inputs["pages"][seq][position // PAGE]
            self.cache[page, position % PAGE] = link(before, int(token), int(position))
        tokens = [self._row(inputs, n) for n in range(symbols["N"])]
        logits = self.logits[: len(tokens)]
        logits[:] = 0
        logits[np.arange(len(tokens)), tokens] = 1
        found = {"tokens": np.array(tokens, np.int32), "logits": logits}
        return {name: found[name] for name in outputs}

    def _read(self, table: Any, position: int) -> int:
        return int(self.cache[table[position // PAGE], position % PAGE])

    def _row(self, inputs: dict[str, Any], n: int) -> int:
        at = inputs["rows"][n]
        table, position = inputs["pages"][inputs["seq"][at]], int(inputs["positions"][at])
        links = [self._read(table, p) for p in range(position + 1)]
        how = tuple(float(inputs[k][n]) for k in ("temperature", "top_k", "top_p", "min_p", "penalty"))
        history = [int(t) for t in inputs["history"][n] if t >= 0]
        return draw(links, how, int(inputs["seed"][n]), int(inputs["draw"][n]), history) % self.vocabulary

    def _check(self, inputs: dict[str, Any], symbols: dict[str, int]) -> None:
        """Shapes, dtypes and limits as the graph declares them."""
        shapes = {"ids": "T", "positions": "T", "seq": "T", "pages": "SM", "history": "NH"}
        assert inputs.keys() == DTYPES.keys()
        for name, array in inputs.items():
            assert array.dtype == np.dtype(DTYPES[name]), (name, array.dtype)
            want = tuple(symbols[d] for d in shapes.get(name, "N"))
            assert array.shape == want, (name, array.shape, want)
        assert symbols.keys() == self.limits.keys()
        assert all(1 <= symbols[s] <= most for s, most in self.limits.items()), (symbols, self.limits)
        assert symbols["C"] == inputs["positions"].max() + 1
        assert symbols["H"] & (symbols["H"] - 1) == 0


def fake(context: int, pages: int, max_tokens_per_step: int, max_sequences: int) -> FakeModel:
    """A fake sized for a generator with these limits: no symbol of a step may be larger."""
    rows = min(max_sequences, max_tokens_per_step)
    limits = {"T": max_tokens_per_step, "N": rows, "S": rows, "M": pages_for(context), "C": context}
    return FakeModel(pages, {**limits, "H": history_size(context)})


def as_given(sampling: Sampling) -> tuple[float, ...]:
    """The five numbers `draw` takes, as precise as the model's inputs hold them."""
    exact = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.penalty)
    return tuple(float(np.float32(number)) for number in exact)


def expected(
    prompt: tuple[int, ...], sampling: Sampling, eos: tuple[int, ...], context: int, vocabulary: int = 251
) -> tuple[tuple[int, ...], str]:
    """Tokens and finish reason by definition: no cache, no pages, no steps. Needs a seed if it samples."""
    known = list(prompt)
    links: list[int] = []
    how = as_given(sampling)
    for position, token in enumerate(known):
        links.append(link(links[-1] if links else 0, token, position))
    while len(known) < min(context, len(prompt) + sampling.max_tokens):
        history = known if sampling.penalty != 1 else []
        known.append(draw(links, how, sampling.seed or 0, len(known), history) % vocabulary)
        links.append(link(links[-1], known[-1], len(known) - 1))
        if known[-1] in eos and not sampling.ignore_eos:
            return tuple(known[len(prompt) :]), "stop"
    return tuple(known[len(prompt) :]), "length"
