"""What the rounding of weights costs: perplexity and likeliest tokens, beside the model without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashrt import engine
from flashrt.errors import ModelError
from flashrt.llm.chat import Chat
from flashrt.llm.kv import pages_for
from flashrt.llm.scheduler import history_size
from flashrt.program import Plan

TEXT = Path(__file__).with_name("quality.txt")
LONGEST = 256  # tokens: enough to tell q4 from q8, and seconds on a small model
_ROWS = 16  # tokens of a step: as many rows of logits as every plan can give


@dataclass(frozen=True, slots=True)
class Quality:
    """tokens: how many next tokens were compared. perplexity, of the lossless model too: e to the mean
    surprise at the text's tokens. agreement: share of tokens after which both find the same one likeliest."""

    tokens: int
    perplexity: float
    lossless_perplexity: float
    agreement: float


def measure(plan: Plan, lossless: Plan, text: str = "") -> Quality:
    """Runs both plans of a language model over a text (the bundled one by default).

    Raises ModelError for a plan without tokenizer, or when the text is too short to say anything.
    """
    if plan.chat is None:
        raise ModelError(f"{plan.name} isn't a language model with a tokenizer")
    ids = Chat(plan.chat).prompt(text or TEXT.read_text("utf-8"))[: min(LONGEST, plan.chat.context)]
    if len(ids) < 2:
        raise ModelError("the text has fewer than two tokens", hint="take a longer one")
    surprise, best = _run(plan, ids)
    lossless_surprise, lossless_best = _run(lossless, ids)
    return Quality(
        len(surprise), float(np.exp(surprise.mean())), float(np.exp(lossless_surprise.mean())),
        float((best == lossless_best).mean()),
    )  # fmt: skip


def _run(plan: Plan, ids: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """For each token but the last: the surprise (nats) at the next one, and the likeliest instead."""
    surprise, best = [], []
    with engine.open_plan(plan, pages=pages_for(len(ids))) as program:
        for at in range(0, len(ids) - 1, _ROWS):
            end = min(at + _ROWS, len(ids) - 1)
            logits = program.call(*_step(ids, at, end))["logits"].astype(np.float64)
            most = logits.max(axis=1)
            total = most + np.log(np.exp(logits - most[:, None]).sum(axis=1))
            surprise.append(total - logits[np.arange(end - at), ids[at + 1 : end + 1]])
            best.append(logits.argmax(axis=1))
    return np.concatenate(surprise), np.concatenate(best)


def _step(ids: Sequence[int], at: int, end: int) -> tuple[dict[str, NDArray[np.generic]], dict[str, int]]:
    """Inputs and symbols of the step that computes tokens [at, end) of one sequence, logits for each."""
    n, pages = end - at, pages_for(end)
    ones, zeros = np.ones(n, np.float32), np.zeros(n, np.float32)
    inputs: dict[str, NDArray[np.generic]] = {
        "ids": np.array(ids[at:end], np.int32), "positions": np.arange(at, end, dtype=np.int32),
        "seq": np.zeros(n, np.int32), "pages": np.arange(pages, dtype=np.int32)[None],
        "rows": np.arange(n, dtype=np.int32), "temperature": zeros, "top_k": np.zeros(n, np.int32),
        "top_p": ones, "min_p": zeros, "penalty": ones, "seed": np.zeros(n, np.int64),
        "draw": np.zeros(n, np.int64), "history": np.full((n, history_size(0)), -1, np.int32),
    }  # fmt: skip
    return inputs, {"T": n, "N": n, "S": 1, "M": pages, "C": end}
