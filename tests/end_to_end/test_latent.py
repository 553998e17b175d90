"""Latent attention, whole: what the cache takes, no row on the host, and transformers' tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from flashrt.frontend import rope
from flashrt.ir import micro
from flashrt.ir.types import size
from flashrt.llm.generate import Generator
from flashrt.llm.request import Sampling
from tests.end_to_end.flat import assert_same_bits, generate
from tests.end_to_end.test_experts import LATENT
from tests.end_to_end.test_transformers import CONTEXT, LENGTHS, TOLERANCE, Case, open_on, theirs
from tests.end_to_end.tiny_hf import write_model

RANK, SHARED = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
DENSE: dict[str, Any] = {**LATENT, "n_routed_experts": 8, "first_k_dense_replace": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain-queries": ("deepseek_v3", {**DENSE, "q_lora_rank": None}),
    "halves": ("deepseek_v3", {**DENSE, "rope_interleave": False}),
    "minicpm3": ("minicpm3", LATENT),
    "complex-pairs": ("deepseek_v2", DENSE),
}
ALL = ["plain-queries", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "plain-queries")]
NEW = 64  # tokens


@pytest.fixture(scope="module", params=ALL)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    kind, facts = MODELS[request.param]
    folder = tmp_path_factory.mktemp(kind)
    model = write_model(folder, kind, **facts)
    rope.freeze(model, CONTEXT)
    rng = np.random.default_rng(1)
    tokens = {n: rng.integers(3, model.config.vocab_size, length).tolist() for n, length in LENGTHS.items()}
    wanted = {n: theirs(model, ids) for n, ids in tokens.items()}
    with ExitStack() as opened:
        programs = {"cpu:0": opened.enter_context(open_on("cpu:0", folder))}
        yield Case(request.param, model, programs, tokens, wanted)


def test_logits(case: Case) -> None:
    errors = case.errors("cpu:0")
    assert max(errors.values()) < TOLERANCE, errors


def test_a_token_takes_a_latent_and_a_key_of_the_cache(case: Case) -> None:
    program = case.programs["cpu:0"]
    for variant in program.plan.variants:
        for state in variant.stream.states:
            assert size(state.type.bytes, {"P": 1}) == 16 * (RANK + SHARED) * 4
    layers = case.model.config.num_hidden_layers
    held = sum(place.bytes for place in program.residents.states.values())
    assert held == program.pages * 16 * layers * (RANK + SHARED) * 4


def test_nothing_of_attention_runs_on_the_host(case: Case) -> None:
    streams = [v.stream for v in case.programs["cpu:0"].plan.variants]
    dispatches = [i for s in streams for i in s.instrs if isinstance(i, micro.Dispatch)]
    assert not [i.kernel for i in dispatches if "self_attn" in i.node and i.kernel.startswith("host.")]
    assert {"attention+latent", "head_linear.f32"} <= {i.kernel for i in dispatches}


def likeliest(model: Any, ids: list[int], drawn: tuple[int, ...]) -> tuple[int, ...]:
    """transformers' likeliest token in place of each one drawn behind a prompt, the others given."""
    logits = theirs(model, [*ids, *drawn[:-1]])[len(ids) - 1 :]
    return tuple(logits.argmax(-1).tolist())


def test_greedy_tokens_also_when_pages_run_short(case: Case) -> None:
    program = case.programs["cpu:0"]
    prompts = {n: case.tokens[n][:count] for n, count in (("a", 5), ("b", 33), ("c", 18))}
    how = Sampling(max_tokens=NEW, ignore_eos=True, temperature=0.0)

    def run(pages: int) -> tuple[Generator, Any]:
        generator = Generator(
            program.call, context=CONTEXT, eos=(), pages=pages, max_tokens_per_step=48, max_sequences=3
        )
        return generator, generate(generator, prompts, how)

    _, plenty = run(24)
    for name, (tokens, _) in plenty.items():
        assert len(tokens) == NEW and tokens == likeliest(case.model, prompts[name], tokens), name
    _, short = run(9)
    assert_same_bits(short, plenty)
