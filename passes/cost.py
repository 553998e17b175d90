"""What every node would cost on every device: time, bytes and flops, as sizes in the symbols.

The model is a roofline: the launch, plus the longer of moving the bytes and doing
the arithmetic. Also here: what a node is called as a kernel and what its weights weigh,
since both decide where it can run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashrt.ir import logical, ops, physical
from flashrt.ir.types import (
    DTYPES,
    FLOATS,
    Dim,
    Expr,
    TensorType,
    Weight,
    maximum,
    minimum,
    product,
    substitute,
    sym,
)
from flashrt.layouts import LAYOUTS
from flashrt.machine import Device, Machine

Node = logical.Node | physical.Node
PRODUCTS = ("linear", "expert_linear")  # read their weights as fast as `Device.gemv` says
LENT = "+lent"  # of a kernel that reads its weight where another device keeps it
LONGEST = "C"  # the symbol that ops.flops uses for the keys an attention looks at


@dataclass(frozen=True, slots=True)
class Cost:
    """One node on one device. est: microseconds; bytes: weights and activations moved."""

    est: Dim
    bytes: Dim
    flops: Dim


@dataclass(frozen=True, slots=True)
class Costs:
    """The table of all costs, by node and device."""

    rows: Mapping[tuple[str, str], Cost]

    def of(self, node: str, device: str) -> Cost:
        """The cost of a node on a device."""
        return self.rows[node, device]


def cost(graph: logical.Graph, machine: Machine) -> Costs:
    """Predicts every node on every device of the machine."""
    types = {i.name: i.type for i in graph.inputs} | {n.name: n.type for n in graph.nodes}
    weights = {w.name: w for w in graph.weights}
    declared = frozenset(s.name for s in graph.symbols)
    states = {s.name: s.type for s in graph.states}
    rows = {}
    for node in graph.nodes:
        of_inputs = [weights[i[1:]].type if i[0] == "@" else types[i[1:]] for i in node.inputs]
        keys = {} if LONGEST in declared else {LONGEST: _page_table(node, of_inputs)}
        moved = substitute(_bytes(node, of_inputs, weights, states), keys)
        flops = substitute(ops.flops(node.op, of_inputs, node.type, node.attrs), keys)
        for device in machine.devices:
            rows[node.name, device.id] = price(moved, flops, node.numerics, device, node.op)
    return Costs(rows)


def price(moved: Dim, flops: Dim, numerics: str, device: Device, op: str = "") -> Cost:
    """What moving the bytes and doing the arithmetic costs on a device, as one instruction.

    op: of the node that it is, or is a part of.
    """
    return Cost(_time(moved, flops, numerics, device, op), moved, flops)


def _page_table(node: logical.Node, types: Sequence[TensorType]) -> Dim:
    """The most keys a sequence can have: what its row of the page table holds."""
    return types[5].shape[1] * ops.PAGE if node.op == "attention" else 0


def _time(moved: Dim, flops: Dim, numerics: str, device: Device, op: str) -> Dim:
    """Microseconds: launch + max(bytes / read, flops / rate); products read at `gemv` where that is known."""
    read = device.gemv if device.gemv and op in PRODUCTS else device.read
    reading = _rounded(moved * (1e6 / read.value))
    computing = _rounded(flops * (1e6 / _rate(numerics, device)))
    return _longer(reading, computing) + device.launch.value


def _rate(numerics: str, device: Device) -> float:
    """Flop per second of the kind of arithmetic that the numerics ask for."""
    known = device.rate(numerics)
    return known or min((r.value for r in device.rates.values()), default=float("inf"))


def settings(numerics: str) -> dict[str, str]:
    """`act=i8/32 acc=f32` → {"act": "i8/32", "acc": "f32"}."""
    pairs = (part.partition("=") for part in numerics.split())
    return {key: value for key, _, value in pairs}


def _longer(a: Dim, b: Dim) -> Dim:
    """max(a, b), written shorter where one is the larger one whatever the symbols are."""
    if _dominates(a, b):
        return a
    return b if _dominates(b, a) else maximum(a, b)


def _dominates(a: Dim, b: Dim) -> bool:
    """Whether every coefficient of a is at least that of b (symbols are never negative)."""
    left = dict(a.terms) if isinstance(a, Expr) else {(): a}
    right = dict(b.terms) if isinstance(b, Expr) else {(): b}
    return all(left.get(m, 0) >= right.get(m, 0) for m in {*left, *right})


def _rounded(value: Dim) -> Dim:
    """Four significant digits: an estimate is no better than that."""
    if not isinstance(value, Expr):
        return float(f"{value:.4g}")
    return Expr(tuple((monomial, float(f"{c:.4g}")) for monomial, c in value.terms))


def _bytes(
    node: logical.Node,
    types: Sequence[TensorType],
    weights: Mapping[str, Weight],
    states: Mapping[str, TensorType],
) -> Dim:
    """What the node reads and writes, in bytes."""
    moved = node.type.bytes
    for name, type in zip(node.inputs, types, strict=True):
        moved = moved + (block_bytes(weights[name[1:]]) if name[0] == "@" else type.bytes)
    match node.op:
        case "embedding" if node.inputs[1][0] == "@":
            table = weights[node.inputs[1][1:]]
            row = block_bytes(table) / max(1, int(_whole(table.type.shape[0])))
            return moved - block_bytes(table) + types[0].elements * row
        case "expert_linear":
            return _routed(node, types, weights)
        case "slice" | "rows":
            return moved - types[0].bytes + node.type.bytes
        case "attention":
            return moved + _keys_read(node, types, states)
    return moved


def _routed(node: logical.Node, types: Sequence[TensorType], weights: Mapping[str, Weight]) -> Dim:
    """Bytes of an expert product: of the weights, only those of as many experts as a step can ask for."""
    experts, top_k, share = node.attr("experts"), node.attr("top_k"), node.attr("share", 1)
    assert isinstance(experts, int) and isinstance(top_k, int) and isinstance(share, int | float)
    held = sum(block_bytes(weights[i[1:]]) for i in node.inputs if i[0] == "@")
    asked = minimum(types[2].shape[0] * top_k * share, experts)
    return types[0].bytes + types[2].bytes + node.type.bytes + asked * (held / experts)


def _keys_read(node: logical.Node, types: Sequence[TensorType], states: Mapping[str, TensorType]) -> Dim:
    """Bytes of the keys and values that all sequences of a step look at."""
    kv_heads, head_dim, value_dim = (node.attr(k, 0) for k in ("kv_heads", "head_dim", "value_dim"))
    assert isinstance(kv_heads, int) and isinstance(head_dim, int) and isinstance(value_dim, int)
    dtype = next((states[s].dtype for s in node.reads if s in states), "f32")
    per_token = kv_heads * (head_dim + value_dim * (not node.attr("latent"))) * DTYPES[dtype]
    return types[5].shape[0] * sym(LONGEST) * per_token


def block_bytes(weight: Weight, lo: int = 0, hi: int | None = None) -> int:
    """Bytes of rows [lo, hi) of a weight in its packed layout; lo starts a row group."""
    shape = [_whole(d) for d in weight.type.shape]
    n = shape[0] if shape else 1
    hi = n if hi is None else hi
    if len(shape) == 2:
        span: slice[int, int, None] = LAYOUTS[weight.layout or "f32"].span(lo, hi, shape[1])
        return span.stop - span.start
    width = 4 if weight.type.dtype in FLOATS else DTYPES[weight.type.dtype]
    return (hi - lo) * int(_whole(product(shape[1:]))) * width


def _whole(size: Dim) -> int:
    assert isinstance(size, int), f"a weight has fixed sizes, got {size}"
    return size


def kernel_of(node: Node, weights: Mapping[str, Weight]) -> str:
    """`linear.q4.16x32+bias`, `rms_norm`: the kernel that computes a node."""
    name = node.op
    entry = ops.OPS.get(node.op)
    if entry and entry.weighted is not None:
        weight = weights.get(node.inputs[entry.weighted][1:])
        name += f".{(weight.layout if weight else '') or 'f32'}"
    for epilogue in ("bias", "residual"):
        if node.op == "linear" and node.attr(epilogue):
            name += f"+{epilogue}"
    if node.attr("lender"):
        name += LENT
    return f"{name}+latent" if node.op == "attention" and node.attr("latent") else name
