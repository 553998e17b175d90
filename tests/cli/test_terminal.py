"""What goes to stdout, and what to stderr."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NOISY = """
import ctypes, json, sys
from flashrt.cli.main import main

c, dumps = ctypes.CDLL(None), json.dumps

def chatty(*args, **options):
    c.puts(b"solved")
    c.fflush(None)
    return dumps(*args, **options)

json.dumps = chatty
try: main()
except SystemExit: pass
c.puts(b"goodbye")  # stays in its buffer until the process ends
"""


def test_a_line_of_a_library_in_c_does_not_get_into_results() -> None:
    """Not while the command runs, and not when the process ends."""
    command = [sys.executable, "-c", NOISY]
    done = subprocess.run([*command, "devices", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["devices"]
    assert set(done.stderr.splitlines()) == {"solved", "goodbye"}


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_that_is_closed(closed: str) -> None:
    """What belongs there goes nowhere; the rest is as ever."""
    stream = {"stdout": ">&-", "stderr": "2>&-"}[closed]
    code = "from flashrt.cli.main import main; main()"
    command = f"exec {sys.executable} -c '{code}' devices --json {stream}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout == "" if closed == "stdout" else json.loads(done.stdout)["devices"]
