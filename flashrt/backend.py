"""The contract between the runtime and a backend.

A backend opens a device; the runtime gives it memory to lay out, code to load
(consecutive compute instructions of one lane) and an epoch to run it for. What
changes between steps is data in `Memory`, never code: the words (symbols and
split variables), the inputs, the block table.

Ticks: `memory.ticks[n]` is a 64-bit word holding the number of the last step
(epoch, from 1) in which tick n was signalled. A wait `!n` of step e is over
when the word is at least e; `!n@-1` when it is at least e-1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flashrt.errors import DeviceError
from flashrt.ir import micro
from flashrt.ir.ops import ATTENTION_BF16, LINEAR_BF16
from flashrt.ir.types import Weight
from flashrt.machine import Device, Workspace

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Buffer = Any  # a device's own memory object; host devices use 64-byte aligned numpy u8 arrays
Compute = micro.Dispatch | micro.Quantize | micro.Bias

ABORT = 0  # index in `words`: not 0 asks every spinning wait to give up
ALERT = 100e-6  # seconds in which a thread of Python looks at a tick as often as it can
NAPS = (20e-6, 1e-3)  # seconds between two looks afterwards: a 32nd of what it has waited, within these


class Pause:
    """What a thread of Python does between two looks at a tick: it lets go of Python's lock, and sleeps when
    it takes long. One object a wait."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def __call__(self) -> None:
        waited = time.perf_counter() - self._begun
        time.sleep(0.0 if waited < ALERT else min(max(NAPS[0], waited / 32), NAPS[1]))


def until_reached(
    memory: Memory, wait: micro.Wait, epoch: int, told: str, look: Callable[[], object] = lambda: None
) -> None:
    """A thread of Python waits for a tick. look: called meanwhile. Raises DeviceError, with what is told,
    when the step is given up."""
    pause = Pause()
    while memory.ticks[wait.tick] < epoch + wait.step:
        if memory.words[ABORT]:
            raise DeviceError(told)
        look()
        pause()


@dataclass(frozen=True, slots=True)
class Place:
    """`bytes` bytes at `offset` of a buffer."""

    buffer: Buffer
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Rect:
    """Rows of a place: `rows` pieces of `row_bytes`, `stride` bytes apart, from `offset` bytes into it."""

    place: Place
    offset: int
    rows: int
    row_bytes: int
    stride: int


@dataclass(frozen=True, slots=True)
class Move:
    """What a lane of copies does next: it waits, brings pieces side by side to a place (none for what is
    given back), and signals when they are there."""

    waits: tuple[micro.Wait, ...]
    signals: int | None
    pieces: tuple[Place, ...] = ()
    to: Place | None = None


class Memory(Protocol):
    """Where everything of one stream lies. Addresses are fixed while code is loaded; contents change.

    words: words[ABORT], then one word a symbol and split (`word_of`).
    ticks: one epoch word a tick, index = tick number.
    table: the block table: address of each block, 0 while it isn't loaded (`block_of`).
    """

    stream: micro.Stream
    words: I64
    ticks: I64
    table: I64

    def word_of(self, symbol: str) -> int:
        """Index of a symbol or split variable in `words`."""

    def slot(self, slot: int) -> Place:
        """Where a slot lies, sized for the largest symbols. Aliases and inputs are resolved."""

    def block_of(self, block: str, device: str) -> int:
        """Index of a device's block in `table`."""

    def block(self, block: str, device: str) -> Place | None:
        """Where the block lies now; None while it isn't loaded. For devices without addresses, and not for
        blocks that a lane of `Mover` brings."""

    def ring(self, block: str, device: str) -> Place:
        """Where a block that comes and goes lies whenever it is loaded."""

    def state(self, state: str, device: str) -> Place:
        """Where a state lies on a device."""


ROOM = 64 << 20  # bytes of a GPU that kernels use in turns: bf16 weights, keys side by side, sums, columns
LOCKED = 16 << 20  # bytes from which host memory has pages of its own: they can be huge, and locked
TRANSIENT = 128 << 20  # bytes beyond which a GPU's code takes the rows of a step bit by bit

# What compiled code of a kind of device may set aside, by operation, or by operation and numerics: backends
# keep to it, plans count it. "": for each node, what makes a row of it; and what a device has in any case.
WORKSPACE: Mapping[str, Mapping[str, Workspace]] = {
    "cpu": {
        "": Workspace(team=1 << 10),
        "linear": Workspace(core=152 << 10, channel=44),  # weights and tokens as tiles; activations in INT8
        "expert_linear": Workspace(core=256 << 10, channel=172),  # tokens and results of an expert
        "route": Workspace(core=12 << 10),
        "attention": Workspace(team=1088 << 10, core=48 << 10, channel=576),  # sums of ranges of keys; tiles
        "attention+latent": Workspace(team=(16 << 20) + (64 << 10), core=48 << 10, channel=576),
        "sample": Workspace(core=17 << 10, channel=8),  # values, their order, and buckets
    },
    "gpu": {
        "": Workspace(device=ROOM + (4 << 20)),  # and counters, sizes, and what an allocator rounds up
        f"linear {LINEAR_BF16}": Workspace(device=2 * (32 << 20)),  # cuBLAS's own, launched and recorded
        f"attention {ATTENTION_BF16}": Workspace(transient=8),  # queries and results in bf16, and a copy
        "sample": Workspace(element=4, transient=80),  # penalised logits; their order, and sums in float64
    },
}


