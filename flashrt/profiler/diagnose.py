"""What about this machine keeps flashrt from its speed, or from running: a list of checks with repairs.

Each check is a function of what the probes found, so that any machine can be judged anywhere. What
isn't known is neither good nor bad: it is skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from flashrt.machine import Device
    from flashrt.probes.disk import Disk
    from flashrt.probes.nvidia import Gpu
    from flashrt.probes.survey import Survey

Verdict = Literal["PASS", "WARN", "FAIL", "SKIP"]

NEEDED = ("numpy", "numba", "llvmlite", "onnxruntime")
TO_COMPILE = ("torch", "transformers")
GB = 10**9
SLOW_MEMORY = 5e9  # bytes per second: less than one channel of DDR3
BUSY = 0.5  # share of the processors that others may use before it matters
HARD_THROTTLES = {"hardware slowdown", "hardware thermal", "software thermal", "power brake"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line. found: what is. repair: what to do about it; "" where nothing needs doing."""

    area: str
    name: str
    verdict: Verdict
    found: str
    repair: str = ""


Found = tuple[Verdict, str, str]  # verdict, found, repair


@dataclass(frozen=True, slots=True)
class Subject:
    """What is judged. cache: the folder of the cache; cache_problem: why it can't be written, or "".
    cache_disk: the disk that it lies on."""

    survey: Survey
    cache: str
    cache_problem: str
    cache_disk: Disk | None

    @property
    def cpu(self) -> Device:
        """The host's processor, or a group of its cores."""
        return self.survey.machine.devices[0]


def diagnose(subject: Subject) -> list[Check]:
    """Every check, in the order of the page."""
    return [
        Check(area, name, verdict, found, repair)
        for area, checks in CHECKS.items()
        for name, check in checks
        for verdict, found, repair in check(subject)
    ]


def failed(checks: list[Check]) -> bool:
    """Whether something must be repaired before flashrt can be relied on here."""
    return any(check.verdict == "FAIL" for check in checks)


# ---- environment -------------------------------------------------------------------
def _packages(subject: Subject) -> Iterator[Found]:
    versions = dict(subject.survey.system.packages)
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lacking = [name for name in NEEDED if not versions.get(name)]
    tracers = [name for name in TO_COMPILE if not versions.get(name)]
    if lacking:
        yield "FAIL", f"missing: {', '.join(lacking)}; here: {known}", "pip install flashrt"
    elif tracers:
        yield (
            "WARN",
            f"{', '.join(tracers)} missing: plans run, models can't be compiled",
            "pip install flashrt",
        )
    else:
        yield "PASS", known, ""


def _system(subject: Subject) -> Iterator[Found]:
    system = subject.survey.system
    inside = f", in a container ({system.container})" if system.container else ""
    yield "PASS", f"{system.os}, {system.python}{inside}", ""


def _cache(subject: Subject) -> Iterator[Found]:
    if subject.cache_problem:
        yield "FAIL", f"{subject.cache}: {subject.cache_problem}", "set FLASHRT_CACHE to a folder of yours"
    else:
        yield "PASS", f"{subject.cache} can be written", ""


# ---- processor ---------------------------------------------------------------------
def _features(subject: Subject) -> Iterator[Found]:
    has = set(subject.cpu.features)
    known = " ".join(subject.cpu.features) or "none known"
    if not has & {"avx2", "avx512f", "neon"}:
        yield (
            "WARN",
            f"{known}: without AVX2 or NEON kernels are plain code",
            "use a newer processor, or let the virtual machine see the host's (QEMU: -cpu host)",
        )
    elif "amx_bf16" in has and not _has_numerics(subject.cpu, "act=bf16"):
        yield (
            "WARN",
            f"{known}: AMX is there, but not for this process",
            "Linux 5.16 or newer, and a hypervisor and seccomp profile that let arch_prctl through",
        )
    else:
        yield "PASS", known, ""


def _has_numerics(device: Device, what: str) -> bool:
    return any(what in numerics for _, numerics in device.kernels)


def _kernels(subject: Subject) -> Iterator[Found]:
    count = len(subject.cpu.kernels)
    if count:
        yield "PASS", f"{count} kernels for {subject.cpu.name}", ""
    else:
        yield "FAIL", "no kernel runs on this processor", "install numba: pip install flashrt"


def _cores(subject: Subject) -> Iterator[Found]:
    system = subject.survey.system
    own = [d for d in subject.survey.machine.devices if d.kind == "cpu"]
    teams = ", ".join(f"{d.id} has {d.cores} core{'s' * (d.cores > 1)}" for d in own)
    threads = f", {len(system.siblings)} cores run several threads" if system.siblings else ""
    yield "PASS", f"{teams}; this process may use logical processors {system.cpus}{threads}", ""


