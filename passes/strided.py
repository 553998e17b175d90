"""Which arguments may be a channel range of a wider slot instead of a dense value of their own.

Kernels of the named operations step over rows of any width in their activations. Views, host
rows and the small inputs (ids, positions, page tables) are dense.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from flashrt.ir import micro, physical

_ARGUMENTS: Mapping[str, tuple[int, ...]] = {
    "linear": (0,), "rms_norm": (0,), "layer_norm": (0,), "rope": (0,), "rope_pairs": (0,), "attention": (0,),
    "kv_write": (0, 1), "gated": (0, 1), "activation": (0,), "add": (0, 1), "mul": (0, 1),
    "head_linear": (0,), "scale": (0,), "softcap": (0,), "rows": (0,), "slice": (0,),
    "route": (0,), "expert_linear": (0, 2), "expert_sum": (0, 1), "gated_clamped": (0, 1),
    "expert_cache": (0,), "expert_join": (0, 1, 2),
}  # fmt: skip


def input_takes_range(node: physical.Node, index: int) -> bool:
    """Whether input `index` of a node may be a channel range once it is lowered."""
    match node.op:
        case "transfer":
            return True
        case "attention":
            return index < 3  # q, k, v
        case "linear" if node.attr("residual"):
            return index in (0, len(node.inputs) - 1)
    return index in _ARGUMENTS.get(node.op, ())


def argument_takes_range(instr: micro.Instr, index: int) -> bool:
    """Whether slot `index` among an instruction's arguments (or its source) may be a channel range."""
    if not isinstance(instr, micro.Dispatch):
        return isinstance(instr, micro.Quantize | micro.Transfer)
    if "+residual" in instr.kernel and index == len(instr.args) - 1:
        return True
    return index in _ARGUMENTS.get(op_of(instr), ())


def op_of(instr: micro.Dispatch) -> str:
    """`linear.q4.16x32+bias` → linear."""
    return re.split(r"[.+]", instr.kernel, maxsplit=1)[0]
