"""What onnxruntime can hand work to, and what neural processors the system has.

A provider that only pretends to be the hardware (the plain CPU, a simulator) is called a stand-in, with
what it stands for, and never a neural processor.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from flashrt.probes.host import ROOT

CPU = "CPUExecutionProvider"

# provider → what it drives. Those that compute elsewhere ("remote") are no devices of this machine.
DRIVES = {
    CPU: "cpu",
    "QNNExecutionProvider": "npu",
    "OpenVINOExecutionProvider": "npu",
    "VitisAIExecutionProvider": "npu",
    "CANNExecutionProvider": "npu",
    "CoreMLExecutionProvider": "npu",
    "RknpuExecutionProvider": "npu",
    "NnapiExecutionProvider": "npu",
    "CUDAExecutionProvider": "gpu",
    "TensorrtExecutionProvider": "gpu",
    "NvTensorRTRTXExecutionProvider": "gpu",
    "MIGraphXExecutionProvider": "gpu",
    "ROCMExecutionProvider": "gpu",
    "DmlExecutionProvider": "gpu",
    "WebGpuExecutionProvider": "gpu",
    "AzureExecutionProvider": "remote",
}
# PyPI packages that bring a provider as a plug-in library → the provider
PLUG_INS = {
    "onnxruntime-qnn": "QNNExecutionProvider",
    "onnxruntime-openvino": "OpenVINOExecutionProvider",
    "onnxruntime-vitisai": "VitisAIExecutionProvider",
    "onnxruntime-cann": "CANNExecutionProvider",
}
CHIPS = {"intel_vpu": "Intel NPU", "amdxdna": "AMD XDNA NPU", "rocket": "Rockchip NPU", "habanalabs": "Gaudi"}
NODES = {
    "fastrpc-cdsp": "Qualcomm Hexagon",
    "adsprpc-smd": "Qualcomm Hexagon",
    "davinci0": "Ascend NPU",
    "rknpu": "Rockchip NPU",
}


@dataclass(frozen=True, slots=True)
class Provider:
    """One way for onnxruntime to run a graph.

    kind: "npu", "gpu", "cpu", "remote" or "unknown". package, version: who brought it.
    stand_in: what it stands in for and how, "" when it is the hardware itself.
    """

    name: str
    kind: str
    package: str
    version: str
    stand_in: str = ""


@dataclass(frozen=True, slots=True)
class Chip:
    """A neural processor that the kernel knows. node: its device file; driver: the kernel's."""

    name: str
    node: str
    driver: str


@dataclass(frozen=True, slots=True)
class Providers:
    """reason: why there are no providers; "" when there are some."""

    providers: tuple[Provider, ...] = ()
    chips: tuple[Chip, ...] = ()
    reason: str = ""


def read(
    library: Any = None, *, version: Callable[[str], str] = metadata.version, root: Path = ROOT
) -> Providers:
    """What is here now.

    library: a module like `onnxruntime`, None imports that one. version: of an installed package, or
    PackageNotFoundError. root: where /sys and /dev are found.
    """
    chips = tuple(_chips(root))
    try:
        library = library or importlib.import_module("onnxruntime")
        names = list(library.get_available_providers())
    except ImportError as error:
        return Providers((), chips, f"the Python package onnxruntime is missing ({error})")
    except Exception as error:  # a broken build, a missing system library: whatever it raises, no crash
        return Providers((), chips, f"onnxruntime doesn't load: {error}")
    own = str(getattr(library, "__version__", "unknown"))
    built_in = [_provider(name, "onnxruntime", own, chips) for name in names]
    plugged = [
        _provider(name, package, found, chips)
        for package, name in PLUG_INS.items()
        if name not in names and (found := _installed(package, version))
    ]
    return Providers((*built_in, *plugged), chips)


def _installed(package: str, version: Callable[[str], str]) -> str | None:
    try:
        return version(package)
    except metadata.PackageNotFoundError:
        return None


def _provider(name: str, package: str, version: str, chips: tuple[Chip, ...]) -> Provider:
    kind = DRIVES.get(name, "unknown")
    return Provider(name, kind, package, version, _stand_in(name, kind, chips))


def _stand_in(name: str, kind: str, chips: tuple[Chip, ...]) -> str:
    if name == CPU:
        return "plain CPU: stands in for an NPU where there is none"
    if name == "QNNExecutionProvider" and platform.machine() in ("x86_64", "AMD64"):
        return "Hexagon simulator: slow, shows correctness only"
    if name == "OpenVINOExecutionProvider" and not any("Intel" in chip.name for chip in chips):
        return "OpenVINO on the CPU: no Intel NPU here"
    if kind == "npu" and not chips and platform.system() == "Linux":
        return "software only: no NPU that the kernel knows"
    return ""


def _chips(root: Path) -> Iterator[Chip]:
    for entry in _entries(root / "sys/class/accel"):
        driver = entry / "device/driver"
        name = driver.resolve().name if driver.exists() else ""
        yield Chip(CHIPS.get(name, "accelerator"), f"/dev/accel/{entry.name}", name or "unknown")
    for node, name in NODES.items():
        if (root / "dev" / node).exists():
            yield Chip(name, f"/dev/{node}", "unknown")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
