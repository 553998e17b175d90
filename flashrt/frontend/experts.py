"""The opaque operation that transformers' experts become while a model is traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashrt.errors import UnsupportedModel

LIBRARY = torch.library.Library("flashrt", "FRAGMENT")
LIBRARY.define(
    "moe(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias, "
    "Tensor? down_bias, str act, float alpha, float limit, bool transposed, bool interleaved) -> Tensor"
)
ACTIVATIONS: Mapping[str, str] = {
    "SiLU": "silu", "SiLUActivation": "silu", "ReLU": "relu", "GELU": "gelu", "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh",
}  # fmt: skip


@torch.library.register_fake("flashrt::moe", lib=LIBRARY)
def _shape(x: torch.Tensor, *rest: object) -> torch.Tensor:
    """x [T,H] → [T,H]."""
    return torch.empty_like(x)


@torch.library.impl(LIBRARY, "moe", "CPU")
def _moe(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, act: str, alpha: float, limit: float,
    transposed: bool, interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    """What `flashrt::moe` means, choice by choice; for small models."""

    def product(h: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, chosen: torch.Tensor) -> Any:
        y = torch.einsum("tk,tkn->tn" if transposed else "tk,tnk->tn", h, w[chosen])
        return y if bias is None else y + bias[chosen]

    out = torch.zeros_like(x)
    for chosen, weight in zip(ids.unbind(1), weights.unbind(1), strict=True):
        both = product(x, gate_up, gate_up_bias, chosen)
        gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=1)
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = (up + 1) * gate * torch.sigmoid(alpha * gate)
        else:
            inner = _ACT[act](gate) * up
        out = out + product(inner, down, down_bias, chosen) * weight[:, None]
    return out


_ACT: Mapping[str, Any] = {
    "silu": torch.nn.functional.silu, "relu": torch.nn.functional.relu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}  # fmt: skip


def forward(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """transformers' experts function: (x [T,H], ids [T,k], weights [T,k]) → [T,H].

    Raises:
        UnsupportedModel: experts of a kind that the operation doesn't cover.
    """
    _refuse_other(module)
    act, alpha, limit = _gate(module)
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    return torch.ops.flashrt.moe(  # type: ignore[no-any-return]
        x, ids, weights, module.gate_up_proj, module.down_proj, *biases, act, alpha, limit,
        bool(module.is_transposed), bool(limit) or not module.is_concatenated,
    )  # fmt: skip


def _refuse_other(module: Any) -> None:
    name = type(module).__name__
    if not module.has_gate or module.has_post_expert_norm:
        what = "norms after them" if module.has_post_expert_norm else "no gate"
        raise UnsupportedModel(f"the model's experts ({name}) have {what}, which isn't supported")
    missing = [
        n for n in ("gate_up_proj", "down_proj") if not isinstance(getattr(module, n, None), torch.Tensor)
    ]
    if missing:
        raise UnsupportedModel(f"the model's experts ({name}) have no joint {missing[0]}")


def _gate(module: Any) -> tuple[str, float, float]:
    """(activation, alpha, limit); limit 0 for act(gate)·up."""
    from transformers.integrations.moe import _default_apply_gate

    name = type(module).__name__
    if type(module)._apply_gate is _default_apply_gate:
        act = type(module.act_fn).__name__
        if act not in ACTIVATIONS:
            raise UnsupportedModel(
                f"the model's experts ({name}) have the activation {act}",
                hint=f"known: {', '.join(ACTIVATIONS)}",
            )
        return ACTIVATIONS[act], 0.0, 0.0
    alpha, limit = (getattr(module, n, None) for n in ("alpha", "limit"))
    if not isinstance(alpha, float) or not isinstance(limit, float) or limit <= 0:
        raise UnsupportedModel(f"the model's experts ({name}) join gate and up in a way that isn't known")
    return "silu", alpha, limit
