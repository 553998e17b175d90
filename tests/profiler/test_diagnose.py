"""Verdicts on pretend machines: what passes, what is slow, what must be repaired, what isn't known."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from flashrt.machine import Device, Link, Machine, Measured
from flashrt.probes.disk import Disk
from flashrt.probes.npu import CPU, Chip, Provider, Providers
from flashrt.probes.nvidia import Gpu, Gpus, Process
from flashrt.probes.snapshot import STALE
from flashrt.probes.survey import Survey
from flashrt.probes.system import Node, System
from flashrt.profiler import diagnose as module
from flashrt.profiler.diagnose import Check, Subject, diagnose, failed
from flashrt.profiler.page import page

SEEN = Measured(2e10, "measured")
DEVICE = Device(
    "cpu:0", "cpu", "Some <CPU>", 10**10, SEEN, {"f32": SEEN, "bf16": SEEN}, SEEN, cores=4,
    kernels=(("linear.q8.16x32", "act=bf16 acc=f32"),), features=("avx2", "amx_bf16"),
    free=8 * 10**9, load=0.1, pool="host",
)  # fmt: skip
SYSTEM = System(
    os="Linux 6", python="CPython 3.12", packages=tuple((n, "1") for n in module.NEEDED + module.TO_COMPILE),
    container="", memlock=None, huge_pages="madvise", reserved=0, nodes=(Node(0, "0-3", 1, 1),),
    governor="performance", cpus="0-3", siblings=(), caches=(), swap=0, pressure=0.0,
)  # fmt: skip
DISK = Disk("/", "/dev/sda1", "ext4", 10**12, 10**11, False, False)
GPU = Gpu("gpu:0", name="Fake 100", memory=1, width=16, max_width=16, throttle=(), processes=())
PLAIN = Provider(CPU, "cpu", "onnxruntime", "1.2", "plain CPU: a stand-in")


def subject(**changes: Any) -> Subject:
    """A machine where all is well but for the changes: fields of device, system or survey, or a cache's."""
    device = replace(DEVICE, **{k: v for k, v in changes.items() if k in Device.__slots__})
    system = replace(SYSTEM, **{k: v for k, v in changes.items() if k in System.__slots__})
    survey = Survey(Machine((device,)), {}, Gpus((GPU,), "580", "13.0"), Providers((PLAIN,)), (DISK,), system)
    survey = replace(survey, **{k: v for k, v in changes.items() if k in Survey.__slots__})
    return Subject(
        survey, "/cache", changes.get("cache_problem", ""), survey.disks[0] if survey.disks else None
    )


def found(name: str, **changes: Any) -> list[Check]:
    return [c for c in diagnose(subject(**changes)) if c.name == name]


def test_all_is_well() -> None:
    checks = diagnose(subject())
    assert {c.verdict for c in checks} == {"PASS"}
    assert not failed(checks) and not any(c.repair for c in checks)
    assert {c.area for c in checks} == set(module.CHECKS)


def gpus(**changes: Any) -> dict[str, Any]:
    return {"gpus": Gpus((replace(GPU, **changes),))}


