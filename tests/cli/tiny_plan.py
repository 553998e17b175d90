"""A tiny language model with text, made of arrays: its plan needs no torch and a fraction of a second.

The tokenizer's tokens are <|end|>, the printable ASCII characters and the space: 96 in all.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from flashrt import engine, program
from flashrt.compiler import CompileOptions, compile_model
from flashrt.frontend.imported import ChatFacts, Imported
from flashrt.ir import logical, text
from flashrt.program import Plan
from tests.llm.tiny_chat import byte_level
from tests.tiny import CONTEXT, VOCAB, tiny_graph, tiny_import

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"


def graph() -> logical.Graph:
    """The tiny model with plain f32 weights."""
    made = tiny_graph()
    return replace(made, weights=tuple(replace(w, layout="f32") for w in made.weights))


@cache
def constants() -> dict[str, np.ndarray]:
    """Random weights by name, the same every time."""
    rng = np.random.default_rng(0)
    made = {}
    for w in graph().weights:
        shape = tuple(int(d) for d in w.type.shape)  # type: ignore[arg-type]
        made[w.name] = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
    made["rotary_emb.inv_freq"] = (10000.0 ** (-np.arange(8) / 8)).astype(np.float32)
    return made


def chat() -> ChatFacts:
    """Template `u:hello a:hi `; no BOS token."""
    words = {t: i for i, t in enumerate(["<|end|>", *map(chr, range(33, 127)), "Ġ"])}
    assert len(words) == VOCAB
    facts = byte_level(template=TEMPLATE, context=CONTEXT, special={"eos_token": "<|end|>"})
    tokenizer = json.loads(facts.tokenizer)
    tokenizer["model"] |= {"vocab": words, "merges": []}
    tokenizer["added_tokens"] = tokenizer["added_tokens"][:1]
    return replace(facts, tokenizer=json.dumps(tokenizer))


def make_plan(*, device: str = "reference:0", **options: object) -> Plan:
    imported = Imported(graph(), tiny_import().weights, constants(), chat())
    return compile_model(imported, engine.machine_picture([device]), CompileOptions(**options))  # type: ignore[arg-type]


def write_plan(folder: Path, *, pack: bool = False) -> Path:
    """The plan as a folder."""
    program.save(make_plan(tokens=64), folder, pack=pack)
    return folder


def write_logical(folder: Path) -> Path:
    """The model as a text with its weights beside it, to compile without torch."""
    path = folder / "tiny.logical"
    path.write_text(text.to_text(graph()))
    np.savez(folder / "tiny.npz", **constants())  # type: ignore[arg-type]
    return path
