"""SmolLM2 with rounded activations: it predicts a given text almost as it does in float32."""

from __future__ import annotations

import numpy as np
import pytest

from flashrt.compiler import CompileOptions
from flashrt.engine import LLM
from tests.end_to_end.flat import F32, Flat

pytestmark = pytest.mark.model

TEXT = """A lighthouse stands where the land ends and the sea begins. For many years its keeper climbed the
stairs every evening, lit the lamp, and watched the ships pass by in the dark. He wrote down the
weather, the wind and the tide in a large book, because the harbour wanted to know. When the storms
came in winter, the waves were higher than the rocks, and nobody could reach the tower for weeks. He
had bread, fish and tea, and a radio that told him the news of the world. Later the lamp was changed
for an electric one, which needs no keeper. Now people visit the tower in summer, look at the old
book, and ask what the numbers mean. The answer is simple: they are the story of a man who was
alone, but who was never lost, since all the others found their way by him. On clear nights the
light can still be seen from twenty miles away. It turns slowly, one flash every ten seconds, and
the fishermen who come home late say that it is the first thing they look for."""


def logits_of(mode: str, step: int) -> tuple[F32, list[int]]:
    """(logits [T, V] after each token of the text in steps of so many tokens, the tokens)."""
    options = CompileOptions(context=256, tokens=64, sequences=64, numerics=mode)
    with LLM("smollm2", options=options, threads=2) as llm:
        ids = llm.tokens(TEXT.replace("\n", " "), raw=True)[:192]
        flat = Flat(llm.program, {"text": ids})
        parts = [flat.step([("text", step)])["text"] for _ in range(len(ids) // step)]
    return np.concatenate(parts), ids[: step * len(parts)]


def loss(logits: F32, ids: list[int]) -> float:
    """Mean of -log p of each next token, in nats."""
    wide = logits[:-1].astype(np.float64)
    highest = wide.max(1, keepdims=True)
    log_sum = np.log(np.exp(wide - highest).sum(1)) + highest[:, 0]
    return float((log_sum - wide[np.arange(len(wide)), ids[1:]]).mean())


@pytest.fixture(scope="module")
def exact() -> F32:
    return logits_of("exact", 64)[0]


@pytest.mark.parametrize("mode,step", [("int8", 16), ("int8", 64), ("fast", 64)])
def test_rounded_activations_predict_the_same_text(exact: F32, mode: str, step: int) -> None:
    logits, ids = logits_of(mode, step)
    want = exact[: len(ids)]
    same, losses = float((logits.argmax(1) == want.argmax(1)).mean()), (loss(logits, ids), loss(want, ids))
    print(f"{mode}, steps of {step}: {same:.1%} of {len(ids)} likeliest tokens equal, loss {losses}")
    assert same >= 0.95
    assert abs(losses[0] - losses[1]) < 0.02


def test_int8_bits_do_not_depend_on_the_step() -> None:
    many, _ = logits_of("int8", 64)
    few, _ = logits_of("int8", 16)
    assert many[: len(few)].tobytes() == few[: len(many)].tobytes()
