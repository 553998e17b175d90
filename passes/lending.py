"""Weights that pass through a device's memory in each step, because the host's memory keeps them.

Where weights don't fit a GPU, small steps compute with the others on the processor, which keeps them, but for
some that pass meanwhile. For a large step that takes too long; it brings all of them over the link, block by
block, while the GPU computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from flashrt.ir import logical, micro, physical
from flashrt.ir.types import Weight
from flashrt.layouts import aligned
from flashrt.machine import Machine
from flashrt.passes.budget import HOSTS, Held, Rows, held_bytes
from flashrt.passes.cost import block_bytes
from flashrt.passes.experts import cache_of
from flashrt.passes.units import signature, units

PASSED = ("gpu",)  # kinds of device through whose memory weights may pass
BLOCKS = 2  # of the largest weights of a layer, for which a ring has room: one computes while one arrives
SMALL = 1 << 18  # bytes of weights that are kept on both sides: norms, biases, angles


@dataclass(frozen=True, slots=True)
class Lending:
    """What the host's memory lends. lent: rows of weights that it keeps, and the device that has
    them; held: rows that each device keeps.

    rings: device → bytes that blocks may take which pass through it; devices left out have no ring.
    """

    lent: Mapping[str, tuple[Rows, str]] = field(default_factory=dict)
    held: Held = field(default_factory=dict)
    rings: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, before: physical.Graph, held: Held, machine: Machine, reserve: Mapping[str, int]) -> Lending:
        """What a plan lends of which all weights stay. reserve: bytes for results and code, by device."""
        weights = {w.name: w for w in before.weights}
        kinds = {d.id: d.kind for d in machine.devices}
        lent = {name: (rows, device) for (name, device), rows in held.items() if kinds[device] in HOSTS}
        rings = {}
        for b in before.budgets:
            beside = max(b.activations + b.workspace, reserve.get(b.device, 0))
            left = b.limit - b.state - beside - held_bytes(held, weights, [b.device])
            if kinds[b.device] in PASSED and left > 0:
                rings[b.device] = left
        return cls(lent, held, rings if lent else {})

    def there(self, weight: str, rows: Rows, device: str) -> bool:
        """Whether a device keeps these rows."""
        return covers(self.held.get((weight, device)), rows)

    def passes(self, weight: Weight, rows: Rows, device: str) -> bool:
        """Whether these rows can pass through a device that doesn't keep them, as one block."""
        size = aligned(block_bytes(weight, *rows))
        return size <= self.rings.get(device, 0) // BLOCKS and self.lends(weight, rows, device)

    def lends(self, weight: Weight, rows: Rows, device: str) -> bool:
        """Whether a device with a ring could have these rows, which it doesn't keep, from the host's memory,
        if not as one block."""
        large = aligned(block_bytes(weight, *rows)) > SMALL and device in self.rings
        return large and self._lender(weight, rows) != "" and not self.there(weight.name, rows, device)

    def _lender(self, weight: Weight, rows: Rows) -> str:
        """The weight of which the host's memory keeps these rows: this one, or the one it is a part of."""
        for name, wanted in ((weight.name, rows), (weight.of, weight.in_whole(*rows))):
            if wanted and name in self.lent and covers(self.lent[name][0], wanted):
                return name
        return ""

    def lenders(self, stream: micro.Stream) -> tuple[micro.Block, ...]:
        """The blocks of the host's memory from which those of a stream come that pass through a device, as
        far as the stream has no such block."""
        weights, there = {w.name: w for w in stream.weights}, {(b.name, b.device) for b in stream.blocks}
        out: dict[tuple[str, str], micro.Block] = {}
        for block in (b for b in stream.blocks if b.home == "ring"):
            weight = weights[block.name]
            if self.passes(weight, (block.lo, block.hi), block.device):
                name = self._lender(weight, (block.lo, block.hi))
                (lo, hi), device = self.lent[name]
                if (name, device) not in there:
                    size = block_bytes(weights[name], lo, hi)
                    out[name, device] = micro.Block(name, device, lo, hi, size, "resident")
        return tuple(out.values())

    def copied(self, weight: Weight, device: str) -> int:
        """Bytes of a weight that a device keeps a copy of: of what passes they come from there."""
        return block_bytes(weight, *self.held.get((cache_of(weight.name), device), (0, 0)))

    def needs_a_ring(self, weight: Weight, rows: Rows, device: str) -> bool:
        """Whether a device has no other room for these rows than its ring."""
        small = aligned(block_bytes(weight, *rows)) <= SMALL
        return device in self.rings and not small and not self.there(weight.name, rows, device)

    def stays(self, weight: str, rows: Rows, device: str, nbytes: int) -> bool:
        """Whether a block of these rows is kept on a device, beside those that pass."""
        small = device in self.rings and nbytes <= SMALL
        return small or self.there(weight, rows, device)


def covers(kept: Rows | None, rows: Rows) -> bool:
    """Whether rows are among those that are kept."""
    return kept is not None and kept[0] <= rows[0] and rows[1] <= kept[1]


def ring_bytes(graph: logical.Graph) -> int:
    """Bytes of a ring that weights of the layers can pass through while others compute."""
    return BLOCKS * largest_of_a_layer(graph)


def largest_of_a_layer(graph: logical.Graph) -> int:
    """Bytes of the largest weight of those units that there are most of."""
    weights = {w.name: w for w in graph.weights}
    alike: dict[object, list[int]] = defaultdict(list)
    for unit in units(graph):
        sizes = (weights[i[1:]] for n in unit.nodes for i in n.inputs if i[0] == "@")
        alike[signature(unit, weights, {})].append(max((aligned(block_bytes(w)) for w in sizes), default=0))
    return max(alike.values(), key=len)[0]
