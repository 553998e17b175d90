"""How transformers' models are made to call our opaque operations while they are traced.

transformers looks its attention function up by name. The name registered here
must not contain the word "flash" (transformers treats such names specially),
and it isn't registered for masks, so models build none.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from flashrt.errors import UnsupportedModel
from flashrt.frontend import experts

IMPLEMENTATION = "frt"
LIBRARY = torch.library.Library("flashrt", "FRAGMENT")
LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, int layer_idx, float scale, int window, float softcap, "
    "bool causal, Tensor? sinks) -> Tensor"
)


@torch.library.register_fake("flashrt::attention", lib=LIBRARY)
def _attention_shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> torch.Tensor:
    """q [T,Hq,D], k [T,Hk,D], v [T,Hk,Dv] → [T,Hq,Dv]."""
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _refuse(module: torch.nn.Module, what: str) -> None:
    layer = getattr(module, "layer_idx", None)
    where = type(module).__name__ + (f" of layer {layer}" if layer is not None else "")
    raise UnsupportedModel(f"this model's attention ({where}) {what}, which isn't supported")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [1,H,T,D] each → ([1,T,H,Dv], None)."""
    if attention_mask is not None:
        _refuse(module, "builds its own mask")
    if position_bias is not None:
        _refuse(module, "adds a position bias")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    q, k, v = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))
    out = torch.ops.flashrt.attention(
        q, k, v, int(getattr(module, "layer_idx", None) or 0),
        float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        int(sliding_window or 0), float(softcap or 0.0), is_causal, s_aux,
    )  # fmt: skip
    return out.unsqueeze(0), None


def register() -> None:
    """Makes `IMPLEMENTATION` known to transformers. Harmless when called again."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # imports every kernel it can find: late

    AttentionInterface.register(IMPLEMENTATION, _attention)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts.forward)


def use(model: torch.nn.Module, implementation: str = IMPLEMENTATION) -> None:
    """Switches attention and experts of every module of a transformers model."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation_internal = implementation
            config._experts_implementation_internal = implementation
