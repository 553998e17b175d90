"""Lays nodes out over devices: shards where a node is shared, merges where a value is needed whole.

%h = gated(%gate,%up), shared by a and b   →  %h#0 = gated(%gate#0,%up#0) shard=[0:s] device=a
%y = linear(%h,@w) on a                       %h#1 = gated(%gate#1,%up#1) shard=[s:N] device=b
                                              %h = merge(%h#0,%h#1) device=a
                                              %y = linear(%h,@w) device=a
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flashrt.ir import logical
from flashrt.ir.types import Dim, TensorType

Lanes = Mapping[str, tuple[logical.Node, ...]]  # of `units.lanes`


@dataclass(frozen=True, slots=True)
class Whole:
    """A node on one device. host: as a row of the reference implementation; obstacle: why there."""

    device: str
    host: bool = False
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Shared:
    """A node split by channels. bounds: where the devices' shards begin, and the width behind the last."""

    devices: tuple[str, ...]
    bounds: tuple[Dim, ...]


Seat = Whole | Shared


@dataclass(frozen=True, slots=True)
class Part:
    """What becomes one node of the physical graph, a shard, a merge or a whole node.

    of: the value it is a part of; lo, hi: which channels (None: all). node: what it is a part of.
    """

    name: str
    node: logical.Node
    device: str
    inputs: tuple[str, ...]
    of: str
    lo: Dim | None = None
    hi: Dim | None = None
    merge: bool = False
    host: bool = False

    @property
    def type(self) -> TensorType:
        whole = self.node.type
        if self.lo is None or self.hi is None:
            return whole
        return whole.with_shape(*whole.shape[:-1], self.hi - self.lo)


def spread(
    nodes: Iterable[logical.Node], seats: Mapping[str, Seat], joint: Lanes, outputs: Sequence[str] = ()
) -> list[Part]:
    """The parts in order. A value is merged once on each device that needs it whole; an output always."""
    layout = _Layout(seats, joint)
    for node in nodes:
        layout.add(node)
    for name in outputs:
        layout.whole(f"%{name}", "")
    return layout.parts


class _Layout:
    """The parts so far; the shards of each shared value; where shared values have been merged."""

    def __init__(self, seats: Mapping[str, Seat], joint: Lanes) -> None:
        self.parts: list[Part] = []
        self._seats, self._joint = seats, joint
        self._shards: dict[str, list[Part]] = {}
        self._merged: dict[str, dict[str, str]] = {}  # value → device → what the merged value is called
        self._nodes: dict[str, logical.Node] = {}

    def add(self, node: logical.Node) -> None:
        """Lays one node out."""
        self._nodes[node.name] = node
        seat = self._seats[node.name]
        if isinstance(seat, Whole):
            inputs = tuple(self.whole(i, seat.device) for i in node.inputs)
            self.parts.append(Part(node.name, node, seat.device, inputs, node.name, host=seat.host))
        elif node.op != "slice":  # the slices of a joint product are what it is made as
            for piece in self._pieces(node):
                self._shards[piece.name] = [
                    self._shard(node, piece, seat, at) for at in range(len(seat.devices))
                ]

    def _pieces(self, node: logical.Node) -> tuple[logical.Node, ...]:
        """What a shared node is made as: itself, or the slices of a joint product where they are shared."""
        parts = self._joint.get(node.name, ())
        return parts if parts and isinstance(self._seats[parts[0].name], Shared) else (node,)

    def _shard(self, node: logical.Node, piece: logical.Node, seat: Shared, at: int) -> Part:
        device = seat.devices[at]
        base = piece.attr("lo") if piece is not node else 0
        assert isinstance(base, int), piece.name
        linear = node.op == "linear"
        inputs = tuple(self.whole(i, device) if linear else self._same(i, at) for i in node.inputs)
        lo, hi = seat.bounds[at] + base, seat.bounds[at + 1] + base
        self.parts.append(Part(f"{piece.name}#{at}", node, device, inputs, node.name, lo, hi))
        return self.parts[-1]

    def _same(self, name: str, at: int) -> str:
        return f"%{self._shards[name[1:]][at].name}" if name[1:] in self._shards else name

    def whole(self, name: str, device: str) -> str:
        """What a value is called where it is needed whole. device: "" for wherever that is."""
        value = name[1:]
        if name[0] != "%" or value not in self._shards:
            return name
        merged = self._merged.setdefault(value, {})
        if not device and merged:
            return next(iter(merged.values()))
        device = device or self._shards[value][0].device
        if device not in merged:
            merged[device] = f"%{value}@{device}" if merged else f"%{value}"
            shards = tuple(f"%{p.name}" for p in self._shards[value])
            self.parts.append(Part(merged[device][1:], self._nodes[value], device, shards, value, merge=True))
        return merged[device]
