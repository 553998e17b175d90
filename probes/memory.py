"""Where memory is: of the system by tier, of a process by kind, and what the page cache holds of a file.

Sizes are bytes. A figure that can't be had is None; where it takes a whole reading, `reason` says why.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flashrt.probes.host import ROOT

LEAST = 1 << 20  # bytes of a mapped file that is worth a line
CACHESTAT = 451  # number of the system call on every architecture that Linux 6.5 runs on; man 2 cachestat


@dataclass(frozen=True, slots=True)
class Tiers:
    """The host's memory. total = free + page_cache + anonymous + what the kernel itself uses, about.

    available: what processes could still have: free, and cache that gives way. page_cache: files, buffers
    included, shared memory not. anonymous: of processes. shared: tmpfs and shared memory. huge: of
    anonymous, what lies in transparent huge pages. hugetlb, hugetlb_free: reserved huge pages.
    locked: may not be swapped. swap, swap_free: swap space. compressed: zswap's pool, in memory.
    """

    total: int | None = None
    free: int | None = None
    available: int | None = None
    page_cache: int | None = None
    anonymous: int | None = None
    shared: int | None = None
    kernel: int | None = None
    huge: int | None = None
    hugetlb: int | None = None
    hugetlb_free: int | None = None
    locked: int | None = None
    swap: int | None = None
    swap_free: int | None = None
    compressed: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """One process. resident = anonymous + file + shared.

    file: mapped files, program text included. peak: the most it was resident. hugetlb: reserved huge pages,
    not in `resident`. huge, proportional: of `Memory.process(whole=True)`: anonymous memory in transparent
    huge pages; resident memory with what is shared counted by parts.
    """

    resident: int | None = None
    anonymous: int | None = None
    file: int | None = None
    shared: int | None = None
    peak: int | None = None
    locked: int | None = None
    swapped: int | None = None
    hugetlb: int | None = None
    huge: int | None = None
    proportional: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file that a process maps, or reads its weights from.

    size: of the file. resident: what the process has of it in its mappings, 0 when it maps nothing.
    cached: what the page cache holds, None when it can't be told, and `reason` says why.
    """

    path: str
    size: int | None
    resident: int
    cached: int | None
    reason: str = ""


class Memory:
    """Reads /proc. root: where /proc is found."""

    def __init__(self, root: Path = ROOT) -> None:
        self._proc = root / "proc"

    def tiers(self) -> Tiers:
        """The system now."""
        found, why = _sizes(self._proc / "meminfo")
        if not found:
            return Tiers(reason=why)
        total, pages = found.get("MemTotal"), found.get("HugePages_Total")
        page, free_pages = found.get("Hugepagesize"), found.get("HugePages_Free")
        return Tiers(
            total=total,
            free=found.get("MemFree"),
            available=found.get("MemAvailable"),
            page_cache=_all(found, ("Cached", 1), ("Buffers", 1), ("Shmem", -1)),
            anonymous=found.get("AnonPages"),
            shared=found.get("Shmem"),
            kernel=_all(found, ("Slab", 1), ("KernelStack", 1), ("PageTables", 1)),
            huge=found.get("AnonHugePages"),
            # these two are numbers of pages, not kB
            hugetlb=None if pages is None or page is None else pages // 1024 * page,
            hugetlb_free=None if free_pages is None or page is None else free_pages // 1024 * page,
            locked=found.get("Mlocked"),
            swap=found.get("SwapTotal"),
            swap_free=found.get("SwapFree"),
            compressed=found.get("Zswap"),
        )

    def process(self, pid: int, *, whole: bool = False) -> Usage:
        """A process now. whole: with what the kernel must walk its page tables for."""
        found, why = _sizes(self._proc / str(pid) / "status")
        if not found:
            return Usage(reason=why)
        rollup, why = _sizes(self._proc / str(pid) / "smaps_rollup") if whole else ({}, "")
        return Usage(
            resident=found.get("VmRSS"),
            anonymous=found.get("RssAnon"),
            file=found.get("RssFile"),
            shared=found.get("RssShmem"),
            peak=found.get("VmHWM"),
            locked=found.get("VmLck"),
            swapped=found.get("VmSwap"),
            hugetlb=found.get("HugetlbPages"),
            huge=rollup.get("AnonHugePages"),
            proportional=rollup.get("Pss"),
            reason=why,
        )

    def files(self, pid: int, others: Iterable[str] = ()) -> tuple[MappedFile, ...]:
        """`others`, whether it maps them or not, and the larger files that a process maps, largest first."""
        resident = self._mapped(pid)
        named = {path: resident.pop(path, 0) for path in dict.fromkeys(others)}
        large = sorted((-size, path) for path, size in resident.items() if size >= LEAST)
        return tuple(_file(path, size) for path, size in [*named.items(), *((p, -s) for s, p in large)])

    def _mapped(self, pid: int) -> dict[str, int]:
        """Path → resident bytes, over all mappings of the file; {} where they can't be read."""
        try:
            text = (self._proc / str(pid) / "smaps").read_text("utf-8", "replace")
        except OSError:
            return {}
        found: dict[str, int] = {}
        path = ""
        for line in text.splitlines():
            if line.startswith("Rss:"):
                if path:
                    found[path] = found.get(path, 0) + int(line.split()[1]) * 1024
            elif not line[:1].isupper():  # a mapping: address perms offset dev inode path
                parts = line.split(maxsplit=5)
                path = parts[5] if len(parts) == 6 and parts[5].startswith("/") else ""
        return found


def _sizes(path: Path) -> tuple[Mapping[str, int], str]:
    """("Key: 12 kB" → bytes, ""), or ({}, why). Numbers without a unit are taken as kB, too."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError as error:
        return {}, f"{path}: {error.strerror}"
    found = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[key] = int(words[0]) * 1024
    return found, "" if found else f"{path} tells nothing"


def _all(found: Mapping[str, int], *signed: tuple[str, int]) -> int | None:
    """The sum, None when one of them isn't known."""
    if any(key not in found for key, _ in signed):
        return None
    return max(0, sum(found[key] * sign for key, sign in signed))


# ---- page cache --------------------------------------------------------------------
class _Range(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))  # len 0: to the end


class _Stat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")
    )


def _file(path: str, resident: int) -> MappedFile:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return MappedFile(path, None, resident, None, error.strerror or str(error))
    try:
        pages, why = _cached_pages(file)
        cached = None if pages is None else pages * os.sysconf("SC_PAGE_SIZE")
        return MappedFile(path, os.fstat(file).st_size, resident, cached, why)
    finally:
        os.close(file)


def _cached_pages(file: int) -> tuple[int | None, str]:
    """Pages of an open file in the page cache. Unlike mincore it maps nothing and asks the kernel once."""
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError) as error:
        return None, str(error)
    counted = _Stat()
    if call(CACHESTAT, file, ctypes.byref(_Range(0, 0)), ctypes.byref(counted), 0) != 0:
        return None, f"the kernel doesn't tell (cachestat, Linux 6.5): {os.strerror(ctypes.get_errno())}"
    return int(counted.cache), ""
