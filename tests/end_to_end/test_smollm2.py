"""The bundled SmolLM2 (GGUF, Q4_1): its greedy text is transformers', whatever shares its steps.

The model that transformers runs is made here from the file by the `gguf` package alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flashrt import engine
from flashrt.compiler import CompileOptions
from flashrt.engine import LLM
from flashrt.frontend import models
from flashrt.llm.request import Sampling
from flashrt.program import Plan
from tests.end_to_end.flat import F32, Flat, Generated, assert_same_bits, generate

pytestmark = pytest.mark.model

CONTEXT = 256
TOKENS = 64
TIE = 1e-3  # two logits nearer than this may change places
TOLERANCE = 1e-3  # of logits up to about 40
PROMPTS = (
    "Hi", "What is the capital of France?", "Write a haiku about the sea.", "Count from 1 to 20.",
    "Explain in two sentences why the sky is blue.", "def fibonacci(n):", "Translate to Spanish: good day",
    "List three uses of a brick.", "Who wrote Hamlet, and when?", "Äpfel, 猫 und 🐈: was ist das?",
)  # fmt: skip


# ---- transformers' side --------------------------------------------------------
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def transformers_model(path: Path) -> Any:
    """The file's model with its de-quantised weights in float32."""
    reader = gguf.GGUFReader(path)
    fact = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = fact["llama.attention.head_count"], fact["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=len(fact["tokenizer.ggml.tokens"]), hidden_size=fact["llama.embedding_length"],
        intermediate_size=fact["llama.feed_forward_length"], num_hidden_layers=fact["llama.block_count"],
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True,
        max_position_embeddings=fact["llama.context_length"],
        rms_norm_eps=fact["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fact["llama.rope.freq_base"]},
    )  # fmt: skip
    weights = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in ("attn_q", "attn_k"):
            values = halves_apart(values, heads if kind == "attn_q" else kv_heads)
        prefix = f"model.layers.{tensor.name.split('.')[1]}." if tensor.name.startswith("blk.") else ""
        weights[f"{prefix}{NAMES[kind]}.weight"] = torch.tensor(values)
    model = LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    absent = model.load_state_dict(weights, strict=False)
    assert absent.unexpected_keys == [] and absent.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model


def halves_apart(rows: F32, heads: int) -> F32:
    """Rows (2i, 2i+1) of a head, which rotate together, become rows (i, i + half)."""
    n, k = rows.shape
    return rows.reshape(heads, n // heads // 2, 2, k).swapaxes(1, 2).reshape(n, k)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers_model(Path(models.find("smollm2").place))


def their_logits(model: Any, ids: Sequence[int], first: int) -> F32:
    """[n - first, V]: logits after each token from number `first` on."""
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]), logits_to_keep=len(ids) - first, use_cache=False)
    logits: F32 = out.logits[0].numpy()
    return logits


# ---- our side ------------------------------------------------------------------
@pytest.fixture(scope="module")
def plan() -> Plan:
    return engine.obtain("smollm2", CompileOptions(context=CONTEXT)).plan


@pytest.fixture(scope="module")
def llm(plan: Plan) -> Iterator[LLM]:
    with LLM("smollm2", plan=plan, sequences=len(PROMPTS), threads=2) as opened:
        yield opened


def answers(llm: LLM, prompts: Sequence[str], tokens: int) -> Generated:
    ids = {prompt: llm.tokens(prompt) for prompt in prompts}
    return generate(llm.generator, ids, Sampling(max_tokens=tokens, ignore_eos=True))


@pytest.fixture(scope="module")
def together(llm: LLM) -> Generated:
    return answers(llm, PROMPTS, TOKENS)


# ---- the same text as transformers ---------------------------------------------
def test_greedy_text_is_transformers(llm: LLM, theirs: Any, together: Generated) -> None:
    """Each token is transformers' likeliest after those before it: so its own greedy text is the same.

    At the first token that isn't, transformers' two likeliest must be as good as tied.
    """
    worst, compared = 0.0, 0
    for prompt, (tokens, got) in together.items():
        ids = llm.tokens(prompt)
        want = their_logits(theirs, [*ids, *tokens[:-1]], len(ids) - 1)
        worst = max(worst, float(np.abs(got - want).max()))
        other = np.flatnonzero(want.argmax(1) != np.array(tokens))
        compared += int(other[0]) if len(other) else len(tokens)
        for at in other[:1]:
            second, first = np.sort(want[at])[-2:]
            told = f"{prompt!r}, token {at}: the two likeliest are {first - second:.1e} apart"
            print(told)
            assert first - second < TIE, told
    print(f"{compared} of {TOKENS * len(PROMPTS)} tokens equal, largest logit error {worst:.1e}")
    assert compared >= 0.9 * TOKENS * len(PROMPTS)
    assert worst < TOLERANCE, f"logits differ from transformers' by {worst:.1e}"


def test_answers_read_well(llm: LLM) -> None:
    answer = llm.generate("What is the capital of France?", max_tokens=32)
    assert "Paris" in answer.text and answer.finish_reason == "stop"


def test_logits_of_cpu_reference_and_transformers(llm: LLM, plan: Plan, theirs: Any) -> None:
    ids = llm.tokens(PROMPTS[4])[:40]
    want = their_logits(theirs, ids, 0)
    found = {}
    on_reference = engine.obtain("smollm2", CompileOptions(context=CONTEXT), devices=("reference:0",)).plan
    for name, made in (("cpu", plan), ("reference", on_reference)):
        with engine.open_plan(made, pages=4, threads=2) as program:
            flat = Flat(program, {"a": ids})
            parts = [flat.step([("a", 1)])["a"] for _ in range(2)]
            parts += [flat.step([("a", min(14, len(ids) - at))])["a"] for at in range(2, len(ids), 14)]
            found[name] = np.concatenate(parts)
    pairs = {
        "cpu to transformers": np.abs(found["cpu"] - want).max(),
        "reference to transformers": np.abs(found["reference"] - want).max(),
        "cpu to reference": np.abs(found["cpu"] - found["reference"]).max(),
    }
    told = ", ".join(f"{what} {error:.1e}" for what, error in pairs.items())
    print(f"largest differences of logits up to {np.abs(want).max():.0f}: {told}")
    assert max(pairs.values()) < TOLERANCE, told


# ---- the same bits whatever shares the steps ------------------------------------
@pytest.mark.parametrize("prompt", [PROMPTS[1], PROMPTS[9]])
def test_alone_and_among_others(llm: LLM, together: Generated, prompt: str) -> None:
    assert_same_bits(answers(llm, [prompt], 24), together)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads(plan: Plan, together: Generated, threads: int) -> None:
    with LLM("smollm2", plan=plan, sequences=4, threads=threads) as other:
        assert_same_bits(answers(other, PROMPTS[:4], 12), together)


def test_chunk_size(llm: LLM, together: Generated) -> None:
    """Prompts in chunks of at most 16 tokens, by a program that has no larger variant."""
    options = CompileOptions(context=CONTEXT, tokens=16)
    assert max(len(llm.tokens(p)) for p in PROMPTS[:4]) > 2 * options.tokens
    with LLM("smollm2", options=options, sequences=4, threads=2) as other:
        assert_same_bits(answers(other, PROMPTS[:4], 12), together)
