"""Attention by heads and blocks by channels on several devices: the same results, in every order of lanes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from flashrt.backends.reference.evaluate import symbols_of_step
from flashrt.ir import physical
from flashrt.ir.clock import simulate
from flashrt.ir.laws import check, violations
from flashrt.ir.text import read_physical, to_text
from flashrt.ir.types import Weight
from flashrt.layouts import LAYOUTS, columns, pack_plain, pack_quants, unpack
from flashrt.machine import Machine
from flashrt.passes.parts import Parts
from flashrt.passes.pins import Pin
from flashrt.passes.pipeline import PERFORMANCE, Options, Planned, compile_graph
from flashrt.passes.spread import Copied, Parted, Summed
from flashrt.passes.task import Earlier, seats_of
from tests.passes.evaluating import raw, step_inputs, values_of
from tests.passes.examples import batch, known, machine, two_layers
from tests.passes.models import model
from tests.passes.simulate import Array, Step, packed, run, with_parts
from tests.passes.test_deal import attempt, equal

STEPS = [batch(1, 5), batch(2, 1), batch(3, 8)]


def near(count: int = 2, latency: float = 0.5, **changes: object) -> Machine:
    """Slow devices near each other: even a tiny model is worth sharing."""
    on = equal(count, memory=1 << 30, **changes)
    slow = tuple(replace(d, read=known(1e8), launch=known(0.1)) for d in on.devices)
    return Machine(slow, tuple(replace(link, latency=known(latency)) for link in on.links))


@cache
def plan(count: int = 2, latency: float = 0.5, sums: bool = False) -> Planned:
    return compile_graph(two_layers(), near(count, latency), Options(sums=sums))


@cache
def whole() -> list[dict[str, Array]]:
    """What one device computes."""
    stream = compile_graph(two_layers(), machine()).stream
    return run(stream, packed(stream.weights), STEPS)


def results(planned: Planned, seed: int = 1) -> list[dict[str, Array]]:
    starts = {s.name: s.start for s in planned.physical.splits}
    steps = [Step({**s.symbols, **starts}, s.inputs) for s in STEPS]
    return run(planned.stream, packed(planned.stream.weights), steps, random.Random(seed))


def nodes(planned: Planned, of: str) -> list[physical.Node]:
    return [n for n in planned.physical.nodes if n.of == of and n.op not in ("transfer", "merge")]


def parts_of(graph: physical.Graph, kind: type) -> set[str]:
    return {name for name, seat in seats_of(graph).items() if isinstance(seat, kind)}


# ---- attention by heads ------------------------------------------------------------------
def test_heads_and_their_cache_are_shared() -> None:
    """Each device has whole heads of the cache, the queries that use them, and its rows of the weights."""
    planned = plan()
    check(planned.physical)
    one, two = nodes(planned, "layers.0.attention")
    assert {one.device, two.device} == {"cpu:0", "cpu:1"}
    assert [(n.attr("heads"), n.attr("kv_heads")) for n in (one, two)] == [(2, 1), (2, 1)]
    assert (one.reads, two.reads) == (("kv.0#0:1",), ("kv.0#1:2",))
    states = {s.name: str(s.type) for s in planned.physical.states}
    assert states == {f"kv.{i}#{j}:{j + 1}": "f32[P,2,1,16,16]" for i in (0, 1) for j in (0, 1)}
    weight = next(w for w in planned.physical.weights if w.name == "layers.0.qkv#1:2")
    assert weight.rows == (32, 64, 80, 96, 112, 128) and str(weight.type) == "f32[64,64]"
    assert "made in parts by cpu:" in one.because and "1 and 1 of 2 shares" in one.because
    assert all(b.state == planned.physical.budgets[0].state > 0 for b in planned.physical.budgets)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("latency", [0.5, 8.0])
def test_the_same_bits(count: int, latency: float) -> None:
    """Nothing is summed without leave: heads, channels and copies of norms give the bits of one device."""
    planned = plan(count, latency)
    assert parts_of(planned.physical, Parted) and not parts_of(planned.physical, Summed)
    for seed in range(3):
        for got, want in zip(results(planned, seed), whole(), strict=True):
            for name in want:
                np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize(
    "disabled",
    [frozenset(PERFORMANCE), *(frozenset({p}) for p in PERFORMANCE)],
    ids=["all", *PERFORMANCE],
)
@pytest.mark.parametrize("sums", [False, True])
def test_with_any_pass_left_out(disabled: frozenset[str], sums: bool) -> None:
    planned = compile_graph(two_layers(), near(latency=8.0), Options(disabled=disabled, sums=sums))
    assert violations(planned.physical) == violations(planned.stream) == []
    for got, want in zip(results(planned), whole(), strict=True):
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6 if sums else 0)


# ---- sums ------------------------------------------------------------------------------
@pytest.mark.parametrize(("count", "latency"), [(2, 8.0), (3, 20.0)])
def test_sums_are_close(count: int, latency: float) -> None:
    """Where sums are allowed and pay, products are the sum of parts by their input channels."""
    planned = plan(count, latency, True)
    summed = parts_of(planned.physical, Summed)
    assert summed & {"layers.0.o", "layers.0.down"}
    for name in summed:
        parts = [n for n in nodes(planned, name) if n.part is not None]
        totals = [n for n in nodes(planned, name) if n.part is None]
        assert {n.op for n in totals} == {"add"} and all("sum of parts" in n.because for n in totals)
        assert len(parts) > 1 and [p.attr("residual") for p in parts] == [True, *[None] * (len(parts) - 1)]
    for seed in range(3):
        for got, want in zip(results(planned, seed), whole(), strict=True):
            for name in want:
                np.testing.assert_allclose(got[name], want[name], atol=1e-6)


def test_sums_save_time() -> None:
    assert simulate(plan(2, 8.0, True).stream, {}).step_time < simulate(plan(2, 8.0).stream, {}).step_time


def test_the_plan_says_that_sums_are_not_allowed() -> None:
    assert "but no sums: they would round differently" in nodes(plan(2, 8.0), "layers.0.down")[0].because
    assert "no sums" not in nodes(plan(2, 8.0, True), "layers.0.down")[0].because


# ---- norms -------------------------------------------------------------------------------
def test_norms_are_computed_where_their_products_are() -> None:
    """A sum that both devices need is made by both, and so is the norm behind it: one copy less a block."""
    planned = plan(2, 8.0, True)
    copied = parts_of(planned.physical, Copied)
    assert "layers.0.norm2" in copied
    names = {n.name for n in planned.physical.nodes if n.op == "transfer"}
    assert not any("norm2" in name for name in names)


def test_seats_are_read_back() -> None:
    """What a later variant finds in the plan is what was decided."""
    for planned in (plan(), plan(2, 8.0, True), plan(3, 20.0, True)):
        again = read_physical(to_text(planned.physical))
        assert again == planned.physical and seats_of(again) == seats_of(planned.physical)
        for name, seat in seats_of(planned.physical).items():
            if isinstance(seat, Parted | Summed):
                assert (
                    len(seat.devices) == len(seat.bounds) - 1 == len({n.device for n in nodes(planned, name)})
                )


# ---- variants, pins, memory --------------------------------------------------------------
def test_variants_agree() -> None:
    """The plan for large steps finds the cache in the parts that the one for small steps has put it in."""
    small = compile_graph(model(tokens=1, context=4096), near())
    large = compile_graph(
        model(tokens=256, context=4096), near(), Options(earlier=Earlier((small.physical,)))
    )
    assert {s.name for s in small.physical.states} == {s.name for s in large.physical.states}
    assert any("#" in s.name for s in small.physical.states)
    homes = [{(s, n.device) for n in planned.physical.nodes for s in n.reads} for planned in (small, large)]
    assert homes[0] == homes[1] and len(homes[0]) == len(small.physical.states)


def test_what_is_pinned_stays_whole() -> None:
    planned = compile_graph(two_layers(), near(), Options(pins=(Pin("*.attention", "cpu:1"),)))
    assert not parts_of(planned.physical, Parted) & {"layers.0.attention", "layers.0.qkv"}
    assert {n.device for n in planned.physical.nodes if n.op == "attention"} == {"cpu:1"}


def test_a_cache_too_large_for_one_device() -> None:
    """A long context whose cache no device could hold."""
    graph = model(2, tokens=1, context=1 << 16)
    state = 2 * (1 << 16) * 2 * 2 * 64 * 4
    on = equal(2, limit=int(0.6 * state) + (8 << 20))
    assert attempt(graph, replace(on, devices=on.devices[:1])) is None
    got = attempt(graph, on)
    assert got is not None and not violations(got.physical)


def test_devices_of_one_memory_keep_what_moves() -> None:
    """Between core groups a cut that may move is worth more than a little time."""
    pooled = near(pool="host")
    assert not parts_of(compile_graph(model(context=64), pooled).physical, Parted)


# ---- families of models --------------------------------------------------------------------
def traced(name: str, on: Machine | None = None, sums: bool = False) -> tuple[Planned, dict[str, Array]]:
    """A traced model's plan, and what it computes."""
    graph = raw(name)
    graph = replace(
        graph,
        symbols=tuple(replace(s, hi=16) if s.name == "P" else s for s in graph.symbols),
        weights=tuple(replace(w, layout="f32") for w in graph.weights),
    )
    values, inputs = values_of(graph), step_inputs(graph)
    env = {s.name: s.hint for s in graph.symbols} | symbols_of_step(graph, inputs)
    planned = compile_graph(graph, on or machine(), Options(sums=sums))
    env |= {s.name: s.start for s in planned.physical.splits}
    wholes = {
        w.name: pack_plain(LAYOUTS["f32"], np.concatenate([np.atleast_1d(values[s]) for s in w.sources]))
        for w in planned.stream.weights
        if not w.of
    }
    weights = with_parts(wholes, planned.stream.weights)
    (got,) = run(planned.stream, weights, [Step(env, inputs)], random.Random(1))
    return planned, got


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2", "qwen3", "gpt2", "phi3"])
@pytest.mark.parametrize("sums", [False, True])
def test_families(name: str, sums: bool) -> None:
    """Norms of heads, biases, windows, soft caps, no gate: the same bits, or nearly."""
    (_, want), (planned, got) = traced(name), traced(name, near(2, 8.0 if sums else 0.5), sums)
    assert violations(planned.physical) == violations(planned.stream) == []
    # its heads of 24 channels aren't whole groups of rows
    assert bool(parts_of(planned.physical, Parted)) == (name != "qwen3")
    exact = not parts_of(planned.physical, Summed)
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=0, atol=0 if exact else 1e-5)


