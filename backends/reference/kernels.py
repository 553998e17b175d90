"""Kernel names: `op.layout+epilogue`, and which of them the reference runs."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from flashrt.backends.reference.evaluate import known
from flashrt.errors import PlanError
from flashrt.ir.ops import (
    ATTENTION_BF16,
    ATTENTION_CACHED,
    ATTENTION_EXACT,
    EPILOGUES,
    EXACT,
    KV_WRITE_BF16,
    LINEAR_BF16,
    LINEAR_EXACT,
    LINEAR_I8,
    OPS,
)
from flashrt.layouts import LAYOUTS

_LINEAR = (LINEAR_EXACT, LINEAR_I8, LINEAR_BF16)
_ATTENTION = (ATTENTION_EXACT, ATTENTION_CACHED, ATTENTION_BF16)
_DOTTED = ("aten", "flashrt")  # rooms whose operations have a dot in their name


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel name taken apart. layout: "" where the operation has no packed matrix."""

    op: str
    layout: str
    bias: bool
    residual: bool


def read_kernel(name: str) -> Kernel:
    """Takes a name apart; `host.` in front means nothing here. PlanError naming known ones close to it."""
    head, *epilogue = name.removeprefix("host.").split("+")
    op, layout = (head, "") if head.split(".")[0] in _DOTTED else (head.partition(".")[0::2])
    behind = {"bias", "residual", "latent", "lent"}
    if not known(op) or (layout and layout not in LAYOUTS) or not behind.issuperset(epilogue):
        names = [k for k, _ in kernels()]
        close = ", ".join(difflib.get_close_matches(name, names, 5, 0.4)) or ", ".join(OPS)
        raise PlanError(f"the reference has no kernel {name!r}", hint=f"close to it: {close}")
    return Kernel(op, layout, "bias" in epilogue, "residual" in epilogue)


def kernels() -> tuple[tuple[str, str], ...]:
    """Every (kernel, numerics) pair: named operations × layouts × epilogues, and `kv_write`."""
    pairs = [("kv_write", EXACT), ("kv_write", KV_WRITE_BF16)]
    for op, entry in OPS.items():
        if op == "linear":
            names = [f"linear.{layout}{epilogue}" for layout in LAYOUTS for epilogue in EPILOGUES]
            pairs += [(name, numerics) for name in names for numerics in _LINEAR]
        elif op == "expert_linear":
            pairs += [(f"{op}.{layout}", numerics) for layout in LAYOUTS for numerics in _LINEAR]
        elif entry.weighted is not None:
            pairs += [(f"{op}.{layout}", entry.numerics) for layout in LAYOUTS]
        elif op == "attention":
            pairs += [(name, numerics) for name in (op, f"{op}+latent") for numerics in _ATTENTION]
        else:
            pairs.append((op, entry.numerics))
    return tuple(pairs)
