"""Lays nodes out over devices: shards where a node is shared, merges where a value is needed whole, sums.

%h = gated(%gate,%up), shared by a and b   →  %h#0 = gated(%gate#0,%up#0) shard=[0:s] device=a
%y = linear(%h,@w) on a                       %h#1 = gated(%gate#1,%up#1) shard=[s:N] device=b
                                              %h = merge(%h#0,%h#1) device=a
                                              %y = linear(%h,@w) device=a
%y = linear(%h,@w), the sum of parts       →  %y#0 = linear(%h#0,@w/0:3) part=[0:3] device=a
                                              %y#1 = linear(%h#1,@w/3:8) part=[3:8] device=b
                                              %y = add(%y#0,%y#1) device=a
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from flashrt.ir import logical
from flashrt.ir.types import Dim, TensorType
from flashrt.passes.parts import Parts, total

Lanes = Mapping[str, tuple[logical.Node, ...]]  # of `units.lanes`


@dataclass(frozen=True, slots=True)
class Whole:
    """A node on one device. host: as a row of the reference implementation; obstacle: why there.

    lender: the device that keeps its weight, where that is another.
    """

    device: str
    host: bool = False
    obstacle: str = ""
    lender: str = ""


@dataclass(frozen=True, slots=True)
class Shared:
    """A node split by channels. bounds: where the devices' shards begin, and the width behind the last."""

    devices: tuple[str, ...]
    bounds: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Parted:
    """A node of a group (see `parts`) of which each device makes a part. bounds: at which of the group's
    equal shares the devices' parts begin, and how many there are."""

    devices: tuple[str, ...]
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Summed:
    """A product that is the sum, on the first device, of what those of a parted value make of their parts.

    everywhere: the others add up, too, so that nothing has to come back.
    """

    devices: tuple[str, ...]
    bounds: tuple[int, ...]
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class Copied:
    """A node that each of the devices computes."""

    devices: tuple[str, ...]


Seat = Whole | Shared | Parted | Summed | Copied


@dataclass(frozen=True, slots=True)
class Part:
    """What becomes one node of the physical graph: a shard, a part, a merge, a sum or a whole node.

    of: the value it is a part of; lo, hi: which channels (None: all). node: what it is a part of; where it is
    made of shares (from, to, of how many), the smaller node. lender: as a seat has it.
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
    sum: bool = False
    shares: tuple[int, int, int] | None = None
    lender: str = ""

    @property
    def type(self) -> TensorType:
        whole = self.node.type
        if self.shares or self.lo is None or self.hi is None:
            return whole
        return whole.with_shape(*whole.shape[:-1], self.hi - self.lo)


def spread(
    nodes: Iterable[logical.Node],
    seats: Mapping[str, Seat],
    joint: Lanes,
    parts: Parts,
    outputs: Sequence[str] = (),
    homes: Sequence[str] = ("",),
) -> list[Part]:
    """The parts in order. A value is merged once on each device that needs it whole; an output always.

    homes: devices that need the outputs; "" for wherever they are.
    """
    layout = _Layout(seats, joint, parts)
    for node in nodes:
        layout.add(node)
    for name in outputs:
        for home in homes:
            layout.whole(f"%{name}", home)
    return layout.parts


class _Layout:
    """The parts so far; the shards of each shared value; where shared values have been merged."""

    def __init__(self, seats: Mapping[str, Seat], joint: Lanes, made: Parts) -> None:
        self.parts: list[Part] = []
        self._seats, self._joint, self._made = seats, joint, made
        self._shards: dict[str, list[Part]] = {}
        self._copies: dict[tuple[str, str], str] = {}  # (value, device) → what it is called there
        self._merged: dict[str, dict[str, str]] = {}  # value → device → what the merged value is called
        self._nodes: dict[str, logical.Node] = {}

    def add(self, node: logical.Node) -> None:
        """Lays one node out."""
        self._nodes[node.name] = node
        seat = self._seats[node.name]
        if isinstance(seat, Copied):
            for device in seat.devices:
                inputs = tuple(self.whole(i, device) for i in node.inputs)
                name = self._copy(node.name, device, seat.devices[0])
                self.parts.append(Part(name, node, device, inputs, node.name))
        elif isinstance(seat, Parted):
            self._shards[node.name] = [self._small(node, seat, at) for at in range(len(seat.devices))]
        elif isinstance(seat, Summed):
            self._sum(node, seat)
        elif isinstance(seat, Whole):
            inputs = tuple(self.whole(i, seat.device) for i in node.inputs)
            part = Part(node.name, node, seat.device, inputs, node.name, host=seat.host, lender=seat.lender)
            self.parts.append(part)
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

    def _small(self, node: logical.Node, seat: Parted, at: int) -> Part:
        """A device's part of a node in a group."""
        small = self._made.small(node.name, *seat.bounds[at : at + 2])
        channels = self._made.channels(node.name, *seat.bounds[at : at + 2])
        part = self._made_of(node, small, seat, at)
        self.parts.append(replace(part, lo=channels[0], hi=channels[1]) if channels else part)
        return self.parts[-1]

    def _made_of(self, node: logical.Node, small: logical.Node, seat: Parted | Summed, at: int) -> Part:
        device, (lo, hi) = seat.devices[at], seat.bounds[at : at + 2]
        parted = {i for i in small.inputs if isinstance(self._seats.get(i[1:]), Parted)}
        inputs = tuple(self._same(i, at) if i in parted else self.whole(i, device) for i in small.inputs)
        return Part(f"{node.name}#{at}", small, device, inputs, node.name, shares=(lo, hi, seat.bounds[-1]))

    def _sum(self, node: logical.Node, seat: Summed) -> None:
        """The parts of a product and the nodes that add them up, in order, so that all get the same bits."""
        made = []
        for at, (lo, hi) in enumerate(pairwise(seat.bounds)):
            self.parts.append(self._made_of(node, self._made.addend(node, lo, hi), seat, at))
            made.append(self.parts[-1].name)
        for device in seat.devices if seat.everywhere else seat.devices[:1]:
            so_far = made[0]
            for at, each in enumerate(made[1:], 1):
                name = node.name if at == len(made) - 1 else f"{node.name}+{at}"
                name = self._copy(name, device, seat.devices[0])
                add = total(node, name, so_far, each)
                self.parts.append(Part(name, add, device, add.inputs, node.name, sum=True))
                so_far = name

    def _copy(self, value: str, device: str, home: str) -> str:
        """The name of a value that several devices compute, on one of them."""
        if device == home:
            return value
        self._copies[value, device] = f"{value}@{device}"
        return self._copies[value, device]

    def _same(self, name: str, at: int) -> str:
        return f"%{self._shards[name[1:]][at].name}" if name[1:] in self._shards else name

    def whole(self, name: str, device: str) -> str:
        """What a value is called where it is needed whole. device: "" for wherever that is."""
        value = name[1:]
        if (value, device) in self._copies:
            return f"%{self._copies[value, device]}"
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
