"""Plans with an NPU device, on its stand-in: split with another device, alone, and refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt import engine
from flashrt.backends.npu import NpuBackend, device_spec
from flashrt.backends.npu.kernels import Form
from flashrt.backends.reference import evaluate_graph
from flashrt.compiler import CompileOptions
from flashrt.errors import PlanError
from flashrt.frontend.logical_file import load_logical
from flashrt.ir import laws, physical, text
from flashrt.ir.ops import EXACT
from flashrt.machine import Device, Machine
from flashrt.passes import pipeline
from flashrt.passes.lower import lower
from flashrt.passes.transfer import transfer
from flashrt.program import Variant
from tests.backends.npu_streams import NUMERICS, installed
from tests.cli.calling import call
from tests.spine import test_spine as spine

NPU = "npu:cpu"


@pytest.fixture(autouse=True)
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own; with a real model the common one, where the CPU's kernels are."""
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path / "cache"))


def recorded(call: spine.Call, logits: list[np.ndarray]) -> spine.Call:
    """The same call; the logits of every step are kept."""

    def recording(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
        outputs = call(inputs, symbols, outputs)
        logits.append(outputs["logits"].copy())
        return outputs

    return recording


def test_a_model_split_between_two_devices_at_channels_that_move() -> None:
    """The plan of tests/spine with its second device an NPU: the MLPs and the head move between both."""
    host = spine.MACHINE.devices[0]
    machine = replace(spine.MACHINE, devices=(host, device_spec(NPU, host)))
    graph = text.read_physical(spine.SPLIT.read_text().replace("reference:1", NPU))
    laws.check(graph)
    stream = lower(graph, machine)
    for faster in pipeline.PERFORMANCE.values():
        stream = faster(stream, pipeline.Options(), pipeline.weight_room(graph.budgets))
    laws.check(stream)
    assert {i.device for i in stream.instrs} == {host.id, NPU}
    plain, split = list[np.ndarray](), list[np.ndarray]()
    whole = spine.planned()
    with spine.opened(spine.a_plan((whole.physical, whole.stream))) as program:
        want = spine.generate(recorded(program.call, plain))
    devices = {host.id: spine.BACKEND.open(host), NPU: NpuBackend().open(machine.device(NPU))}
    plan = replace(spine.a_plan((graph, stream)), machine=machine)
    with spine.opened(plan, devices=devices) as program:
        got = spine.generate(recorded(spine.moving(program, graph.splits), split))
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    for ours, theirs in zip(split, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


MLP = """logical mlp
symbol T lo=1 hi=20 hint=4
input x f32[T,64]
weight norm f32[64] sources=[norm]
weight gate f32[96,64] sources=[gate] layout=f32
weight up f32[96,64] sources=[up] layout=f16
weight down f32[64,96] sources=[down] layout=f32
weight bias f32[64] sources=[bias]
%n = rms_norm(%x,@norm) f32[T,64] attrs={eps=1e-05,offset=0,weight=true,width=64}
%g = linear(%n,@gate) f32[T,96]
%u = linear(%n,@up) f32[T,96]
%a = gated(%g,%u) f32[T,96] attrs={act="silu"}
%d = linear(%a,@down,@bias) f32[T,64] attrs={bias=true}
%y = add(%x,%d) f32[T,64]
output y y
"""


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    """An MLP as a file with its weights."""
    rng = np.random.default_rng(1)
    shapes = {"norm": (64,), "gate": (96, 64), "up": (96, 64), "down": (64, 96), "bias": (64,)}
    arrays = {n: rng.standard_normal(s).astype(np.float16).astype(np.float32) / 4 for n, s in shapes.items()}
    np.savez(tmp_path / "mlp.npz", **arrays)  # type: ignore[arg-type]
    path = tmp_path / "mlp.logical"
    path.write_text(MLP)
    return path


def test_a_graph_that_it_can_run_whole_runs_on_it_alone(mlp: Path) -> None:
    plan = engine.obtain(str(mlp), devices=(NPU,)).plan
    assert {i.device for v in plan.variants for i in v.stream.instrs} == {NPU}
    graph = load_logical(mlp).graph
    arrays = np.load(mlp.with_suffix(".npz"))
    with engine.open_plan(plan, threads=1) as program:
        for t in (1, 5, 20):
            x = np.random.default_rng(t).standard_normal((t, 64)).astype(np.float32)
            got = program.call({"x": x})["y"]
            want = evaluate_graph(graph, {"x": x}, lambda w: arrays[w.sources[0]])["y"]
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_devices_that_can_not_be_had_end_with_exit_code_2(mlp: Path) -> None:
    outcome = call("compile", str(mlp), "-o", str(mlp.parent / "plan"), "--device", "npu:abacus")
    assert outcome.exit_code == 2 and "npu:cpu" in outcome.stderr
    with pytest.raises(PlanError, match="pip install"):
        engine.obtain(str(mlp), devices=("npu:cann",))


# ---- SmolLM2 -------------------------------------------------------------------
MOVED = re.compile(r"layers\.[01]\.(mlp|self_attn\.(qkv|o_proj))")
MOVABLE = ("linear", "gated", "slice")
CONTEXT = 256


def moved(variant: Variant, machine: Machine, npu: Device, form: Form) -> Variant:
    """The variant with the projections and MLPs of two layers on the NPU, as an edited text would have it."""
    linear, other = NUMERICS[form]
    how = {"linear": linear, "slice": EXACT}

    def move(node: physical.Node) -> physical.Node:
        if node.op not in MOVABLE or not MOVED.match(node.name):
            return node
        return replace(node, device=npu.id, numerics=how.get(node.op, other), because="by hand")

    graph = variant.physical
    budgets = (*graph.budgets, replace(graph.budgets[0], device=npu.id))
    graph = transfer(replace(graph, nodes=tuple(map(move, graph.nodes)), budgets=budgets), machine)
    graph = text.read_physical(text.to_text(graph))
    laws.check(graph)
    stream = lower(graph, machine)
    for faster in pipeline.PERFORMANCE.values():
        stream = faster(stream, pipeline.Options(), pipeline.weight_room(graph.budgets))
    laws.check(stream)
    return Variant.of(variant.name, variant.lo, variant.hi, graph, replace(stream, name=variant.name))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", ["cpu", "openvino-cpu", "qnn", "qnn-int8"])
def test_smollm2_answers_with_two_layers_on_an_npu_and_attention_on_the_cpu(name: str) -> None:
    form = installed(name).provider.form
    plan = engine.obtain("smollm2", CompileOptions(context=CONTEXT, tokens=64)).plan
    npu = device_spec(f"npu:{name}", plan.machine.devices[0])
    machine = replace(plan.machine, devices=(*plan.machine.devices, npu))
    split = replace(
        plan, machine=machine, variants=tuple(moved(v, machine, npu, form) for v in plan.variants)
    )
    for variant in split.variants:
        linears = [n for n in variant.physical.nodes if n.device == npu.id and n.op == "linear"]
        assert len(linears) == 8, "qkv, o, gate and up, down of two layers"
    with engine.LLM("smollm2", plan=split, threads=1) as llm:
        answer = llm.generate("What is the capital of France?", max_tokens=12, temperature=0.0)
    assert answer.text == "The capital of France is Paris."
