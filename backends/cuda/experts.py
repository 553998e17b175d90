"""Mixtures of experts: routing, products with the weights of each token's experts, weighted sums."""

from __future__ import annotations

from flashrt.backends.cuda import args
from flashrt.backends.cuda.args import Step, launch
from flashrt.backends.cuda.linear import DIGITS, KINDS, NAMES, PLAIN, THREADS, block_of, on_tiles
from flashrt.backends.cuda.operands import Matrix, Operands, Tensor
from flashrt.errors import PlanError
from flashrt.ir import micro, text
from flashrt.ir.ops import LINEAR_EXACT

TOGETHER = 8  # pairs of an item of `expert_plain`


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
    """The launch that adds up the rows of each token."""
    x, table, y = ops.floats(instr.args[0]), ops.floats(instr.args[1]), ops.floats(instr.dst)
    fields = args.ExpertSum(
        x.address, x.stride, table.address, table.stride, y.address, y.stride, y.width,
        _whole(instr, "top_k"), ops.rows(y.rows),
    )  # fmt: skip
    return [launch("expert_sum", (-(-y.width // 256), ops.number(y.rows)), 256, fields)]


def gated_clamped(instr: micro.Dispatch, ops: Operands) -> list[Step]:
    """The launch of a clamped gate."""
    gate, up, y = ops.floats(instr.args[0]), ops.floats(instr.args[1]), ops.floats(instr.dst)
    fields = args.Clamped(
        gate.address, gate.stride, up.address, up.stride, y.address, y.stride, y.width,
        _real(instr, "alpha"), _real(instr, "limit"), ops.rows(y.rows),
    )  # fmt: skip
    return [launch("gated_clamped", (-(-y.width // 256), ops.number(y.rows)), 256, fields)]


def expert_linear(instr: micro.Dispatch, ops: Operands) -> list[Step]:
    """The launches of a product. Raises PlanError where an expert's rows aren't whole groups of its layout."""
    held, table = ops.matrix(instr.args[1]), ops.floats(instr.args[2])
    experts, top_k = _whole(instr, "experts"), _whole(instr, "top_k")
    one = Matrix(held.address, held.n // experts, held.k, held.layout)
    if one.n % held.layout.rows:
        raise PlanError(
            f"{ops.device}: the {one.n} rows of an expert aren't whole groups of {held.layout.name}",
            lines=f"    {text.show_instr(instr)}",
            hint="store the experts in f32, f16 or bf16",
        )
    pairs = ops.number(table.rows) * top_k
    if not pairs:
        return []
    if on_tiles(one):
        return _on_tiles(instr, one, table, experts, top_k, ops)
    return _plain(instr, one, table, experts, top_k, ops)


def _on_tiles(
    instr: micro.Dispatch, one: Matrix, table: Tensor, experts: int, top_k: int, ops: Operands
) -> list[Step]:
    x, y, tokens = ops.tensor(instr.args[0]), ops.floats(instr.dst), ops.number(table.rows)
    alone = _alone(tokens * top_k, experts)
    numerics = instr.numerics or LINEAR_EXACT
    # twice as many as an expert has on average, so that few are read a second time; no less than fit a tile
    most = 1 if alone else min(tokens, max(-(-2 * tokens * top_k // experts), 8 // DIGITS[numerics]))
    block = block_of(one, most, numerics, ops)
    choices, steps = _choices(instr, table, experts, top_k, block.tokens, alone, ops)
    tiles = -(-one.n // (16 if one.layout.name == "bf16" else 32))  # of `GROUPS` row groups
    of = args.Linear(
        one.address, one.n, one.k, 1, tiles, x.address, x.stride, KINDS[x.dtype], 0, 0, 0.0, 0.0,
        y.address, y.stride, 0, _bias(instr, ops), 0, 0, 0, choices.rows, block.tokens, block.digits,
        block.span, block.slot, block.depth,
    )  # fmt: skip
    stride = one.n // one.layout.rows * one.layout.group_bytes(one.k)
    fields = (*of, stride, *choices)
    grid = (min(_items(tokens * top_k, experts, block.tokens, alone) * tiles, ops.limits.processors),)
    name = f"expert_{NAMES[one.layout.name]}_{block.tile}"
    return [*steps, launch(name, grid, THREADS, fields, block.shared)]


def _plain(
    instr: micro.Dispatch, one: Matrix, table: Tensor, experts: int, top_k: int, ops: Operands
) -> list[Step]:
    if one.layout.name not in PLAIN or instr.numerics not in ("", LINEAR_EXACT):
        raise PlanError(f"{ops.device}: no product with experts in {one.layout.name} and {instr.numerics!r}")
    x, y, pairs = ops.floats(instr.args[0]), ops.floats(instr.dst), ops.number(table.rows) * top_k
    alone = _alone(pairs, experts)
    choices, steps = _choices(instr, table, experts, top_k, TOGETHER, alone, ops)
    fields = args.PlainExpert(
        one.address, one.n, one.k, PLAIN[one.layout.name], x.address, x.stride, y.address, y.stride,
        _bias(instr, ops),
    )  # fmt: skip
    grid = (-(-one.n // 8), _items(pairs, experts, TOGETHER, alone))
    return [*steps, launch("expert_plain", grid, 256, (*fields, *choices))]


def _alone(pairs: int, experts: int) -> bool:
    """Whether so few pairs seldom share an expert: to find out costs more than to read some twice."""
    return 4 * pairs <= experts


def _items(pairs: int, experts: int, most: int, alone: bool) -> int:
    """How many items there can be at most."""
    return pairs if alone else pairs // most + min(pairs, experts + 1)


def _choices(
    instr: micro.Dispatch, table: Tensor, experts: int, top_k: int, most: int, alone: bool, ops: Operands
) -> tuple[args.Choices, list[Step]]:
    """What a product knows of the tokens' choices, and the launch that finds items, if there is one."""
    pairs, items = ops.number(table.rows) * top_k, 0
    ends = 4 * (1 + 3 * _items(pairs, experts, most, alone))
    if not alone:
        items = int(ops.scratch("experts", ends + 4 * pairs).data_ptr())
    found = args.Choices(
        table.address, table.stride, experts, top_k, int(instr.attr("shared") is True), most,
        items, items and items + ends, ops.rows(table.rows),
    )  # fmt: skip
    return found, [] if alone else [launch("expert_items", (1,), 512, found, 8 * (experts + 1))]


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
