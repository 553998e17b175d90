"""One piece at fixed shapes → an ONNX graph.

Weights are unpacked and become constants. In the quantised form every value passes through a
QuantizeLinear/DequantizeLinear pair, which is how ONNX says that it is computed in whole numbers;
`ranges` gives the largest magnitude of each.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from flashrt.backends.npu.pieces import Piece, Row
from flashrt.backends.reference.access import Access
from flashrt.backends.reference.arrays import F32, Array, AttrMap, attr_at, shape_at
from flashrt.errors import PlanError
from flashrt.ir import micro
from flashrt.ir.types import Env, TensorType, evaluate

OPSET, IR_VERSION = 21, 10  # what every provider of the table reads
ZERO = 1 << 15  # the 16-bit number that means 0
Ranges = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Model:
    """A graph and its doors. inputs, outputs: tensor name and slot; every: all values, for calibration."""

    data: bytes
    inputs: tuple[tuple[str, micro.SlotRef], ...]
    outputs: tuple[tuple[str, micro.SlotRef], ...]
    every: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the graph that is being built. const: of a weight, before it is put into the graph."""

    name: str
    shape: tuple[int, ...]
    const: Array | None = None


@dataclass(slots=True)
class Builder:
    """A graph in the making. ranges: largest magnitude of each value; None builds it in float."""

    ranges: Ranges | None = None
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    every: list[str] = field(default_factory=list)

    def constant(self, value: Array) -> str:
        """A small float constant: a bias, a norm's weight, a factor."""
        value = np.asarray(value, np.float32)
        if self.ranges is None:
            return self._keep(value)
        scale = _scale(float(np.abs(value).max(initial=0)))
        name = self._keep(np.clip(np.rint(value / scale) + ZERO, 1, 65535).astype(np.uint16))
        return self._dequantised(name, scale, np.uint16(ZERO))

    def matrix(self, w: F32) -> str:
        """The weight of a product, [N, K], as the constant [K, N]."""
        if self.ranges is None:
            return self._keep(np.ascontiguousarray(w.T))
        scale = np.maximum(np.abs(w).max(axis=1), 1e-30).astype(np.float32) / np.float32(127)
        whole = np.rint(w / scale[:, None]).astype(np.int8)
        name = self._keep(np.ascontiguousarray(whole.T))
        return self._dequantised(name, scale, np.zeros(len(scale), np.int8), axis=1)

    def integers(self, values: Sequence[int]) -> str:
        """A shape."""
        return self._keep(np.array(values, np.int64))

    def op(self, op: str, *inputs: str, **attrs: Any) -> str:
        """A node; in the quantised form its result is rounded. Gives the name of the result."""
        name = f"v{len(self.every)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attrs))
        return self.rounded(name)

    def rounded(self, name: str) -> str:
        """The value as the quantised form holds it: 16 bits between ± its range."""
        self.every.append(name)
        if self.ranges is None:
            return name
        scale, zero = self._keep(_scale(self.ranges[name])), self._keep(np.uint16(ZERO))
        self.nodes += [
            helper.make_node("QuantizeLinear", [name, scale, zero], [f"{name}.q"]),
            helper.make_node("DequantizeLinear", [f"{name}.q", scale, zero], [f"{name}.d"]),
        ]
        return f"{name}.d"

    def _keep(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(value)
        return name

    def _dequantised(self, name: str, scale: Any, zero: Any, **attrs: Any) -> str:
        inputs = [name, self._keep(scale), self._keep(zero)]
        self.nodes.append(helper.make_node("DequantizeLinear", inputs, [f"{name}.d"], **attrs))
        return f"{name}.d"

    def peaks(self, seen: Container[str]) -> list[str]:
        """Of each value that nobody sees, the largest magnitude as the quantised form holds it: `v3.p`."""
        unseen = [name for name in self.every if name not in seen]
        for name in unseen:
            assert self.ranges is not None
            scale, zero = self._keep(_scale(self.ranges[name])), self._keep(np.uint16(ZERO))
            inner = [f"{name}.{step}" for step in ("a", "aq", "ad", "m", "mq", "p")]
            for op, (x, y) in zip(_PEAK, pairwise([f"{name}.d", *inner]), strict=True):
                more = [scale, zero] if op.endswith("Linear") else []
                self.nodes.append(helper.make_node(op, [x, *more], [y]))
        return [f"{name}.p" for name in unseen]


_PEAK = ("Abs", "QuantizeLinear", "DequantizeLinear", "ReduceMax", "QuantizeLinear", "DequantizeLinear")


def _scale(largest: float) -> np.float32:
    """What one step of 16 bits is worth when they reach from -largest to largest."""
    return np.float32(max(largest, 1e-6) / (ZERO - 1))


# ---- operations ----------------------------------------------------------------
def _activated(b: Builder, act: str, x: str) -> str:
    match act:
        case "silu":
            return b.op("Mul", x, b.op("Sigmoid", x))
        case "gelu":
            return b.op("Gelu", x)
        case "gelu_tanh":
            return b.op("Gelu", x, approximate="tanh")
        case "relu" | "tanh" | "sigmoid":
            return b.op(act.capitalize(), x)
    raise PlanError(f"an NPU has no activation {act!r}", hint="silu, gelu, gelu_tanh, relu, tanh, sigmoid")


def _value(b: Builder, x: Tensor) -> str:
    return x.name if x.const is None else b.constant(x.const)


def _linear(b: Builder, args: Sequence[Tensor], attrs: AttrMap) -> str:
    x, w, *rest = args
    assert w.const is not None, "the weight of a product is a block"
    y = b.op("MatMul", x.name, b.matrix(w.const))
    for addend in rest:
        y = b.op("Add", y, _value(b, addend))
    return y


def _rms_norm(b: Builder, args: Sequence[Tensor], attrs: AttrMap) -> str:
    x, channels = args[0], args[0].shape[-1]
    width = int(attrs.get("width") or channels)
    w = np.ones(width, np.float32)
    if len(args) > 1:
        assert args[1].const is not None, "the weight of a norm is a block"
        w = np.float32(attrs.get("offset", 0)) + args[1].const
    # one weight for each channel of a group belongs to the norm, more than that come after it
    own = w if w.size == width else np.ones(width, np.float32)
    grouped = x.name
    if width != channels:
        grouped = b.op("Reshape", grouped, b.integers((*x.shape[:-1], channels // width, width)))
    y = b.op("Mul", _rms(b, grouped, float(attrs["eps"])), b.constant(own))
    if width != channels:
        y = b.op("Reshape", y, b.integers(x.shape))
    return y if w.size == width else b.op("Mul", y, b.constant(np.resize(w, channels)))


def _rms(b: Builder, x: str, eps: float) -> str:
    """x over its root mean square, last axis; in half floats, too, where x² may be beyond their range.

    With m the largest magnitude and u = x/m: u / √(mean u² + (√eps/m)²).
    """
    last = b.integers([-1])
    m = b.op("Max", b.op("ReduceMax", b.op("Abs", x), last, keepdims=1), b.constant(np.array(1e-4)))
    u = b.op("Div", x, m)
    mean = b.op("ReduceMean", b.op("Mul", u, u), last, keepdims=1)
    small = b.op("Div", b.constant(np.array(eps**0.5)), m)
    return b.op("Div", u, b.op("Sqrt", b.op("Add", mean, b.op("Mul", small, small))))


def _layer_norm(b: Builder, args: Sequence[Tensor], attrs: AttrMap) -> str:
    x, *rest = args
    mean = b.op("ReduceMean", x.name, b.integers([-1]), keepdims=1)
    y = _rms(b, b.op("Sub", x.name, mean), float(attrs["eps"]))
    for op, addend in zip(("Mul", "Add"), rest, strict=False):
        y = b.op(op, y, _value(b, addend))
    return y


def _gated(b: Builder, args: Sequence[Tensor], attrs: AttrMap) -> str:
    return b.op("Mul", _activated(b, str(attrs["act"]), args[0].name), args[1].name)


def _activation(b: Builder, args: Sequence[Tensor], attrs: AttrMap) -> str:
    return _activated(b, str(attrs["act"]), args[0].name)


def _scale_by(b: Builder, args: Sequence[Tensor], attrs: AttrMap) -> str:
    return b.op("Mul", args[0].name, b.constant(np.array(attrs["by"], np.float32)))


def _binary(op: str) -> Callable[[Builder, Sequence[Tensor], AttrMap], str]:
    return lambda b, args, attrs: b.op(op, _value(b, args[0]), _value(b, args[1]))


_EMIT: Mapping[str, Callable[[Builder, Sequence[Tensor], AttrMap], str]] = {
    "linear": _linear, "rms_norm": _rms_norm, "layer_norm": _layer_norm, "gated": _gated,
    "activation": _activation, "scale": _scale_by, "add": _binary("Add"), "mul": _binary("Mul"),
}  # fmt: skip


# ---- pieces --------------------------------------------------------------------
def ref_shape(ref: micro.SlotRef, type: TensorType, env: Env) -> tuple[int, ...]:
    """The shape of a slot, or of channels of it."""
    shape = shape_at(type, env)
    if ref.lo is None or ref.hi is None:
        return shape
    return (*shape[:-1], int(evaluate(ref.hi - ref.lo, env)))


def build(
    piece: Piece, access: Access, env: Env, padded: Env, *, ranges: Ranges | None = None, every: bool = False
) -> Model:
    """The graph of a piece that isn't empty. Rows whose range is empty are left out.

    Args:
        env: symbols and splits of the step. padded: those that the shapes are made of.
        ranges: builds the quantised form. every: all values are outputs, for calibration.
    """
    b = Builder(ranges)
    shapes = {ref: ref_shape(ref, access.slots[ref.slot].type, padded) for ref in _refs(piece)}
    values: dict[micro.SlotRef, str] = {}
    inputs = [(f"x{i}", ref, shapes[ref]) for i, ref in enumerate(piece.reads) if 0 not in shapes[ref]]
    for name, ref, _ in inputs:
        values[ref] = b.rounded(name)
    for row in piece.rows:
        if 0 not in shapes[row.dst]:
            args = [
                _block(arg, access, row, env)
                if isinstance(arg, micro.BlockRef)
                else Tensor(values[arg], shapes[arg])
                for arg in _arguments(row)
            ]
            attrs = {k: attr_at(v, env) for k, v in row.dispatch.attrs}
            values[row.dst] = _EMIT[row.kernel.op](b, args, attrs)
    outputs = [(values[ref], ref, shapes[ref]) for ref in piece.writes if 0 not in shapes[ref]]
    return _model(b, inputs, outputs, every)


def is_empty(piece: Piece, access: Access, env: Env) -> bool:
    """Whether all that the piece writes has no channels: a split stands at one of its ends."""
    return all(0 in ref_shape(ref, access.slots[ref.slot].type, env) for ref in piece.writes)


def _refs(piece: Piece) -> list[micro.SlotRef]:
    return [*piece.reads, *(ref for row in piece.rows for ref in (*row.slots, row.dst))]


def _arguments(row: Row) -> list[micro.Arg]:
    """The arguments as the operation's form has them: a bias after the weight."""
    args = list(row.dispatch.args)
    return [*args[:2], row.bias.block, *args[2:]] if row.bias else args


def _block(ref: micro.BlockRef, access: Access, row: Row, env: Env) -> Tensor:
    value = access.block(ref, row.dispatch.device, env).astype(np.float32, copy=False)
    return Tensor("", value.shape, value)


Door = tuple[str, micro.SlotRef, tuple[int, ...]]


def _model(b: Builder, inputs: Sequence[Door], outputs: Sequence[Door], every: bool) -> Model:
    def info(name: str, shape: Sequence[int] | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    doors = [info(name, shape) for name, _, shape in outputs]
    seen = {name.removesuffix(".d") for name, *_ in (*inputs, *outputs)}
    if every:
        doors += [info(name, None) for name in b.every if name not in seen]
    elif b.ranges is not None:
        doors += [info(name, None) for name in b.peaks(seen)]
    graph = helper.make_graph(
        b.nodes, "piece", [info(name, shape) for name, _, shape in inputs], doors,
        [numpy_helper.from_array(value, name) for name, value in b.constants.items()],
    )  # fmt: skip
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="flashrt"
    )
    return Model(
        model.SerializeToString(),
        tuple((name, ref) for name, ref, _ in inputs),
        tuple((name, ref) for name, ref, _ in outputs),
        tuple(b.every),
    )
