"""Which kernels run on a device of this kind, and with which numerics.

    form   linear                     elementwise, norms
    f32    act=f32 acc=f32            acc=f32
    f16    act=f16 acc=f32            acc=f16
    int8   act=u16 w=i8 acc=i32       act=u16        (no norms: their sums need more than 16 bits)

f32 gives the same bits for any number of tokens. f16: inputs and results are half floats, the sum of
a product isn't. int8: weights are signed bytes with a scale for each output channel; activations are
16-bit integers, in ranges that were calibrated. `view` and `slice` move bytes and are exact in every form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flashrt.ir.ops import EPILOGUES, EXACT, LINEAR_EXACT, LINEAR_F16
from flashrt.layouts import LAYOUTS

Form = Literal["f32", "f16", "int8"]
HALF = "acc=f16"
LINEAR_U16 = "act=u16 w=i8 acc=i32"
U16 = "act=u16"

ELEMENTWISE = ("gated", "activation", "add", "mul", "scale")
NORMS = ("rms_norm", "layer_norm")
MOVES = ("view", "slice")


@dataclass(frozen=True, slots=True)
class _Numerics:
    """linear: of products; other: of the operations in `ops`."""

    linear: str
    other: str
    ops: tuple[str, ...]


_FORMS: Mapping[Form, _Numerics] = {
    "f32": _Numerics(LINEAR_EXACT, EXACT, (*ELEMENTWISE, *NORMS)),
    "f16": _Numerics(LINEAR_F16, HALF, (*ELEMENTWISE, *NORMS)),
    "int8": _Numerics(LINEAR_U16, U16, ELEMENTWISE),
}


def kernels_of(form: Form) -> tuple[tuple[str, str], ...]:
    """(kernel, numerics) pairs of a form: products in every layout with every epilogue, and the rest."""
    how = _FORMS[form]
    linears = [f"linear.{layout}{epilogue}" for layout in LAYOUTS for epilogue in EPILOGUES]
    return (
        *((name, how.linear) for name in linears),
        *((op, how.other) for op in how.ops),
        *((op, EXACT) for op in MOVES),
    )


def all_kernels() -> tuple[tuple[str, str], ...]:
    """What some device of the kind can run."""
    return tuple(dict.fromkeys(pair for form in _FORMS for pair in kernels_of(form)))
