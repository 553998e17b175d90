"""Packed weight formats: unpacking gives back what was packed; ranges of channels are ranges of bytes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flashrt.layouts import BLOCK, BY_ROW, LAYOUTS, Q4, Q4M, Q8, Layout, pack_plain, pack_quants, unpack

Quants = NDArray[np.int64]
Numbers = NDArray[np.floating]

PLAIN = [x for x in LAYOUTS.values() if x.element is not None]
QUANTS = [x for x in LAYOUTS.values() if x.bits]
rows = st.integers(1, 70)
blocks = st.integers(1, 5)
seeds = st.integers(0, 2**32 - 1)


def quants(layout: Layout, n: int, nblk: int, seed: int) -> tuple[Quants, list[Numbers]]:
    """Random quants [n, blocks, block] over their whole range, and scales (and minima) [n, blocks], of 32
    times nblk columns."""
    rng = np.random.default_rng(seed)
    lo, hi = (0, 1 << layout.bits) if layout.bits == 4 or layout.minimum else (-128, 128)
    shape = n, layout.blocks(nblk * BLOCK)
    q = rng.integers(lo, hi, (*shape, layout.block))
    per_block = [rng.normal(size=shape).astype(layout.number) for _ in range(1 + layout.minimum)]
    return q, per_block


def meaning(layout: Layout, q: Quants, per_block: list[Numbers]) -> NDArray[np.float32]:
    """The weights by the formula of the module's docstring, in float32."""
    scale = per_block[0].astype(np.float32)[..., None]
    centred = q.astype(np.float32) - (8 if layout.grouped == Q4.name else 0)
    minimum = per_block[1].astype(np.float32)[..., None] if layout.minimum else np.float32(0)
    return (scale * centred + minimum).reshape(q.shape[0], -1)


@pytest.mark.parametrize("layout", QUANTS, ids=lambda x: x.name)
@given(n=rows, nblk=blocks, seed=seeds)
def test_quants_round_trip(layout: Layout, n: int, nblk: int, seed: int) -> None:
    q, per_block = quants(layout, n, nblk, seed)
    data = pack_quants(layout, q, *per_block)
    assert data.dtype == np.uint8 and data.size == layout.bytes(n, nblk * BLOCK)
    np.testing.assert_array_equal(unpack(layout, data, n, nblk * BLOCK), meaning(layout, q, per_block))


@pytest.mark.parametrize("layout", PLAIN, ids=lambda x: x.name)
@given(n=rows, k=st.integers(1, 100), seed=seeds)
def test_plain_round_trip(layout: Layout, n: int, k: int, seed: int) -> None:
    assert layout.element is not None
    w = np.random.default_rng(seed).normal(size=(n, k)).astype(layout.element)
    data = pack_plain(layout, w)
    assert data.size == layout.bytes(n, k)
    np.testing.assert_array_equal(unpack(layout, data, n, k), w.astype(np.float32))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda x: x.name)
@given(groups=st.integers(1, 4), rest=st.integers(1, 16), nblk=blocks, cut=st.integers(0, 4), seed=seeds)
def test_spans_join(layout: Layout, groups: int, rest: int, nblk: int, cut: int, seed: int) -> None:
    """A range of channels is that range of bytes: packed alone it is the same bytes, and ranges that
    meet join to the whole."""
    n, k = (groups - 1) * layout.rows + min(rest, layout.rows), nblk * BLOCK
    at = min(cut, groups - 1) * layout.rows
    whole, low, high = (packed(layout, seed, n, k, span) for span in ((0, n), (0, at), (at, n)))
    np.testing.assert_array_equal(whole[layout.span(0, at, k)], low)
    np.testing.assert_array_equal(whole[layout.span(at, n, k)], high)
    np.testing.assert_array_equal(np.concatenate([low, high]), whole)


def packed(layout: Layout, seed: int, n: int, k: int, span: tuple[int, int]) -> NDArray[np.uint8]:
    """Rows [lo, hi) of a random [n, k] matrix, packed by themselves."""
    rows_of = slice(*span)
    if layout.element is not None:
        w = np.random.default_rng(seed).normal(size=(n, k))
        return pack_plain(layout, w[rows_of])
    q, per_block = quants(layout, n, k // BLOCK, seed)
    return pack_quants(layout, q[rows_of], *(p[rows_of] for p in per_block))


def test_padding_is_zero() -> None:
    """Rows beyond N are zero weights, so whole groups may be computed."""
    q, per_block = quants(Q4M, 5, 2, 1)
    data = pack_quants(Q4M, q, *per_block)
    assert not unpack(Q4M, data, 16, 64)[5:].any()


def test_bytes_stand_where_the_docstring_says() -> None:
    """q8: element (j, row, i) is k = 4j+i; q4: low nibble k = 8j+i, high nibble k = 8j+4+i."""
    q = np.zeros((16, 1, BLOCK), np.int64)
    q[3, 0, 13] = 7  # q8: j = 3, i = 1; q4: j = 1, high nibble, i = 1
    scale = np.ones((16, 1), np.float16)
    q8 = pack_quants(Q8, q, scale)
    assert np.flatnonzero(q8[: 16 * BLOCK]).tolist() == [(3 * 16 + 3) * 4 + 1]
    q4 = pack_quants(Q4, q, scale)
    assert np.flatnonzero(q4[: 8 * BLOCK]).tolist() == [(1 * 16 + 3) * 4 + 1]
    assert q4[(1 * 16 + 3) * 4 + 1] == 7 << 4


def test_negative_quants_keep_their_sign() -> None:
    q = np.full((1, 1, BLOCK), -128)
    data = pack_quants(Q8, q, np.full((1, 1), 0.5, np.float16))
    assert (unpack(Q8, data, 1, BLOCK) == -64).all()


def test_sizes() -> None:
    assert Q4.bytes(17, 64) == 2 * 16 * 2 * (16 + 2)
    assert Q4M.group_bytes(33) == 2 * 16 * (16 + 4)
    assert LAYOUTS["bf16"].bytes(3, 5) == 30
    assert LAYOUTS["q8f.16x16"].bytes(16, 64) == 2 * 16 * (32 + 2 * 4)
    bits = {x.name: x.weight_bits for x in QUANTS}
    assert all(bits[by_row] == bits[x] and LAYOUTS[by_row].grouped == x for x, by_row in BY_ROW.items())
    assert {x: bits[x] for x in BY_ROW} == {
        "q4.16x32": 4.5, "q4m.16x32": 5, "q4mf.16x32": 6, "q4mf.16x16": 8,
        "q8.16x32": 8.5, "q8f.16x16": 10, "q8mf.16x32": 10,
    }  # fmt: skip
    assert LAYOUTS["bf16"].element == np.dtype(ml_dtypes.bfloat16)
    with pytest.raises(AssertionError):
        Q8.span(8, 32, 64)


@pytest.mark.parametrize("layout", QUANTS, ids=lambda x: x.name)
def test_no_rows(layout: Layout) -> None:
    """A split at the end leaves one side without rows."""
    q, per_block = quants(layout, 0, 2, 0)
    data = pack_quants(layout, q, *per_block)
    assert data.size == 0
    assert unpack(layout, data, 0, 64).shape == (0, 64)
