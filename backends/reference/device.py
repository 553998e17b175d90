"""The reference device: runs micro-instructions one after another by the functions of `evaluate`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from flashrt.backend import ABORT, I64, U8, Compute, Memory, Place, Rect
from flashrt.backends.reference import attention as paged
from flashrt.backends.reference.access import Access
from flashrt.backends.reference.arrays import Array, AttrMap, attr_at
from flashrt.backends.reference.evaluate import evaluate_node
from flashrt.backends.reference.kernels import Kernel, kernels, read_kernel
from flashrt.backends.reference.quants import SCHEMES, dequantize
from flashrt.errors import DeviceError, LawError
from flashrt.ir import micro
from flashrt.ir.ops import LINEAR_EXACT
from flashrt.ir.text import show_instr
from flashrt.ir.types import Env, TensorType
from flashrt.machine import Device

ALIGN = 64
_NAP = 20e-6  # seconds between two looks at a tick


@dataclass(frozen=True, slots=True)
class Row:
    """One instruction, ready to run. bias: the block of the `bias` instruction before it."""

    instr: Compute
    kernel: Kernel | None = None
    bias: micro.BlockRef | None = None


@dataclass(frozen=True, slots=True)
class Code:
    """Loaded instructions. stamps: [rows, 3] ns: arrived, started, ended."""

    rows: tuple[Row, ...]
    access: Access
    stamps: I64


class ReferenceDevice:
    """A device whose memory is the host's. It also runs `host.…` instructions of other devices."""

    def __init__(self, spec: Device) -> None:
        self.spec = spec

    def reserve(self, nbytes: int) -> U8:
        """Zeroed host memory, 64-byte aligned."""
        return aligned(nbytes)

    def load(self, instrs: Sequence[Compute], memory: Memory) -> Code:
        """Reads kernel names and joins each bias with its dispatch.

        Raises:
            PlanError: an unknown kernel.
            LawError: a bias without the dispatch it belongs to.
        """
        return Code(tuple(_rows(instrs)), Access(memory), np.zeros((len(instrs), 3), np.int64))

    def run(self, code: Code, epoch: int) -> None:
        """Waits, computes and signals, instruction by instruction."""
        memory, env = code.access.memory, code.access.env()
        for row, stamp in zip(code.rows, code.stamps, strict=True):
            stamp[0] = time.perf_counter_ns()
            wait(row.instr, memory, epoch)
            stamp[1] = time.perf_counter_ns()
            try:
                compute(row, code.access, env)
            except DeviceError:
                raise
            except Exception as error:
                raise DeviceError(f"{self.spec.id}: {error}", lines=f"    {show_instr(row.instr)}") from error
            stamp[2] = time.perf_counter_ns()
            signal(row.instr, memory, epoch)

    def stamps(self, code: Code) -> I64:
        """[instructions, 3] nanoseconds of the last run."""
        return code.stamps

    def copy(self, src: Rect, dst: Rect) -> None:
        """Copies rows between two places in host memory."""
        assert (src.rows, src.row_bytes) == (dst.rows, dst.row_bytes), (src, dst)
        _bytes(dst)[...] = _bytes(src)

    def write(self, data: U8, dst: Place) -> None:
        """Host bytes into a place."""
        assert len(data) <= dst.bytes, (len(data), dst.bytes)
        dst.buffer[dst.offset : dst.offset + len(data)] = data

    def close(self) -> None:
        """Nothing to end: memory goes with its last buffer."""


class ReferenceBackend:
    """Kind "reference": every named operation, in every layout, with every epilogue."""

    kind = "reference"

    def kernels(self) -> tuple[tuple[str, str], ...]:
        """What it runs: all of flashrt/ir/ops.py. `host.aten.…` rows come on top."""
        return kernels()

    def open(self, spec: Device) -> ReferenceDevice:
        """Opens a device; any number may be open."""
        return ReferenceDevice(spec)


def aligned(nbytes: int) -> U8:
    """Zeroed bytes on a 64-byte boundary."""
    raw = np.zeros(nbytes + ALIGN, np.uint8)
    skip = -raw.ctypes.data % ALIGN
    return raw[skip : skip + nbytes]


def _bytes(rect: Rect) -> U8:
    """A rectangle as [rows, row_bytes]: a view."""
    start = rect.place.offset + rect.offset
    end = start + max(0, rect.rows - 1) * rect.stride + rect.row_bytes
    assert rect.rows == 0 or end <= rect.place.offset + rect.place.bytes, rect
    flat = rect.place.buffer[start:]
    return np.lib.stride_tricks.as_strided(flat, (rect.rows, rect.row_bytes), (rect.stride, 1))


