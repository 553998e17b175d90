"""GGUF files of each architecture give transformers' logits, on the same weights.

The files are written here as llama.cpp's converter writes them; the `gguf` package knows the tensors' names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from flashrt.errors import UnsupportedModel
from flashrt.frontend.gguf import load_gguf
from tests.end_to_end.test_transformers import LENGTHS, TOLERANCE, Case, open_on, theirs
from tests.end_to_end.tiny_hf import SIZES, VOCAB, random_model
from tests.frontend import gguf_bytes as g

MXFP4 = gguf.GGMLQuantizationType.MXFP4
RMS, MEAN = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 16.0, "beta_slow": 2.0,
}  # fmt: skip
# architecture → (model type, configuration beyond the sizes, keys beyond the common ones)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, g.Value]]] = {
    "starcoder2": ("starcoder2", {"norm_epsilon": 2**-10}, {MEAN: g.f32(2**-10)}),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8,
            "rms_norm_eps": 2**-10, "rope_parameters": {**YARN, "truncate": False},
        },
        {
            RMS: g.f32(2**-10), "expert_count": g.u32(4), "expert_used_count": g.u32(2),
            "expert_feed_forward_length": g.u32(96), "attention.sliding_window": g.u32(8),
            "attention.key_length": g.u32(16), "attention.value_length": g.u32(16),
            "rope.scaling.type": g.string("yarn"), "rope.scaling.factor": g.f32(4),
            "rope.scaling.original_context_length": g.u32(32),
            "rope.scaling.yarn_beta_fast": g.f32(16), "rope.scaling.yarn_beta_slow": g.f32(2),
        },
    ),
    "llama": (
        "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 2**-10,
                    "rope_parameters": PLAIN},
        {RMS: g.f32(2**-10), "expert_count": g.u32(4), "expert_used_count": g.u32(2)},
    ),
    "gpt2": (
        "gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 96,
                 "tie_word_embeddings": True, "layer_norm_epsilon": 2**-10},
        {MEAN: g.f32(2**-10)},
    ),
    "granite": (
        "granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 2.0,
                    "embedding_multiplier": 3.0, "rms_norm_eps": 2**-10},
        {RMS: g.f32(2**-10), "residual_scale": g.f32(0.5), "attention.scale": g.f32(0.25),
         "logit_scale": g.f32(2), "embedding_scale": g.f32(3)},
    ),
    "olmo2": ("olmo2", {"rms_norm_eps": 2**-10}, {RMS: g.f32(2**-10)}),
    "smollm3": (
        "smollm3", {"num_hidden_layers": 4, "rms_norm_eps": 2**-10, "tie_word_embeddings": True,
                    "rope_parameters": PLAIN},
        {RMS: g.f32(2**-10), "block_count": g.u32(4)},
    ),
    "stablelm": (
        "stablelm", {"use_parallel_residual": True, "use_qkv_bias": True, "layer_norm_eps": 2**-10},
        {MEAN: g.f32(2**-10), "use_parallel_residual": g.flag(True), "rope.dimension_count": g.u32(4)},
    ),
}  # fmt: skip
FAST = ("starcoder2", "gpt-oss")
ALL = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
PAIRWISE = ("llama", "granite", "smollm3")  # whose q and k rows a converter rearranges


def write(path: Path, arch: str) -> Any:
    """Writes the architecture's file; gives the model back."""
    kind, facts, keys = MODELS[arch]
    model = random_model(AutoConfig.for_model(kind, **{**SIZES, **facts})).eval()
    named = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(named, model.config.num_hidden_layers)
    tensors: list[g.Tensor] = []
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".experts." in name:
            tensors += experts(name, model.state_dict()[name], model.config)
            continue
        stem, _, ending = name.rpartition(".")
        if ending not in ("weight", "bias"):
            stem, ending = name, "weight"
        written = as_converted(name, value.numpy(), arch, model.config)
        tensors.append(g.plain(f"{names.get_name(stem)}.{ending}", written))
    g.GgufFile(metadata(arch, keys), tensors).write(path)
    return model


