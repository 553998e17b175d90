"""The micro-instruction stream: what each lane of each device is told to do.

Instructions stand in one order that is a valid serial execution. Instructions
of one lane of one device run in that order; between lanes only ticks order
them: an instruction waits for `waits` and then sets `signals`. `!3` is tick 3
of this step, `!3@-1` is tick 3 of the previous step. A step ends for the
caller when every compute lane is through; other lanes may still run, so the
next step's instructions wait for what they need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashrt.ir.types import Attrs, Dim, Input, Output, State, Symbol, TensorType, Value, Weight

from flashrt.ir.physical import Split  # isort: skip


@dataclass(frozen=True, slots=True)
class Wait:
    """A tick that must have been reached: `!3`, or `!3@-1` for the previous step's."""

    tick: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot, or channels [lo, hi) of its last axis: `%9`, `%9[0:s3]`."""

    slot: int
    lo: Dim | None = None
    hi: Dim | None = None


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A weight block, or rows [lo, hi) of it: `@layers.3.mlp.up`, `@layers.3.mlp.up[0:s3]`."""

    block: str
    lo: Dim | None = None
    hi: Dim | None = None


Arg = SlotRef | BlockRef


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one value on one device: `slot %9 cpu:0 f32[T,576] offset=4096`.

    offset: bytes from the start of the device's activation arena (set by `pack`).
    input: name of the graph input it holds; then it lies in the step block, not in the arena.
    alias: the slot whose memory this one shares, seen with another shape (set by `elide`).
    """

    id: int
    device: str
    type: TensorType
    offset: int | None = None
    input: str = ""
    alias: int | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [lo, hi) of a weight as one device keeps them.

    bytes: packed size. home: "resident" (loaded once) or "ring" (prefetched and evicted in each step).
    offset: bytes from the start of the device's resident or ring memory (set by `pack`).
    """

    name: str
    device: str
    lo: int
    hi: int
    bytes: int
    home: str = "ring"
    offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Bring a weight block into the device's ring memory.

    Reads `block` from host memory or disk; afterwards it is there, and the block table
    of a device that the host sees holds its address. Every use of a block whose home is
    "ring" stands between its prefetch and its evict.

    block: name of the block (declared for this device).
    plane: name of the precision plane to load; "" loads the whole block.
    bytes: what travels.
    """

    device: str
    lane: str
    waits: tuple[Wait, ...] = ()
    signals: int | None = None
    block: str
    plane: str = ""
    bytes: Dim = 0
    est: Dim = 0
    node: str = ""
    region: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Give a block's ring memory back.

    Afterwards the block must not be used until it is prefetched again; in tests
    the memory is poisoned.

    block: name of the block (declared for this device).
    """

    device: str
    lane: str
    waits: tuple[Wait, ...] = ()
    signals: int | None = None
    block: str
    est: Dim = 0
    node: str = ""
    region: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize:
    """Round activations: `src` (f32) becomes `dst`, in a smaller number format.

    scheme "i8/32": blocks of 32 along the last axis, symmetric, scale = largest
    magnitude / 127. `dst` has type u8[T, K + 4*ceildiv(K,32)]: K quantised
    bytes followed by the scales.

    scheme "bf16": nearest, half to even. `dst` has type bf16[T', K'] with T and K
    rounded up to multiples of 32; what lies beyond `src` is 0.

    src: the activations.
    dst: where the rounded values go.
    scheme: number format and block size.
    bytes: bytes read and written.
    """

    device: str
    lane: str
    waits: tuple[Wait, ...] = ()
    signals: int | None = None
    src: SlotRef
    dst: SlotRef
    scheme: str
    est: Dim = 0
    bytes: Dim = 0
    node: str = ""
    region: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Name the bias block that the next dispatch of this lane adds in its epilogue.

    Stands directly before that dispatch, whose kernel name contains "+bias".

    block: the bias vector, or the part of it for the channels that the dispatch computes.
    """

    device: str
    lane: str
    waits: tuple[Wait, ...] = ()
    signals: int | None = None
    block: BlockRef
    est: Dim = 0
    node: str = ""
    region: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Run a kernel: `dst = kernel(args)`.

    Kernel names are `op.format+epilogue`, e.g. `linear.q4m.16x32+bias`; the
    epilogue `+residual` adds the last argument. `host.<op>` runs on the
    reference implementation in host memory. `+lent` reads its weight where
    another device keeps it, the `lender` among the attributes.

    kernel: which kernel; the device's backend lists the ones it has.
    args: slots and weight blocks, in the kernel's order.
    dst: the slot (or channels of it) that is written; none for a kernel that only writes a state.
    attrs: constants of the operation.
    numerics: how it is computed, e.g. "act=i8/32 acc=f32"; kernels that share it give the same bits.
    reads: states that are read.
    writes: states that are written.
    bytes: weights and activations moved, for estimates and shares of a limit.
    flops: multiply-adds times two.
    """

    device: str
    lane: str
    waits: tuple[Wait, ...] = ()
    signals: int | None = None
    kernel: str
    args: tuple[Arg, ...]
    dst: SlotRef | None = None
    attrs: Attrs = ()
    numerics: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    est: Dim = 0
    bytes: Dim = 0
    flops: Dim = 0
    node: str = ""
    region: int | None = None

    def attr(self, key: str, default: Value = None) -> Value:
        return next((v for k, v in self.attrs if k == key), default)

    @property
    def keeper(self) -> str:
        """The device that keeps the weights it reads: its own, or the `lender` among its attributes."""
        return str(self.attr("lender") or self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Copy a slot (or a channel range) to a slot of another device.

    Runs on a lane of the source device, or in the lane "compute" of the one it goes to. The ranges of `src`
    and `dst` have the same width. In the lane "compute" it is f32, and the device's own code writes to the
    other one's memory or reads it; there it may be part of a region.

    src: what is copied.
    dst: where it goes, on device `to`.
    to: the device that gets it.
    source: the device that `src` is on, where that isn't this one.
    bytes: what travels.
    """

    device: str
    lane: str
    waits: tuple[Wait, ...] = ()
    signals: int | None = None
    src: SlotRef
    dst: SlotRef
    to: str
    source: str = ""
    bytes: Dim = 0
    est: Dim = 0
    node: str = ""
    region: int | None = None


# What the fields mean that every instruction has.
SHARED_FIELDS: Mapping[str, str] = {
    "device": "the device it runs on",
    "lane": "the lane of the device (compute, copy_in, copy_out, …); a lane runs in order",
    "waits": "ticks that must have been reached before it starts",
    "signals": "the tick that it sets when it is over; each tick has one setter",
    "est": "predicted time, in microseconds",
    "node": "name of the physical node it comes from",
    "region": "number of the region it is launched with; consecutive in the lane",
}

Instr = Prefetch | Evict | Quantize | Bias | Dispatch | Transfer
INSTRUCTIONS: tuple[type[Instr], ...] = (Prefetch, Quantize, Bias, Dispatch, Transfer, Evict)


@dataclass(frozen=True, slots=True)
class Stream:
    """Declarations and instructions of one variant.

    arenas: (device, bytes) of activation memory; rings: (device, bytes) of ring memory (set by `pack`).
    """

    name: str
    symbols: tuple[Symbol, ...]
    splits: tuple[Split, ...]
    inputs: tuple[Input, ...]
    weights: tuple[Weight, ...]
    states: tuple[State, ...]
    slots: tuple[Slot, ...]
    blocks: tuple[Block, ...]
    instrs: tuple[Instr, ...]
    outputs: tuple[Output, ...]  # value is the slot, as "%12"
    arenas: tuple[tuple[str, int], ...] = ()
    rings: tuple[tuple[str, int], ...] = ()
