"""NVIDIA GPUs as their driver reports them, through NVML (Python package nvidia-ml-py).

Nothing here needs CUDA, and nothing fails where the library, the driver, the permission or a counter
is missing: the figure is None, and `reasons` says why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from flashrt.machine import Device, Link, Measured
from flashrt.probes import host

# NVML's bits of what holds the clocks down; "idle" isn't one a user would call throttling
THROTTLES = {
    0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip
# Bytes per second and lane by PCIe generation, after line coding (PCI Express base specifications).
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
NOT_THERE = (1 << 32) - 1  # what NVML answers for a figure that it hasn't


@dataclass(frozen=True, slots=True)
class Process:
    """One process on a GPU. memory: bytes, None when the driver doesn't tell."""

    pid: int
    memory: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment. None: not known, and `reasons[field]` says why.

    id: "gpu:N" in NVML's order (by PCI bus). memory, used, free: bytes. load, memory_load: share of the
    last sampling period in which a kernel ran, or memory was read or written, 0…1. *_mhz: clocks and
    their highest values. throttle: what holds the clocks down, () for nothing. temperature: °C; power: W.
    generation, width: of the PCIe link now and at most; an idle link is slower on purpose.
    sent, received: bytes per second over PCIe, as the GPU counts them.
    bus: bits of the memory bus; cores: FP32 lanes; capability: CUDA's "9.0".
    """

    id: str
    name: str | None = None
    uuid: str | None = None
    memory: int | None = None
    used: int | None = None
    free: int | None = None
    load: float | None = None
    memory_load: float | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    max_sm_mhz: int | None = None
    max_memory_mhz: int | None = None
    throttle: tuple[str, ...] | None = None
    temperature: int | None = None
    power: float | None = None
    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None
    sent: float | None = None
    received: float | None = None
    processes: tuple[Process, ...] | None = None
    bus: int | None = None
    cores: int | None = None
    capability: str | None = None
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def lost(self) -> str:
        """Why nothing is known of the device, "" while something is."""
        return self.reasons.get("device", "")


@dataclass(frozen=True, slots=True)
class Gpus:
    """What NVML said. reason: why there is none; "" when there is one. driver, cuda: versions."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    reason: str = ""


class Nvidia:
    """NVML, opened at the first reading and again after it failed. Not for several threads at once.

    library: a module like `pynvml`; None imports that one.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library
        self._open = False
        self._seen = 0  # the most devices there ever were: one that goes away is named, not forgotten

    def read(self, *, whole: bool = True) -> Gpus:
        """A reading now.

        whole: everything, which takes some 50 ms a GPU (PCIe traffic is counted over 20 ms each way);
        otherwise only what changes from moment to moment: memory, loads, clocks, throttling.
        """
        if reason := self._opened():
            return Gpus(self._lost(0, reason), reason=reason)
        nvml = self._library
        try:
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            self.close()  # the driver may have been replaced under us
            return Gpus(self._lost(0, str(error)), reason=f"NVML can't count devices: {error}")
        self._seen = max(self._seen, count)
        gpus = tuple(self._gpu(index, whole) for index in range(count))
        driver = _or_none(nvml, nvml.nvmlSystemGetDriverVersion) if whole else None
        cuda = _or_none(nvml, nvml.nvmlSystemGetCudaDriverVersion) if whole else None
        return Gpus(
            gpus + self._lost(count, "the driver no longer lists it"),
            driver=_text(driver),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            reason="" if count else "the driver is there, but lists no GPU",
        )

    def close(self) -> None:
        """Lets NVML go. Idempotent."""
        if self._open:
            self._open = False
            _or_none(self._library, self._library.nvmlShutdown)

    def _opened(self) -> str:
        """Why NVML can't be used, "" when it can."""
        if self._open:
            return ""
        try:
            if self._library is None:
                self._library = importlib.import_module("pynvml")
            self._library.nvmlInit()
        except ImportError as error:
            return f"the Python package nvidia-ml-py is missing ({error})"
        except OSError as error:
            return f"NVML can't be loaded: {error}"
        except self._library.NVMLError as error:
            return f"NVML doesn't start: {error}"
        self._open = True
        return ""

    def _lost(self, present: int, reason: str) -> tuple[Gpu, ...]:
        """The devices that were there before and aren't now."""
        return tuple(
            Gpu(f"gpu:{n}", reasons=MappingProxyType({"device": reason})) for n in range(present, self._seen)
        )

    def _gpu(self, index: int, whole: bool) -> Gpu:
        nvml, id = self._library, f"gpu:{index}"
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            return Gpu(id, reasons=MappingProxyType({"device": str(error)}))
        known: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        for names, ask in _questions(nvml, whole):
            try:
                known |= dict(zip(names, ask(handle), strict=True))
            except (nvml.NVMLError, AttributeError, ValueError, TypeError) as error:
                # an older library lacks the function, an older driver the counter
                reasons |= dict.fromkeys(names, str(error) or type(error).__name__)
        reasons |= {name: "the driver has no figure" for name, value in known.items() if value is None}
        return Gpu(id, **known, reasons=MappingProxyType(reasons))


_Question = tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]


def _questions(nvml: Any, whole: bool) -> tuple[_Question, ...]:
    """(fields, function of a handle that answers them)."""
    moving: tuple[_Question, ...] = (
        (("memory", "used", "free"), lambda h: _memory(nvml.nvmlDeviceGetMemoryInfo(h))),
        (("load", "memory_load"), lambda h: _loads(nvml.nvmlDeviceGetUtilizationRates(h))),
        (("sm_mhz",), lambda h: (_figure(nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM)),)),
        (("memory_mhz",), lambda h: (_figure(nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_MEM)),)),
        (("throttle",), lambda h: (_throttles(nvml, h),)),
    )
    return moving + _standing(nvml) if whole else moving


