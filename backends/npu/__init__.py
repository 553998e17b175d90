"""The NPU backend: regions become ONNX graphs that onnxruntime runs with one execution provider.

`npu:qnn` is Qualcomm's Hexagon (on x86 its simulator), `npu:openvino` Intel's NPU, …; `npu:cpu` is
the stand-in that every machine has. `PROVIDERS` lists them all.
"""

from flashrt.backends.npu.device import NpuBackend, NpuDevice
from flashrt.backends.npu.providers import PROVIDERS, describe, device_spec

__all__ = ["PROVIDERS", "NpuBackend", "NpuDevice", "describe", "device_spec"]
