"""What of the operating system decides about speed: limits, huge pages, NUMA, caches, frequency policy.

Everything is None or "" where it can't be read.
"""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from flashrt.probes.groups import ranges
from flashrt.probes.host import ROOT, usable_cpus

PACKAGES = ("flashrt", "numpy", "numba", "llvmlite", "torch", "transformers", "onnxruntime", "nvidia-ml-py")


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node. cpus: as the kernel lists them ("0-7,16-23"). memory, free: bytes."""

    number: int
    cpus: str
    memory: int | None
    free: int | None


@dataclass(frozen=True, slots=True)
class System:
    """One reading.

    memlock: bytes a process may lock in memory, None for no limit. huge_pages: of transparent huge
    pages, "always", "madvise" or "never". reserved: bytes in pages of hugetlbfs.
    governor: of frequency, by the cores this process may use. cpus: those cores.
    siblings: groups of logical processors that are one core, where there is more than one in it.
    caches: (level and kind, bytes, shared by). container: "docker", "podman", … or "".
    swap: bytes of swap space. pressure: share of the last 10 s in which some task waited for a core.
    """

    os: str
    python: str
    packages: tuple[tuple[str, str], ...]
    container: str
    memlock: int | None
    huge_pages: str
    reserved: int | None
    nodes: tuple[Node, ...]
    governor: str
    cpus: str
    siblings: tuple[str, ...]
    caches: tuple[tuple[str, int, str], ...]
    swap: int | None
    pressure: float | None


def system(root: Path = ROOT) -> System:
    """The system as it is now. root: where /proc and /sys are found."""
    cpus = sorted(usable_cpus())
    meminfo = _meminfo(root / "proc/meminfo")
    pages, page = meminfo.get("HugePages_Total"), meminfo.get("Hugepagesize")
    return System(
        os=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()} ({sys.platform})",
        packages=tuple(_versions(PACKAGES)),
        container=_container(root),
        memlock=_memlock(),
        huge_pages=_chosen(_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        reserved=pages * page * 1024 if pages is not None and page is not None else None,
        nodes=_nodes(root),
        governor=_governor(root, cpus),
        cpus=ranges(cpus),
        siblings=_siblings(root, cpus),
        caches=_caches(root, cpus[0] if cpus else 0),
        swap=meminfo["SwapTotal"] * 1024 if "SwapTotal" in meminfo else None,
        pressure=_pressure(_text(root / "proc/pressure/cpu")),
    )


def _versions(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, ""


def _memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _container(root: Path) -> str:
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    return "kubernetes" if "kubepods" in _text(root / "proc/self/cgroup") else ""


def _chosen(text: str) -> str:
    """ "always [madvise] never" → "madvise"."""
    return text.partition("[")[2].partition("]")[0]


def _meminfo(path: Path) -> dict[str, int]:
    """Keys of a meminfo file → the number behind them (kB, mostly)."""
    found = {}
    for line in _text(path).splitlines():
        key, _, value = line.rpartition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[key.split()[-1]] = int(words[0])  # a node's file writes "Node 0 MemTotal:"
    return found


def _nodes(root: Path) -> tuple[Node, ...]:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = []
    for folder in folders:
        meminfo = _meminfo(folder / "meminfo")
        total, free = meminfo.get("MemTotal"), meminfo.get("MemFree")
        nodes.append(
            Node(
                int(folder.name.removeprefix("node")),
                _text(folder / "cpulist"),
                total * 1024 if total is not None else None,
                free * 1024 if free is not None else None,
            )
        )
    return tuple(sorted(nodes, key=lambda n: n.number))


def _governor(root: Path, cpus: Iterable[int]) -> str:
    folder = root / "sys/devices/system/cpu"
    names = {_text(folder / f"cpu{n}/cpufreq/scaling_governor") for n in cpus}
    return ", ".join(sorted(names - {""}))


def _siblings(root: Path, cpus: Iterable[int]) -> tuple[str, ...]:
    folder = root / "sys/devices/system/cpu"
    lists = {_text(folder / f"cpu{n}/topology/thread_siblings_list") for n in cpus}
    return tuple(sorted((s for s in lists if not s.isdigit() and s), key=lambda s: (len(s), s)))


def _caches(root: Path, cpu: int) -> tuple[tuple[str, int, str], ...]:
    found = []
    for folder in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*")):
        size, kind = _text(folder / "size"), _text(folder / "type")
        if size[:-1].isdigit() and size[-1:] in "KM":
            name = f"L{_text(folder / 'level')}{kind[:1].lower() if kind != 'Unified' else ''}"
            found.append(
                (name, int(size[:-1]) << {"K": 10, "M": 20}[size[-1]], _text(folder / "shared_cpu_list"))
            )
    return tuple(found)  # fmt: skip


def _pressure(text: str) -> float | None:
    """The share in "some avg10=1.50 avg60=…"."""
    value = text.partition("avg10=")[2].split(" ")[0]
    try:
        return float(value) / 100
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
