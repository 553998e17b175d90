"""Runs a Python program as a process of its own and takes its measure."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass


@dataclass
class Ran:
    """A program that ended well. output: its stdout. seconds: on the wall, cpu: of its processor time.
    memory: its peak, in bytes."""

    output: str
    seconds: float
    cpu: float
    memory: int


def run(*arguments: str) -> Ran:
    """`python ARGUMENTS`; fails with the end of its stderr when it doesn't end well."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=errors)
        _, status, usage = os.wait4(child.pid, 0)  # the one way to the figures of just this child
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        assert child.returncode == 0, errors.read()[-3000:]
        return Ran(output.read(), seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
