"""Plans over two GPUs, real or emulated, and a CPU beside them: the tokens of the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrt.backends.cuda.driver import Driver
from flashrt.compiler import compile_model
from flashrt.machine import Machine
from flashrt.passes.pins import Pin
from flashrt.program import Plan
from tests import gpus
from tests.backends import test_cuda_hybrid as hybrid
from tests.backends.test_cuda_hybrid import OPTIONS, agree, generated, machine, opened, spec
from tests.generating import Result
from tests.tiny import tiny_import

FIRST, CPU = spec("gpu"), spec("cpu")
SECOND = replace(FIRST, id="gpu:1")


@pytest.fixture(
    scope="module",
    params=[pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("emulated", marks=pytest.mark.slow)],
)
def drivers(request: pytest.FixtureRequest) -> dict[str, Driver]:
    return dict(zip(("gpu:0", "gpu:1"), gpus.drivers(request.param, 2), strict=True))


@pytest.fixture(scope="module")
def right() -> Result:
    return hybrid.reference(0.7)


def pinned(where: Machine, *pins: Pin) -> Plan:
    return hybrid.a_plan(hybrid.variant("all", 1, 64, where, pins=pins), where=where)


def test_a_layer_each(drivers: dict[str, Driver], right: Result) -> None:
    plan = pinned(machine(FIRST, SECOND), Pin("layers.0", "gpu:0"), Pin("layers.1", "gpu:1"))
    assert {i.device for i in plan.variants[0].stream.instrs} == {"gpu:0", "gpu:1"}
    with opened(plan, drivers) as program:
        agree(generated(program.call), right)


def test_products_beside_each_other(drivers: dict[str, Driver], right: Result) -> None:
    """Each has some channels; the cuts move from step to step."""
    plan = compile_model(tiny_import(), machine(FIRST, SECOND), OPTIONS)
    assert plan.variants[0].physical.splits
    with opened(plan, drivers) as program:
        agree(generated(hybrid.with_moving_cuts(program)), right)


def test_two_and_a_cpu(drivers: dict[str, Driver], right: Result) -> None:
    pins = (
        Pin("layers.*.mlp", "cpu:0"),
        Pin("layers.0.self_attn", "gpu:1"),
        Pin("layers.1.self_attn", "gpu:0"),
    )
    plan = pinned(machine(FIRST, SECOND, CPU), *pins)
    assert {i.device for i in plan.variants[0].stream.instrs} == {"gpu:0", "gpu:1", "cpu:0"}
    with opened(plan, drivers) as program:
        agree(generated(program.call), right)
