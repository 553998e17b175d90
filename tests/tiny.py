"""A tiny language model made of numpy arrays: recognised graph, packed random weights, no torch.

Llama-shaped: LAYERS layers, 4 heads of 16 over 2 kv heads, tied q8 embedding, q4m linears.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flashrt.backend import U8
from flashrt.frontend.imported import Imported
from flashrt.ir import logical
from flashrt.ir.ops import PAGE
from flashrt.ir.types import Dim, Input, Output, State, Symbol, TensorType, Weight, attrs, sym
from flashrt.layouts import LAYOUTS, Layout, pack_plain, pack_quants
from flashrt.weights.index import WeightIndex

HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB = 64, 128, 4, 2, 16, 96
CONTEXT = 256
T, N, S, M, H, P = (sym(x) for x in "TNSMHP")


def f32(*shape: Dim) -> TensorType:
    return TensorType("f32", shape)


def i32(*shape: Dim) -> TensorType:
    return TensorType("i32", shape)


@dataclass
class ArraySource:
    """A BlockSource over packed bytes in memory."""

    packed: dict[str, U8]
    reads: list[tuple[str, int, int]] = field(default_factory=list)

    def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
        self.reads.append((weight.name, lo, hi))
        parts = [self.packed[source] for source in weight.sources]
        whole = np.concatenate(parts)
        shape = [int(d) for d in weight.type.shape]  # type: ignore[arg-type]
        if len(shape) == 2:
            out[:] = whole[LAYOUTS[weight.layout].span(lo, hi, shape[1])]
        else:
            out[:] = whole[lo * 4 : hi * 4]


def random_bytes(rng: np.random.Generator, layout: Layout, n: int, k: int) -> U8:
    """A packed random matrix whose entries are about 1/sqrt(k)."""
    if layout.element is not None:
        return pack_plain(layout, rng.standard_normal((n, k), np.float32) / np.sqrt(k))
    levels, shape = (15 if layout.bits == 4 else 255), (n, layout.blocks(k))
    q = rng.integers(0, levels + 1, (*shape, layout.block))
    q = q - (128 if layout.bits == 8 and not layout.minimum else 0)
    scale = (rng.uniform(0.5, 1.5, shape) * 4 / levels / np.sqrt(k)).astype(layout.number)
    minimum = (scale * -levels / 2).astype(layout.number) if layout.minimum else None
    return pack_quants(layout, q, scale, minimum)


def tiny_graph(layers: int = 2) -> logical.Graph:
    """The recognised graph."""
    weights: list[Weight] = []
    nodes: list[logical.Node] = []

    def weight(name: str, layout: str, *shape: int) -> str:
        weights.append(Weight(name, f32(*shape), (name,), layout))
        return f"@{name}"

    def node(name: str, op: str, inputs: list[str], type: TensorType, **given: object) -> str:
        state = given.pop("state", None)
        states = (str(state),) if state else ()
        nodes.append(
            logical.Node(name, op, tuple(inputs), type, attrs(**given), reads=states, writes=states)  # type: ignore[arg-type]
        )
        return f"%{name}"

    def linear(name: str, x: str, n: int, k: int) -> str:
        return node(name, "linear", [x, weight(f"{name}.weight", "q4m.16x32", n, k)], f32(T, n))

    def norm(name: str, x: str, rows: Dim) -> str:
        w = weight(f"{name}.weight", "f32", HIDDEN)
        return node(
            name, "rms_norm", [x, w], f32(rows, HIDDEN), eps=1e-5, width=HIDDEN, offset=0, weight=True
        )

    table = weight("embed_tokens.weight", "q8.16x32", VOCAB, HIDDEN)
    x = node("embed_tokens", "embedding", ["%ids", table], f32(T, HIDDEN))
    freq = weight("rotary_emb.inv_freq", "f32", DIM // 2)
    angles = node("rotary_emb", "rope_table", ["%positions", freq], f32(T, DIM), scale=1.0)
    for i in range(layers):
        layer = f"layers.{i}"
        a = norm(f"{layer}.input_layernorm", x, T)
        q = linear(f"{layer}.self_attn.q_proj", a, HEADS * DIM, HIDDEN)
        k = linear(f"{layer}.self_attn.k_proj", a, KV_HEADS * DIM, HIDDEN)
        v = linear(f"{layer}.self_attn.v_proj", a, KV_HEADS * DIM, HIDDEN)
        q = node(f"{layer}.self_attn.rope_q", "rope", [q, angles], f32(T, HEADS * DIM), head_dim=DIM)
        k = node(f"{layer}.self_attn.rope_k", "rope", [k, angles], f32(T, KV_HEADS * DIM), head_dim=DIM)
        o = node(
            f"{layer}.self_attn.attention", "attention", [q, k, v, "%positions", "%seq", "%pages"],
            f32(T, HEADS * DIM), heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, value_dim=DIM,
            scale=DIM**-0.5, window=0, softcap=0.0, causal=True, sinks=False, state=f"kv.{i}",
        )  # fmt: skip
        o = linear(f"{layer}.self_attn.o_proj", o, HIDDEN, HEADS * DIM)
        x = node(f"{layer}.attn_residual", "add", [x, o], f32(T, HIDDEN))
        a = norm(f"{layer}.post_attention_layernorm", x, T)
        gate = linear(f"{layer}.mlp.gate_proj", a, FFN, HIDDEN)
        up = linear(f"{layer}.mlp.up_proj", a, FFN, HIDDEN)
        g = node(f"{layer}.mlp.gated", "gated", [gate, up], f32(T, FFN), act="silu")
        d = linear(f"{layer}.mlp.down_proj", g, HIDDEN, FFN)
        x = node(f"{layer}.mlp_residual", "add", [x, d], f32(T, HIDDEN))
    x = node("last", "rows", [x, "%rows"], f32(N, HIDDEN))
    x = norm("norm", x, N)
    logits = node("lm_head", "linear", [x, table], f32(N, VOCAB))
    how = ["temperature", "top_k", "top_p", "min_p", "penalty", "seed", "draw", "history"]
    node("sample", "sample", [logits, *(f"%{h}" for h in how)], i32(N))
    return logical.Graph(
        "tiny",
        symbols=(
            Symbol("T", 1, 64, 1),
            Symbol("N", 1, 16, 1),
            Symbol("S", 1, 16, 1),
            Symbol("M", 1, CONTEXT // PAGE, 1),
            Symbol("C", 1, CONTEXT, 64),
            Symbol("P", 1, 1 << 20, 64),
            Symbol("H", 1, CONTEXT, 1),
        ),
        inputs=(
            Input("ids", i32(T)),
            Input("positions", i32(T)),
            Input("rows", i32(N)),
            Input("seq", i32(T)),
            Input("pages", i32(S, M)),
            Input("temperature", f32(N)),
            Input("top_k", i32(N)),
            Input("top_p", f32(N)),
            Input("min_p", f32(N)),
            Input("penalty", f32(N)),
            Input("seed", TensorType("i64", (N,))),
            Input("draw", TensorType("i64", (N,))),
            Input("history", i32(N, H)),
        ),
        weights=tuple(weights),
        states=tuple(State(f"kv.{i}", f32(P, 2, KV_HEADS, PAGE, DIM)) for i in range(layers)),
        nodes=tuple(nodes),
        outputs=(Output("logits", "lm_head"), Output("tokens", "sample")),
    )


def tiny_source(graph: logical.Graph, seed: int = 0) -> ArraySource:
    """Random weights for `tiny_graph`, the same for the same seed."""
    rng = np.random.default_rng(seed)
    packed = {}
    for w in graph.weights:
        shape = [int(d) for d in w.type.shape]  # type: ignore[arg-type]
        if w.name == "rotary_emb.inv_freq":
            values = 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
            packed[w.name] = values.astype(np.float32).view(np.uint8)
        elif len(shape) == 1:
            packed[w.name] = rng.uniform(0.5, 1.5, shape).astype(np.float32).view(np.uint8)
        else:
            packed[w.name] = random_bytes(rng, LAYOUTS[w.layout], shape[0], shape[1])
    return ArraySource(packed)


def tiny_import(layers: int = 2) -> Imported:
    """The graph as a frontend hands it over (weights come from `tiny_source`)."""
    return Imported(tiny_graph(layers), WeightIndex((), {}))
