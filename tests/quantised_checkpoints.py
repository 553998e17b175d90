"""Quantised checkpoints, written from the descriptions of their formats: matrices → tensors, configuration.

Numbers are packed by shifting and adding, not as flashrt takes them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
AWQ = [0, 2, 4, 6, 1, 3, 5, 7]  # the channel that stands i-th in a word
PLAIN = list(range(8))


@dataclass(frozen=True)
class Form:
    """What a checkpoint may be. group: 0 for whole rows, -1 for one scale a tensor. ordered: act-order.

    scale: type of the scales. big: factor of all weights, so that scales leave the range of f16.
    """

    method: str
    bits: int = 4
    group: int = 32
    even: bool = True
    scale: torch.dtype = torch.float16
    ordered: bool = False
    big: float = 1.0


FORMS: Mapping[str, Form] = {
    "awq-32": Form("awq", 4, 32, even=False),
    "awq-64": Form("awq", 4, 64, even=False),
    "awq-128": Form("awq", 4, 128, even=False),
    "gptq-4": Form("gptq"),
    "gptq-4-128-uneven": Form("gptq", 4, 128, even=False),
    "gptq-4-rows": Form("gptq", 4, 0),
    "gptq_v2-4-uneven": Form("gptq_v2", 4, 64, even=False),
    "gptq-8": Form("gptq", 8, 64),
    "gptq-8-rows-uneven": Form("gptq", 8, 0, even=False),
    "gptq-act-order": Form("gptq", 4, 32, even=False, ordered=True),
    "pack-4-bf16": Form("pack-quantized", 4, 128, scale=torch.bfloat16),
    "pack-4-bf16-small": Form("pack-quantized", 4, 32, scale=torch.bfloat16, big=1e-5),
    "pack-4-uneven": Form("pack-quantized", 4, 32, even=False, scale=torch.bfloat16),
    "pack-4-rows": Form("pack-quantized", 4, 0, scale=torch.float32),
    "pack-8": Form("pack-quantized", 8, 64),
    "pack-8-rows-uneven": Form("pack-quantized", 8, 0, even=False),
    "pack-act-order": Form("pack-quantized", 4, 32, ordered=True),
    "int8-rows": Form("int-quantized", 8, 0, scale=torch.bfloat16),
    "int8-groups-uneven": Form("naive-quantized", 8, 32, even=False),
    "int8-tensor": Form("naive-quantized", 8, -1, scale=torch.float32),
}  # fmt: skip


@dataclass
class Quantised:
    """q: [N, K] from 0; scale, zero: [N, G]; groups: of each column. value: f32 [N, K], what they mean."""

    q: I64
    scale: torch.Tensor
    zero: I64
    groups: I64

    @property
    def value(self) -> F32:
        scale = self.scale.float().numpy()[:, self.groups]
        return ((self.q - self.zero[:, self.groups]).astype(np.float32) * scale).astype(np.float32)


def quantised(w: F32, form: Form, rng: np.random.Generator) -> Quantised:
    k = w.shape[1]
    group = form.group if form.group > 0 else k
    groups = np.arange(k) // group
    if form.ordered:
        groups = rng.permutation(groups)
    count, most, middle = int(groups.max()) + 1, (1 << form.bits) - 1, 1 << form.bits - 1
    by_group = np.stack([w[:, groups == g] for g in range(count)], axis=1)
    low, high = by_group.min(2), by_group.max(2)
    spread = np.maximum(-low, high) * 2 if form.even else high - low
    if form.group < 0:
        spread = np.full_like(spread, spread.max())
    scale = torch.from_numpy(spread / most).to(form.scale)
    wide = scale.float().numpy()
    zero = np.full(low.shape, middle) if form.even else np.rint(-low / wide).clip(0, most).astype(np.int64)
    q = np.rint(w / wide[:, groups]).astype(np.int64) + zero[:, groups]
    return Quantised(q.clip(0, most), scale, zero.astype(np.int64), groups)


def words(numbers: I64, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Numbers along the last axis in words of 32 bits, i32."""
    p = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % p))).reshape(len(numbers), -1, p)
    shifted = padded[..., (order or PLAIN)[:p]].astype(np.uint64) << (np.arange(p) * bits).astype(np.uint64)
    return torch.from_numpy(shifted.sum(axis=-1).astype(np.uint32).view(np.int32))


def tensors(stem: str, x: Quantised, form: Form) -> dict[str, torch.Tensor]:
    """The tensors of one module."""
    made = _MAKERS[form.method](x, form)
    return {f"{stem}.{name}": tensor.contiguous() for name, tensor in made.items()}


def _awq(x: Quantised, form: Form) -> dict[str, torch.Tensor]:
    qweight, qzeros = (words(v.T, form.bits, AWQ) for v in (x.q, x.zero))
    return {"qweight": qweight, "qzeros": qzeros, "scales": x.scale.T}


def _gptq(x: Quantised, form: Form) -> dict[str, torch.Tensor]:
    less = form.method == "gptq"
    stored = (x.zero - less) % (1 << form.bits)
    return {
        "qweight": words(x.q, form.bits).T, "qzeros": words(stored.T, form.bits), "scales": x.scale.T,
        "g_idx": torch.from_numpy(x.groups.astype(np.int32)),
    }  # fmt: skip


def _pack(x: Quantised, form: Form) -> dict[str, torch.Tensor]:
    made = {
        "weight_packed": words(x.q, form.bits), "weight_scale": x.scale,
        "weight_shape": torch.tensor(x.q.shape),
    }  # fmt: skip
    if not form.even:
        made["weight_zero_point"] = words(x.zero.T, form.bits).T
    if form.ordered:
        made["weight_g_idx"] = torch.from_numpy(x.groups.astype(np.int32))
    return made


def _int8(x: Quantised, form: Form) -> dict[str, torch.Tensor]:
    middle = 1 << form.bits - 1
    q, zero = (torch.from_numpy((v - middle).astype(np.int8)) for v in (x.q, x.zero))
    whole = form.group < 0
    made = {"weight": q, "weight_scale": x.scale[0] if whole else x.scale}
    if not form.even:
        made["weight_zero_point"] = zero
    return made


_MAKERS = {
    "awq": _awq, "gptq": _gptq, "gptq_v2": _gptq, "pack-quantized": _pack, "int-quantized": _int8,
    "naive-quantized": _int8,
}  # fmt: skip


def config(form: Form) -> dict[str, Any]:
    """`quantization_config`."""
    group = form.group if form.group > 0 else -1
    if form.method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    if form.method.startswith("gptq"):
        return {
            "quant_method": "gptq", "bits": form.bits, "group_size": group, "sym": form.even,
            "desc_act": form.ordered, "checkpoint_format": form.method,
        }  # fmt: skip
    strategy = {0: "channel", -1: "tensor"}.get(form.group, "group")
    weights = {
        "num_bits": form.bits, "type": "int", "symmetric": form.even, "strategy": strategy, "dynamic": False,
        "group_size": form.group if strategy == "group" else None,
    }  # fmt: skip
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form.method, "quantization_status": "compressed",
        "config_groups": {"group_0": scheme}, "ignore": ["lm_head"],
    }  # fmt: skip
