"""Memory of the system, of a process and of files, from pretend /proc trees and the real one."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from flashrt.probes.memory import LEAST, Memory, Tiers, Usage
from tests.probes.test_host import tree

MEMINFO = """MemTotal:       1000 kB
MemFree:         400 kB
MemAvailable:    600 kB
Buffers:          10 kB
Cached:          210 kB
AnonPages:       300 kB
Shmem:            20 kB
Slab:             50 kB
KernelStack:       5 kB
PageTables:       15 kB
AnonHugePages:   100 kB
Mlocked:           8 kB
SwapTotal:        64 kB
SwapFree:         32 kB
HugePages_Total:   3
HugePages_Free:    1
Hugepagesize:   2048 kB
"""


def test_tiers(tmp_path: Path) -> None:
    tiers = Memory(tree(tmp_path, {"proc/meminfo": MEMINFO})).tiers()
    assert (tiers.total, tiers.free, tiers.available) == (1000 << 10, 400 << 10, 600 << 10)
    assert (tiers.page_cache, tiers.kernel) == ((210 + 10 - 20) << 10, (50 + 5 + 15) << 10)
    assert (tiers.hugetlb, tiers.hugetlb_free) == (3 * 2 << 20, 2 << 20)
    assert tiers.compressed is None and tiers.reason == ""  # no zswap in this kernel


def test_what_the_system_hides_is_none_with_a_reason(tmp_path: Path) -> None:
    probe = Memory(tmp_path)
    assert probe.tiers() == Tiers(reason=f"{tmp_path}/proc/meminfo: No such file or directory")
    assert probe.process(7) == Usage(reason=f"{tmp_path}/proc/7/status: No such file or directory")
    tree(tmp_path, {"proc/meminfo": "MemTotal: 10 kB\nCached: 5 kB\n", "proc/7/status": "VmRSS:\t 12 kB\n"})
    assert probe.tiers().page_cache is None and probe.tiers().total == 10 << 10
    usage = probe.process(7, whole=True)
    assert (usage.resident, usage.huge) == (12 << 10, None) and "smaps_rollup" in usage.reason
    assert probe.files(7) == ()


def test_mappings_of_a_file_are_added_up(tmp_path: Path) -> None:
    """Resident bytes by path; small files and memory without a file are left out."""
    weights = tmp_path / "model weights.gguf"
    weights.write_bytes(b"x" * 10)
    smaps = "".join(
        f"7f00-7f01 r--p 00000000 08:01 12 {path}\nSize: 9 kB\nRss: {kb} kB\nVmFlags: rd mr\n"
        for path, kb in (
            (str(weights), 2048), (str(weights), 1024), ("/lib/small.so", 8), ("[heap]", 9999), ("", 7777),
        )
    )  # fmt: skip
    files = Memory(tree(tmp_path, {"proc/7/smaps": smaps})).files(7, ["/absent"])
    assert [(f.path, f.resident) for f in files] == [("/absent", 0), (str(weights), 3 << 20)]
    assert (files[0].size, files[0].cached, files[0].reason) == (None, None, "No such file or directory")
    assert files[1].size == 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_this_process(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(os.urandom(2 * LEAST))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) > 0
        probe = Memory()
        (found,) = [f for f in probe.files(os.getpid()) if f.path == str(path)]
        assert found.resident == 2 * LEAST == found.size
        # just written: all of it is in the page cache, where the kernel tells
        assert found.cached == 2 * LEAST if found.cached is not None else found.reason
        usage = probe.process(os.getpid(), whole=True)
    assert usage.resident is not None and usage.peak is not None and 0 < usage.resident <= usage.peak * 1.01
