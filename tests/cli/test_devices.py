"""`flashrt devices` and `flash-diagnose`, `--devices` and `--budget`: what is shown and what is refused."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from flashrt import engine
from flashrt.cli.options import budgets_of, device_ids
from flashrt.errors import RequestError
from flashrt.machine import Measured, from_json
from flashrt.probes import snapshot
from tests.cli.calling import call, diagnose, done, refused

CPUS = sorted(os.sched_getaffinity(0))
PAIR = f"cpu:{CPUS[0]}-{CPUS[0]},cpu:{CPUS[-1]}-{CPUS[-1]}"
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="one core only")


def test_a_person_sees_how_each_figure_is_known() -> None:
    result = done("devices")
    for words in ("cpu:0", "(assumed)", "onnxruntime", "stands in for an NPU", "disks", "features"):
        assert words in result.stdout
    assert "flashrt devices --measure" in result.stderr


def test_json_is_a_machine_picture_and_more() -> None:
    text = done("devices", "--json").stdout
    assert from_json(text).device("cpu:0").kernels
    raw = json.loads(text)
    assert raw["providers"]["providers"] and isinstance(raw["disks"], list)
    assert raw["gpus"]["reason"] or raw["gpus"]["gpus"]


@needs_two
def test_core_groups_have_budgets_and_links() -> None:
    first, second = PAIR.split(",")
    raw = json.loads(done("devices", "--devices", PAIR, "--budget", f"{first}=64MiB", "--json").stdout)
    one, two = raw["devices"][:2]
    assert (one["id"], one["cpus"], one["limit"]) == (first, [CPUS[0]], 64 << 20)
    assert two["limit"] == two["memory"] * 9 // 10 - (64 << 20)
    assert {(x["src"], x["dst"]) for x in raw["links"]} >= {(first, second), (second, first)}
    text = done("devices", "--device", first, "--device", second).stdout
    assert f"{first} → {second}" in text and "a plan may use" in text


def test_ages_and_staleness() -> None:
    path = snapshot.remember({f"cpu:0/{x}": Measured(9e9, "measured") for x in ("read", "f32", "i8", "bf16")})
    assert "measured just now" in done("devices").stdout
    kept = json.loads(path.read_text())
    old = dict.fromkeys(kept["rates"], time.time() - 40 * 86400)
    path.write_text(json.dumps({**kept, "at": old}))
    result = done("devices")
    assert "measured 40 days ago: stale" in result.stdout
    assert "measured long ago" in result.stderr


def test_what_products_read_is_shown_once_it_is_measured() -> None:
    assert "of one token read" not in done("devices").stdout
    snapshot.remember({"cpu:0/gemv": Measured(7.5e9, "measured")})
    assert "of one token read 7.5 GB/s of weights (measured just now)" in done("devices").stdout
    assert from_json(done("devices", "--json").stdout).device("cpu:0").gemv == Measured(7.5e9, "measured")


def test_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is shown; what couldn't be is told."""

    def measured(ids: tuple[str, ...], **_: Any) -> tuple[str, ...]:
        snapshot.remember({f"{ids[0]}/read": Measured(12.3e9, "measured")})
        return ("the disk isn't measured: too little room",)

    monkeypatch.setattr(engine, "measure_devices", measured)
    result = done("devices", "--measure")
    assert "12.3 GB/s (measured just now)" in result.stdout
    assert "the disk isn't measured: too little room" in result.stderr


@pytest.mark.parametrize("command", ["devices", "explain", "compile"])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--device", "tpu:0"), "no device 'tpu:0' here"),
        (("--device", "cpu:9000-9001"), "may not use core 9000-9001"),
        (("--device", "cpu:3-1"), "runs backwards"),
        (("--device", f"cpu:0,cpu:{CPUS[0]}-{CPUS[0]}"), "overlap"),
        (("--device", "cpu:0", "--device", "cpu:0"), "named twice"),
        (("--devices", "cpu:0,,"), "no device '' here"),
        (("--budget", "cpu:0=0"), "a budget of 0 bytes"),
        (("--budget", "cpu:0=-5GiB"), "a budget of -"),
        (("--budget", "cpu:0=900TiB"), "which has"),
        (("--budget", "gpu:7=1GiB"), "isn't in use"),
        (("--budget", "cpu:0=much"), "isn't DEVICE=SIZE"),
        (("--budget", "cpu:0=1GB", "--budget", "cpu:0=2GB"), "two budgets"),
    ],
)
def test_refused(command: str, args: tuple[str, ...], words: str, made: Path, tmp_path: Path) -> None:
    model = () if command == "devices" else (made / "tiny.logical",)
    output = ("-o", tmp_path / "plan") if command == "compile" else ()
    refused(call(command, *model, *args, *output), words)
    assert not (tmp_path / "plan").exists()


def test_a_budget_is_what_a_plan_may_use(made: Path) -> None:
    """It is the limit in the plan; with another budget the plan is another one."""
    tiny = str(made / "tiny.logical")
    for limit in (1 << 30, 1 << 29):
        given = ("--device", "reference:0", "--budget", f"reference:0={limit}")
        plan = json.loads(done("explain", tiny, *given, "--json").stdout)
        assert [b["limit"] for v in plan["variants"] for b in v["budgets"]] == [limit] * len(plan["variants"])


def test_a_budget_that_is_too_small(made: Path) -> None:
    given = ("--device", "reference:0", "--budget", "reference:0=100")
    refused(call("compile", made / "tiny.logical", *given), "reference:0")


def test_a_plan_is_past_choosing(plan: str) -> None:
    refused(call("run", plan, "-p", "x", "--budget", "reference:0=1GiB"), "--budget")


@pytest.mark.parametrize(
    ("text", "bytes"),
    [
        ("1024", 1024),
        ("1kB", 1000),
        ("1.5KiB", 1536),
        ("6GiB", 6 << 30),
        ("2gb", 2 * 10**9),
        ("1 TB", 10**12),
    ],
)
def test_sizes(text: str, bytes: int) -> None:
    assert budgets_of([f"cpu:0-3={text}"]) == {"cpu:0-3": bytes}


def test_lists() -> None:
    assert device_ids(None) == ("cpu:0",)
    assert device_ids(["cpu:0-1, cpu:2-3", "null:0"]) == ("cpu:0-1", "cpu:2-3", "null:0")
    assert budgets_of(["a=1,b=2", "c=3"]) == {"a": 1, "b": 2, "c": 3}
    with pytest.raises(RequestError):
        budgets_of([""])


# ---- flash-diagnose ----------------------------------------------------------------
def test_diagnosis(tmp_path: Path) -> None:
    result = diagnose("--html", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    for words in ("environment", "PASS", "huge pages", "NVIDIA driver", "→ flashrt devices --measure"):
        assert words in result.stdout
    assert "flash-diagnose" in (tmp_path / "page.html").read_text()


def test_diagnosis_as_json() -> None:
    facts = json.loads(diagnose("--json").stdout)
    assert facts["failed"] is False
    assert {c["verdict"] for c in facts["checks"]} <= {"PASS", "WARN", "FAIL", "SKIP"}


def test_a_fault_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path / "file"))
    result = diagnose()
    assert result.exit_code == 1
    assert "FAIL" in result.stdout and "set FLASHRT_CACHE" in result.stdout


def test_what_diagnose_refuses(tmp_path: Path) -> None:
    refused(diagnose("--device", "tpu:0"), "no device 'tpu:0'")
    refused(diagnose("--html", tmp_path / "no" / "folder.html"), "can't be written")
