"""The host processor and its memory as a `Device`, and a short measurement of its two limits.

Everything is read anew at each call; nothing is kept. What can't be read gets
an assumed value, so that a strange system gives a coarse picture and no crash.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil

from flashrt.machine import Device, Measured

ID = "cpu:0"
POOL = "host"  # the memory that every device of the host's processor lives in
ROOT = Path("/")
WORKING_SET = 64 << 20  # bytes a thread reads, at least: beyond a core's share of most caches
CACHES = 8  # times as large as all caches is what is read: they keep little of it until it comes again
MATRIX = 512  # rows and columns of the measured product: fits a core's cache, large enough for its peak

# Those that kernels are chosen by; Linux's names, but "neon" for ARM's "asimd".
FEATURES = (
    "sse4_1", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "neon", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
INT8_DOT = {"avx_vnni", "avx512_vnni", "asimddp", "i8mm"}
BF16_TILES = {"amx_bf16"}


def host(root: Path = ROOT) -> Device:
    """The processor this process may use, as "cpu:0", with assumed rates and no kernels.

    Memory, cores and free memory respect affinity and control groups.
    root: where /proc and /sys are found.
    """
    described = _describe(root)
    cpus = usable_cpus()
    features = _features(described.get("flags", "") or described.get("Features", ""))
    cores = cores_of(cpus, root)
    memory, free = _memory(root)
    return with_rates(
        Device(
            id=ID,
            kind="cpu",
            name=described.get("model name") or platform.processor() or platform.machine() or "unknown",
            memory=memory,
            read=Measured(min(8e9 * cores, 40e9), "assumed"),
            rates={"f32": Measured(_assumed_flops(features) * cores, "assumed")},
            launch=Measured(2.0, "assumed"),
            cores=cores,
            features=features,
            free=free,
            load=_load(len(cpus)),
            pool=POOL,
        ),
        {},
    )


def with_rates(device: Device, measured: Mapping[str, Measured]) -> Device:
    """The device with `measured["read"]`, "gemv" (bytes/s) and rates by dtype (flop/s) where they are given.

    What wasn't measured of the other types follows from f32's by what the features promise.
    """
    f32 = measured.get("f32", device.rates["f32"])
    has = set(device.features)
    ratios = {"i8": 4 if has & INT8_DOT else 1, "bf16": 8 if has & BF16_TILES else 1}
    others = {
        dtype: measured.get(dtype, Measured(f32.value * ratio, "assumed")) for dtype, ratio in ratios.items()
    }
    read, gemv = measured.get("read", device.read), measured.get("gemv", device.gemv)
    return replace(device, read=read, gemv=gemv, rates={"f32": f32, **others})


def measure_host(seconds: float = 0.5) -> tuple[Measured, Measured]:
    """Bytes per second read from memory and float32 flop per second, all usable cores together.

    Takes about `seconds`. Where memory is short the assumed values come back.
    """
    device = host()
    cores = device.cores
    size = min(max(WORKING_SET, beyond_caches() // cores), (device.free or device.memory) // (8 * cores))
    try:
        read = _per_second(cores, seconds / 2, lambda: _reading(size))
        flops = _per_second(cores, seconds / 2, _multiplying)
    except MemoryError:
        return device.read, device.rates["f32"]
    return Measured(read, "measured"), Measured(flops, "measured")


# ---- measuring ---------------------------------------------------------------------
Work = Callable[[], float]


def _reading(size: int) -> Work:
    data = np.ones(max(size, 1), np.int8)

    def work() -> float:
        data.max()  # of bytes: the numpy reduction that memory, not arithmetic, limits
        return float(data.nbytes)

    return work


def _multiplying() -> Work:
    a, b, out = (np.ones((MATRIX, MATRIX), np.float32) for _ in range(3))

    def work() -> float:
        np.matmul(a, b, out=out)
        return 2.0 * MATRIX**3

    return work


def _per_second(threads: int, seconds: float, prepare: Callable[[], Work]) -> float:
    """Units of work per second that this many threads do together."""
    works = [prepare() for _ in range(threads)]  # here, so that no thread waits for one that lacked memory
    together = threading.Barrier(threads)

    def run(work: Work) -> float:
        work()
        together.wait()
        begin, done = time.perf_counter(), 0.0
        while (elapsed := time.perf_counter() - begin) < seconds or not done:
            done += work()
        return done / elapsed

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(run, works))


# ---- processor ---------------------------------------------------------------------
def _describe(root: Path) -> dict[str, str]:
    """The first processor of /proc/cpuinfo: key → value."""
    fields: dict[str, str] = {}
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, colon, value = line.partition(":")
        if not colon:
            if fields:
                break
            continue
        fields[key.strip()] = value.strip()
    return fields


def _features(flags: str) -> tuple[str, ...]:
    has = {"neon" if flag == "asimd" else flag for flag in flags.split()}
    return tuple(f for f in FEATURES if f in has)


def usable_cpus() -> frozenset[int]:
    """Logical processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cores_of(cpus: frozenset[int], root: Path = ROOT) -> int:
    """Physical cores under the usable processors, at most what the control group's quota pays for."""
    topology = (root / f"sys/devices/system/cpu/cpu{n}/topology" for n in cpus)
    siblings = [_text(folder / "thread_siblings_list").strip() for folder in topology]
    if all(siblings):
        cores = len(set(siblings))
    else:
        cores = min(len(cpus), psutil.cpu_count(logical=False) or len(cpus))
    return max(1, min([cores, *(int(quota) for quota in _quotas(root))]))


