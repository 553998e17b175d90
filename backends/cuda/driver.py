"""A GPU through torch and CUDA's driver: memory, kernels, launches, graphs, copies.

Kernels of all programs run on one stream of the device: blocks of some wait for each other, which kernels
on another could keep from starting. Copies run on a stream of the thread that asks for them: each lane of
copies is a thread and goes one way, so it waits neither for kernels nor for what goes the other way.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np

from flashrt.backend import LOCKED, U8, Rect
from flashrt.backends.cuda.args import Launch
from flashrt.backends.cuda.compile import cubins
from flashrt.backends.cuda.operands import Limits
from flashrt.errors import DeviceError

STREAMS: dict[int, Any] = {}  # of kernels, by torch's number of the device
SPINS = 64  # looks at an event, of a microsecond each, before the thread sleeps until it is reached


class Mark(Protocol):
    """A point in the order of kernels."""

    def set(self) -> None:
        """Puts it behind everything enqueued so far."""

    def through(self) -> bool:
        """Whether the device has reached it. Raises DeviceError when what stands before it failed."""

    def wait(self) -> None:
        """Until the device has reached it; raises as `through` does."""


class Copies(Protocol):
    """An order of copies of its own, of which several may be under way."""

    def begin(self) -> None:
        """Before the first copy of a step, while none is under way."""

    def copy(self, pairs: Sequence[tuple[Rect, Rect]], number: int) -> None:
        """Enqueues copies from the first to the second of each pair. number: of them together, for `wait`."""

    def signal(self, word: int, value: int) -> None:
        """A word of 64 bits in page-locked memory, by its address, gets a value when what was enqueued is
        through."""

    def wait(self) -> dict[int, int]:
        """Until all is through; when that was, by number, in nanoseconds of time.perf_counter_ns."""


class Driver(Protocol):
    """What the device needs of a GPU. Tests have one that runs kernels on the host."""

    limits: Limits
    polls: bool  # whether its kernels may wait for the host: no watchdog ends them
    signals: bool  # whether it has `signal` and `copier`
    apart: bool  # whether kernels run beside the thread that enqueues them

    def alloc(self, nbytes: int) -> Any:
        """Zeroed device memory as a tensor of bytes. Raises MemoryError, with the bytes that are free."""

    def pinned(self, nbytes: int) -> U8:
        """Zeroed host memory that the device can read. Raises MemoryError."""

    def lock(self, memory: U8) -> bool:
        """Keeps a whole buffer of the host's where it is until `close`, so that copies go at the link's full
        rate, where that can be and is worth it; whether kernels can read it, too."""

    def trim(self) -> None:
        """Gives back memory that is set aside but not in use."""

    def lacks(self, error: BaseException) -> bool:
        """Whether an error says that device memory is lacking."""

    def at_work(self) -> AbstractContextManager[None]:
        """What this thread enqueues meanwhile goes to the device, in order."""

    def copy(self, *pairs: tuple[Rect, Rect]) -> None:
        """Copies from the first to the second of each pair, between host and device memory, beside the
        kernels; returns when all is done."""

    def copier(self, most: int) -> Copies:
        """An order of copies with numbers below `most`."""

    def mark(self) -> Mark:
        """A mark, not yet set."""

    def prepare(self, launch: Launch) -> None:
        """Makes a kernel ready to be enqueued."""

    def launch(self, launch: Launch) -> None:
        """Enqueues a kernel."""

    def signal(self, word: int, value: int) -> None:
        """A word of 64 bits in page-locked memory, by its address, gets a value when the kernels enqueued so
        far are through."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records what `work` enqueues, to be enqueued again as one launch, by any thread."""

    def wait(self) -> None:
        """Until everything enqueued is through. Raises DeviceError when it failed."""

    def close(self) -> None:
        """Lets go of locked memory. Idempotent."""


