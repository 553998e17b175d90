"""What the metadata of a GGUF file says about the model: its configuration and its tensors' names in a
Hugging Face checkpoint. Plain data; `flashrt.frontend.gguf` makes a transformers model of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flashrt.errors import UnsupportedModel
from flashrt.frontend.gguf_architectures import ARCHITECTURES, OF_EXPERTS
from flashrt.frontend.gguf_header import Header
from flashrt.frontend.gguf_keys import (
    ATTENTION_FACTOR,
    FACTORS,
    Architecture,
    disagrees,
    key_of,
    positive,
    whole_number,
)

# Keys under the architecture that change what a model computes, each of few architectures.
_STRANGE = (
    "expert_count", "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "logit_scale",
    "embedding_scale", "residual_scale", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor", "attention.temperature_scale",
    "attention.temperature_length", ATTENTION_FACTOR,
)  # fmt: skip
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)\Z")


def architecture(header: Header) -> Architecture:
    """The architecture of a file. Raises UnsupportedModel naming it and the known ones."""
    name = header.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{header.path}: GGUF architecture {name!r} isn't supported",
            hint=f"known architectures: {', '.join(ARCHITECTURES)}; or use the model's Hugging Face folder",
        )
    if name in OF_EXPERTS and header.metadata.get(f"{name}.expert_count", 0):
        return OF_EXPERTS[name]
    return ARCHITECTURES[name]


def config_values(header: Header) -> dict[str, Any]:
    """The keyword arguments of the model's transformers configuration.

    Raises ModelError naming the key at fault, UnsupportedModel for settings that would be computed wrongly.
    """
    arch = architecture(header)
    _refuse_strange(header)
    embedding = header.tensor("token_embd.weight")
    heads, hidden = whole_number(header, "attention.head_count"), whole_number(header, "embedding_length")
    if embedding.shape[1:] != (hidden,):
        raise disagrees(
            header, "embedding_length", hidden, f"token_embd.weight has shape {list(embedding.shape)}"
        )
    values: dict[str, Any] = {
        "vocab_size": embedding.shape[0], "hidden_size": hidden,
        "intermediate_size": whole_number(header, "feed_forward_length"),
        "num_hidden_layers": _layers(header),
        "num_attention_heads": heads,
        "num_key_value_heads": whole_number(header, "attention.head_count_kv", heads),
        "head_dim": whole_number(header, "attention.key_length", max(hidden // heads, 1)),
        "max_position_embeddings": whole_number(header, "context_length"),
        arch.epsilon[1]: positive(header, arch.epsilon[0]),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(header),
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    _check_heads(header, values)
    values |= arch.more(header, values)
    return {name: value for name, value in values.items() if name not in arch.without}


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
        table, key = (arch.block, block[2]) if block else (arch.whole, stem)
        known = table.get(f"{key}.{kind}") or (f"{table[key]}.{kind}" if key in table else "")
        if kind not in ("weight", "bias") or not known:
            raise UnsupportedModel(
                f"{header.path}: tensor {name} isn't one that architecture {arch.model_type} has",
                hint="use the model's Hugging Face folder",
            )
        found[name] = f"{arch.layers}.{int(block[1])}.{known}" if block else known
    return found


def _refuse_strange(header: Header) -> None:
    for key in _STRANGE:
        if key == ATTENTION_FACTOR and FACTORS[1] in header.tensors:
            continue  # read together with the factors
        if key in architecture(header).scales:
            continue
        value = header.metadata.get(key_of(header, key))
        if value is not None and not (isinstance(value, int | float) and value in (0, 1)):
            raise UnsupportedModel(
                f"{header.path}: metadata key {key_of(header, key)} = {value} isn't supported",
                hint="use the model's Hugging Face folder",
            )


def _layers(header: Header) -> int:
    count = whole_number(header, "block_count")
    there = {int(m[1]) for name in header.tensors if (m := _BLOCK_NAME.match(name))}
    if there != set(range(min(count, len(there) + 1))):
        raise disagrees(header, "block_count", count, f"the file holds tensors of {len(there)} blocks")
    return count


def _check_heads(header: Header, values: Mapping[str, Any]) -> None:
    heads, kv = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % kv:
        raise disagrees(header, "attention.head_count_kv", kv, f"there are {heads} heads")
    if values["head_dim"] % 2:
        raise disagrees(header, "attention.key_length", values["head_dim"], "RoPE needs an even number")
    width = whole_number(header, "attention.value_length", values["head_dim"])
    if width != values["head_dim"]:
        raise UnsupportedModel(
            f"{header.path}: {key_of(header, 'attention.value_length')} = {width} isn't supported"
        )


def _betas(header: Header) -> dict[str, float]:
    """Where YaRN's ramp begins and ends, in files that say so."""
    keys = {name: f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
    return {n: positive(header, key) for n, key in keys.items() if key_of(header, key) in header.metadata}


def _rope(header: Header) -> dict[str, Any]:
    """rope_parameters of transformers."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": positive(header, "rope.freq_base", 10000.0)}
    kind = header.get(key_of(header, "rope.scaling.type"), str, "none")
    if key_of(header, "rope.scale_linear") in header.metadata:
        return rope | {"rope_type": "linear", "factor": positive(header, "rope.scale_linear")}
    match kind:
        case "none":
            return rope
        case "linear":
            return rope | {"rope_type": "linear", "factor": positive(header, "rope.scaling.factor", 1.0)}
        case "yarn":
            return rope | {
                "rope_type": "yarn",
                "factor": positive(header, "rope.scaling.factor"),
                "original_max_position_embeddings": whole_number(
                    header, "rope.scaling.original_context_length"
                ),
                **_betas(header),
            }
        case "longrope":
            return rope  # its factors are tensors: the architecture reads them
    raise UnsupportedModel(
        f"{header.path}: {key_of(header, 'rope.scaling.type')} {kind!r} isn't supported",
        hint="known: none, linear, yarn, longrope",
    )
