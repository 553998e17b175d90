"""CUDA kernels on the host: `emulated.h` runs their threads as fibers, `EmulatedDriver` is the GPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flashrt.backend import U8
from flashrt.backends.cuda.args import Launch
from flashrt.backends.cuda.compile import source
from flashrt.backends.cuda.operands import Limits

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent


def _entries(text: str) -> list[tuple[str, str]]:
    """(kernel, struct of its arguments)."""
    plain = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\((\w+) \w\)', text)
    linear = [(n, "LinearArgs") for n in re.findall(r"^LINEAR\((\w+), \d", text, re.M)]
    heads = [(f"attention_{g}_{p}", "AttentionArgs") for g, p in re.findall(r"ATTENTION\((\d), (\d)\)", text)]
    return [(n, s) for n, s in plain if n not in ("name", "attention_")] + linear + heads


@cache
def library() -> ctypes.CDLL:
    """The kernels compiled for the host; kept in the temporary folder under a key of their text."""
    text = source()
    calls = [
        f'extern "C" void call_{n}(void* p) {{ {n}(*({s}*)p); }}' for n, s in _entries(text) if "#" not in n
    ]
    whole = "\n".join(['#include "emulated.h"', text, *calls])
    digest = hashlib.sha256((whole + (HERE / "emulated.h").read_text()).encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"flashrt-emulated-{digest}.so"
    if not built.is_file():
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "kernels.cpp"
            place.write_text(whole)
            made = Path(folder) / "kernels.so"
            flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-w", f"-I{HERE}"]
            subprocess.run([str(COMPILER), *flags, "-o", str(made), str(place)], check=True)
            unfinished = built.with_suffix(f".{os.getpid()}")
            shutil.copy(made, unfinished)
            unfinished.replace(built)
    return ctypes.CDLL(str(built))


class EmulatedDriver:
    """`flashrt.backends.cuda.driver.Driver` without a GPU. launches: kernels run so far."""

    def __init__(self, index: int = 0) -> None:
        self.limits = Limits(processors=4, shared=227 << 10, shared_all=228 << 10)
        self.launches: list[str] = []

    def alloc(self, nbytes: int) -> Any:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> U8:
        memory: U8 = torch.zeros(nbytes, dtype=torch.uint8).numpy()
        return memory

    def begin(self) -> None:
        pass

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch.kernel)
        call = getattr(library(), f"call_{launch.kernel}")
        assert launch.shared <= self.limits.shared, launch
        x, y, z = launch.grid
        args = ctypes.create_string_buffer(launch.args, len(launch.args))
        library().emulate(call, args, x, y, z, launch.threads)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def wait(self) -> None:
        pass
