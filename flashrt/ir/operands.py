"""Whether blocks and operands have the sizes that kernels believe them to have.

A compiled kernel looks at nothing: handed a slot narrower than what it writes, it writes beyond.
(`host.` kernels are left out: the reference implementation checks for itself.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from flashrt.ir import micro, ops
from flashrt.ir.law import Violation
from flashrt.ir.memory import MemoryMap, named
from flashrt.ir.types import Attrs, Dim, TensorType, Value
from flashrt.layouts import LAYOUTS, packed_bytes

Types = Sequence[TensorType]
Faults = Iterator[str]


# ---- blocks ------------------------------------------------------------------------
def blocks_fit(memory: MemoryMap) -> Iterator[Violation]:
    """A block is rows of its weight from the start of a row group, in as many bytes as its layout takes."""
    weights = {w.name: w for w in memory.stream.weights}
    for block in memory.stream.blocks:
        if (weight := weights.get(block.name)) is not None:
            for fault in _block_faults(block, weight.layout or "f32", weight.type):
                yield Violation(f"block {block.name} on {block.device} {fault}")


def _block_faults(block: micro.Block, layout: str, type: TensorType) -> Faults:
    shape = tuple(d for d in type.shape if isinstance(d, int))
    found = LAYOUTS.get(layout)
    if found is None:
        yield f"has layout {layout!r}; known: {', '.join(LAYOUTS)}"
    elif found.element is None and len(shape) != 2:
        yield f"has layout {layout}, which holds matrices, not {type}"
    elif not 0 <= block.lo <= block.hi <= (shape[0] if shape else 1) or block.lo % found.rows:
        yield f"is rows {block.lo}…{block.hi} of {type}, in groups of {found.rows}"
    elif block.bytes < (need := packed_bytes(layout, shape, block.lo, block.hi)):
        yield f"has bytes={block.bytes}, its rows take {need}"


# ---- operands ------------------------------------------------------------------------
def operands_fit(memory: MemoryMap) -> Iterator[Violation]:
    """The operands of an instruction have the types that its operation takes and gives."""
    stream, find = memory.stream, _Finder(memory)
    known: dict[_Call, tuple[str, ...]] = {}  # the layers of a model repeat the same calls
    biases: dict[tuple[str, str], TensorType] = {}
    for at, instr in enumerate(stream.instrs):
        lane = (instr.device, instr.lane)
        try:
            call = find.call(instr, biases.pop(lane, None))
            if isinstance(instr, micro.Bias):
                biases[lane] = find.type(instr.block, instr.device)
        except LookupError:
            continue  # an operand isn't declared, which is a law of its own
        if call is not None and call not in known:
            known[call] = tuple(_faults(call))
        for fault in known[call] if call is not None else ():
            yield Violation(f"{named(stream, at)}: {fault}", at)


class _Call(NamedTuple):
    """A kernel and the types it is handed. scheme: how the activations of a linear are quantised; cache:
    dtype of the keys and values of an attention, by its numerics."""

    kernel: str
    args: tuple[TensorType, ...]
    dst: TensorType | None
    scheme: str
    bias: TensorType | None = None
    states: tuple[TensorType, ...] = ()
    attrs: Attrs = ()
    cache: str = "f32"


class _Finder:
    """Types of operands, channel and row ranges applied. LookupError for what isn't declared."""

    def __init__(self, memory: MemoryMap) -> None:
        self._slots = memory.slots
        self._weights = {w.name: w.type for w in memory.stream.weights}
        self._blocks = {(b.name, b.device): b for b in memory.stream.blocks}
        self._states = {s.name: s.type for s in memory.stream.states}

    def call(self, instr: micro.Instr, bias: TensorType | None) -> _Call | None:
        """What an instruction calls; None when it computes nothing that is checked."""
        match instr:
            case micro.Quantize():
                src, dst = self.type(instr.src, instr.device), self.type(instr.dst, instr.device)
                return _Call("quantize", (src,), dst, instr.scheme)
            case micro.Dispatch() if not instr.kernel.startswith("host."):
                args = tuple(self.type(a, instr.keeper) for a in instr.args)
                made = None if instr.dst is None else self.type(instr.dst, instr.device)
                scheme = instr.numerics.partition("act=")[2].partition(" ")[0]
                states = tuple(self._states[s] for s in (*instr.writes, *instr.reads))
                cache = instr.numerics.partition("kv=")[2].partition(" ")[0] or "f32"
                return _Call(instr.kernel, args, made, scheme, bias, states, instr.attrs, cache)
        return None

    def type(self, arg: micro.Arg, device: str) -> TensorType:
        if isinstance(arg, micro.SlotRef):
            whole = self._slots[arg.slot].type
            if arg.lo is None or arg.hi is None:
                return whole
            return whole.with_shape(*whole.shape[:-1], arg.hi - arg.lo)
        block, whole = self._blocks[arg.block, device], self._weights[arg.block]
        lo, hi = (block.lo if arg.lo is None else arg.lo), (block.hi if arg.hi is None else arg.hi)
        return whole.with_shape(hi - lo, *whole.shape[1:]) if whole.shape else whole


