"""CUDA kernels on the host: `emulated.h` runs their threads as fibers, `EmulatedDriver` is the GPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from flashrt.backend import U8, Rect
from flashrt.backends.cuda.args import Carry, Launch
from flashrt.backends.cuda.compile import source
from flashrt.backends.cuda.operands import Limits

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent
RUNNING = threading.Lock()  # kernels of all devices run one at a time


def _entries(text: str) -> list[tuple[str, str]]:
    """(kernel, struct of its arguments)."""
    plain = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\((\w+) \w\)', text)
    linear = [(n, "ChainArgs") for n in re.findall(r"^LINEAR\((\w+), \d", text, re.M)]
    linear += [(n, "GemmArgs") for n in re.findall(r"^GEMM\((\w+), \d", text, re.M)]
    sizes = re.findall(r"ATTENTION\((\d), (\d)\)", text)
    heads = [(f"attention{few}_{g}_{p}", "AttentionArgs") for g, p in sizes for few in ("", "_few")]
    return [(n, s) for n, s in plain if n not in ("name", "attention_", "attention_few_")] + linear + heads


@cache
def library() -> ctypes.CDLL:
    """The kernels compiled for the host; kept in the temporary folder under a key of their text."""
    text = source()
    calls = [
        f'extern "C" void call_{n}(void* p) {{ {n}(*({s}*)p); }}' for n, s in _entries(text) if "#" not in n
    ]
    whole = "\n".join(['#include "emulated.h"', text, *calls])
    digest = hashlib.sha256((whole + (HERE / "emulated.h").read_text()).encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"flashrt-emulated-{digest}.so"
    if not built.is_file():
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "kernels.cpp"
            place.write_text(whole)
            made = Path(folder) / "kernels.so"
            flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-w", f"-I{HERE}"]
            subprocess.run([str(COMPILER), *flags, "-o", str(made), str(place)], check=True)
            unfinished = built.with_suffix(f".{os.getpid()}")
            shutil.copy(made, unfinished)
            unfinished.replace(built)
    return ctypes.CDLL(str(built))


class Reached:
    """A mark of a device that is through at once."""

    def set(self) -> None:
        pass

    def through(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Enqueued:
    """Copies in order, each a while after it was enqueued: at once where that is no time."""

    def __init__(self, driver: EmulatedDriver, lag: float = 0.0) -> None:
        self._driver, self._lag, self._through = driver, lag, dict[int, int]()
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def begin(self) -> None:
        self._through.clear()
        if self._lag:
            self._thread = threading.Thread(target=self._serve)
            self._thread.start()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            time.sleep(self._lag)
            work()

    def _do(self, work: Callable[[], object]) -> None:
        self._queue.put(work) if self._lag else work()

    def copy(self, pairs: Sequence[tuple[Rect, Rect]], number: int) -> None:
        def made() -> None:
            self._driver.copy(*pairs)
            self._through[number] = time.perf_counter_ns()

        self._do(made)

    def signal(self, word: int, value: int) -> None:
        self._do(lambda: EmulatedDriver.signal(self._driver, word, value))

    def wait(self) -> dict[int, int]:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        return dict(self._through)


class EmulatedDriver:
    """`flashrt.backends.cuda.driver.Driver` without a GPU.

    most: bytes that it has. launches: kernels run so far. used: bytes in use, and the most so far: peak;
    locked: of the host's memory.
    copies: bytes from the host, to the host, and within the device. recorded: graphs made.
    """

    def __init__(self, index: int = 0, most: int = 1 << 40) -> None:
        self.limits = Limits(processors=4, shared=227 << 10, shared_all=228 << 10)
        self.polls = self.signals = True
        self.apart = False
        self.launches: list[str] = []
        self.most, self.used, self.recorded = most, 0, 0
        self.peak = 0
        self.locked: list[U8] = []
        self.copies: dict[str, list[int]] = {"up": [], "down": [], "across": []}

    def alloc(self, nbytes: int) -> Any:
        if self.used + nbytes > self.most:
            raise MemoryError(f"{nbytes} bytes wanted, {self.most - self.used} free")
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        weakref.finalize(memory.untyped_storage(), self._freed, nbytes)
        return memory

    def _freed(self, nbytes: int) -> None:
        self.used -= nbytes

    def pinned(self, nbytes: int) -> U8:
        memory: U8 = torch.zeros(nbytes, dtype=torch.uint8).numpy()
        return memory

    def lock(self, memory: U8) -> bool:
        self.locked.append(memory)
        return True

    def trim(self) -> None:
        pass

    def lacks(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, *pairs: tuple[Rect, Rect]) -> None:
        for src, dst in pairs:
            up, down = (isinstance(rect.place.buffer, np.ndarray) for rect in (src, dst))
            self.copies["up" if up else "down" if down else "across"].append(src.rows * src.row_bytes)
            _bytes(dst).copy_(_bytes(src))

    def copier(self, most: int) -> Enqueued:
        return Enqueued(self)

    def mark(self) -> Reached:
        return Reached()

    def prepare(self, launch: Launch) -> None:
        pass

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch.kernel)
        call = getattr(library(), f"call_{launch.kernel}")
        assert launch.shared <= self.limits.shared, launch
        x, y, z = launch.grid
        came = time.monotonic_ns()
        if launch.kernel == "carry":
            _until(launch.fields)  # not in the kernel, beside which no other one runs
        args = ctypes.create_string_buffer(launch.args, len(launch.args))
        sizes = (x, y, z, launch.threads, launch.shared, int(_together(launch)))
        with RUNNING:
            assert library().emulate(call, args, *sizes), f"{launch} took more"
        if launch.kernel == "carry" and (carry := _carry(launch.fields)).tick_0:
            ctypes.c_int64.from_address(carry.stamps).value = came

    def signal(self, word: int, value: int) -> None:
        ctypes.c_int64.from_address(word).value = value

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        return work

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self.locked.clear()


def _together(launch: Launch) -> bool:
    """Whether blocks wait for each other."""
    several = re.match(r"linear_[a-z0-9]+_[124]$", launch.kernel) is not None
    return several and launch.fields[0] > 1


def _carry(fields: tuple[Any, ...]) -> Carry:
    return Carry(*fields)


def _until(fields: tuple[Any, ...]) -> None:
    """Waits until the ticks are reached that a `carry` waits for, or the step is given up."""
    carry = _carry(fields)
    epoch = _word(carry.epoch)
    for tick, step in zip(carry[0:4], carry[4:8], strict=True):
        while tick and _word(tick) < epoch + step and not _word(carry.abort):
            time.sleep(0)


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


class LateMark:
    """A mark in the order of kernels that run late."""

    def __init__(self, queue: SimpleQueue[Callable[[], object] | None]) -> None:
        self._queue, self._reached = queue, threading.Event()

    def set(self) -> None:
        self._reached = threading.Event()
        self._queue.put(self._reached.set)

    def through(self) -> bool:
        return self._reached.is_set()

    def wait(self) -> None:
        self._reached.wait()


class LateDriver(EmulatedDriver):
    """Kernels run in order on a thread of their own, each a while after it was enqueued, and recordings as a
    whole; copies run at once, and so does what a library does outside of recordings. late: all runs at once
    after it was set to False, while nothing is under way."""

    def __init__(self, lag: float = 1e-4) -> None:
        super().__init__()
        self._lag, self.late, self.apart = lag, True, True
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            time.sleep(self._lag)
            work()

    def launch(self, launch: Launch) -> None:
        if not self.late or threading.current_thread() is self._thread:
            super().launch(launch)
        else:
            self._queue.put(lambda: super(LateDriver, self).launch(launch))

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        super().record(work)
        return lambda: self._queue.put(work) if self.late else work()

    def signal(self, word: int, value: int) -> None:
        self._queue.put(lambda: super(LateDriver, self).signal(word, value))

    def copier(self, most: int) -> Enqueued:
        return Enqueued(self, self._lag)

    def mark(self) -> LateMark:  # type: ignore[override]
        return LateMark(self._queue)

    def wait(self) -> None:
        mark = self.mark()
        mark.set()
        mark.wait()

    def close(self) -> None:
        super().close()
        self._queue.put(None)
        self._thread.join()


def _bytes(rect: Rect) -> Any:
    """A rectangle as a tensor [rows, row_bytes]: a view."""
    buffer, start = rect.place.buffer, rect.place.offset + rect.offset
    flat = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
    last = max(0, rect.rows - 1) * rect.stride + rect.row_bytes
    return flat[start : start + last].as_strided((rect.rows, rect.row_bytes), (rect.stride, 1))
