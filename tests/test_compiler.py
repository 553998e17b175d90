"""Choices of the compiler: which numerics a mode means on a machine."""

from __future__ import annotations

import pytest

from flashrt.compiler import numerics_of
from flashrt.ir.ops import LINEAR_BF16, LINEAR_EXACT, LINEAR_I8
from flashrt.machine import Device, Machine, Measured


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
