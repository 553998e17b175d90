"""Sixteen float32 lanes as a value of compiled functions.

LLVM lowers <16 x float> on any processor: to one register with AVX-512, to two
with AVX, to four elsewhere. Nothing here reorders arithmetic: a sum over lanes
always adds halves, so results don't depend on the processor's width. `fma`
rounds once where the processor can, twice where it can't.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from flashrt.backends.cpu.intrinsics import F32, I8, I16, I32, at, inner, intrinsic

LANES = 16
V = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)
VB = ir.VectorType(I8, LANES)
VS = ir.VectorType(I16, LANES)
_ROUND = 1.5 * 2.0**23  # adding it leaves the nearest whole number in the low bits


class Vector(types.Type):
    """numba's type of a <16 x float>."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16 = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type: Any) -> None:
        super().__init__(manager, type, V)


def constant(value: float) -> ir.Constant:
    """The number in all lanes, at compile time."""
    return ir.Constant(V, [value] * LANES)


def splat(builder: ir.IRBuilder, value: ir.Value, lanes: int = LANES) -> ir.Value:
    """The scalar in all lanes."""
    kind, order = ir.VectorType(value.type, lanes), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), order)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Calls an LLVM intrinsic or a C function."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def muladd(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a·b + c"""
    return call(builder, "llvm.fmuladd.v16f32", V, a, b, c)