class GpuDriver:
    """CUDA's device `index`, in torch's numbering."""

    def __init__(self, index: int) -> None:
        import torch
        from cuda.bindings import driver

        self._torch, self._cuda = torch, driver
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)  # makes the context
        found = torch.cuda.get_device_properties(self._device)
        self.limits = Limits(
            found.multi_processor_count,
            found.shared_memory_per_block_optin,
            found.shared_memory_per_multiprocessor,
            together=self._attribute(index, "MPS_ENABLED") == 0,
            groups=(found.major, found.minor) == (9, 0),
        )
        self.polls = self._attribute(index, "KERNEL_EXEC_TIMEOUT") == 0
        self._reads_locked = self._attribute(index, "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM") == 1
        self.apart = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") in ("", "0")
        self._overlaps = (found.major, found.minor) >= (9, 0)
        self._context = self._check(driver.cuCtxGetCurrent())
        own = "a" if (found.major, found.minor) == (9, 0) else ""  # with what only this architecture has
        units = [np.frombuffer(c, np.uint8) for c in cubins(f"sm_{found.major}{found.minor}{own}")]
        self._modules = [self._check(driver.cuModuleLoadData(unit.ctypes.data)) for unit in units]
        self._functions: dict[str, Any] = {}
        self._stream = STREAMS.setdefault(index, torch.cuda.Stream(self._device))  # kernels
        self._recorder = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()  # graphs take turns: they share what they need
        # torch gives up a pool that no graph has any more
        self._first = self._recorded(lambda: torch.zeros(1, device=self._device))
        word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        # old drivers, and some systems, refuse that
        refused, *_ = driver.cuStreamWriteValue64(self._stream.cuda_stream, word.data_ptr(), 1, 0)
        self.wait()
        self.signals = refused == driver.CUresult.CUDA_SUCCESS and int(word[0]) == 1
        self._own = threading.local()  # copies: a stream and an event of each thread
        self._locked: list[U8] = []

    def _attribute(self, index: int, name: str) -> int | None:
        """A device's; None where the driver or its bindings don't know it."""
        kind = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if kind is None:
            return None
        error, found = self._cuda.cuDeviceGetAttribute(kind, self._cuda.CUdevice(index))
        return int(found) if error == self._cuda.CUresult.CUDA_SUCCESS else None

    def alloc(self, nbytes: int) -> Any:
        torch = self._torch
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
            self.wait()  # copies don't wait for this stream
            return memory
        except torch.OutOfMemoryError:
            free = torch.cuda.mem_get_info(self._device)[0]
            raise MemoryError(f"{nbytes} bytes wanted, {free} free") from None

    def pinned(self, nbytes: int) -> U8:
        if nbytes < LOCKED:
            try:
                small: U8 = self._torch.zeros(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy()
            except RuntimeError as error:
                raise MemoryError(f"{nbytes} bytes of page-locked memory: {error}") from None
            return small
        self._enter()  # torch would take the next power of two
        portable = self._cuda.CU_MEMHOSTALLOC_PORTABLE
        address = self._check(self._cuda.cuMemHostAlloc(nbytes, portable))
        raw = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(raw, self._free, self._cuda, self._context, address)
        memory: U8 = np.ctypeslib.as_array(raw)
        memory[:] = 0
        return memory

    @staticmethod
    def _free(cuda: Any, context: Any, address: int) -> None:
        # whichever thread lets go of it last may be at work on another device
        cuda.cuCtxPushCurrent(context)
        cuda.cuMemFreeHost(address)
        cuda.cuCtxPopCurrent()

    def lock(self, memory: U8) -> bool:
        if memory.nbytes < LOCKED:  # it has pages in common with who knows what
            return False
        self._enter()
        start, portable = memory.ctypes.data, self._cuda.CU_MEMHOSTREGISTER_PORTABLE
        register = partial(self._cuda.cuMemHostRegister, start, memory.nbytes, portable)
        if not LOCKS.take(start, lambda: register()[0] == 0):
            return False
        self._locked.append(memory)
        return self._reads_locked

    def trim(self) -> None:
        self._torch.cuda.empty_cache()

    def lacks(self, error: BaseException) -> bool:
        known = isinstance(error, MemoryError | self._torch.OutOfMemoryError)
        return known or (isinstance(error, RuntimeError) and "out of memory" in str(error))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._enter()
        with self._torch.cuda.stream(self._stream):
            yield

    def _enter(self) -> None:
        # CUDA's runtime takes device 0 for granted in a new thread, its driver has none there
        self._check(self._cuda.cuCtxSetCurrent(self._context))

    def copy(self, *pairs: tuple[Rect, Rect]) -> None:
        self._enter()
        if not hasattr(self._own, "stream"):
            self._own.stream = self._torch.cuda.Stream(self._device, priority=-1)
            self._own.mark = self.mark(self._own.stream)
        self.enqueue(pairs, self._own.stream.cuda_stream)
        self._own.mark.set()
        self._own.mark.wait()

    def enqueue(self, pairs: Sequence[tuple[Rect, Rect]], stream: int) -> None:
        """Copies on a stream of CUDA's."""
        for src, dst in pairs:
            if src.rows == 1 or src.stride == dst.stride == src.row_bytes:
                self._check(self._flat(src, dst, src.rows * src.row_bytes, stream))
            else:
                self._check(self._cuda.cuMemcpy2DAsync(self._pitched(src, dst), stream))

    def _flat(self, src: Rect, dst: Rect, nbytes: int, stream: int) -> Any:
        here, there = _address(src), _address(dst)
        if isinstance(src.place.buffer, np.ndarray):
            return self._cuda.cuMemcpyHtoDAsync(there, here, nbytes, stream)
        if isinstance(dst.place.buffer, np.ndarray):
            return self._cuda.cuMemcpyDtoHAsync(there, here, nbytes, stream)
        return self._cuda.cuMemcpyAsync(there, here, nbytes, stream)

    def _pitched(self, src: Rect, dst: Rect) -> Any:
        """The description of a copy of rows that don't lie side by side."""
        copy, kinds = self._cuda.CUDA_MEMCPY2D(), self._cuda.CUmemorytype
        for end, rect in (("src", src), ("dst", dst)):
            on_host = isinstance(rect.place.buffer, np.ndarray)
            kind = kinds.CU_MEMORYTYPE_HOST if on_host else kinds.CU_MEMORYTYPE_UNIFIED
            setattr(copy, f"{end}MemoryType", kind)
            setattr(copy, f"{end}{'Host' if on_host else 'Device'}", _address(rect))
            setattr(copy, f"{end}Pitch", rect.stride)
        copy.WidthInBytes, copy.Height = src.row_bytes, src.rows
        return copy

    def copier(self, most: int) -> Copies:
        self._enter()
        return _Copies(self, most)

    def mark(self, stream: Any = None) -> Mark:
        self._enter()
        return _Event(self, (stream or self._stream).cuda_stream)

    def prepare(self, launch: Launch) -> None:
        self._function(launch.kernel, launch.shared)

    def launch(self, launch: Launch) -> None:
        cuda = self._cuda
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
        config.sharedMemBytes = launch.shared
        config.hStream = self._torch.cuda.current_stream(self._device).cuda_stream
        if self._overlaps:
            config.attrs, config.numAttrs = [self._overlap()], 1
        fields = ctypes.create_string_buffer(launch.args, len(launch.args))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(fields))
        function = self._function(launch.kernel, launch.shared)
        self._check(cuda.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))

    def _overlap(self) -> Any:
        """The attribute with which a kernel may start before the one in front of it is through."""
        attribute = self._cuda.CUlaunchAttribute()
        attribute.id = self._cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        return attribute

    def _function(self, name: str, shared: int) -> Any:
        if name not in self._functions:
            found = (self._cuda.cuModuleGetFunction(m, name.encode()) for m in self._modules)
            missing = self._cuda.CUresult.CUDA_ERROR_NOT_FOUND
            function = self._check(next((f for f in found if f[0] != missing), (missing,)))
            most = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            if shared or name.startswith(("linear_", "attention_")):
                static = self._check(
                    self._cuda.cuFuncGetAttribute(
                        self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function
                    )
                )
                self._check(self._cuda.cuFuncSetAttribute(function, most, self.limits.shared - static))
            self._functions[name] = function
        return self._functions[name]

    def signal(self, word: int, value: int, stream: int | None = None) -> None:
        own = self._stream.cuda_stream if stream is None else stream
        self._check(self._cuda.cuStreamWriteValue64(own, word, value, 0))

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return partial(self._replay, self._recorded(work))

    def _replay(self, graph: Any) -> None:
        self._enter()
        self._check(self._cuda.cuGraphLaunch(graph.raw_cuda_graph_exec(), self._stream.cuda_stream))

    def _recorded(self, work: Callable[[], object]) -> Any:
        graph = self._torch.cuda.CUDAGraph()
        capture = self._torch.cuda.graph(
            graph, pool=self._pool, stream=self._recorder, capture_error_mode="thread_local"
        )
        with capture:
            work()
        return graph

    def wait(self) -> None:
        self._enter()
        self._check(self._cuda.cuStreamSynchronize(self._stream.cuda_stream))

    def close(self) -> None:
        locked, self._locked = self._locked, []
        if locked:
            self._enter()
        for memory in locked:
            LOCKS.give_back(memory.ctypes.data, self._cuda.cuMemHostUnregister)

    def _check(self, answer: Sequence[Any]) -> Any:
        """The result of a driver call. Raises MemoryError, or DeviceError with CUDA's name of the error."""
        error, *result = answer
        if error == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(f"{self._device}: {error.name}")
        if error != self._cuda.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{self._device}: {error.name}")
        return result[0] if result else None


