"""ATen operations of the reference against torch's own, through the schema as the frontend reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flashrt.backends.reference import evaluate_node
from flashrt.backends.reference.aten import ATEN, find
from flashrt.errors import PlanError
from flashrt.ir.types import TensorType

A = torch.ops.aten
NAMES = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.bool: "bool",
}  # fmt: skip


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) + 0.25


def ints(hi: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, hi, shape)


def split(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Tensors in schema order, everything else by name: the form a node has."""
    tensors: list[Any] = []
    attrs: dict[str, Any] = {}
    for place, argument in enumerate(overload._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        arg = args[place] if place < len(args) else kwargs.get(argument.name, default)
        if isinstance(arg, torch.Tensor):
            tensors.append(arg)
        elif isinstance(arg, list) and any(isinstance(a, torch.Tensor) for a in arg):
            places = iter(range(len(tensors), len(tensors) + len(arg)))
            if any(a is None for a in arg):
                attrs[argument.name] = tuple(None if a is None else next(places) for a in arg)
            tensors += [a for a in arg if a is not None]
        elif not isinstance(arg, torch.dtype | torch.device | torch.layout | torch.memory_format):
            attrs[argument.name] = tuple(arg) if isinstance(arg, list) else arg
    return tensors, attrs


def array(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()


def compare(overload: Any, *args: Any, **kwargs: Any) -> None:
    want = overload(*args, **kwargs)
    tensors, attrs = split(overload, args, kwargs)
    name = overload._schema.name.replace("::", ".")
    for i, one in enumerate(want if isinstance(want, tuple | list) else [want]):
        if not isinstance(one, torch.Tensor) or (isinstance(want, tuple) and find(name) in ONE_RESULT and i):
            continue
        given = attrs | ({"result": i} if isinstance(want, tuple | list) else {})
        kind = TensorType(NAMES[one.dtype], tuple(one.shape))
        got = evaluate_node(name, [array(t) for t in tensors], given, kind)
        assert tuple(got.shape) == tuple(one.shape)
        np.testing.assert_allclose(
            got.astype(np.float64), array(one).astype(np.float64), rtol=2e-5, atol=2e-6
        )


ONE_RESULT = {ATEN["native_layer_norm"], ATEN["max_pool2d_with_indices"], ATEN["native_batch_norm"]}

CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "add.Tensor": lambda: (A.add.Tensor, r(3, 5), r(5)),
    "add alpha": lambda: (A.add.Tensor, r(3, 5), r(3, 1), {"alpha": 2}),
    "add scalar": lambda: (A.add.Tensor, r(3, 5), 1e-6),
    "sub.Tensor": lambda: (A.sub.Tensor, r(3, 5), r(3, 5), {"alpha": 0.5}),
    "rsub": lambda: (A.rsub.Scalar, r(3), 2.0),
    "mul": lambda: (A.mul.Tensor, r(3, 5), r(1, 5)),
    "mul.Scalar": lambda: (A.mul.Scalar, r(3, 5), 0.3),
    "mul int": lambda: (A.mul.Tensor, ints(9, 4), 3),
    "div": lambda: (A.div.Tensor, r(3, 5), positive(3, 1)),
    "div ints": lambda: (A.div.Tensor, ints(9, 4), ints(5, 4) + 1),
    "div floor": lambda: (A.div.Tensor_mode, r(3, 5), 0.7, {"rounding_mode": "floor"}),
    "div trunc": lambda: (A.div.Tensor_mode, r(3, 5), 0.7, {"rounding_mode": "trunc"}),
    "floor_divide": lambda: (A.floor_divide.default, ints(9, 4), 2),
    "remainder": lambda: (A.remainder.Scalar, r(6), 0.7),
    "pow 2": lambda: (A.pow.Tensor_Scalar, r(3, 5), 2),
    "pow tensor": lambda: (A.pow.Tensor_Tensor, positive(3), r(3)),
    "pow scalar": lambda: (A.pow.Scalar, 10000.0, positive(3)),
    "gelu": lambda: (A.gelu.default, r(50)),
    "gelu tanh": lambda: (A.gelu.default, r(50), {"approximate": "tanh"}),
    "leaky_relu": lambda: (A.leaky_relu.default, r(9), 0.1),
    "elu": lambda: (A.elu.default, r(9), 0.5),
    "clamp": lambda: (A.clamp.default, r(9), -0.5, 0.5),
    "clamp min": lambda: (A.clamp.default, r(9), None, 0.5),
    "hardtanh": lambda: (A.hardtanh.default, r(9), -0.2, 0.2),
    "clamp_min": lambda: (A.clamp_min.default, r(9), 0.1),
    "eq scalar": lambda: (A.eq.Scalar, ints(3, 9), 1),
    "lt": lambda: (A.lt.Tensor, r(4, 1), r(3)),
    "bitwise_and": lambda: (A.bitwise_and.Tensor, r(5) > 0, r(5) > 0),
    "bitwise_not": lambda: (A.bitwise_not.default, r(5) > 0),
    "sum": lambda: (A.sum.dim_IntList, r(3, 4, 5), [1, 2], {"keepdim": True}),
    "sum all": lambda: (A.sum.default, r(3, 4)),
    "sum ints": lambda: (A.sum.dim_IntList, ints(5, 3, 4), [1]),
    "mean": lambda: (A.mean.dim, r(3, 4), [-1], True),
    "amax": lambda: (A.amax.default, r(3, 4), [1]),
    "max": lambda: (A.max.dim, r(3, 4), 1),
    "max all": lambda: (A.max.default, r(3, 4)),
    "min": lambda: (A.min.dim, r(3, 4), 1, True),
    "argmax": lambda: (A.argmax.default, r(3, 4), -1),
    "any": lambda: (A.any.dim, r(3, 4) > 1, 1),
    "var": lambda: (A.var.correction, r(3, 4), [1], {"correction": 0, "keepdim": True}),
    "std": lambda: (A.std.dim, r(3, 4), [1]),
    "norm": lambda: (A.linalg_vector_norm.default, r(3, 4), 2, [1], True),
    "cumsum": lambda: (A.cumsum.default, r(3, 4), 1),
    "cumsum ints": lambda: (A.cumsum.default, ints(5, 3, 4), 0),
    "cumprod": lambda: (A.cumprod.default, r(3, 4), 1),
    "cumprod ints": lambda: (A.cumprod.default, ints(5, 3, 4), 0),
    "logsumexp": lambda: (A.logsumexp.default, r(3, 4) * 30, [1]),
    "softmax": lambda: (A.softmax.int, r(3, 4) * 50, -1),
    "_softmax": lambda: (A._softmax.default, r(3, 4), 0, False),
    "_log_softmax": lambda: (A._log_softmax.default, r(3, 4) * 50, 1, False),
    "topk": lambda: (A.topk.default, r(3, 9), 4),
    "topk smallest": lambda: (A.topk.default, r(9, 3), 2, 0, False),
    "sort": lambda: (A.sort.default, r(3, 9), -1, True),
    "sort stable": lambda: (A.sort.stable, ints(3, 9), {"stable": True, "dim": 0, "descending": True}),
    "argsort": lambda: (A.argsort.default, r(3, 9), 1, True),
    "view": lambda: (A.view.default, r(2, 6), [3, 4]),
    "transpose": lambda: (A.transpose.int, r(2, 3, 4), 1, -1),
    "t": lambda: (A.t.default, r(2, 3)),
    "permute": lambda: (A.permute.default, r(2, 3, 4), [2, 0, 1]),
    "slice": lambda: (A.slice.Tensor, r(5, 6), 1, 1, 9223372036854775807, 2),
    "slice negative": lambda: (A.slice.Tensor, r(5, 6), 0, -3, -1),
    "select": lambda: (A.select.int, r(5, 6), 1, -1),
    "unsqueeze": lambda: (A.unsqueeze.default, r(5, 6), -1),
    "squeeze": lambda: (A.squeeze.dim, r(5, 1, 6), 1),
    "squeeze no-op": lambda: (A.squeeze.dim, r(5, 2), 1),
    "expand": lambda: (A.expand.default, r(5, 1), [3, 5, 4]),
    "cat": lambda: (A.cat.default, [r(2, 3), r(2, 4), r(2, 0)], 1),
    "stack": lambda: (A.stack.default, [r(2, 3), r(2, 3)], -1),
    "split": lambda: (A.split.Tensor, r(7, 3), 3),
    "split sizes": lambda: (A.split_with_sizes.default, r(3, 7), [2, 5], 1),
    "chunk": lambda: (A.chunk.default, r(3, 7), 3, 1),
    "unbind": lambda: (A.unbind.int, r(3, 2), 1),
    "index gap": lambda: (A.index.Tensor, r(2, 5, 3), [None, ints(5, 4)]),
    "index both": lambda: (A.index.Tensor, r(4, 5), [ints(4, 3, 1), ints(5, 2)]),
    "index split": lambda: (A.index.Tensor, r(4, 5, 6), [ints(4, 3), None, ints(6, 3)]),
    "index mask shape": lambda: (A.index.Tensor, r(3, 4), [torch.tensor([True, False, True])]),
    "index_put": lambda: (A.index_put.default, r(5, 2), [torch.tensor([1, 3])], r(2, 2)),
    "index_put sum": lambda: (A.index_put.default, r(5), [ints(2, 6)], r(6), True),
    "index_select": lambda: (A.index_select.default, r(5, 3), 1, ints(3, 4)),
    "gather": lambda: (A.gather.default, r(4, 6), 1, ints(6, 3, 2)),
    "gather 0": lambda: (A.gather.default, r(4, 6), 0, ints(4, 2, 5)),
    "scatter": lambda: (A.scatter.src, r(3, 4), 1, torch.tensor([[0, 2], [3, 1]]), r(2, 2)),
    "scatter value": lambda: (A.scatter.value, r(3, 4), 1, ints(4, 3, 2), 1.0),
    "embedding": lambda: (A.embedding.default, r(9, 4), ints(9, 2, 3), 0),
    "repeat": lambda: (A.repeat.default, r(2, 3), [2, 1, 2]),
    "repeat_interleave": lambda: (A.repeat_interleave.self_int, r(2, 3), 2, 1),
    "pad": lambda: (A.constant_pad_nd.default, r(2, 3), [1, 2, 0, 1], 0.5),
    "roll": lambda: (A.roll.default, r(4, 5), [2], [1]),
    "flip": lambda: (A.flip.default, r(4, 5), [0]),
    "tril": lambda: (A.tril.default, r(4, 5), 1),
    "triu": lambda: (A.triu.default, r(4, 5)),
    "masked_fill": lambda: (A.masked_fill.Scalar, r(4, 5), r(4, 5) > 0, float("-inf")),
    "where": lambda: (A.where.self, r(4, 5) > 0, r(5), r(4, 1)),
    "where scalar": lambda: (A.where.ScalarOther, r(4, 5) > 0, r(4, 5), 0.5),
    "slice_scatter": lambda: (A.slice_scatter.default, r(4, 5), r(4, 2), 1, 1, 3),
    "select_scatter": lambda: (A.select_scatter.default, r(4, 5), r(5), 0, -1),
    "arange": lambda: (A.arange.start_step, 3, 20, 4),
    "arange end": lambda: (A.arange.default, 5),
    "full": lambda: (A.full.default, [2, 3], 0.5),
    "full_like": lambda: (A.full_like.default, r(2, 3), 7),
    "zeros": lambda: (A.zeros.default, [2, 3]),
    "ones_like": lambda: (A.ones_like.default, ints(2, 3)),
    "scalar_tensor": lambda: (A.scalar_tensor.default, 2.5),
    "fill": lambda: (A.fill.Scalar, r(3), 2.0),
    "to int": lambda: (A.to.dtype, r(5) * 9, torch.int64),
    "to bf16": lambda: (A.to.dtype, r(5), torch.bfloat16),
    "bf16 add": lambda: (A.add.Tensor, r(5).bfloat16(), r(5).bfloat16()),
    "type_as": lambda: (A.type_as.default, r(5), ints(3, 2)),
    "dropout": lambda: (A.dropout.default, r(5), 0.5, False),
    "linear": lambda: (A.linear.default, r(2, 3, 4), r(5, 4), r(5)),
    "linear bare": lambda: (A.linear.default, r(3, 4), r(5, 4)),
    "matmul": lambda: (A.matmul.default, r(2, 3, 4), r(4, 5)),
    "mm": lambda: (A.mm.default, r(3, 4), r(4, 5)),
    "bmm": lambda: (A.bmm.default, r(2, 3, 4), r(2, 4, 5)),
    "addmm": lambda: (A.addmm.default, r(5), r(3, 4), r(4, 5), {"beta": 0.5, "alpha": 2}),
    "baddbmm": lambda: (A.baddbmm.default, r(2, 3, 5), r(2, 3, 4), r(2, 4, 5)),
    "einsum": lambda: (A.einsum.default, "bhqd,bhkd->bhqk", [r(2, 3, 4, 5), r(2, 3, 6, 5)]),
    "einsum bare": lambda: (A.einsum.default, "ij,jk", [r(3, 4), r(4, 5)]),
    "einsum ellipsis": lambda: (A.einsum.default, "...i,i->...", [r(2, 3, 4), r(4)]),
    "layer_norm": lambda: (A.layer_norm.default, r(2, 3, 4), [3, 4], r(3, 4), r(3, 4), 1e-6),
    "layer_norm no weight": lambda: (A.layer_norm.default, r(2, 4), [4], None, r(4)),
    "native_layer_norm": lambda: (A.native_layer_norm.default, r(2, 4), [4], r(4), None, 1e-5),
    "rms_norm": lambda: (A.rms_norm.default, r(2, 4), [4], r(4), 1e-6),
    "group_norm": lambda: (A.group_norm.default, r(2, 6, 3), 2, r(6), r(6)),
    "batch_norm": lambda: (
        A.batch_norm.default, r(2, 3, 4, 4), r(3), r(3), r(3), positive(3), False, 0.1, 1e-5, False,
    ),
    "batch_norm affine-free": lambda: (
        A.batch_norm.default, r(2, 3, 4), None, None, r(3), positive(3), False, 0.1, 1e-3, False,
    ),
    "conv2d": lambda: (A.conv2d.default, r(2, 4, 9, 8), r(6, 4, 3, 3), r(6), [2, 1], [1, 1]),
    "conv2d groups": lambda: (A.conv2d.default, r(1, 4, 7, 7), r(8, 2, 3, 2), None, [1], [0], [2], 2),
    "convolution": lambda: (
        A.convolution.default, r(1, 4, 7), r(4, 1, 3), r(4), [1], [2], [1], False, [0], 4,
    ),
    "max_pool2d": lambda: (A.max_pool2d.default, r(1, 2, 7, 7) - 5, [3, 3], [2, 2], [1, 1]),
    "max_pool2d_with_indices": lambda: (A.max_pool2d_with_indices.default, r(1, 2, 6, 6), [2, 2]),
    "max_pool3d": lambda: (A.max_pool3d.default, r(1, 2, 5, 6, 7) - 5, [2, 3, 3], [1, 2, 2], [0, 1, 1]),
    "max_pool3d one size": lambda: (A.max_pool3d.default, r(2, 2, 6, 6, 6), [2]),
    "avg_pool2d": lambda: (A.avg_pool2d.default, r(1, 2, 6, 6), [3, 3], [2, 2], [1, 1]),
    "adaptive_avg_pool2d": lambda: (A.adaptive_avg_pool2d.default, r(1, 2, 7, 5), [3, 1]),
    "sdpa": lambda: (A.scaled_dot_product_attention.default, r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 6)),
    "sdpa causal": lambda: (
        A.scaled_dot_product_attention.default, r(1, 2, 5, 8), r(1, 2, 5, 8), r(1, 2, 5, 8), None, 0.0, True,
    ),
    "sdpa mask": lambda: (
        A.scaled_dot_product_attention.default, r(1, 2, 5, 8), r(1, 2, 4, 8), r(1, 2, 4, 8),
        torch.tensor([True, False, True, True]).expand(5, 4),
    ),
}  # fmt: skip
ONE_ARGUMENT = """neg abs floor ceil round trunc sign relu exp sin cos tanh sigmoid silu erf logical_not
softplus mish hardswish hardsigmoid relu6 expm1 atan"""
POSITIVE = "sqrt rsqrt log log1p log2 reciprocal"
TWO_ARGUMENTS = "maximum minimum logical_and logical_or logical_xor"
for op in ONE_ARGUMENT.split():
    CASES[op] = lambda op=op: (getattr(A, op).default, r(4, 5) * 3)  # type: ignore[misc]
