"""GPUs through a pretend NVML: every figure, every way to lack one, and devices that go away."""

from __future__ import annotations

import importlib
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from flashrt.machine import Measured
from flashrt.probes import nvidia
from flashrt.probes.nvidia import Gpu, Nvidia, Process
from tests.probes.fake_nvml import FakeNvml

ERROR = FakeNvml.NVMLError


def one(**answers: Any) -> Gpu:
    (gpu,) = Nvidia(FakeNvml(answers)).read().gpus
    return gpu


def test_everything_the_driver_tells() -> None:
    found = Nvidia(FakeNvml({})).read()
    assert (found.driver, found.cuda, found.reason) == ("580.65", "13.0", "")
    (gpu,) = found.gpus
    assert gpu == Gpu(
        id="gpu:0", name="Fake 100", uuid="GPU-1", memory=80 * 10**9, used=10**9, free=79 * 10**9,
        load=0.4, memory_load=0.1, sm_mhz=1500, memory_mhz=1500, max_sm_mhz=2000, max_memory_mhz=2000,
        throttle=("power cap", "hardware thermal"), temperature=50, power=250.5, generation=1, width=8,
        max_generation=5, max_width=16, sent=3e6, received=3e6, processes=(Process(7, None),),
        bus=5120, cores=10_000, capability="9.0", reasons=gpu.reasons,
    )  # fmt: skip
    assert not gpu.reasons and not gpu.lost


@pytest.mark.parametrize("name", [
    "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetPcieThroughput", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetName",
    "nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetCudaComputeCapability",
])  # fmt: skip
@pytest.mark.parametrize("error", [ERROR("Insufficient Permissions"), AttributeError("no such function")])
def test_a_missing_counter_is_none_with_a_reason(name: str, error: Exception) -> None:
    whole, gpu = one(), one(**{name: error})
    changed = {f.name for f in fields(Gpu) if getattr(gpu, f.name) != getattr(whole, f.name)} - {"reasons"}
    assert changed and changed == set(gpu.reasons)
    for field in changed:
        assert getattr(gpu, field) is None
        assert gpu.reasons[field] == str(error)


def test_the_name_of_throttling_before_driver_535() -> None:
    gpu = one(
        nvmlDeviceGetCurrentClocksEventReasons=ERROR("Function Not Found"),
        nvmlDeviceGetCurrentClocksThrottleReasons=0x8,
    )
    assert gpu.throttle == ("hardware slowdown",)


def test_figures_that_cannot_be() -> None:
    """NVML's "not available" and a load over 100 % are no figures."""
    gpu = one(
        nvmlDeviceGetCurrPcieLinkWidth=nvidia.NOT_THERE,
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=250, memory=10),
    )
    assert (gpu.width, gpu.load, gpu.memory_load) == (None, None, 0.1)
    assert {"width", "load"} == set(gpu.reasons)


@pytest.mark.parametrize("error", [ERROR("Driver Not Loaded"), OSError("libnvidia-ml.so.1")])
def test_no_driver(error: Exception) -> None:
    found = Nvidia(FakeNvml({}, starts=error)).read()
    assert found.gpus == () and str(error) in found.reason


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is missing" in Nvidia().read().reason


def test_the_real_library_answers_in_the_same_way() -> None:
    """Whatever this machine has: a reading, and a reason where there is no GPU."""
    importlib.import_module("pynvml")
    found = Nvidia().read()
    assert bool(found.reason) != any(not gpu.lost for gpu in found.gpus)


def test_a_driver_without_gpus() -> None:
    assert "lists no GPU" in Nvidia(FakeNvml()).read().reason


def test_a_device_that_disappears_and_comes_back() -> None:
    nvml = FakeNvml({}, {})
    driver = Nvidia(nvml)
    assert [g.lost for g in driver.read().gpus] == ["", ""]
    second = nvml.gpus.pop()
    gone = driver.read().gpus[1]
    assert gone.id == "gpu:1" and gone.lost and gone.memory is None and nvidia.device(gone) is None
    nvml.gpus.append({**second, "handle": ERROR("GPU is lost")})
    assert driver.read().gpus[1].lost == "GPU is lost"
    nvml.gpus[1] = second
    assert driver.read().gpus[1].memory == 80 * 10**9


def test_a_driver_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices are lost, then NVML is opened anew."""
    nvml = FakeNvml({})
    driver = Nvidia(nvml)
    driver.read()

    def broken() -> int:
        raise ERROR("Uninitialized")

    with monkeypatch.context() as patch:
        patch.setattr(nvml, "nvmlDeviceGetCount", broken)
        found = driver.read()
    assert [g.lost for g in found.gpus] == ["Uninitialized"] and "Uninitialized" in found.reason
    assert nvml.opened == 0
    assert driver.read().reason == "" and nvml.opened == 1
    driver.close()
    driver.close()
    assert nvml.opened == 0


def test_a_short_reading_asks_less() -> None:
    nvml = FakeNvml({})
    driver = Nvidia(nvml)
    short = driver.read(whole=False).gpus[0]
    asked = nvml.calls
    driver.read()
    assert asked * 3 < nvml.calls
    assert (short.load, short.free, short.sm_mhz) == (0.4, 79 * 10**9, 1500)
    assert short.processes is None and short.sent is None


def test_as_a_device() -> None:
    device = nvidia.device(one())
    assert device is not None
    assert (device.id, device.kind, device.features, device.kernels) == ("gpu:0", "gpu", ("sm_90",), ())
    assert device.read == Measured(2000e6 * 2 * 5120 / 8, "reported")
    assert device.rates["f32"] == Measured(2000e6 * 2 * 10_000, "reported")
    assert device.rates["bf16"] == Measured(16 * device.rates["f32"].value, "reported")
    assert device.rate("act=i8/32 acc=f32") == 32 * device.rates["f32"].value
    other = nvidia.device(one(nvmlDeviceGetCudaComputeCapability=(7, 5)))
    assert other is not None and set(other.rates) == {"f32"}
    there, back = nvidia.links(one())
    assert (there.src, there.dst, back.src) == ("cpu:0", "gpu:0", "gpu:0")
    assert there.rate == Measured(3.938e9 * 16, "reported")


def test_rates_that_the_driver_does_not_tell() -> None:
    gpu = one(nvmlDeviceGetMemoryBusWidth=ERROR("x"), nvmlDeviceGetMaxPcieLinkWidth=ERROR("x"))
    device = nvidia.device(gpu)
    assert device is not None
    assert (device.read.how, device.rates["f32"].how) == ("assumed", "reported")
    assert nvidia.links(gpu) == ()
    assert nvidia.device(one(nvmlDeviceGetMemoryInfo=ERROR("x"))) is None
