"""`flash-profiler` on the tiny model: what it prints adds up."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flashrt import program
from flashrt.runtime.trace import read_trace
from tests.cli.calling import profile, refused

ARGS = ("--prompt", "hello", "--max-tokens", "6")


def profiled(plan: str, *args: str) -> str:
    result = profile(plan, *ARGS, *args)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


@pytest.fixture(scope="module")
def facts(made: Path) -> Any:
    """The JSON of one run, by instruction."""
    result = profile(made / "plan", *ARGS, "--by", "instruction", "--format", "json")
    return json.loads(result.stdout)


def test_the_parts_add_up_to_the_wall_time(facts: Any) -> None:
    account = facts["account"]
    assert account["count"] == 6  # a step that reads the prompt, five that decode
    assert account["wall"] == pytest.approx(account["steps"] + account["between"])
    (lane,) = account["lanes"]
    assert lane["busy"] + lane["waiting"] + lane["rest"] == pytest.approx(account["steps"])
    assert lane["busy"] == pytest.approx(sum(r["total"] for r in facts["rows"]))
    assert lane["waiting"] == pytest.approx(sum(r["waiting"] for r in facts["rows"]))
    assert min(lane["busy"], lane["rest"], account["between"]) > 0


def test_every_instruction_is_there(facts: Any, plan: str) -> None:
    stream = program.load(Path(plan)).variants[0].stream
    assert sum(r["count"] for r in facts["rows"]) == 6 * len(stream.instrs)
    for row in facts["rows"]:
        assert 0 < row["p50"] <= row["p99"] and row["total"] == pytest.approx(row["mean"] * row["count"])


@pytest.mark.parametrize(("option", "steps"), [("--prefill", 1), ("--decode", 5)])
def test_phases(plan: str, option: str, steps: int) -> None:
    found = json.loads(profiled(plan, option, "--format", "json"))
    assert (found["phase"], found["account"]["count"]) == (option[2:], steps)


def test_table(plan: str) -> None:
    out = profiled(plan, "--by", "kernel", "--top", "2")
    assert "tiny, all steps, by kernel: 6 steps of" in out
    assert len(re.findall(r"%.*%", out)) == 2 and re.search(r"and \d+ more lines", out)
    assert re.search(r"reference:0 compute: busy .* \+ waiting .* \+ rest .* = .* inside steps", out)
    assert re.search(r"wall .* = .* inside steps \+ .* between them", out)


@pytest.mark.parametrize("width", ["60", "80", "100", "160"])
@pytest.mark.parametrize("what", ["kernel", "instruction", "layer"])
def test_table_fits(plan: str, width: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    result = profile(plan, *ARGS, "--by", what, "--top", "50")
    lines = result.stdout.splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if "compute: busy" in line)]
    assert all(len(line) <= int(width) for line in table[1:])
    assert "estimate" in table[2] and "total" in table[2] and "…" not in "".join(table)
    assert ("waiting" in table[2]) == (int(width) == 160)
    assert ("left out to fit" in result.stderr) == (int(width) < 160)


def test_csv(plan: str) -> None:
    rows = list(csv.DictReader(io.StringIO(profiled(plan, "--format", "csv", "--by", "layer"))))
    assert {r["name"] for r in rows} >= {"layers.0", "layers.1", "lm_head"}
    assert all(float(r["total"]) > 0 and r["device"] == "reference:0" for r in rows)


def test_jsonl_reads_back(plan: str) -> None:
    trace = read_trace(iter(profiled(plan, "--format", "jsonl").splitlines()))
    assert trace.steps and all(s.stamps.shape[1] == 3 and s.ended > s.begun for s in trace.steps)


def test_perfetto(plan: str) -> None:
    events = json.loads(profiled(plan, "--format", "perfetto"))["traceEvents"]
    steps = [e for e in events if e["name"].startswith("step ")]
    assert len(steps) == 6
    inside = [e for e in events if e["ph"] == "X" and e not in steps]
    for event in inside:
        assert any(s["ts"] <= event["ts"] and event["ts"] + event["dur"] <= s["ts"] + s["dur"] for s in steps)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prefill", "--decode"], ["--prefill", "--decode"]),
        (["--decode", "--max-tokens", "1"], ["no decode step ran", "--max-tokens"]),
        (["--prefill", "--raw", "--prompt", "x"], ["no prefill step ran", "longer prompt"]),
    ],
)
def test_refused(plan: str, args: list[str], words: list[str]) -> None:
    refused(profile(plan, *ARGS, *args), *words)


def test_options_are_checked(plan: str) -> None:
    for args in (["--by", "node"], ["--format", "xml"], ["--top", "0"], ["--max-tokens", "0"]):
        result = profile(plan, *ARGS, *args)
        assert result.exit_code == 2 and args[0] in result.stderr and result.stdout == ""
