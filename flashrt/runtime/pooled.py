"""Copies between devices of one memory as rows of the computing lane.

A lane of copies is a thread here, in Python: tens of microseconds an exchange, a hundred exchanges a step.
Where both devices compute in the host's memory their compiled loop copies a few kilobytes in less than one.

transfer device=cpu:0-0 lane=copy_out src=%3[0:s] dst=%4[0:s] to=cpu:1-1
→ dispatch device=cpu:0-0 lane=compute kernel=scale args=[%3[0:s]] dst=%4[0:s] attrs={by=1}

The order of the stream is a serial one, so that of the joined lanes is right, and every tick stays.
"""

from __future__ import annotations

from dataclasses import replace

from flashrt.ir import micro
from flashrt.ir.order import COMPUTE
from flashrt.machine import Machine

NUMERICS = "acc=f32"  # times one: the same bits


def copies_as_rows(stream: micro.Stream, machine: Machine) -> micro.Stream:
    """The stream with every copy of floats between CPU devices of one pool in the compute lane."""
    types = {s.id: s.type for s in stream.slots}
    regions: dict[str, int | None] = {}  # of each device's last computing instruction
    instrs: list[micro.Instr] = []
    for instr in stream.instrs:
        if isinstance(instr, micro.Transfer) and types[instr.src.slot].dtype == "f32":
            instr = _row(instr, regions.get(instr.device)) if _near(instr, machine) else instr
        if instr.lane == COMPUTE:
            regions[instr.device] = instr.region
        instrs.append(instr)
    return replace(stream, instrs=tuple(instrs))


def _near(instr: micro.Transfer, machine: Machine) -> bool:
    """Whether the device can compute straight into the other one's memory."""
    src, dst = machine.device(instr.device), machine.device(instr.to)
    return src.kind == dst.kind == "cpu" and src.pool == dst.pool != "" and src.supports("scale", NUMERICS)


def _row(instr: micro.Transfer, region: int | None) -> micro.Dispatch:
    return micro.Dispatch(
        device=instr.device, lane=COMPUTE, waits=instr.waits, signals=instr.signals, kernel="scale",
        args=(instr.src,), dst=instr.dst, attrs=(("by", 1.0),), numerics=NUMERICS, est=0.3,
        bytes=2 * instr.bytes, node=instr.node, region=region,
    )  # fmt: skip
