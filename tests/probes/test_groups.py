"""Groups of cores as devices: their ids, what they may overlap with, and who gets how much memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flashrt.errors import PlanError
from flashrt.machine import Device, Measured
from flashrt.probes import groups, host
from tests.probes.test_host import siblings, tree

WHOLE = Device(
    "cpu:0", "cpu", "Some CPU", 1000, Measured(8e9, "measured"), {"f32": Measured(8e10, "measured")},
    Measured(2.0, "assumed"), cores=4, features=("avx512_vnni",), load=0.5, pool=host.POOL,
)  # fmt: skip


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use the logical processors 0 to 5 and 7."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5, 7}, raising=False)


def made(*ids: str) -> list[Device]:
    nowhere = Path("/nonexistent")  # every logical processor is a core
    return [WHOLE if id == "cpu:0" else groups.group(WHOLE, id, {}, nowhere) for id in ids]


@pytest.mark.parametrize(
    ("id", "cpus"),
    [("cpu:0-0", (0,)), ("cpu:2-4", (2, 3, 4)), ("cpu:0", None), ("cpu:1", None), ("gpu:0-1", None),
     ("cpu:-1", None), ("cpu:0-", None), ("cpu:0-1-2", None), ("cpu:0-9999999", None), ("cpu:a-b", None)],
)  # fmt: skip
def test_ids(id: str, cpus: tuple[int, ...] | None) -> None:
    assert groups.processors(id) == cpus


def test_a_range_that_runs_backwards() -> None:
    with pytest.raises(PlanError, match=r"runs backwards\nwrite cpu:1-3"):
        groups.processors("cpu:3-1")


def test_a_group_is_its_share_of_the_host(tmp_path: Path) -> None:
    """Two threads of a core are one core; what wasn't measured of the group is assumed from the host's."""
    root = tree(tmp_path, siblings(4))  # 0 and 4 are one core, 1 and 5, …
    part = groups.group(WHOLE, "cpu:0-1", {}, root)
    assert (part.id, part.cpus, part.cores, part.pool) == ("cpu:0-1", (0, 1), 2, host.POOL)
    assert part.read == Measured(4e9, "assumed")
    assert (part.rates["f32"], part.rates["i8"]) == (Measured(4e10, "assumed"), Measured(16e10, "assumed"))
    assert (part.memory, part.load) == (WHOLE.memory, None)
    assert groups.group(WHOLE, "cpu:0-5", {}, root).cores == 4
    own = {"read": Measured(5e9, "measured"), "i8": Measured(7e10, "measured")}
    part = groups.group(WHOLE, "cpu:0-1", own, root)
    assert (part.read, part.rates["i8"], part.rates["f32"].how) == (own["read"], own["i8"], "assumed")


def test_a_group_has_its_share_of_what_products_read(tmp_path: Path) -> None:
    root, whole = tree(tmp_path, siblings(4)), replace(WHOLE, gemv=Measured(6e9, "measured"))
    assert groups.group(WHOLE, "cpu:0-1", {}, root).gemv is None
    assert groups.group(whole, "cpu:0-1", {}, root).gemv == Measured(3e9, "assumed")
    own = Measured(4e9, "measured")
    assert groups.group(whole, "cpu:0-1", {"gemv": own}, root).gemv == own


def test_cores_that_are_not_ours() -> None:
    with pytest.raises(PlanError, match="may not use core 6,8-9\nit may use 0-5,7"):
        groups.group(WHOLE, "cpu:5-9", {})


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (("cpu:0-1", "cpu:1-2"), "'cpu:0-1' and 'cpu:1-2' overlap: both would use core 1"),
        (("cpu:0", "cpu:1-2"), "'cpu:0' and 'cpu:1-2' overlap: both would use core 1-2"),
        (("cpu:0-1", "cpu:0-1"), "'cpu:0-1' is named twice"),
        (("cpu:0", "cpu:0"), "'cpu:0' is named twice"),
    ],
)
def test_overlap(ids: tuple[str, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        groups.check(made(*ids))


def test_no_overlap() -> None:
    groups.check(made("cpu:0-1", "cpu:2-3", "cpu:7-7"))
    groups.check([WHOLE, replace(WHOLE, id="reference:0", kind="reference")])


def test_groups_share_the_memory_by_cores() -> None:
    """What they are promised together is what one device would be, and a given budget comes first."""
    assert [d.limit for d in groups.limited(made("cpu:0"), {})] == [None]
    assert [d.budget for d in groups.limited(made("cpu:0-0", "cpu:1-3"), {})] == [225, 675]
    assert [d.budget for d in groups.limited(made("cpu:0-0", "cpu:1-3"), {"cpu:1-3": 800})] == [100, 800]
    both = {"cpu:0-0": 1, "cpu:1-3": 999}
    assert [d.budget for d in groups.limited(made("cpu:0-0", "cpu:1-3"), both)] == [1, 999]


@pytest.mark.parametrize(
    ("budgets", "words"),
    [
        ({"gpu:0": 1}, "a budget for 'gpu:0', which isn't in use\ndevices in use: cpu:0-0, cpu:1-3"),
        ({"cpu:0-0": 0}, "a budget of 0 bytes for cpu:0-0"),
        ({"cpu:0-0": -5}, "a budget of -5 bytes"),
        ({"cpu:0-0": 1001}, "a budget of 1001 bytes for cpu:0-0, which has 1000"),
        ({"cpu:0-0": 600, "cpu:1-3": 600}, "come to 1200 bytes, the memory they share has 1000"),
        ({"cpu:0-0": 950}, "leave no memory for cpu:1-3"),
    ],
)
def test_budgets_that_cannot_be(budgets: dict[str, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        groups.limited(made("cpu:0-0", "cpu:1-3"), budgets)


def test_ranges() -> None:
    assert groups.ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert groups.ranges([]) == ""
