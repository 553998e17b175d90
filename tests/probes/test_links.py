"""Ways between devices: assumed within one memory, measured where somebody did."""

from __future__ import annotations

import os
from dataclasses import replace
from multiprocessing import shared_memory

import pytest

from flashrt.machine import Link, Measured
from flashrt.probes import links
from tests.probes.test_groups import WHOLE

A, B = replace(WHOLE, id="cpu:0-1", cpus=(0, 1)), replace(WHOLE, id="cpu:2-3", cpus=(2, 3))
GPU = replace(WHOLE, id="gpu:0", kind="gpu", pool="")


def test_devices_of_one_memory_copy_within_it() -> None:
    found = links.between((A, B, GPU), {})
    assert [(x.src, x.dst) for x in found] == [(A.id, B.id), (B.id, A.id)]
    assert {x.rate for x in found} == {Measured(4e9, "assumed")}
    assert {x.latency for x in found} == {Measured(links.LATENCY, "assumed")}
    assert links.between((A, GPU), {}) == ()


def test_measured_figures_are_taken() -> None:
    rate, late, disk = (Measured(x, "measured") for x in (5e9, 0.4, 2e9))
    known = {"cpu:0-1>cpu:2-3/rate": rate, "cpu:0-1>cpu:2-3/latency": late, "disk>cpu:0/rate": disk}
    there, back, *from_disk = links.between((A, B), known)
    assert there == Link(A.id, B.id, rate, late)
    assert back.rate.how == "assumed"
    assert [(x.src, x.dst, x.rate) for x in from_disk] == [("disk", A.id, disk), ("disk", B.id, disk)]


def test_measuring_between_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy has a rate, and a word comes back from the other core."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one core only")
    monkeypatch.setattr(links, "COPIED", 1 << 20)
    a, b = replace(A, cpus=(cpus[0],)), replace(B, cpus=(cpus[1],))
    late = links.key(a.id, b.id, "latency")
    # on a machine with other work a word may not come back in the first tries
    found = next(x for _ in range(20) if late in (x := links.measure(a, b, 0.1)))
    assert found[links.key(a.id, b.id, "rate")].value > 1e5
    assert 0.01 < found[late].value < 1e5
    assert os.sched_getaffinity(0) == set(cpus)


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(shared_memory, "SharedMemory", full)
    monkeypatch.setattr(links, "COPIED", 1 << 20)
    here = tuple(sorted(os.sched_getaffinity(0)))[:1]
    assert list(links.measure(replace(A, cpus=here), replace(B, cpus=here), 0.01)) == ["cpu:0-1>cpu:2-3/rate"]
