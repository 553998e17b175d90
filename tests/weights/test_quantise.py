"""Quantised formats and floats in the packed layouts: exact where that is promised, and how far off else.

What the bytes of a format mean is taken from the `gguf` package.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt.errors import ModelError
from flashrt.ir.types import TensorType, Weight
from flashrt.layouts import COARSER, LAYOUTS, pack_quants, unpack
from flashrt.weights.formats import FORMATS, native_layout
from flashrt.weights.index import EXACT_LAYOUT, Tensor, WeightIndex
from flashrt.weights.index import rounded as counted
from flashrt.weights.quantise import rounded
from flashrt.weights.source import IndexSource, file_entry

K = 512
F16_STEP = 2.0**-11
# where the f16 scales stand in a block: random bytes there would be NaN
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
}  # fmt: skip
COARSE = [f for f in HALVES if EXACT_LAYOUT[f] in COARSER and f not in ("Q4_K", "IQ4_XS")]


def random_rows(form: str, n: int, seed: int, scale: float = 1e-3) -> np.ndarray:
    """Rows of random bytes, so every quant and factor occurs, with scales of both signs."""
    rng, found = np.random.default_rng(seed), FORMATS[form]
    blocks = rng.integers(0, 256, (n, K // found.block, found.bytes), dtype=np.uint8)
    for at in HALVES[form]:
        halves = rng.normal(0, scale, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    if form == "MXFP4":
        blocks[..., 0] = rng.integers(105, 140, blocks.shape[:2])
    if form == "IQ1_M":  # the bits of its f16 number lie in the upper four of its last four words
        words = rng.normal(0, scale, blocks.shape[:2]).astype(np.float16).view(np.uint16)
        for i in range(4):
            fours = (words >> np.uint16(4 * i) & 15).astype(np.uint8) << 4
            blocks[..., 49 + 2 * i] = blocks[..., 49 + 2 * i] & 15 | fours
    return blocks.reshape(n, -1)


def stored(folder: Path, form: str, rows: np.ndarray, layout: str) -> np.ndarray:
    """The rows of a file as the layout keeps them."""
    path, n = folder / "w.bin", len(rows)
    path.write_bytes(rows.tobytes())
    index = WeightIndex((file_entry(path),), {"w": Tensor("w", 0, 0, rows.nbytes, form, (n, K))})
    out = np.empty(LAYOUTS[layout].bytes(n, K), np.uint8)
    IndexSource(index).read(Weight("w", TensorType("f32", (n, K)), ("w",), layout), 0, n, out)
    return unpack(LAYOUTS[layout], out, n, K)


def meaning(form: str, rows: np.ndarray) -> np.ndarray:
    return np.asarray(dequantize(rows, GGMLQuantizationType[form]))


def largest(values: np.ndarray) -> np.ndarray:
    """The largest magnitude of each 32 weights, for each weight."""
    return np.repeat(np.abs(values).reshape(len(values), -1, 32).max(2), 32, axis=1)


@pytest.mark.parametrize("form", HALVES)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_every_format_keeps_every_weight(
    tmp_path_factory: pytest.TempPathFactory, form: str, seed: int
) -> None:
    rows = random_rows(form, 19, seed)
    got = stored(tmp_path_factory.mktemp("exact"), form, rows, native_layout(form))
    assert native_layout(form) == EXACT_LAYOUT[form]
    assert np.array_equal(got, meaning(form, rows))


def test_all_formats_were_tried() -> None:
    assert {f for f, found in FORMATS.items() if found.element is None} == set(HALVES)


def test_scales_beyond_f16_are_held(tmp_path: Path) -> None:
    """A product of Q4_K may be: f32 holds it."""
    rows = random_rows("Q4_K", 3, 1, scale=2e4)
    assert np.abs(want := meaning("Q4_K", rows)).max() > 65504
    assert np.array_equal(stored(tmp_path, "Q4_K", rows, "q4mf.16x32"), want)
    with pytest.raises(ModelError, match="that the f16 scales of q4m"):
        stored(tmp_path, "Q4_K", rows, "q4m.16x32")


@pytest.mark.parametrize("form", ["Q6_K", "IQ2_XS"])
def test_damaged_scales_are_refused(tmp_path: Path, form: str) -> None:
    rows = random_rows(form, 3, 1)
    rows[1, (at := HALVES[form][0]) : at + 2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(ModelError, match="that the f32 scales of q8f"):
        stored(tmp_path, form, rows, "q8f.16x16")


def test_coarser_q4_k_rounds_two_products_to_f16(tmp_path: Path) -> None:
    """w = scale·q - min: both are off by 2^-11 at most, and nothing else is."""
    rows, coarser = random_rows("Q4_K", 33, 1), COARSER[native_layout("Q4_K")]
    want, got = meaning("Q4_K", rows), stored(tmp_path, "Q4_K", rows, coarser)
    ones, zeros = rows.reshape(33, -1, 144).copy(), rows.reshape(33, -1, 144).copy()
    ones[..., 16:], zeros[..., 16:] = 0xFF, 0
    least = np.abs(meaning("Q4_K", zeros.reshape(33, -1)))
    most = np.abs(meaning("Q4_K", ones.reshape(33, -1)) - meaning("Q4_K", zeros.reshape(33, -1)))
    assert coarser == "q4m.16x32"
    assert (np.abs(got - want) <= (least + most) * F16_STEP + 1e-9).all()
    assert not np.array_equal(got, want)


def test_coarser_iq4_xs_rounds_its_scales_to_f16(tmp_path: Path) -> None:
    rows = random_rows("IQ4_XS", 33, 2)
    want = meaning("IQ4_XS", rows)
    got = stored(tmp_path, "IQ4_XS", rows, COARSER[native_layout("IQ4_XS")])
    assert (np.abs(got - want) <= np.abs(want) * F16_STEP).all()


@pytest.mark.parametrize("form", COARSE)
def test_the_others_are_off_by_half_a_step_of_127_where_coarser(tmp_path: Path, form: str) -> None:
    rows = random_rows(form, 33, 3)
    coarser = COARSER[native_layout(form)]
    want, got = meaning(form, rows), stored(tmp_path, form, rows, coarser)
    assert coarser == "q8.16x32"
    assert (np.abs(got - want) <= largest(want) / 254 * (1 + 2**-9) + 1e-7).all()


@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 1e6])
@given(seed=st.integers(0, 2**32))
def test_floats_to_q8(size: float, seed: int) -> None:
    """Also where scales are subnormal numbers of f16: no weight is cut off."""
    values = (np.random.default_rng(seed).normal(size=(5, 70)) * size).astype(np.float32)
    layout, blocks = LAYOUTS["q8.16x32"], rounded(LAYOUTS["q8.16x32"], values)
    assert blocks is not None and blocks.finite()
    got = unpack(layout, pack_quants(layout, blocks.q, blocks.scale), 5, 70)
    step = np.repeat(blocks.scale.astype(np.float32), 32, axis=1)[:, :70]
    assert (np.abs(got - values) <= step * (0.5 + 1e-4)).all()
    most = largest(np.pad(values, ((0, 0), (0, 26))))[:, :70]
    assert (step <= most / 127 * (1 + 2**-10) + 2.0**-24).all()


def test_floats_to_q4m_beat_plain_rounding() -> None:
    """On bell-shaped weights; a row of one value is exact to f16."""
    values = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    values[0] = 0.3
    layout, blocks = LAYOUTS["q4m.16x32"], rounded(LAYOUTS["q4m.16x32"], values)
    assert blocks is not None and blocks.minimum is not None
    got = unpack(layout, pack_quants(layout, blocks.q, blocks.scale, blocks.minimum), 64, 256)
    parts = values.reshape(64, -1, 32)
    low, step = parts.min(2, keepdims=True), np.ptp(parts, axis=2, keepdims=True) / 15
    with np.errstate(invalid="ignore"):
        plain = (np.where(step > 0, np.rint((parts - low) / step), 0) * step + low).reshape(64, 256)
    assert np.abs(got[0] - 0.3).max() < 0.3 * F16_STEP
    assert np.mean((got - values) ** 2) < 0.97 * np.mean((plain - values) ** 2)


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e9])
def test_what_scales_cannot_hold_is_refused(tmp_path: Path, value: float) -> None:
    rows = np.full((3, K), value, np.float32)
    with pytest.raises(ModelError, match=r"tensor w \(F32\) has values that the f16 scales of q8"):
        stored(tmp_path, "F32", rows.view(np.uint8), "q8.16x32")


def test_what_is_kept_with_loss_is_counted() -> None:
    formats = {"a": "Q6_K", "b": "Q6_K", "c": "Q4_K", "d": "BF16", "norm": "BF16"}
    tensors = {name: Tensor(name, 0, 0, 0, form, (32, K)) for name, form in formats.items()}

    def told(**layouts: str) -> dict[str, int]:
        weights = [Weight(x, TensorType("f32", (32, K)), (x,), layout) for x, layout in layouts.items()]
        joint = Weight("joint", TensorType("f32", (64, K)), ("a", "b"), layouts["a"])
        return counted([*weights, joint], WeightIndex((), tensors))

    assert told(a="q8f.16x16", c="q4mf.16x32", d="bf16", norm="f32") == {}
    assert told(a="f32", c="f32", d="f32") == {}
    assert told(a="q8.16x32", c="q4m.16x32", d="q8.16x32") == {
        "Q6_K in q8.16x32": 3, "Q4_K in q4m.16x32": 1, "BF16 in q8.16x32": 1,
    }  # fmt: skip
