"""Positions that a model counts by itself, from a range over its tokens, become the step's `positions`.

In a sequence that is computed from its first token at once, as transformers' is here, the range over all
tokens is their positions; in a flat batch of several sequences it isn't. The safety gate tries the result.
"""

from __future__ import annotations

from typing import Any

import torch

from flashrt.frontend import rewrite

_RANGES = {
    torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step,
}  # fmt: skip
_WITHIN = {
    torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default, torch.ops.aten.view.default,
    torch.ops.aten.reshape.default, torch.ops.aten.expand.default, torch.ops.aten.unsqueeze.default,
    torch.ops.aten.type_as.default,
}  # fmt: skip
_ONES = {torch.ops.aten.ones.default, torch.ops.aten.ones_like.default, torch.ops.aten.new_ones.default}


def take(program: Any) -> None:
    """arange(T) → positions; cumsum(ones[T]) and cumsum(ids != padding) → positions + 1.

    The last holds for sequences without padding; a token for padding among others counts as any other.
    """
    ids, positions = (rewrite.placeholder(program, n) for n in ("ids", "positions"))
    size = ids.meta["val"].shape[0]
    for node in list(program.graph.nodes):
        if not rewrite.has_shape(node, size):
            continue
        if node.target in _RANGES and _from_zero(node):
            _replace(program, node, positions, 0)
        elif node.target is torch.ops.aten.cumsum.default and _is_true(node.args[0], ids):
            _replace(program, node, positions, 1)
    rewrite.tidy(program)


def _from_zero(node: torch.fx.Node) -> bool:
    """Whether a range starts at 0 and goes by ones, as far as its arguments tell."""
    if node.target is torch.ops.aten.arange.default:
        return True
    step = node.args[2] if len(node.args) > 2 else 1
    return node.args[0] == 0 and step == 1


def _is_true(value: Any, ids: torch.fx.Node) -> bool:
    """Whether a value [T] is 1 for every token: of a mask, or by what tells padding from tokens."""
    mask = rewrite.under(value, _WITHIN)
    told = mask.target is torch.ops.aten.ne.Scalar and rewrite.under(mask.args[0], _WITHIN) is ids
    return told or mask.target in _ONES


def _replace(program: Any, node: torch.fx.Node, positions: torch.fx.Node, first: int) -> None:
    kind = node.meta["val"]
    with rewrite.before(program, node) as add:
        value = add(torch.ops.aten.to.dtype, positions, kind.dtype)
        if first:
            value = add(torch.ops.aten.add.Tensor, value, first)
        for _ in range(kind.dim() - 1):
            value = add(torch.ops.aten.unsqueeze.default, value, 0)
    node.replace_all_uses_with(value)
