"""Matrix products of bf16 activations and quantised weights for some more tokens: tiles on tensor cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashrt.backend import ROOM
from flashrt.backends.cuda import args
from flashrt.backends.cuda.args import Step, launch
from flashrt.backends.cuda.fuse import Joint
from flashrt.backends.cuda.operands import Matrix, Operands
from flashrt.ir import micro
from flashrt.ir.ops import LINEAR_BF16
from flashrt.ir.order import root_of
from flashrt.layouts import LAYOUTS

LEAST, MOST = 9, 192  # tokens of a bucket whose products run here
# the same where four warps multiply together: with more, unpacking and a library's product are sooner done
MOST_TOGETHER = {"q4.16x32": 2048, "q4m.16x32": 1024, "q8.16x32": 768}
WIDE = 16  # eights of tokens of a tile then
NAMES = {"q4.16x32": "q4", "q4m.16x32": "q4m", "q8.16x32": "q8"}
MULTIPLY, FILL = 8, 4  # warps of source/gemm.cu that multiply and that fill the ring
THREADS = 32 * (MULTIPLY + FILL)
ORDERS = {"q4.16x32": 4, "q4m.16x32": 4, "q8.16x32": 8}  # of activations in tiles
FRONT = 1024  # bytes of barriers
PIECE = 64  # inputs that lie together in tiles
SPAN = 4  # blocks of 32 inputs in a slot of the ring
DEPTH = 8  # slots of a ring at most
ENOUGH = 8  # slots of a block's share from which tiles are as large as can be


@dataclass(frozen=True, slots=True)
class Tile:
    """How a block of threads works. tokens: of a tile, in eights; warps: that have channels of their own;
    slot: bytes of one of the ring; depth: slots; shared: bytes of shared memory."""

    eights: int
    warps: int
    slot: int
    depth: int
    shared: int


def able(instr: micro.Dispatch, ops: Operands) -> bool:
    """Whether a linear runs here."""
    w, rows = ops.matrix(instr.args[1]), ops.number(ops.tensor(instr.dst).rows)
    if instr.numerics != LINEAR_BF16 or w.layout.name not in NAMES:
        return False
    if not LEAST <= rows <= (MOST_TOGETHER[w.layout.name] if ops.limits.groups else MOST):
        return False
    x = ops.tensor(instr.args[0])
    whole = w.k % PIECE == 0 and x.width == w.k and x.stride % 8 == 0
    fits = x.dtype == "bf16" and whole and (x.address | w.address) % 16 == 0
    sums = _summed(tile_of(w, w.n, rows, ops), ops) if fits else 0
    return fits and (sums + 2 * ops.number(x.rows) * w.k <= ROOM or _comes_in_tiles(instr, ops))


def _comes_in_tiles(instr: micro.Dispatch, ops: Operands) -> bool:
    """Whether nobody has to put a product's input in order (see `tiles.in_tiles`): it is rounded for products
    with weights of one layout, and for nothing else."""
    root, layouts = root_of(instr.args[0].slot, ops.slots), set[str]()  # type: ignore[union-attr]

    def is_it(arg: micro.Arg | None) -> bool:
        return isinstance(arg, micro.SlotRef) and root_of(arg.slot, ops.slots) == root

    for other in ops.memory.stream.instrs:
        if isinstance(other, micro.Quantize):
            if is_it(other.dst) and other.dst.lo is not None:
                return False
        elif isinstance(other, micro.Transfer) and is_it(other.src):
            return False
        elif isinstance(other, micro.Dispatch) and any(map(is_it, other.args)):
            first, *rest = other.args
            if (
                other.numerics != LINEAR_BF16
                or not is_it(first)
                or any(map(is_it, rest))
                or first.lo is not None
            ):
                return False
            layouts.add(ops.matrix(rest[0]).layout.name)
    return len(layouts) == 1


def order(instr: micro.Dispatch, ops: Operands) -> int:
    """The order in which a linear's weights want its input."""
    return ORDERS[ops.matrix(instr.args[1]).layout.name]