def _governor(subject: Subject) -> Iterator[Found]:
    governor = subject.survey.system.governor
    if not governor:
        yield "SKIP", "the system doesn't tell its frequency policy (usual in virtual machines)", ""
    elif {"powersave", "conservative"} & set(governor.split(", ")):
        yield "WARN", governor, "sudo cpupower frequency-set -g performance"
    else:
        yield "PASS", governor, ""


def _busy(subject: Subject) -> Iterator[Found]:
    load = subject.cpu.load
    if load is None:
        yield "SKIP", "no load average for this device", ""
    elif load > BUSY:
        repair = "end what else runs; `flash-diagnose` again a minute later"
        yield "WARN", f"{load:.0%} busy in the last minute", repair
    else:
        yield "PASS", f"{load:.0%} busy in the last minute", ""


# ---- memory ------------------------------------------------------------------------
def _free(subject: Subject) -> Iterator[Found]:
    cpu = subject.cpu
    if cpu.free is None:
        yield "SKIP", f"{cpu.memory / GB:.1f} GB; how much is free isn't known", ""
    elif cpu.free < cpu.memory // 5:
        yield "WARN", f"{cpu.free / GB:.1f} of {cpu.memory / GB:.1f} GB free", "end what else holds memory"
    else:
        yield "PASS", f"{cpu.free / GB:.1f} of {cpu.memory / GB:.1f} GB free", ""


def _locked(subject: Subject) -> Iterator[Found]:
    limit, swap = subject.survey.system.memlock, subject.survey.system.swap
    if limit is None:
        yield "PASS", "no limit", ""
    elif swap == 0:
        yield "PASS", f"limit {limit / 2**20:.0f} MiB, but there is no swap: memory stays where it is", ""
    else:
        yield (
            "WARN",
            f"a process may lock {limit / 2**20:.0f} MiB: weights can be swapped out",
            (
                "ulimit -l unlimited, or 'memlock unlimited' in /etc/security/limits.conf; "
                "in containers --ulimit memlock=-1"
            ),
        )


def _huge_pages(subject: Subject) -> Iterator[Found]:
    how = subject.survey.system.huge_pages
    if not how:
        yield "SKIP", "the system doesn't tell", ""
    elif how == "never":
        yield (
            "WARN",
            "off: weights are read through small pages, decode loses a third of its speed",
            ("echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"),
        )
    else:
        yield "PASS", f"transparent huge pages: {how}", ""


def _numa(subject: Subject) -> Iterator[Found]:
    nodes = [n for n in subject.survey.system.nodes if n.cpus]
    if not nodes:
        yield "SKIP", "the system doesn't tell", ""
    elif len(nodes) == 1:
        yield "PASS", "one node", ""
    else:
        listed = "; ".join(f"node {n.number}: {n.cpus}" for n in nodes)
        groups = ",".join(f"cpu:{n.cpus.split(',')[0]}" for n in nodes if "-" in n.cpus)
        yield (
            "WARN",
            listed,
            (
                f"a team that spans nodes reads far memory: make each node a device (--devices {groups}), "
                "or keep to one: numactl -N 0 -m 0"
            ),
        )


# ---- disks -------------------------------------------------------------------------
def _disks(subject: Subject) -> Iterator[Found]:
    if not subject.survey.disks:
        yield "SKIP", "the system doesn't tell what is mounted", ""
    for disk in subject.survey.disks:
        free = "" if disk.free is None else f", {disk.free / GB:.1f} GB free"
        kind = {True: "rotational, as the system says", False: "solid state", None: disk.reason}[
            disk.rotational
        ]
        found = f"{disk.mount}: {disk.device} {disk.filesystem}, {kind}{free}"
        holds = "holds the cache; " if disk is subject.cache_disk else ""
        if disk is subject.cache_disk and disk.free is not None and disk.free < GB // 5:
            yield "FAIL", f"{holds}{found}", "make room, or set FLASHRT_CACHE to a folder on another disk"
        elif disk is subject.cache_disk and disk.remote:
            yield "WARN", f"{holds}{found}", "set FLASHRT_CACHE to a folder on a local disk"
        else:
            yield "PASS", f"{holds}{found}", ""


# ---- drivers and providers ---------------------------------------------------------
def _driver(subject: Subject) -> Iterator[Found]:
    gpus = subject.survey.gpus
    if "mismatch" in gpus.reason.lower():
        yield "FAIL", gpus.reason, "the driver was updated under the running system: restart it"
    elif gpus.reason and any(gpu.lost for gpu in gpus.gpus):
        yield "FAIL", gpus.reason, "reload the NVIDIA driver, or restart the system"
    elif gpus.reason:
        yield "SKIP", gpus.reason, ""
    else:
        yield (
            "PASS",
            f"NVIDIA {gpus.driver or 'driver of unknown version'}, CUDA up to {gpus.cuda or '?'}",
            "",
        )


