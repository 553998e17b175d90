"""Every ATen operation the reference computes, by name."""

from __future__ import annotations

from collections.abc import Mapping

from flashrt.backends.reference.aten_math import MATH
from flashrt.backends.reference.aten_nn import NN
from flashrt.backends.reference.aten_shape import SHAPE
from flashrt.backends.reference.registry import Function

ATEN: Mapping[str, Function] = {**SHAPE, **MATH, **NN}


def find(op: str) -> Function | None:
    """The function of `aten.<name>`; an in-place name (`relu_`) means the plain one."""
    room, _, name = op.partition(".")
    return (ATEN.get(name) or ATEN.get(name.rstrip("_"))) if room == "aten" else None
