"""The architectures of GGUF that are known: configuration and names of tensors of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashrt.errors import UnsupportedModel
from flashrt.frontend.gguf_header import Header
from flashrt.frontend.gguf_keys import (
    ATTENTION_FACTOR,
    BLOCK,
    FACTORS,
    Architecture,
    full_rotation,
    key_of,
    positive,
    whole_number,
)

_GEMMA_BLOCK = BLOCK | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_EXPERTS_BLOCK = BLOCK | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
_GPT_OSS_BLOCK = _EXPERTS_BLOCK | {
    "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
    "attn_sinks.weight": "self_attn.sinks", "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}  # fmt: skip
_OLMO2_BLOCK = BLOCK | {
    "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_STARCODER2_BLOCK = BLOCK | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_GPT2_WHOLE = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head",
}  # fmt: skip
_GPT2_BLOCK = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
_LAYER_NORM = "attention.layer_norm_epsilon"
_PHI3_BLOCK = BLOCK | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


def _llama(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    full_rotation(header, values)
    more: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    if FACTORS[0] in header.tensors:
        more["rope_parameters"] = _llama3_rope(header, values)
    return more


def _llama3_rope(header: Header, values: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling, found again from the factors the file keeps instead of it."""
    factors = header.floats(FACTORS[0]).astype(np.float64)
    theta, half = values["rope_parameters"]["rope_theta"], values["head_dim"] // 2
    original, low, high = 8192, 1.0, 4.0  # the same in every model of the family
    factor = float(factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(half) / half)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    if factors.shape != (half,) or not np.allclose(1 / factors, (1 - smooth) / factor + smooth, rtol=1e-4):
        raise UnsupportedModel(f"{header.path}: the factors in {FACTORS[0]} aren't those of Llama 3")
    return {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low,
        "high_freq_factor": high, "original_max_position_embeddings": original,
    }  # fmt: skip


