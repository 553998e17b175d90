"""What the metadata of a GGUF file says about the model: its configuration and its tensors' names in a
Hugging Face checkpoint. Plain data; `flashrt.frontend.gguf` makes a transformers model of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend.gguf_header import Header

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_EXPERTS_BLOCK = _BLOCK | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
_PHI3_BLOCK = _BLOCK | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

# Tensors that hold RoPE factors: they become part of the configuration.
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_ATTENTION_FACTOR = "rope.scaling.attn_factor"
# Keys under the architecture that change what a model computes and that no known architecture here has.
_STRANGE = (
    "expert_count", "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "logit_scale",
    "embedding_scale", "residual_scale", "rope.scaling.yarn_log_multiplier", "attention.temperature_scale",
    "attention.temperature_length", _ATTENTION_FACTOR,
)  # fmt: skip
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)\Z")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of GGUF.

    model_type: its name in transformers. block: names of a layer's tensors. more: configuration beyond what
    all share. pairwise: q and k rows are stored for pairwise RoPE. norm_shift: added to norm weights.
    """

    model_type: str
    more: Callable[[Header, dict[str, Any]], dict[str, Any]]
    block: Mapping[str, str] = field(default_factory=lambda: _BLOCK)
    pairwise: bool = False
    norm_shift: float = 0.0


def architecture(header: Header) -> Architecture:
    """The architecture of a file. Raises UnsupportedModel naming it and the known ones."""
    name = header.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{header.path}: GGUF architecture {name!r} isn't supported",
            hint=f"known architectures: {', '.join(ARCHITECTURES)}; or use the model's Hugging Face folder",
        )
    return ARCHITECTURES[name]


