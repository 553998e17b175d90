"""Which channels of its inputs, and which rows of its weights, a shard of a node needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from flashrt.ir import physical
from flashrt.ir.bounds import Bounds
from flashrt.ir.types import Dim, Weight
from flashrt.layouts import LAYOUTS

# of an op split by channels: the inputs of which it takes the same channels
_BY_CHANNEL: Mapping[str, Callable[[int], bool]] = {
    **dict.fromkeys(("gated", "add", "mul"), lambda i: True),
    **dict.fromkeys(("activation", "scale", "softcap", "rope", "rope_pairs", "rms_norm"), lambda i: i == 0),
    "linear": lambda i: i > 0,
}


def takes_channels(op: str, index: int, shape: tuple[Dim, ...]) -> bool:
    """Whether a shard of an operation takes the same channels of input `index`, which has this shape."""
    takes = _BY_CHANNEL.get(op)
    return takes is not None and takes(index) and shape not in ((), (1,))


def rows_of(weight: Weight) -> int:
    """How many rows a weight has."""
    rows, *_ = weight.type.shape
    assert isinstance(rows, int), weight
    return rows


def rows_used(node: physical.Node, index: int, weight: Weight, known: Bounds) -> tuple[int, int]:
    """Rows of a weight that a node uses at any position of the splits, in whole row groups."""
    n = weight.type.shape[0] if weight.type.shape else 1
    assert isinstance(n, int), weight
    if node.shard is None or node.part is not None or not takes_channels(node.op, index, weight.type.shape):
        return 0, n
    group = LAYOUTS[weight.layout].rows if len(weight.type.shape) == 2 and weight.layout else 1
    lo = math.floor(known.interval(node.shard.lo)[0])
    hi = math.ceil(known.interval(node.shard.hi)[1])
    return lo // group * group, min(n, -(-hi // group) * group)
