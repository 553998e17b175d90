"""The operations of the logical graph, one table: type rule, work, affinity, numerics.

Anything a model needs and this table lacks stays an `aten.<name>` node; it has
no type rule, runs on the reference implementation as a `host` row, and
`flashrt explain` says so. Passes read this table instead of naming operations.

Values of the named operations are flat: [T, channels], never [1, T, channels]
or [T, heads, dim]; heads lie side by side on the last axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flashrt.ir.types import Attrs, Dim, TensorType, Value, ceildiv, product, sym

Types = Sequence[TensorType]
Rule = Callable[[Types, Mapping[str, Value]], TensorType]
Work = Callable[[Types, TensorType, Mapping[str, Value]], Dim]

PAGE = 16  # tokens in a page of the KV cache
EXACT = "acc=f32"
LINEAR_EXACT = "act=f32 acc=f32"
LINEAR_I8 = "act=i8/32 acc=f32"
LINEAR_BF16 = "act=bf16 acc=f32"
ATTENTION_EXACT = "acc=f32 chunk=page"
# with "kv=bf16" keys and values are rounded to bf16 when they are written
ATTENTION_CACHED = "acc=f32 chunk=page kv=bf16"
ATTENTION_BF16 = "act=bf16 acc=f32 chunk=2pages kv=bf16"
KV_WRITE_BF16 = "acc=f32 kv=bf16"
LINEAR_F16 = "act=f16 acc=f32"

# of a plan that keeps some experts on a second device: the input that says which, and the state that counts
# how often each was asked for, i32[layers*experts] both
EXPERT_TABLE, EXPERTS_ASKED = "experts.table", "experts.asked"

# scheme of a `quantize` instruction → the type of what it makes of activations f32[T,K]
QUANTIZED: Mapping[str, Callable[[Dim, Dim], TensorType]] = {
    "i8/32": lambda t, k: TensorType("u8", (t, k + ceildiv(k, 32) * 4)),
    "bf16": lambda t, k: TensorType("bf16", (ceildiv(t, 32) * 32, ceildiv(k, 32) * 32)),
}

ANY = ("gpu", "npu", "cpu")
NO_NPU = ("gpu", "cpu")
HOST = ("cpu", "gpu")


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    form: its inputs and attributes, as documentation. rule: types → result type (None: not checked).
    flops: multiply-adds times two, as a size. weighted: the input that is a packed matrix, or None;
    its layout becomes part of the kernel name. affinity, why: kinds of device, best first, and the reason.
    needs: attributes that a node must have.
    """

    form: str
    rule: Rule | None
    flops: Work
    affinity: tuple[str, ...]
    why: str
    numerics: str = EXACT
    weighted: int | None = None
    needs: tuple[str, ...] = ()


