"""A module like `pynvml` with as many GPUs as a test likes, each of which can lack any answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class FakeNvml:
    """gpus: function name → answer, or the exception to raise, beyond the usual answers."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    def __init__(self, *gpus: dict[str, Any], starts: Exception | None = None) -> None:
        self.gpus = [{**USUAL, **gpu} for gpu in gpus]
        self.starts = starts
        self.opened = self.calls = 0

    def nvmlInit(self) -> None:
        if self.starts is not None:
            raise self.starts
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return answer(self.gpus[index].get("handle", self.gpus[index]))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvmlDeviceGet") or name == "nvmlDeviceGetAbsent":
            raise AttributeError(name)

        def ask(handle: dict[str, Any], *_: object) -> Any:
            self.calls += 1
            if name not in handle:
                raise self.NVMLError("Not Supported")
            return answer(handle[name])

        return ask


def answer(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


USUAL: dict[str, Any] = {
    "nvmlDeviceGetName": "Fake 100",
    "nvmlDeviceGetUUID": b"GPU-1",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * 10**9, used=10**9, free=79 * 10**9),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=40, memory=10),
    "nvmlDeviceGetClockInfo": 1500,
    "nvmlDeviceGetMaxClockInfo": 2000,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x44,
    "nvmlDeviceGetTemperature": 50,
    "nvmlDeviceGetPowerUsage": 250_500,
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetPcieThroughput": 3000,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=None)],
    "nvmlDeviceGetMemoryBusWidth": 5120,
    "nvmlDeviceGetNumGpuCores": 10_000,
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
}
