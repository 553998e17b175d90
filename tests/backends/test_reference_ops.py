"""Every named operation against torch or the formula of its docstring, ragged shapes included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from flashrt.backends.reference import evaluate_graph, evaluate_node
from flashrt.backends.reference.quants import dequantize, quantize
from flashrt.errors import PlanError
from flashrt.ir.ops import LINEAR_I8, OPS
from flashrt.ir.text import read_logical
from flashrt.ir.types import TensorType, Weight

Array = NDArray[Any]
RNG = np.random.default_rng(7)


def r(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32)


def run(op: str, inputs: Sequence[Array], shape: tuple[int, ...], dtype: str = "f32", **attrs: Any) -> Array:
    return evaluate_node(op, inputs, attrs, TensorType(dtype, shape))


def near(got: Array, want: Any, tol: float = 1e-5) -> None:
    want = want.numpy() if isinstance(want, torch.Tensor) else want
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol)


def t(x: Array) -> torch.Tensor:
    return torch.from_numpy(x)


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_linear_bias_residual(rows: int) -> None:
    x, w, b, y = r(rows, 37), r(19, 37), r(19), r(rows, 19)
    near(run("linear", [x, w], (rows, 19)), F.linear(t(x), t(w)))
    near(run("linear", [x, w, b], (rows, 19)), F.linear(t(x), t(w), t(b)))
    near(run("linear", [x, w, b, y], (rows, 19)), F.linear(t(x), t(w), t(b)) + t(y))


def test_linear_i8_is_the_product_of_the_rounded_activation() -> None:
    x, w = r(3, 70), r(5, 70)
    got = evaluate_node("linear", [x, w], {}, TensorType("f32", (3, 5)), LINEAR_I8)
    near(got, dequantize(quantize(x)) @ w.T)
    assert 1e-6 < np.abs(got - x @ w.T).max() < 0.5


@pytest.mark.parametrize("k", [1, 31, 32, 33, 70, 96])
def test_quantize_rounds_to_half_a_step(k: int) -> None:
    x = r(4, k) * np.float32(10)
    x[1] = 0
    data = quantize(x)
    assert data.shape == (4, k + 4 * -(-k // 32)) and data.dtype == np.uint8
    back = dequantize(data)
    assert back.shape == x.shape
    np.testing.assert_array_equal(back[1], 0)
    for lo in range(0, k, 32):
        block, got = x[:, lo : lo + 32], back[:, lo : lo + 32]
        step = np.abs(block).max(axis=1, keepdims=True) / 127
        assert (np.abs(block - got) <= step * 0.50001).all()
    np.testing.assert_array_equal(dequantize(quantize(back)), back)  # rounding twice changes nothing


def test_embedding_and_rows() -> None:
    table, ids = r(11, 6), np.array([3, 0, 10, 3], np.int32)
    np.testing.assert_array_equal(run("embedding", [ids, table], (4, 6)), table[ids])
    np.testing.assert_array_equal(run("rows", [table, ids[:2]], (2, 6)), table[[3, 0]])


def test_rms_norm() -> None:
    x, w = r(5, 24), r(24)
    near(run("rms_norm", [x, w], x.shape, eps=1e-5, width=24), F.rms_norm(t(x), (24,), t(w), 1e-5))
    near(run("rms_norm", [x], x.shape, eps=1e-5, width=24), F.rms_norm(t(x), (24,), None, 1e-5))
    near(
        run("rms_norm", [x, w], x.shape, eps=1e-5, width=24, offset=1.0),
        F.rms_norm(t(x), (24,), t(1 + w), 1e-5),
    )


def test_rms_norm_of_heads() -> None:
    x, w = r(5, 24), r(8)
    want = F.rms_norm(t(x).view(5, 3, 8), (8,), t(w), 1e-6).view(5, 24)
    near(run("rms_norm", [x, w], x.shape, eps=1e-6, width=8, offset=0.0), want)


def test_rms_norm_of_large_values_stays_finite() -> None:
    near(run("rms_norm", [np.full((1, 8), 1e15, np.float32)], (1, 8), eps=1e-5, width=8), np.ones((1, 8)))


def test_layer_norm() -> None:
    x, w, b = r(5, 24) + 3, r(24), r(24)
    near(run("layer_norm", [x, w, b], x.shape, eps=1e-5), F.layer_norm(t(x), (24,), t(w), t(b), 1e-5))


def test_rope_table() -> None:
    positions, freq = np.array([0, 1, 100_000], np.int32), np.array([1.0, 0.1, 0.003], np.float32)
    angle = torch.outer(t(positions).float(), t(freq))
    want = torch.cat([angle.cos(), angle.sin()], 1) * 1.25
    near(run("rope_table", [positions, freq], (3, 6), scale=1.25), want)


@pytest.mark.parametrize("turned", [8, 6])
def test_rope_rotates_halves_of_the_first_channels(turned: int) -> None:
    x, angle = r(4, 3 * 8), r(4, turned // 2)
    table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    got = run("rope", [x, table], x.shape, head_dim=8).reshape(4, 3, 8)
    heads, half = x.reshape(4, 3, 8), turned // 2
    turn = (heads[..., :half] + 1j * heads[..., half:turned]) * np.exp(1j * angle)[:, None]
    near(got[..., :half], turn.real)
    near(got[..., half:turned], turn.imag)
    np.testing.assert_array_equal(got[..., turned:], heads[..., turned:])


ACTS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
}  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
def test_activation_and_gated(act: str) -> None:
    gate, up = r(3, 7) * 40, r(3, 7)
    near(run("activation", [gate], (3, 7), act=act), ACTS[act](t(gate)))
    near(run("gated", [gate, up], (3, 7), act=act), ACTS[act](t(gate)) * t(up))


def test_unknown_activation() -> None:
    with pytest.raises(PlanError, match="silu, gelu"):
        run("activation", [r(1, 1)], (1, 1), act="swish")


def test_elementwise() -> None:
    a, b, row = r(3, 7), r(3, 7), r(7)
    near(run("add", [a, b], a.shape), a + b)
    near(run("add", [a, row], a.shape), a + row)
    near(run("mul", [a, row], a.shape), a * row)
    near(run("scale", [a], a.shape, by=0.3), a * 0.3)
    near(run("softcap", [a * 100], a.shape, cap=5.0), 5 * np.tanh(a * 20))
    np.testing.assert_array_equal(run("slice", [a], (3, 3), lo=2, hi=5), a[:, 2:5])
    np.testing.assert_array_equal(run("view", [a], (7, 3)), a.reshape(7, 3))


def test_every_named_operation_is_known() -> None:
    from flashrt.backends.reference.evaluate import known

    assert [op for op in OPS if not known(op)] == []


GRAPH = """logical small
symbol T lo=1 hi=8 hint=1
symbol N lo=1 hi=8 hint=1
input x f32[T,4]
input rows i32[N]
weight w f32[6,4] sources=[w]
%y = linear(%x,@w) f32[T,6]
%tail = aten.slice(%y) f32[T-1,6] attrs={dim=0,start=1,end=(T),step=1}
%picked = rows(%y,%rows) f32[N,6]
output picked picked
output tail tail
"""


def test_graph_binds_symbols_to_shapes() -> None:
    graph = read_logical(GRAPH)
    x, w = r(5, 4), r(6, 4)
    got = evaluate_graph(graph, {"x": x, "rows": np.array([4, 0])}, lambda weight: w)
    near(got["picked"], (x @ w.T)[[4, 0]])
    near(got["tail"], (x @ w.T)[1:])


def test_graph_errors_name_the_place() -> None:
    graph = read_logical(GRAPH)
    inputs: dict[str, Array] = {"x": r(5, 4), "rows": np.array([4, 0])}

    def weight(_: Weight) -> Array:
        return r(6, 5)

    with pytest.raises(PlanError, match=r"%y \(linear\)"):
        evaluate_graph(graph, inputs, weight)
    with pytest.raises(PlanError, match="'rows' of small is missing"):
        evaluate_graph(graph, {"x": r(5, 4)}, weight)
    with pytest.raises(PlanError, match=r"input x is \[5, 3\]"):
        evaluate_graph(graph, inputs | {"x": r(5, 3)}, weight)


ROWWISE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "rms_norm": ((48,), {"eps": 1e-5, "width": 48}),
    "layer_norm": ((48,), {"eps": 1e-5}),
    "gated": ((48,), {"act": "silu"}),
    "activation": ((48,), {"act": "gelu_tanh"}),
    "softcap": ((48,), {"cap": 3.0}),
}


@pytest.mark.parametrize("op", ROWWISE)
def test_rows_give_the_same_bits_in_any_batch(op: str) -> None:
    shape, attrs = ROWWISE[op]
    x, up = r(7, *shape), r(7, *shape)
    others = {"gated": [up]}.get(op, [])
    whole = run(op, [x, *others], x.shape, **attrs)
    for i in range(7):
        one = run(op, [x[i : i + 1], *(o[i : i + 1] for o in others)], (1, *shape), **attrs)
        np.testing.assert_array_equal(one[0], whole[i])


@pytest.mark.parametrize("k", [70, 576, 1536])
def test_linear_gives_the_same_bits_in_any_batch_and_column_split(k: int) -> None:
    x, w, b, y = r(9, k), r(48, k), r(48), r(9, 48)
    whole = run("linear", [x, w, b, y], (9, 48))
    for lo, hi in ((0, 16), (16, 48), (5, 6)):
        part = run("linear", [x, w[lo:hi], b[lo:hi], y[:, lo:hi]], (9, hi - lo))
        np.testing.assert_array_equal(part, whole[:, lo:hi])
    for i in (0, 8):
        np.testing.assert_array_equal(run("linear", [x[i : i + 1], w, b, y[i : i + 1]], (1, 48))[0], whole[i])
