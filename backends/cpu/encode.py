"""From one instruction to the fields of its row: where operands lie, how large they are.

Fields stay sizes (`Dim`) here; the table writes their numbers when symbols are
known. Channel ranges of blocks count rows of the whole weight, wherever the
device's part of it begins.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from flashrt.backend import U8, Compute, Memory, Place
from flashrt.backends.cpu import rows
from flashrt.backends.cpu.cache import function_of
from flashrt.backends.cpu.kernels import KERNELS, offered
from flashrt.errors import PlanError
from flashrt.ir import micro, text
from flashrt.ir.ops import ATTENTION_EXACT, LINEAR_EXACT
from flashrt.ir.types import DTYPES, Dim, ceildiv, product, size
from flashrt.layouts import BLOCK, LAYOUTS


@dataclass(frozen=True, slots=True)
class Tensor:
    """A slot, or channels of it: rows × width elements, `stride` elements from row to row."""

    address: Dim
    rows: Dim
    width: Dim
    stride: Dim
    item: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of a weight block: `n` rows of k elements, `offset` bytes beyond what table word `at` holds."""

    at: int
    offset: Dim
    n: Dim
    k: int
    elements: int
    layout: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row: the compiled function, its fields, and its cost in cycles of one thread (a guess)."""

    kernel: str
    fields: rows.Fields
    cycles: Dim
    keep: U8 | None = None


@dataclass(frozen=True, slots=True)
class Operands:
    """Finds operands in a memory. threads: how many share the work (for scratch)."""

    memory: Memory
    device: str
    threads: int
    slots: Mapping[int, micro.Slot]
    blocks: Mapping[str, micro.Block]
    scratches: dict[int, U8] = field(default_factory=dict)
    commons: dict[int, U8] = field(default_factory=dict)

    def scratch(self, nbytes: int) -> int:
        """Address of memory of `nbytes` for each thread; rows that ask for the same size share it."""
        if nbytes not in self.scratches:
            self.scratches[nbytes] = aligned(self.threads * nbytes)
        return int(self.scratches[nbytes].ctypes.data)

    def shared(self, nbytes: int) -> int:
        """Address of zeroed memory of all threads; rows that ask for the same size share it."""
        if nbytes not in self.commons:
            self.commons[nbytes] = aligned(nbytes)
        return int(self.commons[nbytes].ctypes.data)

    @staticmethod
    def of(memory: Memory, device: str, threads: int) -> Operands:
        slots = {s.id: s for s in memory.stream.slots}
        blocks = {b.name: b for b in memory.stream.blocks if b.device == device}
        return Operands(memory, device, threads, slots, blocks)

    def tensor(self, arg: micro.Arg | None) -> Tensor:
        assert isinstance(arg, micro.SlotRef), arg
        type = self.slots[arg.slot].type
        *outer, last = type.shape or (1,)
        lo: Dim = 0 if arg.lo is None else arg.lo
        hi = last if arg.hi is None else arg.hi
        item = DTYPES[type.dtype]
        address = lo * item + host_address(self.memory.slot(arg.slot))
        return Tensor(address, product(outer), hi - lo, last, item)

    def check_floats(self, instr: micro.Dispatch) -> None:
        """Raises PlanError for a slot that isn't f32, which is all that most kernels read and write."""
        for arg in (*instr.args, instr.dst):
            if isinstance(arg, micro.SlotRef) and (dtype := self.slots[arg.slot].type.dtype) != "f32":
                what = f"cpu: {instr.kernel} takes f32, and %{arg.slot} is {dtype}"
                raise PlanError(what, lines=text.show_instr(instr))

    def index(self, arg: micro.Arg) -> Tensor:
        """A slot of row numbers, positions or ids."""
        assert isinstance(arg, micro.SlotRef), arg
        if (dtype := self.slots[arg.slot].type.dtype) not in ("i32", "i64"):
            raise PlanError(f"cpu: %{arg.slot} is {dtype}; kernels look things up by i32 or i64")
        return self.tensor(arg)

    def matrix(self, arg: micro.Arg) -> Matrix:
        assert isinstance(arg, micro.BlockRef), arg
        weight = next(w for w in self.memory.stream.weights if w.name == arg.block)
        block = self.blocks[arg.block]
        shape = [size(d, {}) for d in weight.type.shape] or [1]
        layout = LAYOUTS[weight.layout or "f32"]
        k = shape[1] if len(shape) == 2 else int(np.prod(shape[1:], dtype=np.int64))
        lo: Dim = block.lo if arg.lo is None else arg.lo
        hi: Dim = block.hi if arg.hi is None else arg.hi
        # a group's bytes are a whole number a row, so ranges that move stay linear in their bounds
        per_row = layout.group_bytes(k) // layout.rows
        offset = (lo - block.lo) * per_row
        index = self.memory.block_of(arg.block, self.device)
        at = int(self.memory.table.ctypes.data) + 8 * index
        return Matrix(at, offset, hi - lo, k, (block.hi - block.lo) * k, layout.name)

    def either(self, arg: micro.Arg) -> tuple[Dim, Dim]:
        """(`…_at`, address or offset) of a slot or a block."""
        if isinstance(arg, micro.SlotRef):
            return 0, self.tensor(arg).address
        matrix = self.matrix(arg)
        assert matrix.layout == "f32", f"{arg.block} is {matrix.layout}: only matrix products read that"
        return matrix.at, matrix.offset

    def state(self, instr: micro.Dispatch) -> tuple[int, int, int, int]:
        """(address, heads, dim, bytes of an element) of the state kv[P,2,heads,16,dim] of an instruction."""
        (name,) = instr.writes or instr.reads
        type = next(s.type for s in self.memory.stream.states if s.name == name)
        heads, dim = size(type.shape[2], {}), size(type.shape[4], {})
        return host_address(self.memory.state(name, self.device)), heads, dim, DTYPES[type.dtype]