def _standing(nvml: Any) -> tuple[_Question, ...]:
    sent, received = nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES
    figures: Mapping[str, Callable[[Any], Any]] = {
        "max_sm_mhz": lambda h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_SM),
        "max_memory_mhz": lambda h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_MEM),
        "temperature": lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU),
        "generation": lambda h: nvml.nvmlDeviceGetCurrPcieLinkGeneration(h),
        "width": lambda h: nvml.nvmlDeviceGetCurrPcieLinkWidth(h),
        "max_generation": lambda h: nvml.nvmlDeviceGetMaxPcieLinkGeneration(h),
        "max_width": lambda h: nvml.nvmlDeviceGetMaxPcieLinkWidth(h),
        "bus": lambda h: nvml.nvmlDeviceGetMemoryBusWidth(h),
        "cores": lambda h: nvml.nvmlDeviceGetNumGpuCores(h),
    }
    return (
        (("name",), lambda h: (_text(nvml.nvmlDeviceGetName(h)),)),
        (("uuid",), lambda h: (_text(nvml.nvmlDeviceGetUUID(h)),)),
        (("power",), lambda h: (nvml.nvmlDeviceGetPowerUsage(h) / 1e3,)),
        (("sent",), lambda h: (nvml.nvmlDeviceGetPcieThroughput(h, sent) * 1e3,)),  # NVML says kB/s
        (("received",), lambda h: (nvml.nvmlDeviceGetPcieThroughput(h, received) * 1e3,)),
        (("processes",), lambda h: (_processes(nvml.nvmlDeviceGetComputeRunningProcesses(h)),)),
        (("capability",), lambda h: ("{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(h)),)),
        *(((name,), _one(ask)) for name, ask in figures.items()),
    )


def _one(ask: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda handle: (_figure(ask(handle)),)


def _figure(value: int) -> int | None:
    return None if value == NOT_THERE else int(value)


def _memory(info: Any) -> tuple[int, int, int]:
    return int(info.total), int(info.used), int(info.free)


def _loads(rates: Any) -> tuple[float | None, float | None]:
    """Shares; a figure beyond 100 % is none."""
    gpu, memory = (value / 100 if 0 <= value <= 100 else None for value in (rates.gpu, rates.memory))
    return gpu, memory


def _throttles(nvml: Any, handle: Any) -> tuple[str, ...]:
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (AttributeError, nvml.NVMLError):  # the name before driver 535
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return tuple(name for bit, name in THROTTLES.items() if bits & bit)


def _processes(found: list[Any]) -> tuple[Process, ...]:
    return tuple(Process(p.pid, p.usedGpuMemory) for p in sorted(found, key=lambda p: p.pid))


def _text(value: Any) -> str | None:
    """Older libraries answer bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _or_none(nvml: Any, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except nvml.NVMLError:
        return None


# How many times as fast as FP32 lanes tensor cores multiply bf16 (summed in FP32) and INT8, dense, by compute
# capability: the vendor's architecture papers. Where GeForce and workstation cards differ, as GeForce has it.
TENSOR: Mapping[str, tuple[int, int]] = {
    "8.0": (16, 32), "8.6": (2, 8), "8.9": (2, 8), "9.0": (16, 32), "10.0": (32, 64), "12.0": (2, 8),
}  # fmt: skip
LAUNCH = 2.5  # microseconds from the end of a kernel of a recorded step to the work of the next one


# ---- as devices --------------------------------------------------------------------
def device(gpu: Gpu) -> Device | None:
    """The GPU for the machine picture, with rates that follow from its clocks; None when it is lost.

    No kernels: those come from a backend. Rates of what the driver doesn't tell are assumed.
    """
    if gpu.lost or gpu.memory is None:
        return None
    read, f32 = Measured(100e9, "assumed"), Measured(5e12, "assumed")
    if gpu.max_memory_mhz and gpu.bus:
        # two transfers a clock on each wire of the bus
        read = Measured(gpu.max_memory_mhz * 1e6 * 2 * gpu.bus / 8, "reported")
    if gpu.max_sm_mhz and gpu.cores:
        f32 = Measured(gpu.max_sm_mhz * 1e6 * 2 * gpu.cores, "reported")
    rates = {"f32": f32}
    if times := TENSOR.get(gpu.capability or ""):
        both = zip(("bf16", "i8"), times, strict=True)
        rates |= {dtype: Measured(f32.value * by, f32.how) for dtype, by in both}
    return Device(
        id=gpu.id,
        kind="gpu",
        name=gpu.name or "NVIDIA GPU",
        memory=gpu.memory,
        read=read,
        rates=rates,
        launch=Measured(LAUNCH, "assumed"),
        features=(f"sm_{gpu.capability.replace('.', '')}",) if gpu.capability else (),
        free=gpu.free,
        load=gpu.load,
    )


def links(gpu: Gpu) -> tuple[Link, ...]:
    """Both ways between the host and the GPU, at the link's highest speed; () where that isn't known."""
    if not gpu.max_width or gpu.max_generation not in LANE:
        return ()
    rate = Measured(LANE[gpu.max_generation] * gpu.max_width, "reported")
    latency = Measured(10.0, "assumed")
    return Link(host.ID, gpu.id, rate, latency), Link(gpu.id, host.ID, rate, latency)
