"""Whatever the machine: the plan fits, and no device alone would be faster by the clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashrt.errors import PlanError
from flashrt.ir.clock import simulate
from flashrt.ir.laws import violations
from flashrt.machine import Device, Machine
from flashrt.passes.pipeline import Options, Planned, compile_graph
from tests.passes.examples import device, known, machine, two_layers

GRAPH = two_layers()
GAIN = 1.011  # several devices are used where they save a hundredth of the time


def devices(memory: st.SearchStrategy[int]) -> st.SearchStrategy[Device]:
    """Processors, accelerators and NPUs from slow to fast."""

    def build(kind: str, read: float, rate: float, launch: float, memory: int) -> Device:
        rates = {"f32": known(rate), "i8": known(4 * rate)}
        return device(f"{kind}:0", read=known(read), rates=rates, launch=known(launch), memory=memory)

    return st.builds(
        build, st.sampled_from(["cpu", "gpu", "npu"]), st.floats(1e9, 1e12), st.floats(1e10, 1e13),
        st.floats(0.1, 50.0), memory,
    )  # fmt: skip


def machines(memory: st.SearchStrategy[int]) -> st.SearchStrategy[Machine]:
    some = st.lists(devices(memory), min_size=1, max_size=3, unique_by=lambda d: d.id)
    return some.map(lambda found: machine(*found))


def planned(on: Machine, **choice: Any) -> Planned:
    return compile_graph(GRAPH, on, Options(**choice))


def total(plan: Planned) -> float:
    """Microseconds of a typical step."""
    return simulate(plan.stream, {}).step_time


@settings(max_examples=15)
@given(machines(st.just(1 << 30)))
def test_never_slower_than_one_device(on: Machine) -> None:
    """With memory for everything the choice is at least as good as each device that can run all of it,
    as the same clock tells. (Rows on the reference implementation are priced as if they were compiled.)"""
    try:
        plan = planned(on)
    except PlanError:
        assert all(d.kind not in ("cpu", "reference", "null") for d in on.devices)  # nothing runs the rest
        return
    assert violations(plan.physical) == violations(plan.stream) == []
    for each in on.devices:
        try:
            alone = planned(on, devices=(each.id,))
        except PlanError:
            continue
        if all(n.device == each.id for n in alone.physical.nodes):
            assert total(plan) <= total(alone) * GAIN, each.id


@settings(max_examples=15)
@given(machines(st.integers(100_000, 400_000)))
def test_a_plan_keeps_every_budget(on: Machine) -> None:
    """Memory around the model's size: there is a plan within the budgets, or an error with the figures."""
    try:
        plan = compile_graph(GRAPH, on)
    except PlanError as error:
        assert "needs" in str(error) or "no host device" in str(error), error
        return
    assert violations(plan.physical) == violations(plan.stream) == []
    arenas, rings = dict(plan.stream.arenas), dict(plan.stream.rings)
    for budget in plan.physical.budgets:
        kept = sum(b.bytes for b in plan.stream.blocks if (b.device, b.home) == (budget.device, "resident"))
        taken = kept + arenas.get(budget.device, 0) + rings.get(budget.device, 0) + budget.state
        assert taken <= budget.limit == on.device(budget.device).budget


@settings(max_examples=8)
@given(machines(st.just(1 << 30)), st.randoms())
def test_the_order_of_devices_is_no_matter(on: Machine, random: Any) -> None:
    """Unless two are equally fast, the same device is chosen however the machine lists them."""
    assume(len({(d.read.value, d.launch.value) for d in on.devices}) == len(on.devices))
    shuffled = list(on.devices)
    random.shuffle(shuffled)
    other = Machine(tuple(shuffled), on.links)
    try:
        first = planned(on)
    except PlanError:
        with pytest.raises(PlanError):
            planned(other)
        return
    assert total(planned(other)) == pytest.approx(total(first), rel=2 * (GAIN - 1))
