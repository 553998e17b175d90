"""The generated manual is up to date, everything in it has a meaning, and commands in the docs exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import typer

from flashrt.cli import diagnose, monitor, profiler
from flashrt.cli import main as flashrt
from flashrt.ir import micro
from flashrt.ir.stream_laws import MICRO
from flashrt.ir.text import read_micro, show_instr

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def manual() -> ModuleType:
    """tools/instructions.py as a module."""
    spec = importlib.util.spec_from_file_location("instructions", ROOT / "tools" / "instructions.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_instructions_page_is_fresh(manual: ModuleType) -> None:
    """docs/instructions.md is what the tool writes now: else run python tools/instructions.py."""
    assert (ROOT / "docs" / "instructions.md").read_text(encoding="utf-8") == manual.page()


def test_check_tells_stale_from_fresh(
    manual: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manual, "FILE", tmp_path / "docs" / "instructions.md")
    assert manual.main(["--check"]) == 1
    assert manual.main([]) == 0
    assert manual.main(["--check"]) == 0
    manual.FILE.write_text("old", encoding="utf-8")
    assert manual.main(["--check"]) == 1


@pytest.mark.parametrize("kind", micro.INSTRUCTIONS, ids=lambda k: k.__name__)
def test_every_field_has_a_meaning(manual: ModuleType, kind: type[micro.Instr]) -> None:
    text, meanings = manual.split_doc(kind)
    assert text
    assert {f.name for f in fields(kind)} == set(meanings) | set(micro.SHARED_FIELDS)


def test_examples_parse(manual: ModuleType) -> None:
    """One example for each instruction, as the text form reads it."""
    text = "micro x\n" + "\n".join(map(show_instr, manual.EXAMPLES))
    assert read_micro(text).instrs == manual.EXAMPLES
    assert tuple(map(type, manual.EXAMPLES)) == micro.INSTRUCTIONS


def test_every_law_stands_in_the_page(manual: ModuleType) -> None:
    page = manual.page()
    for law in MICRO:
        assert f"### {law.name}\n\n{law.statement}" in page


COMMAND = re.compile(
    r"(?:flash-(?:diagnose|monitor|profiler)|flashrt (?:compile|run|bench|explain|devices))\b[^`\n|>]*"
)


def commands() -> list[str]:
    """Every command that README and docs write out."""
    texts = [path.read_text("utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    return sorted({match.strip() for text in texts for match in COMMAND.findall(text)})


@pytest.mark.parametrize("command", commands())
def test_commands_in_the_docs_exist(command: str) -> None:
    """The options that stand behind a command in the docs are its options."""
    program, *words = shlex.split(command)
    if program == "flashrt":
        known = typer.main.get_command(flashrt.app).commands[words.pop(0)]  # type: ignore[attr-defined]
    else:
        known = typer.main.get_command(
            {"flash-profiler": profiler, "flash-diagnose": diagnose, "flash-monitor": monitor}[program].app
        )
    options = {option for parameter in known.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-") and word != "-"} <= options
