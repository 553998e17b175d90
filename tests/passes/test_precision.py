"""precision: how each operation is computed, and how each weight is stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrt.errors import PlanError
from flashrt.ir import logical
from flashrt.ir.ops import LINEAR_EXACT, LINEAR_I8
from flashrt.ir.text import to_text
from flashrt.passes.fuse import fuse
from flashrt.passes.precision import precision
from flashrt.passes.recognise import recognise
from tests.passes.evaluating import raw


def stored(model: str, layout: str, **others: str) -> logical.Graph:
    """A fused model whose matrices are stored in one layout, those named otherwise in another."""
    graph = recognise(raw(model))
    weights = [
        replace(w, layout=others.get(w.name.split(".")[0], layout)) if len(w.type.shape) == 2 else w
        for w in graph.weights
    ]
    return fuse(replace(graph, weights=tuple(weights)))


def numerics(graph: logical.Graph) -> dict[str, str]:
    return {n.name: n.numerics for n in graph.nodes}


def test_exact_by_default() -> None:
    got = precision(stored("llama", "q8.16x32"))
    assert {n.numerics for n in got.nodes if n.op == "linear"} == {LINEAR_EXACT}
    assert {n.numerics for n in got.nodes if n.op not in ("linear", "attention")} == {"acc=f32"}
    assert numerics(got)["layers.0.self_attn.attention"] == "acc=f32 chunk=page"


def test_int8_activations_only_meet_quantised_weights() -> None:
    got = numerics(precision(stored("llama", "q4m.16x32", lm_head="bf16"), numerics=LINEAR_I8))
    assert got["layers.0.self_attn.qkv"] == LINEAR_I8
    assert got["lm_head"] == LINEAR_EXACT


def test_excluded_linears_stay_exact() -> None:
    graph = stored("llama", "q8.16x32")
    got = numerics(precision(graph, numerics=LINEAR_I8, exclude=("embedding", "lm_head", "o_proj")))
    assert got["lm_head"] == got["layers.0.self_attn.o_proj"] == LINEAR_EXACT
    assert got["layers.0.mlp.gate_up"] == LINEAR_I8


def test_excluding_a_part_excludes_the_joint_linear() -> None:
    got = numerics(precision(stored("llama", "q8.16x32"), numerics=LINEAR_I8, exclude=("up_proj",)))
    assert got["layers.0.mlp.gate_up"] == LINEAR_EXACT
    assert got["layers.0.self_attn.qkv"] == LINEAR_I8


def test_raw_operators_are_exact_and_vectors_f32() -> None:
    got = precision(stored("mlp", "f32"))
    assert numerics(got)["softmax"] == "acc=f32"
    assert {w.layout for w in got.weights if len(w.type.shape) == 1} == {"f32"}


def test_a_vector_without_layout_gets_one() -> None:
    graph = stored("mlp", "bf16")
    bare = replace(
        graph, weights=tuple(replace(w, layout="") if len(w.type.shape) == 1 else w for w in graph.weights)
    )
    assert {w.layout for w in precision(bare).weights if len(w.type.shape) == 1} == {"f32"}


@pytest.mark.parametrize("layout, words", [("q5.16x32", "unknown layout 'q5.16x32'"), ("", "no layout")])
def test_a_matrix_in_no_known_layout_is_an_error(layout: str, words: str) -> None:
    with pytest.raises(PlanError, match=words) as error:
        precision(stored("llama", "f32", lm_head=layout))
    assert "%lm_head = linear(" in str(error.value) and "q4.16x32" in str(error.value)


def test_unknown_numerics_name_the_known_ones() -> None:
    with pytest.raises(PlanError, match="act=i8/32 acc=f32"):
        precision(stored("llama", "f32"), numerics="act=f8")


def test_excluding_nothing_is_an_error_that_names_what_there_is() -> None:
    with pytest.raises(PlanError, match="gate_up"):
        precision(stored("llama", "f32"), exclude=("lm_haed",))


def test_golden(golden) -> None:  # type: ignore[no-untyped-def]
    golden(
        "precision/mlp.logical",
        to_text(precision(stored("mlp", "q8.16x32"), numerics=LINEAR_I8, exclude=("head",))),
    )
