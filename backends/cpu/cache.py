"""Compiled functions on disk: object code that a later process loads without numba.

A folder's name is the hash of everything that the code depends on: every source
file of this package, the layouts and rows they read, versions, and the
processor with its features. So an edit anywhere, or another machine, means
another folder, and a file in it is never stale. Files are written whole and
renamed into place: processes may share a folder. A file that is damaged
(its checksum says so) is compiled again.

numba compiles; its optimised LLVM module is made into object code here, and
linked by LLVM's JIT linker. The first ever use of a function costs numba's
import and some tenths of a second; afterwards it is a millisecond.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from flashrt import knobs, layouts
from flashrt.backends.cpu.kernels import KERNELS, candidates
from flashrt.errors import DeviceError
from flashrt.ir import ops

Progress = Callable[[str, int, int], None]


@cache
def processor() -> tuple[str, str]:
    """LLVM's name of this processor and its features, as LLVM writes them."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


@cache
def available(function: str) -> bool:
    """Whether this processor has what a compiled function needs."""
    entry = KERNELS.get(function)
    if entry is None:
        return True
    if platform.machine() not in ("x86_64", "AMD64"):
        return entry.requires <= {"f16c"}  # other processors that we run on widen f16, too
    features = llvm.get_host_cpu_features()
    if not all(features.get(feature) for feature in entry.requires):
        return False
    return "amx-tile" not in entry.requires or tiles_permitted()


@cache
def tiles_permitted() -> bool:
    """Whether this process may use AMX tiles: Linux wants to be asked first (arch_prctl)."""
    syscall, request, tile_data = 158, 0x1023, 18
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(syscall, request, tile_data) == 0


def function_of(kernel: str, numerics: str) -> str | None:
    """The function that computes a dispatch fastest on this processor; None where there is none."""
    return next((name for name in candidates(kernel, numerics) if available(name)), None)


@cache
def key() -> str:
    """Identifies everything that compiled code depends on."""
    sources = sorted(Path(__file__).parent.glob("*.py")) + [Path(str(m.__file__)) for m in (layouts, ops)]
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.read_bytes())
    versions = (sys.version, metadata.version("numba"), metadata.version("llvmlite"))
    digest.update(repr((versions, processor())).encode())
    return digest.hexdigest()[:20]


def folder() -> Path:
    """Where this process finds and leaves object code."""
    return knobs.cache_folder() / "cpu" / key()


class Library:
    """Functions of this process by name, compiled or loaded when first asked for."""

    def __init__(self) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._lock = threading.Lock()
        self._linked: dict[str, tuple[int, Any]] = {}
        cpu, features = processor()
        target = llvm.Target.from_default_triple()
        self._machine = target.create_target_machine(
            cpu=cpu, features=features, opt=3, codemodel="jitdefault", jit=True
        )
        self._jit = llvm.create_lljit_compiler(self._machine)

    def address(self, name: str) -> int:
        """The address of a function of `kernels.KERNELS`."""
        with self._lock:
            if name not in self._linked:
                self._linked[name] = self._link(name, *self._object(name))
            return self._linked[name][0]

    def function(self, name: str) -> Callable[..., int]:
        """The function, callable with int64 arguments; gives its int64 result. Other threads
        run Python meanwhile."""
        count = KERNELS[name].arguments
        kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * count)
        function = kind(self.address(name))

        def call(*args: int) -> int:
            result, fault = ctypes.c_int64(), ctypes.c_int64()
            status = function(ctypes.addressof(result), ctypes.addressof(fault), *args)
            assert status == 0, (name, status)
            return result.value

        return call

    def addresses(self, names: Iterable[str], progress: Progress | None = None) -> dict[str, int]:
        """Addresses by name; `progress(name, done, of)` after each function that had to be made ready."""
        names = list(dict.fromkeys(names))
        wanted = [n for n in names if n not in self._linked]
        for done, name in enumerate(wanted, 1):
            self.address(name)
            if progress:
                progress(name, done, len(wanted))
        return {name: self.address(name) for name in names}

    def _object(self, name: str) -> tuple[str, bytes]:
        path = folder() / f"{name}.o"
        stored = read(path)
        if stored is None:
            stored = self._compile(name)
            write(path, *stored)
        return stored

    def _compile(self, name: str) -> tuple[str, bytes]:
        from flashrt.backends.cpu.compile import compiled_ir  # numba is slow to import: only when needed

        symbol, text = compiled_ir(KERNELS[name])
        module = llvm.parse_assembly(text)
        return symbol, self._machine.emit_object(module)

    def _link(self, name: str, symbol: str, code: bytes) -> tuple[int, Any]:
        builder = llvm.JITLibraryBuilder().add_object_img(code).export_symbol(symbol)
        # the tracker keeps the code alive
        tracker = builder.add_current_process().link(self._jit, name)
        return tracker[symbol], tracker


@cache
def library() -> Library:
    """The one library of this process."""
    return Library()


def read(path: Path) -> tuple[str, bytes] | None:
    """(symbol, object code), or None when the file is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, body = data[:32], data[32:]
    if hashlib.sha256(body).digest() != digest:
        return None
    symbol, _, code = body.partition(b"\n")
    return symbol.decode(), code


def write(path: Path, symbol: str, code: bytes) -> None:
    """Writes what `read` reads. Raises DeviceError when the folder can't be written."""
    body = symbol.encode() + b"\n" + code
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            file.write(hashlib.sha256(body).digest() + body)
        os.replace(file.name, path)
    except OSError as error:
        raise DeviceError(
            f"compiled kernels can't be stored in {path.parent}: {error}",
            hint=f"{knobs.CACHE.name}: {knobs.CACHE.meaning}",
        ) from None
