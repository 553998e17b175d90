"""What a user pins: kept, or refused before anything is loaded."""

from __future__ import annotations

import pytest

from flashrt.compiler import CompileOptions, compile_model, plan_key
from flashrt.errors import PlanError
from flashrt.ir import physical
from flashrt.ir.laws import check
from flashrt.ir.text import read_logical
from flashrt.machine import Machine
from flashrt.passes.pins import Pin, read_pin
from flashrt.passes.pipeline import Options, compile_graph
from tests.passes.examples import device, known, machine, two_layers
from tests.tiny import tiny_import

BOTH = machine(device(), device("gpu:0", read=known(2e11), launch=known(0.5)))


def placed(*pins: str, on: Machine = BOTH) -> dict[str, physical.Node]:
    graph = compile_graph(two_layers(), on, Options(pins=tuple(map(read_pin, pins)))).physical
    check(graph)
    return {n.name: n for n in graph.nodes if n.op not in ("transfer", "merge")}


def test_a_pin_is_a_pattern_and_a_device() -> None:
    assert read_pin("layers.*.mlp=cpu:0") == Pin("layers.*.mlp", "cpu:0")
    for text in ("cpu:0", "=cpu:0", "a="):
        with pytest.raises(PlanError, match="places nothing"):
            read_pin(text)


def test_the_plan_goes_around_a_pin() -> None:
    """What is pinned is there and says so, though it is faster elsewhere; the rest isn't."""
    nodes = placed("layers.*.gate_up=cpu:0")
    for name, node in nodes.items():
        if name.endswith("gate_up"):
            assert node.device == "cpu:0"
            assert node.because.startswith("pinned by layers.*.gate_up=cpu:0")
    assert nodes["layers.0.attention"].device == "gpu:0"


@pytest.mark.parametrize(
    ("pattern", "pinned"),
    [
        ("layers.1", {n.name for n in two_layers().nodes if n.name.startswith("layers.1.")}),
        ("layers.0.down", {"layers.0.down"}),
        ("embed", {"embedding", "logits"}),  # a weight's name: both of its users
        ("layers.0.gate", {"layers.0.gate_up", "layers.0.gate"}),  # a tensor that a joint weight is made from
        ("layers.?.o", {"layers.0.o", "layers.1.o"}),
    ],
)
def test_what_a_pattern_fits(pattern: str, pinned: set[str]) -> None:
    nodes = placed(f"{pattern}=cpu:0")
    assert {name for name, n in nodes.items() if "pinned" in n.because} == pinned
    assert {nodes[name].device for name in pinned} == {"cpu:0"}


def test_origins_are_names_too() -> None:
    text = """\
logical one
symbol T lo=1 hi=8 hint=2
input x f32[T,64]
%a = scale(%x) f32[T,64] attrs={by=2.0} numerics="acc=f32" origin="model.first aten.mul"
%b = scale(%a) f32[T,64] attrs={by=2.0} numerics="acc=f32" origin="model.second aten.mul"
output b b
"""
    graph = compile_graph(read_logical(text), BOTH, Options(pins=(Pin("model.second", "gpu:0"),))).physical
    assert next(n for n in graph.nodes if n.name == "b").device == "gpu:0"


REFUSED = [
    (("layers.*.gate_upp=cpu:0",), r"nothing is called 'layers\.\*\.gate_upp'\nclose: .*layers\.\*\.gate_up"),
    (("layers.*=npu:3",), r"no device 'npu:3' in use\ndevices: cpu:0, gpu:0"),
    (
        ("layers.0=cpu:0", "layers.*.down=gpu:0"),
        r"=cpu:0 and layers\.\*\.down=gpu:0 both place layers\.0\.down",
    ),
]


@pytest.mark.parametrize(("pins", "said"), REFUSED)
def test_refused(pins: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        placed(*pins)


def test_a_device_that_cannot_run_it() -> None:
    npu = machine(device(), device("npu:0"))
    with pytest.raises(PlanError, match=r"layers\.0\.attention can't be there: npu:0 isn't for attention"):
        placed("layers.0.attention=npu:0", on=npu)


def test_a_pin_that_does_not_fit() -> None:
    """The pin and the shortfall are named."""
    small = machine(device(), device("gpu:0", memory=60_000))
    with pytest.raises(
        PlanError, match=r"doesn't fit with layers\.\*=gpu:0\n *gpu:0 needs \d+ bytes at least"
    ):
        placed("layers.*=gpu:0", on=small)


def test_pins_of_a_whole_model() -> None:
    """Every variant keeps them, and they are part of the plan's key."""
    on = machine(device("reference:0"), device("reference:1"))
    options = CompileOptions(tokens=64, pins=("layers.*.mlp=reference:1",))
    plan = compile_model(tiny_import(), on, options)
    for variant in plan.variants:
        mlp = {n.device for n in variant.physical.nodes if ".mlp." in n.name and n.op != "transfer"}
        assert mlp == {"reference:1"}
    assert plan_key("m", options, on) != plan_key("m", CompileOptions(tokens=64), on)