def host_address(place: Place) -> int:
    """Where a place of host memory begins."""
    assert isinstance(place.buffer, np.ndarray), "not host memory"
    return place.buffer.ctypes.data + place.offset


def bits(value: object) -> int:
    """The bits of a float64, as an int64."""
    assert isinstance(value, int | float), value
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def real(instr: micro.Dispatch, key: str, default: float = 0.0) -> int:
    """A float attribute's bits; `default` where it is missing or None."""
    value = instr.attr(key, default)
    return bits(default if value is None else value)


def whole(instr: micro.Dispatch, key: str, default: int = 0) -> int:
    """An int attribute; `default` where it is missing or None."""
    value = instr.attr(key, default)
    if value is None:
        return default
    assert isinstance(value, int), (key, value)
    return value


def _linear(instr: micro.Dispatch, ops: Operands, bias: micro.BlockRef | None) -> Encoded:
    epilogue = instr.kernel.partition("+")[2]
    x, w, y = ops.tensor(instr.args[0]), ops.matrix(instr.args[1]), ops.tensor(instr.dst)
    bias_at: tuple[Dim, Dim] = ops.either(bias) if bias else (0, 0)
    residual: tuple[Dim, Dim] = (0, 0)
    if "residual" in epilogue.split("+"):
        r = ops.tensor(instr.args[-1])
        residual = (r.address, r.stride)
    function = function_of(instr.kernel, instr.numerics or LINEAR_EXACT)
    assert function is not None, instr
    scratch, per_cycle = _scratch(function, w.k, ops)
    fields = rows.Linear(
        x.address, x.stride, w.at, w.offset, y.address, y.stride, *bias_at, *residual,
        x.rows, w.n, w.k, *scratch,
    )  # fmt: skip
    return Encoded(function, fields, x.rows * w.n * (w.k / per_cycle))


def _scratch(function: str, k: int, ops: Operands) -> tuple[tuple[int, int], int]:
    """((address, bytes) of each thread's scratch, multiplications a cycle) of a matrix product."""
    each, per_cycle = _product_scratch(function, k)
    return (ops.scratch(each) if each else 0, each), per_cycle


