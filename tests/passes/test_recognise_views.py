"""Views: strides of reshapes, transposes and slices agree with numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt.ir.types import sym
from flashrt.passes.recognise_views import (
    View,
    compact_strides,
    dense,
    expand,
    flat,
    memory_order,
    narrow,
    permute,
    reshape,
    same_order,
)

T = sym("T")


def elements(view: View, count: int) -> np.ndarray:
    """The numbers of the base's elements that a view of numbers shows."""
    base = np.arange(count)
    strides = tuple(int(s) * base.itemsize for s in view.strides)  # type: ignore[arg-type]
    shape = tuple(int(n) for n in view.shape)  # type: ignore[arg-type]
    return np.lib.stride_tricks.as_strided(base[int(view.offset) :], shape, strides)  # type: ignore[arg-type]


@given(st.permutations(range(4)), st.integers(0, 3), st.data())
def test_transposes_slices_and_reshapes_show_what_numpy_shows(
    order: list[int], axis: int, data: st.DataObject
) -> None:
    shape = (2, 3, 1, 4)
    view, want = dense("%x", shape), np.arange(24).reshape(shape)
    view, want = permute(view, order), want.transpose(order)
    size = int(want.shape[axis])
    start = data.draw(st.integers(0, size - 1))
    view = narrow(view, axis, start, size - start)
    want = want.take(range(start, size), axis)
    np.testing.assert_array_equal(elements(view, 24), want)
    target = data.draw(
        st.sampled_from([(want.size,), (1, want.size), want.shape[::-1], (want.shape[0], -1), want.shape])
    )
    to = want.reshape(target)
    if (got := reshape(view, to.shape)) is not None:
        np.testing.assert_array_equal(elements(got, 24), to)


def test_a_reshape_that_needs_a_copy_is_none() -> None:
    turned = permute(dense("%x", (2, 3)), (1, 0))
    assert reshape(turned, (6,)) is None
    assert reshape(dense("%x", (T, 4)), (3, T)) is None


def test_heads_are_split_turned_and_put_back() -> None:
    flat_rows = dense("%x", (T, 8))
    heads = reshape(flat_rows, (1, T, 2, 4))
    assert heads is not None
    turned = permute(heads, (0, 2, 1, 3))
    back = reshape(permute(turned, (0, 2, 1, 3)), (T, 8))
    assert back == flat_rows
    assert reshape(turned, (T, 8)) is None


def test_flat_reads_whole_values_and_slices_of_channels() -> None:
    rows = dense("%x", (1, T, 8))
    whole = flat(rows, rows.shape)
    assert whole is not None and whole.whole and whole.shape == (T, 8)
    part = flat(narrow(rows, 2, 2, 4), rows.shape)
    assert part is not None and (part.lo, part.hi, part.shape, part.table) == (2, 6, (T, 4), (T, 8))


@pytest.mark.parametrize(
    "view",
    [
        narrow(dense("%x", (T, 8)), 1, 0, 4, 2),  # every second channel
        narrow(dense("%x", (T, 2, 4)), 2, 0, 2),  # half of each head
        narrow(dense("%x", (4, T, 8)), 0, 0, 2),  # not all rows
        expand(dense("%x", (T, 1)), (T, 8)),
    ],
)
def test_flat_refuses_what_isnt_rows_and_channels(view: View) -> None:
    base = {2: (T, 8), 3: (T, 2, 4)}[len(view.shape)] if view.shape[0] != 2 else (4, T, 8)
    if view.strides[-1] == 0:
        base = (T, 1)
    assert flat(view, base) is None


def test_order_in_memory() -> None:
    heads = permute(dense("%x", (1, T, 2, 4)), (0, 2, 1, 3))
    assert memory_order(heads) == (0, 2, 1, 3)
    assert compact_strides(heads) == (0, 4, 8, 1)
    assert not same_order(heads, dense("%y", (1, 2, T, 4)))
    assert same_order(dense("%x", (1, T, 8)), dense("%y", (T, 8)))
