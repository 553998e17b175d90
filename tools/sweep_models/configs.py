"""Tiny configurations: for each model type its defaults, with small sizes in place of the large ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

VOCAB = 160
LAYERS = 4  # where layers may differ, else 2
HEAD = 16
WINDOW = 8  # tokens: shorter than most sequences of a trial
CONTEXT = 512  # tokens

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_COUNTS: Mapping[str, int] = {
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "index_n_heads": 2,
    "max_window_layers": 2, "num_nextn_predict_layers": 0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WIDTHS: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 4 * HEAD
    ),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim"),
        96,
    ),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "global_head_dim"), HEAD),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(("sliding_window", "attention_window_size"), WINDOW),
    "rotary_dim": 8, "hidden_size_per_layer_input": 16, "index_topk": 64, "index_head_dim": 16,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "qk_head_dim": 24,
}  # fmt: skip
# what is set where the class's default has a value
_SWITCHES: Mapping[str, bool | float] = {
    "is_decoder": True, "use_sliding_window": True,
    "attn_logit_softcapping": 1.5, "attention_logit_cap": 1.5, "attn_logit_cap": 1.5,
}  # fmt: skip
_LISTS = ("layer_types", "mlp_layer_types")

# what a class's defaults lack, or where its names mean something else
_OWN: Mapping[str, Mapping[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": HEAD},
    "hunyuan_v1_moe": {"head_dim": HEAD},
    "nemotron": {"head_dim": HEAD, "num_key_value_heads": 2},
    "ministral": {"head_dim": HEAD, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 64},
    },
    "lfm2_moe": {"layer_types": ["full_attention"] * LAYERS},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"head_dim": 2 * HEAD},
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 32)},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_attention_heads": 4},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "big_bird": {"max_position_embeddings": 1024},  # from 705 tokens its attention is another
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# tried in this order until the class takes the sizes
_LEFT_OUT: tuple[tuple[str, ...], ...] = (
    (), ("layer_types",), _LISTS, ("head_dim",), (*_LISTS, "head_dim", "attention_head_dim"),
    ("sliding_window",),
)  # fmt: skip


def tiny(model_type: str, *, windows: bool = True) -> Any:
    """The configuration. Raises whatever the class raises when it takes none of the small forms.

    windows: switched on where the class knows them; by default they are often off.
    """
    kind = CONFIG_MAPPING[model_type]
    defaults = kind()
    facts = _facts(model_type, defaults)
    if not windows:
        facts = {k: v for k, v in facts.items() if k != "use_sliding_window" and _has(defaults, k)}
    *others, last = _LEFT_OUT
    for names in others:
        try:
            return kind(**_without(facts, names))
        except Exception:  # whatever a configuration class makes of it: the next form may do
            continue
    return kind(**_without(facts, last))


def _without(facts: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in names}


def _facts(model_type: str, defaults: Any) -> dict[str, Any]:
    known = set(defaults.to_dict()) | set(getattr(defaults, "attribute_map", {}))
    facts: dict[str, Any] = {
        name: size for name, size in {**_COUNTS, **_WIDTHS}.items() if name in known and _has(defaults, name)
    }
    depth = LAYERS if any(_tells_layers_apart(name) for name in known) else 2
    facts |= {name: depth for name in _DEPTHS if name in known and _has(defaults, name)}
    facts |= {name: value for name, value in _SWITCHES.items() if name in known and _has(defaults, name)}
    if (
        "sliding_window" in known
    ):  # by default often none, and then a window that isn't conveyed wouldn't show
        facts["sliding_window"] = WINDOW
    if _has(defaults, "kv_lora_rank"):  # latent attention: one key head a query head
        facts.pop("head_dim", None)
        facts |= {"num_key_value_heads": 4} if "num_key_value_heads" in facts else {}
    if model_type not in ("gptj", "codegen", "minimax_m2"):  # elsewhere it follows from the head
        facts.pop("rotary_dim", None)
    for name in _LISTS:
        given = getattr(defaults, name, None)
        if given is not None and len(given) >= LAYERS and "use_sliding_window" not in known:
            facts[name] = (list(dict.fromkeys(given)) * LAYERS)[:LAYERS]
    scaled = "original_max_position_embeddings" in json.dumps(
        getattr(defaults, "rope_parameters", None), default=str
    )
    if "max_position_embeddings" in known and not scaled:
        facts["max_position_embeddings"] = min(defaults.max_position_embeddings or CONTEXT, CONTEXT)
    for name in getattr(defaults, "sub_configs", {}):
        part = getattr(defaults, name, None)
        if part is not None:
            facts[name] = {"model_type": part.model_type, **_facts(part.model_type, part)}
    return {**facts, **_OWN.get(model_type, {})}


def _tells_layers_apart(name: str) -> bool:
    """Whether layers may differ by what a field says: `layer_types`, `sliding_window_pattern`, …"""
    words = (
        "layer_types",
        "pattern",
        "interval",
        "every",
        "_layers",
        "dense_replace",
        "sparse_step",
        "layer_idx",
    )
    return name not in _DEPTHS and any(word in name for word in words)


def _has(defaults: Any, name: str) -> bool:
    """Whether the class's default has a value: what is None by default means something else."""
    try:
        return getattr(defaults, name, None) is not None
    except Exception:  # some properties refuse to be read
        return True
