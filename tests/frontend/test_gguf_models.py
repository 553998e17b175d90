"""Each architecture: a tiny transformers model, written as llama.cpp's converter would, comes back whole.

The configuration must give the same logits, and every tensor the same bits, so nothing of the file was
lost or misread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend.gguf import make_config, weight_index
from flashrt.frontend.gguf_config import ARCHITECTURES, FACTORS
from flashrt.frontend.gguf_header import read_header
from flashrt.ir.types import TensorType, Weight
from flashrt.weights.source import IndexSource
from tests.frontend import gguf_bytes as g

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "rms_norm_eps": 2**-10, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GEMMA = {"sliding_window": 3, "query_pre_attn_scalar": 16, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50000.0, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.25, 1.5, 1.75],
    "long_factor": [1.0, 2, 4, 8],
    "attention_factor": 1.25,
}  # fmt: skip

# name → (GGUF architecture, transformers configuration beyond COMMON, keys beyond the common ones)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, g.Value]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}, {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama wide heads": ("llama", {"head_dim": 16}, {"attention.key_length": g.u32(16)}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama linear": (
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope.scaling.type": g.string("linear"), "rope.scaling.factor": g.f32(2)},
    ),
    "llama yarn": (
        "llama", {"rope_parameters": YARN},
        {
            "rope.scaling.type": g.string("yarn"), "rope.scaling.factor": g.f32(4),
            "rope.scaling.original_context_length": g.u32(16),
        },
    ),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}, {"rope.freq_base": g.f32(50000)}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("qwen3", {"head_dim": 16}, {"attention.key_length": g.u32(16)}),
    "gemma2": (
        "gemma2", {**GEMMA, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0},
        {
            "final_logit_softcapping": g.f32(2), "attn_logit_softcapping": g.f32(3),
            "attention.sliding_window": g.u32(3), "attention.key_length": g.u32(16),
        },
    ),
    "gemma3": (
        "gemma3", {**GEMMA, "num_hidden_layers": 7},
        {
            "attention.sliding_window": g.u32(3), "attention.key_length": g.u32(16), "block_count": g.u32(7),
            "rope.freq_base": g.f32(1e6),
        },
    ),
    "phi3": ("phi3", {}, {}),
    "phi3 long": (
        "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32},
        {"rope.scaling.original_context_length": g.u32(32), "rope.scaling.attn_factor": g.f32(1.25)},
    ),
}  # fmt: skip


def build(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for p in model.parameters():  # norms and biases too, so that a misplaced one shows
            p.copy_(torch.randn_like(p) * 0.5)
    return model.eval()


def gguf_name(fqn: str, arch: str) -> str:
    stem, _, kind = fqn.rpartition(".")
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    names = {
        theirs: ours
        for ours, theirs in ARCHITECTURES[arch].block.items()
        if ours != "ffn_up" or "mlp" in theirs
    }
    return f"blk.{layer}.{names[inner]}.{kind}"


def as_converted(fqn: str, value: np.ndarray, arch: str, config: Any) -> np.ndarray:
    """A tensor as llama.cpp's converter stores it."""
    if arch.startswith("gemma") and fqn.endswith("norm.weight"):
        return value + np.float32(1)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        fqn.split(".")[-2]
    )
    if arch == "llama" and heads:
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return halves.swapaxes(1, 2).reshape(value.shape)
    return value


def convert(model: Any, arch: str, more: dict[str, g.Value]) -> g.GgufFile:
    config = model.config
    keys = {
        "context_length": g.u32(64), "block_count": g.u32(2), "embedding_length": g.u32(32),
        "feed_forward_length": g.u32(40), "attention.head_count": g.u32(4),
        "attention.head_count_kv": g.u32(2),
        "attention.layer_norm_rms_epsilon": g.f32(2**-10), "rope.freq_base": g.f32(1e4), **more,
    }  # fmt: skip
    metadata = {"general.architecture": g.string(arch)} | {f"{arch}.{k}": v for k, v in keys.items()}
    tensors = [
        g.plain(gguf_name(fqn, arch), as_converted(fqn, value.numpy(), arch, config))
        for fqn, value in model.state_dict().items()
        if not (fqn == "lm_head.weight" and config.tie_word_embeddings)
    ]
    return g.GgufFile(metadata, tensors + factors(config))


def factors(config: Any) -> list[g.Tensor]:
    """RoPE factors that the converter writes as tensors."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        names = zip(FACTORS[1:], ("long_factor", "short_factor"), strict=True)
        return [g.plain(name, np.array(rope[key])) for name, key in names]
    if rope.get("rope_type") != "llama3":
        return []
    out = []
    for i in range(config.head_dim // 2):  # as convert_hf_to_gguf.py computes them
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * i / config.head_dim)
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192:
            out.append(rope["factor"])
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return [g.plain(FACTORS[0], np.array(out))]


def read_all(path: Path) -> dict[str, torch.Tensor]:
    index = weight_index(read_header(path))
    source, out = IndexSource(index), {}
    for fqn, tensor in index.tensors.items():
        data = np.empty(4 * int(np.prod(tensor.shape)), np.uint8)
        source.read(Weight(fqn, TensorType("f32", tensor.shape), (fqn,), "f32"), 0, tensor.shape[0], data)
        out[fqn] = torch.from_numpy(data.view(np.float32).reshape(tensor.shape))
    return out


@pytest.mark.parametrize("name", list(MODELS))
def test_comes_back_whole(tmp_path: Path, name: str) -> None:
    arch, config, keys = MODELS[name]
    model = build(transformers.AutoConfig.for_model(ARCHITECTURES[arch].model_type, **{**COMMON, **config}))
    path = convert(model, arch, keys).write(tmp_path / "m.gguf")
    again = build(make_config(read_header(path)))
    ours, theirs = again.config.to_dict(), model.config.to_dict()
    assert {k: v for k, v in ours.items() if v != theirs[k]} == {}
    weights = read_all(path)
    for fqn, value in model.state_dict().items():
        assert torch.allclose(weights[fqn], value, rtol=0, atol=1e-6 if arch.startswith("gemma") else 0), fqn
    again.load_state_dict(weights, strict=True)
    ids = torch.arange(40).reshape(1, -1) % 48
    with torch.no_grad():
        want, got = model(ids).logits, again(ids).logits
    assert torch.allclose(want, got, atol=1e-4), float((want - got).abs().max())
    assert float(want.std()) > 0.1


def llama_file() -> g.GgufFile:
    return convert(build(transformers.AutoConfig.for_model("llama", **COMMON)), "llama", {})


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    file = llama_file()
    file.tensors.append(g.plain(FACTORS[0], np.array([1.0, 2.0, 3.0, 4.0])))
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight aren't those of Llama 3"):
        make_config(read_header(file.write(tmp_path / "m.gguf")))


def test_rows_that_fit_no_heads(tmp_path: Path) -> None:
    file = llama_file()
    query = next(t for t in file.tensors if "attn_q" in t.name)
    query.shape, query.data = (12, 32), query.data[: 12 * 32 * 4]
    with pytest.raises(ModelError, match=r"attn_q\.weight of 12 rows doesn't fit 4 heads"):
        weight_index(read_header(file.write(tmp_path / "m.gguf")))
