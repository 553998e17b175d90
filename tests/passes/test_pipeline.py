"""The whole order of passes on one graph."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from flashrt.errors import PlanError
from flashrt.ir import logical, micro, physical
from flashrt.ir.laws import check
from flashrt.passes.pipeline import PASSES, PERFORMANCE, Options, compile_graph
from tests.passes.examples import device, machine, two_layers


def test_every_pass_keeps_the_laws() -> None:
    """`check` sees each pass once, in order, and what it made keeps the laws of its level."""
    seen = []

    def look(name: str, value: object) -> None:
        seen.append(name)
        if isinstance(value, logical.Graph | physical.Graph | micro.Stream):
            check(value, stage=f"after {name}")

    plan = compile_graph(two_layers(), machine(), check=look)
    assert seen == [*PASSES, *PERFORMANCE]
    assert all(b.home == "resident" for b in plan.stream.blocks)
    assert {i.region for i in plan.stream.instrs} == {0}


def test_disabled_passes() -> None:
    plan = compile_graph(two_layers(), machine(), Options(disabled=frozenset(PERFORMANCE)))
    check(plan.stream)
    assert {i.lane for i in plan.stream.instrs} == {"compute"}
    with pytest.raises(
        PlanError, match=r"can't leave out fuse, smoke\npasses that may be left out: prefetch"
    ):
        compile_graph(two_layers(), machine(), Options(disabled=frozenset({"smoke", "fuse", "pack"})))


def test_variants_differ_in_the_range_of_t() -> None:
    """The arena is sized for the largest step of the variant."""
    graph = two_layers()

    def arena(hi: int) -> int:
        symbols = tuple(replace(s, hi=hi) if s.name == "T" else s for s in graph.symbols)
        return dict(compile_graph(replace(graph, symbols=symbols), machine()).stream.arenas)["cpu:0"]

    assert arena(1) * 4 < arena(8) * 2 < arena(64)


def test_planned_memory_is_kept() -> None:
    """In every budget that gives a plan, what the stream takes stays within it."""
    for memory in range(185_000, 245_000, 10_000):
        plan = compile_graph(two_layers(), machine(device(memory=memory)))
        (budget,) = plan.physical.budgets
        (_, arena), ring = plan.stream.arenas[0], dict(plan.stream.rings).get("cpu:0", 0)
        resident = sum(b.bytes for b in plan.stream.blocks if b.home == "resident")
        assert arena <= budget.activations
        assert arena + ring + resident + budget.state <= budget.limit


def test_weight_bytes_overrides_the_room() -> None:
    """Variants given the same room keep the same blocks resident."""
    graph = two_layers()
    options = Options(weight_bytes={"cpu:0": 30_000})
    homes = []
    for hi in (1, 64):
        symbols = tuple(replace(s, hi=hi) if s.name == "T" else s for s in graph.symbols)
        stream = compile_graph(replace(graph, symbols=symbols), machine(), options).stream
        homes.append([(b.name, b.home) for b in stream.blocks])
    assert homes[0] == homes[1]
    assert {home for _, home in homes[0]} == {"resident", "ring"}


def test_time_grows_with_the_graph() -> None:
    """Eight times the layers take about eight times as long."""

    def seconds(layers: int) -> float:
        graph = tall(layers)
        start = time.process_time()
        compile_graph(graph, machine(), Options(weight_bytes={"cpu:0": 40_000 + 10_000 * layers}))
        return time.process_time() - start

    few, many = (min(seconds(layers) for _ in range(3)) for layers in (8, 64))  # the least others disturbed
    assert many < 8 * 2.5 * few


def tall(layers: int) -> logical.Graph:
    """two_layers with its second layer repeated."""
    graph = two_layers()

    def renamed(text: str, n: int) -> str:
        return text.replace("layers.0.", f"layers.{n - 1}.").replace("layers.1.", f"layers.{n}.")

    def node(n: int, x: logical.Node) -> logical.Node:
        state = tuple(f"kv.{n}" for _ in x.reads)
        inputs = tuple(renamed(i, n) for i in x.inputs)
        return replace(x, name=renamed(x.name, n), inputs=inputs, reads=state, writes=state)

    second = [x for x in graph.nodes if x.name.startswith("layers.1.")]
    weights = [w for w in graph.weights if w.name.startswith("layers.1.")]
    place = graph.nodes.index(second[-1]) + 1
    more = [node(n, x) for n in range(2, layers) for x in second]
    tail = [replace(x, inputs=tuple(renamed(i, layers - 1) for i in x.inputs)) for x in graph.nodes[place:]]
    return replace(
        graph,
        weights=(
            *graph.weights,
            *(replace(w, name=renamed(w.name, n)) for n in range(2, layers) for w in weights),
        ),
        states=(*graph.states, *(replace(graph.states[0], name=f"kv.{n}") for n in range(2, layers))),
        nodes=(*graph.nodes[:place], *more, *tail),
    )