def beyond_caches(root: Path = ROOT) -> int:
    """Bytes of which the caches under the usable processors keep little; 0 where nobody says how large they
    are."""
    found: dict[str, int] = {}
    for n in usable_cpus():
        for folder in (root / f"sys/devices/system/cpu/cpu{n}/cache").glob("index*"):
            size, shared = (_text(folder / name).strip() for name in ("size", "shared_cpu_list"))
            if _text(folder / "level").strip() == "3" and size.removesuffix("K").isdigit():
                found[shared] = int(size.removesuffix("K")) << 10
    return CACHES * sum(found.values())


def _assumed_flops(features: tuple[str, ...]) -> float:
    """Half of one core's float32 peak: 2 multiply-adds a cycle in its widest registers."""
    width = 16 if "avx512f" in features else 8 if "avx2" in features else 4
    return 0.5 * 4 * width * _clock()


def _clock() -> float:
    """Cycles per second; 2 GHz where nobody says."""
    try:
        frequency = psutil.cpu_freq()
    except (OSError, RuntimeError, NotImplementedError, AttributeError):
        frequency = None
    megahertz = (frequency.max or frequency.current) if frequency else 0
    return megahertz * 1e6 or 2e9


def _load(cpus: int) -> float | None:
    """Share of the processors busy over the last minute, this process included."""
    try:
        return min(1.0, psutil.getloadavg()[0] / cpus)
    except (OSError, AttributeError):
        return None


# ---- memory and control groups -----------------------------------------------------
def _memory(root: Path) -> tuple[int, int]:
    """Bytes this process may have, and bytes free of them now."""
    system = psutil.virtual_memory()
    total, free = system.total, system.available
    for limit, current in memory_limits(root):
        used = _number(current.parent, current.name) or 0.0
        total = min(total, limit)
        gives_way = reclaimable(_text(current.with_name("memory.stat")))
        free = min(free, max(0, int(limit - used + gives_way)))
    return total, free


def memory_limits(root: Path = ROOT) -> list[tuple[int, Path]]:
    """(bytes, the file that says how many are used) of every control group that limits this process."""
    total, found = psutil.virtual_memory().total, []
    for folder in _groups(root, "memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is not None and limit < total:
            version2 = (folder / "memory.max").exists()
            found.append((int(limit), folder / ("memory.current" if version2 else "memory.usage_in_bytes")))
    return found


def reclaimable(stat: str) -> int:
    """Bytes of file cache that count as used but give way, from the text of a memory.stat."""
    pairs = (line.split() for line in stat.splitlines())
    found = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    return int(found.get("total_inactive_file") or found.get("inactive_file") or 0)


def _quotas(root: Path) -> Iterator[float]:
    """Processors' worth of time that each enclosing control group allows."""
    for folder in _groups(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")  # version 2: "150000 100000"
        quota = quota or _text(folder / "cpu.cfs_quota_us").strip()
        period = period or _text(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and those around it, versions 1 and 2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        inner = Path(path.strip().lstrip("/"))
        # inside a container the path may be the host's; the container's own group is then the base
        yield from (base / folder for folder in (inner, *inner.parents) if (base / folder).is_dir())


def _number(folder: Path, *names: str) -> float | None:
    """The first of these files that holds a number."""
    for name in names:
        text = _text(folder / name).strip()
        if text.isdigit():
            return float(text)
    return None


def _text(path: Path) -> str:
    """The file's text, "" where it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
