"""Matrix products: own kernels for few tokens, a library's for many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flashrt.backend import ROOM
from flashrt.backends.cuda import args, gemm
from flashrt.backends.cuda.args import Launch, Product, Step, Work, launch
from flashrt.backends.cuda.fuse import Joint, Taking
from flashrt.backends.cuda.operands import Matrix, Operands, Tensor
from flashrt.errors import PlanError
from flashrt.ir import micro
from flashrt.ir.ops import LINEAR_BF16, LINEAR_EXACT, LINEAR_I8
from flashrt.ir.types import Dim
from flashrt.layouts import LAYOUTS

FEW = 32  # tokens up to which products with bf16 activations run the kernel for few, where tiles don't
TAKEN = 8  # tokens up to which each block of a product makes columns of its input; of more, a kernel does
NAMES = {"q4.16x32": "q4", "q4m.16x32": "q4m", "q8.16x32": "q8", "bf16": "bf16"}
PACKED = {"q4.16x32": 4, "q4m.16x32": 5, "q8.16x32": 8}
PLAIN = {"f32": 0, "f16": 1, "bf16": 2}
DIGITS = {LINEAR_EXACT: 4, LINEAR_BF16: 2, LINEAR_I8: 1}  # columns of a token, as source/linear.cu has them
KINDS = {"f32": 0, "bf16": 1, "u8": 2}  # of activations
WARPS = 16  # that multiply, of source/linear.cu
FINISHERS = {1: 1, 2: 3, 4: 3}  # warps that finish, by eights of columns; one more copies
COLUMNS = 32  # at most in one block
SLOT = 38000  # bytes of a ring's slot at most: 64 blocks of 32 inputs of two row groups in q4
PLAIN_SLOT = 67000  # in bf16: pieces of rows, which are read faster the longer they are
DEPTH = 8  # slots of a ring at most
EVEN = 128  # columns that a library's products are best cut at


def few(instr: micro.Dispatch, ops: Operands) -> bool:
    """Whether a linear runs a kernel of ours for not many tokens, which can do more than multiply."""
    if gemm.able(instr, ops):
        return True
    w = ops.matrix(instr.args[1])
    if not on_tiles(w):
        return False
    return instr.numerics != LINEAR_BF16 or ops.number(ops.tensor(instr.dst).rows) <= FEW


def takes(instr: micro.Dispatch, ops: Operands) -> Taking:
    """How a linear normalises and rounds its input itself."""
    if gemm.able(instr, ops) or not few(instr, ops):
        return Taking.NOT
    w, rows = ops.matrix(instr.args[1]), ops.number(ops.tensor(instr.dst).rows)
    if rows <= TAKEN:
        return Taking.WHILE
    tokens = block_of(w, rows, instr.numerics, ops).tokens
    return Taking.BEFORE if -(-rows // tokens) <= _at_once(w, tokens, instr.numerics)[0] else Taking.NOT


def on_tiles(w: Matrix) -> bool:
    return w.layout.name in PACKED or (w.layout.name == "bf16" and w.k % 32 == 0)


def linear(joint: Joint, ops: Operands, acts: Mapping[str, int]) -> list[Step]:
    """The launches of a product with all that joined it."""
    instr = joint.main.instr
    assert isinstance(instr, micro.Dispatch)
    w, out = ops.matrix(instr.args[1]), ops.tensor(instr.dst)
    if out.width == 0:
        return []
    if gemm.able(instr, ops):
        return gemm.gemm(joint, ops, acts)
    if few(instr, ops):
        return _few(joint, instr, w, ops, acts)
    if instr.numerics == LINEAR_BF16 and on_tiles(w):
        return _many(joint, instr, w, ops)
    return [_plain(joint, instr, w, ops)]


def _addends(joint: Joint, instr: micro.Dispatch, ops: Operands) -> tuple[int, int, int]:
    """Addresses of bias and residual (0: none), and the residual's stride."""
    bias = ops.vector(joint.main.bias)
    if "residual" not in instr.kernel.split("+"):
        return bias, 0, 0
    residual = ops.floats(instr.args[-1])
    return bias, residual.address, residual.stride


