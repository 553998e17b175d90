"""What the lanes of a stream have to move and compute, kept so that a step's figures come quickly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from flashrt.ir import micro
from flashrt.ir.types import Dim, Env, evaluate
from flashrt.status.record import Work

DISK = "disk"


@dataclass(frozen=True, slots=True)
class Sums:
    """Instructions of one kind. sizes: (bytes, flops) → how many instructions have them: layers are alike,
    so there are few."""

    dtype: str
    src: str
    dst: str
    sizes: Mapping[tuple[Dim, Dim], int]

    def at(self, env: Env) -> Work:
        """The figures of one step."""
        bytes = sum(count * evaluate(moved, env) for (moved, _), count in self.sizes.items())
        flops = sum(count * evaluate(done, env) for (_, done), count in self.sizes.items())
        return Work(self.dtype, self.src, self.dst, float(bytes), float(flops))


def work_of(stream: micro.Stream) -> dict[tuple[str, str], tuple[Sums, ...]]:
    """(device, lane) → its work, by kind."""
    found: dict[tuple[str, str], dict[tuple[str, str, str], Counter[tuple[Dim, Dim]]]] = {}
    for instr in stream.instrs:
        sizes = getattr(instr, "bytes", 0), getattr(instr, "flops", 0)
        if sizes != (0, 0):
            kinds = found.setdefault((instr.device, instr.lane), {})
            kinds.setdefault(_kind(instr), Counter())[sizes] += 1
    return {lane: tuple(Sums(*kind, sizes) for kind, sizes in k.items()) for lane, k in found.items()}


def _kind(instr: micro.Instr) -> tuple[str, str, str]:
    """(dtype, src, dst)."""
    match instr:
        case micro.Transfer():
            return "", instr.source or instr.device, instr.to
        case micro.Prefetch():
            return "", DISK, instr.device
        case micro.Dispatch():
            return instr.numerics.partition("act=")[2].partition(" ")[0].partition("/")[0], "", ""
    return "", "", ""
