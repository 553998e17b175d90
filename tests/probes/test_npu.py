"""Providers and neural processors, and who only stands in for one."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashrt.probes import npu
from flashrt.probes.npu import Chip


def ort(*names: str) -> SimpleNamespace:
    return SimpleNamespace(get_available_providers=lambda: list(names), __version__="1.99")


def nothing(package: str) -> str:
    raise metadata.PackageNotFoundError(package)


def test_the_plain_cpu_is_a_stand_in(tmp_path: Path) -> None:
    found = npu.read(ort(npu.CPU), version=nothing, root=tmp_path)
    (cpu,) = found.providers
    assert (cpu.kind, cpu.package, cpu.version) == ("cpu", "onnxruntime", "1.99")
    assert "stands in for an NPU" in cpu.stand_in
    assert (found.chips, found.reason) == ((), "")


def test_a_plug_in_on_x86_is_a_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    def version(package: str) -> str:
        return "2.3" if package == "onnxruntime-qnn" else nothing(package)

    found = npu.read(ort(npu.CPU), version=version, root=tmp_path)
    qnn = found.providers[1]
    assert (qnn.name, qnn.kind, qnn.version) == ("QNNExecutionProvider", "npu", "2.3")
    assert "simulator" in qnn.stand_in and "correctness only" in qnn.stand_in


def test_a_provider_without_its_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    names = ("OpenVINOExecutionProvider", "VitisAIExecutionProvider", "CUDAExecutionProvider", "NewProvider")
    vino, vitis, cuda, new = npu.read(ort(*names), version=nothing, root=tmp_path).providers
    assert "no Intel NPU" in vino.stand_in and "no NPU" in vitis.stand_in
    assert (cuda.kind, cuda.stand_in, new.kind) == ("gpu", "", "unknown")


def test_a_chip_and_its_provider(tmp_path: Path) -> None:
    driver = tmp_path / "sys/bus/pci/drivers/intel_vpu"
    driver.mkdir(parents=True)
    device = tmp_path / "sys/class/accel/accel0/device"
    device.mkdir(parents=True)
    (device / "driver").symlink_to(driver)
    found = npu.read(ort("OpenVINOExecutionProvider"), version=nothing, root=tmp_path)
    assert found.chips == (Chip("Intel NPU", "/dev/accel/accel0", "intel_vpu"),)
    assert found.providers[0].stand_in == ""


def test_a_chip_by_its_device_file(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/davinci0").touch()
    assert [c.name for c in npu.read(ort(), version=nothing, root=tmp_path).chips] == ["Ascend NPU"]


def test_no_onnxruntime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found = npu.read(version=nothing, root=tmp_path)
    assert found.providers == () and "onnxruntime is missing" in found.reason


def test_a_broken_onnxruntime(tmp_path: Path) -> None:
    def broken() -> list[str]:
        raise RuntimeError("undefined symbol")

    library = SimpleNamespace(get_available_providers=broken)
    assert "undefined symbol" in npu.read(library, version=nothing, root=tmp_path).reason


def test_here() -> None:
    """The installed onnxruntime has at least the plain CPU."""
    pytest.importorskip("onnxruntime")
    assert npu.CPU in [p.name for p in npu.read().providers]
