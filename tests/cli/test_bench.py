"""`flashrt bench`: what it measures is what it was asked, and nothing else is left behind."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashrt import program
from flashrt.engine import LLM
from flashrt.errors import RequestError
from flashrt.profiler import bench as measuring
from flashrt.profiler.bench import Test as Asked
from flashrt.program import Program
from tests.cli.calling import ON_REFERENCE, call, done, refused
from tests.cli.tiny_plan import constants, make_plan
from tests.tiny import CONTEXT

RATE = measuring.read_rate
FEW = ("--repeats", "2", "--warm-up", "0")


@pytest.fixture(autouse=True)
def short_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is read for a moment only."""
    monkeypatch.setattr(
        measuring, "read_rate", lambda nbytes, threads, seconds: RATE(nbytes, threads, seconds / 50)
    )


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """(T, sequences, longest context) of every step that runs."""
    seen: list[tuple[int, int, int]] = []
    run = Program.begin

    def stepped(self: Program, inputs: Any, symbols: Any, *more: Any) -> Any:
        seen.append((symbols["T"], symbols["S"], symbols["C"]))
        return run(self, inputs, symbols, *more)

    monkeypatch.setattr(Program, "begin", stepped)
    yield seen


def measured(plan: str, *args: str) -> Any:
    return json.loads(done("bench", plan, *FEW, *args, "--json").stdout)


def test_table_is_named_as_in_llama_bench(plan: str) -> None:
    out = done("bench", plan, "-p", "32,7", "-n", "4", "-d", "0,9", *FEW).stdout
    head = next(line for line in out.splitlines() if "t/s" in line)
    assert head.split() == ["model", "size", "params", "backend", "threads", "test", "t/s", "limit"]
    found = re.findall(r"(\S+) +(\S+ kB) +(\S+ M) +(\w+ \w+) +(\d+) +((?:pp|tg)\d+(?: @ d\d+)?) +(.*)", out)
    assert [row[5] for row in found] == ["pp32", "pp7", "tg4", "pp32 @ d9", "pp7 @ d9", "tg4 @ d9"]
    assert {row[0] for row in found} == {"tiny"} and {row[3] for row in found} == {"reference exact"}
    for row in found:
        median, low, high = map(float, re.findall(r"\d+\.?\d*", row[6])[:3])
        assert 0 < low <= median <= high and ("%" in row[6]) == row[5].startswith("tg")
    assert "numpy" in out and re.search(r"a token reads .* of weights; \d+ threads? read", out)


