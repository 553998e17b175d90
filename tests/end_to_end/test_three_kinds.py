"""One plan with three kinds of device: a group of cores, an NPU and one that computes nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt import engine, program
from flashrt.backends.npu import NpuBackend
from flashrt.backends.reference import ReferenceBackend
from flashrt.ir import laws, logical, micro, physical, text
from flashrt.ir.ops import EXACT
from flashrt.machine import Machine
from flashrt.passes import pipeline
from flashrt.passes.pins import Pin
from flashrt.program import Plan, Program, Variant
from tests.backends.npu_streams import NUMERICS, installed
from tests.cli.calling import call
from tests.spine import test_spine as spine
from tests.tiny import tiny_graph, tiny_import, tiny_source

CORE = f"cpu:{min(os.sched_getaffinity(0))}-{min(os.sched_getaffinity(0))}"
NULL = "null:0"
DOORS = ("recognise", "fuse", "precision", "tag", "transfer", "lower", *pipeline.PERFORMANCE)


@pytest.fixture(params=["cpu", "qnn"])
def npu(request: pytest.FixtureRequest) -> str:
    """The provider's name: onnxruntime's own, as a stand-in, or the simulator of a Hexagon."""
    name = str(request.param)
    installed(name).close()
    return name


def pictured(npu: str) -> Machine:
    machine = engine.machine_picture((CORE, f"npu:{npu}", NULL))
    return replace(machine, devices=tuple(replace(d, memory=1 << 30, free=None) for d in machine.devices))


def with_its_numerics(graph: logical.Graph, npu: str) -> logical.Graph:
    """The MLP of the first layer as the NPU computes it."""
    linear, other = NUMERICS["f16" if npu == "qnn" else "f32"]
    how = {"linear": linear, "gated": other, "slice": EXACT, "view": EXACT}

    def chosen(node: logical.Node) -> logical.Node:
        mine = node.name.startswith("layers.0.mlp.") and node.op in how
        return replace(node, numerics=how[node.op]) if mine else node

    return replace(graph, nodes=tuple(map(chosen, graph.nodes)))


def planned(npu: str) -> tuple[Plan, list[str]]:
    """Compiled, with the laws checked at every door; and the passes that were seen."""
    doors: list[str] = []

    def door(name: str, value: object) -> None:
        if isinstance(value, logical.Graph | physical.Graph | micro.Stream) and name != "place":
            laws.check(value, stage=name)
            assert text.from_text(text.to_text(value)) == value
            doors.append(name)

    machine = pictured(npu)
    pins = (Pin("layers.0.mlp", f"npu:{npu}"), Pin("layers.1.mlp", NULL), Pin("layers.*.self_attn", CORE))
    options = pipeline.Options(pins=pins)
    ready = with_its_numerics(pipeline.prepare(tiny_graph(), options, check=door), npu)
    made = pipeline.plan(ready, machine, options, check=door)
    variant = Variant.of("all", 1, 64, made.physical, replace(made.stream, name="all"))
    return Plan("tiny", "", "", {}, made.logical, (variant,), machine, tiny_import().weights), doors


def test_it_compiles_and_says_why(npu: str, tmp_path: Path) -> None:
    """Laws at all doors, a cause for every node and copy, and the page of `flashrt explain`."""
    plan, doors = planned(npu)
    graph, devices = plan.variants[0].physical, {CORE, f"npu:{npu}", NULL}
    assert set(DOORS) - {"recognise"} <= set(doors)
    assert {n.device for n in graph.nodes} == {i.device for i in plan.variants[0].stream.instrs} == devices
    assert all(n.because for n in graph.nodes)
    assert {b.device for b in graph.budgets} == devices
    assert not any(n.op.startswith("host.") for n in graph.nodes)
    copies = {(graph_device(graph, n.inputs[0]), n.device) for n in graph.nodes if n.op == "transfer"}
    assert {(CORE, f"npu:{npu}"), (f"npu:{npu}", CORE), (CORE, NULL), (NULL, CORE)} <= copies
    saved = program.save(plan, tmp_path / "plan")
    outcome = call("explain", str(saved.folder))
    assert outcome.exit_code == 0, outcome.stderr
    page = " ".join(outcome.stdout.split())
    assert all(d in page for d in devices)
    for node in graph.nodes:
        assert node.because.split(":")[0].split(";")[0][:30] in page, node


def graph_device(graph: physical.Graph, value: str) -> str:
    return next(n.device for n in graph.nodes if n.name == value[1:])


def logits(call: Any) -> np.ndarray:
    found: list[np.ndarray] = []

    def kept(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
        given = call(inputs, symbols)
        found.append(given["logits"].copy())
        return given

    spine.generate(kept)
    return found[0]


@pytest.mark.parametrize("third", ["null", "reference"])
def test_it_runs(npu: str, third: str) -> None:
    """Every step ends with a device that computes nothing; where one that does takes its place, the
    logits are those of one device, within what the NPU's numerics round."""
    plan, _ = planned(npu)
    cpu, other, none = plan.machine.devices
    reference = ReferenceBackend()
    backend: Any = reference if third == "reference" else engine._backend("null")
    devices = {
        CORE: engine._backend("cpu").open(cpu), other.id: NpuBackend().open(other), NULL: backend.open(none),
    }  # fmt: skip
    host = reference.open(replace(cpu, id="host", kind="reference"))
    with Program(plan, devices, host, pages=spine.PAGES, source=tiny_source(tiny_graph())) as opened:
        got = logits(opened.call)
    with spine.opened(spine.a_plan((spine.planned().physical, spine.planned().stream))) as whole:
        want = logits(whole.call)
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < (5e-2 if npu == "qnn" else 1e-4) if third == "reference" else error > 1e-3
