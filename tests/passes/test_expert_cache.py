"""Experts that a GPU keeps of layers whose experts are the host's: what is planned, and what it brings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from flashrt.compiler import CompileOptions, compile_model
from flashrt.frontend.imported import Imported
from flashrt.ir import laws, micro, physical
from flashrt.ir.ops import EXPERT_TABLE, EXPERTS_ASKED
from flashrt.ir.text import read_micro, read_physical, to_text
from flashrt.ir.types import evaluate
from flashrt.machine import Machine
from flashrt.passes.cost import block_bytes
from flashrt.passes.experts import hit_share
from flashrt.passes.pipeline import step_time
from flashrt.program import Plan
from flashrt.weights.index import WeightIndex
from tests.passes.examples import known
from tests.passes.models import model
from tests.passes.test_hybrid import CPU, GPU, h200, taken

LAYERS, EXPERTS, TOP_K = 3, 64, 4
GRAPH = model(LAYERS, hidden=1024, ffn=512, tokens=256, experts=EXPERTS, top_k=TOP_K)
LIMITS = (
    60 << 20,
    120 << 20,
    160 << 20,
)  # bytes of a GPU: none, one and two layers' experts fit it as a whole
limits = pytest.mark.parametrize("limit", LIMITS)


@cache
def compiled(limit: int, *, able: bool = True) -> Plan:
    """able: whether the GPU has what a cache takes."""
    options = CompileOptions(256, 256, 1, numerics="int8")
    return compile_model(Imported(GRAPH, WeightIndex((), {})), machine(limit, able=able), options)


def machine(limit: int, *, able: bool = True, link: float = 55e9) -> Machine:
    """A processor whose memory is slow, so that little is gained by much less than a model."""
    cpu, gpu = h200(limit, link).devices
    kernels = tuple(k for k in gpu.kernels if able or k[0] != "expert_cache")
    return replace(h200(limit, link), devices=(replace(cpu, read=known(1e10)), replace(gpu, kernels=kernels)))


def caches(plan: Plan) -> list[physical.Node]:
    return [n for n in plan.variants[0].physical.nodes if n.op == "expert_cache"]


def slots_of(plan: Plan) -> int:
    (slots,) = {n.attr("slots") for n in caches(plan)}
    assert isinstance(slots, int)
    return slots


@pytest.mark.parametrize(("limit", "whole"), list(zip(LIMITS, range(LAYERS), strict=True)))
def test_the_room_that_is_left_is_for_experts(limit: int, whole: int) -> None:
    """Of each layer whose experts are the host's the GPU keeps as many, and more where there is more room."""
    plan = compiled(limit)
    products = [n for n in plan.variants[0].physical.nodes if n.op == "expert_linear"]
    assert {n.device for n in products if n.attr("share") is None} == ({GPU} if whole else set())
    assert len(caches(plan)) == LAYERS - whole
    assert [n.attr("layer") for n in caches(plan)] == list(range(LAYERS - whole))
    assert 0 < slots_of(plan) < slots_of(compiled(limit + (4 << 20))) < EXPERTS
    assert limit * 0.75 < taken(plan, GPU) <= limit


def test_experts_may_all_be_the_hosts_so_that_more_are_kept() -> None:
    """Some experts of all layers are better than all of few, and large steps bring no more than without."""
    graph, found = model(12, hidden=1024, ffn=512, tokens=256, experts=EXPERTS, top_k=TOP_K), []
    for able in (True, False):
        where = machine(200 << 20, able=able)
        plan = compile_model(
            Imported(graph, WeightIndex((), {})), where, CompileOptions(256, 256, 1, numerics="int8")
        )
        assert taken(plan, GPU) <= 200 << 20 and plan.variants[1].stream.rings
        brought = sum(i.bytes for i in plan.variants[1].stream.instrs if isinstance(i, micro.Prefetch))
        products = Counter(n.device for n in plan.variants[0].physical.nodes if n.op == "expert_linear")
        found.append((products, len(caches(plan)), brought))
    (products, count, brought), (before, none, whole) = found
    assert products == {GPU: 24, CPU: 24} and count == 12
    assert before[GPU] > 0 and none == 0
    assert isinstance(brought, int | float) and isinstance(whole, int | float) and brought <= whole * 1.03