def _rows(instrs: Sequence[Compute]) -> Iterator[Row]:
    bias: micro.Bias | None = None
    for instr in instrs:
        kernel = read_kernel(instr.kernel) if isinstance(instr, micro.Dispatch) else None
        wanted = kernel is not None and kernel.bias
        if wanted != (bias is not None):
            raise LawError(
                "a bias stands directly before the dispatch whose kernel name has +bias",
                lines="\n".join(f"    {show_instr(i)}" for i in (bias, instr) if i is not None),
            )
        yield Row(instr, kernel, bias.block if bias else None)
        bias = instr if isinstance(instr, micro.Bias) else None
    if bias is not None:
        raise LawError("no dispatch follows a bias", lines=f"    {show_instr(bias)}")


def wait(instr: Compute, memory: Memory, epoch: int) -> None:
    """Returns when the ticks the instruction waits for are reached. DeviceError when the step is aborted."""
    for awaited in instr.waits:
        while memory.ticks[awaited.tick] < epoch + awaited.step and not memory.words[ABORT]:
            time.sleep(_NAP)
    if memory.words[ABORT]:
        raise DeviceError(f"step {epoch} was aborted", lines=f"    {show_instr(instr)}")


def signal(instr: Compute, memory: Memory, epoch: int) -> None:
    """Sets the instruction's tick."""
    if instr.signals is not None:
        memory.ticks[instr.signals] = epoch


def compute(row: Row, access: Access, env: Env) -> None:
    """Does what one instruction says; ranges of no width mean there is nothing to do."""
    match row.instr:
        case micro.Quantize(scheme=scheme) as q:
            assert scheme in SCHEMES, scheme
            with np.errstate(invalid="ignore"):  # rows of experts that aren't there are NaN
                access.slot(q.dst, env)[...] = SCHEMES[scheme](access.slot(q.src, env))
        case micro.Dispatch() as d:
            assert row.kernel is not None
            if d.dst is None or access.slot(d.dst, env).size:
                _dispatch(d, row.kernel, row.bias, access, env)
        case micro.Bias():
            pass  # it is read by the dispatch after it


def _dispatch(
    d: micro.Dispatch, kernel: Kernel, bias: micro.BlockRef | None, access: Access, env: Env
) -> None:
    attrs = {k: attr_at(v, env) for k, v in d.attrs}
    if kernel.op == "kv_write":
        kv = access.state(d.writes[0], d.device)
        paged.kv_write(kv, paged.Shape.of(attrs), *_arrays(d.args, d.device, access, env))
        return
    assert d.dst is not None, f"{d.kernel} has no dst"
    dst = access.slot(d.dst, env)
    if kernel.op == "embedding":
        ids, table = d.args
        assert isinstance(ids, micro.SlotRef) and isinstance(table, micro.BlockRef)
        dst[...] = access.rows(table, d.keeper, access.slot(ids, env))
        return
    args = _arrays(d.args, d.device, access, env)
    out = TensorType(access.slots[d.dst.slot].type.dtype, dst.shape)
    if kernel.op == "attention":
        shape, kv = paged.Shape.of(attrs), access.state(d.reads[0], d.device)
        # a host row is the whole node; elsewhere `kv_write` has written the keys and values
        if d.writes:
            dst[...] = paged.step(args, kv, shape, d.numerics)
        else:
            q, positions, seq, pages, *sinks = args
            sink = sinks[0] if sinks else None
            dst[...] = paged.attention(kv, shape, q, positions, seq, pages, sink, numerics=d.numerics)
    elif kernel.op == "linear":
        if bias is not None:
            args.insert(2, access.block(bias, d.device, env))
        dst[...] = _product("linear", args, {}, out, d.numerics, len(dst))
    elif kernel.op == "expert_linear":
        dst[...] = _product("expert_linear", args, attrs, out, d.numerics, None)
    else:
        state = access.state(d.writes[0], d.device) if d.writes else None
        dst[...] = evaluate_node(kernel.op, args, attrs, out, kv=state)


def _arrays(args: Sequence[micro.Arg], device: str, access: Access, env: Env) -> list[Array]:
    return [
        access.slot(a, env) if isinstance(a, micro.SlotRef) else access.block(a, device, env) for a in args
    ]


def _product(
    op: str, args: list[Array], attrs: AttrMap, out: TensorType, numerics: str, rows: int | None
) -> Array:
    """x is f32, or the u8 or bf16 that a `quantize` made of it; then it isn't quantised again.

    rows: of x, without the padding that bf16 has (None: as many as there are).
    """
    if args[0].dtype == ml_dtypes.bfloat16:
        args[0] = args[0][:rows, : args[1].shape[1]].astype(np.float32)
    if args[0].dtype == np.uint8:
        args[0], numerics = dequantize(args[0]), LINEAR_EXACT
    return evaluate_node(op, args, attrs, out, numerics)
