"""From a kernel's Python code to optimised LLVM text, by numba."""

from __future__ import annotations

from importlib import import_module

from numba import njit, types

from flashrt.backends.cpu.intrinsics import OPTIONS
from flashrt.backends.cpu.kernels import KernelEntry


def compiled_ir(entry: KernelEntry) -> tuple[str, str]:
    """(symbol, LLVM text). The function is numba's bare one: `i32 f(i64*, i8**, i64...)`.

    Compiled without Python's wrappers it needs nothing but the C library, so its
    object code runs in a process that never imports numba.
    """
    maker = getattr(import_module(f"flashrt.backends.cpu.{entry.module}"), entry.maker)
    dispatcher = njit(**OPTIONS)(maker(*entry.args))
    dispatcher.compile((types.int64,) * entry.arguments)
    (result,) = dispatcher.overloads.values()
    return result.fndesc.llvm_func_name, result.library.get_llvm_str()