# ---- what divides ------------------------------------------------------------------------
def test_groups() -> None:
    """Attention divides by heads of the cache, the block by 32 channels; a residual stays outside."""
    groups = Parts(two_layers()).groups
    heads, block = groups["layers.0.qkv"], groups["layers.1.gate_up"]
    assert (heads.last, heads.shares) == ("layers.0.attention", 2)
    assert (block.last, block.shares) == ("layers.1.act", 3)
    assert heads.products == ("layers.0.qkv",) and "layers.0.k.rope" in heads.nodes
    assert "layers.0.o" not in groups and "layers.0.norm1" not in groups


def test_a_single_head_does_not_divide() -> None:
    groups = Parts(model(1, hidden=256)).groups  # one head of the cache
    assert "layers.0.attention" not in groups and "layers.0.act" in groups


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda x: x.name)
def test_columns_of_packed_weights(layout: object) -> None:
    """The columns of a packed matrix are what its columns would be packed as."""
    found = LAYOUTS[layout.name]  # type: ignore[attr-defined]
    rng = np.random.default_rng(1)
    n, k, lo, hi = 48, 160, 32, 128
    if found.element is not None:
        data = pack_plain(found, rng.standard_normal((n, k)))
    else:
        q = rng.integers(0, 15, (n, found.blocks(k), found.block))
        scales = rng.uniform(0.1, 1, (2, *q.shape[:2])).astype(found.number)
        data = pack_quants(found, q, scales[0], scales[1] if found.minimum else None)
    mine = columns(found, data, k, lo, hi)
    np.testing.assert_array_equal(unpack(found, mine, n, hi - lo), unpack(found, data, n, k)[:, lo:hi])


def test_parts_of_weights_have_laws() -> None:
    graph = plan().physical
    part = next(w for w in graph.weights if w.of)

    def broken(**changes: object) -> set[str]:
        wrong: Weight = replace(part, **changes)  # type: ignore[arg-type]
        weights = tuple(wrong if w is part else w for w in graph.weights)
        return {v.law for v in violations(replace(graph, weights=weights))}

    assert broken(of="elsewhere") == {"declared"}
    assert broken(rows=(0, 16)) == broken(rows=(0, 64, 1000, 1016)) == {"parts-fit"}


def test_golden(golden: Callable[[str, str], None]) -> None:
    """A layer's attention by heads, its block by sums and copies of norms."""
    golden("place/parts.physical", to_text(plan(2, 8.0, True).physical))
