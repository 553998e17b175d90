"""One model type: a tiny random model is saved, compiled for the reference device, run beside transformers.

Steps are those of serving: prefill of ragged sequences, prefill beside decode, decode. Tokens are given, so
that a close call between two tokens can't hide or cause a difference.
"""

from __future__ import annotations

import re
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flashrt import engine
from flashrt.compiler import CompileOptions
from flashrt.errors import FlashrtError
from flashrt.program import Plan
from tests.end_to_end.flat import F32, Flat, Part
from tests.end_to_end.tiny_hf import random_model, save_model
from tools.sweep_models import configs
from tools.sweep_models.table import Result

BOUND = 1e-3  # of the largest logit
LARGEST = 60_000_000  # parameters: above, the configuration didn't shrink
LENGTHS = {"a": 12, "b": 29, "c": 47, "d": 20}  # tokens: all longer than the window, some than a page or two
STEPS: tuple[tuple[Part, ...], ...] = (
    (("a", 5), ("b", 21), ("c", 34)),
    (("a", 1), ("b", 1), ("c", 9), ("d", 14)),
    (("d", 1), ("c", 1), ("a", 1), ("b", 1)),
    (("a", 1), ("b", 1), ("c", 1), ("d", 1)),
)


def types() -> tuple[str, ...]:
    """Every causal-LM type of the installed transformers."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def attempt(model_type: str) -> Result:
    """The verdict on one type: with windows, and if that is refused as the class's defaults are."""
    found = _attempt(model_type, windows=True)
    if found.verdict == "refused" and _has_window(model_type):
        plain = _attempt(model_type, windows=False)
        if plain.verdict == "right":
            return replace(plain, note=f"{plain.note}; a window is refused")
    return found


def _has_window(model_type: str) -> bool:
    return getattr(configs.tiny(model_type), "sliding_window", None) is not None


def _attempt(model_type: str, *, windows: bool) -> Result:
    try:
        config = configs.tiny(model_type, windows=windows)
        _check_size(config)
        model = random_model(config)
        tokens = _tokens(int(model.config.get_text_config().vocab_size))
        wanted = {name: theirs(model.eval(), ids) for name, ids in tokens.items()}
    except Exception as error:  # transformers' own: no evidence either way
        return Result(model_type, "untried", f"no tiny model of it: {_brief(error)}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_model(model, Path(folder))
        except Exception as error:
            return Result(model_type, "untried", f"transformers doesn't save and load it: {_brief(error)}")
        try:
            return _compare(model_type, config, folder, tokens, wanted)
        except Exception as error:  # a fault of flashrt's, which the table tells
            traceback.print_exc()
            return Result(model_type, "failed", _brief(error))


def _check_size(config: Any) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count / 1e6:.0f}M parameters are left")


def _tokens(vocab: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(1)
    return {name: rng.integers(3, min(vocab, configs.VOCAB), size).tolist() for name, size in LENGTHS.items()}


def theirs(model: Any, ids: list[int]) -> F32:
    """transformers' logits [tokens, V] of one sequence, its attention computed eagerly."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits: F32 = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return logits


def _compare(
    model_type: str, config: Any, folder: str, tokens: dict[str, list[int]], wanted: dict[str, F32]
) -> Result:
    limited = getattr(config.get_text_config(), "max_position_embeddings", None)
    options = CompileOptions(context=None if limited else configs.CONTEXT, tokens=64, sequences=64)
    try:
        plan = engine.obtain(folder, options, devices=("reference:0",)).plan
    except FlashrtError as error:
        return Result(model_type, "refused", _plain(error.what.replace(folder, "the folder")))
    largest = max(float(np.abs(logits).max()) for logits in wanted.values())
    worst = 0.0
    with engine.open_plan(plan, pages=16, threads=1) as program:
        flat = Flat(program, tokens)
        for step in STEPS:
            starts = dict(flat.done)
            for name, ours in flat.step(step).items():
                difference = ours - wanted[name][starts[name] : flat.done[name]]
                worst = float(np.maximum(worst, np.abs(difference).max() / largest))  # keeps NaN
    verdict = "right" if worst < BOUND else "wrong"  # NaN is wrong
    return Result(model_type, verdict, _attention(plan), worst, _unnamed(plan))


def _attention(plan: Plan) -> str:
    """What the type's attention has that plain attention hasn't."""
    nodes = [n for n in plan.variants[0].physical.nodes if n.op.startswith("attention")]
    kinds = {f"window {n.attr('window')}" if n.attr("window") else "full" for n in nodes}
    extras = [name for name in ("softcap", "sinks") if any(n.attr(name) for n in nodes)]
    states = {state for n in nodes for state in n.reads}
    shared = [f"{len(nodes) - len(states)} layers share keys"] if len(states) < len(nodes) else []
    return ", ".join([*sorted(kinds), *extras, *shared])


def _unnamed(plan: Plan) -> tuple[str, ...]:
    """The operators that no kernel is for: they run on the reference implementation."""
    ops = {n.op.removeprefix("host.") for n in plan.variants[0].physical.nodes}
    return tuple(sorted(op.removeprefix("aten.") for op in ops if op.startswith("aten.")))


def _brief(error: Exception) -> str:
    return _plain(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}")


def _plain(text: str) -> str:
    """Without what would break a table, or changes from run to run."""
    return re.sub(r"0x[0-9a-f]+", "0x…", re.sub(r"\s+", " ", text)).replace("|", "/").strip()