def _product_scratch(function: str, k: int) -> tuple[int, int]:
    """(bytes of each thread's scratch, multiplications a cycle) of a matrix product."""
    if function.startswith(("linear_vnni.", "linear_i8.", "linear_i8_tiles.")):
        layout = LAYOUTS[function.partition(".")[2]]
        each = rows.RUN * rows.i8_row_bytes(k, BLOCK // layout.block) + (512 + rows.TILE) * rows.SUM_BLOCKS
        return each, 4 if function.startswith("linear_i8.") else 16
    if function.startswith("linear_amx."):
        return rows.TILE_SCRATCH, 128
    return 0, 16


def _expert_linear(instr: micro.Dispatch, ops: Operands) -> Encoded:
    x, w, route = ops.tensor(instr.args[0]), ops.matrix(instr.args[1]), ops.tensor(instr.args[2])
    y, experts, top_k = ops.tensor(instr.dst), whole(instr, "experts"), whole(instr, "top_k")
    bias: tuple[Dim, Dim] = ops.either(instr.args[3]) if len(instr.args) > 3 else (0, 0)
    layout, n = LAYOUTS[w.layout], size(w.n, {}) // experts
    if n % layout.rows:
        raise PlanError(
            f"cpu: the {n} rows of an expert aren't whole groups of {w.layout}", lines=text.show_instr(instr),
            hint="store the experts in f32, f16 or bf16",
        )  # fmt: skip
    function = function_of(instr.kernel, instr.numerics or LINEAR_EXACT)
    assert function is not None, instr
    row = size(x.stride, {}) * x.item
    each, per_cycle = _expert_scratch(function, w.k, experts, row)
    fields = rows.Experts(
        x.address, x.stride, row, int(bool(instr.attr("shared"))), int(x.item == 2), w.at, w.offset,
        n // layout.rows * layout.group_bytes(w.k), 16 // layout.rows * layout.group_bytes(w.k),
        y.address, y.stride, *bias, route.address, route.stride, route.rows, n, w.k, experts, top_k,
        ops.scratch(each), each,
    )  # fmt: skip
    return Encoded(function, fields, route.rows * (top_k * n) * (w.k / per_cycle))


def _expert_scratch(function: str, k: int, experts: int, row: int) -> tuple[int, int]:
    """(bytes of each thread's scratch, multiplications a cycle): counts, results, rows of x, its own."""
    inner, per_cycle = _product_scratch(function.removeprefix("expert_"), k)
    parts = (8 * experts, 4 * 16 * rows.WIDE * rows.RUN, rows.RUN * row, inner)
    return sum(-(-p // 64) * 64 for p in parts), per_cycle


def _head_linear(instr: micro.Dispatch, ops: Operands) -> Encoded:
    x, w, y = ops.tensor(instr.args[0]), ops.matrix(instr.args[1]), ops.tensor(instr.dst)
    heads, layout = whole(instr, "heads"), LAYOUTS[w.layout]
    n = size(w.n, {}) // heads
    if n % layout.rows:
        raise PlanError(
            f"cpu: the {n} rows of a head aren't whole groups of {w.layout}", lines=text.show_instr(instr),
            hint="store them in f32, f16 or bf16",
        )  # fmt: skip
    group = layout.group_bytes(w.k)
    fields = rows.Heads(
        x.address, x.stride, size(x.width, {}) // heads, w.at, w.offset, n // layout.rows * group,
        16 // layout.rows * group, y.address, y.stride, x.rows, heads, n, w.k,
    )  # fmt: skip
    return Encoded(instr.kernel, fields, x.rows * (heads * n) * (w.k / 16))


def _route(instr: micro.Dispatch, ops: Operands) -> Encoded:
    x, y = ops.tensor(instr.args[0]), ops.tensor(instr.dst)
    bias: tuple[Dim, Dim] = ops.either(instr.args[1]) if len(instr.args) > 1 else (0, 0)
    experts = size(x.width, {})
    each = 3 * (-(-experts // 16) * 64)
    fields = rows.Route(
        x.address, x.stride, *bias, y.address, y.stride, x.rows, experts, whole(instr, "top_k"),
        int(instr.attr("score") == "softmax"), int(bool(instr.attr("normalise"))), whole(instr, "groups"),
        whole(instr, "top_groups"), int(instr.attr("group_score") == "sum2"), real(instr, "scale", 1.0),
        ops.scratch(each), each,
    )  # fmt: skip
    return Encoded("route", fields, x.rows * experts * (2 + whole(instr, "top_k")))


def _expert_sum(instr: micro.Dispatch, ops: Operands) -> Encoded:
    y, route, out = ops.tensor(instr.args[0]), ops.tensor(instr.args[1]), ops.tensor(instr.dst)
    fields = rows.ExpertSum(
        y.address, y.stride, route.address, route.stride, out.address, out.stride, out.rows, out.width,
        whole(instr, "top_k"),
    )  # fmt: skip
    return Encoded("expert_sum", fields, y.rows * y.width * 0.25)


def _gated_clamped(instr: micro.Dispatch, ops: Operands) -> Encoded:
    encoded = _binary("gated_clamped", 2.0)(instr, ops)
    assert isinstance(encoded.fields, rows.Map)
    fields = encoded.fields._replace(f64_by=real(instr, "alpha"), f64_limit=real(instr, "limit"))
    return Encoded(encoded.kernel, fields, encoded.cycles)


def _embedding(instr: micro.Dispatch, ops: Operands) -> Encoded:
    ids, w, y = ops.index(instr.args[0]), ops.matrix(instr.args[1]), ops.tensor(instr.dst)
    count = ids.rows * ids.width
    assert isinstance(instr.args[1], micro.BlockRef) and ops.blocks[instr.args[1].block].lo == 0, instr
    fields = rows.Embedding(ids.address, w.at, w.offset, y.address, y.stride, count, w.n, w.k, ids.item)
    return Encoded(instr.kernel, fields, count * w.k * 2)


def _norm(instr: micro.Dispatch, ops: Operands) -> Encoded:
    x, y = ops.tensor(instr.args[0]), ops.tensor(instr.dst)
    channels = size(x.width, {})
    width = whole(instr, "width") or channels
    w: tuple[Dim, Dim] = ops.either(instr.args[1]) if len(instr.args) > 1 else (0, 0)
    b: tuple[Dim, Dim] = ops.either(instr.args[2]) if len(instr.args) > 2 else (0, 0)
    w_size = _elements(instr.args[1], ops) if len(instr.args) > 1 else width
    fields = rows.Norm(
        x.address, x.stride, *w, *b, y.address, y.stride, x.rows, channels // width, width, w_size,
        real(instr, "eps"), real(instr, "offset"),
    )  # fmt: skip
    return Encoded(instr.kernel, fields, x.rows * channels * 0.5)


def _elements(arg: micro.Arg, ops: Operands) -> int:
    if isinstance(arg, micro.BlockRef):
        return ops.matrix(arg).elements
    tensor = ops.tensor(arg)
    return size(tensor.rows * tensor.width, {})


def _rope_table(instr: micro.Dispatch, ops: Operands) -> Encoded:
    positions, y = ops.index(instr.args[0]), ops.tensor(instr.dst)
    half = _elements(instr.args[1], ops)
    count = positions.rows * positions.width
    w, scale = ops.either(instr.args[1]), real(instr, "scale", 1.0)
    fields = rows.RopeTable(positions.address, *w, y.address, y.stride, count, half, scale, positions.item)
    return Encoded("rope_table", fields, count * half * 100)


def _rope(instr: micro.Dispatch, ops: Operands) -> Encoded:
    x, table, y = ops.tensor(instr.args[0]), ops.tensor(instr.args[1]), ops.tensor(instr.dst)
    dim = whole(instr, "head_dim")
    fields = rows.Rope(
        x.address, x.stride, table.address, table.stride, y.address, y.stride,
        x.rows, size(x.width, {}) // dim, dim, size(table.width, {}) // 2,
    )  # fmt: skip
    return Encoded(instr.kernel, fields, x.rows * x.width * 0.5)


def _kv_write(instr: micro.Dispatch, ops: Operands) -> Encoded:
    k, v, positions, seq, pages = (ops.tensor(a) for a in instr.args)
    kv, heads, dim, item = ops.state(instr)
    widths = size(k.width, {}) // heads, size(v.width, {}) // heads
    fields = rows.KvWrite(
        k.address, k.stride, v.address, v.stride, positions.address, seq.address,
        pages.address, pages.stride, kv, k.rows, heads, *widths, dim, item, int(bool(instr.attr("latent"))),
    )  # fmt: skip
    return Encoded("kv_write", fields, k.rows * (k.width + v.width) * 0.5)


def _attention(instr: micro.Dispatch, ops: Operands) -> Encoded:
    q, positions, seq, pages = (ops.tensor(a) for a in instr.args[:4])
    y = ops.tensor(instr.dst)
    kv, kv_heads, dim, item = ops.state(instr)
    latent = bool(instr.attr("latent"))
    sinks: tuple[Dim, Dim] = ops.either(instr.args[4]) if len(instr.args) > 4 else (0, 0)
    causal = instr.attr("causal", True)
    function = function_of("attention", instr.numerics or ATTENTION_EXACT)
    assert function is not None, instr
    if function == "attention_tiles":
        each, shared = rows.attention_bytes(whole(instr, "head_dim"), whole(instr, "value_dim")), 0
    else:
        each, shared = (
            16 * 4 * whole(instr, "value_dim"),
            ops.shared((rows.LATENT_BYTES if latent else rows.SHARED_BYTES) + 8 * rows.FEW * kv_heads),
        )
    fields = rows.Attention(
        q.address, q.stride, positions.address, seq.address, pages.address, pages.stride, kv, *sinks,
        y.address, y.stride, q.rows, whole(instr, "heads"), kv_heads, whole(instr, "head_dim"),
        whole(instr, "value_dim"), dim, item, whole(instr, "window"), int(causal is None or bool(causal)),
        real(instr, "scale", 1.0), real(instr, "softcap"), int(latent),
        ops.scratch(each), each, shared,
    )  # fmt: skip
    return Encoded(function, fields, q.rows * q.width * 100)


def _binary(kernel: str, cycles: float) -> Callable[[micro.Dispatch, Operands], Encoded]:
    def encode(instr: micro.Dispatch, ops: Operands) -> Encoded:
        a, y = ops.tensor(instr.args[0]), ops.tensor(instr.dst)
        b_stride, b_step = _broadcast(instr.args[1], a, ops)
        name = f"{kernel}.{instr.attr('act')}" if kernel == "gated" else kernel
        fields = rows.Map(
            a.address, a.stride, *ops.either(instr.args[1]), b_stride, b_step,
            y.address, y.stride, a.rows, a.width, 0,
        )  # fmt: skip
        return Encoded(name, fields, a.rows * a.width * cycles)

    return encode


def _broadcast(arg: micro.Arg, a: Tensor, ops: Operands) -> tuple[Dim, int]:
    """(row stride, element step) of a second operand: same shape, one row, or one number."""
    if isinstance(arg, micro.SlotRef):
        b = ops.tensor(arg)
        if b.width == a.width:
            return (b.stride if b.rows == a.rows else 0), 1
        assert b.rows == 1 and b.width == 1, (a, b)
        return 0, 0
    matrix = ops.matrix(arg)
    if matrix.elements == 1:
        return 0, int(a.width == 1)
    return (matrix.k if matrix.k == a.width and a.rows != 1 else 0), 1


def _unary(kernel: str, by: str, cycles: float) -> Callable[[micro.Dispatch, Operands], Encoded]:
    def encode(instr: micro.Dispatch, ops: Operands) -> Encoded:
        a, y = ops.tensor(instr.args[0]), ops.tensor(instr.dst)
        name = f"activation.{instr.attr('act')}" if kernel == "activation" else kernel
        fields = rows.Map(
            a.address, a.stride, 0, 0, 0, 0, y.address, y.stride, a.rows, a.width, real(instr, by)
        )
        return Encoded(name, fields, a.rows * a.width * cycles)

    return encode


def _copied(x: Tensor, y: Tensor, address: Dim, width: Dim) -> Encoded:
    """Every row of x: `width` elements from `address`."""
    fields = rows.Copy(address, x.stride * x.item, 0, y.address, y.stride * y.item, x.rows, width * x.item)
    return Encoded("copy", fields, x.rows * width * (x.item / 16))


def _slice(instr: micro.Dispatch, ops: Operands) -> Encoded:
    x, y = ops.tensor(instr.args[0]), ops.tensor(instr.dst)
    lo, hi = whole(instr, "lo"), whole(instr, "hi")
    return _copied(x, y, x.address + lo * x.item, hi - lo)


def _rows(instr: micro.Dispatch, ops: Operands) -> Encoded:
    x, index, y = ops.tensor(instr.args[0]), ops.index(instr.args[1]), ops.tensor(instr.dst)
    count, width = index.rows * index.width, x.width * x.item
    fields = rows.Copy(
        x.address, x.stride * x.item, index.address, y.address, y.stride * y.item, count, width,
        index.item, x.rows,
    )  # fmt: skip
    return Encoded("copy", fields, count * width * (1 / 16))


def _view(instr: micro.Dispatch, ops: Operands) -> Encoded:
    x, y = ops.tensor(instr.args[0]), ops.tensor(instr.dst)
    assert x.width == x.stride and y.width == y.stride, "a view of some channels isn't dense"
    dense = Tensor(y.address, x.rows, x.width, x.width, y.item)  # the same bytes, in x's rows
    return _copied(x, dense, x.address, x.width)


def _sample(instr: micro.Dispatch, ops: Operands) -> Encoded:
    logits, *parameters, history = (ops.tensor(a) for a in instr.args)
    v = size(logits.width, {})
    scratch, y = aligned(ops.threads * rows.sample_bytes(v)), ops.tensor(instr.dst)
    temperature, top_k, top_p, min_p, penalty, seed, draw = (p.address for p in parameters)
    fields = rows.Sample(
        logits.address, logits.stride, temperature, top_k, top_p, min_p, penalty, seed, draw,
        history.address, history.stride, y.address, logits.rows, v, history.width,
        scratch.ctypes.data, rows.sample_bytes(v),
    )  # fmt: skip
    return Encoded("sample", fields, logits.rows * v, scratch)


def quantize(instr: micro.Quantize, ops: Operands) -> Encoded:
    """The row of a `quantize` instruction."""
    x, y = ops.tensor(instr.src), ops.tensor(instr.dst)
    fields = rows.Quantize(x.address, x.stride, y.address, y.stride * y.item, x.rows, x.width)
    match instr.scheme:
        case "i8/32":
            assert y.width == x.width + 4 * ceildiv(x.width, 32), (x.width, y.width)
            return Encoded("quantize", fields, x.rows * x.width * 0.5)
        case "bf16":
            assert y.width == 32 * ceildiv(x.width, 32), (x.width, y.width)
            return Encoded("quantize.bf16", fields, x.rows * x.width * 0.25)
    what = f"cpu: unknown scheme {instr.scheme!r}"
    raise PlanError(what, lines=text.show_instr(instr), hint="known: i8/32, bf16")


ENCODERS: Mapping[str, Callable[[micro.Dispatch, Operands], Encoded]] = {
    "rms_norm": _norm,
    "layer_norm": _norm,
    "rope_table": _rope_table,
    "rope": _rope,
    "rope_pairs": _rope,
    "kv_write": _kv_write,
    "attention": _attention,
    "gated": _binary("gated", 1.5),
    "activation": _unary("activation", "by", 1.5),
    "add": _binary("add", 0.25),
    "mul": _binary("mul", 0.25),
    "scale": _unary("scale", "by", 0.25),
    "softcap": _unary("softcap", "cap", 2.0),
    "slice": _slice,
    "view": _view,
    "rows": _rows,
    "sample": _sample,
    "route": _route,
    "expert_sum": _expert_sum,
    "gated_clamped": _gated_clamped,
}


FLOATS_ONLY = frozenset(
    {"rms_norm", "layer_norm", "rope", "rope_pairs", "gated", "activation", "add", "mul", "scale", "softcap",
     "route", "expert_sum", "gated_clamped"}
)  # fmt: skip


def encode(instr: Compute, ops: Operands, bias: micro.BlockRef | None) -> Encoded:
    """The row of an instruction that computes. Raises PlanError for a kernel that isn't there."""
    if isinstance(instr, micro.Quantize):
        return quantize(instr, ops)
    assert isinstance(instr, micro.Dispatch)
    op = instr.kernel.partition("+")[0]
    assert bias is None or op.startswith("linear."), instr
    if op.startswith("linear.") and function_of(op, instr.numerics or LINEAR_EXACT):
        return _linear(instr, ops, bias)
    if op.startswith("expert_linear.") and function_of(op, instr.numerics or LINEAR_EXACT):
        return _expert_linear(instr, ops)
    if op in KERNELS and op.startswith("embedding."):
        return _embedding(instr, ops)
    if op in KERNELS and op.startswith("head_linear."):
        ops.check_floats(instr)
        return _head_linear(instr, ops)
    if op in ENCODERS:
        if op in FLOATS_ONLY:
            ops.check_floats(instr)
        encoded = ENCODERS[op](instr, ops)
        if encoded.kernel in KERNELS:
            return encoded
    names = sorted({kernel for kernel, _ in offered()})
    raise PlanError(
        f"cpu: no kernel {instr.kernel!r} for {instr.node or 'this instruction'}",
        lines=text.show_instr(instr),
        hint=f"kernels: {', '.join(names)}",
    )


def aligned(nbytes: int) -> U8:
    """Zeroed bytes that start on a cache line."""
    raw = np.zeros(nbytes + 63, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]
