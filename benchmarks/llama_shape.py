"""The shape of a Llama with random weights: a recognised graph and a source of its blocks.

Nothing large is read or written: weights repeat a seeded piece of some megabytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashrt.backend import U8
from flashrt.frontend.imported import Imported
from flashrt.ir import logical
from flashrt.ir.ops import PAGE
from flashrt.ir.types import Dim, Input, Output, State, Symbol, TensorType, Weight, attrs, size, sym
from flashrt.layouts import LAYOUTS, pack_plain, pack_quants
from flashrt.weights.index import WeightIndex

T, N, S, M, H, P = (sym(x) for x in "TNSMHP")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama. layout: of its matrices. experts: with `ffn` channels each, of which a token uses
    `top_k`; 0: one feed-forward block."""

    layers: int = 32
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    vocab: int = 128256
    context: int = 16384
    layout: str = "q4.16x32"
    experts: int = 0
    top_k: int = 8

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices that every token reads (not the embedding's), where it has no experts."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head
        layout = LAYOUTS[self.layout]
        layer = layout.bytes(qkv, self.hidden) + layout.bytes(self.hidden, self.heads * self.head)
        layer += layout.bytes(2 * self.ffn, self.hidden) + layout.bytes(self.hidden, self.ffn)
        return self.layers * layer + layout.bytes(self.vocab, self.hidden)


class _Builder:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.weights: list[Weight] = []
        self.nodes: list[logical.Node] = []

    def weight(self, name: str, layout: str, *sizes: int) -> str:
        self.weights.append(Weight(name, TensorType("f32", sizes), (name,), layout))
        return f"@{name}"

    def node(self, name: str, op: str, inputs: list[str], wide: Dim, rows: Dim = T, **given: object) -> str:
        state = given.pop("state", None)
        states = (str(state),) if state else ()
        kind = TensorType("f32", (rows, wide))
        self.nodes.append(
            logical.Node(name, op, tuple(inputs), kind, attrs(**given), reads=states, writes=states)  # type: ignore[arg-type]
        )
        return f"%{name}"

    def linear(self, name: str, x: str, n: int, k: int, rows: Dim = T) -> str:
        return self.node(name, "linear", [x, self.weight(f"{name}.weight", self.shape.layout, n, k)], n, rows)

    def norm(self, name: str, x: str, rows: Dim = T) -> str:
        c = self.shape.hidden
        w = self.weight(f"{name}.weight", "f32", c)
        return self.node(name, "rms_norm", [x, w], c, rows, eps=1e-5, width=c, offset=0, weight=True)

    def layer(self, i: int, x: str, angles: str) -> str:
        s, at = self.shape, f"layers.{i}"
        a = self.norm(f"{at}.input_layernorm", x)
        q = self.linear(f"{at}.self_attn.q_proj", a, s.heads * s.head, s.hidden)
        k = self.linear(f"{at}.self_attn.k_proj", a, s.kv_heads * s.head, s.hidden)
        v = self.linear(f"{at}.self_attn.v_proj", a, s.kv_heads * s.head, s.hidden)
        q = self.node(f"{at}.self_attn.rope_q", "rope", [q, angles], s.heads * s.head, head_dim=s.head)
        k = self.node(f"{at}.self_attn.rope_k", "rope", [k, angles], s.kv_heads * s.head, head_dim=s.head)
        o = self.node(
            f"{at}.self_attn.attention", "attention", [q, k, v, "%positions", "%seq", "%pages"],
            s.heads * s.head, heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head, value_dim=s.head,
            scale=s.head**-0.5, window=0, softcap=0.0, causal=True, sinks=False, state=f"kv.{i}",
        )  # fmt: skip
        o = self.linear(f"{at}.self_attn.o_proj", o, s.hidden, s.heads * s.head)
        x = self.node(f"{at}.attn_residual", "add", [x, o], s.hidden)
        a = self.norm(f"{at}.post_attention_layernorm", x)
        if s.experts:
            return self.node(f"{at}.mlp_residual", "add", [x, self.mixture(f"{at}.mlp", a)], s.hidden)
        gate = self.linear(f"{at}.mlp.gate_proj", a, s.ffn, s.hidden)
        up = self.linear(f"{at}.mlp.up_proj", a, s.ffn, s.hidden)
        g = self.node(f"{at}.mlp.gated", "gated", [gate, up], s.ffn, act="silu")
        d = self.linear(f"{at}.mlp.down_proj", g, s.hidden, s.ffn)
        return self.node(f"{at}.mlp_residual", "add", [x, d], s.hidden)

    def mixture(self, at: str, a: str) -> str:
        s, rows = self.shape, T * self.shape.top_k
        router = self.weight(f"{at}.gate.weight", "f32", s.experts, s.hidden)
        scores = self.node(f"{at}.gate", "linear", [a, router], s.experts)
        route = self.node(
            f"{at}.route", "route", [scores], 2 * s.top_k, top_k=s.top_k, score="softmax", normalise=True,
            scale=1.0, groups=1, top_groups=1, group_score="max", bias=False,
        )  # fmt: skip
        facts = {"experts": s.experts, "top_k": s.top_k, "bias": False}
        both = self.weight(f"{at}.experts.gate_up.weight", s.layout, 2 * s.ffn * s.experts, s.hidden)
        y = self.node(
            f"{at}.experts.gate_up", "expert_linear", [a, both, route], 2 * s.ffn, rows, shared=True, **facts
        )
        gate = self.node(f"{at}.experts.gate", "slice", [y], s.ffn, rows, lo=0, hi=s.ffn)
        up = self.node(f"{at}.experts.up", "slice", [y], s.ffn, rows, lo=s.ffn, hi=2 * s.ffn)
        g = self.node(f"{at}.experts.gated", "gated", [gate, up], s.ffn, rows, act="silu")
        down = self.weight(f"{at}.experts.down.weight", s.layout, s.hidden * s.experts, s.ffn)
        d = self.node(
            f"{at}.experts.down", "expert_linear", [g, down, route], s.hidden, rows, shared=False, **facts
        )
        return self.node(f"{at}.experts", "expert_sum", [d, route], s.hidden, top_k=s.top_k)


def graph(shape: Shape) -> logical.Graph:
    """The recognised graph of a Llama of this shape."""
    b, s = _Builder(shape), shape
    table = b.weight("embed_tokens.weight", s.layout, s.vocab, s.hidden)
    x = b.node("embed_tokens", "embedding", ["%ids", table], s.hidden)
    freq = b.weight("rotary_emb.inv_freq", "f32", s.head // 2)
    angles = b.node("rotary_emb", "rope_table", ["%positions", freq], s.head, scale=1.0)
    for i in range(s.layers):
        x = b.layer(i, x, angles)
    x = b.norm("norm", b.node("last", "rows", [x, "%rows"], s.hidden, N), N)
    logits = b.linear("lm_head", x, s.vocab, s.hidden, N)
    how = ["temperature", "top_k", "top_p", "min_p", "penalty", "seed", "draw", "history"]
    tokens = TensorType("i32", (N,))
    b.nodes.append(logical.Node("sample", "sample", (logits, *(f"%{h}" for h in how)), tokens))
    many = [*_per("i32", T, "ids", "positions"), *_per("i32", N, "rows"), *_per("i32", T, "seq")]
    many.append(Input("pages", TensorType("i32", (S, M))))
    many += [*_per("f32", N, "temperature"), *_per("i32", N, "top_k")]
    many += [*_per("f32", N, "top_p", "min_p", "penalty"), *_per("i64", N, "seed", "draw")]
    many.append(Input("history", TensorType("i32", (N, H))))
    pages = s.context // PAGE
    symbols = (
        Symbol("T", 1, 8192, 1), Symbol("N", 1, 64, 1), Symbol("S", 1, 64, 1), Symbol("M", 1, pages, 1),
        Symbol("C", 1, s.context, 1024), Symbol("P", 1, 1 << 20, pages), Symbol("H", 1, s.context, 1),
    )  # fmt: skip
    state = TensorType("f32", (P, 2, s.kv_heads, PAGE, s.head))
    return logical.Graph(
        "llama", symbols=symbols, inputs=tuple(many), weights=tuple(b.weights),
        states=tuple(State(f"kv.{i}", state) for i in range(s.layers)), nodes=tuple(b.nodes),
        outputs=(Output("logits", "lm_head"), Output("tokens", "sample")),
    )  # fmt: skip


def _per(dtype: str, rows: Dim, *names: str) -> list[Input]:
    return [Input(name, TensorType(dtype, (rows,))) for name in names]


def imported(shape: Shape) -> Imported:
    """As a frontend hands it over; the bytes come from `RandomSource`."""
    return Imported(graph(shape), WeightIndex((), {}))


class RandomSource:
    """A BlockSource whose matrices repeat GROUPS random row groups, about 1/sqrt(k) large."""

    GROUPS = 64

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._pieces: dict[tuple[str, int], U8] = {}

    def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
        shape = [size(d, {}) for d in weight.type.shape]
        if len(shape) == 1:
            values = np.ones(shape, np.float32)
            if "inv_freq" in weight.name:
                values = (500000.0 ** -(np.arange(shape[0]) / shape[0])).astype(np.float32)
            out[:] = values[lo:hi].view(np.uint8)
            return
        piece = self._piece(weight.layout, shape[1])
        for at in range(0, len(out), len(piece)):
            out[at : at + len(piece)] = piece[: len(out) - at]

    def _piece(self, name: str, k: int) -> U8:
        if (name, k) not in self._pieces:
            layout = LAYOUTS[name]
            n = self.GROUPS * layout.rows
            if layout.element is not None:
                made = pack_plain(layout, self._rng.standard_normal((n, k), np.float32) / np.sqrt(k))
            else:
                levels = 15 if layout.bits == 4 else 255
                q = self._rng.integers(0, levels + 1, (n, k // 32, 32)) - (128 if layout.bits == 8 else 0)
                scale = (self._rng.uniform(0.5, 1.5, (n, k // 32)) * 4 / levels / np.sqrt(k)).astype(
                    np.float16
                )
                minimum = scale * np.float16(-7.5) if layout.minimum else None
                made = pack_quants(layout, q, scale, minimum)
            self._pieces[name, k] = made
        return self._pieces[name, k]