@pytest.mark.parametrize("width", ["80", "160"])
def test_table_fits(plan: str, width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    result = done("bench", plan, "-p", "128", "-n", "2", "-d", "64", "--batch", "1,2", *FEW)
    table = [line for line in result.stdout.splitlines() if "reference exact" in line or "t/s" in line]
    assert table and all(len(line) <= int(width) for line in table)
    assert "batch" in table[0] and "left out: prompts of several sequences" in result.stderr


def test_defaults_are_llama_benchs(plan: str) -> None:
    refused(call("bench", plan), "pp512", "513", "256", "--context")
    named = [r["name"] for r in measured(plan, "-p", "2")["results"]]
    assert named == ["pp2"]  # only what is named
    assert [r["name"] for r in measured(plan, "--generate", "2,2")["results"]] == ["tg2"]


def test_prompt_steps(plan: str, steps: list[tuple[int, int, int]]) -> None:
    """100 tokens after 70 that aren't measured, in steps of 64: the measurement begins with a step."""
    measured(plan, "-p", "100", "-d", "70", "--repeats", "1")
    assert steps == [(64, 1, 64), (6, 1, 70), (64, 1, 134), (36, 1, 170)]


def test_generation_steps(plan: str, steps: list[tuple[int, int, int]]) -> None:
    measured(plan, "-n", "3", "-d", "5", "--repeats", "1")
    assert steps == [(5, 1, 5), (1, 1, 6), (1, 1, 7), (1, 1, 8)]


def test_warm_up_and_repeats(plan: str, steps: list[tuple[int, int, int]]) -> None:
    facts = measured(plan, "-p", "3", "--warm-up", "2", "--repeats", "4")
    assert len(steps) == 6 and len(facts["results"][0]["rates"]) == 4


def test_batch_generates_together(plan: str, steps: list[tuple[int, int, int]]) -> None:
    """Three prompts of 40 tokens take two steps; only then do four count, of all three sequences each."""
    facts = measured(plan, "-n", "4", "-d", "40", "--batch", "3", "--repeats", "1")
    assert [step[:2] for step in steps] == [(64, 2), (57, 3), *[(3, 3)] * 4]
    assert facts["results"][0]["sequences"] == 3


def test_rates_are_tokens_over_time(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps of a known length: one of 20 ms reads the prompt, one generates a token of each sequence."""
    run = Program.begin

    def slow(self: Program, *given: Any) -> Any:
        time.sleep(0.02)
        return run(self, *given)

    monkeypatch.setattr(Program, "begin", slow)
    facts = measured(plan, "-p", "30", "-n", "5", "--batch", "1,2", "--repeats", "3")
    tokens_a_step = {("pp", 1): 30, ("pp", 2): 60, ("tg", 1): 1, ("tg", 2): 2}
    for result in facts["results"]:
        highest = tokens_a_step[result["kind"], result["sequences"]] / 0.02
        assert 0.3 * highest < result["max"] <= highest


def test_json(plan: str) -> None:
    facts = measured(plan, "-p", "4", "-n", "2", "--threads", "1")
    pp, tg = facts["results"]
    assert (pp["kind"], pp["tokens"], pp["threads"], pp["limit"]) == ("pp", 4, 1, None)
    assert pp["min"] <= pp["median"] <= pp["max"] and len(pp["rates"]) == 2
    rate = facts["read_bytes_per_second"]["1"]
    assert tg["limit"] == pytest.approx(tg["median"] * facts["token_bytes"] / rate)
    assert facts["weight_bytes"] == sum(b.bytes for b in program.load(Path(plan)).variants[0].stream.blocks)
    assert 0 < facts["token_bytes"] <= facts["weight_bytes"]
    assert facts["parameters"] == sum(array.size for array in constants().values())
    assert {"flashrt", "Python", "numpy"} <= facts["versions"].keys() and facts["machine"]["cores"] >= 1


def test_what_is_no_language_model(made: Path) -> None:
    refused(
        call("bench", made / "tiny.logical", "-p", "2", *ON_REFERENCE), "with a tokenizer", "flashrt.load"
    )
    refused(call("bench", made / "nosuch.gguf"), "no such model")


def test_a_device_with_a_memory_of_its_own_has_no_limit(tmp_path: Path) -> None:
    program.save(make_plan(device="null:0", tokens=64), tmp_path / "plan")
    facts = measured(str(tmp_path / "plan"), "-n", "2")
    assert facts["read_bytes_per_second"] == {} and facts["results"][0]["limit"] is None


@pytest.mark.parametrize("option", ["--prompt", "--generate", "--batch", "--threads"])
@pytest.mark.parametrize("value", ["0", "-1", "x", "", "1,", "1.5", "1,,2", "1 2", "9" * 5000])
def test_lists_of_numbers(plan: str, option: str, value: str) -> None:
    refused(call("bench", plan, f"{option}={value}"), option, "whole numbers, 1 or more", f"{option} 1,8")


def test_depth_may_be_zero(plan: str) -> None:
    refused(call("bench", plan, "--depth", "-1"), "--depth '-1'", "0 or more")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-p", str(CONTEXT)], [f"pp{CONTEXT} needs a context of {CONTEXT + 1}", f"holds {CONTEXT}"]),
        (["-n", "8", "-d", str(CONTEXT)], ["tg8 @ d256", f"needs a context of {CONTEXT + 9}"]),
        (["-n", "8", "--batch", "17"], ["--batch 17", "takes 16 sequences"]),
        (["-p", "8", "-d", "8", "--batch", "2"], ["nothing to measure", "--generate"]),
        (["-p", "8", "--threads", "100000"], ["--threads 100000", "processors"]),
        (["-p", "8", "--numerics", "int8"], ["is a plan", "--numerics"]),
    ],
)
def test_what_does_not_fit(plan: str, args: list[str], words: list[str]) -> None:
    refused(call("bench", plan, *args), *words)


@pytest.mark.parametrize("option", ["--repeats=0", "--warm-up=-1"])
def test_runs(plan: str, option: str) -> None:
    result = call("bench", plan, option)
    assert result.exit_code == 2 and option.partition("=")[0] in result.stderr


@pytest.mark.parametrize("asked", [Asked("pp", 30, 20), Asked("tg", 9, 33, 5), Asked("pp", 40, 0, 16)])
def test_nothing_stays_in_work(plan: str, asked: Asked) -> None:
    """The largest batch fits in the cache that it asks for, and gives all of it back."""
    sequences = measuring.whole_contexts(program.load(Path(plan)), [asked])
    with LLM(plan, sequences=sequences) as llm:
        (speed,) = measuring.measure(llm, [asked], threads=1, repeats=1)
        assert speed.median > 0 and llm.generator.idle and llm.generator.pool.used == 0
        assert llm.generator.scheduler.max_tokens_per_step == 64


def test_too_small_a_cache_is_said(plan: str) -> None:
    asked = Asked("tg", 64, 100, 16)
    with LLM(plan) as llm, pytest.raises(RequestError, match="no room in memory"):
        measuring.measure(llm, [asked], threads=1)