def _same(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    return types[0]


def _linear(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    x, w = types[0], types[1]
    if len(x.shape) != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"linear takes x [T,K] and w [N,K], got {x} and {w}")
    return TensorType("f32", (x.shape[0], w.shape[0]))


def _embedding(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    return TensorType("f32", (*types[0].shape, types[1].shape[1]))


def _broadcast(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    a, b = types[0], types[-1]
    if a.shape != b.shape and b.shape not in ((), (1,), a.shape[-1:]):
        raise ValueError(f"operands of shapes {a} and {b} don't match")
    return a


def _head_linear(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    x, w, heads = types[0], types[1], _count(attrs, "heads")
    if len(x.shape) != 2 or len(w.shape) != 2:
        raise ValueError(f"head_linear takes x [T,H*d] and w [H*n,k], got {x} and {w}")
    (channels, rest), (rows, odd) = (divmod(_fixed(d), heads) for d in (x.shape[1], w.shape[0]))
    kept = channels - _fixed(w.shape[1])
    if rest or odd or kept < 0:
        raise ValueError(f"x {x} and w {w} don't match for heads={heads}")
    return TensorType("f32", (x.shape[0], heads * (kept + rows)))


def _fixed(size: Dim) -> int:
    if not isinstance(size, int):
        raise ValueError(f"{size} isn't a fixed size")
    return size


def _attention(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    q, heads, value_dim = types[0], attrs["heads"], attrs["value_dim"]
    assert isinstance(heads, int) and isinstance(value_dim, int)
    return TensorType("f32", (q.shape[0], heads * value_dim))


def _slice(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    lo, hi = attrs["lo"], attrs["hi"]
    assert isinstance(lo, int) and isinstance(hi, int)
    return types[0].with_shape(*types[0].shape[:-1], hi - lo)


def _rows(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    return types[0].with_shape(types[1].shape[0], *types[0].shape[1:])


def _rope_table(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    return TensorType("f32", (types[0].shape[0], types[1].shape[0] * 2))


def _count(attrs: Mapping[str, Value], key: str) -> int:
    value = attrs[key]
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}, expected a number above 0")
    return value


def _route(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    return TensorType("f32", (types[0].shape[0], 2 * _count(attrs, "top_k")))


def _expert_linear(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    x, w, route = types[:3]
    experts, top_k = _count(attrs, "experts"), _count(attrs, "top_k")
    if len(x.shape) != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"expert_linear takes x [T,K] and w [E*N,K], got {x} and {w}")
    rows, tokens = w.shape[0], route.shape[0]
    if not isinstance(rows, int) or rows % experts:
        raise ValueError(f"{w} isn't the rows of {experts} experts")
    if x.shape[0] != (tokens if attrs["shared"] else tokens * top_k) or route.shape[1] != 2 * top_k:
        raise ValueError(f"x {x} and route {route} don't match for top_k={top_k}")
    return TensorType("f32", (tokens * top_k, rows // experts))


def _expert_cache(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    route, table, top_k = types[0], types[1], _count(attrs, "top_k")
    experts, layer = _count(attrs, "experts"), attrs["layer"]
    rows = table.shape[0] if table.dtype == "i32" and len(table.shape) == 1 else 0
    if route.shape[1] != 2 * top_k:
        raise ValueError(f"route {route} doesn't match top_k={top_k}")
    if not isinstance(rows, int) or not isinstance(layer, int) or not 0 <= layer < rows // experts:
        raise ValueError(f"{table} has no row of {experts} experts for layer={layer}")
    return TensorType("f32", (route.shape[0], 4 * top_k))


def _expert_join(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    if types[0] != types[1]:
        raise ValueError(f"rows {types[0]} and {types[1]} don't match")
    return _expert_sum((types[0], types[2]), attrs)


def _expert_sum(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    y, route, top_k = types[0], types[1], _count(attrs, "top_k")
    if y.shape[0] != route.shape[0] * top_k or route.shape[1] != 2 * top_k:
        raise ValueError(f"y {y} and route {route} don't match for top_k={top_k}")
    return TensorType("f32", (route.shape[0], y.shape[1]))


def _sample(types: Types, attrs: Mapping[str, Value]) -> TensorType:
    return TensorType("i32", (types[0].shape[0],))


def _quick(types: Types, out: TensorType, attrs: Mapping[str, Value]) -> Dim:
    return out.elements


def _heavy(types: Types, out: TensorType, attrs: Mapping[str, Value]) -> Dim:
    return out.elements * 10


def _matrix(types: Types, out: TensorType, attrs: Mapping[str, Value]) -> Dim:
    return out.elements * types[1].shape[1] * 2


def _by_expert(types: Types, out: TensorType, attrs: Mapping[str, Value]) -> Dim:
    share = attrs.get("share", 1)
    assert isinstance(share, int | float)
    return _matrix(types, out, attrs) * share


def _by_head(types: Types, out: TensorType, attrs: Mapping[str, Value]) -> Dim:
    return types[0].shape[0] * types[1].elements * 2


def _attend(types: Types, out: TensorType, attrs: Mapping[str, Value]) -> Dim:
    q = types[0]
    return (q.elements + out.elements) * sym("C") * 2


_MOVE = "moves bytes: wherever its input is"
OPS: Mapping[str, Op] = {
    "embedding": Op(
        "(ids i32[T], @table[V,C]) → f32[T,C]: rows of the table",
        _embedding, _quick, HOST, "a lookup: the table stays in host memory", weighted=1,
    ),
    "linear": Op(
        "(x[T,K], @w[N,K], @bias[N] if bias, residual[T,N] if residual) → x·wᵀ + bias + residual",
        _linear, _matrix, ANY, "a matrix product: fastest where bandwidth and matrix units are",
        numerics=LINEAR_EXACT, weighted=1,
    ),
    "head_linear": Op(
        "(x[T,H*d], @w[H*n,k]) heads → f32[T,H*(d-k+n)]: of each head of x the channels behind the first k, "
        "then its first k times the head's n rows of w, transposed",
        _head_linear, _by_head, HOST, "a small matrix product a head; stays beside its attention",
        numerics=LINEAR_EXACT, weighted=1, needs=("heads",),
    ),
    "rms_norm": Op(
        "(x, @w if weight) eps width offset: each group of `width` channels over its root mean square, "
        "times (offset + w)",
        _same, _heavy, ANY, "small; stays beside the product it feeds", needs=("eps", "width", "offset"),
    ),
    "layer_norm": Op(
        "(x, @w, @b) eps: each row to mean 0 and variance 1, times w, plus b",
        _same, _heavy, ANY, "small; stays beside the product it feeds", needs=("eps",),
    ),
    "rope_table": Op(
        "(positions i32[T], @inv_freq[D/2]) scale → f32[T,D]: cosines, then sines, of position·inv_freq, "
        "times scale",
        _rope_table, _heavy, NO_NPU, "angles of late positions need float32", needs=("scale",),
    ),
    "rope": Op(
        "(x[T,H*head_dim], table[T,D]) head_dim: rotates the first D channels of each head "
        "(halves, not pairs)",
        _same, _heavy, NO_NPU, "stays beside the attention it feeds", needs=("head_dim",),
    ),
    "rope_pairs": Op(
        "(x[T,H*head_dim], table[T,D]) head_dim: as rope, but channels 2i and 2i+1 turn together",
        _same, _heavy, NO_NPU, "stays beside the attention it feeds", needs=("head_dim",),
    ),
    "attention": Op(
        "(q[T,Hq*d], k[T,Hk*d], v[T,Hk*dv], positions i32[T], seq i32[T], pages i32[S,M], "
        "@sinks[Hq] if sinks) "
        "heads kv_heads head_dim value_dim scale window softcap causal: writes k and v of the step into the "
        "state's pages, then attends to every earlier key of the same sequence. latent: k is [T,Hk*(d-dv)], "
        "and a key is k and, behind it, its value; the state holds both once",
        _attention, _attend, NO_NPU, "softmax over long rows loses precision on an NPU",
        numerics=ATTENTION_EXACT,
        needs=("heads", "kv_heads", "head_dim", "value_dim", "scale", "window", "softcap", "causal"),
    ),
    "gated": Op(
        "(gate, up) act → act(gate)·up; act: silu, gelu, gelu_tanh, relu",
        _same, _heavy, ANY, "elementwise; stays beside its products", needs=("act",),
    ),
    "activation": Op(
        "(x) act: silu, gelu, gelu_tanh, relu, tanh, sigmoid",
        _same, _heavy, ANY, "elementwise; stays beside its products", needs=("act",),
    ),
    "add": Op(
        "(a, b) → a + b, b broadcast over rows",
        _broadcast, _quick, ANY, "elementwise; stays beside its inputs",
    ),
    "mul": Op(
        "(a, b) → a · b, b broadcast over rows",
        _broadcast, _quick, ANY, "elementwise; stays beside its inputs",
    ),
    "scale": Op(
        "(x) by → x · by", _same, _quick, ANY, "elementwise; stays beside its input", needs=("by",)
    ),
    "softcap": Op(
        "(x) cap → cap · tanh(x / cap)", _same, _heavy, NO_NPU, "tanh of large values", needs=("cap",)
    ),
    "slice": Op(
        "(x) lo hi → channels [lo, hi) of the last axis", _slice, _quick, ANY, _MOVE, needs=("lo", "hi")
    ),
    "route": Op(
        "(logits f32[T,E], @bias[E] if bias) top_k score normalise scale groups top_groups group_score "
        "→ f32[T,2*top_k]: the numbers of each token's experts, best first, then their weights. score: "
        "softmax or sigmoid of the logits; bias counts for the choice only; groups > 1: only experts of the "
        "top_groups best groups, by the sum of their two best (sum2) or their best (max); normalise: weights "
        "over their sum, then all times scale",
        _route, _heavy, NO_NPU, "small; stays beside the experts it chooses",
        needs=("top_k", "score", "normalise", "scale", "groups", "top_groups", "group_score", "bias"),
    ),
    "expert_linear": Op(
        "(x, @w[E*N,K], route f32[T,2*top_k], @bias[E*N] if bias) experts top_k shared bias "
        "→ f32[T*top_k,N]: row t*top_k+j is x·wᵀ + bias of expert route[t,j], whose rows lie together, NaN "
        "where there is none; x[T,K] if shared, else a row for each choice, x[T*top_k,K]. share: of the "
        "choices, how many are expected to be of these experts (all); layer: of the cache they are in",
        _expert_linear, _by_expert, ANY, "a matrix product: fastest where bandwidth and matrix units are",
        numerics=LINEAR_EXACT, weighted=1, needs=("experts", "top_k", "shared", "bias"),
    ),
    "expert_sum": Op(
        "(y[T*top_k,C], route f32[T,2*top_k]) top_k → f32[T,C]: Σ route[t,top_k+j]·y[t*top_k+j], j upwards",
        _expert_sum, _quick, ANY, "elementwise; stays beside its products", needs=("top_k",),
    ),
    "expert_cache": Op(
        "(route f32[T,2*top_k], table i32[L*experts]) top_k experts slots layer → f32[T,4*top_k]: choices "
        "that a cache of `slots` experts has, and the others. table: of each layer and expert 1 + its slot, "
        "0 without one. First the route with slots in place of experts, -1 for those without; then the "
        "route with -1 for those with one. Counts each choice in its state, i32[L*experts]",
        _expert_cache, _quick, ("gpu",), "small; beside the cache",
        needs=("top_k", "experts", "slots", "layer"),
    ),
    "expert_join": Op(
        "(near f32[T*top_k,C], far, route f32[T,2*top_k]) top_k → f32[T,C]: expert_sum of the rows of `near` "
        "where the route has a number from 0, of `far` where it hasn't",
        _expert_join, _quick, ("gpu",), "elementwise; beside the cache", needs=("top_k",),
    ),
    "gated_clamped": Op(
        "(gate, up) alpha limit → (clip(up, ±limit) + 1)·g·sigmoid(alpha·g), g = min(gate, limit)",
        _same, _heavy, ANY, "elementwise; stays beside its products", needs=("alpha", "limit"),
    ),
    "view": Op("(x) → the same elements in the node's shape", None, _quick, ANY, _MOVE),
    "rows": Op("(x[T,C], index i32[N]) → f32[N,C]: the rows asked for", _rows, _quick, ANY, _MOVE),
    "sample": Op(
        "(logits[N,V], temperature f32[N], top_k i32[N], top_p f32[N], min_p f32[N], penalty f32[N], "
        "seed i64[N], draw i64[N], history i32[N,H]) → i32[N]: one token a row; see reference/sample.py",
        _sample, _heavy, HOST, "one token a row comes back to the host anyway",
    ),
}  # fmt: skip


# products whose activations may be rounded: `quantize` stands before them
PRODUCTS = frozenset({"linear", "expert_linear"})
EPILOGUES = ("", "+bias", "+residual", "+bias+residual")  # that a product's kernel may have, by name


def infer(op: str, types: Types, attrs: Attrs) -> TensorType | None:
    """The type the operation's rule gives, or None where it has none.

    Raises ValueError when the inputs don't fit, or an attribute is missing.
    """
    entry = OPS.get(op)
    if entry is None or entry.rule is None:
        return None
    given = dict(attrs)
    if missing := [name for name in entry.needs if name not in given]:
        raise ValueError(f"{op} lacks {', '.join(missing)}")
    return entry.rule(types, given)


def flops(op: str, types: Types, out: TensorType, attrs: Attrs) -> Dim:
    """Multiply-adds times two of one node, as a size."""
    entry = OPS.get(op)
    return entry.flops(types, out, dict(attrs)) if entry else product(out.shape)
