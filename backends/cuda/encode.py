"""From joint rows to launches, for one bucket of the symbols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flashrt.backend import ROOM
from flashrt.backends.cuda import args, latent, prefill
from flashrt.backends.cuda.args import Live, Step, launch
from flashrt.backends.cuda.experts import (
    expert_cache,
    expert_linear,
    expert_sum,
    gated_clamped,
    route,
)
from flashrt.backends.cuda.fuse import Joint, Row
from flashrt.backends.cuda.linear import linear
from flashrt.backends.cuda.operands import Operands, Tensor
from flashrt.backends.cuda.sample import sample
from flashrt.errors import PlanError
from flashrt.ir import micro, text
from flashrt.ir.ops import ATTENTION_BF16, PAGE
from flashrt.ir.types import Dim
from flashrt.layouts import BLOCK, BY_ROW

ACTS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "tanh": 5, "sigmoid": 6}
MAPS = {"gated": 0, "activation": 1, "add": 2, "mul": 3, "scale": 4, "softcap": 5}
FORMATS = {"f32": 0, "f16": 1, "bf16": 2, "q4.16x32": 4, "q4m.16x32": 5, "q8.16x32": 8}
TURNING = 4  # warps, each with a head to rotate, of a block
SPLIT = 64  # tokens up to which ranges of keys have blocks of their own
FULL = 1  # blocks of a processor from which on ranges need none of their own
FULL_TENSOR = 1 / 3  # the same where tensor cores multiply: some whole cells are soon quicker than many parts
WIDEST = 96 << 10  # bytes of pages beyond which a block has two warps instead of four
READERS, QUERIES = 4, 8  # warps of a block of source/attention_tensor.cu, and queries at most


def encode(joint: Joint, ops: Operands) -> list[Step]:
    """The launches of a kernel. Raises PlanError for one that isn't there."""
    row = joint.main
    if isinstance(row.instr, micro.Quantize):
        return _round(row.instr, ops)
    if row.op == "linear":
        return linear(joint, ops, ACTS)
    if row.op not in _ENCODERS:
        known = ", ".join(sorted((*_ENCODERS, "linear")))
        raise PlanError(
            f"{ops.device}: no kernel {row.instr.kernel!r}",
            lines=f"    {text.show_instr(row.instr)}",
            hint=f"kernels: {known}",
        )
    return _ENCODERS[row.op](joint, row.instr, ops)


def _attr(instr: micro.Dispatch, key: str, default: float = 0) -> Any:
    value = instr.attr(key, default)
    return default if value is None else value


