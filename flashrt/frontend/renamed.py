"""Tensors of a checkpoint under the names that transformers' model has for them today.

Models were renamed since many checkpoints were written, and transformers saves with the old names; its
loader has a list of renamings and conversions for each class. The renamings are followed here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from flashrt.errors import UnsupportedModel
from flashrt.ir.logical import Graph
from flashrt.weights.index import Tensor, WeightIndex

EXPERTS = ".experts."  # expert_weights puts these together


@dataclass(frozen=True, slots=True)
class Conversions:
    """transformers' transforms of a class: renamings, applied in order, and converters, of which one is."""

    renamings: tuple[Any, ...] = ()
    converters: tuple[Any, ...] = ()


def conversions(model: Any) -> Conversions:
    """What transformers' loader does to the tensors of a checkpoint of this model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    found: Sequence[Any] = get_model_conversion_mapping(model)
    return Conversions(
        tuple(t for t in found if isinstance(t, WeightRenaming)),
        tuple(t for t in found if isinstance(t, WeightConverter)),
    )


def renamed(graph: Graph, index: WeightIndex, how: Conversions, arranged: Collection[str]) -> WeightIndex:
    """The index under today's names.

    arranged: names that were found otherwise and stay.

    Raises:
        UnsupportedModel: a tensor of the graph is made by a computation when transformers loads the model.
    """
    from transformers.core_model_loading import apply_converters, apply_renamings, dot_natural_key

    sources = {s for w in graph.weights for s in w.sources}
    tensors: dict[str, Tensor] = {}
    for name in sorted(index.tensors, key=dot_natural_key):  # in transformers' order, which some depend on
        today = name if name in arranged else apply_renamings(name, list(how.renamings))
        tensors.setdefault(today, index.tensors[name])
        if how.converters and EXPERTS not in today and name not in arranged:
            made, pattern = apply_converters(today, list(how.converters))
            if pattern is not None and made in sources:
                raise UnsupportedModel(
                    f"the checkpoint's tensor {name} becomes {made} by a computation when transformers loads "
                    "it, which isn't supported",
                    hint="save the model's state dict under its own names (safetensors.torch.save_model)",
                )
    return WeightIndex(index.files, tensors)
