"""What is certain of a size while its symbols may have any value of their range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from flashrt.ir import logical, micro, physical
from flashrt.ir.types import Call, Dim, Expr

Interval = tuple[float, float]
Span = tuple[Dim, Dim]  # channels [lo, hi)

_ANY: Interval = (0, math.inf)  # a symbol that nobody declared


class Bounds:
    """The ranges of a level's symbols and split variables, and what follows from them."""

    def __init__(self, ranges: Mapping[str, Interval]) -> None:
        self.ranges = ranges
        self._at_most: dict[Span, bool] = {}

    @classmethod
    def of(cls, level: logical.Graph | physical.Graph | micro.Stream) -> Bounds:
        """The ranges that a level declares."""
        ranges: dict[str, Interval] = {s.name: (s.lo, s.hi) for s in level.symbols}
        for split in getattr(level, "splits", ()):
            if split.positions:
                ranges[split.name] = (min(split.positions), max(split.positions))
        return cls(ranges)

    def interval(self, value: Dim) -> Interval:
        """Least and greatest number that `value` can't go beyond (not always reached)."""
        if not isinstance(value, Expr):
            return value, value
        lo = hi = 0.0
        for monomial, coefficient in value.terms:
            term: Interval = (coefficient, coefficient)
            for atom in monomial:
                term = _times(
                    term, self.ranges.get(atom, _ANY) if isinstance(atom, str) else self._call(atom)
                )
            lo, hi = lo + term[0], hi + term[1]
        return lo, hi

    def _call(self, call: Call) -> Interval:
        arguments = [self.interval(a) for a in call.args]
        if call.fn == "max":
            return max(a[0] for a in arguments), max(a[1] for a in arguments)
        if call.fn == "min":
            return min(a[0] for a in arguments), min(a[1] for a in arguments)
        (lo, hi), (by_lo, by_hi) = arguments
        if lo < 0 or by_lo <= 0:
            return -math.inf, math.inf
        return _ceil(lo / by_hi), _ceil(hi / by_lo)

    def at_most(self, a: Dim, b: Dim) -> bool:
        """Whether a ≤ b whatever the symbols are."""
        if not isinstance(a, Expr) and not isinstance(b, Expr):
            return a <= b
        known = self._at_most.get((a, b))
        if known is None:
            known = self._at_most[a, b] = self.interval(b - a)[0] >= 0
        return known

    def disjoint(self, a: Span, b: Span) -> bool:
        """Whether two ranges certainly have no channel in common."""
        return self.at_most(a[1], b[0]) or self.at_most(b[1], a[0])

    def within(self, inner: Span, outer: Span) -> bool:
        """Whether `inner` certainly lies in `outer`."""
        return self.at_most(outer[0], inner[0]) and self.at_most(inner[1], outer[1])

    def covered(self, span: Span, by: Iterable[Span]) -> bool:
        """Whether the ranges together certainly cover `span`."""
        lo, hi = span
        left = list(by)
        while not self.at_most(hi, lo):
            found = next((s for s in left if self.at_most(s[0], lo) and not self.at_most(s[1], lo)), None)
            if found is None:
                return False
            left.remove(found)
            lo = found[1]
        return True


def _times(a: Interval, b: Interval) -> Interval:
    corners = [0.0 if 0 in (x, y) else x * y for x in a for y in b]
    return min(corners), max(corners)


def _ceil(value: float) -> float:
    return value if math.isinf(value) else math.ceil(value)
