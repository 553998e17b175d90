"""A GPU through torch and CUDA's driver: memory, kernels, launches, graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from flashrt.backend import U8
from flashrt.backends.cuda.args import Launch
from flashrt.backends.cuda.compile import cubin
from flashrt.backends.cuda.operands import Limits
from flashrt.errors import DeviceError


class Driver(Protocol):
    """What the device needs of a GPU. Tests have one that runs kernels on the host."""

    limits: Limits

    def alloc(self, nbytes: int) -> Any:
        """Zeroed device memory as a tensor of bytes. Raises MemoryError."""

    def pinned(self, nbytes: int) -> U8:
        """Zeroed host memory that the device can read."""

    def begin(self) -> None:
        """Makes the device that of this thread. Before anything is enqueued by another thread than before."""

    def launch(self, launch: Launch) -> None:
        """Enqueues a kernel."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records what `work` enqueues, to be enqueued again as one launch."""

    def wait(self) -> None:
        """Until everything enqueued is through. Raises DeviceError when it failed."""


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
        )
        self._overlaps = (found.major, found.minor) >= (9, 0)
        self._context = self._check(driver.cuCtxGetCurrent())
        code = np.frombuffer(cubin(f"sm_{found.major}{found.minor}"), np.uint8)
        self._module = self._check(driver.cuModuleLoadData(code.ctypes.data))
        self._functions: dict[str, Any] = {}
        self._stream = torch.cuda.Stream(self._device)

    def alloc(self, nbytes: int) -> Any:
        try:
            with self._torch.cuda.device(self._device):
                return self._torch.zeros(nbytes, dtype=self._torch.uint8, device=self._device)
        except self._torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

    def pinned(self, nbytes: int) -> U8:
        memory: U8 = self._torch.zeros(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy()
        return memory

    def begin(self) -> None:
        # CUDA's runtime takes device 0 for granted in a new thread, its driver has none there
        self._check(self._cuda.cuCtxSetCurrent(self._context))

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
            function = self._check(self._cuda.cuModuleGetFunction(self._module, name.encode()))
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

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def wait(self) -> None:
        try:
            self._torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            raise DeviceError(f"{self._device}: {error}") from None

    def _check(self, answer: Sequence[Any]) -> Any:
        """The result of a driver call. Raises DeviceError with CUDA's name of the error."""
        error, *result = answer
        if error != self._cuda.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{self._device}: {error.name}")
        return result[0] if result else None
