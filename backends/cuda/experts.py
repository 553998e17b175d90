"""Mixtures of experts: routing, products with the weights of each token's experts, weighted sums."""

from __future__ import annotations

from dataclasses import dataclass

from flashrt.backends.cuda import args
from flashrt.backends.cuda.args import Step, launch
from flashrt.backends.cuda.linear import DIGITS, KINDS, NAMES, PLAIN, WARPS, block_of, on_tiles
from flashrt.backends.cuda.operands import Matrix, Operands, Tensor, address_of
from flashrt.errors import PlanError
from flashrt.ir import micro, text
from flashrt.ir.ops import LINEAR_BF16, LINEAR_EXACT
from flashrt.layouts import LAYOUTS

THREADS = 32 * (WARPS + 2)  # of source/experts.cu: those that multiply, one that copies, one that finishes
TOGETHER = 8  # pairs of an item of `expert_plain`
MANY = 8  # pairs that an expert has on average above which bf16 activations meet tiles of weights
STAGES = 3  # as source/expert_tiles.cu has them
KEPT = 1024  # bytes of shared memory for what the kernel has besides


def route(instr: micro.Dispatch, ops: Operands) -> list[Step]:
    """The launch that chooses experts."""
    x, y = ops.floats(instr.args[0]), ops.floats(instr.dst)
    groups, top_k = _whole(instr, "groups"), _whole(instr, "top_k")
    fields = args.Route(
        x.address, x.stride, ops.vector(instr.args[1] if len(instr.args) > 1 else None), y.address, y.stride,
        x.width, top_k, int(instr.attr("score") == "softmax"), int(instr.attr("normalise") is True), groups,
        _whole(instr, "top_groups"), int(instr.attr("group_score") == "sum2"), _real(instr, "scale"),
        ops.rows(x.rows),
    )  # fmt: skip
    return [launch("route", (ops.number(x.rows),), 32, fields, 4 * (2 * x.width + max(groups, top_k)))]


