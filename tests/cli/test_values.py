"""Values of the command line: simple ones without pydantic, and all as typer converts them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import pytest
import typer
from typer.core import TyperCommand
from typer.testing import CliRunner

from flashrt.cli.values import PlainCommand


class Kind(StrEnum):
    one = "one"
    two = "2nd"


def result(command: type[TyperCommand], words: Sequence[str]) -> tuple[int, Any, str]:
    """Exit code, the values that a command is called with, and its messages."""
    app, got = typer.Typer(add_completion=False), list[Any]()

    @app.command(cls=command)
    def _called(
        name: str,
        count: Annotated[int, typer.Option(min=1)] = 4,
        below: Annotated[int | None, typer.Option(max=9)] = None,
        share: float = 0.5,
        kind: Annotated[Kind | None, typer.Option()] = None,
        word: Annotated[list[str] | None, typer.Option()] = None,
        way: Annotated[bool | None, typer.Option("--way/--no-way")] = None,
        flag: bool = False,
    ) -> None:
        got.extend((type(v), v) for v in (name, count, below, share, kind, word or [], way, flag))

    done = CliRunner().invoke(app, list(words))
    return done.exit_code, got, done.output


@pytest.mark.parametrize(
    "words",
    [
        "", "a", "a b", "--help", "--nothing", "a --count 7", "a --count 0", "a --count -3", "a --count +7",
        "a --count 1_0", "a --count ٣", "a --count x", "a --below 9", "a --below 10", "a --share 1",
        "a --share .25", "a --share 1e-3", "a --share 0.125", "a --kind one",
        "a --kind 2nd", "a --kind two", "a --kind ONE", "a --word x --word 1", "a --way", "a --no-way --flag",
        "a --count 99999999999999999999",
    ],
)  # fmt: skip
def test_values_are_those_of_typer(words: str) -> None:
    assert result(PlainCommand, words.split()) == result(TyperCommand, words.split())


def test_a_command_begins_without_pydantic() -> None:
    words = ["run", "nothing.gguf", "-p", "x", "--numerics", "fast", "--max-tokens", "1", "--top-k", "2"]
    code = (
        "import sys; from flashrt.cli.main import app\n"
        f"try: app({words!r})\n"
        "except SystemExit as end: sys.exit('pydantic' in sys.modules or end.code != 2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nothing.gguf" in done.stderr
