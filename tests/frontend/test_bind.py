"""bind: the layout of each matrix, from the formats of what it is made of."""

from __future__ import annotations

import pytest

from flashrt.frontend.bind import bind
from flashrt.ir.logical import Graph
from flashrt.ir.types import TensorType, Weight
from flashrt.weights.index import Tensor, WeightIndex


@pytest.mark.parametrize(
    ("formats", "layout"),
    [
        (("BF16",), "bf16"),
        (("Q4_K", "Q4_K"), "q4mf.16x32"),
        (("Q6_K", "IQ4_XS"), "q8f.16x16"),
        (("Q4_K", "Q6_K"), "q8f.16x16"),
        (("Q4_K", "Q8_0"), "q8f.16x16"),
        (("F32", "BF16"), "f32"),
    ],
)
def test_parts_in_different_formats_get_a_layout_for_all(formats: tuple[str, ...], layout: str) -> None:
    tensors = {f"t{i}": Tensor(f"t{i}", 0, 0, 0, form, (16, 256)) for i, form in enumerate(formats)}
    weight = Weight("w", TensorType("f32", (16 * len(formats), 256)), tuple(tensors), "")
    found = bind(Graph("g", (), (), (weight,), (), (), ()), WeightIndex((), tensors), {})
    assert [w.layout for w in found.weights] == [layout]
