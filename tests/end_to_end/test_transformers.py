"""Hugging Face folders give transformers' logits: prefill, prefill beside decode, decode, on each device.

One model for each named family, and for each kind of RoPE, window and cap.

Tokens are given, never drawn, so that a close call between two tokens can't hide or cause a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashrt import engine
from flashrt.compiler import CompileOptions
from flashrt.frontend import rope
from flashrt.program import Program
from tests.end_to_end.flat import F32, Flat, Part
from tests.end_to_end.tiny_hf import VOCAB, write_model

TOLERANCE = 1e-4  # of logits up to about 5; float32 in two orders of addition gives about 1e-5
DEVICES = ("reference:0", "cpu:0")
WINDOW = 8
CONTEXT = 128  # tokens
DECODE = 64  # steps
LENGTHS = {"a": 70, "b": 86, "c": 107, "d": 78}  # tokens: far more than the window, and several pages
STEPS: dict[str, list[list[Part]]] = {
    "prefill": [[("a", 5), ("b", 21), ("c", 34)]],
    "prefill beside decode": [[("a", 1), ("b", 1), ("c", 9), ("d", 14)]],
    "decode": [[("d", 1), ("c", 1), ("a", 1), ("b", 1)]] * DECODE,
}
SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
GEMMA: dict[str, Any] = {
    **SLIDING, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16,
    "query_pre_attn_scalar": 16,
}  # fmt: skip
TIED: dict[str, Any] = {"tie_word_embeddings": True}
# sizes that fill no block, group or vector of the kernels
ODD: dict[str, Any] = {
    "hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 100,
    "vocab_size": VOCAB - 9,
}  # fmt: skip
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
# transformers takes the long factors for a batch whose longest sequence is above 8 tokens: all are here
LONG: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + 0.5 * i for i in range(8)],
}  # fmt: skip
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
BART: dict[str, Any] = {
    "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
    "is_decoder": True, "is_encoder_decoder": False,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-sharded-tied-bf16": ("llama", {**TIED, "dtype": torch.bfloat16, "shard": "40KB"}),
    "llama-odd-sizes": ("llama", ODD),
    "qwen2": ("qwen2", {}),
    "mistral-window": ("mistral", SLIDING),
}  # fmt: skip
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", TIED),
    "llama-bf16": ("llama", {"dtype": torch.bfloat16}),
    "qwen2-tied": ("qwen2", TIED),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma2-caps": ("gemma2", {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    "qwen2-some-windows": ("qwen2", {**SLIDING, "use_sliding_window": True, "max_window_layers": 1}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", SLIDING),
    "phi3-longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 8}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN}),
    "llama-long-rope": ("llama", {"rope_parameters": LONG}),
    "llama-dynamic-rope": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "gpt2": ("gpt2", GPT2),
    "phi": ("phi", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    "starcoder2-window": ("starcoder2", SLIDING),
    "smollm3-no-rope": ("smollm3", {"no_rope_layers": [1, 0]}),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "gpt_neox-renamed-head": ("gpt_neox", {"rotary_pct": 0.5}),
    "cohere": ("cohere", {"logit_scale": 1.0}),
    "olmo-norm-without-weights": ("olmo", {}),
    "glm4": ("glm4", {"head_dim": 16}),
    "gptj": ("gptj", {**GPT2, "rotary_dim": 8}),
    "bart-own-positions": ("bart", BART),
    "roberta-positions-from-padding": ("roberta", {"is_decoder": True, "max_position_embeddings": 129}),
    "rembert-spelled-attention": ("rembert", {"is_decoder": True, "input_embedding_size": 32}),
    "openai-gpt-spelled-mask": ("openai-gpt", {**GPT2, "n_positions": 512, "max_position_embeddings": 512}),
}
ALL = [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


@dataclass
class Case:
    """A model as transformers has it, and the same opened on each device."""

    name: str
    model: Any
    programs: dict[str, Program]
    tokens: dict[str, list[int]]
    wanted: dict[str, F32]

    def errors(self, device: str) -> dict[str, float]:
        """The largest error of each step's logits."""
        flat, found = Flat(self.programs[device], self.tokens), {}
        for what, steps in STEPS.items():
            found[what] = max(self._error(flat, step) for step in steps)
        return found

    def _error(self, flat: Flat, step: list[Part]) -> float:
        starts = dict(flat.done)
        ours = flat.step(step)
        wanted = {name: self.wanted[name][starts[name] : flat.done[name]] for name in ours}
        return max(float(np.abs(ours[name] - wanted[name]).max()) for name in ours)


@pytest.fixture(scope="module", params=ALL)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name = request.param
    kind, facts = (MODELS | MORE)[name]
    folder = tmp_path_factory.mktemp(name)
    model = write_model(folder, kind, **facts)
    rope.freeze(model, CONTEXT)  # else frequencies of dynamic RoPE change as a sequence grows
    rng = np.random.default_rng(1)
    tokens = {n: rng.integers(3, model.config.vocab_size, length).tolist() for n, length in LENGTHS.items()}
    wanted = {n: theirs(model, ids) for n, ids in tokens.items()}
    with ExitStack() as opened:
        programs = {d: opened.enter_context(open_on(d, folder)) for d in DEVICES}
        yield Case(name, model, programs, tokens, wanted)


def theirs(model: Any, ids: list[int]) -> F32:
    """transformers' logits [tokens, V] of one sequence."""
    with torch.no_grad():
        logits: F32 = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return logits


def open_on(device: str, folder: Path) -> Program:
    options = CompileOptions(context=CONTEXT, tokens=64, sequences=64)
    plan = engine.obtain(str(folder), options, devices=(device,)).plan
    return engine.open_plan(plan, pages=24, threads=1, poison=True)


def test_the_logits_say_something(case: Case) -> None:
    """Else agreement would mean nothing: they spread, and depend on tokens far back."""
    logits = np.concatenate(list(case.wanted.values()))
    assert logits.std() > 0.3
    changed = theirs(case.model, [case.tokens["a"][0] ^ 1, *case.tokens["a"][1:]])
    assert np.abs(changed - case.wanted["a"])[3:6].max() > 10 * TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
def test_logits(case: Case, device: str) -> None:
    errors = case.errors(device)
    told = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
    print(f"{case.name} on {device}: {told}")
    assert max(errors.values()) < TOLERANCE, (
        f"{case.name} on {device}: logits differ from transformers': {told}"
    )
