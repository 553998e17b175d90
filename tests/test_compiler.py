"""Choices of the compiler: numerics of a mode, and the ranges of a graph's symbols."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrt.cli.options import Mode
from flashrt.compiler import MODES, CompileOptions, compile_model, numerics_of
from flashrt.frontend.imported import Imported
from flashrt.ir.ops import LINEAR_BF16, LINEAR_EXACT, LINEAR_I8
from flashrt.ir.text import read_logical
from flashrt.ir.types import Symbol
from flashrt.machine import Device, Machine, Measured
from flashrt.weights.index import WeightIndex

FAST = Measured(1e11, "assumed")


@pytest.mark.parametrize("mode,want", [
    ("exact", (LINEAR_EXACT, LINEAR_EXACT)), ("int8", (LINEAR_I8, LINEAR_I8)),
    ("fast", (LINEAR_I8, LINEAR_BF16)), (LINEAR_BF16, (LINEAR_BF16, LINEAR_BF16)),
])  # fmt: skip
def test_modes_are_numerics_for_each_variant(mode: str, want: tuple[str, str]) -> None:
    """A mode that a machine has no kernels for falls back to the next best numerics."""
    able = machine_with(LINEAR_EXACT, LINEAR_I8, LINEAR_BF16)
    assert tuple(numerics_of(mode, variant, able) for variant in ("small", "large")) == want
    if mode == "fast":
        assert numerics_of(mode, "large", machine_with(LINEAR_EXACT, LINEAR_I8)) == LINEAR_I8
        assert numerics_of(mode, "large", machine_with(LINEAR_EXACT)) == LINEAR_EXACT


def machine_with(*numerics: str) -> Machine:
    """One device that computes products in these ways."""
    kernels = tuple(("linear.q4.16x32", n) for n in numerics)
    known = Measured(1e9, "assumed")
    return Machine((Device("cpu:0", "cpu", "test", 1 << 30, known, {}, known, kernels=kernels),))


@pytest.mark.parametrize("name", ["T", "N", "S", "H", "batch"])
def test_symbols_of_other_models_mean_what_they_say(name: str) -> None:
    """Only a language model's T, N, S and H are known: any other graph keeps its sizes and ranges."""
    graph = read_logical(f"""\
logical other
symbol {name} lo=4 hi=40 hint=4
input x f32[{name},16]
weight w f32[16,16] sources=[w] layout=f32
%y = linear(%x,@w) f32[{name},16]
output y y
""")
    machine = machine_with(LINEAR_EXACT)
    device = replace(machine.devices[0], kernels=(("linear.f32", LINEAR_EXACT),), rates={"f32": FAST})
    plan = compile_model(
        Imported(graph, WeightIndex((), {})), replace(machine, devices=(device,)), CompileOptions()
    )
    (variant,) = plan.variants
    assert variant.stream.symbols == (Symbol(name, 4, 40, 4),)
    assert (variant.lo, variant.hi) == ((4, 40) if name == "T" else (0, 0))


def test_the_command_line_offers_every_mode() -> None:
    """It names them itself, so that its help needs no compiler."""
    assert {mode.value for mode in Mode} == set(MODES)