class _Copies:
    """A stream of copies, and an event behind each."""

    def __init__(self, driver: GpuDriver, most: int) -> None:
        self._driver = driver
        self._stream = driver._torch.cuda.Stream(driver._device, priority=-1)
        self._first, *self._behind = (
            _Event(driver, self._stream.cuda_stream, timed=True) for _ in range(most + 1)
        )
        self._end = _Event(driver, self._stream.cuda_stream)
        self._enqueued: list[int] = []
        self._begun = 0

    def begin(self) -> None:
        self._driver._enter()
        self._enqueued.clear()

    def copy(self, pairs: Sequence[tuple[Rect, Rect]], number: int) -> None:
        if not self._enqueued:
            self._begun = time.perf_counter_ns()
            self._first.set()
        self._driver.enqueue(pairs, self._stream.cuda_stream)
        self._behind[number].set()
        self._enqueued.append(number)

    def signal(self, word: int, value: int) -> None:
        self._driver.signal(word, value, self._stream.cuda_stream)

    def wait(self) -> dict[int, int]:
        self._driver._enter()
        self._end.set()
        self._end.wait()
        return {at: self._begun + self._first.until(self._behind[at]) for at in self._enqueued}


class _Event:
    """A mark in a stream: an event of CUDA's. timed: whether `until` can be asked."""

    def __init__(self, driver: GpuDriver, stream: int, *, timed: bool = False) -> None:
        self._driver, self._cuda, self._stream = driver, driver._cuda, stream
        flags = self._cuda.CUevent_flags
        # a thread that waits long sleeps: the cores are the CPU's
        kind = flags.CU_EVENT_BLOCKING_SYNC | (0 if timed else flags.CU_EVENT_DISABLE_TIMING)
        self._event = driver._check(self._cuda.cuEventCreate(kind))
        weakref.finalize(self, self._cuda.cuEventDestroy, self._event)

    def set(self) -> None:
        self._driver._check(self._cuda.cuEventRecord(self._event, self._stream))

    def through(self) -> bool:
        self._driver._enter()  # another thread may have set it
        answer = self._cuda.cuEventQuery(self._event)
        if answer[0] == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._driver._check(answer)
        return True

    def wait(self) -> None:
        for _ in range(SPINS):
            if self.through():
                return
        self._driver._check(self._cuda.cuEventSynchronize(self._event))

    def until(self, later: _Event) -> int:
        """Nanoseconds between two that were reached."""
        milliseconds = self._driver._check(self._cuda.cuEventElapsedTime(self._event, later._event))
        return int(milliseconds * 1e6)


class _Locks:
    """Host memory that is page-locked, by its first address, and how many programs want it so."""

    def __init__(self) -> None:
        self._count: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self, start: int, lock: Callable[[], bool]) -> bool:
        """Whether it is locked: by `lock` if nobody has done that before."""
        with self._lock:
            if start not in self._count and not lock():
                return False
            self._count[start] = self._count.get(start, 0) + 1
            return True

    def give_back(self, start: int, unlock: Callable[[int], Any]) -> None:
        """Unlocks it when nobody else wants it."""
        with self._lock:
            self._count[start] -= 1
            if not self._count[start]:
                del self._count[start]
                unlock(start)


LOCKS = _Locks()


def _address(rect: Rect) -> int:
    """Where a rectangle begins."""
    buffer = rect.place.buffer
    start = buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data_ptr()
    return int(start) + rect.place.offset + rect.offset
