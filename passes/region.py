"""Marks what a backend may compile into one launch.

Computing instructions, and copies among them, that follow each other in their lane get the same
region number. A host row, a load or an eviction in the same lane ends a region.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from flashrt.ir import micro
from flashrt.ir.order import COMPUTE


def region(stream: micro.Stream) -> micro.Stream:
    """Numbers the regions in order of their first instructions."""
    numbers = count()
    open_regions: dict[tuple[str, str], int] = {}
    instrs: list[micro.Instr] = []
    for instr in stream.instrs:
        lane = (instr.device, instr.lane)
        number = None
        if _joins(instr):
            if lane not in open_regions:
                open_regions[lane] = next(numbers)
            number = open_regions[lane]
        else:
            open_regions.pop(lane, None)
        instrs.append(instr if instr.region == number else replace(instr, region=number))
    return replace(stream, instrs=tuple(instrs))


def _joins(instr: micro.Instr) -> bool:
    match instr:
        case micro.Dispatch():
            return not instr.kernel.startswith("host.")
        case micro.Quantize() | micro.Bias():
            return True
        case micro.Transfer():
            return instr.lane == COMPUTE  # the device's own code writes to the other one's memory
        case _:
            return False
