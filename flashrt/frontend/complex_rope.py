"""Rotary positions that a model writes as a product of complex numbers, in real ones as others do."""

from __future__ import annotations

from typing import Any

import torch

from flashrt.frontend import rewrite

_ATEN = torch.ops.aten
_SHAPING = {
    _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.view.default, _ATEN.reshape.default,
    _ATEN.expand.default, _ATEN.contiguous.default, _ATEN.clone.default,
}  # fmt: skip
_SAME = {_ATEN.to.device, _ATEN.to.dtype, _ATEN.to.dtype_layout}  # there is one kind of complex numbers
_SCALED = {_ATEN.mul.Tensor, _ATEN.mul.Scalar}


def take(program: Any) -> None:
    """view_as_real(view_as_complex(x) · polar(1, a)) → x·cos a + (-x₁, x₀, -x₃, x₂, …)·sin a, of x [..,n,2]

    cos a and sin a stand twice side by side, and may have a factor. Complex numbers used otherwise stay.
    """
    unit: dict[Any, tuple[torch.fx.Node, torch.fx.Node]] = {}  # a complex value's real and imaginary part
    for node in list(program.graph.nodes):
        value = rewrite.tensor(node)
        if value is None or not value.is_complex():
            if node.target is _ATEN.view_as_real.default:
                _turn(program, node, unit)
            continue
        with rewrite.before(program, node) as add:
            if node.target is _ATEN.polar.default and node.args[0].target is _ATEN.ones_like.default:
                unit[node] = add(_ATEN.cos.default, node.args[1]), add(_ATEN.sin.default, node.args[1])
            elif node.args[0] in unit and node.target in _SAME:
                unit[node] = unit[node.args[0]]
            elif node.args[0] in unit and (node.target in _SHAPING or _is_scaled(node)):
                real, imaginary = (add(node.target, part, *node.args[1:]) for part in unit[node.args[0]])
                unit[node] = real, imaginary
    for node in list(program.graph.nodes):
        if node.target is _ATEN._assert_tensor_metadata.default and node.args[0] in unit:
            program.graph.erase_node(node)
    rewrite.tidy(program)


def _is_scaled(node: torch.fx.Node) -> bool:
    return node.target in _SCALED and isinstance(node.args[1], int | float)


def _turn(program: Any, node: torch.fx.Node, unit: dict[Any, tuple[torch.fx.Node, torch.fx.Node]]) -> None:
    """Writes a product in real numbers, if `node` reads one."""
    product: Any = node.args[0]
    if product.target is not _ATEN.mul.Tensor:
        return
    for number, factor in (product.args, product.args[::-1]):
        if factor in unit and number.target is _ATEN.view_as_complex.default:
            break
    else:
        return
    with rewrite.before(program, node) as add:
        x = add(_ATEN.flatten.using_ints, number.args[0], -2, -1)
        odd, even = (add(_ATEN.slice.Tensor, x, -1, start, 2**63 - 1, 2) for start in (1, 0))
        turned = add(_ATEN.stack.default, [add(_ATEN.neg.default, odd), even], -1)
        turned = add(_ATEN.flatten.using_ints, turned, -2, -1)
        cos, sin = (add(_ATEN.repeat_interleave.self_int, part, 2, -1) for part in unit[factor])
        made = add(_ATEN.add.Tensor, add(_ATEN.mul.Tensor, x, cos), add(_ATEN.mul.Tensor, turned, sin))
        made = add(_ATEN.unflatten.int, made, -1, [number.meta["val"].shape[-1], 2])
    node.replace_all_uses_with(made)
