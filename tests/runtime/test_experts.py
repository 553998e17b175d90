"""Which experts a device keeps: the choice, as a pure function, and the exchange beside steps."""

from __future__ import annotations

import numpy as np
import pytest

from flashrt.runtime.experts import F64, GAIN, I32, NOISE, Move, moves

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import composite


@composite
def cases(draw: st.DrawFn) -> tuple[F64, I32, int, int]:
    """(how often experts were asked for, the table, slots, moves at most)."""
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    slots = draw(st.integers(1, experts - 1))
    asked = draw(st.lists(st.integers(0, 1000), min_size=layers * experts, max_size=layers * experts))
    table = np.zeros((layers, experts), np.int32)
    for row in table:
        full = draw(st.integers(0, slots))
        chosen = draw(st.permutations(range(experts)))[:full]
        row[list(chosen)] = np.array(draw(st.permutations(range(1, slots + 1))))[:full]
    return np.array(asked, np.float64).reshape(layers, experts), table, slots, draw(st.integers(0, 20))


def after(table: I32, made: list[Move]) -> I32:
    """The table once these moves are through."""
    new = table.copy()
    for move in made:
        if move.gone >= 0:
            new[move.layer, move.gone] = 0
        new[move.layer, move.expert] = move.slot + 1
    return new


def settled(asked: F64, table: I32, slots: int, most: int) -> I32:
    """The table when nothing moves any more."""
    for _ in range(1000):
        made = moves(asked, table, slots, most)
        if not made:
            return table
        table = after(table, made)
    raise AssertionError("it never comes to rest")


@given(cases())
def test_moves_are_possible(case: tuple[F64, I32, int, int]) -> None:
    """Into slots that are free or whose expert goes, one expert a slot, no more than allowed."""
    asked, table, slots, most = case
    made = moves(asked, table, slots, most)
    assert len(made) <= most
    assert len({(m.layer, m.slot) for m in made}) == len({(m.layer, m.expert) for m in made}) == len(made)
    for move in made:
        assert 0 <= move.slot < slots and table[move.layer, move.expert] == 0
        owner = np.flatnonzero(table[move.layer] == move.slot + 1).tolist()
        assert owner == ([move.gone] if move.gone >= 0 else [])
    for row in after(table, made):
        held = row[row > 0]
        assert len(set(held.tolist())) == len(held) <= slots


@given(cases())
def test_what_is_asked_for_most_ends_up_kept(case: tuple[F64, I32, int, int]) -> None:
    """As long as nothing changes: no expert outside is asked for clearly more than one inside, and no slot is
    free while somebody asks for an expert outside."""
    asked, table, slots, most = case
    for counts, row in zip(asked, settled(asked, table, slots, max(most, 1)), strict=True):
        inside, outside = counts[row > 0], counts[row == 0]
        if len(inside) < slots:
            assert not outside.any()
        if len(inside) == slots and len(outside):
            most_outside, least = outside.max(), inside.min()
            assert most_outside <= max(GAIN * least, least + NOISE * np.sqrt(most_outside + least))


@given(cases(), st.integers(0, 1000))
def test_nothing_goes_back_and_forth(case: tuple[F64, I32, int, int], seed: int) -> None:
    """Counts that differ by what chance makes of them exchange nothing once it has come to rest."""
    asked, table, slots, most = case
    rest = settled(asked, table, slots, max(most, 1))
    jitter = np.random.default_rng(seed).uniform(-0.05, 0.05, asked.shape)
    shaken = np.maximum(asked * (1 + jitter), 0.0)
    first = moves(shaken, rest, slots, 100)
    again = moves(asked, after(rest, first), slots, 100)
    assert not {(m.layer, m.expert) for m in again} & {(m.layer, m.gone) for m in first if m.gone >= 0}


def test_the_most_useful_comes_first() -> None:
    asked = np.array([[0.0, 10, 50], [0, 500, 0]])
    table = np.array([[1, 0, 0], [1, 0, 0]], np.int32)
    assert moves(asked, table, 1, 1) == [Move(1, 0, 1, 0)]
    assert moves(asked, table, 1, 9) == [Move(1, 0, 1, 0), Move(0, 0, 2, 0)]
    assert moves(asked, table, 1, 0) == []


@settings(max_examples=30)
@given(st.floats(0.8, 1.6), st.integers(0, 1 << 20))
def test_most_choices_of_a_skewed_router_are_kept(skew: float, seed: int) -> None:
    """Counts that come in and fade, some moves at a time: in the end nearly as many choices are kept as can
    be, and little moves any more."""
    rng, layers, experts, slots = np.random.default_rng(seed), 4, 64, 16
    chance = np.stack([rng.permutation(1.0 / np.arange(1, experts + 1) ** skew) for _ in range(layers)])
    chance /= chance.sum(axis=1, keepdims=True)
    table = np.zeros((layers, experts), np.int32)
    table[:, :slots] = np.arange(1, slots + 1)
    asked, late = np.zeros((layers, experts)), 0
    for period in range(200):
        asked = 0.99 * asked + np.stack([rng.multinomial(80, p) for p in chance])
        made = moves(asked, table, slots, 8)
        late += len(made) * (period >= 100)
        table = after(table, made)
    best = np.sort(chance, axis=1)[:, -slots:].sum(axis=1)
    kept = np.where(table > 0, chance, 0).sum(axis=1)
    assert (kept > 0.93 * best).all()
    assert late <= layers * slots / 2
