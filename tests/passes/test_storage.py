"""storage: matrices kept in fewer bits, or without loss, but for those left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from flashrt.errors import PlanError
from flashrt.ir import logical
from flashrt.ir.text import read_logical
from flashrt.layouts import COARSER, LAYOUTS, MATRICES
from flashrt.machine import Device, Machine, Measured
from flashrt.passes.storage import readable, storage, tables
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


@pytest.mark.parametrize(
    ("held", "quantize", "want"),
    [("q8f.16x16", "q8", "q8.16x32"), ("q4mf.16x32", "q8", "q4mf.16x32"), ("q4mf.16x32", "q4", "q4m.16x32")],
)
def test_scales_count_as_bits(held: str, quantize: str, want: str) -> None:
    graph = kept_as(raw("llama"), held)
    assert set(kept(graph, quantize).values()) == {want}


GUESS = Measured(1.0, "assumed")


def machine(*layouts_of_devices: Iterable[str]) -> Machine:
    """Devices with kernels for some layouts each."""
    names = (
        [(f"{op}.{x}", "f32") for op in ("linear", "embedding") for x in xs] for xs in layouts_of_devices
    )
    return Machine(
        tuple(
            Device(f"null:{i}", "null", "", 1, GUESS, {}, GUESS, kernels=tuple(kernels))
            for i, kernels in enumerate(names)
        )
    )


@pytest.mark.parametrize("layout", COARSER)
def test_a_device_without_kernels_for_a_layout_gets_a_coarser_one(layout: str) -> None:
    graph = kept_as(raw("llama"), layout)
    old = [x for x in LAYOUTS if x not in COARSER]

    def found(on: Machine, lossless: bool = False) -> set[str]:
        return {w.layout for w in readable(graph, on, lossless=lossless).weights}

    assert found(machine(LAYOUTS)) == found(machine(LAYOUTS, LAYOUTS)) == {layout}
    assert found(machine(old)) == found(machine(LAYOUTS, old)) == {COARSER[layout]}
    assert found(machine(LAYOUTS, old), lossless=True) == {"f32"}
    assert found(machine(LAYOUTS, ["f32"])) == {layout}, "a device that has no such products anyway"


def test_rows_that_are_looked_up_lie_in_one_piece_each() -> None:
    graph = kept_as(raw("llama"), "q4mf.16x32")
    (lookup,) = (n for n in graph.nodes if "embedding" in n.op)
    table = lookup.inputs[0].removeprefix("@")

    def found(graph: logical.Graph, on: Machine) -> Mapping[str, str]:
        return {w.name: w.layout for w in tables(graph, on).weights}

    got, before = found(graph, machine(LAYOUTS)), {w.name: w.layout for w in graph.weights}
    assert got == before | {table: "q4mf.1x32"}
    assert found(graph, machine(LAYOUTS, ["f32"])) == got, "a device that looks up no such rows anyway"
    assert found(graph, machine(LAYOUTS, MATRICES)) == before
    plain = kept_as(graph, "bf16")
    assert tables(plain, machine(LAYOUTS)) == plain
    head = next(n for n in graph.nodes if "linear" in n.op)
    also = tuple(replace(n, inputs=(n.inputs[0], f"@{table}")) if n is head else n for n in graph.nodes)
    assert found(replace(graph, nodes=also), machine(LAYOUTS)) == before, "a product reads it, too"


def kept_as(graph: logical.Graph, layout: str) -> logical.Graph:
    return replace(graph, weights=tuple(replace(w, layout=layout) for w in graph.weights))


def test_unknown_words() -> None:
    with pytest.raises(PlanError, match="unknown --quantize 'q3'"):
        kept(raw("llama"), "q3")
    with pytest.raises(PlanError, match="no product or embedding is called 'lmhead'"):
        kept(raw("llama"), "q8", "lmhead")


MOE = """\
logical moe
symbol T lo=1 hi=8 hint=1
input x f32[T,32]
weight gate f32[4,32] sources=[gate]
weight up f32[{both},32] sources=[up]
weight down f32[{down},64] sources=[down]
%logits = aten.linear(%x,@gate) f32[T,4] attrs={{bias=null}} origin=a
%scores = aten.softmax(%logits) f32[T,4] attrs={{dim=1,dtype=null}} origin=b
%moe = flashrt.moe(%x,%scores,%scores,@up,@down) f32[T,32] attrs={{experts=4}} origin=c
output y moe
"""


def test_experts_are_rounded_and_their_router_is_not() -> None:
    graph = read_logical(MOE.format(both=4 * 128, down=4 * 32))
    assert kept(graph, "q4") == {"gate": "f32", "up": "q4m.16x32", "down": "q4m.16x32"}
    assert set(kept(graph, "lossless", layout="bf16").values()) == {"bf16"}
    assert set(kept(graph, "q4", "moe").values()) == {"f32"}


def test_experts_of_other_sizes_than_whole_groups_stay() -> None:
    graph = read_logical(MOE.format(both=4 * 128, down=4 * 24))
    assert kept(graph, "q8") == {"gate": "f32", "up": "q8.16x32", "down": ""}
