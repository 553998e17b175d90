"""Measuring devices one after the other: what is kept, under which name, and what failed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from flashrt.machine import Machine, Measured
from flashrt.probes import disk, links, measuring, snapshot
from tests.probes.test_groups import WHOLE

FAST = Measured(1e9, "measured")


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(disk, "measure", lambda folder, seconds: (FAST, ""))
    monkeypatch.setattr(measuring, "_foreign", lambda spec: 0.0)


def measured_host(seconds: float) -> dict[str, Measured]:
    return {"cpu:0/read": FAST, "cpu:0/i8": FAST}


def test_the_host_and_the_disk(tmp_path: Path) -> None:
    steps: list[str] = []
    missing = measuring.measure(Machine((WHOLE,)), measured_host, folder=tmp_path, on_step=steps.append)
    assert (missing, steps) == ((), ["cpu:0", "disk"])
    assert snapshot.remembered() == {**measured_host(0), "disk>cpu:0/rate": FAST}


def test_core_groups_and_their_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = replace(WHOLE, id="cpu:0-1", cpus=(0, 1)), replace(WHOLE, id="cpu:2-3", cpus=(2, 3))
    apart = {"cpu:0-1/read": FAST}

    def confined(spec: object, seconds: float) -> dict[str, Measured]:
        if spec is b:
            raise OSError("no such core")
        return apart

    monkeypatch.setattr(measuring, "_measured_apart", confined)
    monkeypatch.setattr(links, "measure", lambda src, dst, seconds: {links.key(src.id, dst.id, "rate"): FAST})
    picture = Machine((a, b), links.between((a, b), {}))
    missing = measuring.measure(picture, measured_host, folder=tmp_path)
    assert "cpu:2-3 isn't measured: no such core" in missing and any(
        "cpu:0-1 to cpu:2-3" in m for m in missing
    )
    assert {"cpu:0-1/read", "cpu:0-1>cpu:2-3/rate", "cpu:2-3>cpu:0-1/rate"} <= snapshot.remembered().keys()
    assert "cpu:2-3/read" not in snapshot.remembered()


def test_company_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_foreign", lambda spec: 0.5)
    (remark,) = measuring.measure(Machine((WHOLE,)), measured_host, folder=tmp_path)
    assert "others kept cpu:0 50% busy" in remark


def test_a_disk_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "measure", lambda folder, seconds: (None, "too little room"))
    assert measuring.measure(Machine(()), measured_host, folder=tmp_path) == (
        "the disk isn't measured: too little room",
    )


def test_a_group_is_measured_in_a_process_that_has_only_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child says which cores it may use, under the group's name."""
    code = measuring._APART.partition("from flashrt")[0]
    said = 'print(json.dumps({"cpu:0/read": float(1 + sum(os.sched_getaffinity(0)))}))'
    monkeypatch.setattr(measuring, "_APART", code + said)
    cpu = max(os.sched_getaffinity(0))
    spec = replace(WHOLE, id=f"cpu:{cpu}-{cpu}", cpus=(cpu,))
    found = measuring._measured_apart(spec, 0.1)
    assert found == {f"cpu:{cpu}-{cpu}/read": Measured(1.0 + cpu, "measured")}


def test_a_child_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_APART", "raise SystemExit('out of cores')")
    with pytest.raises(OSError, match="out of cores"):
        measuring._measured_apart(replace(WHOLE, cpus=(0,)), 0.1)