for op in POSITIVE.split():
    CASES[op] = lambda op=op: (getattr(A, op).default, positive(4, 5))  # type: ignore[misc]
for op in TWO_ARGUMENTS.split():
    CASES[op] = lambda op=op: (getattr(A, op).default, r(4, 5).round(), r(5).round())  # type: ignore[misc]


CASES |= {
    "narrow": lambda: (A.narrow.default, r(4, 5), 1, 1, 3),
    "movedim": lambda: (A.movedim.int, r(2, 3, 4), 0, 2),
    "copy": lambda: (A.copy.default, r(4, 5), r(5)),
    "prod": lambda: (A.prod.dim_int, r(4, 5), 1),
    "amin": lambda: (A.amin.default, r(4, 5), [0], True),
    "argmin": lambda: (A.argmin.default, r(4, 5), 0),
    "all": lambda: (A.all.dim, r(4, 5) > -1, 1),
    "fmod": lambda: (A.fmod.Scalar, r(9) * 3, 0.7),
    "mv": lambda: (A.mv.default, r(4, 5), r(5)),
    "clamp_max": lambda: (A.clamp_max.default, r(9), 0.1),
    "clamp tensor": lambda: (A.clamp.Tensor, r(9), r(9) - 2, r(9) + 2),
    "max tensor": lambda: (A.max.other, r(9), r(9)),
    "bitwise_or": lambda: (A.bitwise_or.Tensor, ints(8, 9), ints(8, 9)),
    "bitwise_xor": lambda: (A.bitwise_xor.Tensor, ints(8, 9), ints(8, 9)),
    "__and__": lambda: (A.__and__.Tensor, r(9) > 0, r(9) > 0),
    "__or__": lambda: (A.__or__.Tensor, r(9) > 0, r(9) > 0),
    "isnan": lambda: (A.isnan.default, r(9) / 0 * 0),
    "isinf": lambda: (A.isinf.default, r(9) / 0),
    "atan2": lambda: (A.atan2.default, r(9), r(9)),
    "log10": lambda: (A.log10.default, positive(9)),
    "asin": lambda: (A.asin.default, r(9).tanh()),
    "acos": lambda: (A.acos.default, r(9).tanh()),
}  # fmt: skip
for op in ["ne", "le", "gt", "ge"]:
    CASES[op] = lambda op=op: (getattr(A, op).Tensor, r(4, 5).round(), r(5).round())  # type: ignore[misc]
