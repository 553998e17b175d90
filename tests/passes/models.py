"""Language models of any size, of which only the sizes matter: for planning, not for running."""

from __future__ import annotations

from flashrt.ir import logical
from flashrt.ir.text import read_logical

HEAD = """logical {name}
symbol T lo=1 hi={t} hint={t}
symbol N lo=1 hi=1 hint=1
symbol S lo=1 hi=1 hint=1
symbol M lo=1 hi={pages} hint={pages}
symbol C lo=1 hi={c} hint={c}
symbol P lo=1 hi={pages} hint={pages}
input ids i32[T]
input positions i32[T]
input seq i32[T]
input pages i32[S,M]
input rows i32[N]
weight embed f32[{vocab},{h}] sources=[embed] layout=q8.16x32
weight inv_freq f32[{half}] sources=[inv_freq] layout=f32
weight norm f32[{h}] sources=[norm] layout=f32
"""
DECLARED = """weight layers.{i}.norm1 f32[{h}] sources=[layers.{i}.norm1] layout=f32
weight layers.{i}.qkv f32[{qkv},{h}] sources=[layers.{i}.q,layers.{i}.k,layers.{i}.v] layout=q4.16x32
weight layers.{i}.o f32[{h},{h}] sources=[layers.{i}.o] layout=q4.16x32
weight layers.{i}.norm2 f32[{h}] sources=[layers.{i}.norm2] layout=f32
"""
DENSE_DECLARED = """\
weight layers.{i}.gate_up f32[{ff2},{h}] sources=[layers.{i}.gate,layers.{i}.up] layout=q4.16x32
weight layers.{i}.down f32[{h},{ff}] sources=[layers.{i}.down] layout=q4.16x32
"""
STATE = "state kv.{i} f32[P,2,{kv_heads},16,{dim}]\n"
SMALL = 'numerics="acc=f32" affinity=[gpu,npu,cpu] why="small"'
PRECISE = 'numerics="acc=f32" affinity=[gpu,cpu] why="precise"'
LOOKUP = 'numerics="acc=f32" affinity=[cpu,gpu] why="a lookup"'
PRODUCT = 'numerics="act=f32 acc=f32" affinity=[gpu,npu,cpu] why="a matrix product"'
LAYER = """%layers.{i}.norm1 = rms_norm({x},@layers.{i}.norm1) f32[T,{h}] attrs={{eps=1e-05,offset=0.0,weight=true,width={h}}} {small}
%layers.{i}.qkv = linear(%layers.{i}.norm1,@layers.{i}.qkv) f32[T,{qkv}] {product}
%layers.{i}.q = slice(%layers.{i}.qkv) f32[T,{h}] attrs={{hi={h},lo=0}} {small}
%layers.{i}.k = slice(%layers.{i}.qkv) f32[T,{kv}] attrs={{hi={k_end},lo={h}}} {small}
%layers.{i}.v = slice(%layers.{i}.qkv) f32[T,{kv}] attrs={{hi={qkv},lo={k_end}}} {small}
%layers.{i}.q.rope = rope(%layers.{i}.q,%rope_table) f32[T,{h}] attrs={{head_dim={dim}}} {precise}
%layers.{i}.k.rope = rope(%layers.{i}.k,%rope_table) f32[T,{kv}] attrs={{head_dim={dim}}} {precise}
%layers.{i}.attention = attention(%layers.{i}.q.rope,%layers.{i}.k.rope,%layers.{i}.v,%positions,%seq,%pages) f32[T,{h}] attrs={{causal=true,head_dim={dim},heads={heads},kv_heads={kv_heads},scale=0.125,sinks=false,softcap=0.0,value_dim={dim},window=0}} numerics="{attention}" affinity=[gpu,cpu] why="precise" reads=[kv.{i}] writes=[kv.{i}]
%layers.{i}.o = linear(%layers.{i}.attention,@layers.{i}.o,{x}) f32[T,{h}] attrs={{residual=true}} {product}
%layers.{i}.norm2 = rms_norm(%layers.{i}.o,@layers.{i}.norm2) f32[T,{h}] attrs={{eps=1e-05,offset=0.0,weight=true,width={h}}} {small}
"""  # noqa: E501 (lines of a .logical)
DENSE = """%layers.{i}.gate_up = linear(%layers.{i}.norm2,@layers.{i}.gate_up) f32[T,{ff2}] {product}
%layers.{i}.gate = slice(%layers.{i}.gate_up) f32[T,{ff}] attrs={{hi={ff},lo=0}} {small}
%layers.{i}.up = slice(%layers.{i}.gate_up) f32[T,{ff}] attrs={{hi={ff2},lo={ff}}} {small}
%layers.{i}.act = gated(%layers.{i}.gate,%layers.{i}.up) f32[T,{ff}] attrs={{act="silu"}} {small}
%layers.{i}.down = linear(%layers.{i}.act,@layers.{i}.down,%layers.{i}.o) f32[T,{h}] attrs={{residual=true}} {product}
"""  # noqa: E501
EXPERTS_DECLARED = """weight layers.{i}.router f32[{experts},{h}] sources=[layers.{i}.router] layout=f32
weight layers.{i}.gate_up f32[{all_ff2},{h}] sources=[layers.{i}.gate_up] layout=q4.16x32
weight layers.{i}.down_all f32[{all_h},{ff}] sources=[layers.{i}.down_all] layout=q4.16x32
"""
EXPERTS = """%layers.{i}.router = linear(%layers.{i}.norm2,@layers.{i}.router) f32[T,{experts}] {product}
%layers.{i}.route = route(%layers.{i}.router) f32[T,{route}] attrs={{bias=false,group_score="max",groups=1,normalise=true,scale=1.0,score="softmax",top_groups=1,top_k={top_k}}} {precise}
%layers.{i}.gate_up = expert_linear(%layers.{i}.norm2,@layers.{i}.gate_up,%layers.{i}.route) f32[{top_k}*T,{ff2}] attrs={{bias=false,experts={experts},shared=true,top_k={top_k}}} {product}
%layers.{i}.gate = slice(%layers.{i}.gate_up) f32[{top_k}*T,{ff}] attrs={{hi={ff},lo=0}} {small}
%layers.{i}.up = slice(%layers.{i}.gate_up) f32[{top_k}*T,{ff}] attrs={{hi={ff2},lo={ff}}} {small}
%layers.{i}.act = gated(%layers.{i}.gate,%layers.{i}.up) f32[{top_k}*T,{ff}] attrs={{act="silu"}} {small}
%layers.{i}.down_all = expert_linear(%layers.{i}.act,@layers.{i}.down_all,%layers.{i}.route) f32[{top_k}*T,{h}] attrs={{bias=false,experts={experts},shared=false,top_k={top_k}}} {product}
%layers.{i}.experts = expert_sum(%layers.{i}.down_all,%layers.{i}.route) f32[T,{h}] attrs={{top_k={top_k}}} {small}
%layers.{i}.down = add(%layers.{i}.o,%layers.{i}.experts) f32[T,{h}] {small}
"""  # noqa: E501


