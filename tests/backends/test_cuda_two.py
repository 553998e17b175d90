"""Plans over two GPUs, real or emulated, and a CPU beside them: the tokens of the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashrt.backends.cpu import CpuBackend
from flashrt.backends.cuda import CudaDevice, missing
from flashrt.backends.cuda.driver import Driver, GpuDriver
from flashrt.backends.reference import ReferenceBackend
from flashrt.compiler import compile_model
from flashrt.machine import Machine
from flashrt.passes import pipeline
from flashrt.passes.pins import Pin
from flashrt.program import Plan, Program, Variant
from tests.backends.test_cuda_hybrid import (
    GRAPH,
    OPTIONS,
    agree,
    checked,
    generated,
    machine,
    reference,
    spec,
)
from tests.generating import PAGES, Result
from tests.tiny import tiny_import, tiny_source

FIRST, CPU = spec("gpu"), spec("cpu")
SECOND = replace(FIRST, id="gpu:1")


@pytest.fixture(
    scope="module",
    params=[pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("emulated", marks=pytest.mark.slow)],
)
def drivers(request: pytest.FixtureRequest) -> dict[str, Driver]:
    if request.param == "gpu":
        import torch

        if reason := missing():
            pytest.skip(reason)
        if torch.cuda.device_count() < 2:
            pytest.skip("there is one GPU")
        return {"gpu:0": GpuDriver(0), "gpu:1": GpuDriver(1)}
    if not missing():
        pytest.skip("there is a GPU")
    from tests.backends.cuda_emulated import COMPILER, EmulatedDriver

    if COMPILER is None:
        pytest.skip("no g++ to compile the emulated kernels")
    return {"gpu:0": EmulatedDriver(), "gpu:1": EmulatedDriver()}


@pytest.fixture(scope="module")
def right() -> Result:
    return reference(0.7)


def program(plan: Plan, drivers: dict[str, Driver]) -> Program:
    devices: dict[str, Any] = {}
    for d in plan.machine.devices:
        devices[d.id] = CudaDevice(d, drivers[d.id]) if d.kind == "gpu" else CpuBackend().open(d)
    host = ReferenceBackend().open(replace(CPU, id="host", kind="reference"))
    return Program(plan, devices, host, pages=PAGES, source=tiny_source(GRAPH), poison=True)


def pinned(where: Machine, *pins: Pin) -> Plan:
    made = pipeline.compile_graph(GRAPH, where, pipeline.Options(pins=pins), check=checked)
    variant = Variant.of("all", 1, 64, made.physical, made.stream)
    return Plan("tiny", "", "", {}, GRAPH, (variant,), where, tiny_import().weights)


def test_a_layer_each(drivers: dict[str, Driver], right: Result) -> None:
    plan = pinned(machine(FIRST, SECOND), Pin("layers.0", "gpu:0"), Pin("layers.1", "gpu:1"))
    assert {i.device for i in plan.variants[0].stream.instrs} == {"gpu:0", "gpu:1"}
    with program(plan, drivers) as opened:
        agree(generated(opened.call), right)


def test_products_beside_each_other(drivers: dict[str, Driver], right: Result) -> None:
    """Each has some channels; the cuts move from step to step."""
    plan = compile_model(tiny_import(), machine(FIRST, SECOND), OPTIONS)
    splits = plan.variants[0].physical.splits
    assert splits
    steps = iter(range(1 << 30))

    def call(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
        step, variant = next(steps), plan.variants[len(inputs["ids"]) > plan.variants[0].hi]
        moves = enumerate(variant.physical.splits)
        at = {s.name: s.positions[(step + k) % len(s.positions)] for k, s in moves}
        return opened.call(inputs, {**symbols, **at})

    with program(plan, drivers) as opened:
        agree(generated(call), right)


def test_two_and_a_cpu(drivers: dict[str, Driver], right: Result) -> None:
    pins = (
        Pin("layers.*.mlp", "cpu:0"),
        Pin("layers.0.self_attn", "gpu:1"),
        Pin("layers.1.self_attn", "gpu:0"),
    )
    plan = pinned(machine(FIRST, SECOND, CPU), *pins)
    assert {i.device for i in plan.variants[0].stream.instrs} == {"gpu:0", "gpu:1", "cpu:0"}
    with program(plan, drivers) as opened:
        agree(generated(opened.call), right)