def _gpus(subject: Subject) -> Iterator[Found]:
    for gpu in subject.survey.gpus.gpus:
        yield from _gpu(gpu)


def _gpu(gpu: Gpu) -> Iterator[Found]:
    name = f"{gpu.id} {gpu.name or ''}".strip()
    if gpu.lost:
        yield "FAIL", f"{name}: {gpu.lost}", "look into `dmesg | grep -i xid`, then restart the system"
        return
    if gpu.width is None or gpu.max_width is None:
        yield "SKIP", f"{name}: link width {gpu.reasons.get('width', 'not known')}", ""
    elif gpu.width < gpu.max_width:
        found = f"{name}: PCIe x{gpu.width} of x{gpu.max_width}"
        yield (
            "WARN",
            found,
            "seat the card anew, in a slot wired for its width; look for bifurcation in the BIOS",
        )
    else:
        link = f"generation {gpu.generation} of {gpu.max_generation} (an idle link is slower)"
        yield "PASS", f"{name}: PCIe x{gpu.width}, {link}", ""
    if gpu.throttle is None:
        yield "SKIP", f"{name}: what holds its clocks back: {gpu.reasons.get('throttle', 'not known')}", ""
    elif held := HARD_THROTTLES & set(gpu.throttle):
        yield "WARN", f"{name}: held back by {', '.join(sorted(held))}", "look after cooling and power supply"
    else:
        yield "PASS", f"{name}: clocks held back by {', '.join(gpu.throttle) or 'nothing'}", ""
    if gpu.processes:
        pids = ", ".join(str(p.pid) for p in gpu.processes)
        yield "WARN", f"{name}: in use by {pids}", "end them, or leave them room: --budget"


def _providers(subject: Subject) -> Iterator[Found]:
    found = subject.survey.providers
    if found.reason:
        yield "WARN", found.reason, "pip install onnxruntime"
        return
    names = [f"{p.name} {p.version}" + (f" ({p.stand_in})" if p.stand_in else "") for p in found.providers]
    real = [p for p in found.providers if p.kind == "npu" and not p.stand_in]
    if found.chips and not real:
        chips = ", ".join(f"{c.name} ({c.node})" for c in found.chips)
        yield (
            "WARN",
            f"{chips} has no provider; here: {', '.join(names)}",
            (
                "install its maker's provider: onnxruntime-qnn (Qualcomm), onnxruntime-openvino (Intel), "
                "onnxruntime-vitisai (AMD)"
            ),
        )
    else:
        yield "PASS", ", ".join(names) or "none", ""


# ---- rates -------------------------------------------------------------------------
def _rates(subject: Subject) -> Iterator[Found]:
    survey = subject.survey
    measure = "flashrt devices --measure"
    for device in (d for d in survey.machine.devices if d.kind == "cpu"):
        figures = device.figures
        told = ", ".join(
            [f"{device.id}: reads {device.read.value / GB:.1f} GB/s"]
            + ([f"products of one token {device.gemv.value / GB:.1f} GB/s"] if device.gemv else [])
            + [f"{name} {rate.value / GB:,.0f} Gflop/s" for name, rate in device.rates.items()]
        )
        assumed = [n for n, rate in figures.items() if rate.how == "assumed" and device.measurable(n)]
        if assumed:
            yield "WARN", f"{told}; only assumed: {', '.join(assumed)}", measure
        elif any(survey.stale(f"{device.id}/{name}") for name in figures):
            yield "WARN", f"{told}; measured long ago", measure
        elif device.read.value < SLOW_MEMORY:
            yield (
                "WARN",
                f"{told}; memory is slow",
                "measure again when nothing else runs; fill all memory channels",
            )
        else:
            yield "PASS", told, ""


def _links(subject: Subject) -> Iterator[Found]:
    for link in subject.survey.machine.links:
        found = f"{link.src} → {link.dst}: {link.rate.value / GB:.1f} GB/s ({link.rate.how})"
        if link.rate.how == "assumed":
            yield "WARN", found, "flashrt devices --measure with the same --devices"
        else:
            yield "PASS", f"{found}, {link.latency.value:.1f} µs ({link.latency.how})", ""


CHECKS: dict[str, tuple[tuple[str, Callable[[Subject], Iterator[Found]]], ...]] = {
    "environment": (("system", _system), ("packages", _packages), ("cache", _cache)),
    "processor": (
        ("features", _features),
        ("kernels", _kernels),
        ("cores", _cores),
        ("frequency", _governor),
        ("load", _busy),
    ),
    "memory": (("free", _free), ("locking", _locked), ("huge pages", _huge_pages), ("NUMA", _numa)),
    "disks": (("disk", _disks),),
    "accelerators": (("NVIDIA driver", _driver), ("GPU", _gpus), ("providers", _providers)),
    "rates": (("device", _rates), ("link", _links)),
}