def _qwen(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    full_rotation(header, values)
    return {"use_sliding_window": False}


def _qwen3_moe(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    return _qwen(header, values) | {
        "num_experts": whole_number(header, "expert_count"),
        "num_experts_per_tok": whole_number(header, "expert_used_count"),
        "moe_intermediate_size": whole_number(header, "expert_feed_forward_length"),
        "norm_topk_prob": True,  # as every model of this architecture
    }


def _gemma(header: Header, values: dict[str, Any], largest: int) -> dict[str, Any]:
    """largest: layers of the family's biggest model, which alone scales attention by hidden/heads."""
    full_rotation(header, values)
    big = values["num_hidden_layers"] == largest
    scalar = values["hidden_size"] // values["num_attention_heads"] if big else values["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": whole_number(header, "attention.sliding_window"),
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": _cap(header, "final_logit_softcapping"),
        "attn_logit_softcapping": _cap(header, "attn_logit_softcapping"),
    }


def _cap(header: Header, key: str) -> float | None:
    return positive(header, key) if key_of(header, key) in header.metadata else None


def _gemma2(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    return _gemma(header, values, largest=46)


def _gemma3(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    everywhere = {**values["rope_parameters"], "rope_theta": positive(header, "rope.freq_base", 1e6)}
    nearby = {"rope_type": "default", "rope_theta": positive(header, "rope.freq_base_swa", 1e4)}
    rope = {"full_attention": everywhere, "sliding_attention": nearby}
    return _gemma(header, values, largest=62) | {"rope_parameters": rope}


def _phi3(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    rope = _partial(header, values)
    more: dict[str, Any] = {"rope_parameters": rope}
    if FACTORS[1] in header.tensors:
        rope["rope_type"] = "longrope"
        rope["long_factor"] = header.floats(FACTORS[1]).tolist()
        rope["short_factor"] = header.floats(FACTORS[2]).tolist()
        if key_of(header, ATTENTION_FACTOR) in header.metadata:
            rope["attention_factor"] = positive(header, ATTENTION_FACTOR)
        more["original_max_position_embeddings"] = whole_number(
            header, "rope.scaling.original_context_length"
        )
    if key_of(header, "attention.sliding_window") in header.metadata:
        more["sliding_window"] = whole_number(header, "attention.sliding_window")
    return more


def _mixtral(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    full_rotation(header, values)
    return {
        "num_local_experts": whole_number(header, "expert_count"),
        "num_experts_per_tok": whole_number(header, "expert_used_count"),
        "sliding_window": None,
    }


def _granite(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    return _llama(header, values) | {
        name: positive(header, key, 1.0)
        for name, key in (
            ("attention_multiplier", "attention.scale"), ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"), ("logits_scaling", "logit_scale"),
        )
    }  # fmt: skip


def _smollm3(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    """Every fourth layer has no rotation; files don't say so."""
    return _llama(header, values) | {"no_rope_layer_interval": 4, "use_sliding_window": False}


def _olmo2(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    full_rotation(header, values)
    if key_of(header, "attention.sliding_window") in header.metadata:  # OLMo 3 goes by the same name
        raise UnsupportedModel(f"{header.path}: an olmo2 with a sliding window isn't supported")
    return {}


def _starcoder2(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    full_rotation(header, values)
    return {"use_bias": "blk.0.attn_q.bias" in header.tensors, "sliding_window": None}


def _stablelm(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_parameters": _partial(header, values),
        "use_parallel_residual": header.get(key_of(header, "use_parallel_residual"), bool, False),
        "use_qkv_bias": "blk.0.attn_q.bias" in header.tensors,
    }


def _partial(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    """rope_parameters of a model that rotates the first channels of a head."""
    share = whole_number(header, "rope.dimension_count", values["head_dim"]) / values["head_dim"]
    return {**values["rope_parameters"], "partial_rotary_factor": share}


def _gpt2(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    return {"n_inner": values["intermediate_size"], "activation_function": "gelu_new"}


def _gpt_oss(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    full_rotation(header, values)
    rope = dict(values["rope_parameters"])
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as every model of this architecture
    return {
        "rope_parameters": rope,
        "num_local_experts": whole_number(header, "expert_count"),
        "num_experts_per_tok": whole_number(header, "expert_used_count"),
        "intermediate_size": whole_number(header, "expert_feed_forward_length"),
        "sliding_window": whole_number(header, "attention.sliding_window"),
    }


_EXPERTS = ("expert_count",)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, pairwise=True),
    "qwen2": Architecture("qwen2", _qwen),
    "qwen3": Architecture("qwen3", _qwen),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe, _EXPERTS_BLOCK, scales=_EXPERTS),
    "gemma2": Architecture("gemma2", _gemma2, _GEMMA_BLOCK, norm_shift=-1.0),
    "gemma3": Architecture("gemma3_text", _gemma3, _GEMMA_BLOCK, norm_shift=-1.0),
    "phi3": Architecture("phi3", _phi3, _PHI3_BLOCK),
    "gpt2": Architecture(
        "gpt2", _gpt2, _GPT2_BLOCK, epsilon=(_LAYER_NORM, "layer_norm_epsilon"), whole=_GPT2_WHOLE,
        layers="transformer.h",
        without=("intermediate_size", "num_key_value_heads", "head_dim", "rope_parameters"),
    ),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, _GPT_OSS_BLOCK, scales=_EXPERTS),
    "granite": Architecture(
        "granite", _granite, pairwise=True,
        scales=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    ),
    "olmo2": Architecture("olmo2", _olmo2, _OLMO2_BLOCK),
    "smollm3": Architecture("smollm3", _smollm3, pairwise=True),
    "stablelm": Architecture("stablelm", _stablelm, epsilon=(_LAYER_NORM, "layer_norm_eps")),
    "starcoder2": Architecture(
        "starcoder2", _starcoder2, _STARCODER2_BLOCK, epsilon=(_LAYER_NORM, "norm_epsilon")
    ),
}  # fmt: skip
# the same names, where a file has experts
OF_EXPERTS: Mapping[str, Architecture] = {
    "llama": Architecture("mixtral", _mixtral, _EXPERTS_BLOCK, pairwise=True, scales=_EXPERTS),
}
