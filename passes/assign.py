"""Which choice each unit gets, so that the whole ends soonest within every memory: an integer program.

Units that are alike are one row of it: how many of them get each choice. So its size is that of one
layer, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

GAP = 1e-4  # of the best time: the search ends when no better plan can be further away
Tied = tuple[str, str]  # a weight that several units use, and the memory it is in
NODES = 500  # of the search tree at most, so that a plan doesn't depend on the clock; what was found is used
WORSE = 0.01  # of the time that weights stream, even when nothing waits for them
TIE = 1e-6  # of the time, for each share of a memory: of plans equally fast the smaller one


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to place a unit. cost: microseconds; bytes: of each memory, alone its own; home: a device;
    tied: weights it needs that other units need, too; uses: devices."""

    cost: float
    bytes: Mapping[str, float]
    home: str
    uses: frozenset[str]
    tied: frozenset[Tied] = frozenset()


@dataclass(frozen=True, slots=True)
class Memory:
    """limit: bytes for weights and state. streaming: microseconds a byte of weights that don't stay;
    ring: bytes that streaming takes."""

    limit: float
    streaming: float | None = None
    ring: float = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """choices: for each class of units. counts: units of each class. tied: what it takes of which memory.
    results: bytes that results take of a memory when a device is in use: device → memory, bytes.
    moving: microseconds for each device that is a home. beside: whether weights stream beside the computing,
    or before it, as they do when there is no room for more than the one at work."""

    choices: Sequence[Sequence[Choice]]
    counts: Sequence[int]
    memories: Mapping[str, Memory]
    tied: Mapping[Tied, tuple[str, float]]
    results: Mapping[str, tuple[str, float]]
    moving: Mapping[str, float]
    beside: bool = True


def assign(problem: Problem) -> list[list[int]] | None:
    """For each class, how many of its units get each choice; None when nothing fits."""
    program = _Program(_scaled(problem))
    found = milp(
        program.objective(),
        integrality=np.array(program.whole),
        bounds=Bounds(np.zeros(program.size), np.array(program.upper)),
        constraints=program.constraints(),
        options={"node_limit": NODES, "mip_rel_gap": GAP},
    )
    if found.x is None:
        return None
    return [[round(found.x[v]) for v in row] for row in program.counts]


def _scaled(problem: Problem) -> Problem:
    """The same with memories of about 1 and a time of about 1: the solver's tolerances are absolute."""
    unit = {m: float(max(1, abs(x.limit))) for m, x in problem.memories.items()}
    us = (
        sum(n * min(c.cost for c in cs) for cs, n in zip(problem.choices, problem.counts, strict=True)) or 1.0
    )

    def choice(c: Choice) -> Choice:
        return replace(c, cost=c.cost / us, bytes={m: b / unit[m] for m, b in c.bytes.items() if m in unit})

    def memory(name: str, x: Memory) -> Memory:
        streaming = None if x.streaming is None else x.streaming * unit[name] / us
        return Memory(x.limit / unit[name], streaming, x.ring / unit[name])

    return Problem(
        [list(map(choice, cs)) for cs in problem.choices],
        problem.counts,
        {name: memory(name, x) for name, x in problem.memories.items()},
        {w: (m, b / unit[m]) for w, (m, b) in problem.tied.items()},
        {d: (m, b / unit[m]) for d, (m, b) in problem.results.items()},
        {d: cost / us for d, cost in problem.moving.items()},
        problem.beside,
    )