def _faults(call: _Call) -> Faults:
    name, *epilogues = call.kernel.split("+")
    op, types, dst = name.partition(".")[0], call.args, call.dst
    if op == "quantize" and call.scheme not in ops.QUANTIZED:
        yield f"has scheme {call.scheme!r}; known: {', '.join(ops.QUANTIZED)}"
        return
    if op in ops.PRODUCTS and dst is not None and len(types) > 1 and call.scheme in ops.QUANTIZED:
        plain = TensorType("f32", (_rows_of_x(op, call, dst), types[1].shape[1]))
        yield from _differ("x", types[0], ops.QUANTIZED[call.scheme](*plain.shape))
        types = (plain, *types[1:])
    try:
        quantized = ops.QUANTIZED[call.scheme](*types[0].shape) if op == "quantize" else None
        want = quantized or ops.infer(op, types, call.attrs)
        yield from _more_faults(op, types, call)
    except (ValueError, AssertionError, IndexError, KeyError, TypeError) as error:
        yield f"{call.kernel} can't take ({', '.join(map(str, types))}): {error}"
        return
    if dst is not None and want is not None:
        yield from _differ("dst", dst, want)
    if dst is not None and "residual" in epilogues:
        yield from _differ("the residual", types[-1], dst)
    if dst is not None and call.bias is not None:
        yield from _differ("the bias", call.bias, dst.with_shape(dst.shape[-1]))


def _rows_of_x(op: str, call: _Call, dst: TensorType) -> Dim:
    """Rows of x of a product: those of its result; tokens where the experts of a token share its row."""
    shared = op == "expert_linear" and dict(call.attrs).get("shared") is True and len(call.args) > 2
    return call.args[2].shape[0] if shared else dst.shape[0]


def _more_faults(op: str, types: Types, call: _Call) -> Faults:
    """What the rule of the operation doesn't say. Raises what indexing raises when an operand is missing."""
    attrs = dict(call.attrs)
    match op:
        case "gated" | "gated_clamped":
            yield from _differ("up", types[1], types[0])
        case "view":
            if call.dst is not None and call.dst.bytes != types[0].bytes:
                yield f"dst is {call.dst}, which hasn't the bytes of {types[0]}"
        case "slice":
            width, hi = types[0].shape[-1], attrs["hi"]
            if isinstance(width, int) and isinstance(hi, int) and hi > width:
                yield f"hi={hi} is beyond the {width} channels of {types[0]}"
        case "sample":
            rows, dtypes = types[0].shape[0], ("f32", "i32", "f32", "f32", "f32", "i64", "i64")
            for given, dtype in zip(types[1:8], dtypes, strict=True):
                yield from _differ("a parameter", given, TensorType(dtype, (rows,)))
            yield from _differ("history", types[8], TensorType("i32", (rows, types[8].shape[1])))
        case "rows":
            yield from _index_faults(types[1])
        case "embedding" | "rope_table":
            yield from _index_faults(types[0])
        case "expert_cache":
            yield from _differ("the state", call.states[0], types[1])
        case "attention":
            yield from _paged_faults(types[0], types[1:4])
            yield from _cache_faults(call)
        case "kv_write":
            yield from _paged_faults(types[0], types[2:5])
            yield from _cache_faults(call)
            yield from _state_faults(types[0], types[1], attrs, call.states[0])


def _index_faults(index: TensorType) -> Faults:
    if index.dtype not in ("i32", "i64"):
        yield f"what looks things up is {index}, expected i32 or i64"


def _paged_faults(x: TensorType, paged: Types) -> Faults:
    positions, seq, pages = paged
    for what, have in (("positions", positions), ("seq", seq)):
        yield from _differ(what, have, TensorType("i32", x.shape[:1]))
    yield from _differ("pages", pages, TensorType("i32", (pages.shape[0], pages.shape[1])))


def _cache_faults(call: _Call) -> Faults:
    for kv in call.states[:1]:
        yield from _differ("the state", kv, TensorType(call.cache, kv.shape))


def _state_faults(k: TensorType, v: TensorType, attrs: Mapping[str, Value], kv: TensorType) -> Faults:
    heads, dim, value_dim = (_whole(attrs[key]) for key in ("kv_heads", "head_dim", "value_dim"))
    latent = bool(attrs.get("latent"))
    yield from _differ("k", k, k.with_shape(k.shape[0], heads * (dim - value_dim * latent)))
    yield from _differ("v", v, v.with_shape(k.shape[0], heads * value_dim))
    planes, wide = (1, dim) if latent else (2, max(dim, value_dim))
    yield from _differ("the state", kv, kv.with_shape(kv.shape[0], planes, heads, ops.PAGE, wide))


def _whole(value: Value) -> int:
    assert isinstance(value, int), value
    return value


def _differ(what: str, have: TensorType, want: TensorType) -> Faults:
    if have != want:
        yield f"{what} is {have}, expected {want}"
