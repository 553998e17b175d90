"""The operating system's settings, from pretend trees and from the real one."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from flashrt.probes.system import Node, system
from tests.probes.test_host import eight, siblings, tree  # noqa: F401 (a fixture)

CPU = "sys/devices/system/cpu"
FILES = {
    "proc/meminfo": "MemTotal: 100 kB\nSwapTotal: 8 kB\nHugePages_Total: 3\nHugepagesize: 2048 kB\n",
    "proc/pressure/cpu": "some avg10=12.50 avg60=1.00 avg300=0.00 total=1\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    "sys/devices/system/node/node1/cpulist": "4-7\n",
    "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:  50 kB\nNode 1 MemFree:  20 kB\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave\n",
    f"{CPU}/cpu0/cache/index0/size": "48K\n",
    f"{CPU}/cpu0/cache/index0/level": "1\n",
    f"{CPU}/cpu0/cache/index0/type": "Data\n",
    f"{CPU}/cpu0/cache/index3/size": "32M\n",
    f"{CPU}/cpu0/cache/index3/level": "3\n",
    f"{CPU}/cpu0/cache/index3/type": "Unified\n",
    f"{CPU}/cpu0/cache/index3/shared_cpu_list": "0-7\n",
    "run/.containerenv": "",
}


def test_what_files_say(tmp_path: Path, eight: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(resource, "getrlimit", lambda what: (8 << 20, resource.RLIM_INFINITY))
    found = system(tree(tmp_path, {**FILES, **siblings(4)}))
    assert (found.swap, found.reserved, found.pressure) == (8192, 3 * 2048 * 1024, 0.125)
    assert (found.huge_pages, found.governor, found.container) == ("never", "powersave", "podman")
    assert found.nodes == (Node(0, "0-3", None, None), Node(1, "4-7", 51200, 20480))
    assert found.siblings == ("0,4", "1,5", "2,6", "3,7")
    assert found.caches == (("L1d", 48 << 10, ""), ("L3", 32 << 20, "0-7"))
    assert (found.cpus, found.memlock) == ("0-7", 8 << 20)


def test_nothing_can_be_read(tmp_path: Path) -> None:
    found = system(tmp_path)
    assert (found.swap, found.reserved, found.pressure, found.nodes) == (None, None, None, ())
    assert (found.huge_pages, found.governor, found.container, found.caches) == ("", "", "", ())


def test_here() -> None:
    versions = dict(system().packages)
    assert versions["numpy"] and versions["flashrt"]
