"""Measured rates outlive the process, for the machine they were measured on."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flashrt.errors import KnobError
from flashrt.machine import Measured
from flashrt.probes import host, snapshot

RATES = {"cpu:0/read": Measured(7e9, "measured"), "cpu:0/f32": Measured(9e10, "measured")}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_picture_of_the_host() -> None:
    before = time.time()
    machine = snapshot.snapshot()
    assert [d.id for d in machine.devices] == ["cpu:0"]
    assert machine.links == ()
    assert before <= machine.taken_at <= time.time()
    assert machine.device("cpu:0").read.how == "assumed"


def test_given_rates() -> None:
    device = snapshot.snapshot(measured={**RATES, "gpu:0/read": Measured(1e12, "measured")}).device("cpu:0")
    assert (device.read, device.rates["f32"]) == tuple(RATES.values())


def test_remembered_rates(cache: Path) -> None:
    """They come back into later pictures, with their age, and can be declined."""
    path = snapshot.remember(RATES)
    assert path.parent.parent == cache
    recalled = snapshot.recall()
    assert recalled is not None
    assert recalled.rates == RATES
    assert 0 <= recalled.age < 60
    assert snapshot.snapshot().device("cpu:0").read == RATES["cpu:0/read"]
    assert snapshot.snapshot(measured={}).device("cpu:0").read.how == "assumed"


def test_what_products_read_is_remembered() -> None:
    snapshot.remember({**RATES, "cpu:0/gemv": Measured(5e9, "measured")})
    assert snapshot.snapshot().device("cpu:0").gemv == Measured(5e9, "measured")
    assert snapshot.snapshot(measured=RATES).device("cpu:0").gemv is None


def test_rates_leave_the_fingerprint_alone() -> None:
    assert snapshot.snapshot(measured={}).fingerprint() == snapshot.snapshot(measured=RATES).fingerprint()


def test_age(tmp_path: Path) -> None:
    path = snapshot.remember(RATES, folder=tmp_path)
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "taken_at": kept["taken_at"] - 3600}))
    recalled = snapshot.recall(folder=tmp_path)
    assert recalled is not None
    assert 3600 <= recalled.age < 3660


def test_another_machine_has_its_own(tmp_path: Path) -> None:
    here = host.host()
    other = replace(here, cores=here.cores + 1)
    snapshot.remember(RATES, device=other, folder=tmp_path)
    assert snapshot.recall(here, folder=tmp_path) is None
    assert snapshot.recall(other, folder=tmp_path) is not None


def test_assumed_rates_are_not_kept(tmp_path: Path) -> None:
    snapshot.remember({**RATES, "cpu:0/read": Measured(1.0, "assumed")}, folder=tmp_path)
    recalled = snapshot.recall(folder=tmp_path)
    assert recalled is not None
    assert recalled.rates == {"cpu:0/f32": RATES["cpu:0/f32"]}


def test_rates_are_kept_beside_earlier_ones_and_aged_one_by_one(tmp_path: Path) -> None:
    path = snapshot.remember({"cpu:0/read": RATES["cpu:0/read"]}, folder=tmp_path)
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "at": {"cpu:0/read": kept["taken_at"] - 3600}}))
    snapshot.remember({"cpu:0/f32": RATES["cpu:0/f32"], "cpu:0-1/read": RATES["cpu:0/read"]}, folder=tmp_path)
    recalled = snapshot.recall(folder=tmp_path)
    assert recalled is not None
    assert recalled.rates == {**RATES, "cpu:0-1/read": RATES["cpu:0/read"]}
    assert 3600 <= recalled.ages["cpu:0/read"] < 3660
    assert recalled.ages["cpu:0/f32"] < 60 and recalled.age < 60
    assert snapshot.own_rates("cpu:0-1", recalled.rates) == {"read": RATES["cpu:0/read"]}


def test_a_core_group_has_its_own_rates() -> None:
    snapshot.remember({**RATES, "cpu:0-0/read": Measured(3e9, "measured")})
    group = snapshot.core_group(snapshot.snapshot(), "cpu:0-0")
    assert group.read == Measured(3e9, "measured")
    assert group.rates["f32"].how == "assumed"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"taken_at": 1, "rates": {"a": "b"}}', '{"taken_at": 1, "rates": {"a": -1}}',
     '{"taken_at": 1, "rates": {"a": NaN}}', '{"taken_at": null, "rates": {}}'],
)  # fmt: skip
def test_a_damaged_file_is_as_none(text: str, tmp_path: Path) -> None:
    snapshot.remember(RATES, folder=tmp_path).write_text(text)
    assert snapshot.recall(folder=tmp_path) is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KnobError, match="FLASHRT_CACHE"):
        snapshot.remember(RATES, folder=tmp_path / "file")


def test_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WORKING_SET", 1 << 20)
    measured = snapshot.measure(0.02)
    assert measured.keys() == RATES.keys()
    snapshot.remember(measured)
    recalled = snapshot.recall()
    assert recalled is not None
    assert recalled.rates == measured
