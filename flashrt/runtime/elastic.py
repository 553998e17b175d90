"""What of a stream moves with its split variables, and what its steps are predicted to take.

The plan's own estimates are summed once, by device and by split: a prediction for other positions, other
symbols or slower devices is then the value of a few small expressions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from flashrt.ir import micro, physical
from flashrt.ir.clock import Lane
from flashrt.ir.order import COMPUTE
from flashrt.ir.types import Dim, Env, Expr, evaluate, symbols_of
from flashrt.runtime.idle import Rests

Positions = Mapping[str, int]  # split variable → where it stands
Factors = Mapping[str, float]  # device → how much longer its instructions take than estimated
PARTS = ""  # in place of a split: parts of nodes (`layers.3.qkv#1`) that no split gives work to
REMEMBERED = 4096  # values of expressions
Key = tuple[tuple[str, int], ...]


def key_of(at: Positions) -> Key:
    """The positions as a key."""
    return tuple(sorted(at.items()))


@dataclass(frozen=True, slots=True, eq=False)
class Elastic:
    """A stream seen through its split variables.

    shares: (split, device) → microseconds of the instructions that the split gives work to; under "" of
    parts that devices make beside each other and nothing moves.
    fixed: device → microseconds of its other computing. moved, flops: device → bytes and flop of a step.
    """

    stream: micro.Stream
    shares: Mapping[tuple[str, str], Dim]
    fixed: Mapping[str, Dim]
    moved: Mapping[str, Dim]
    flops: Mapping[str, Dim]
    rests: Rests
    _live: dict[frozenset[Lane], frozenset[str]] = field(default_factory=dict)
    _uses: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _values: dict[tuple[int | str, ...], float] = field(default_factory=dict)

    @property
    def splits(self) -> tuple[physical.Split, ...]:
        return self.stream.splits

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.fixed)

    @property
    def start(self) -> Positions:
        """Where the plan has the splits begin."""
        return {s.name: s.start for s in self.splits}

    @property
    def ends(self) -> tuple[Positions, Positions]:
        """Everything above the cuts' devices empty, and everything below them."""
        return {s.name: s.positions[-1] for s in self.splits}, {s.name: s.positions[0] for s in self.splits}

    def allows(self, at: Positions) -> bool:
        """Whether each split may stand there."""
        return at.keys() == {s.name for s in self.splits} and all(
            at[s.name] in s.positions for s in self.splits
        )

    def live(self, at: Positions) -> frozenset[str]:
        """The devices that have something to do there."""
        idle = self.rests.at(at)
        if idle not in self._live:
            lanes = {(i.device, i.lane) for i in self.stream.instrs}
            self._live[idle] = frozenset(device for device, _ in lanes - idle)
        return self._live[idle]

    def step(self, env: Env, at: Positions, factors: Factors) -> float:
        """Predicted seconds of a step: what isn't split one after the other, what is beside each other."""
        env = {**env, **at}
        total = sum(self._time(dim, d, env, factors) for d, dim in self.fixed.items())
        for name in (PARTS, *(s.name for s in self.splits)):
            total += max(
                (self._time(dim, d, env, factors) for (s, d), dim in self.shares.items() if s == name),
                default=0.0,
            )
        return total

    def busy(self, env: Env, at: Positions) -> dict[str, float]:
        """Predicted seconds that each device computes in a step."""
        env = {**env, **at}
        out = {d: self._time(dim, d, env, {}) for d, dim in self.fixed.items()}
        for (_, d), dim in self.shares.items():
            out[d] += self._time(dim, d, env, {})
        return out

    def best(self, env: Env, factors: Factors) -> Positions:
        """Where each split should stand so that its devices end together."""
        return {
            split.name: min(split.positions, key=lambda p: self._split(split.name, p, env, factors))
            for split in self.splits
        }

    def _split(self, split: str, position: int, env: Env, factors: Factors) -> float:
        env = {**env, split: position}
        return max(self._time(dim, d, env, factors) for (s, d), dim in self.shares.items() if s == split)

    def _time(self, dim: Dim, device: str, env: Env, factors: Factors) -> float:
        if not isinstance(dim, Expr):
            return dim * 1e-6 * factors.get(device, 1.0)
        key = (id(dim), *(env[s] for s in self._symbols(dim)))
        if key not in self._values:
            if len(self._values) >= REMEMBERED:
                self._values.clear()
            self._values[key] = max(0.0, float(evaluate(dim, env))) * 1e-6
        return self._values[key] * factors.get(device, 1.0)

    def _symbols(self, dim: Expr) -> tuple[str, ...]:
        """The symbols of one of its own expressions, which are few and live as long as it does."""
        if id(dim) not in self._uses:
            self._uses[id(dim)] = tuple(symbols_of(dim))
        return self._uses[id(dim)]


def elastic(stream: micro.Stream, rests: Rests) -> Elastic | None:
    """The stream seen through its splits; None when it has none, or none that gives work to two devices."""
    names = [s.name for s in stream.splits]
    compute = [i for i in stream.instrs if i.lane == COMPUTE]
    sums: dict[str, dict[object, list[Dim]]] = {
        n: defaultdict(list) for n in ("shares", "fixed", "moved", "flops")
    }
    for instr in compute:
        mine = [n for n in names if n in symbols_of(instr.est)]
        if mine or "#" in instr.node:
            sums["shares"][mine[0] if mine else PARTS, instr.device].append(instr.est)
        else:
            sums["fixed"][instr.device].append(instr.est)
        sums["moved"][instr.device].append(getattr(instr, "bytes", 0))
        sums["flops"][instr.device].append(getattr(instr, "flops", 0))
    shares = {k: _total(v) for k, v in sums["shares"].items()}
    devices = dict.fromkeys(i.device for i in compute)
    if not names or any(sum((n, d) in shares for d in devices) < 2 for n in names):
        return None
    per_device = {n: {d: _total(sums[n][d]) for d in devices} for n in ("fixed", "moved", "flops")}
    return Elastic(stream, shares, per_device["fixed"], per_device["moved"], per_device["flops"], rests)  # type: ignore[arg-type]


def _total(values: list[Dim]) -> Dim:
    """Their sum; equal ones, as of equal layers, are counted first."""
    counts: dict[Dim, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    total: Dim = 0
    for value, count in counts.items():
        total = total + value * count
    return total