def _few(
    joint: Joint, instr: micro.Dispatch, w: Matrix, ops: Operands, acts: Mapping[str, int]
) -> list[Step]:
    norm, gated = joint.norm, joint.gated
    x, y = ops.tensor(joint.reads[0]), ops.tensor(joint.dst)
    n = w.n // 2 if gated else w.n
    at_once = 1 if gated or w.layout.name == "bf16" else 2  # row groups side by side, as `GROUPS` has it
    tiles = -(-n // (16 * at_once))
    rows: Dim = ops.tensor(instr.dst).rows
    most = ops.number(rows)
    block = block_of(w, most, instr.numerics, ops)
    bias, residual, residual_stride = _addends(joint, instr, ops)
    fields = args.Linear(
        w.address, n, w.k, tiles if gated else 1, tiles, x.address, x.stride, KINDS[x.dtype],
        ops.vector(norm.args[1]) if norm and len(norm.args) > 1 else 0, int(norm is not None),
        _number(norm, "eps"), _number(norm, "offset"),
        y.address, y.stride, int(joint.rounded is not None), bias, residual, residual_stride,
        acts[str(gated.attr("act"))] if gated else 0, ops.rows(rows), block.tokens, block.digits,
    )  # fmt: skip
    name, pieces = NAMES[w.layout.name], -(-most // block.tokens)
    if most <= TAKEN:
        grid = (_across(tiles, pieces, ops.limits.processors), pieces)
        return [_product_of(name, grid, block, fields, w, instr.numerics)]
    at_once, piece = _at_once(w, block.tokens, instr.numerics)
    columns, steps = ops.scratch("room", ROOM).data_ptr(), list[Step]()
    for lo in range(0, pieces, at_once):
        some, begin = min(at_once, pieces - lo), lo * block.tokens
        part = fields._replace(columns=columns, piece=piece, begin=begin)
        grid = (_across(tiles, some, ops.limits.processors), some)
        steps.append(launch(f"columns_{name}", (min(some * block.tokens, most - begin),), 32 * WARPS, part))
        steps.append(_product_of(name, grid, block, part, w, instr.numerics))
    return steps


def _product_of(
    name: str, grid: tuple[int, int], block: Block, fields: args.Linear, w: Matrix, numerics: str
) -> Product:
    kernel, kept = f"linear_{name}_{block.tile}", room(w, block.tokens, numerics)
    return Product(kernel, grid, block.threads, fields, w.layout.name, kept)


def joined(steps: Iterable[Step], ops: Operands) -> list[Work]:
    """With products that follow each other as one launch: weights of the next ones are on their way while a
    block waits for what the others make of the one before."""
    out, some = list[Work](), list[Product]()
    for step in (*steps, None):
        if some and not (isinstance(step, Product) and _alike(some, step) and ops.limits.together):
            out.append(_chain(some, ops))
            some = []
        if isinstance(step, Product):
            some.append(step)
        elif step is not None:
            out.append(step)
    return out


def _alike(some: Sequence[Product], other: Product) -> bool:
    """Whether another product may follow some in one launch. bf16 weights take so long that waiting for each
    other costs more than the ends of kernels do."""
    first, own = some[0].of, other.of
    same = some[0].kernel == other.kernel and (first.rows, first.tokens, first.digits) == (
        own.rows, own.tokens, own.digits
    )  # fmt: skip
    fits = len(some) < args.JOINED and some[0].grid[1] == other.grid[1] == 1
    return same and fits and other.layout != "bf16"


def _chain(some: Sequence[Product], ops: Operands) -> Launch:
    """The launch of some products."""
    first, kept = some[0], max(product.room for product in some)
    parts = [product.of for product in some]
    spans, slot, depth = ring(first.layout, [part.k for part in parts], ops.limits.shared - kept)
    cut = zip(parts, spans, strict=True)
    parts = [part._replace(span=span, slot_bytes=slot, depth=depth) for part, span in cut]
    door = int(ops.scratch("door", 4).data_ptr()) if len(some) > 1 else 0
    grid = (max(product.grid[0] for product in some), first.grid[1])
    fields = args.chain(parts, door)
    return launch(first.kernel, grid, first.threads, fields, kept + ring_bytes(slot, depth))


def _at_once(w: Matrix, tokens: int, numerics: str) -> tuple[int, int]:
    """How many blocks' columns, of so many tokens each, there is room for, and bytes of a block's."""
    piece = -(-tokens * held(w, numerics) // 128) * 128
    return ROOM // piece, piece


def _across(tiles: int, pieces: int, processors: int) -> int:
    """Blocks that share the tiles of each piece of the tokens, so that all are through soonest: a processor
    has one block at a time, which takes about as long to get its columns as for a tile. Pieces whose blocks
    run at the same time read weights from memory once."""

    def time(blocks: int) -> int:
        return -(-blocks * pieces // processors) * (1 + -(-tiles // blocks))

    return min(range(min(tiles, processors), 0, -1), key=time)


def _number(norm: micro.Dispatch | None, key: str) -> float:
    value = norm.attr(key) if norm else None
    return float(value) if isinstance(value, int | float) else 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """How a block of threads works. tokens: at a time; digits: columns of each; tile: eights of columns;
    span: blocks of 32 inputs in a slot of the ring; slot: bytes of it; depth: slots; shared: bytes of
    shared memory."""

    tokens: int
    digits: int
    tile: int
    span: int
    slot: int
    depth: int
    shared: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (WARPS + 1 + FINISHERS[self.tile])


def block_of(w: Matrix, rows: int, numerics: str, ops: Operands) -> Block:
    """The one with most tokens, dealt out evenly, and with the largest ring that then fits."""
    plain = w.layout.name == "bf16"
    digits = 4 if plain and numerics == LINEAR_EXACT else 1 if plain else DIGITS[numerics]
    most = min(rows, COLUMNS // digits)
    smallest = span_of(w.layout.name, w.k, 0)
    least = ring_bytes(slot_bytes(w.layout.name, smallest), 2)
    fitting = [t for t in range(1, most + 1) if room(w, t, numerics) + least <= ops.limits.shared]
    if not fitting:
        needed = room(w, 1, numerics) + least
        raise PlanError(f"{ops.device}: products of {w.k} inputs need {needed} bytes of shared memory")
    even = -(-rows // -(-rows // fitting[-1]))
    tokens = next(t for t in fitting if t >= even)  # up to 8 have sums twice: less may not fit
    free = ops.limits.shared - room(w, tokens, numerics)
    (span,), slot, depth = ring(w.layout.name, [w.k], free)
    tile = next(t for t in (1, 2, 4) if tokens * digits <= 8 * t)
    return Block(tokens, digits, tile, span, slot, depth, ops.limits.shared - free + ring_bytes(slot, depth))


def ring(layout: str, ks: Sequence[int], free: int) -> tuple[list[int], int, int]:
    """The largest ring in so many bytes, for products of so many inputs: blocks of 32 inputs of each in a
    slot, bytes of one, and slots."""
    most = PLAIN_SLOT if layout == "bf16" else SLOT
    while True:
        spans = [span_of(layout, k, most) for k in ks]
        slot = slot_bytes(layout, max(spans))
        if ring_bytes(slot, 2) <= free:
            return spans, slot, ring_depth(slot, free)
        most = slot // 2


def room(w: Matrix, tokens: int, numerics: str) -> int:
    """Bytes of shared memory that a block has for so many tokens' columns and for sums."""
    groups = 1 if w.layout.name == "bf16" else 2
    sums = 16 * 4 * (WARPS + 1) * groups * (2 if tokens <= 8 else 1)
    return tokens * (held(w, numerics) + 64 + sums)


def held(w: Matrix, numerics: str) -> int:
    """Bytes of a token's columns: values, scales and, with minima, sums."""
    if w.layout.name == "bf16":
        return -(-w.k // 32) * 64 * (3 if numerics == LINEAR_EXACT else 1)
    digits = DIGITS[numerics]
    return -(-w.k // 32) * (32 * digits + 4 + 4 * digits * w.layout.minimum)


def slot_bytes(layout: str, span: int) -> int:
    """Bytes of so many blocks of 32 inputs: of two row groups, or of 16 rows of bf16, each with 64 more."""
    return 16 * (span + 1) * 64 if layout == "bf16" else span * 2 * LAYOUTS[layout].group_bytes(32)


def span_of(layout: str, k: int, slot: int) -> int:
    """Blocks of 32 inputs in a slot of so many bytes: a multiple of 16, and as even as can be."""
    blocks = -(-k // 32)
    turns = -(-blocks // WARPS)  # blocks of a warp
    most = max((n for n in range(1, turns + 1) if slot_bytes(layout, WARPS * n) <= slot), default=1)
    return WARPS * -(-turns // -(-turns // most))


def ring_bytes(slot: int, depth: int) -> int:
    """Bytes of shared memory of a ring, as `ring_bytes` in source/linear.cu."""
    return 256 + depth * slot


def ring_depth(slot: int, free: int) -> int:
    """Slots that fit so many bytes; 0 if there aren't two."""
    return max((d for d in range(2, DEPTH + 1) if ring_bytes(slot, d) <= free), default=0)


def _plain(joint: Joint, instr: micro.Dispatch, w: Matrix, ops: Operands) -> Step:
    if w.layout.name not in PLAIN:
        raise PlanError(f"{ops.device}: no product with {w.layout.name} and {instr.numerics!r}")
    x, y = ops.floats(instr.args[0]), ops.floats(instr.dst)
    fields = args.Plain(
        w.address, 0, w.n, w.k, PLAIN[w.layout.name], x.address, x.stride, y.address, y.stride,
        *_addends(joint, instr, ops), ops.rows(y.rows),
    )  # fmt: skip
    return launch("linear_plain", (-(-w.n // 8), ops.number(y.rows)), 256, fields)


def _many(joint: Joint, instr: micro.Dispatch, w: Matrix, ops: Operands) -> list[Step]:
    """Weights as bf16, a library's product, and what is added."""
    import torch

    y = ops.floats(instr.dst)
    rows = ops.number(y.rows)
    x, out = ops.view(instr.args[0], rows)[:, : w.k], ops.view(instr.dst, rows)
    if w.layout.name == "bf16":
        return [partial(_product, x, ops.weights(instr.args[1]), out), *_added(joint, instr, y, ops)]
    room, steps = ops.scratch("room", ROOM), list[Step]()
    at_once, per_row = _unpacked_at_once(w.n, w.k), w.layout.group_bytes(w.k) // w.layout.rows
    for lo in range(0, w.n, at_once):
        n = min(at_once, w.n - lo)
        unpack = args.Unpack(w.address + lo * per_row, 0, n, w.k, PACKED[w.layout.name], room.data_ptr())
        weights = room[: 2 * n * w.k].view(torch.bfloat16).view(n, w.k)
        steps.append(launch("unpack", (8 * ops.limits.processors,), 256, unpack))
        steps.append(partial(_product, x, weights, out[:, lo : lo + n]))
    return steps + _added(joint, instr, y, ops)


def _unpacked_at_once(n: int, k: int) -> int:
    """Rows of a weight that there is room for in bf16; where not for all, in pieces as even as can be."""
    most = ROOM // (2 * k) // EVEN * EVEN
    if n <= most:
        return n
    even = -(-n // -(-n // most))
    return -(-even // EVEN) * EVEN


def _product(x, w, out) -> None:  # type: ignore[no-untyped-def]
    """out = x·wᵀ in f32, of bf16 values. out: its rows may lie apart."""
    import torch

    if x.is_cuda:
        torch.mm(x, w.t(), out_dtype=torch.float32, out=out)
    else:
        out.copy_(x.float() @ w.float().t())


def _added(joint: Joint, instr: micro.Dispatch, y: Tensor, ops: Operands) -> list[Step]:
    bias, residual, stride = _addends(joint, instr, ops)
    steps: list[Step] = []
    for address, row_stride in ((bias, 0), (residual, stride)):
        if address:
            fields = args.Map(
                y.address, y.stride, address, row_stride, 1, y.address, y.stride, 0, y.width, 2, 0, 0.0,
                ops.rows(y.rows),
            )  # fmt: skip
            steps.append(args.elementwise(fields, ops.number(y.rows)))
    return steps