for op in ["tan", "sinh", "cosh", "exp2", "square", "log_sigmoid"]:
    CASES[op] = lambda op=op: (getattr(A, op).default, r(4, 5))  # type: ignore[misc]


def test_every_function_has_a_case() -> None:
    named = {str(case()[0]._schema.name).replace("::", ".") for case in CASES.values()}
    tried = {find(name) for name in named}
    assert [name for name, function in ATEN.items() if function not in tried] == []


@pytest.mark.parametrize("name", CASES)
def test_against_torch(name: str) -> None:
    torch.manual_seed(1)
    overload, *args = CASES[name]()
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    compare(overload, *args, **kwargs)


def test_unknown_names_close_ones() -> None:
    with pytest.raises(PlanError, match=r"aten\.rsqrtt(.|\n)*aten\.rsqrt"):
        evaluate_node("aten.rsqrtt", [np.ones(1, np.float32)], {}, TensorType("f32", (1,)))


def test_wrong_type_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"gives \[3\], its node says f32\[2\]"):
        evaluate_node("aten.neg", [np.ones(3, np.float32)], {}, TensorType("f32", (2,)))


def test_in_place_name_means_the_plain_one() -> None:
    got = evaluate_node("aten.relu_", [np.array([-1, 2], np.float32)], {}, TensorType("f32", (2,)))
    np.testing.assert_array_equal(got, [0, 2])


def test_training_batch_norm_is_refused() -> None:
    x = np.ones((1, 2, 3), np.float32)
    args = [x, *[np.ones(2, np.float32)] * 4]
    with pytest.raises(PlanError, match="eval mode"):
        evaluate_node("aten.batch_norm", args, {"training": True}, TensorType("f32", (1, 2, 3)))
