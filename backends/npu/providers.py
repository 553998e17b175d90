"""The execution providers of onnxruntime that can be a device, and what each of them really is."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import onnxruntime as ort

from flashrt.backends.npu.kernels import Form, kernels_of
from flashrt.errors import PlanError
from flashrt.machine import Device, Measured

KIND = "npu"


SIMULATED = platform.machine() in ("x86_64", "AMD64")  # Hexagon: Qualcomm's simulator, and no chip


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to run a graph.

    ep: onnxruntime's name of it. form: how it computes. package: what pip installs. what: what computes.
    options: makes its options. module: the Python module that brings it as a plug-in ("" when it is
    built into onnxruntime). context: it can write its compiled graph as an EP-context model.
    folder_option: the option that takes a folder for compiled graphs ("" when there is none).
    rate: flop per second (None: the host's); launch: microseconds. Both are assumed.
    """

    ep: str
    form: Form
    package: str
    what: str
    options: Callable[[], Mapping[str, str]] = dict
    module: str = ""
    context: bool = False
    folder_option: str = ""
    rate: float | None = None
    launch: float = 50.0


def _hexagon(form: Form, **options: str) -> Provider:
    def with_library() -> Mapping[str, str]:
        library = importlib.import_module("onnxruntime_qnn").get_qnn_htp_path()
        return {"backend_path": library, **options}

    what = "Hexagon simulator on the CPU: shows that results are right, says nothing about speed"
    return Provider(
        "QNNExecutionProvider", form, "onnxruntime-qnn",
        what if SIMULATED else "Qualcomm Hexagon NPU",
        with_library, module="onnxruntime_qnn", context=True,
        # a 576×1536 product takes the simulator some 10 ms
        rate=1e8 if SIMULATED else 4e12, launch=1e4 if SIMULATED else 200.0,
    )  # fmt: skip


PROVIDERS: Mapping[str, Provider] = {
    "cpu": Provider("CPUExecutionProvider", "f32", "onnxruntime", "stand-in: onnxruntime on the CPU"),
    # half floats must be compiled for a named chip: 60 is the Snapdragon X, whose Hexagon is v73
    "qnn": _hexagon("f16", enable_htp_fp16_precision="1", soc_model="60", htp_arch="73"),
    "qnn-int8": _hexagon("int8"),
    "openvino": Provider(
        "OpenVINOExecutionProvider", "f16", "onnxruntime-openvino", "Intel NPU through OpenVINO",
        lambda: {"device_type": "NPU"}, folder_option="cache_dir", rate=4e12,
    ),
    "openvino-cpu": Provider(
        "OpenVINOExecutionProvider", "f32", "onnxruntime-openvino", "stand-in: OpenVINO's CPU plug-in",
        lambda: {"device_type": "CPU", "precision": "FP32"}, folder_option="cache_dir",
    ),
    "cann": Provider(
        "CANNExecutionProvider", "f16", "onnxruntime-cann", "Huawei Ascend through CANN",
        lambda: {"precision_mode": "force_fp16"}, rate=1e13,
    ),
    "vitisai": Provider(
        "VitisAIExecutionProvider", "int8", "onnxruntime-vitisai", "AMD XDNA through Vitis AI", rate=4e12
    ),
    "coreml": Provider(
        "CoreMLExecutionProvider", "f16", "onnxruntime", "Apple Neural Engine through CoreML",
        lambda: {
            "ModelFormat": "MLProgram", "MLComputeUnits": "CPUAndNeuralEngine",
            "RequireStaticInputShapes": "1",
        },
        folder_option="ModelCacheDirectory", rate=4e12,
    ),
}  # fmt: skip


def find(id: str) -> Provider:
    """The provider of a device id such as "npu:qnn". PlanError naming the known ones."""
    name = id.partition(":")[2]
    if name not in PROVIDERS:
        known = ", ".join(f"{KIND}:{n}" for n in PROVIDERS)
        raise PlanError(f"no device {id!r}", hint=f"known: {known}")
    return PROVIDERS[name]


def lack(provider: Provider) -> str:
    """Why a provider can't be used here, or ""."""
    if provider.module:
        there = importlib.util.find_spec(provider.module) is not None
    else:
        there = provider.ep in ort.get_available_providers()
    return "" if there else f"{provider.ep} isn't installed here"


def require(id: str) -> Provider:
    """The provider, which is installed. PlanError saying how to install it."""
    provider = find(id)
    if missing := lack(provider):
        raise PlanError(f"{id} can't be used: {missing}", hint=install_hint(provider))
    return provider


def install_hint(provider: Provider) -> str:
    """The command that installs a provider."""
    if provider.module:
        return f"pip install {provider.package}"
    if provider.package == "onnxruntime":
        return f"{provider.ep} is part of onnxruntime on other systems only"
    # these packages hold a module onnxruntime of their own: of two, the one installed last would win
    return f"pip uninstall -y onnxruntime && pip install --force-reinstall --no-deps {provider.package}"


@cache
def version(provider: Provider) -> str:
    """onnxruntime's version, and the plug-in's. Part of the key of compiled graphs."""
    own = f"onnxruntime {ort.__version__}"
    return f"{own}, {provider.package} {_installed(provider.package)}" if provider.module else own


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def describe(id: str) -> str:
    """One line: what computes on the device, and in which form."""
    provider = find(id)
    return f"{provider.what} ({provider.form}; {lack(provider) or version(provider)})"


def device_spec(id: str, host: Device) -> Device:
    """The device as the planner sees it: memory and reading speed of the host it shares.

    Raises PlanError when the provider isn't known or isn't installed.
    """
    provider = require(id)
    rates = host.rates if provider.rate is None else {"f32": Measured(provider.rate, "assumed")}
    return replace(
        host, id=id, kind=KIND, name=describe(id), rates=rates, gemv=None,
        launch=Measured(provider.launch, "assumed"), kernels=kernels_of(provider.form), features=(),
    )  # fmt: skip
