"""Changing a torch.export program in place, its nodes' types kept up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Add = Callable[..., torch.fx.Node]


def tensor(node: object) -> torch.Tensor | None:
    """The type of a node's value; None where it isn't a tensor."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def has_shape(node: object, *shape: Any) -> bool:
    """Whether a node's value has this shape, after leading axes of size 1."""
    found = tensor(node)
    if found is None or found.dim() < len(shape):
        return False
    extra = found.dim() - len(shape)
    return all(_same(n, 1) for n in found.shape[:extra]) and all(
        _same(n, m) for n, m in zip(found.shape[extra:], shape, strict=True)
    )


def ends_with(node: object, *shape: Any) -> bool:
    """Whether the last axes of a node's value are these."""
    found = tensor(node)
    return (
        found is not None and found.dim() >= len(shape) and all(map(_same, found.shape[-len(shape) :], shape))
    )


def under(value: Any, targets: Collection[Any]) -> Any:
    """The value that calls of `targets` were given, one inside the other."""
    while value.target in targets:
        value = value.args[0]
    return value


def placeholder(program: Any, name: str) -> torch.fx.Node:
    """The program's input of that name."""
    found: torch.fx.Node = next(n for n in program.graph.nodes if n.op == "placeholder" and n.name == name)
    return found


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are one and the same, without a guard that would hold for the example alone."""
    return str(a) == str(b)


@contextmanager
def before(program: Any, place: torch.fx.Node) -> Iterator[Add]:
    """Gives a function that adds calls before `place`, of the same module: (operator, *arguments) → node."""

    def add(target: Any, *arguments: Any) -> torch.fx.Node:
        node = program.graph.call_function(target, arguments)
        node.meta["val"] = target(*torch.fx.node.map_arg(arguments, lambda a: a.meta["val"]))
        for key in ("nn_module_stack", "stack_trace"):
            if key in place.meta:
                node.meta[key] = place.meta[key]
        return node

    with program.graph.inserting_before(place):
        yield add


def tidy(program: Any) -> None:
    """Removes what nothing uses any more."""
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
