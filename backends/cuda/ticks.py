"""Waits and signals that kernels make themselves, and rows that they copy from and to the host's memory.

So a step with others is one launch all the same: a kernel looks at ticks in the host's memory until they are
reached, and sets those that others wait for. Copies to and from the host's memory take them along.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flashrt.backend import ABORT, I64, Memory
from flashrt.backends.cuda.args import Carry, Step, launch
from flashrt.backends.cuda.fuse import Joint
from flashrt.backends.cuda.operands import Operands, Tensor
from flashrt.ir import micro

AT_ONCE = 4  # ticks that one kernel waits for
THREADS = 256
WORDS = 8  # of 4 bytes, of a thread
BLOCKS = 32  # that copy, at most: the link is slower than they


@dataclass(frozen=True, slots=True)
class Ticks:
    """The ticks of one stretch of instructions. waits: for others, at its begin; signals: for others, at its
    end; stamps: i64 [3] of the host's, which kernels fill: came, went on, ended, by the device's clock.
    loads: ticks behind which weights are there that weren't before."""

    memory: Memory
    waits: tuple[micro.Wait, ...]
    signals: tuple[int, ...]
    stamps: I64
    loads: Collection[int | None] = ()

    def around(self, joints: Sequence[Joint], encoded: Sequence[Sequence[Step]], ops: Operands) -> list[Step]:
        """The launches of the stretch. encoded: those of each joint that doesn't copy over."""
        waits, out = self.waits, list[Step]()
        while len(waits) > AT_ONCE:
            out.append(self._carry(ops, waits[:AT_ONCE]))
            waits = waits[AT_ONCE:]
        for at, (joint, steps) in enumerate(zip(joints, encoded, strict=True)):
            if not carries(joint, ops):
                out += self._waiting(waits, ops)
                out += steps
            elif at + 1 == len(joints) and self.signals:
                out.append(self._carry(ops, waits, self.signals[0], joint))
                return [*out, *(self._carry(ops, (), tick) for tick in self.signals[1:])]
            else:
                out.append(self._carry(ops, waits, None, joint))
            waits = ()
        return [*out, *(self._carry(ops, (), tick) for tick in self.signals)]

    def _waiting(self, waits: tuple[micro.Wait, ...], ops: Operands) -> list[Step]:
        return [self._carry(ops, waits)] if waits else []

    def _carry(
        self,
        ops: Operands,
        waits: Sequence[micro.Wait],
        signal: int | None = None,
        joint: Joint | None = None,
    ) -> Step:
        ticks = int(self.memory.ticks.ctypes.data)
        abort = int(self.memory.words.ctypes.data) + 8 * ABORT
        holds = int(any(wait.tick in self.loads for wait in waits))
        fields = Carry(epoch=ops.sizes.epoch, abort=abort, stamps=self.stamps.ctypes.data, holds=holds)
        for i, wait in enumerate(waits):
            fields = fields._replace(**{f"tick_{i}": ticks + 8 * wait.tick, f"step_{i}": wait.step})
        blocks = 1
        if joint is not None:
            x, y = _ends(joint, ops)
            blocks = max(1, min(BLOCKS, -(-ops.number(y.rows) * y.width // (WORDS * THREADS))))
            fields = fields._replace(
                x=x.address, x_stride=4 * x.stride, y=y.address, y_stride=4 * y.stride, words=y.width,
                rows=ops.rows(y.rows),
            )  # fmt: skip
        if signal is not None:
            through = int(ops.scratch("carry through", 4).data_ptr())
            fields = fields._replace(signal=ticks + 8 * signal, through=through)
        return launch("carry", (blocks,), THREADS, fields)


def carries(joint: Joint, ops: Operands) -> bool:
    """Whether a kernel only copies, from or to memory of the host's: what a transfer has become."""
    instr = joint.main.instr
    if not isinstance(instr, micro.Dispatch) or instr.kernel != "scale":
        return False
    refs = (instr.args[0], instr.dst)
    return any(isinstance(ref, micro.SlotRef) and ops.outside(ref.slot) for ref in refs)


def _ends(joint: Joint, ops: Operands) -> tuple[Tensor, Tensor]:
    instr = joint.main.instr
    assert isinstance(instr, micro.Dispatch)
    return ops.floats(instr.args[0]), ops.floats(instr.dst)