def metadata(arch: str, keys: Mapping[str, g.Value]) -> dict[str, g.Value]:
    common = {
        "context_length": g.u32(128), "block_count": g.u32(2), "embedding_length": g.u32(64),
        "feed_forward_length": g.u32(96), "attention.head_count": g.u32(4), "rope.freq_base": g.f32(1e4),
        **({} if arch == "gpt2" else {"attention.head_count_kv": g.u32(2)}), **keys,
    }  # fmt: skip
    return {
        "general.architecture": g.string(arch), **{f"{arch}.{k}": v for k, v in common.items()},
        "tokenizer.ggml.model": g.string("gpt2"), "tokenizer.ggml.pre": g.string("gpt-2"),
        "tokenizer.ggml.tokens": g.strings([f"w{i}" for i in range(VOCAB)]),
        "tokenizer.ggml.merges": g.strings([]), "tokenizer.ggml.eos_token_id": g.u32(2),
    }  # fmt: skip


def as_converted(name: str, value: np.ndarray, arch: str, config: Any) -> np.ndarray:
    if arch == "gpt2" and value.ndim == 2 and ".h." in name:
        return value.T  # its products are stored the other way round
    heads = {"q_proj": config.num_attention_heads, "k_proj": 2}.get(name.split(".")[-2])
    if arch in PAIRWISE and heads:
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return halves.swapaxes(1, 2).reshape(value.shape)
    return value


def experts(name: str, value: torch.Tensor, config: Any) -> list[g.Tensor]:
    """All experts of a layer [E,N,K]: gate and up apart. Those of gpt-oss are MXFP4, and the model gets what
    that means."""
    block, what = f"blk.{name.split('.')[2]}", name.rpartition(".")[2]
    oss = config.model_type == "gpt_oss"
    matrix = not what.endswith("bias")
    rows = value.mT if oss and matrix else value  # as views, so that the model changes with them
    ending = "weight" if matrix else "bias"
    if what.startswith("down"):
        parts = {"down": rows}
    elif oss:
        parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]}
    else:
        parts = dict(zip(("gate", "up"), rows.chunk(2, 1), strict=True))
    form = mxfp4 if oss and matrix else lambda n, v: g.plain(n, v.numpy())
    return [form(f"{block}.ffn_{part}_exps.{ending}", v) for part, v in parts.items()]


def mxfp4(name: str, value: torch.Tensor) -> g.Tensor:
    """Random bytes of a scale each near that of the values; writes into `value` what they mean."""
    rng = np.random.default_rng(len(name))
    blocks = rng.integers(0, 256, (*value.shape[:-1], value.shape[-1] // 32, 17), dtype=np.uint8)
    blocks[..., 0] = rng.integers(122, 125, blocks.shape[:-1])
    data = blocks.reshape(*value.shape[:-1], -1)
    value.copy_(torch.from_numpy(gguf.dequantize(data, MXFP4)))
    return g.Tensor(name, tuple(value.shape), data.tobytes(), int(MXFP4))


@pytest.fixture(scope="module", params=ALL)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    model = write(path, request.param)
    rng = np.random.default_rng(1)
    tokens = {n: rng.integers(3, VOCAB, length).tolist() for n, length in LENGTHS.items()}
    wanted = {n: theirs(model, ids) for n, ids in tokens.items()}
    with open_on("cpu:0", path) as program:
        yield Case(request.param, model, {"cpu:0": program}, tokens, wanted)


def test_logits(case: Case) -> None:
    errors = case.errors("cpu:0")
    assert max(errors.values()) < TOLERANCE, errors
    assert np.concatenate(list(case.wanted.values())).std() > 0.1


def test_a_window_that_olmo2_has_not(tmp_path: Path) -> None:
    """OLMo 3 goes by the name of OLMo 2, with windows in some layers."""
    MODELS["olmo2"][2]["attention.sliding_window"] = g.u32(8)
    try:
        write(tmp_path / "m.gguf", "olmo2")
    finally:
        del MODELS["olmo2"][2]["attention.sliding_window"]
    with pytest.raises(UnsupportedModel, match="olmo2 with a sliding window"):
        load_gguf(tmp_path / "m.gguf")
