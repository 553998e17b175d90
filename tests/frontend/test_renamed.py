"""Tensors of older checkpoints are found under today's names; what would have to be computed is refused."""

from __future__ import annotations

import pytest
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

from flashrt.errors import UnsupportedModel
from flashrt.frontend.renamed import Conversions, renamed
from flashrt.ir.logical import Graph
from flashrt.ir.types import TensorType, Weight
from flashrt.weights.index import Tensor, WeightIndex

HEAD = WeightRenaming(r"^embed_out\.", "lm_head.")
FUSED = WeightConverter(r"attn\.qkv", [r"attn.q", r"attn.k"], operations=[Chunk(dim=0)])


def index(*names: str) -> WeightIndex:
    return WeightIndex((), {n: Tensor(n, 0, 0, 16, "F32", (2, 2)) for n in names})


def graph(*sources: str) -> Graph:
    weights = tuple(Weight(s, TensorType("f32", (2, 2)), (s,)) for s in sources)
    return Graph("model", (), (), weights, (), (), ())


def test_old_names_become_todays() -> None:
    got = renamed(graph("lm_head.weight"), index("embed_out.weight", "norm"), Conversions((HEAD,)), ())
    assert sorted(got.tensors) == ["lm_head.weight", "norm"]
    assert got.tensors["lm_head.weight"].name == "embed_out.weight"


def test_names_that_were_arranged_stay() -> None:
    got = renamed(graph(), index("embed_out.weight"), Conversions((HEAD,)), {"embed_out.weight"})
    assert list(got.tensors) == ["embed_out.weight"]


def test_a_tensor_that_has_to_be_computed_is_refused_by_name() -> None:
    how = Conversions((), (FUSED,))
    with pytest.raises(UnsupportedModel, match=r"tensor attn\.qkv becomes attn\.q by a computation"):
        renamed(graph("attn.q", "attn.k"), index("attn.qkv"), how, ())
    assert list(renamed(graph("other"), index("attn.qkv"), how, ()).tensors) == ["attn.qkv"]