@pytest.mark.parametrize("pin", ["layers.0.down_all", "layers.0.route", "layers.0"])
def test_layers_that_somebody_placed_have_no_cache(pin: str) -> None:
    """A pin fits what would be made of its nodes, too; other layers keep their experts."""
    options = CompileOptions(256, 256, 1, numerics="int8", pins=(f"{pin}={CPU}",))
    plan = compile_model(Imported(GRAPH, WeightIndex((), {})), machine(LIMITS[0]), options)
    nodes = plan.variants[0].physical.nodes
    assert len(caches(plan)) == LAYERS - 1 and not [n for n in nodes if n.name.startswith("layers.0.route.")]
    products = [n for n in nodes if n.op == "expert_linear" and n.name.startswith(pin)]
    assert {n.device for n in products} <= {CPU}


@limits
def test_it_is_quicker_than_without(limit: int) -> None:
    """By the estimates: of a small step, which large ones aren't slower for."""
    plans = compiled(limit), compiled(limit, able=False)
    assert caches(plans[0]) and not caches(plans[1])
    for tokens, variant in ((1, 0), (256, 1)):
        with_it, without = (step_time(p.variants[variant].stream, p.machine, {"T": tokens}) for p in plans)
        assert with_it < without if tokens == 1 else with_it <= without * 1.01


@limits
def test_texts_and_laws(limit: int) -> None:
    for variant in compiled(limit).variants:
        assert read_physical(to_text(variant.physical)) == variant.physical
        assert read_micro(to_text(variant.stream)) == variant.stream
        assert not laws.violations(variant.physical) and not laws.violations(variant.stream)


def test_only_small_steps_ask_for_the_table() -> None:
    """It is no input of the model, and what is counted no part of its graph: that is planned again later."""
    plan = compiled(LIMITS[0])
    small, large = (v.stream for v in plan.variants)
    assert EXPERT_TABLE in {i.name for i in small.inputs} - {i.name for i in large.inputs}
    assert EXPERT_TABLE not in plan.inputs and EXPERTS_ASKED not in {s.name for s in plan.logical.states}
    assert not [n for n in plan.logical.nodes if "expert_cache" in n.op]


def test_what_each_side_is_expected_to_do() -> None:
    """The GPU's share of the choices, and of the bytes, is what the plan says; the rest is the host's."""
    plan = compiled(LIMITS[0])
    share = hit_share(slots_of(plan), EXPERTS)
    weights = {w.name: w for w in plan.variants[0].physical.weights}
    for node in plan.variants[0].physical.nodes:
        if node.op == "expert_linear":
            mine = share if node.device == GPU else 1 - share
            assert node.attr("share") == pytest.approx(mine, abs=1e-4)
            experts, held = node.attr("experts"), weights[node.inputs[1][1:]]
            assert isinstance(experts, int)
            read = evaluate(node.bytes, {"T": 1}) - TOP_K * mine * block_bytes(held) / experts
            assert 0 < read < 50_000  # activations
    assert f"{slots_of(plan)} of the layer's {EXPERTS} experts are kept here" in caches(plan)[0].because


def test_both_sides_compute_at_the_same_time() -> None:
    """What the host needs is on its way before the GPU begins with its own, which it ends before it waits."""
    small = compiled(LIMITS[0]).variants[0].stream
    lane = [i for i in small.instrs if i.device == GPU and i.lane == "compute"]
    for layer in range(LAYERS):
        own = [at for at, i in enumerate(lane) if isinstance(i, micro.Dispatch) and i.attr("layer") == layer]
        split, first, last = own[0], own[1], own[-1]
        copies = [at for at, i in enumerate(lane) if isinstance(i, micro.Transfer)]
        away = [at for at in copies if lane[at].to == CPU and at < first]  # type: ignore[union-attr]
        back = [at for at in copies if lane[at].to == GPU and at > last]  # type: ignore[union-attr]
        assert away and back and split < max(away) < first and back[0] == last + 1


def test_copies_are_the_gpus_own_where_the_usual_step_is_small() -> None:
    """However many tokens a small step may have: no thread of copies stands between the two for one token."""
    small = compiled(LIMITS[0]).variants[0]
    assert {lane for i in small.stream.instrs for lane in [i.lane]} == {"compute"}
