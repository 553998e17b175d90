"""`flashrt run`: what a person, a script and an impatient person get."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashrt.engine import LLM
from flashrt.errors import RequestError
from flashrt.program import Program
from tests.cli.calling import call, done, refused, start


def test_answer_on_stdout_figures_on_stderr(plan: str) -> None:
    result = done("run", plan, "-p", "hello", "--max-tokens", "5", "--ignore-eos")
    assert len(result.stdout) == 6 and result.stdout.endswith("\n")
    for part in ("first token", "prompt 8 tokens", "generated 5 tokens", "ended by length", "peak memory"):
        assert part in result.stderr
    assert "\x1b" not in result.output  # not a terminal: no colours, no spinner


def test_json(plan: str) -> None:
    facts = json.loads(done("run", plan, "-p", "hello", "--max-tokens", "5", "--json").stdout)
    assert facts["stats"]["generated_tokens"] == len(facts["tokens"]) == 5
    assert facts["finish_reason"] == "length" and facts["peak_memory_bytes"] > 1e6


def test_stdin_is_a_prompt(plan: str) -> None:
    given = done("run", plan, "-p", "hello", "--max-tokens", "8").stdout
    assert done("run", plan, "-", "--max-tokens", "8", stdin="hello").stdout == given


def test_seed_repeats(plan: str) -> None:
    args = ("run", plan, "-p", "hello", "--max-tokens", "20", "--temperature", "1.5", "--seed")
    assert done(*args, "1").stdout == done(*args, "1").stdout != done(*args, "2").stdout


@pytest.mark.parametrize("count", [0, 1])
def test_few_tokens(plan: str, count: int) -> None:
    result = done("run", plan, "-p", "x", "--max-tokens", str(count), "--ignore-eos")
    assert len(result.stdout) == count + 1 and f"generated {count} tokens" in result.stderr


def test_packed_plan_answers_the_same(made: Path) -> None:
    answers = [
        done("run", made / name, "-p", "hi", "--max-tokens", "9").stdout for name in ("plan", "packed")
    ]
    assert answers[0] == answers[1]


# ---- conversation ------------------------------------------------------------------
def test_conversation_remembers(plan: str) -> None:
    args = ("run", plan, "--interactive", "--max-tokens", "6", "--ignore-eos")
    both = done(*args, stdin="one\ntwo\n\nnever\n")
    first, _ = both.stdout.splitlines()
    assert "prompt 6 tokens" in both.stderr  # "u:one "
    assert f"prompt {6 + len(f'a:{first} ') + 6} tokens" in both.stderr


def test_conversation_that_outgrows_the_context(plan: str) -> None:
    stdin = "".join(f"{'x' * 100}\n" for _ in range(3)) + "short\n"
    result = done("run", plan, "-i", "--max-tokens", "4", stdin=stdin)
    assert len(result.stdout.splitlines()) == 3  # the third is refused, the short one still fits
    assert "the context holds 256" in result.stderr and "begin a new one" in result.stderr


def test_context_that_fills_up_is_said(plan: str) -> None:
    result = done("run", plan, "-p", "x" * 240, "--max-tokens", "99", "--ignore-eos")
    assert "the context of 256 tokens is full" in result.stderr


# ---- Ctrl-C, closed pipes ----------------------------------------------------------
@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """interrupted(3): Ctrl-C is pressed during the third step from now on."""

    def arm(step: int) -> None:
        run, count = Program.begin, 0

        def stepped(self: Program, *args: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                signal.raise_signal(signal.SIGINT)
            return run(self, *args)

        monkeypatch.setattr(Program, "begin", stepped)

    return arm


def test_ctrl_c_ends_the_answer_after_the_step(plan: str, interrupted: Callable[[int], None]) -> None:
    interrupted(5)
    result = call("run", plan, "-p", "x", "--max-tokens", "99", "--ignore-eos")
    assert result.exit_code == 130
    assert len(result.stdout) == 5 + 1
    assert "generated 5 tokens" in result.stderr and "interrupted" in result.stderr
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_a_long_prompt_is_read(own: Path, interrupted: Callable[[int], None]) -> None:
    interrupted(1)
    result = call("run", own / "plan", "-p", "x" * 200, "--max-tokens", "9")  # four steps of 64
    assert result.exit_code == 130 and result.stdout == "\n" and "generated 0 tokens" in result.stderr


def test_ctrl_c_in_a_conversation_returns_to_the_prompt(
    plan: str, interrupted: Callable[[int], None]
) -> None:
    interrupted(3)
    result = done("run", plan, "-i", "--max-tokens", "9", "--ignore-eos", stdin="one\ntwo\n")
    assert [len(line) for line in result.stdout.splitlines()] == [3, 9]


@pytest.mark.parametrize("at", ["flashrt.engine.compile_model", "flashrt.program.Program.open"])
def test_ctrl_c_before_the_answer(own: Path, cache: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(at, pressed)
    model = own / ("tiny.logical" if "compile" in at else "plan")
    result = call("run", model, "-p", "x", *(["--device", "reference:0"] if "compile" in at else []))
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")
    assert not list(cache.rglob("*.tmp"))


def test_a_real_ctrl_c(plan: str) -> None:
    process = start("run", plan, "-p", "x", "--max-tokens", "250", "--ignore-eos", bufsize=0)
    assert process.stdout and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and b"Traceback" not in err and b"interrupted" in err
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("args", [["explain"], ["compile", "--debug-graph", "micro"]])
def test_a_closed_pipe_is_no_error(plan: str, args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start(args[0], plan, *args[1:], stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, b"")


# ---- choices -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([], "--prompt"),
        (["-", "-p", "x"], "--prompt"),
        (["x"], "unexpected argument 'x'"),
        (["-i", "--raw"], "--interactive"),
        (["-i", "--json"], "--interactive"),
        (["-p", "x", "--raw", "--system", "y"], "--system"),
        (["-p", "x", "--max-tokens", "-3"], "max_tokens=-3"),
        (["-p", "x", "--temperature", "-1"], "temperature=-1"),
        (["-p", "x", "--temperature", "nan"], "temperature=nan"),
        (["-p", "x", "--top-p", "0"], "top_p=0"),
        (["-p", "x", "--top-p", "2"], "top_p=2"),
        (["-p", "x", "--min-p", "1.5"], "min_p=1.5"),
        (["-p", "x", "--top-k", "-1"], "top_k=-1"),
        (["-p", "x", "--repetition-penalty", "0"], "penalty=0"),
        (["-p", "x", "--seed", "-1"], "seed=-1"),
        (["-p", "x", "--stop", ""], "stop="),
        (["-p", "x", "--context", "9"], "--context"),
        (["-p", "x", "--device", "cpu:0", "--without", "region"], "--without, --device"),
        (["-p", "", "--raw"], "prompt is empty"),
        (["-p", "é", "--raw"], "prompt is empty"),
    ],
)
def test_refused(plan: str, args: list[str], word: str) -> None:
    refused(call("run", plan, *args), word)


def test_prompt_longer_than_the_context_says_both_numbers(plan: str) -> None:
    refused(call("run", plan, "-p", "x" * 300), "303 tokens", "holds 256")


def test_prompt_that_is_no_text(plan: str) -> None:
    refused(call("run", plan, "-", stdin=b"ab\xff"), "isn't UTF-8", "byte 2")


def test_next_request_works_after_an_empty_one(plan: str) -> None:
    with LLM(plan) as llm:
        with pytest.raises(RequestError, match="prompt is empty"):
            llm.generate("", raw=True)
        assert llm.generator.idle
        assert llm.generate("x", max_tokens=2).tokens
