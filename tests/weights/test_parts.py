"""Parts of weights: rows and columns of what a packed file holds whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashrt.errors import ModelError
from flashrt.ir.types import TensorType, Weight
from flashrt.layouts import LAYOUTS, unpack
from flashrt.weights.packed import PackedSource, write_packed
from flashrt.weights.parts import PartSource
from tests.tiny import ArraySource, random_bytes

WHOLES = {
    name: Weight(name, TensorType("f32", shape), (name,), layout)
    for name, layout, shape in [
        ("quants", "q4m.16x32", (96, 128)), ("plain", "bf16", (96, 128)), ("bias", "f32", (96,)),
    ]
}  # fmt: skip


def part(of: str, rows: tuple[int, ...], columns: tuple[int, ...] = ()) -> Weight:
    whole = WHOLES[of]
    shape = [sum(rows[1::2]) - sum(rows[::2]), *whole.type.shape[1:]]
    if columns:
        shape[1] = columns[1] - columns[0]
    return Weight("part", TensorType("f32", tuple(shape)), (), whole.layout, of, rows, columns)


@pytest.fixture(scope="module")
def packed() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    made = {n: random_bytes(rng, LAYOUTS["q4m.16x32"], 96, 128) for n in ("quants",)}
    made["plain"] = rng.standard_normal((96, 128)).astype(LAYOUTS["bf16"].element).view(np.uint8).reshape(-1)
    made["bias"] = rng.standard_normal(96).astype(np.float32).view(np.uint8)
    return made


def values(weight: Weight, data: np.ndarray) -> np.ndarray:
    if len(weight.type.shape) == 1:
        return data.view(np.float32)
    return unpack(LAYOUTS[weight.layout], data, *weight.type.shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [(0, 96), (16, 48), (0, 16, 48, 80), (32, 48, 48, 96)], ids=str)
@pytest.mark.parametrize("of", WHOLES)
@pytest.mark.parametrize("columns", [(), (0, 32), (32, 128)], ids=str)
def test_a_part_is_what_numpy_cuts(
    tmp_path: Path, packed: dict[str, np.ndarray], of: str, rows: tuple[int, ...], columns: tuple[int, ...]
) -> None:
    """All of a part, and its rows from the second group on, through a packed file."""
    if of == "bias" and columns:
        pytest.skip("a vector has no columns")
    write_packed(tmp_path / "weights.bin", WHOLES, ArraySource(packed))
    source, wanted = PartSource(PackedSource(tmp_path / "weights.bin"), WHOLES), part(of, rows, columns)
    picked = np.concatenate([np.arange(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)])
    want = values(WHOLES[of], packed[of])[picked]
    want = want[:, slice(*columns)] if columns else want
    count, layout = len(picked), LAYOUTS[wanted.layout]
    width = want.shape[1] if want.ndim == 2 else 1
    for lo in (0, 16):
        out = np.empty(layout.bytes(count - lo, width), np.uint8)
        source.read(wanted, lo, count, out)
        shown = Weight("", TensorType("f32", want[lo:].shape), (), wanted.layout)
        np.testing.assert_array_equal(values(shown, out), want[lo:])


def test_a_whole_weight_is_the_sources(packed: dict[str, np.ndarray]) -> None:
    out = np.empty_like(packed["plain"])
    PartSource(ArraySource(packed), WHOLES).read(WHOLES["plain"], 0, 96, out)
    np.testing.assert_array_equal(out, packed["plain"])


def test_a_part_of_nothing_known(packed: dict[str, np.ndarray]) -> None:
    with pytest.raises(ModelError, match="is a part of plain, which the plan lacks"):
        PartSource(ArraySource(packed), {}).read(part("plain", (0, 16)), 0, 16, np.empty(0, np.uint8))


@pytest.mark.parametrize("of", ["plain", "quants"])
@pytest.mark.parametrize("rows,turned", [((0, 24, 48, 72), 2), ((8, 16, 40, 48, 72, 80), 3)], ids=str)
def test_a_turned_part_has_its_matrices_transposes(
    packed: dict[str, np.ndarray], of: str, rows: tuple[int, ...], turned: int
) -> None:
    """All of it, and some rows across the border of two; of packed rows that begin inside a block, too."""
    matrices = [values(WHOLES[of], packed[of])[a:b] for a, b in zip(rows[::2], rows[1::2], strict=True)]
    want = np.concatenate([m.T for m in matrices])
    weight = Weight("p", TensorType("f32", want.shape), (), "f32", of, rows, turned=turned)
    source = PartSource(ArraySource(packed), WHOLES)
    for lo, hi in ((0, len(want)), (100, 140), (128, 129)):
        got = np.empty((hi - lo, want.shape[1]), np.float32)
        source.read(weight, lo, hi, got.view(np.uint8).reshape(-1))
        assert np.array_equal(got, want[lo:hi])


def test_a_part_may_have_plain_rows_of_packed_ones(packed: dict[str, np.ndarray]) -> None:
    want = values(WHOLES["quants"], packed["quants"])[[*range(4, 12), *range(90, 96)]].astype(np.float16)
    weight = Weight("p", TensorType("f32", want.shape), (), "f16", "quants", (4, 12, 90, 96))
    got = np.empty(want.shape, np.float16)
    PartSource(ArraySource(packed), WHOLES).read(weight, 0, 14, got.view(np.uint8).reshape(-1))
    assert np.array_equal(got, want)
