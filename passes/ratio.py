"""Where products are cut when devices share them, and between which channels the cut may move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flashrt.ir import logical, physical
from flashrt.ir.types import Dim, sym
from flashrt.passes.price import Prices
from flashrt.passes.spread import Lanes, Part

STEPS = 8  # a moving cut may stand at so many parts of the whole
SAMPLED = 32  # cuts that are tried for the best one
HALVINGS = 40


@dataclass(frozen=True, slots=True)
class Cuts:
    """How some devices share products of one width.

    fixed: first channel of each device's shard, and the width. split: the variable in place of the first
    cut; it moves between the first two devices only.
    """

    fixed: tuple[int, ...]
    split: physical.Split

    @property
    def moving(self) -> tuple[Dim, ...]:
        """The bounds with the cut that may move."""
        return (0, sym(self.split.name), *self.fixed[2:])


class Ratios:
    """The cuts of all products of a graph, made as they are asked for: one for each width and devices.

    So the whole graph has few variables, and each stands where the products of its width, one of a kind,
    together end first.
    known: cuts that another variant uses.
    """

    def __init__(
        self,
        products: Sequence[logical.Node],
        joint: Lanes,
        units: Mapping[str, int],
        prices: Prices,
        known: Mapping[tuple[int, tuple[str, ...]], tuple[int, ...]],
    ) -> None:
        self._prices, self._joint, self._units, self._known = prices, joint, units, known
        self._products: dict[int, list[logical.Node]] = {}
        kinds = {(n.type, self.width(n), prices.kind(n)): n for n in products}
        for node in kinds.values():
            self._products.setdefault(self.width(node), []).append(node)
        self.made: dict[tuple[int, tuple[str, ...]], Cuts | None] = {}

    def width(self, node: logical.Node) -> int:
        """Channels that are cut: those of one part of a joint product."""
        width = self._joint.get(node.name, (node,))[0].type.shape[-1]
        assert isinstance(width, int), node.name
        return width

    def cuts(self, node: logical.Node, devices: tuple[str, ...]) -> Cuts | None:
        """How the devices share a product; None when one of them would get nothing."""
        key = (self.width(node), devices)
        if key not in self.made:
            self.made[key] = self._make(*key)
        return self.made[key]

    def _make(self, width: int, devices: tuple[str, ...]) -> Cuts | None:
        nodes = self._products[width]
        unit = max(self._units[n.name] for n in nodes)
        best = (
            self._two(nodes, width, unit, devices)
            if len(devices) == 2
            else self._many(nodes, width, unit, devices)
        )
        if best is None:
            return None
        name = f"_cut{len(self.made)}_{width}"  # its own name comes when it is known to be used
        start, end = best[1], best[2]
        self._prices.env[name] = start
        fixed = self._known.get((width, devices), best)
        return Cuts(fixed, physical.Split(name, positions(start, end, unit), start))

    def _two(
        self, nodes: Sequence[logical.Node], width: int, unit: int, devices: tuple[str, ...]
    ) -> tuple[int, ...] | None:
        tried = {round(i * width / SAMPLED / unit) * unit for i in range(1, SAMPLED)} - {0, width}
        if not tried:
            return None
        at = min(sorted(tried), key=lambda at: sum(self._time(n, at, width, devices) for n in nodes))
        return (0, at, width)

    def _time(self, node: logical.Node, at: int, width: int, devices: tuple[str, ...]) -> float:
        """Microseconds of a product that comes from the first device and is wanted there again."""
        here, there = devices
        pieces = self._joint.get(node.name, (node,))
        near = [self._shard(node, here, 0, at) for _ in pieces]
        far = [self._shard(node, there, at, width) for _ in pieces]
        x = self._prices.values.get(node.inputs[0][1:], node.type)
        came = self._prices.copy(x, here, there)
        back = self._prices.copy(Part("", node, there, (), "", at, width).type, there, here)
        return max(sum(near), came + sum(far) + back)

    def _shard(self, node: logical.Node, device: str, lo: int, hi: int) -> float:
        return self._prices.est(Part("", node, device, (), node.name, lo, hi))

    def _many(
        self, nodes: Sequence[logical.Node], width: int, unit: int, devices: tuple[str, ...]
    ) -> tuple[int, ...] | None:
        """Shares with which all devices end at once, each as fast as it is with the whole product."""
        own = [sum(self._shard(n, d, 0, width) for n in nodes) for d in devices]
        least = [sum(self._shard(n, d, 0, unit) for n in nodes) for d in devices]
        way = [0.0] + [sum(self._prices.copy(n.type, devices[0], d) for n in nodes) for d in devices[1:]]
        low, high = 0.0, max(own) + max(way)
        for _ in range(HALVINGS):
            end = (low + high) / 2
            shares = [
                min(1.0, max(0.0, (end - w - at) / max(whole - at, 1e-9)))
                for whole, at, w in zip(own, least, way, strict=True)
            ]
            low, high = (low, end) if sum(shares) >= 1 else (end, high)
        total, bounds = sum(shares) or 1.0, [0]
        so_far = 0.0
        for share in shares:
            so_far += share / total
            bounds.append(round(so_far * width / unit) * unit)
        bounds[-1] = width
        return tuple(bounds) if all(a < b for a, b in pairwise(bounds)) else None


def positions(start: int, end: int, unit: int) -> tuple[int, ...]:
    """Up to nine channels from 0 to `end`, about evenly apart, `start` among them."""
    even = {round(i * end / STEPS / unit) * unit for i in range(1, STEPS)} - {0, end}
    near = min(even, key=lambda p: abs(p - start), default=None)
    return tuple(sorted({0, end, start} | (even - {near})))
