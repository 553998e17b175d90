"""The physical graph: where each shard runs, what it costs, and why.

A node of the logical graph becomes one node per shard (`mlp.up#0`, `mlp.up#1`).
`transfer` nodes carry a value to another device (`mlp.up#1@cpu:0`), `merge`
nodes put the shards of one value side by side on one device. Where a product is
shared by its input channels, its parts are whole values that an `add` sums up.
Graph inputs are on every device (they travel in the step block).
"""

from __future__ import annotations

from dataclasses import dataclass

from flashrt.ir.types import Attrs, Dim, Input, Output, State, Symbol, TensorType, Value, Weight


@dataclass(frozen=True, slots=True)
class Range:
    """Channels [lo, hi) of a value's last axis: `[0:s3]`."""

    lo: Dim
    hi: Dim


@dataclass(frozen=True, slots=True)
class Split:
    """A split variable: the channel at which two shards meet. It may stand at any of
    `positions` (ascending; the first and last leave one side empty); `start` is where it begins."""

    name: str
    positions: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What one device may hold, in bytes, and what the plan puts there.

    shared: weights it also uses, in the memory that it has in common with a device that counts them.
    workspace: what the code of all variants sets aside for itself.
    """

    device: str
    limit: int
    weights: int = 0
    state: int = 0
    activations: int = 0
    shared: int = 0
    workspace: int = 0

    @property
    def peak(self) -> int:
        """The most that the device ever holds."""
        return self.weights + self.state + self.activations + self.workspace


@dataclass(frozen=True, slots=True)
class Node:
    """One shard of an operation on one device.

    of: name of the logical value this is a shard of; shard: its channel range (None: all of it).
    part: the equal shares of the value (heads of the cache, or groups of channels) that it makes as a smaller
    operation of its own, with its own part of each weight and state; None: it isn't one.
    est: predicted time in microseconds; bytes: weights and activations moved; flops: multiply-adds times two.
    because: why it is here.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    type: TensorType
    device: str
    of: str
    shard: Range | None = None
    part: Range | None = None
    attrs: Attrs = ()
    numerics: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    est: Dim = 0
    bytes: Dim = 0
    flops: Dim = 0
    because: str = ""
    origin: str = ""

    def attr(self, key: str, default: Value = None) -> Value:
        return next((v for k, v in self.attrs if k == key), default)

    @property
    def keeper(self) -> str:
        """The device that keeps the weights it reads: its own, or the `lender` among its attributes."""
        return str(self.attr("lender") or self.device)


@dataclass(frozen=True, slots=True)
class Graph:
    """Declarations, budgets and nodes in order. `T` and the other symbols have the variant's range."""

    name: str
    symbols: tuple[Symbol, ...]
    splits: tuple[Split, ...]
    inputs: tuple[Input, ...]
    weights: tuple[Weight, ...]
    states: tuple[State, ...]
    budgets: tuple[Budget, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
