"""The CPU as a device: memory is numpy bytes, code is a table that the team walks."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from flashrt.backend import I64, LOCKED, U8, Compute, Memory, Place, Rect
from flashrt.backends.cpu import table
from flashrt.backends.cpu.cache import Progress, function_of, library
from flashrt.backends.cpu.encode import aligned
from flashrt.backends.cpu.kernels import offered
from flashrt.backends.cpu.table import Code
from flashrt.backends.cpu.team import Team
from flashrt.errors import DeviceError
from flashrt.machine import Device

ABORTED = 1  # the walk's answer when it saw the abort word


HUGE_PAGE = 2 << 20


def huge(nbytes: int) -> U8:
    """Zeroed memory in huge pages: weights are read from end to end in every step, and with pages of
    4 kB the processor's address translation, not its memory, sets the pace."""
    # private: shared memory, which is mmap's default, has no huge pages
    pages = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + nbytes]


class CpuDevice:
    """An open CPU.

    progress(function, done, of) is called for each function that `load` makes ready: compiled when
    no process has done so before (about a second each), read from disk otherwise (a millisecond).
    """

    def __init__(self, spec: Device, threads: int, progress: Progress | None = None) -> None:
        self.spec, self.threads, self.progress = spec, threads, progress
        self._team = Team(threads, library(), spec.cpus)

    def reserve(self, nbytes: int) -> U8:
        """Zeroed host memory, 64-byte aligned; large pieces in huge pages where the system has them."""
        return aligned(nbytes) if nbytes < LOCKED else huge(nbytes)

    def load(self, instrs: Sequence[Compute], memory: Memory) -> Code:
        """Encodes the instructions; compiles kernels that no process has compiled before."""
        return table.build(
            instrs,
            memory,
            self.spec.id,
            self.threads,
            lambda names: library().addresses(names, self.progress),
        )

    def run(self, code: Code, epoch: int) -> None:
        """One step. Raises DeviceError when it is interrupted."""
        if not len(code.table):
            return
        code.refresh()
        status = self._team.run(code.words.ctypes.data, epoch)
        if status == ABORTED:
            code.recover()
            raise DeviceError(f"{self.spec.id}: interrupted in step {epoch}")
        assert status == 0, f"a kernel failed with status {status}"

    def stamps(self, code: Code) -> I64:
        """[instructions, 3] in nanoseconds of time.perf_counter_ns."""
        return code.stamped()

    def copy(self, src: Rect, dst: Rect) -> None:
        """Copies rows between places of host memory."""
        assert (src.rows, src.row_bytes) == (dst.rows, dst.row_bytes), (src, dst)
        _view(dst)[...] = _view(src)

    def write(self, data: U8, dst: Place) -> None:
        """Host bytes into a place."""
        dst.buffer[dst.offset : dst.offset + dst.bytes] = data

    def close(self) -> None:
        """Ends the team. Idempotent."""
        self._team.close()


def _view(rect: Rect) -> NDArray[np.uint8]:
    """The bytes of a rectangle, in place."""
    place = rect.place
    if not isinstance(place.buffer, np.ndarray):
        raise DeviceError("the CPU can't reach memory that isn't the host's")
    flat = place.buffer[place.offset + rect.offset :]
    last = (rect.rows - 1) * rect.stride + rect.row_bytes
    assert rect.rows == 0 or last <= len(flat), rect
    return as_strided(flat, (rect.rows, rect.row_bytes), (rect.stride, 1))


class CpuBackend:
    """Opens the host's processor."""

    kind = "cpu"

    def kernels(self) -> tuple[tuple[str, str], ...]:
        """(kernel, numerics) pairs this processor can run."""
        return tuple(pair for pair in offered() if function_of(*pair))

    def open(self, spec: Device) -> CpuDevice:
        """A device with one thread for each core of `spec` that is allowed to us."""
        return CpuDevice(spec, max(1, min(spec.cores, len(os.sched_getaffinity(0)))))
