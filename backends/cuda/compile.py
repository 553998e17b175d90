"""Compiles the kernels where they run, with NVRTC, and keeps the result on disk."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashrt import knobs
from flashrt.errors import DeviceError

SHARED = ("common.cuh", "packed.cuh")  # what all units begin with
UNITS = (  # files that are compiled together, the slow ones first
    ("paged.cuh", "attention.cu"),
    ("linear.cu", "choices.cuh", "experts.cu"),
    ("linear.cu", "linear_kernels.cu"),
    ("gemm.cu",),
    ("choices.cuh", "expert_tiles.cu"),
    ("paged.cuh", "attention_tensor.cu"),
    ("latent.cu",),
    ("weights.cu", "small.cu", "pairs.cu", "route.cu", "ticks.cu"),
)
OPTIONS = ("--std=c++17",)


def source(*names: str) -> str:
    """Kernels as one text: all of them, or some files'."""
    folder, every = Path(__file__).parent / "source", dict.fromkeys(name for unit in UNITS for name in unit)
    return "".join((folder / name).read_text("utf-8") for name in names or (*SHARED, *every))


def cubins(arch: str) -> list[bytes]:
    """Machine code for an architecture such as "sm_90", unit by unit: from the cache or compiled now, side by
    side (the largest takes some ten seconds)."""
    with ThreadPoolExecutor(len(UNITS)) as pool:
        return list(pool.map(lambda unit: _cubin(source(*SHARED, *unit), arch), UNITS))


def _cubin(text: str, arch: str) -> bytes:
    key = hashlib.sha256("\0".join((text, arch, *OPTIONS, _version())).encode()).hexdigest()[:24]
    path = knobs.cache_folder() / "cuda" / f"{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = _compiled(text, arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(code)
    unfinished.replace(path)
    return code


def _version() -> str:
    from cuda.bindings import nvrtc

    return "{}.{}".format(*_check(nvrtc.nvrtcVersion()))


def _compiled(text: str, arch: str) -> bytes:
    from cuda.bindings import nvrtc

    options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture={arch}")]
    program = _check(nvrtc.nvrtcCreateProgram(text.encode(), b"flashrt.cu", 0, [], []))[0]
    error, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))[0]
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise DeviceError(f"the CUDA kernels don't compile for {arch}", lines=log.decode(errors="replace"))
    code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))[0]
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code


def _check(answer: Any) -> Any:
    error, *result = answer
    if error:
        raise DeviceError(f"NVRTC: {error.name}")
    return result
