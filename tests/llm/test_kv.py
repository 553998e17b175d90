"""Pages are lent and come back; no page is in two tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt.errors import KnobError
from flashrt.ir.ops import PAGE
from flashrt.llm.kv import EMPTY, OutOfPages, PagePool, Table, pages_for


@given(
    total=st.integers(1, 12),
    moves=st.lists(
        st.tuples(st.sampled_from("gr"), st.integers(0, 3), st.integers(0, 5 * PAGE)), max_size=40
    ),
)
def test_pool(total: int, moves: list[tuple[str, int, int]]) -> None:
    """Any order of growing and returning four tables keeps every page in one place."""
    pool, tables = PagePool(total), [EMPTY] * 4
    for move, which, tokens in moves:
        if move == "r":
            pool.give_back(tables[which].pages)
            tables[which] = EMPTY
        else:
            free, had = pool.free, tables[which]
            grown = pool.grow(had, tokens)
            if isinstance(grown, OutOfPages):
                assert grown.wanted > grown.free == free == pool.free
                continue
            assert grown.pages[: len(had.pages)] == had.pages
            assert len(grown.pages) == max(len(had.pages), pages_for(tokens))
            tables[which] = grown
        taken = [p for t in tables for p in t.pages]
        assert len(taken) == len(set(taken)) == pool.used
        assert set(taken) <= set(range(total))
        assert pool.free + pool.used == total
    for table in tables:
        pool.give_back(table.pages)
    assert pool.free == total


def test_a_table_with_room_stays_the_same() -> None:
    pool = PagePool(2)
    table = pool.grow(EMPTY, 1)
    assert isinstance(table, Table)
    assert table.room == PAGE
    assert pool.grow(table, PAGE) is table
    assert pool.grow(table, 3 * PAGE) == OutOfPages(wanted=2, free=1)


def test_the_row_is_the_table() -> None:
    assert Table((3, 1, 2)).row.tolist() == [3, 1, 2]
    assert Table((3, 1)) == Table((3, 1)) != Table((1, 3))


def test_a_page_comes_back_once() -> None:
    pool = PagePool(3)
    taken = pool.take(2)
    assert isinstance(taken, tuple)
    pool.give_back(taken)
    with pytest.raises(AssertionError, match="isn't taken"):
        pool.give_back(taken[:1])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def test_no_pages_is_an_error() -> None:
    with pytest.raises(KnobError, match="pages=0"):
        PagePool(0)
