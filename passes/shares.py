"""How many of a group's equal shares each device makes, so that all are done at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from flashrt.ir import logical
from flashrt.passes.parts import Group, Parts
from flashrt.passes.price import Prices
from flashrt.passes.spread import Part, Parted, Seat

Kind = tuple[str, int, int]  # the operation that a group ends with, its channels and shares


class Shares:
    """The bounds of all groups, one for each kind and devices. known: those that another variant uses."""

    def __init__(
        self,
        nodes: Mapping[str, logical.Node],
        parts: Parts,
        prices: Prices,
        known: Mapping[tuple[Kind, tuple[str, ...]], tuple[int, ...]],
    ) -> None:
        self._nodes, self._parts, self._prices = nodes, parts, prices
        self._known = known
        self._made: dict[tuple[Kind, tuple[str, ...], bool], tuple[int, ...] | None] = {}

    def bounds(self, group: Group, devices: tuple[str, ...], *, near: bool) -> tuple[int, ...] | None:
        """Where the devices' parts of a group begin, and its shares; None when one would get nothing.

        near: whether each of them has the inputs, and nothing has to be back on the first one.
        """
        kind = kind_of(group, self._nodes)
        if (known := self._known.get((kind, devices))) is not None:
            return known
        if (kind, devices, near) not in self._made:
            self._made[kind, devices, near] = self._make(group, devices, near)
        return self._made[kind, devices, near]

    def _make(self, group: Group, devices: tuple[str, ...], near: bool) -> tuple[int, ...] | None:
        """Share by share to the device that would be done with it first."""
        all_of_it = [self._time(group, d, group.shares) for d in devices]
        one = [self._time(group, d, 1) for d in devices]
        each = [(a - b) / max(group.shares - 1, 1) for a, b in zip(all_of_it, one, strict=True)]
        ways = [0.0 if near else self._way(group, devices[0], d) for d in devices]
        done = [b - e + way for b, e, way in zip(one, each, ways, strict=True)]
        got = [0] * len(devices)
        for _ in range(group.shares):
            at = min(range(len(devices)), key=lambda i: done[i] + each[i])
            done[at] += each[at]
            got[at] += 1
        return (0, *accumulate(got)) if all(got) else None

    def _time(self, group: Group, device: str, count: int) -> float:
        """Microseconds that a device takes for so many shares."""
        whole = (0, count, group.shares)
        return sum(
            self._prices.est(Part(name, self._parts.small(name, 0, count), device, (), name, shares=whole))
            for name in group.nodes
        )

    def _way(self, group: Group, home: str, device: str) -> float:
        """Microseconds that inputs and results take to a device and back."""
        if device == home:
            return 0.0
        inputs = {self._nodes[p].inputs[0][1:] for p in group.products}
        taken = [self._prices.values[name] for name in inputs if name in self._prices.values]
        came = sum(self._prices.copy(type, home, device) for type in taken)
        return came + self._prices.copy(self._nodes[group.last].type, device, home) / 2


def kind_of(group: Group, nodes: Mapping[str, logical.Node]) -> Kind:
    """What groups have in common that divide alike."""
    last = nodes[group.last]
    width = last.type.shape[-1]
    assert isinstance(width, int), last
    return last.op, width, group.shares


def known_shares(
    groups: Iterable[Group], nodes: Mapping[str, logical.Node], seats: Mapping[str, Seat]
) -> dict[tuple[Kind, tuple[str, ...]], tuple[int, ...]]:
    """The bounds in use in an earlier plan."""
    found = {}
    for group in groups:
        if isinstance(seat := seats.get(group.last), Parted):
            found[kind_of(group, nodes), seat.devices] = seat.bounds
    return found
