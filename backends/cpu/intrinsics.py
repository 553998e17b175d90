"""Memory, atomics, time and system calls, for compiled functions: addresses are plain int64."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
# Options of every compiled function: no wrappers for Python callers, IEEE division, and so nothing
# that raises or needs the interpreter.
OPTIONS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
inner: Any = njit(**OPTIONS)
intrinsic: Any = extending.intrinsic  # what it makes is called without the first argument that Python sees
X86 = platform.machine() in ("x86_64", "AMD64")


def at(builder: ir.IRBuilder, address: ir.Value, type: ir.Type) -> ir.Value:
    """The address as a pointer."""
    return builder.inttoptr(address, type.as_pointer())


def _load(type: Any, kind: ir.Type) -> Callable[..., Any]:
    @intrinsic
    def load(typing, address):
        def codegen(context, builder, signature, args):
            value = builder.load(at(builder, args[0], kind))
            value.align = 1 if kind == I8 else 4
            return value

        return type(types.int64), codegen

    return load


def _store(type: Any, kind: ir.Type) -> Callable[..., Any]:
    @intrinsic
    def store(typing, address, value):
        def codegen(context, builder, signature, args):
            builder.store(args[1], at(builder, args[0], kind)).align = 1 if kind == I8 else 4
            return context.get_dummy_value()

        return types.void(types.int64, type), codegen

    return store


load_f32, store_f32 = _load(types.float32, F32), _store(types.float32, F32)
load_f64, store_f64 = _load(types.float64, F64), _store(types.float64, F64)
load_i64, store_i64 = _load(types.int64, I64), _store(types.int64, I64)
load_i32, store_i32 = _load(types.int32, I32), _store(types.int32, I32)
load_u8, store_u8 = _load(types.uint8, I8), _store(types.uint8, I8)


@inner
def word(row, field):
    """An int64 field of a row."""
    return load_i64(row + 8 * field)


@inner
def number(row, field):
    """A float64 field of a row."""
    return load_f64(row + 8 * field)


@inner
def operand(row, at_field, field):
    """The address of an operand that may lie in the block table; 0 when it is absent."""
    entry = load_i64(row + 8 * at_field)
    base = load_i64(row + 8 * field)
    return base + load_i64(entry) if entry != 0 else base


@inner
def load_index(address, i, size):
    """Number i of an array of i32 (size 4) or i64 (size 8)."""
    return load_i64(address + 8 * i) if size == 8 else types.int64(load_i32(address + 4 * i))


@intrinsic(prefer_literal=True)
def stack(typing, nbytes):
    """Address of that many bytes (a literal) on the stack, 64-byte aligned, for the whole call."""
    count = nbytes.literal_value

    def codegen(context, builder, signature, args):
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(I8, count))
            memory.align = 64
        return builder.ptrtoint(memory, I64)

    return types.int64(types.IntegerLiteral(count)), codegen


@intrinsic
def copy_bytes(typing, dst, src, count):
    """memcpy"""

    def codegen(context, builder, signature, args):
        to, source = at(builder, args[0], I8), at(builder, args[1], I8)
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def emit_prefetch(builder: ir.IRBuilder, address: ir.Value, level: int) -> None:
    """Asks for a cache line. level: 3 for the first-level cache, 2 for the second."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fetch, [at(builder, address, I8), I32(0), I32(level), I32(1)])


@intrinsic
def prefetch_lines(typing, address, count):
    """Asks for that many cache lines, which are read soon."""

    def codegen(context, builder, signature, args):
        with cgutils.for_range(builder, args[1]) as loop:
            emit_prefetch(builder, builder.add(args[0], builder.mul(loop.index, I64(64))), 2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


# ---- atomics --------------------------------------------------------------------
@intrinsic
def atomic_add(typing, address, value):
    """Adds, sequentially consistent; gives the old value."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", at(builder, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typing, address):
    def codegen(context, builder, signature, args):
        return builder.load_atomic(at(builder, args[0], I64), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typing, address, value):
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], at(builder, args[0], I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


# ---- processor and system ---------------------------------------------------------
def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


@intrinsic
def pause(typing):
    """Tells the processor that this is a spin."""

    def codegen(context, builder, signature, args):
        if X86:
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typing):
    """sched_yield"""

    def codegen(context, builder, signature, args):
        _call(builder, "sched_yield", I32)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def sleep_us(typing, us):
    """usleep"""

    def codegen(context, builder, signature, args):
        _call(builder, "usleep", I32, builder.trunc(args[0], I32))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def clock_ns(typing):
    """clock_gettime(CLOCK_MONOTONIC): the clock of time.perf_counter_ns on Linux."""

    def codegen(context, builder, signature, args):
        with builder.goto_entry_block():
            spec = builder.alloca(ir.LiteralStructType([I64, I64]))
        _call(builder, "clock_gettime", I32, I32(1), spec)
        seconds, ns = (builder.load(cgutils.gep_inbounds(builder, spec, 0, i)) for i in (0, 1))
        return builder.add(builder.mul(seconds, I64(1_000_000_000)), ns)

    return types.int64(), codegen


def _futex(operation: int) -> Callable[..., Any]:
    @intrinsic
    def futex(typing, address, value):
        def codegen(context, builder, signature, args):
            zero, words = I64(0), (I64(FUTEX), args[0], I64(operation), args[1])
            _call(builder, "syscall", I64, *words, zero, zero, zero)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return futex


# FUTEX_WAIT and FUTEX_WAKE of one process; the word is the low half of an int64
futex_wait, futex_wake = _futex(128), _futex(129)


@intrinsic
def call_kernel(typing, address, tid, nth, row):
    """Calls a compiled kernel; its status, 0 when all is well."""

    def codegen(context, builder, signature, args):
        with builder.goto_entry_block():
            result, fault = builder.alloca(I64), builder.alloca(I64)
        kind = ir.FunctionType(I32, [result.type, fault.type, I64, I64, I64])
        function = builder.inttoptr(args[0], kind.as_pointer())
        status = builder.call(function, [result, fault, *args[1:]])
        return builder.sext(status, I64)

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen
