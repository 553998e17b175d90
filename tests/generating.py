"""Three prompts through the tiny model of tests/tiny.py: what tests of whole plans compare, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashrt.llm.generate import Generator
from flashrt.llm.request import Request, Sampling
from tests.tiny import CONTEXT

PAGES = 48
Call = Callable[[Any, Any, Any], Any]  # inputs, symbols, names of outputs → outputs
Result = list[tuple[tuple[int, ...], bytes]]  # tokens and logits of each prompt


def generate(call: Call, tokens: int = 12) -> Result:
    """Three prompts in one flat batch, the longest in chunks, then decode: tokens and logits of each."""
    generator = Generator(call, context=CONTEXT, eos=(), pages=PAGES, max_tokens_per_step=32, max_sequences=8)
    for name, length in (("a", 5), ("b", 40), ("c", 1)):
        prompt = tuple((11 * i + length) % 96 for i in range(length))
        generator.add(
            Request(name, prompt, Sampling(max_tokens=tokens, temperature=0.7, seed=length), logits=True)
        )
    logits: dict[str, list[bytes]] = {}
    done = {}
    while not generator.idle:
        for event in generator.step():
            if event.logits is not None:
                logits.setdefault(event.request, []).append(event.logits.tobytes())
            if event.completion:
                done[event.request] = event.completion
    assert generator.pool.free == PAGES
    return [(done[n].tokens, b"".join(logits[n])) for n in sorted(done)]
