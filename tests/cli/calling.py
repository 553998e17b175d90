"""Calls the command line in this process, or as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from flashrt.cli.diagnose import app as diagnoser
from flashrt.cli.main import app
from flashrt.cli.monitor import app as watcher
from flashrt.cli.profiler import app as profiler

ON_REFERENCE = ("--device", "reference:0")


def call(*args: str | Path, stdin: str | bytes = "") -> Any:
    """`flashrt args`; a defect's exception passes through."""
    return _called(app, args, stdin)


def profile(*args: str | Path) -> Any:
    """`flash-profiler args`."""
    return _called(profiler, args, "")


def diagnose(*args: str | Path) -> Any:
    """`flash-diagnose args`."""
    return _called(diagnoser, args, "")


def monitor(*args: str | Path) -> Any:
    """`flash-monitor args`."""
    return _called(watcher, args, "")


def _called(app: Any, args: tuple[str | Path, ...], stdin: str | bytes) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in args], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def done(*args: str | Path, stdin: str | bytes = "") -> Any:
    """The result of a call that must succeed."""
    result = call(*args, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def refused(result: Any, *words: str) -> str:
    """stderr of a call that must end in one clear message: these words are in it."""
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr, result.stderr
    assert len(result.stderr.splitlines()) <= 4, result.stderr
    for word in words:
        assert word in result.stderr, (word, result.stderr)
    return str(result.stderr)


def start(*args: str | Path, **options: Any) -> subprocess.Popen[bytes]:
    """`flashrt args` as a process."""
    code = "from flashrt.cli.main import main; main()"
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], **{**pipes, **options})