def expert_sum(instr: micro.Dispatch, ops: Operands) -> list[Step]:
    """The launch that adds up the rows of each token: of one product with experts, or of two where a cache
    has some of them."""
    near, *others, table = (ops.floats(arg) for arg in instr.args)
    far, y = others[0] if others else near, ops.floats(instr.dst)
    fields = args.ExpertSum(
        near.address, near.stride, far.address, far.stride, table.address, table.stride, y.address, y.stride,
        y.width, _whole(instr, "top_k"), ops.rows(y.rows),
    )  # fmt: skip
    return [launch("expert_sum", (-(-y.width // 256), ops.number(y.rows)), 256, fields)]


def expert_cache(instr: micro.Dispatch, ops: Operands) -> list[Step]:
    """The launch that finds the choices which a cache has."""
    x, table, y = ops.floats(instr.args[0]), ops.tensor(instr.args[1]), ops.floats(instr.dst)
    experts, top_k = _whole(instr, "experts"), _whole(instr, "top_k")
    before = 4 * experts * _whole(instr, "layer")
    asked = address_of(ops.memory.state(instr.writes[0], ops.device))
    fields = args.ExpertCache(
        x.address, x.stride, table.address + before, asked + before, y.address, y.stride, experts, top_k,
        ops.rows(x.rows),
    )  # fmt: skip
    return [launch("expert_cache", (-(-ops.number(x.rows) * 2 * top_k // 256),), 256, fields)]


def gated_clamped(instr: micro.Dispatch, ops: Operands) -> list[Step]:
    """The launch of a clamped gate."""
    gate, up, y = ops.floats(instr.args[0]), ops.floats(instr.args[1]), ops.floats(instr.dst)
    fields = args.Clamped(
        gate.address, gate.stride, up.address, up.stride, y.address, y.stride, y.width,
        _real(instr, "alpha"), _real(instr, "limit"), ops.rows(y.rows),
    )  # fmt: skip
    return [launch("gated_clamped", (-(-y.width // 256), ops.number(y.rows)), 256, fields)]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A product with experts. one: the weights of expert 0; table: the tokens' choices; tokens: at most.

    alone: so few pairs (token, choice) that they seldom share an expert: to find out which do costs more
    than to read some experts twice.
    """

    instr: micro.Dispatch
    one: Matrix
    table: Tensor
    experts: int
    top_k: int
    tokens: int

    @property
    def pairs(self) -> int:
        """How many there are at most."""
        return self.tokens * self.top_k

    @property
    def alone(self) -> bool:
        """Whether each pair is an item of its own."""
        return 4 * self.pairs <= self.experts

    def items(self, most: int) -> int:
        """How many items of up to `most` pairs there can be."""
        return self.pairs if self.alone else self.pairs // most + min(self.pairs, self.experts + 1)


def expert_linear(instr: micro.Dispatch, ops: Operands) -> list[Step]:
    """The launches of a product. Raises PlanError where an expert's rows aren't whole groups."""
    held, table = ops.matrix(instr.args[1]), ops.floats(instr.args[2])
    experts = _whole(instr, "experts")
    one = Matrix(held.address, held.n // experts, held.k, held.layout)
    if one.n % held.layout.rows:
        raise PlanError(
            f"{ops.device}: the {one.n} rows of an expert aren't whole groups of {held.layout.name}",
            lines=f"    {text.show_instr(instr)}",
            hint="store the experts in f32, f16 or bf16",
        )
    m = Mixture(instr, one, table, experts, _whole(instr, "top_k"), ops.number(table.rows))
    if not m.pairs:
        return []
    if not on_tiles(one):
        return _plain(m, ops)
    return _many(m, ops) or _few(m, ops)


def _many(m: Mixture, ops: Operands) -> list[Step]:
    """Tiles of bf16 activations; nothing where they are few, or don't fit the device."""
    one, x, y = m.one, ops.tensor(m.instr.args[0]), ops.floats(m.instr.dst)
    if m.instr.numerics != LINEAR_BF16 or m.pairs <= MANY * m.experts:
        return []
    together = 32 if m.pairs <= 32 * m.experts else 64
    shared = STAGES * stage_bytes(one.layout.name, together)
    if shared > ops.limits.shared - KEPT:
        return []
    choices, steps = _choices(m, together, ops)
    fields = args.ExpertTile(
        one.address, one.n, one.k, _expert_bytes(one), x.address, x.stride, y.address, y.stride,
        _bias(m.instr, ops),
    )  # fmt: skip
    name = f"expert_tiles_{NAMES[one.layout.name]}_{together // 8}"
    return [*steps, launch(name, (-(-one.n // 256), m.items(together)), 256, (*fields, *choices), shared)]


def stage_bytes(layout: str, together: int) -> int:
    """Bytes of a stage: of 16 groups of weights, and of so many pairs' activations."""
    span = 2 if layout == "bf16" or together == 64 else 4  # blocks of 32 inputs
    group = 16 * (span * 64 + 32) if layout == "bf16" else LAYOUTS[layout].group_bytes(32 * span)
    return 16 * group + together * (span * 64 + (32 if layout == "q8.16x32" else 64))


def _few(m: Mixture, ops: Operands) -> list[Step]:
    one, x, y = m.one, ops.tensor(m.instr.args[0]), ops.floats(m.instr.dst)
    numerics = m.instr.numerics or LINEAR_EXACT
    # twice as many as an expert has on average, so that few are read a second time; no less than fit a tile
    most = max(-(-2 * m.pairs // m.experts), 8 // DIGITS[numerics])
    block = block_of(one, 1 if m.alone else min(m.tokens, most), numerics, ops)
    choices, steps = _choices(m, block.tokens, ops)
    tiles = -(-one.n // (16 if one.layout.name == "bf16" else 32))  # of `GROUPS` row groups
    of = args.Linear(
        one.address, one.n, one.k, 1, tiles, x.address, x.stride, KINDS[x.dtype], 0, 0, 0.0, 0.0,
        y.address, y.stride, 0, _bias(m.instr, ops), 0, 0, 0, choices.rows, block.tokens, block.digits,
        block.span, block.slot, block.depth,
    )  # fmt: skip
    fields = (*of, _expert_bytes(one), *choices)
    grid = (min(m.items(block.tokens) * tiles, ops.limits.processors),)
    name = f"expert_{NAMES[one.layout.name]}_{block.tile}"
    return [*steps, launch(name, grid, THREADS, fields, block.shared)]


def _plain(m: Mixture, ops: Operands) -> list[Step]:
    one, numerics = m.one, m.instr.numerics or LINEAR_EXACT
    if one.layout.name not in PLAIN or numerics != LINEAR_EXACT:
        raise PlanError(f"{ops.device}: no product with experts in {one.layout.name} and {numerics!r}")
    x, y = ops.floats(m.instr.args[0]), ops.floats(m.instr.dst)
    choices, steps = _choices(m, TOGETHER, ops)
    fields = args.PlainExpert(
        one.address, one.n, one.k, PLAIN[one.layout.name], x.address, x.stride, y.address, y.stride,
        _bias(m.instr, ops),
    )  # fmt: skip
    grid = (-(-one.n // 8), m.items(TOGETHER))
    return [*steps, launch("expert_plain", grid, 256, (*fields, *choices))]


def _choices(m: Mixture, most: int, ops: Operands) -> tuple[args.Choices, list[Step]]:
    """What a product knows of the tokens' choices, and the launch that finds items, if there is one."""
    items = order = 0
    if not m.alone:
        head = 4 * (1 + 3 * m.items(most))
        items = int(ops.scratch("experts", head + 4 * m.pairs).data_ptr())
        order = items + head
    choices = args.Choices(
        m.table.address, m.table.stride, m.experts, m.top_k, int(m.instr.attr("shared") is True), most,
        items, order, ops.rows(m.table.rows),
    )  # fmt: skip
    find = launch("expert_items", (1,), 512, choices, 8 * (m.experts + 1))
    return choices, [] if m.alone else [find]


def _expert_bytes(one: Matrix) -> int:
    return one.n // one.layout.rows * one.layout.group_bytes(one.k)


def _bias(instr: micro.Dispatch, ops: Operands) -> int:
    return ops.vector(instr.args[3] if len(instr.args) > 3 else None)


def _whole(instr: micro.Dispatch, key: str) -> int:
    value = instr.attr(key)
    assert isinstance(value, int), (key, value)
    return value


def _real(instr: micro.Dispatch, key: str) -> float:
    value = instr.attr(key)
    assert isinstance(value, int | float), (key, value)
    return float(value)
