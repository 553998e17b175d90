"""`flashrt run MODEL` of a text encoder: batches of token ids, or one text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flashrt.cli.arrays import Arrays, call, check_target, write_arrays
from flashrt.cli.terminal import peak_memory, say, size
from flashrt.errors import RequestError

if TYPE_CHECKING:
    from flashrt.program import Plan, Program

IDS, EMBEDDING = "input_ids", "sentence_embedding"
DEFAULTS = {
    "attention_mask": 1,
    "token_type_ids": 0,
}  # as transformers has them: no padding, one kind of token


def run_text(plan: Plan, text: str, target: Path | None, *, threads: int | None, as_json: bool) -> None:
    """Prints the embedding of a text, and writes all outputs to `target`.

    Raises:
        RequestError: the text is empty, the folder had no tokenizer, or the model gives no embedding and
            there is no target.
    """
    if target is not None:
        check_target(target)
    elif EMBEDDING not in {o.name for o in plan.logical.outputs}:
        raise RequestError(
            f"{plan.name} gives no {EMBEDDING}: its folder has no modules.json of sentence-transformers",
            hint=f"add --output OUT.npz to keep {', '.join(o.name for o in plan.logical.outputs)}",
        )
    ids = _ids(plan, text)
    outputs, seconds = call(plan, ids, threads)
    if target is not None:
        write_arrays(target, outputs)
    vector = outputs[EMBEDDING][0].tolist() if EMBEDDING in outputs else None
    tokens = next(iter(ids.values())).size
    if as_json:
        facts = {
            "embedding": vector, "tokens": tokens, "seconds": seconds, "peak_memory_bytes": peak_memory()
        }  # fmt: skip
        sys.stdout.write(json.dumps(facts) + "\n")
        return
    if vector is not None:
        sys.stdout.write(json.dumps(vector) + "\n")
    kept = f"{', '.join(outputs)} → {target} · " if target is not None else ""
    say(f"{kept}{tokens} tokens · {seconds * 1e3:,.1f} ms · peak memory {size(peak_memory())}", "dim")


def _ids(plan: Plan, text: str) -> Arrays:
    """The text as token ids [1,T]; one that is too long is cut, as its tokenizer says."""
    import numpy as np

    from flashrt.llm.chat import encoded

    assert plan.text is not None
    if not plan.text.tokenizer:
        raise RequestError(
            f"{plan.name} has no tokenizer.json, so it takes no text", hint="give token ids: --input IN.npz"
        )
    ids, types = encoded(plan.text.tokenizer, text)
    if not ids:
        raise RequestError("the text is empty: it has no tokens")
    given = {IDS: np.array([ids], np.int64)}
    if "token_type_ids" in plan.inputs:
        given["token_type_ids"] = np.array([types], np.int64)
    return given


def encode(program: Program, given: Arrays) -> Arrays:
    """One call for as many texts as a step takes; masks and kinds of tokens may be left out."""
    import numpy as np

    plan = program.plan
    ids = given.get(IDS)
    if ids is None or ids.ndim != 2:
        return program.call(given)  # which says what it wants
    missing = {n: v for n, v in DEFAULTS.items() if n in plan.inputs and n not in given}
    given = {**given, **{name: np.full_like(ids, value) for name, value in missing.items()}}
    most = next(s.hi for s in plan.logical.symbols if s.name == "B")
    if len(ids) <= most or len({len(a) for a in given.values() if a.ndim}) != 1:
        return program.call(given)
    parts = [
        dict(program.call({n: a[start : start + most] for n, a in given.items()}))
        for start in range(0, len(ids), most)
    ]
    return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
