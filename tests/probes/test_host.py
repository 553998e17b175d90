"""The host as a device: what files say is taken, what they don't say is assumed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest

from flashrt.machine import Machine, Measured, from_json, to_json
from flashrt.probes import host

INTEL = """processor\t: 0
model name\t: Some(R) Processor
flags\t\t: fpu sse2 avx2 fma f16c avx512f avx512_vnni amx_tile amx_bf16

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm sve\n"


def tree(root: Path, files: Mapping[str, str]) -> Path:
    """A root folder with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use eight logical processors of a machine with 1 GB."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8)
    memory = psutil.virtual_memory()._replace(total=10**9, available=8 * 10**8)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def siblings(pairs: int) -> dict[str, str]:
    """Two logical processors a core: n and n + pairs."""
    return {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % pairs},{n % pairs + pairs}\n"
        for n in range(2 * pairs)
    }


def test_this_host() -> None:
    """The real one is plausible and survives JSON."""
    device = host.host()
    assert (device.id, device.kind) == ("cpu:0", "cpu")
    assert device.name
    assert 1 <= device.cores <= (os.cpu_count() or 1)
    assert device.free is not None
    assert 0 < device.free <= device.memory <= psutil.virtual_memory().total
    assert device.load is None or 0 <= device.load <= 1
    assert {rate.how for rate in (device.read, device.launch, *device.rates.values())} == {"assumed"}
    assert from_json(to_json(Machine((device,)))) == Machine((device,))


def test_intel(tmp_path: Path, eight: None) -> None:
    device = host.host(tree(tmp_path, {"proc/cpuinfo": INTEL, **siblings(4)}))
    assert device.name == "Some(R) Processor"
    assert device.features == ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "amx_tile", "amx_bf16")
    assert (device.cores, device.memory, device.free) == (4, 10**9, 8 * 10**8)
    f32 = device.rates["f32"].value
    assert (device.rates["i8"].value, device.rates["bf16"].value) == (4 * f32, 8 * f32)


def test_arm(tmp_path: Path, eight: None) -> None:
    device = host.host(tree(tmp_path, {"proc/cpuinfo": ARM}))
    assert device.features == ("neon", "asimddp", "i8mm", "sve")
    assert device.rates["i8"].value == 4 * device.rates["f32"].value
    assert device.rates["bf16"] == device.rates["f32"]


def test_nothing_can_be_read(tmp_path: Path, eight: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No /proc, no /sys, no clock, no load: coarse, but a device."""

    def broken(*_: object) -> None:
        raise OSError("no such counter")

    monkeypatch.setattr(psutil, "cpu_freq", broken)
    monkeypatch.setattr(psutil, "getloadavg", broken)
    device = host.host(tmp_path)
    assert (device.cores, device.features, device.load) == (8, (), None)
    assert device.name
    assert device.rates["f32"] == Measured(0.5 * 4 * 4 * 2e9 * 8, "assumed")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/elsewhere\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n1:name=systemd:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
    ],
)
def test_quota_of_processor_time(files: dict[str, str], cores: int, tmp_path: Path, eight: None) -> None:
    """The tightest group around this process counts, in whole cores, of both versions of control groups."""
    assert host.host(tree(tmp_path, {**siblings(4), **files})).cores == cores


@pytest.mark.parametrize(
    ("files", "memory", "free"),
    [
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/memory.max": "500000000\n",
                "sys/fs/cgroup/a/memory.current": "300000000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 100000000\n",
            },
            500_000_000,
            300_000_000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a/b\n",
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "400000000\n",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "450000000\n",
            },
            400_000_000,
            0,
        ),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, 10**9, 8 * 10**8),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "garbage"}, 10**9, 8 * 10**8),
    ],
)
def test_memory_limit(files: dict[str, str], memory: int, free: int, tmp_path: Path, eight: None) -> None:
    device = host.host(tree(tmp_path, files))
    assert (device.memory, device.free) == (memory, free)


def test_affinity_counts_cores(tmp_path: Path, eight: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads of one core are one core."""
    root = tree(tmp_path, siblings(4))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5}, raising=False)
    assert host.host(root).cores == 1


def test_measured_rates_replace_assumed_ones() -> None:
    device = host.host()
    measured = host.with_rates(device, {"f32": Measured(1e11, "measured"), "read": Measured(5e9, "measured")})
    assert (measured.read, measured.rates["f32"]) == (Measured(5e9, "measured"), Measured(1e11, "measured"))
    assert measured.rates["i8"].how == "assumed"
    assert host.with_rates(device, {}) == device


def test_what_products_read_is_never_assumed() -> None:
    device = host.host()
    assert device.gemv is None
    measured = host.with_rates(device, {"gemv": Measured(4e9, "measured")})
    assert (measured.gemv, measured.read) == (Measured(4e9, "measured"), device.read)
    assert host.with_rates(measured, {}).gemv == measured.gemv


def test_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WORKING_SET", 1 << 20)
    read, f32 = host.measure_host(0.04)
    assert (read.how, f32.how) == ("measured", "measured")
    assert 1e7 < read.value < 1e14
    assert 1e7 < f32.value < 1e16


def test_what_no_cache_keeps(tmp_path: Path, eight: None) -> None:
    """Eight times the caches of the third level, each counted once; smaller ones and others' aren't."""

    def cache(cpu: int, index: int, level: int, size: str, shared: str) -> dict[str, str]:
        folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
        return {f"{folder}/{name}": f"{value}\n" for name, value in
                (("level", level), ("size", size), ("shared_cpu_list", shared))}  # fmt: skip

    files: dict[str, str] = {}
    for cpu in range(9):
        files |= cache(cpu, 2, 2, "2048K", str(cpu)) | cache(cpu, 3, 3, "32768K", "0-3" if cpu < 4 else "4-7")
    files |= cache(8, 3, 3, "1024K", "8")
    assert host.beyond_caches(tree(tmp_path, files)) == 8 * 2 * (32 << 20)
    assert host.beyond_caches(tmp_path / "nothing") == 0


def test_rate_counts_work_over_time() -> None:
    """Two threads that each do 3 units in a pause of 20 ms do at most 300 a second."""

    def prepare() -> host.Work:
        def work() -> float:
            time.sleep(0.02)
            return 3.0

        return work

    assert 10 < host._per_second(2, 0.1, prepare) <= 300


def test_short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "ones", refuse)
    read, f32 = host.measure_host(0.01)
    assert (read.how, f32.how) == ("assumed", "assumed")
