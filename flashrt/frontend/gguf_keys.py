"""Metadata of a GGUF file under the name of its architecture, and what is known of one architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend.gguf_header import Header

# Tensors that hold RoPE factors: they become part of the configuration.
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
ATTENTION_FACTOR = "rope.scaling.attn_factor"
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of GGUF.

    model_type: its name in transformers. more: configuration beyond what all share. block: names of a
    layer's tensors, a whole one (`attn_sinks.weight`) where it ends otherwise in a checkpoint. pairwise: q
    and k rows are stored for pairwise RoPE. norm_shift: added to norm weights. epsilon: the key of the norms'
    epsilon, and its name in the configuration. whole, layers: names of the other tensors, and of what holds
    the layers. scales: keys that change what a model computes and that this architecture has. without: what
    its configuration lacks of what the others share.
    """

    model_type: str
    more: Callable[[Header, dict[str, Any]], dict[str, Any]]
    block: Mapping[str, str] = field(default_factory=lambda: BLOCK)
    pairwise: bool = False
    norm_shift: float = 0.0
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    whole: Mapping[str, str] = field(default_factory=lambda: WHOLE)
    layers: str = "model.layers"
    scales: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


def key_of(header: Header, key: str) -> str:
    return f"{header.get('general.architecture', str)}.{key}"


def whole_number(header: Header, key: str, default: int | None = None) -> int:
    return header.positive(key_of(header, key), default)


def positive(header: Header, key: str, default: float | None = None) -> float:
    """A finite number above 0."""
    key = key_of(header, key)
    value = header.get(key, float) if default is None else header.get(key, float, default)
    if not (math.isfinite(value) and value > 0):
        raise ModelError(f"{header.path}: metadata key {key} is {value}, not a positive number")
    return value


def disagrees(header: Header, key: str, value: object, other: str) -> ModelError:
    return ModelError(
        f"{header.path}: metadata key {key_of(header, key)} is {value}, but {other}",
        hint="convert the model again",
    )


def full_rotation(header: Header, values: Mapping[str, Any]) -> None:
    rotated = whole_number(header, "rope.dimension_count", values["head_dim"])
    if rotated != values["head_dim"]:
        raise UnsupportedModel(
            f"{header.path}: {key_of(header, 'rope.dimension_count')} is {rotated} of {values['head_dim']} "
            "channels; partial rotation isn't supported for this architecture"
        )