def config_values(header: Header) -> dict[str, Any]:
    """The keyword arguments of the model's transformers configuration.

    Raises ModelError naming the key at fault, UnsupportedModel for settings that would be computed wrongly.
    """
    arch = architecture(header)
    _refuse_strange(header)
    embedding = header.tensor("token_embd.weight")
    heads, hidden = _int(header, "attention.head_count"), _int(header, "embedding_length")
    if embedding.shape[1:] != (hidden,):
        raise _disagrees(
            header, "embedding_length", hidden, f"token_embd.weight has shape {list(embedding.shape)}"
        )
    values: dict[str, Any] = {
        "vocab_size": embedding.shape[0], "hidden_size": hidden,
        "intermediate_size": _int(header, "feed_forward_length"), "num_hidden_layers": _layers(header),
        "num_attention_heads": heads, "num_key_value_heads": _int(header, "attention.head_count_kv", heads),
        "head_dim": _int(header, "attention.key_length", max(hidden // heads, 1)),
        "max_position_embeddings": _int(header, "context_length"),
        "rms_norm_eps": _real(header, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(header),
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    _check_heads(header, values)
    return values | arch.more(header, values)


def tensor_names(header: Header) -> dict[str, str]:
    """GGUF tensor name → name in a Hugging Face checkpoint, for all but the RoPE factors.

    Raises UnsupportedModel for a tensor the architecture doesn't have: leaving it out would be wrong.
    """
    arch = architecture(header)
    found = {}
    for name in header.tensors:
        if name in FACTORS:
            continue
        stem, _, kind = name.rpartition(".")
        block = _BLOCK_NAME.match(stem)
        table, key = (arch.block, block[2]) if block else (_WHOLE, stem)
        if kind not in ("weight", "bias") or key not in table:
            raise UnsupportedModel(
                f"{header.path}: tensor {name} isn't one that architecture {arch.model_type} has",
                hint="use the model's Hugging Face folder",
            )
        found[name] = f"model.layers.{int(block[1])}.{table[key]}.{kind}" if block else f"{table[key]}.{kind}"
    return found


def _key(header: Header, key: str) -> str:
    return f"{header.get('general.architecture', str)}.{key}"


def _int(header: Header, key: str, default: int | None = None) -> int:
    return header.positive(_key(header, key), default)


def _real(header: Header, key: str, default: float | None = None) -> float:
    """A finite number above 0."""
    key = _key(header, key)
    value = header.get(key, float) if default is None else header.get(key, float, default)
    if not (math.isfinite(value) and value > 0):
        raise ModelError(f"{header.path}: metadata key {key} is {value}, not a positive number")
    return value


def _disagrees(header: Header, key: str, value: object, other: str) -> ModelError:
    return ModelError(
        f"{header.path}: metadata key {_key(header, key)} is {value}, but {other}",
        hint="convert the model again",
    )


def _refuse_strange(header: Header) -> None:
    for key in _STRANGE:
        if key == _ATTENTION_FACTOR and FACTORS[1] in header.tensors:
            continue  # read together with the factors
        if key == "expert_count" and "ffn_gate_inp" in architecture(header).block:
            continue
        value = header.metadata.get(_key(header, key))
        if value is not None and not (isinstance(value, int | float) and value in (0, 1)):
            raise UnsupportedModel(
                f"{header.path}: metadata key {_key(header, key)} = {value} isn't supported",
                hint="use the model's Hugging Face folder",
            )


def _layers(header: Header) -> int:
    count = _int(header, "block_count")
    there = {int(m[1]) for name in header.tensors if (m := _BLOCK_NAME.match(name))}
    if there != set(range(min(count, len(there) + 1))):
        raise _disagrees(header, "block_count", count, f"the file holds tensors of {len(there)} blocks")
    return count


def _check_heads(header: Header, values: Mapping[str, Any]) -> None:
    heads, kv = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % kv:
        raise _disagrees(header, "attention.head_count_kv", kv, f"there are {heads} heads")
    if values["head_dim"] % 2:
        raise _disagrees(header, "attention.key_length", values["head_dim"], "RoPE needs an even number")
    width = _int(header, "attention.value_length", values["head_dim"])
    if width != values["head_dim"]:
        raise UnsupportedModel(
            f"{header.path}: {_key(header, 'attention.value_length')} = {width} isn't supported"
        )


def _rope(header: Header) -> dict[str, Any]:
    """rope_parameters of transformers."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _real(header, "rope.freq_base", 10000.0)}
    kind = header.get(_key(header, "rope.scaling.type"), str, "none")
    if _key(header, "rope.scale_linear") in header.metadata:
        return rope | {"rope_type": "linear", "factor": _real(header, "rope.scale_linear")}
    match kind:
        case "none":
            return rope
        case "linear":
            return rope | {"rope_type": "linear", "factor": _real(header, "rope.scaling.factor", 1.0)}
        case "yarn":
            return rope | {
                "rope_type": "yarn",
                "factor": _real(header, "rope.scaling.factor"),
                "original_max_position_embeddings": _int(header, "rope.scaling.original_context_length"),
            }
        case "longrope":
            return rope  # its factors are tensors: the architecture reads them
    raise UnsupportedModel(
        f"{header.path}: {_key(header, 'rope.scaling.type')} {kind!r} isn't supported",
        hint="known: none, linear, yarn, longrope",
    )


def _full_rotation(header: Header, values: Mapping[str, Any]) -> None:
    rotated = _int(header, "rope.dimension_count", values["head_dim"])
    if rotated != values["head_dim"]:
        raise UnsupportedModel(
            f"{header.path}: {_key(header, 'rope.dimension_count')} is {rotated} of {values['head_dim']} "
            "channels; partial rotation isn't supported for this architecture"
        )


def _llama(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    _full_rotation(header, values)
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
    _full_rotation(header, values)
    return {"use_sliding_window": False}


def _qwen3_moe(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    return _qwen(header, values) | {
        "num_experts": _int(header, "expert_count"),
        "num_experts_per_tok": _int(header, "expert_used_count"),
        "moe_intermediate_size": _int(header, "expert_feed_forward_length"),
        "norm_topk_prob": True,  # as every model of this architecture
    }


def _gemma(header: Header, values: dict[str, Any], largest: int) -> dict[str, Any]:
    """largest: layers of the family's biggest model, which alone scales attention by hidden/heads."""
    _full_rotation(header, values)
    big = values["num_hidden_layers"] == largest
    scalar = values["hidden_size"] // values["num_attention_heads"] if big else values["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": _int(header, "attention.sliding_window"),
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": _cap(header, "final_logit_softcapping"),
        "attn_logit_softcapping": _cap(header, "attn_logit_softcapping"),
    }


def _cap(header: Header, key: str) -> float | None:
    return _real(header, key) if _key(header, key) in header.metadata else None


def _gemma2(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    return _gemma(header, values, largest=46)


def _gemma3(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    everywhere = {**values["rope_parameters"], "rope_theta": _real(header, "rope.freq_base", 1e6)}
    nearby = {"rope_type": "default", "rope_theta": _real(header, "rope.freq_base_swa", 1e4)}
    rope = {"full_attention": everywhere, "sliding_attention": nearby}
    return _gemma(header, values, largest=62) | {"rope_parameters": rope}


def _phi3(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    rope = dict(values["rope_parameters"])
    rope["partial_rotary_factor"] = (
        _int(header, "rope.dimension_count", values["head_dim"]) / values["head_dim"]
    )
    more: dict[str, Any] = {"rope_parameters": rope}
    if FACTORS[1] in header.tensors:
        rope["rope_type"] = "longrope"
        rope["long_factor"] = header.floats(FACTORS[1]).tolist()
        rope["short_factor"] = header.floats(FACTORS[2]).tolist()
        if _key(header, _ATTENTION_FACTOR) in header.metadata:
            rope["attention_factor"] = _real(header, _ATTENTION_FACTOR)
        more["original_max_position_embeddings"] = _int(header, "rope.scaling.original_context_length")
    if _key(header, "attention.sliding_window") in header.metadata:
        more["sliding_window"] = _int(header, "attention.sliding_window")
    return more


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, pairwise=True),
    "qwen2": Architecture("qwen2", _qwen),
    "qwen3": Architecture("qwen3", _qwen),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe, _EXPERTS_BLOCK),
    "gemma2": Architecture("gemma2", _gemma2, _GEMMA_BLOCK, norm_shift=-1.0),
    "gemma3": Architecture("gemma3_text", _gemma3, _GEMMA_BLOCK, norm_shift=-1.0),
    "phi3": Architecture("phi3", _phi3, _PHI3_BLOCK),
}
