"""What a mixture of experts is predicted to move, and what its plans hold."""

from __future__ import annotations

import pytest

from flashrt.ir import micro
from flashrt.ir.laws import violations
from flashrt.ir.types import evaluate
from flashrt.passes.cost import block_bytes, cost
from flashrt.passes.pipeline import Options, compile_graph
from tests.passes.examples import machine
from tests.passes.models import model

EXPERTS, TOP_K, FFN, HIDDEN = 16, 2, 96, 256
GRAPH = model(2, hidden=HIDDEN, ffn=FFN, tokens=64, experts=EXPERTS, top_k=TOP_K)


@pytest.mark.parametrize(("tokens", "read"), [(1, 2), (3, 6), (8, 16), (64, 16)])
def test_only_chosen_experts_count_as_read(tokens: int, read: int) -> None:
    """A token reads top_k experts; a step never more than there are."""
    (weight,) = (w for w in GRAPH.weights if w.name == "layers.0.gate_up")
    moved = evaluate(cost(GRAPH, machine()).of("layers.0.gate_up", "cpu:0").bytes, {"T": tokens})
    values = 4 * (tokens * HIDDEN + tokens * 2 * TOP_K + tokens * TOP_K * 2 * FFN)
    assert moved == block_bytes(weight) * read / EXPERTS + values


@pytest.mark.parametrize("numerics", ["act=f32 acc=f32", "act=i8/32 acc=f32", "act=bf16 acc=f32"])
def test_a_plan_tells_what_a_step_reads(numerics: str) -> None:
    """The dispatches say it, for the profiler; the block holds all experts."""
    got = compile_graph(GRAPH, machine(), Options(numerics=numerics))
    assert not violations(got.physical) and not violations(got.stream)
    products = [i for i in got.stream.instrs if isinstance(i, micro.Dispatch) and "expert_linear" in i.kernel]
    assert len(products) == 4
    for each in products:
        block = next(b for b in got.stream.blocks if b.name == each.args[1].block)  # type: ignore[union-attr]
        assert evaluate(each.bytes, {"T": 1}) < block.bytes * TOP_K / EXPERTS * 1.2
        assert evaluate(each.bytes, {"T": 64}) > block.bytes
