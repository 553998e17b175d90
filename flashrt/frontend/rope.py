"""Position frequencies of transformers' models: frozen, and computed without the model's weights."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def freeze(model: torch.nn.Module, context: int) -> None:
    """Replaces RoPE frequencies that depend on the step's longest position by those for `context` tokens.

    transformers recomputes them for the whole batch as it grows ("dynamic", "longrope"); then one sequence's
    length would change another's tokens. Afterwards a sequence has one set of frequencies throughout.
    """
    from transformers.modeling_rope_utils import (
        ROPE_INIT_FUNCTIONS,
    )  # slow to import: only when a model is traced

    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None or not hasattr(module, "config"):
            continue
        by_layer = isinstance(kinds, dict)
        for layer, kind in kinds.items() if by_layer else [(None, kinds)]:
            if kind != "longrope" and "dynamic" not in str(kind):
                continue
            which: dict[str, Any] = {"layer_type": layer} if layer else {}
            start = f"{layer}_" if layer else ""
            frequencies, scale = ROPE_INIT_FUNCTIONS[kind](module.config, "cpu", seq_len=context, **which)
            old = getattr(module, f"{start}inv_freq")
            module.register_buffer(f"{start}inv_freq", frequencies.to(old.device), persistent=False)
            setattr(module, f"{start}attention_scaling", scale)
            if by_layer:
                kinds[layer] = "default"
            else:
                module.rope_type = "default"


def constants(config: Any, context: int) -> dict[str, NDArray[np.generic]]:
    """Values of every buffer that no checkpoint holds, by its name in the model.

    The model is built without memory; only modules that own such buffers are filled, as transformers does.
    """
    from transformers import AutoModelForCausalLM  # slow to import: only when a model is traced

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager"
        )
    owners = {}
    for name, module in model.named_modules():
        names = [b for b in module._buffers if b in module._non_persistent_buffers_set]
        if names:
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)
            owners[name] = (module, names)
    freeze(model, context)
    return {
        f"{name}.{buffer}": getattr(module, buffer).detach().numpy()
        for name, (module, buffers) in owners.items()
        for buffer in buffers
        if isinstance(getattr(module, buffer), torch.Tensor)
    }