def model(
    layers: int = 3,
    *,
    hidden: int = 512,
    ffn: int = 1536,
    vocab: int = 4096,
    tied: bool = True,
    tokens: int = 1,
    context: int = 256,
    experts: int = 0,
    top_k: int = 2,
) -> logical.Graph:
    """A llama-like model of joined products, for steps of `tokens` at the end of `context` tokens.

    experts: of which each token uses `top_k`, all with `ffn` channels (0: one feed-forward block).
    """
    dim, heads, kv_heads = 64, hidden // 64, max(1, hidden // 256)
    context = max(tokens, context)
    sizes = dict(
        t=tokens, c=context, pages=context // 16, h=hidden, vocab=vocab, half=dim // 2, dim=dim, heads=heads,
        kv_heads=kv_heads, kv=kv_heads * dim, qkv=hidden + 2 * kv_heads * dim, k_end=hidden + kv_heads * dim,
        ff=ffn, ff2=2 * ffn, experts=experts, top_k=top_k, route=2 * top_k, all_ff2=2 * ffn * experts,
        all_h=hidden * experts, small=SMALL, precise=PRECISE, product=PRODUCT, attention="acc=f32 chunk=page",
    )  # fmt: skip
    head = "embed" if tied else "head"
    text = HEAD.format(name="model", **sizes)
    if not tied:
        text += f"weight head f32[{vocab},{hidden}] sources=[head] layout=q8.16x32\n"
    declared, block = (EXPERTS_DECLARED, EXPERTS) if experts else (DENSE_DECLARED, DENSE)
    text += "".join((DECLARED + declared).format(i=i, **sizes) for i in range(layers))
    text += "".join(STATE.format(i=i, **sizes) for i in range(layers))
    text += f"%embedding = embedding(%ids,@embed) f32[T,{hidden}] {LOOKUP}\n"
    text += f"%rope_table = rope_table(%positions,@inv_freq) f32[T,{dim}] attrs={{scale=1.0}} {PRECISE}\n"
    x = "%embedding"
    for i in range(layers):
        text += (LAYER + block).format(i=i, x=x, **sizes)
        x = f"%layers.{i}.down"
    width = f"attrs={{eps=1e-05,offset=0.0,weight=true,width={hidden}}}"
    text += f"%last = rows({x},%rows) f32[N,{hidden}] {SMALL}\n"
    text += f"%norm = rms_norm(%last,@norm) f32[N,{hidden}] {width} {SMALL}\n"
    text += f"%logits = linear(%norm,@{head}) f32[N,{vocab}] {PRODUCT}\noutput logits logits\n"
    return read_logical(text)
