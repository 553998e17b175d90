"""A model's configuration with small sizes: the same class, the same kinds of layers, the same switches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from flashrt.errors import UnsupportedModel

HEAD = 16  # channels of a head
CAP = 1.0  # of attention's scores: few of the check's are below, so that a cap shows
WINDOW = 8  # tokens of a sliding window: fewer than the check's sequences have
LAYERS = 4  # at most

# what each field becomes where the configuration has it (and it isn't None)
_SIZES: Mapping[str, int] = {
    "vocab_size": 199, "vocab_size_per_layer_input": 199, "decoder_vocab_size": 199, "decoder_ffn_dim": 96,
    "bos_token_id": 1, "eos_token_id": 2,
    "intermediate_size": 96, "n_inner": 96, "ffn_dim": 96, "ffn_hidden_size": 96, "ffn_hidden_dim": 96,
    "head_dim": HEAD, "attention_head_dim": HEAD, "kv_channels": HEAD, "global_head_dim": HEAD,
    "rotary_dim": 8,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "qk_head_dim": 24, "hidden_size_per_layer_input": 16, "word_embed_proj_dim": 0, "embedding_size": 0,
}  # fmt: skip
_WINDOWS = ("local_attention", "attention_chunk_size")  # and whatever has "window" in its name
_CAPS = ("attn_logit_softcapping", "attention_logit_cap", "attn_logit_cap")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups")
PAD = 2  # the largest token for padding that stays as it is: some models count positions from it
_FACTORS = ("short_factor", "long_factor")
_LONGEST = 2048


def shrink(config: Any) -> Any:
    """The small configuration.

    Raises:
        UnsupportedModel: the configuration class refuses the small sizes.
    """
    facts = copy.deepcopy(config.to_dict())
    try:
        _reduce(facts, getattr(config, "attribute_map", {}))
        return type(config).from_dict(facts)
    except Exception as error:  # whatever a configuration class makes of it
        raise UnsupportedModel(
            f"{config.model_type} can't be checked for safety: its configuration has no small form "
            f"({type(error).__name__}: {error})"
        ) from error


def _reduce(facts: dict[str, Any], names: Mapping[str, str]) -> None:
    """Replaces the sizes. names: the class's own name of each standard field."""
    hidden, layers, count = (
        names.get(n, n) for n in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    old_heads = int(facts[count])
    heads, kv_heads = _heads(facts, names, old_heads)
    own_head = facts.get("head_dim") or int(facts[hidden]) // old_heads
    width = heads * HEAD + (HEAD if facts[hidden] != own_head * old_heads else 0)
    for name, value in _SIZES.items():
        _put(facts, names.get(name, name), value or width)
    pad = facts.get("pad_token_id")
    _put(facts, "pad_token_id", pad if isinstance(pad, int) and 0 <= pad <= PAD else 0)
    if facts.get("qk_rope_head_dim"):
        _put(facts, "head_dim", _SIZES["qk_rope_head_dim"])  # with latent attention, what RoPE turns
    for name in _KV_HEADS:
        _put(facts, names.get(name, name), kv_heads)
    for name in filter(_is_window, facts):
        if type(facts[name]) is int and facts[name] > WINDOW:
            facts[name] = WINDOW
    for name in _CAPS:
        if facts.get(name):
            facts[name] = CAP
    facts[hidden], facts[count] = width, heads
    _put(facts, "decoder_attention_heads", heads)  # of what is an encoder and decoder elsewhere
    longest = names.get("max_position_embeddings", "max_position_embeddings")
    if isinstance(facts.get(longest), int) and "original_max_position_embeddings" not in str(facts):
        # tables of learned positions shrink; RoPE that scales by this length must not
        facts[longest] = min(facts[longest], _LONGEST)
    _layers(facts, layers, int(facts[layers]))
    _put(facts, "decoder_layers", facts[layers])
    _trim_factors(facts)


def _is_window(name: str) -> bool:
    return name in _WINDOWS or ("window" in name and not name.endswith("layers"))


def _put(facts: dict[str, Any], name: str, value: int) -> None:
    if facts.get(name) is not None:
        facts[name] = value


def _heads(facts: Mapping[str, Any], names: Mapping[str, str], heads: int) -> tuple[int, int]:
    """Query and key heads, grouped where the model groups them."""
    found = (facts.get(names.get(n, n)) for n in _KV_HEADS)
    kv = next((k for k in found if isinstance(k, int)), heads)
    if kv == heads:
        return 2, 2
    return (2, 1) if kv == 1 else (4, 2)


def _layers(facts: dict[str, Any], name: str, count: int) -> None:
    """Keeps one layer of each kind, two at least, and trims the lists that have an entry a layer."""
    lists = [
        k for k, v in facts.items() if isinstance(v, list) and len(v) == count and not k.endswith("token_id")
    ]
    own = {int(i): values for i, values in (facts.get("per_layer_config") or {}).items()}
    kinds = [(str(own.get(i)), *(str(facts[k][i]) for k in lists)) for i in range(count)]
    kept = sorted({kinds.index(k) for k in kinds})[:LAYERS]
    kept += [i for i in range(count) if i not in kept][: max(0, 2 - len(kept))]
    kept.sort()
    for key in lists:
        facts[key] = [facts[key][i] for i in kept]
    if own:
        facts["per_layer_config"] = {at: _own(own[i]) for at, i in enumerate(kept) if i in own}
    facts[name] = len(kept)


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a layer has of its own, smaller, yet unlike the others'."""
    return {k: 2 * _SIZES[k] if v is not None and _SIZES.get(k) else v for k, v in values.items()}


def _trim_factors(facts: dict[str, Any]) -> None:
    """RoPE factors have an entry a frequency: keep as many as the small head has, spread over all."""
    for value in facts.values():
        if isinstance(value, dict):
            partial = value.get("partial_rotary_factor") or facts.get("partial_rotary_factor") or 1.0
            wanted = int(HEAD * partial) // 2
            for name in _FACTORS:
                if isinstance(value.get(name), list):
                    value[name] = [value[name][i * len(value[name]) // wanted] for i in range(wanted)]
            _trim_factors(value)
