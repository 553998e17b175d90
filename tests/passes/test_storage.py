"""storage: matrices kept in fewer bits, or without loss, but for those left out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from flashrt.errors import PlanError
from flashrt.ir import logical
from flashrt.passes.storage import storage
from tests.passes.evaluating import raw


def kept(graph: logical.Graph, quantize: str, *exclude: str, layout: str = "f32") -> Mapping[str, str]:
    """Layouts of the llama's matrices, all exact in `layout`."""
    exact = {w.name: layout for w in graph.weights}
    found = storage(graph, quantize, exclude, exact)
    return {w.name: w.layout for w in found.weights if len(w.type.shape) == 2}


def test_every_matrix_that_products_or_embeddings_read() -> None:
    graph = raw("llama")
    got = kept(graph, "q4")
    assert got and set(got.values()) == {"q4m.16x32"}
    assert [w for w in storage(graph, "q4", (), {}).weights] == [
        w if len(w.type.shape) != 2 else type(w)(w.name, w.type, w.sources, w.layout or "f32")
        for w in graph.weights
    ], "what no file holds was quantised"


@pytest.mark.parametrize("part", ["lm_head", "o_proj", "embedding"])
def test_what_is_excluded_stays(part: str) -> None:
    graph = raw("llama")
    got = kept(graph, "q8", part)
    stays = {name for name, layout in got.items() if layout == "f32"}
    read = {
        i[1:]
        for n in graph.nodes
        if part in n.name.split(".") or part in n.op
        for i in n.inputs
        if i[0] == "@"
    }
    assert stays == read & set(got) and stays != set(got)


def test_fewer_bits_are_never_made_more() -> None:
    graph = storage(raw("llama"), "q4", ("lm_head",), {w.name: "f32" for w in raw("llama").weights})
    got = kept(graph, "bf16")
    assert set(got.values()) == {"q4m.16x32", "bf16"}


def test_lossless_is_what_the_file_has() -> None:
    assert set(kept(raw("llama"), "lossless", layout="q8.16x32").values()) == {"q8.16x32"}


def test_unknown_words() -> None:
    with pytest.raises(PlanError, match="unknown --quantize 'q3'"):
        kept(raw("llama"), "q3")
    with pytest.raises(PlanError, match="no product or embedding is called 'lmhead'"):
        kept(raw("llama"), "q8", "lmhead")