@dataclass(slots=True)
class _Program:
    """Variables and rows. counts: the variables of each class's choices; the last one is the time."""

    problem: Problem
    counts: list[list[int]] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)
    streamed: dict[int, float] = field(default_factory=dict)  # variable → microseconds a byte
    time: int = 0

    def __post_init__(self) -> None:
        p = self.problem
        for choices, count in zip(p.choices, p.counts, strict=True):
            self.counts.append([self._variable(count) for _ in choices])
            self._row(dict.fromkeys(self.counts[-1], 1.0), count, count)
        homes = {d: self._variable(1) for d in p.moving}
        used = {d: self._variable(1) for d in p.results}
        tied = {w: self._variable(1) for w in p.tied}
        streams = {m: self._variable(np.inf, whole=False) for m, x in p.memories.items() if x.streaming}
        rings = {m: self._variable(1) for m in streams}
        self.time = self._variable(np.inf, whole=False)
        self._implications(homes, used, tied)
        for name, memory in p.memories.items():
            self._memory(name, memory, used, tied, streams, rings)
        cost = {v: c.cost for v, c in self._each()} | {homes[d]: us for d, us in p.moving.items()}
        self._row(cost | {self.time: -1.0}, -np.inf, 0)
        for name, variable in streams.items():
            self.streamed[variable] = each = p.memories[name].streaming or 0.0
            self._row({variable: each, self.time: -1.0} | ({} if p.beside else cost), -np.inf, 0)

    @property
    def size(self) -> int:
        return len(self.upper)

    def objective(self) -> NDArray[np.float64]:
        """The time, and next to nothing for memory, even where weights can stream beside the computing."""
        out = np.zeros(self.size)
        out[self.time] = 1.0
        for variable, each in self.streamed.items():
            out[variable] = WORSE * each
        for variable, choice in self._each():
            out[variable] = TIE * choice.cost * sum(choice.bytes.values())
        return out

    def constraints(self) -> LinearConstraint:
        """All rows."""
        places = [(r, v, x) for r, (row, _, _) in enumerate(self.rows) for v, x in row.items()]
        r, v, x = zip(*places, strict=True)
        matrix = csr_array((x, (r, v)), shape=(len(self.rows), self.size))
        return LinearConstraint(matrix, [lo for _, lo, _ in self.rows], [hi for _, _, hi in self.rows])

    def _each(self) -> list[tuple[int, Choice]]:
        pairs = zip(self.counts, self.problem.choices, strict=True)
        return [(v, c) for row, choices in pairs for v, c in zip(row, choices, strict=True)]

    def _variable(self, upper: float, *, whole: bool = True) -> int:
        self.upper.append(upper)
        self.whole.append(int(whole))
        return self.size - 1

    def _row(self, terms: dict[int, float], lo: float, hi: float) -> None:
        self.rows.append((terms, lo, hi))

    def _implications(
        self, homes: Mapping[str, int], used: Mapping[str, int], tied: Mapping[Tied, int]
    ) -> None:
        """A choice that is taken makes its device a home, uses devices, and needs its tied weights."""
        for flags, of in (
            (homes, lambda c: {c.home}), (used, lambda c: c.uses), (tied, lambda c: c.tied)
        ):  # fmt: skip
            for key, flag in flags.items():
                for row, choices, count in zip(
                    self.counts, self.problem.choices, self.problem.counts, strict=True
                ):
                    terms = {v: 1.0 for v, c in zip(row, choices, strict=True) if key in of(c)}
                    if terms:
                        self._row(terms | {flag: -float(count)}, -np.inf, 0)

    def _memory(
        self, name: str, memory: Memory, used: Mapping[str, int], tied: Mapping[Tied, int],
        streams: Mapping[str, int], rings: Mapping[str, int],
    ) -> None:  # fmt: skip
        """What is put into a memory, less what streams through it, is within its limit."""
        terms = {v: c.bytes[name] for v, c in self._each() if c.bytes.get(name)}
        weights = dict(terms)
        terms |= {used[d]: b for d, (m, b) in self.problem.results.items() if m == name}
        own = {tied[w]: b for w, (m, b) in self.problem.tied.items() if m == name}
        terms |= own
        if name in streams:
            everything = sum(self.upper[v] * b for v, b in (weights | own).items())
            self._row({streams[name]: 1.0, rings[name]: -everything}, -np.inf, 0)
            # no more streams than there is
            self._row({streams[name]: 1.0} | {v: -b for v, b in (weights | own).items()}, -np.inf, 0)
            terms |= {streams[name]: -1.0, rings[name]: memory.ring}
        self._row(terms, -np.inf, memory.limit)
