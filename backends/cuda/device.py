"""The device: memory by torch, regions as CUDA graphs, one for each bucket of the symbols.

What crosses between host and device goes by copies of their own, beside the kernels, at the link's full rate
where the host's memory is page-locked: inputs, the activations of host devices that share a plan with this
one (`pinned`), and the weights that they keep and lend (`lock`). Other weights work as well, more slowly:
CUDA's driver carries them over through some of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from flashrt.backend import I64, U8, Compute, Memory, Move, Place, Rect
from flashrt.backends.cuda.code import Code
from flashrt.backends.cuda.driver import Driver, GpuDriver
from flashrt.backends.cuda.kernels import KIND, offered
from flashrt.backends.cuda.moves import Moves, line, side_by_side
from flashrt.backends.cuda.operands import Scratch
from flashrt.errors import DeviceError, PlanError
from flashrt.machine import Device

NEEDED = ("torch", "cuda.bindings")


class CudaDevice:
    """A GPU in use. Its memory isn't the host's: what the host writes and reads goes through `pinned` and
    `read`."""

    def __init__(self, spec: Device, driver: Driver) -> None:
        self.spec, self.driver = spec, driver
        self._scratch = Scratch(driver.alloc)

    @property
    def held(self) -> int:
        """Bytes of device memory that its code shares."""
        return sum(map(len, self._scratch.all()))

    def reserve(self, nbytes: int) -> Any:
        """Zeroed device memory, a tensor of bytes."""
        return self.driver.alloc(nbytes)

    def pinned(self, nbytes: int) -> U8:
        """Zeroed host memory that the device reads by itself: where the inputs of its steps lie."""
        return self.driver.pinned(nbytes)

    def load(self, instrs: Sequence[Compute], memory: Memory) -> Code:
        """Prepares instructions; launches are made when a bucket first runs.

        Raises PlanError for a kernel that isn't there, LawError for a bias without its dispatch.
        """
        return Code(instrs, memory, self.spec.id, self.driver, self._scratch)

    def run(self, code: Code | Moves, epoch: int) -> None:
        """Waits, computes, signals; returns when the device is through."""
        code.run(epoch)

    def stamps(self, code: Code | Moves) -> I64:
        """[instructions, 3] of the last run: a region's time stands at its first instruction."""
        return code.stamps

    def copy(self, src: Rect, dst: Rect) -> None:
        """Copies rows between this device, the host and other GPUs, beside what the device computes."""
        assert (src.rows, src.row_bytes) == (dst.rows, dst.row_bytes), (src, dst)
        self.driver.copy((src, dst))

    def write(self, data: U8, dst: Place) -> None:
        """Host bytes into device memory."""
        self.driver.copy((line(Place(data, 0, len(data))), line(dst, len(data))))

    def read(self, src: Place, out: U8) -> None:
        """The first bytes of a place, as many as `out` has room for."""
        self.driver.copy((line(src, len(out)), line(Place(out, 0, len(out)))))

    def gather(self, pieces: Sequence[Place], dst: Place) -> None:
        """Pieces side by side into device memory."""
        self.driver.copy(*side_by_side(pieces, dst))

    def moves(self, moves: Sequence[Move], memory: Memory) -> Moves | None:
        """A lane of copies as what `run` takes."""
        if not self.driver.signals:
            return None
        return Moves(moves, memory, self.spec.id, self.driver)

    def lock(self, memory: U8) -> bool:
        """Keeps host memory where it is while this device is open, for copies at the link's full rate;
        whether kernels can read it, too."""
        return self.driver.lock(memory)

    def close(self) -> None:
        """Lets go of locked memory; the device's own goes with its last buffer, graphs with their code."""
        self._scratch.clear()
        self.driver.close()


class CudaBackend:
    """Kind "gpu": NVIDIA's, `gpu:N` as the driver numbers them.

    driver: makes the driver of a device; None takes CUDA's.
    """

    kind = KIND

    def __init__(self, driver: Callable[[int], Driver] | None = None) -> None:
        self._driver = driver or GpuDriver

    def kernels(self) -> tuple[tuple[str, str], ...]:
        """(kernel, numerics) pairs it can run, epilogues included."""
        return offered()

    def open(self, spec: Device) -> CudaDevice:
        """Opens a device; compiles the kernels unless they are in the cache.

        Raises PlanError, with the reason, where CUDA can't be used.
        """
        number = spec.id.partition(":")[2]
        if self._driver is GpuDriver and (reason := missing()):
            raise PlanError(f"{spec.id} can't be used: {reason}", hint="pip install 'flashrt[cuda]'")
        try:
            return CudaDevice(spec, self._driver(int(number)))
        except RuntimeError as error:
            raise DeviceError(f"{spec.id} can't be opened: {error}") from None


def missing() -> str:
    """Why no GPU can be used here, "" where one can. Imports torch if it is there."""
    for name in NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"the Python package {name.replace('.', '-')} is missing"
    import torch

    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return "" if torch.cuda.is_available() else "torch sees no GPU"
