"""The logical graph: what to compute. No device, no slot, no time.

Inputs of a node carry a sigil: `%name` is the value of an input or an earlier
node, `@name` is a weight. A node's name is its value's name, and is the name
the model gives it (`layers.3.self_attn.q_proj`).
"""

from __future__ import annotations

from dataclasses import dataclass

from flashrt.ir.types import Attrs, Input, Output, State, Symbol, TensorType, Value, Weight


@dataclass(frozen=True, slots=True)
class Node:
    """`%name = op(inputs) type {attrs} numerics=… affinity=[…] reads=[…] writes=[…]`

    numerics: how it is computed, e.g. "act=f32 acc=f32" (set by `precision`).
    affinity: kinds of device that may run it, best first (set by `tag`); why: the reason.
    reads, writes: names of states.
    origin: where it came from in the source model (module path and operator).
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    type: TensorType
    attrs: Attrs = ()
    numerics: str = ""
    affinity: tuple[str, ...] = ()
    why: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    origin: str = ""

    def attr(self, key: str, default: Value = None) -> Value:
        return next((v for k, v in self.attrs if k == key), default)


@dataclass(frozen=True, slots=True)
class Graph:
    """Declarations and nodes, in an order in which every value is bound before use."""

    name: str
    symbols: tuple[Symbol, ...]
    inputs: tuple[Input, ...]
    weights: tuple[Weight, ...]
    states: tuple[State, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
