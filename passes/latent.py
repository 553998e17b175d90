"""Attention over latents, as operations: the cache keeps a latent and a rotated key a token.

A head's score is q·[W_K·c, k] = (q·W_K)·c + q·k, and its result Σ w·(W_V·c) = W_V·(Σ w·c). So a head's query
is multiplied by the transpose of its W_K, all heads attend to one key [k, c], of which c is the value, too,
and what comes of it is multiplied by W_V:

%a = flashrt.latent_attention(%q,%c,%k,%table,@w,…)  →  %a.query = head_linear(%q,@w#keys)
                                                        %a.rope_q, %a.rope_k = rope of their first channels
                                                        %a = attention(%a.rope_q,%a.rope_k,%c,…) latent
                                                        %a.values = head_linear(%a,@w#values)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flashrt.ir import logical
from flashrt.ir.ops import PAGE
from flashrt.ir.types import State, TensorType, Value, Weight, attrs, sym
from flashrt.layouts import LAYOUTS
from flashrt.passes.recognise_latent import OP
from flashrt.passes.recognise_names import rename

CONVERTED = "f16"  # what rows of packed matrices become where they can't be blocks of their own


def latent(graph: logical.Graph) -> logical.Graph:
    """flashrt.latent_attention → head_linear, rope, attention, head_linear; its states hold latents"""
    if all(n.op != OP for n in graph.nodes):
        return graph
    types = {f"%{i.name}": i.type for i in graph.inputs} | {f"%{n.name}": n.type for n in graph.nodes}
    wholes = {f"@{w.name}": w for w in graph.weights}
    found = {n.name: _Latent.of(n, types, wholes) for n in graph.nodes if n.op == OP}
    parts = {w.name: w for one in found.values() for w in one.weights}
    states = {name: one.state(name) for one in found.values() for name in one.node.writes}
    nodes = [m for n in graph.nodes for m in (found[n.name].nodes() if n.name in found else (n,))]
    moved = {f"{name}.raw": name for name in found} | {name: f"{name}.values" for name in found}
    return rename(
        replace(
            graph,
            weights=(*graph.weights, *parts.values()),
            states=tuple(states.get(s.name, s) for s in graph.states),
            nodes=tuple(nodes),
        ),
        moved,
    )


@dataclass(frozen=True, slots=True)
class _Latent:
    """One such attention. whole: the rows of W_K and W_V of all heads.

    plain, shared: channels of a head's query that meet the latent, and the rotated key.
    """

    node: logical.Node
    whole: Weight
    heads: int
    plain: int
    shared: int
    rank: int
    value_dim: int

    @staticmethod
    def of(node: logical.Node, types: Mapping[str, TensorType], wholes: Mapping[str, Weight]) -> _Latent:
        head_dim, value_dim = _whole(node.attr("head_dim")), _whole(node.attr("value_dim"))
        rank, shared = (_whole(types[i].shape[1]) for i in node.inputs[1:3])
        heads = _whole(node.attr("heads"))
        return _Latent(node, wholes[node.inputs[4]], heads, head_dim - shared, shared, rank, value_dim)

    @property
    def weights(self) -> tuple[Weight, Weight]:
        """W_K of all heads, transposed, and W_V."""
        keys = replace(
            self._part("keys", _whole(self.node.attr("keys")), self.plain), turned=self.heads,
            type=self.whole.type.with_shape(self.heads * self.rank, self.plain),
        )  # fmt: skip
        if keys.layout and LAYOUTS[keys.layout].bits:
            keys = replace(keys, layout=CONVERTED)
        return keys, self._part("values", _whole(self.node.attr("values")), self.value_dim)

    def _part(self, name: str, first: int, count: int) -> Weight:
        """Of each head's rows of the weight `count` from `first` on."""
        each = _whole(self.whole.type.shape[0]) // self.heads
        starts = [h * each + first for h in range(self.heads)]
        layout = self.whole.layout
        if layout and any(n % LAYOUTS[layout].rows for n in (*starts, count)):
            layout = CONVERTED
        return replace(
            self.whole, name=f"{self.whole.name}#{name}", layout=layout, of=self.whole.name,
            rows=tuple(end for at in starts for end in (at, at + count)),
            type=self.whole.type.with_shape(self.heads * count, *self.whole.type.shape[1:]),
        )  # fmt: skip

    def state(self, name: str) -> State:
        """The cache: a rotated key and a latent a token."""
        return State(name, TensorType("f32", (sym("P"), 1, 1, PAGE, self.shared + self.rank)))

    def nodes(self) -> Iterator[logical.Node]:
        """What computes it. The attention is called `….raw` until the last one gives up its name."""
        q, c, k, table, _, *paged = self.node.inputs
        keys, values = self.weights
        rope = "rope_pairs" if self.node.attr("pairs") else "rope"
        wide = self.shared + self.rank
        yield self._node("query", "head_linear", (q, f"@{keys.name}"), self.heads * wide, heads=self.heads)
        query = f"%{self.node.name}.query"
        yield self._node("rope_q", rope, (query, table), self.heads * wide, head_dim=wide)
        yield self._node("rope_k", rope, (k, table), self.shared, head_dim=self.shared)
        turned = (f"%{self.node.name}.rope_q", f"%{self.node.name}.rope_k")
        given = {k: v for k, v in self.node.attrs if k not in ("keys", "values", "pairs")}
        facts = {**given, "kv_heads": 1, "head_dim": wide, "value_dim": self.rank, "latent": True}
        made = self._node("raw", "attention", (*turned, c, *paged), self.heads * self.rank, **facts)
        yield replace(made, reads=self.node.reads, writes=self.node.writes)
        ends = (f"%{self.node.name}.raw", f"@{values.name}")
        last = self._node("", "head_linear", ends, self.heads * self.value_dim, heads=self.heads)
        yield replace(last, name=self.node.name)

    def _node(self, name: str, op: str, inputs: tuple[str, ...], width: int, **facts: Value) -> logical.Node:
        kind = self.node.type.with_shape(self.node.type.shape[0], width)
        return logical.Node(
            f"{self.node.name}.{name}", op, inputs, kind, attrs(**facts), origin=self.node.origin
        )


def _whole(value: object) -> int:
    assert isinstance(value, int), value
    return value
