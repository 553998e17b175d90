"""A region as a table of rows, and the rewriting of its numbers when symbols change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flashrt.backend import ABORT, I64, U8, Compute, Memory
from flashrt.backends.cpu import rows
from flashrt.backends.cpu.encode import Encoded, Operands, aligned, encode
from flashrt.ir import micro
from flashrt.ir.types import Expr, evaluate, symbols_of

SOLO_CYCLES = 6000  # below this, waking the others costs more than they save
SOLO, TAKEN = (rows.Header._fields.index(name) for name in ("solo", "taken"))


@dataclass(slots=True, eq=False)
class Code:
    """Loaded instructions.

    table: int64[rows, ROW]. row_of: the row of each instruction (a bias has the row of the
    dispatch that it joins). patches: a size, and the places in the table (flat) that hold it.
    costs: cycles, and the rows that take them, where these depend on symbols. used: the words of the
    symbols that any of these depend on: others change from step to step and mean no work here.
    shared: memory that kernels leave zeroed, unless a run is given up.
    """

    memory: Memory
    table: I64
    waits: I64
    signals: I64
    stamps: I64
    row_of: tuple[int, ...]
    is_bias: I64
    patches: tuple[tuple[Expr, I64], ...]
    costs: tuple[tuple[Expr, I64], ...]
    keep: tuple[U8, ...]
    shared: tuple[U8, ...]
    words: I64 = field(init=False)
    used: I64 = field(init=False)
    seen: bytes | None = None

    def __post_init__(self) -> None:
        abort = self.memory.words.ctypes.data + 8 * ABORT
        waits, signals, stamps = (a.ctypes.data for a in (self.waits, self.signals, self.stamps))
        words = rows.CodeWords(self.table.ctypes.data, len(self.table), waits, signals, stamps, abort)
        self.words = np.array(words, np.int64)
        sizes = [expr for expr, _ in self.patches] + [cycles for cycles, _ in self.costs]
        symbols = sorted({symbol for size in sizes for symbol in symbols_of(size)})
        self.used = np.array([self.memory.word_of(symbol) for symbol in symbols], np.int64)

    def recover(self) -> None:
        """Makes the next run possible after one that was given up."""
        for memory in self.shared:
            memory.fill(0)
        self.table[:, TAKEN] = 0

    def refresh(self) -> None:
        """Writes the numbers of this step's symbols, if any has changed since the last run."""
        now = self.memory.words[self.used].tobytes()
        if now == self.seen:
            return
        env = _Words(self.memory)
        flat = self.table.reshape(-1)
        for expr, places in self.patches:
            flat[places] = int(evaluate(expr, env))
        for cycles, same in self.costs:
            self.table[same, SOLO] = evaluate(cycles, env) < SOLO_CYCLES
        self.seen = now

    def stamped(self) -> I64:
        """[instructions, 3] of the last run; a bias ends when its dispatch starts."""
        out = self.stamps[list(self.row_of)].copy()
        out[:, 2] = np.where(self.is_bias, out[:, 1], out[:, 2])
        return out


class _Words(dict[str, int]):
    """Symbols looked up in the words when asked for."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def __missing__(self, symbol: str) -> int:
        self[symbol] = int(self.memory.words[self.memory.word_of(symbol)])
        return self[symbol]


@dataclass(slots=True)
class _Builder:
    """Collects rows, waits and signals of one region."""

    memory: Memory
    encoded: list[Encoded] = field(default_factory=list)
    headers: list[rows.Header] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)

    def tick(self, number: int) -> int:
        return int(self.memory.ticks.ctypes.data) + 8 * number

    def add(self, encoded: Encoded, waits: Sequence[micro.Wait], signals: Sequence[int]) -> None:
        """One row, with its ranges of the wait and signal lists."""
        before = len(self.waits), len(self.signals)
        self.waits += [(self.tick(w.tick), w.step) for w in waits]
        self.signals += [self.tick(s) for s in signals]
        self.headers.append(rows.Header(0, 0, before[0], len(self.waits), before[1], len(self.signals), 0))
        self.encoded.append(encoded)


def build(
    instrs: Sequence[Compute],
    memory: Memory,
    device: str,
    threads: int,
    addresses: Callable[[list[str]], Mapping[str, int]],
) -> Code:
    """The table of consecutive instructions. addresses: of compiled functions, by name."""
    ops, builder, row_of = Operands.of(memory, device, threads), _Builder(memory), []
    bias: micro.Bias | None = None
    for instr in instrs:
        row_of.append(len(builder.encoded))
        if isinstance(instr, micro.Bias):
            assert bias is None, "two biases for one dispatch"
            bias = instr
            continue
        encoded = encode(instr, ops, bias.block if bias else None)
        parts = (bias, instr) if bias else (instr,)
        waits = [w for part in parts for w in part.waits]
        builder.add(encoded, waits, [part.signals for part in parts if part.signals is not None])
        bias = None
    assert bias is None, "a bias stands without its dispatch"
    found = addresses([e.kernel for e in builder.encoded])
    is_bias = [isinstance(i, micro.Bias) for i in instrs]
    return _code(builder, found, tuple(row_of), is_bias, ops)


def _code(
    builder: _Builder,
    addresses: Mapping[str, int],
    row_of: tuple[int, ...],
    is_bias: list[bool],
    ops: Operands,
) -> Code:
    count = len(builder.encoded)
    table = aligned(8 * rows.ROW * count).view(np.int64).reshape(count, rows.ROW)
    patches: dict[Expr, list[int]] = {}
    costs: dict[Expr, list[int]] = {}
    for r, (header, encoded) in enumerate(zip(builder.headers, builder.encoded, strict=True)):
        fields = (*header._replace(kernel=addresses[encoded.kernel]), *encoded.fields)
        assert len(fields) <= rows.ROW, fields
        for f, value in enumerate(fields):
            if isinstance(value, Expr):
                patches.setdefault(value, []).append(r * rows.ROW + f)
            else:
                table[r, f] = value
        if isinstance(encoded.cycles, Expr):
            costs.setdefault(encoded.cycles, []).append(r)
        else:
            table[r, SOLO] = encoded.cycles < SOLO_CYCLES
    return Code(
        builder.memory,
        table,
        np.array(builder.waits, np.int64).reshape(-1, 2),
        np.array(builder.signals, np.int64),
        np.zeros((count, 3), np.int64),
        row_of,
        np.array(is_bias, np.int64),
        _grouped(patches),
        _grouped(costs),
        (*ops.scratches.values(), *(e.keep for e in builder.encoded if e.keep is not None)),
        tuple(ops.commons.values()),
    )


def _grouped(found: Mapping[Expr, list[int]]) -> tuple[tuple[Expr, I64], ...]:
    return tuple((expr, np.array(places, np.int64)) for expr, places in found.items())