class OpenDevice(Protocol):
    """A device in use. Methods raise DeviceError when the device fails."""

    spec: Device

    def reserve(self, nbytes: int) -> Buffer:
        """Memory of the device, 64-byte aligned; freed when the buffer is dropped."""

    def load(self, instrs: Sequence[Compute], memory: Memory) -> Any:
        """Prepares consecutive compute instructions of one lane; gives what `run` takes.

        What it keeps for itself counts as the device's: its arrays, or `held` bytes where it has that.
        """

    def run(self, code: Any, epoch: int) -> None:
        """Runs loaded code for one step: waits, computes, signals. Returns when it is done.

        Raises DeviceError when words[ABORT] becomes non-zero while it waits.
        """

    def stamps(self, code: Any) -> I64:
        """[instructions, 3]: arrived, started (waits over), ended, of the last run, in
        nanoseconds of time.perf_counter_ns."""

    def copy(self, src: Rect, dst: Rect) -> None:
        """Copies between this device's memory and another place it can reach. Same rows and row_bytes."""

    def write(self, data: U8, dst: Place) -> None:
        """Host bytes into device memory."""

    def close(self) -> None:
        """Ends threads and drops memory. Idempotent."""


@runtime_checkable
class Remote(Protocol):
    """What an open device has besides when the host can't see its memory."""

    @property
    def held(self) -> int:
        """Bytes of its memory that loaded code shares, beside what each code holds. For any thread."""

    def pinned(self, nbytes: int) -> U8:
        """Zeroed host memory that the device reads by itself: where the inputs of its steps lie, and what
        host devices hand over. Raises MemoryError."""

    def lock(self, memory: U8) -> bool:
        """Keeps a whole buffer of a host device where it is while this device is open: it is copied from
        again and again. Whether the device can read it by itself, too."""

    def read(self, src: Place, out: U8) -> None:
        """The first bytes of a place, as many as `out` has room for."""

    def gather(self, pieces: Sequence[Place], dst: Place) -> None:
        """Copies pieces, of its own memory or of the host's, side by side into its own."""


@runtime_checkable
class Mover(Protocol):
    """What a remote device has besides when several of its copies can be under way."""

    def moves(self, moves: Sequence[Move], memory: Memory) -> Any | None:
        """A lane of copies as what `run` takes; None where the device can't tell by itself when one is over.

        Blocks that come so aren't entered in the block table: they are where `Memory.ring` says.
        """


@runtime_checkable
class Ahead(Protocol):
    """What loaded code is besides, where it is all of its stream and its device can be given a step while the
    one before it runs. Methods raise DeviceError as `run` does; then nothing is under way."""

    def begin(self, epoch: int, fed: Mapping[int, int]) -> None:
        """Has a step run, behind the one before it; earlier ones are finished, and `until_read` was called.

        fed: slot of an input → slot in `results`: what the step before leaves there is taken, and not what
        the host wrote.
        """

    def until_read(self) -> None:
        """Until what the host wrote for the steps that were begun is read: words and inputs may change."""

    def finish(self, epoch: int) -> None:
        """Until a step is through, and those before it."""

    def results(self, epoch: int) -> Mapping[int, U8]:
        """Outputs of a finished step, by slot, for the host to read until the second step after it begins."""

    def drop(self) -> None:
        """Until nothing is under way, whatever comes of it."""


@runtime_checkable
class Starts(Protocol):
    """What loaded code is besides, where its device may run a step without the thread that started it.
    Methods raise DeviceError as `run` does; then nothing is under way."""

    def start(self, epoch: int) -> bool:
        """Has a step run, if all of it can be enqueued now; whether that is so."""

    def look(self) -> None:
        """Raises DeviceError when a step that was started has failed; for another thread than its own."""

    def end(self, epoch: int) -> None:
        """Until a step that was started is through."""

    def drop(self) -> None:
        """Until nothing is under way, whatever comes of it."""


class Backend(Protocol):
    """One kind of device."""

    kind: str

    def kernels(self) -> tuple[tuple[str, str], ...]:
        """(kernel, numerics) pairs it can run here, epilogues included. Opens nothing."""

    def open(self, spec: Device) -> OpenDevice:
        """Opens a device."""


class BlockSource(Protocol):
    """Where weight bytes come from. Several threads may read."""

    def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
        """Fills `out` with rows [lo, hi) of the weight in its layout.

        Raises ModelError naming the tensor when bytes are missing or corrupt.
        """