def gemm(joint: Joint, ops: Operands, acts: Mapping[str, int]) -> list[Step]:
    """The launches of a product with all that joined it."""
    instr, gated = joint.main.instr, joint.gated
    assert isinstance(instr, micro.Dispatch)
    w, x = ops.matrix(instr.args[1]), ops.tensor(instr.args[0])
    y, how = ops.result(joint.dst, rounded=joint.rounded is not None)
    rows, blocks = ops.tensor(instr.dst).rows, ops.limits.processors
    n = w.n // 2 if gated else w.n
    tile = tile_of(w, n, ops.number(rows), ops)
    residual = ops.floats(instr.args[-1]) if "residual" in instr.kernel.split("+") else None
    counts = ops.scratch("tiles' parts", 4 * MULTIPLY * blocks)
    summed, most, ordered_there = _summed(tile, ops), ops.number(x.rows), ops.tiles(instr.args[0])
    needed = summed if ordered_there else summed + 2 * most * w.k
    sums = ops.scratch("room", max(ROOM, needed)).data_ptr()
    tiles, steps = x.address, list[Step]()
    if not ordered_there:
        tiles = sums + summed
        ordered = args.Tiles(x.address, x.stride, w.k, tiles, most, order(instr, ops), ops.rows(rows))
        steps.append(launch("into_tiles", (-(-w.k // 2048), ops.number(rows)), 256, ordered))
    fields = args.Gemm(
        w.address, n, w.k, n // 16 if gated else 0, tiles, most,
        y.address, y.stride, how, ops.vector(joint.main.bias),
        residual.address if residual else 0, residual.stride if residual else 0,
        acts[str(gated.attr("act"))] if gated else 0, ops.rows(rows),
        tile.warps, tile.slot, tile.depth, counts.data_ptr(), sums,
    )  # fmt: skip
    name = f"gemm_{NAMES[w.layout.name]}_{tile.eights}"
    return [*steps, launch(name, (blocks,), THREADS, fields, tile.shared)]


def _summed(tile: Tile, ops: Operands) -> int:
    """Bytes of the sums of tiles that blocks share."""
    return ops.limits.processors * 2 * tile.warps * tile.eights * 2 * 32 * 16


def tile_of(w: Matrix, n: int, rows: int, ops: Operands) -> Tile:
    """Larger tiles share activations among more channels, but twice as many sums of tiles that blocks have
    parts in are handed over: they pay where a block has enough to do between the two ends of its share. Where
    four warps multiply together, they have time to unpack weights while 128 tokens are multiplied."""
    if ops.limits.groups and rows > 64:
        return _tile(w.layout.name, WIDE, MULTIPLY, ops.limits.shared)
    eights = next((e for e in (2, 4) if rows <= 8 * e), 8)
    channels = MULTIPLY * (32 if n == w.n else 16)
    slots = -(-n // channels) * -(-rows // (8 * eights)) * -(-w.k // (32 * SPAN))
    large = _tile(w.layout.name, eights, MULTIPLY, ops.limits.shared)
    if -(-slots // ops.limits.processors) >= ENOUGH and large.depth > 1:
        return large
    return _tile(w.layout.name, eights, MULTIPLY // 2, ops.limits.shared)


def _tile(layout: str, eights: int, warps: int, shared: int) -> Tile:
    """With as many slots as so much shared memory holds."""
    taken = FRONT + (warps * 8 * eights * 32 * 4 if warps < MULTIPLY else 0)
    slot = SPAN * (2 * warps * LAYOUTS[layout].group_bytes(32) + 8 * eights * 64)
    slot = -(-slot // 1024) * 1024
    depth = min(DEPTH, (shared - taken) // slot)
    return Tile(eights, warps, slot, depth, taken + slot * depth)
