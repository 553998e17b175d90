"""Activations in the order in which tiles of tokens read them (`in_tiles` in source/common.cuh)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from flashrt.backends.cuda import gemm, latent, prefill
from flashrt.backends.cuda.fuse import Joint
from flashrt.backends.cuda.operands import Operands
from flashrt.ir import micro
from flashrt.ir.order import root_of


def in_tiles(joints: Iterable[Joint], readers: Mapping[int, int], ops: Operands) -> dict[int, int]:
    """The slots that may be written in tiles, and for weights of which format: those that only products on
    tiles read, all of them in the same order. readers: how many each slot has."""
    made, formats, read = set[int](), dict[int, set[int]](), Counter[int]()
    for joint in joints:
        if (dst := _rounded(joint)) is not None and dst.lo is None and _makes(joint, ops):
            made.add(root_of(dst.slot, ops.slots))
        main = joint.main.instr
        if isinstance(main, micro.Dispatch) and joint.main.op == "linear" and gemm.able(main, ops):
            x = main.args[0]
            assert isinstance(x, micro.SlotRef)
            if x.lo is None:
                root = root_of(x.slot, ops.slots)
                formats.setdefault(root, set()).add(gemm.order(main, ops))
                read[root] += 1
    alone = [at for at in made if len(formats.get(at, ())) == 1 and read[at] == readers[at]]
    return {at: formats[at].pop() for at in alone}


def _rounded(joint: Joint) -> micro.SlotRef | None:
    """What a joint writes in bf16."""
    main = joint.main.instr
    if isinstance(main, micro.Quantize):
        return main.dst if main.scheme == "bf16" else None
    return joint.rounded.dst if joint.rounded else None


def _makes(joint: Joint, ops: Operands) -> bool:
    """Whether the kernel of a joint can write tiles."""
    main = joint.main.instr
    if isinstance(main, micro.Quantize):
        return True
    match joint.main.op:
        case "rms_norm":  # which writes eight neighbouring channels at a time
            width = main.attr("width")
            return width is None or (isinstance(width, int) and width % 8 == 0)
        case "gated":
            return True
        case "attention":
            return not latent.is_latent(main) and not prefill.possible(main, ops)
        case "linear":
            return gemm.able(main, ops)
    return False