def joined(b: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """Sixteen vectors → one: lane i is the sum of vector i, half added to half, as `tree` does it."""
    width = LANES // 2
    while width:
        low = [i // width % 2 * LANES + i // (2 * width) * 2 * width + i % width for i in range(LANES)]
        high = [i + width for i in low]
        orders = [ir.Constant(VI, order) for order in (low, high)]
        pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
        vectors = [b.fadd(*(b.shuffle_vector(one, two, order) for order in orders)) for one, two in pairs]
        width //= 2
    return vectors[0]


def tree(builder: ir.IRBuilder, value: ir.Value, join: Any) -> ir.Value:
    """Joins all lanes, always half with half."""
    step = LANES // 2
    while step:
        order = ir.Constant(VI, [(lane + step) % LANES for lane in range(LANES)])
        value = join(value, builder.shuffle_vector(value, value, order))
        step //= 2
    return builder.extract_element(value, I32(0))


# ---- operators --------------------------------------------------------------------
def _operator(symbol: Any, emit: str) -> None:
    class Template(AbstractTemplate):
        def generic(self, args: Any, keywords: Any) -> Any:
            return signature(f32x16, f32x16, f32x16) if args == (f32x16, f32x16) else None

    infer_global(symbol)(Template)

    @lower_builtin(symbol, f32x16, f32x16)
    def lower(context, builder, signature, args):
        return getattr(builder, emit)(*args)


for _symbol, _emit in (
    (operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv"),
):  # fmt: skip
    _operator(_symbol, _emit)


@intrinsic
def fma(typing, a, b, c):
    """a·b + c"""

    def codegen(context, builder, signature, args):
        return muladd(builder, *args)

    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def spread(typing, x):
    """The number in all lanes."""

    def codegen(context, builder, signature, args):
        return splat(builder, args[0])

    return f32x16(types.float32), codegen


@intrinsic
def lane_sum(typing, v):
    """The sum of the lanes, half with half."""

    def codegen(context, builder, signature, args):
        return tree(builder, args[0], builder.fadd)

    return types.float32(f32x16), codegen


def larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger of each lane; a NaN stays one."""
    return builder.select(builder.fcmp_unordered(">", a, b), a, b)


@intrinsic
def lane_max(typing, v):
    """The largest lane."""

    def codegen(context, builder, signature, args):
        return tree(builder, args[0], lambda a, b: larger(builder, a, b))

    return types.float32(f32x16), codegen


@intrinsic
def any_above(typing, v, limit):
    """Whether a lane is above the number, or a NaN."""

    def codegen(context, builder, signature, args):
        above = builder.fcmp_unordered(">", args[0], splat(builder, args[1]))
        bits = builder.bitcast(above, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.IntType(LANES)(0))

    return types.boolean(f32x16, types.float32), codegen


@intrinsic
def vmax(typing, a, b):
    """The larger of each lane; a NaN stays one."""

    def codegen(context, builder, signature, args):
        return larger(builder, *args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def vdrawable(typing, v, most):
    """NaN as -inf, and no lane above the number."""

    def codegen(context, builder, signature, args):
        v, most = args[0], splat(builder, args[1])
        known = builder.select(builder.fcmp_ordered("==", v, v), v, constant(-math.inf))
        return builder.select(builder.fcmp_ordered("<", known, most), known, most)

    return f32x16(f32x16, types.float32), codegen


@intrinsic
def vabs(typing, v):
    def codegen(context, builder, signature, args):
        return call(builder, "llvm.fabs.v16f32", V, args[0])

    return f32x16(f32x16), codegen


# ---- memory -----------------------------------------------------------------------
@intrinsic
def load_whole(typing, address):
    def codegen(context, builder, signature, args):
        value = builder.load(at(builder, args[0], V))
        value.align = 4
        return value

    return f32x16(types.int64), codegen


@intrinsic
def store_whole(typing, address, v):
    def codegen(context, builder, signature, args):
        builder.store(args[1], at(builder, args[0], V)).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, f32x16), codegen


def _mask(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    lanes = ir.Constant(VI, list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32)))


def masked_load(
    builder: ir.IRBuilder, address: ir.Value, count: ir.Value, lanes: ir.VectorType = V
) -> ir.Value:
    """The first `count` lanes (floats, or 16-bit words) from memory, the others 0 and not read."""
    pointer, mask = at(builder, address, lanes), _mask(builder, count)
    name, nbytes = ("v16f32", 4) if lanes == V else ("v16i16", 2)
    kind = ir.FunctionType(lanes, [pointer.type, I32, mask.type, lanes])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.{name}.p0")
    return builder.call(function, [pointer, I32(nbytes), mask, ir.Constant(lanes, None)])


@intrinsic
def load_part(typing, address, count):
    """`masked_load`"""

    def codegen(context, builder, signature, args):
        return masked_load(builder, *args)

    return f32x16(types.int64, types.int64), codegen


@intrinsic
def lanes_between(typing, v, first, last, other):
    """Lanes [first, last) of v; `other` elsewhere."""

    def codegen(context, builder, signature, args):
        v, first, last, other = args
        inside = builder.and_(builder.not_(_mask(builder, first)), _mask(builder, last))
        return builder.select(inside, v, splat(builder, other))

    return f32x16(f32x16, types.int64, types.int64, types.float32), codegen


@intrinsic
def store_part(typing, address, v, count):
    """The first `count` lanes to memory, nothing beyond them."""

    def codegen(context, builder, signature, args):
        pointer, mask = at(builder, args[0], V), _mask(builder, args[2])
        kind = ir.FunctionType(ir.VoidType(), [V, pointer.type, I32, mask.type])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v16f32.p0")
        builder.call(function, [args[1], pointer, I32(4), mask])
        return context.get_dummy_value()

    return types.void(types.int64, f32x16, types.int64), codegen


@inner
def load(address, count):
    """min(16, count) floats; the other lanes are 0."""
    return load_whole(address) if count >= 16 else load_part(address, count)


@inner
def store(address, v, count):
    """The first min(16, count) lanes."""
    if count >= 16:
        store_whole(address, v)
    else:
        store_part(address, v, count)


@intrinsic
def store_rounded(typing, address, v, count):
    """The first `count` lanes, |v| < 2^22, as the nearest signed bytes (half to even, -127…127)."""

    def codegen(context, builder, signature, args):
        v = builder.select(builder.fcmp_ordered(">", args[1], constant(127.0)), constant(127.0), args[1])
        v = builder.select(builder.fcmp_ordered("<", v, constant(-127.0)), constant(-127.0), v)
        whole = builder.bitcast(builder.fadd(v, constant(_ROUND)), VI)
        narrow = builder.trunc(whole, VB)
        pointer, mask = at(builder, args[0], VB), _mask(builder, args[2])
        kind = ir.FunctionType(ir.VoidType(), [VB, pointer.type, I32, mask.type])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v16i8.p0")
        builder.call(function, [narrow, pointer, I32(1), mask])
        return context.get_dummy_value()

    return types.void(types.int64, f32x16, types.int64), codegen


def _to_bf16(builder: ir.IRBuilder, v: ir.Value) -> ir.Value:
    """bf16 as 16-bit words, nearest and half to even; a NaN stays one."""
    bits = builder.bitcast(v, VI)
    sixteen, one = (ir.Constant(VI, [n] * LANES) for n in (16, 1))
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    rounded = builder.add(bits, builder.add(odd, ir.Constant(VI, [0x7FFF] * LANES)))
    quiet = builder.or_(bits, ir.Constant(VI, [0x400000] * LANES))
    rounded = builder.select(builder.fcmp_unordered("uno", v, v), quiet, rounded)
    return builder.trunc(builder.lshr(rounded, sixteen), VS)


@intrinsic
def store_bf16(typing, address, v):
    """16 bf16."""

    def codegen(context, builder, signature, args):
        builder.store(_to_bf16(builder, args[1]), at(builder, args[0], VS)).align = 2
        return context.get_dummy_value()

    return types.void(types.int64, f32x16), codegen


@intrinsic
def store_bf16_part(typing, address, v, count):
    """The first min(16, `count`) lanes as bf16."""

    def codegen(context, builder, signature, args):
        pointer, mask = at(builder, args[0], VS), _mask(builder, args[2])
        kind = ir.FunctionType(ir.VoidType(), [VS, pointer.type, I32, mask.type])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.store.v16i16.p0")
        builder.call(function, [_to_bf16(builder, args[1]), pointer, I32(2), mask])
        return context.get_dummy_value()

    return types.void(types.int64, f32x16, types.int64), codegen


@inner
def store_i8(address, v, count):
    """`store_rounded`; whole vectors without a mask."""
    store_rounded(address, v, 16 if count >= 16 else count)


# ---- functions --------------------------------------------------------------------

_EXP = (0.001393388219, 0.0083633356, 0.041666462828, 0.166665760395, 0.500000001367)
_TANH = (0.002272693085, -0.008326389301, 0.021763628498, -0.05395862331, 0.133333009601, -0.333333331559)


def _bits_of_power(builder: ir.IRBuilder, n: ir.Value) -> ir.Value:
    """2^n as floats, -126 ≤ n ≤ 127."""
    biased = builder.add(n, ir.Constant(VI, [127] * LANES))
    return builder.bitcast(builder.shl(biased, ir.Constant(VI, [23] * LANES)), V)


def emit_exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """exp(x) = 2^n · e^r with n whole and |r| ≤ ln(2)/2; e^r by a polynomial fitted there."""
    for limit, order in ((89.0, ">"), (-105.0, "<")):
        # ordered comparison: a NaN is no limit's business and stays
        beyond = builder.fcmp_ordered(order, x, constant(limit))
        x = builder.select(beyond, constant(limit), x)
    shifted = muladd(builder, x, constant(1.4426950408889634), constant(_ROUND))
    n = builder.fsub(shifted, constant(_ROUND))
    r = muladd(builder, n, constant(-0.693359375), x)
    r = muladd(builder, n, constant(2.12194440e-4), r)
    p = constant(_EXP[0])
    for c in _EXP[1:]:
        p = muladd(builder, p, r, constant(c))
    p = muladd(builder, builder.fmul(r, r), p, builder.fadd(r, constant(1.0)))
    whole = builder.sub(builder.bitcast(shifted, VI), ir.Constant(VI, [0x4B400000] * LANES))
    # two factors, so that results below 2^-126 and above 2^127 come out right
    half = builder.ashr(whole, ir.Constant(VI, [1] * LANES))
    p = builder.fmul(p, _bits_of_power(builder, half))
    return builder.fmul(p, _bits_of_power(builder, builder.sub(whole, half)))


@intrinsic
def vexp(typing, v):
    """e^v within 2 units in the last place; 0 and infinity beyond float32."""

    def codegen(context, builder, signature, args):
        return emit_exp(builder, args[0])

    return f32x16(f32x16), codegen


def emit_tanh(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """A polynomial below 0.6, 1 - 2/(e^2|x| + 1) above: relative error stays small near 0."""
    size = call(builder, "llvm.fabs.v16f32", V, x)
    square = builder.fmul(x, x)
    p = constant(_TANH[0])
    for c in _TANH[1:]:
        p = muladd(builder, p, square, constant(c))
    near = muladd(builder, builder.fmul(x, square), p, x)
    e = emit_exp(builder, builder.fadd(size, size))
    far = builder.fsub(constant(1.0), builder.fdiv(constant(2.0), builder.fadd(e, constant(1.0))))
    either = builder.select(builder.fcmp_ordered("<", size, constant(0.6)), near, far)
    return call(builder, "llvm.copysign.v16f32", V, either, x)


@intrinsic
def vtanh(typing, v):
    """tanh within 4 units in the last place."""

    def codegen(context, builder, signature, args):
        return emit_tanh(builder, args[0])

    return f32x16(f32x16), codegen


@intrinsic
def verf(typing, v):
    """The C library's erf, lane by lane."""

    def codegen(context, builder, signature, args):
        out = ir.Constant(V, ir.Undefined)
        for lane in range(LANES):
            one = call(builder, "erff", F32, builder.extract_element(args[0], I32(lane)))
            out = builder.insert_element(out, one, I32(lane))
        return out

    return f32x16(f32x16), codegen


@inner
def vsigmoid(v):
    """1 / (1 + e^-v)"""
    one = spread(types.float32(1))
    return one / (one + vexp(spread(types.float32(0)) - v))