LOST = Gpu("gpu:1", reasons={"device": "GPU is lost"})
BARE = tuple((name, "" if name == "numba" else "1") for name in module.NEEDED)
GUESSED = Link("a", "b", Measured(1.0, "assumed"), SEEN)
IDLE_CHIP = Providers((PLAIN,), (Chip("Intel NPU", "/dev/accel0", "x"),))
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("packages", "FAIL", "missing: numba", {"packages": BARE}),
    ("packages", "WARN", "can't be compiled", {"packages": tuple((n, "1") for n in module.NEEDED)}),
    ("cache", "FAIL", "Read-only", {"cache_problem": "Read-only file system"}),
    ("features", "WARN", "plain code", {"features": ("sse4_1",)}),
    ("features", "WARN", "not for this process", {"kernels": (("linear.f32", "act=f32 acc=f32"),)}),
    ("kernels", "FAIL", "no kernel", {"kernels": ()}),
    ("frequency", "WARN", "powersave", {"governor": "performance, powersave"}),
    ("frequency", "SKIP", "doesn't tell", {"governor": ""}),
    ("load", "WARN", "90%", {"load": 0.9}),
    ("load", "SKIP", "no load", {"load": None}),
    ("free", "WARN", "1.0 of 10.0", {"free": 10**9}),
    ("free", "SKIP", "isn't known", {"free": None}),
    ("locking", "WARN", "may lock 8 MiB", {"memlock": 8 << 20, "swap": 10**9}),
    ("locking", "PASS", "no swap", {"memlock": 8 << 20}),
    ("huge pages", "WARN", "off", {"huge_pages": "never"}),
    ("huge pages", "SKIP", "doesn't tell", {"huge_pages": ""}),
    ("NUMA", "WARN", "node 1: 4-7", {"nodes": (Node(0, "0-3", 1, 1), Node(1, "4-7", 1, 1))}),
    ("NUMA", "SKIP", "doesn't tell", {"nodes": ()}),
    ("disk", "FAIL", "holds the cache", {"disks": (replace(DISK, free=10**6),)}),
    ("disk", "WARN", "holds the cache", {"disks": (replace(DISK, remote=True),)}),
    ("disk", "SKIP", "mounted", {"disks": ()}),
    ("NVIDIA driver", "SKIP", "no NVML", {"gpus": Gpus(reason="no NVML")}),
    ("NVIDIA driver", "FAIL", "mismatch", {"gpus": Gpus(reason="driver/library version mismatch")}),
    ("NVIDIA driver", "FAIL", "Uninit", {"gpus": Gpus((LOST,), reason="Uninitialized")}),
    ("GPU", "FAIL", "GPU is lost", {"gpus": Gpus((LOST,))}),
    ("GPU", "WARN", "x4 of x16", gpus(width=4)),
    ("GPU", "SKIP", "no permission", gpus(width=None, reasons={"width": "no permission"})),
    ("GPU", "WARN", "hardware thermal", gpus(throttle=("hardware thermal", "power cap"))),
    ("GPU", "SKIP", "clocks", gpus(throttle=None)),
    ("GPU", "WARN", "in use by 7", gpus(processes=(Process(7, 1),))),
    ("providers", "WARN", "missing", {"providers": Providers(reason="onnxruntime is missing")}),
    ("providers", "WARN", "Intel NPU", {"providers": IDLE_CHIP}),
    ("device", "WARN", "only assumed: f32", {"rates": {"f32": Measured(1.0, "assumed")}}),
    (
        "device",
        "PASS",
        "reads",
        {"rates": {"f32": Measured(1e12, "measured"), "fp8": Measured(1e12, "assumed")}},
    ),
    ("device", "WARN", "only assumed: gemv", {"gemv": Measured(1e10, "assumed")}),
    ("device", "WARN", "long ago", {"ages": {"cpu:0/read": STALE + 1}}),
    ("device", "WARN", "products of one token 20.0 GB/s", {"gemv": SEEN, "ages": {"cpu:0/gemv": STALE + 1}}),
    ("device", "WARN", "memory is slow", {"read": Measured(1e9, "measured")}),
    ("link", "WARN", "assumed", {"machine": Machine((DEVICE,), (GUESSED,))}),
]


@pytest.mark.parametrize(("name", "verdict", "words", "changes"), CASES)
def test_a_fault(name: str, verdict: str, words: str, changes: dict[str, Any]) -> None:
    """It is named where it belongs, with a repair, and nothing else changes its verdict for the worse."""
    of_it = [c for c in found(name, **changes) if c.verdict == verdict]
    assert len(of_it) == 1 and words in of_it[0].found
    assert bool(of_it[0].repair) == (verdict in ("WARN", "FAIL"))
    assert failed(found(name, **changes)) == (verdict == "FAIL")


def test_every_check_can_fail_or_warn() -> None:
    """Each check but the two that only tell has a case above."""
    names = {name for checks in module.CHECKS.values() for name, _ in checks}
    assert names - {"system", "cores"} == {name for name, *_ in CASES}


def test_numa_repair_names_devices() -> None:
    (check,) = found("NUMA", nodes=(Node(0, "0-3,8-11", 1, 1), Node(1, "4-7", 1, 1)))
    assert "--devices cpu:0-3,cpu:4-7" in check.repair


class Reader(HTMLParser):
    """What a browser would load from elsewhere, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {k}" for k, v in attrs if k in ("src", "href")] + [tag] * (tag == "script")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_else() -> None:
    checks = diagnose(subject(load=0.9, governor="<b>&"))
    text = page(checks, title=DEVICE.name, when="today")
    reader = Reader()
    reader.feed(text)
    assert reader.loads == [] and "url(" not in text
    for check in checks:
        assert check.found in reader.text and check.repair in reader.text
    assert "1 WARN" in reader.text and "0 FAIL" in reader.text and DEVICE.name in reader.text