def _over(count: int) -> int:
    """Blocks of 256 threads for so many elements."""
    return -(-count // 256)


def _out(joint: Joint, ops: Operands) -> tuple[Tensor, int]:
    """Where the result goes, and how it is written."""
    return ops.result(joint.dst, rounded=joint.rounded is not None)


def _embedding(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    ids, y = ops.index(instr.args[0]), ops.tensor(instr.dst)
    w = ops.matrix(instr.args[1], instr.keeper)
    fields = args.Embedding(
        ids.address, int(ids.item == 8), w.address, 0, w.n, w.k, FORMATS[w.layout.grouped],
        y.address, y.stride, ops.rows(ids.rows),
    )  # fmt: skip
    if w.layout.name in BY_ROW.values():
        blocks = -(-w.k // (BLOCK * 128))
        return [launch("embedding_rows", (blocks, ops.number(ids.rows)), 128, fields)]
    return [launch("embedding", (_over(w.k), ops.number(ids.rows)), 256, fields)]


def _norm(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    x, (y, how) = ops.floats(instr.args[0]), _out(joint, ops)
    width = _attr(instr, "width") or x.width
    w = instr.args[1] if len(instr.args) > 1 else None
    b = instr.args[2] if len(instr.args) > 2 else None
    fields = args.Norm(
        x.address, x.stride, ops.vector(w), ops.vector(b), y.address, y.stride, how,
        x.width // width, width, ops.elements(w) if w else 1,
        float(_attr(instr, "eps")), float(_attr(instr, "offset")), int(joint.main.op == "layer_norm"),
        ops.rows(x.rows),
    )  # fmt: skip
    return [launch("normalise", (ops.number(x.rows), x.width // width), 512, fields)]


def _rope_table(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    positions, y = ops.index(instr.args[0]), ops.floats(instr.dst)
    fields = args.RopeTable(
        positions.address, int(positions.item == 8), ops.vector(instr.args[1]), y.address, y.stride,
        ops.elements(instr.args[1]), float(_attr(instr, "scale", 1.0)), ops.rows(positions.rows),
    )  # fmt: skip
    return [launch("rope_table", (ops.number(positions.rows),), 128, fields)]


def _rope(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    x, table, y = ops.floats(instr.args[0]), ops.floats(instr.args[1]), ops.floats(instr.dst)
    d = _attr(instr, "head_dim")
    fields = args.Rope(
        q=x.address, q_stride=x.stride, heads=x.width // d, q_out=y.address, q_out_stride=y.stride,
        table=table.address, table_stride=table.stride, half=table.width // 2, d=d, rows=ops.rows(x.rows),
    )  # fmt: skip
    if joint.keys is not None and joint.write is not None:
        if latent.is_latent(joint.write):
            both = (_rope(Joint(Row(row)), row, ops) for row in (instr, joint.keys))
            return [*(step for steps in both for step in steps), *latent.write(joint.write, ops)]
        fields = _written(joint.write, joint.keys.args[0], ops, fields)
    return _roped(fields, ops.number(x.rows))


def _rope_pairs(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    x, table, y = ops.floats(instr.args[0]), ops.floats(instr.args[1]), ops.floats(instr.dst)
    d = _attr(instr, "head_dim")
    fields = args.Pairs(
        x.address, x.stride, table.address, table.stride, y.address, y.stride, x.width // d, d,
        table.width // 2, ops.rows(x.rows),
    )  # fmt: skip
    pairs = x.width // d * -(-d // 2)
    return [launch("rope_pairs", (_over(pairs), ops.number(x.rows)), 256, fields)]


def _kv_write(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    if latent.is_latent(instr):
        return latent.write(instr, ops)
    k = ops.floats(instr.args[0])
    fields = _written(instr, instr.args[0], ops, args.Rope(d=_attr(instr, "head_dim"), rows=ops.rows(k.rows)))
    return _roped(fields, ops.number(k.rows))


def _written(write: micro.Dispatch, keys: micro.Arg, ops: Operands, fields: args.Rope) -> args.Rope:
    """With keys, values and cache of a kv_write."""
    k, v = ops.floats(keys), ops.floats(write.args[1])
    positions, seq, pages = (_lookup(a, ops) for a in write.args[2:5])
    kv, heads, dim, bf16 = ops.state(write)
    return fields._replace(
        k=k.address, k_stride=k.stride, k_heads=heads, v=v.address, v_stride=v.stride, v_heads=heads,
        d=k.width // heads, dv=v.width // heads, kv=kv, dim=dim, bf16=int(bf16),
        positions=positions.address, seq=seq.address, pages=pages.address,
        page_stride=_last(write.args[4], ops), late=_late(write.args[2:5], ops),
    )  # fmt: skip


def _roped(fields: args.Rope, rows: int) -> list[Step]:
    heads = fields.heads + fields.k_heads + fields.v_heads
    return [launch("rope", (rows, -(-heads // TURNING)), 32 * TURNING, fields)]


def _lookup(arg: micro.Arg, ops: Operands) -> Tensor:
    tensor = ops.tensor(arg)
    if tensor.dtype != "i32":
        raise PlanError(f"{ops.device}: attention takes positions, sequences and pages as i32")
    return tensor


def _late(args: tuple[micro.Arg, ...], ops: Operands) -> int:
    """Whether one of these is no input of the step: it isn't there before a kernel may start."""
    return int(any(not isinstance(a, micro.SlotRef) or ops.twin(a.slot) is None for a in args))


def _last(arg: micro.Arg, ops: Operands) -> int:
    """Device address of the size of a slot's last axis."""
    assert isinstance(arg, micro.SlotRef)
    return ops.rows(ops.slots[arg.slot].type.shape[-1])


def alone(instr: micro.Dispatch, ops: Operands) -> bool:
    """Whether an attention is one token's, which can then rotate and write what it needs itself: there must
    be room for the sums of its ranges of keys."""
    if latent.is_latent(instr) or ops.number(ops.tensor(instr.dst).rows) != 1:
        return False
    return _ranges(instr, ops).sums <= ROOM


class Ranges(NamedTuple):
    """How an attention's keys are shared. together: query heads of a block; cells: blocks for a token and
    a range; page: bytes of one in shared memory; warps: pages of a range; ranges: of the page table; sums:
    bytes of those of all ranges."""

    together: int
    cells: int
    page: int
    warps: int
    ranges: int
    sums: int


def _ranges(instr: micro.Dispatch, ops: Operands) -> Ranges:
    _, kv_heads, dim, bf16 = ops.state(instr)
    heads = _attr(instr, "heads")
    together = next(g for g in (4, 2, 1) if heads // kv_heads % g == 0)
    rows, cells = ops.number(ops.tensor(instr.dst).rows), heads // together
    page = 2 * PAGE * (-(-dim * (2 if bf16 else 4) // 128) * 128 + 32)  # bytes in shared memory
    warps = 4 if 4 * page <= WIDEST else 2
    ranges = -(-ops.number(_lookup(instr.args[3], ops).width) // warps)
    return Ranges(together, cells, page, warps, ranges, 4 * rows * cells * ranges * together * (dim + 2))


def _attention(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    if latent.is_latent(instr):
        return latent.attention(instr, *_out(joint, ops), ops)
    if prefill.possible(instr, ops):
        assert joint.dst is not None
        return [Live(prefill.LibraryAttention(instr, joint.dst, ops))]
    q, (y, how) = ops.floats(joint.reads[0]), _out(joint, ops)
    positions, seq, pages = (_lookup(a, ops) for a in instr.args[1:4])
    kv, kv_heads, dim, bf16 = ops.state(instr)
    heads, d, dv = (_attr(instr, key) for key in ("heads", "head_dim", "value_dim"))
    pairs = next((p for p in (1, 2, 4) if dim <= 64 * p), 0)
    if not pairs or d % 2 or dv % 2:
        raise PlanError(f"{ops.device}: heads of {d} and {dv} channels; even numbers up to 256 can run here")
    rows, (together, cells, page, warps, ranges, sums) = ops.number(q.rows), _ranges(instr, ops)
    tensor = bf16 and instr.numerics == ATTENTION_BF16 and not (d | dv | dim) % 8
    full = (FULL_TENSOR if tensor else FULL) * ops.limits.processors
    split = ranges > 1 and rows <= SPLIT and rows * cells < full and sums <= ROOM
    parts = through = 0
    few = split or joint.queries is not None
    if few:
        parts = _scratch("room", ROOM, ops)
        through = _scratch("attention through", 4 * SPLIT * cells, ops)
    fields = args.Attention(
        q.address, q.stride, heads, kv_heads, d, dv, kv, dim, int(bf16),
        positions.address, seq.address, pages.address, _last(instr.args[3], ops),
        y.address, y.stride, how, ops.vector(instr.args[4] if len(instr.args) > 4 else None),
        float(_attr(instr, "scale")), float(_attr(instr, "softcap")), _attr(instr, "window"),
        int(instr.attr("causal", True) is not False), int(instr.numerics == ATTENTION_BF16),
        _late(instr.args[1:4], ops), ops.rows(q.rows), parts, through,
    )  # fmt: skip
    if joint.queries and joint.keys and joint.write:
        table = ops.floats(joint.queries.args[1])
        fields = fields._replace(
            k=ops.floats(joint.keys.args[0]).address, v=ops.floats(joint.write.args[1]).address,
            table=table.address, half=table.width // 2,
        )  # fmt: skip
    if tensor and not few:
        return [_on_tensor_cores(fields, rows, pairs)]
    grid = (rows, cells, ranges if few else 1)
    shared = warps * page + 4 * together * (64 * pairs + warps * (dim + 18)) + 16
    name, threads = ("attention_few", 32 * warps * together) if few else ("attention", 32 * warps)
    return [launch(f"{name}_{together}_{pairs}", grid, threads, fields, shared)]


def _on_tensor_cores(fields: args.Attention, rows: int, pairs: int) -> Step:
    """A bf16 cache and rounded queries and weights. pairs: width of a head in 64 channels."""
    width = 64 * pairs
    ring = (2 if width > 128 else 3) * PAGE * width * 2  # bytes of a warp's
    shared = READERS * ring + QUERIES * width * 2 + READERS * QUERIES * 8
    batches = -(-(fields.heads // fields.kv_heads) // QUERIES)
    grid = (rows, fields.kv_heads * batches)
    return launch(f"attention_tensor_{pairs}", grid, 32 * READERS, fields, shared)


def _scratch(what: str, nbytes: int, ops: Operands) -> int:
    return int(ops.scratch(what, nbytes).data_ptr())


def _map(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    a, (y, how), what = ops.floats(instr.args[0]), _out(joint, ops), joint.main.op
    b, b_stride, b_step = 0, 0, 0
    if len(instr.args) > 1:
        b = ops.vector(instr.args[1])
        b_stride, b_step = _broadcast(instr.args[1], a, ops)
    by = _attr(instr, "cap" if what == "softcap" else "by")
    fields = args.Map(
        a.address, a.stride, b, b_stride, b_step, y.address, y.stride, how, a.width, MAPS[what],
        ACTS.get(_attr(instr, "act"), 0), float(by), ops.rows(a.rows),
    )  # fmt: skip
    return [args.elementwise(fields, ops.number(a.rows))]


def _broadcast(arg: micro.Arg, a: Tensor, ops: Operands) -> tuple[int, int]:
    """(row stride, element step) of a second operand: same shape, one row, or one number."""
    if isinstance(arg, micro.SlotRef):
        b = ops.tensor(arg)
        if b.width == a.width:
            return (b.stride if b.rows == a.rows else 0), 1
        return 0, 0
    matrix = ops.matrix(arg)
    if matrix.n * matrix.k == 1:
        return 0, int(a.width == 1)
    return (matrix.k if matrix.k == a.width and a.rows != 1 else 0), 1


def _copied(x: Tensor, y: Tensor, ops: Operands, index: Tensor | None = None) -> list[Step]:
    """Every row of x, or those that `index` names, to the rows of y."""
    count: Dim = x.rows if index is None else index.rows
    at, wide = (index.address, int(index.item == 8)) if index else (0, 0)
    nbytes = x.width * x.item
    if nbytes % 4:
        raise PlanError(f"{ops.device}: rows of {nbytes} bytes; whole words can be copied here")
    fields = args.Move(
        x.address, x.stride * x.item, at, wide, ops.number(x.rows),
        y.address, y.stride * y.item, nbytes // 4, ops.rows(count),
    )  # fmt: skip
    return [launch("move_rows", (_over(nbytes // 4), ops.number(count)), 256, fields)]


def _slice(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    x, y = ops.tensor(instr.args[0]), ops.tensor(instr.dst)
    lo, hi = _attr(instr, "lo"), _attr(instr, "hi")
    part = Tensor(x.address + lo * x.item, x.rows, hi - lo, x.stride, x.item, x.dtype)
    return _copied(part, y, ops)


def _view(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    x, y = ops.tensor(instr.args[0]), ops.tensor(instr.dst)
    if x.width == y.width:
        return _copied(x, y, ops)
    assert x.width == x.stride and y.width == y.stride, "a view of some channels isn't dense"
    return _copied(x, Tensor(y.address, x.rows, x.width, x.width, y.item, y.dtype), ops)


def _rows(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    x, index, y = ops.tensor(instr.args[0]), ops.index(instr.args[1]), ops.tensor(instr.dst)
    return _copied(x, y, ops, index)


def _round(instr: micro.Quantize, ops: Operands) -> list[Step]:
    x, y = ops.floats(instr.src), ops.tensor(instr.dst)
    if instr.scheme == "i8/32":
        whole = args.Quantize(x.address, x.stride, x.width, y.address, y.stride, ops.rows(x.rows))
        return [launch("quantize", (_over(x.width), ops.number(x.rows)), 256, whole)]
    if instr.scheme != "bf16":
        what = f"{ops.device}: no quantize {instr.scheme!r}"
        raise PlanError(what, lines=f"    {text.show_instr(instr)}", hint="known: bf16, i8/32")
    (result, how), rows = ops.result(instr.dst, rounded=True), (ops.rows(x.rows), ops.rows(y.rows))
    fields = args.Round(x.address, x.stride, x.width, y.address, result.stride, how, y.width, *rows)
    return [launch("round_bf16", (_over(-(-y.width // 4)), ops.number(y.rows)), 256, fields)]


def _route(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    return route(instr, ops)


def _expert_linear(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    return expert_linear(instr, ops)


def _head_linear(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    return latent.head_linear(instr, ops)


def _expert_sum(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    return expert_sum(instr, ops)


def _expert_cache(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    return expert_cache(instr, ops)


def _gated_clamped(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    return gated_clamped(instr, ops)


def _sample(joint: Joint, instr: micro.Dispatch, ops: Operands) -> list[Step]:
    return sample(instr, ops)


Encoder = Callable[[Joint, micro.Dispatch, Operands], list[Step]]
_ENCODERS: Mapping[str, Encoder] = {
    "embedding": _embedding,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "rope_table": _rope_table,
    "rope": _rope,
    "rope_pairs": _rope_pairs,
    "kv_write": _kv_write,
    "attention": _attention,
    **dict.fromkeys(MAPS, _map),
    "slice": _slice,
    "view": _view,
    "rows": _rows,
    "sample": _sample,
    "route": _route,
    "expert_linear": _expert_linear,
    "head_linear": _head_linear,
    "expert_sum": _expert_sum,
    "expert_join": _expert_sum,
    "expert_cache": _expert_cache,
    "gated_clamped": _gated_clamped,
}
