"""Cuts products whose weights pass through a device's memory into pieces.

While one computes, the next arrives, and as soon as it is through there is room for another.

%y = linear(%x,@w) device=gpu:0   →   %y/0 = linear(%x,@w.0:64) shard=[0:64] part=[0:64] device=gpu:0
                                      %y/1 = linear(%x,@w.64:128) shard=[64:128] part=[64:128] device=gpu:0
                                      %y = merge(%y/0,%y/1) device=gpu:0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

from flashrt.ir import logical, physical
from flashrt.ir.types import Weight
from flashrt.layouts import aligned
from flashrt.passes.cost import block_bytes
from flashrt.passes.lending import BLOCKS, SMALL, Lending
from flashrt.passes.parts import EPILOGUES, Parts
from flashrt.passes.spread import Part

PIECES = 4  # that a ring has room for, at least
EVEN = 128  # rows that pieces are multiples of: what libraries like best


def in_pieces(parts: Iterable[Part], made: Parts, lending: Lending) -> list[Part]:
    """The parts of a graph, with pieces of products whose weights are more than a quarter of the ring."""
    return [piece for part in parts for piece in _cut(part, made, lending)]


def is_piece(node: physical.Node) -> bool:
    """Whether a node is a piece of what has its name up to the last "/"."""
    return "/" in node.name.removeprefix(node.of)


def cuttable(node: logical.Node) -> bool:
    """Whether a node is a product that pieces can be made of: nothing is added to it."""
    return node.op == "linear" and not any(node.attr(key) for key in EPILOGUES)


def _cut(part: Part, made: Parts, lending: Lending) -> Iterator[Part]:
    ends = _ends(part, made, lending)
    if len(ends) < 3:
        yield part
        return
    width, names = part.node.type.shape[-1], []
    assert isinstance(width, int)
    for at, (lo, hi) in enumerate(pairwise(ends)):
        node = made.some_rows(part.node, lo, hi)
        inputs = (*part.inputs[:1], node.inputs[1])
        names.append(f"{part.name}/{at}")
        yield replace(part, name=names[-1], node=node, inputs=inputs, lo=lo, hi=hi, shares=(lo, hi, width))
    yield replace(part, inputs=tuple(f"%{name}" for name in names), merge=True)


def _ends(part: Part, made: Parts, lending: Lending) -> list[int]:
    """Where the pieces of a product begin, and its end; nothing for what stays whole."""
    if not cuttable(part.node) or part.merge or part.sum or part.shares:
        return []
    weight = made.weights[part.node.inputs[1][1:]]
    n = weight.type.shape[0]
    lo, hi = (0, n) if part.lo is None or part.hi is None else (part.lo, part.hi)
    if not isinstance(lo, int) or not isinstance(hi, int) or not lending.lends(weight, (lo, hi), part.device):
        return []
    return cut_at(weight, lo, hi, lending.rings[part.device])


def cut_at(weight: Weight, lo: int, hi: int, ring: int) -> list[int]:
    """Where pieces of rows [lo, hi) begin that can pass through a ring of so many bytes, and the end; nothing
    where there are none."""
    count = -(-block_bytes(weight, lo, hi) * PIECES // ring)
    each = -(-(hi - lo) // (count * EVEN)) * EVEN
    ends = [*range(lo, hi - each // 2, each), hi]  # what would be less than half of one joins the last
    sizes = [aligned(block_bytes(weight, a, b)) for a, b in pairwise(ends)]
    return ends if all(SMALL < size <= ring // BLOCKS for size in sizes) else []
