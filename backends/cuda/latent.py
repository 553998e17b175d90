"""Latent attention, whose cache holds one row for keys and values, and products by heads."""

from __future__ import annotations

from flashrt.backend import ROOM
from flashrt.backends.cuda import args
from flashrt.backends.cuda.args import Step, launch
from flashrt.backends.cuda.linear import PLAIN
from flashrt.backends.cuda.operands import Operands, Tensor
from flashrt.errors import PlanError
from flashrt.ir import micro
from flashrt.ir.ops import ATTENTION_BF16

SPLIT = 512  # blocks that are enough: with fewer, ranges of keys have blocks of their own
PAGES = 16  # of a range
HEADS = 8  # of a block
WIDEST = 640, 512  # channels of a key, of a value


def is_latent(instr: micro.Dispatch) -> bool:
    """Whether an attention or a kv_write is one of latent keys."""
    return instr.attr("latent") is True


def write(instr: micro.Dispatch, ops: Operands) -> list[Step]:
    """The launch that writes a step's rows into the cache."""
    k, v = ops.floats(instr.args[0]), ops.floats(instr.args[1])
    kv, _, d, bf16 = ops.state(instr)
    positions, seq, pages = (ops.tensor(arg) for arg in instr.args[2:5])
    fields = args.LatentWrite(
        k.address, k.stride, v.address, v.stride, k.width, d, kv, int(bf16),
        positions.address, seq.address, pages.address, _page_stride(instr.args[4], ops), ops.rows(k.rows),
    )  # fmt: skip
    return [launch("latent_write", (ops.number(k.rows),), 256, fields)]


def attention(instr: micro.Dispatch, y: Tensor, y_bf16: int, ops: Operands) -> list[Step]:
    """The launches of an attention. Raises PlanError where a key is wider than the kernel has room for."""
    q = ops.floats(instr.args[0])
    positions, seq, pages = (ops.tensor(arg) for arg in instr.args[1:4])
    kv, _, d, bf16 = ops.state(instr)
    heads, dv = _whole(instr, "heads"), _whole(instr, "value_dim")
    if d > WIDEST[0] or dv > WIDEST[1]:
        raise PlanError(f"{ops.device}: latent keys of {d} and {dv} channels; up to {WIDEST} can run here")
    rows, ranges, groups = ops.number(q.rows), -(-ops.number(pages.width) // PAGES), -(-heads // HEADS)
    results = 4 * rows * heads * ranges * (dv + 2)
    split = rows * groups < SPLIT and ranges > 1 and results <= ROOM
    parts = int(ops.scratch("room", ROOM).data_ptr()) if split else 0
    fields = args.Latent(
        q.address, q.stride, heads, d, dv, kv, int(bf16), positions.address, seq.address, pages.address,
        _page_stride(instr.args[3], ops), y.address, y.stride, y_bf16,
        ops.vector(instr.args[4] if len(instr.args) > 4 else None),
        _real(instr, "scale"), _real(instr, "softcap"), _whole(instr, "window"),
        int(instr.attr("causal", True) is not False), int(instr.numerics == ATTENTION_BF16),
        ops.rows(q.rows), parts, ranges,
    )  # fmt: skip
    grid = (rows, groups, ranges if split else 1)
    steps: list[Step] = [launch("latent_attention", grid, 32 * HEADS, fields, 64 * d)]
    return [*steps, launch("latent_merge", (rows, heads), 128, fields)] if split else steps


def head_linear(instr: micro.Dispatch, ops: Operands) -> list[Step]:
    """The launch of a product by heads."""
    x, w, y = ops.floats(instr.args[0]), ops.matrix(instr.args[1]), ops.floats(instr.dst)
    heads = _whole(instr, "heads")
    fields = args.HeadLinear(
        w.address, PLAIN[w.layout.name], heads, x.width // heads, w.n // heads, w.k,
        x.address, x.stride, y.address, y.stride, ops.rows(y.rows),
    )  # fmt: skip
    return [launch("head_linear", (-(-y.width // 8), -(-ops.number(y.rows) // 8)), 256, fields)]


def _page_stride(arg: micro.Arg, ops: Operands) -> int:
    """Device address of how many pages a sequence has in the table."""
    assert isinstance(arg, micro.SlotRef)
    return ops.rows(ops.slots[arg.slot].type.shape[-1])


def _whole(instr: micro.Dispatch, key: str) -> int:
    value = instr.attr(key) or 0
    assert isinstance(value, int), (key, value)
    return value


def _real(instr: micro.Dispatch, key: str) -> float:
    value = instr.attr(key) or 0.0
    assert isinstance(value, int | float), (key, value)
    return float(value)
