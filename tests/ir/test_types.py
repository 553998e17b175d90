"""Sizes: the algebra of expressions, their one text form, and tensor types."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flashrt.ir.bounds import Bounds
from flashrt.ir.types import (
    DTYPES,
    Dim,
    Expr,
    TensorType,
    ceildiv,
    evaluate,
    maximum,
    minimum,
    product,
    read_dim,
    read_type,
    show,
    size,
    split_top,
    substitute,
    sym,
    symbols_of,
)
from tests.ir.strategies import dims, types

T, N = sym("T"), sym("N")
SYMBOLS = ("T", "N", "s0", "_a1", "max")
whole = st.integers(-20, 20) | st.sampled_from(SYMBOLS).map(sym)


def whole_dims() -> st.SearchStrategy[Dim]:
    """Sizes without fractions, so that sums are exact."""

    def larger(inner: st.SearchStrategy[Dim]) -> st.SearchStrategy[Dim]:
        pair = st.tuples(inner, inner)
        return (
            pair.map(lambda p: p[0] + p[1])
            | pair.map(lambda p: p[0] * p[1])
            | pair.map(lambda p: p[0] - p[1])
            | pair.map(lambda p: maximum(*p))
            | pair.map(lambda p: minimum(*p))
            | st.tuples(inner, st.integers(1, 9)).map(lambda p: ceildiv(*p))
        )

    return st.recursive(whole, larger, max_leaves=4)


envs = st.fixed_dictionaries({s: st.integers(0, 50) for s in SYMBOLS})


@given(whole_dims(), whole_dims(), envs)
def test_arithmetic_is_that_of_numbers(a: Dim, b: Dim, env: Mapping[str, int]) -> None:
    """evaluate(a ∘ b) = evaluate(a) ∘ evaluate(b)."""
    x, y = evaluate(a, env), evaluate(b, env)
    assert evaluate(a + b, env) == x + y
    assert evaluate(a - b, env) == x - y
    assert evaluate(a * b, env) == x * y
    assert evaluate(-a, env) == -x
    assert evaluate(maximum(a, b), env) == max(x, y)
    assert evaluate(minimum(a, b), env) == min(x, y)
    assert evaluate(product([a, b, 3]), env) == x * y * 3
    assume(y > 0)
    assert evaluate(ceildiv(a, b), env) == -(-x // y)


@given(whole_dims(), whole_dims(), whole_dims())
def test_equal_sizes_are_equal_values(a: Dim, b: Dim, c: Dim) -> None:
    """One normal form: ring laws hold as equality of values, and of what prints."""
    for left, right in [
        (a + b, b + a), (a * b, b * a), ((a + b) + c, a + (b + c)), ((a * b) * c, a * (b * c)),
        (a * (b + c), a * b + a * c), (a - a, 0), (a + 0, a), (a * 1, a), (a * 0, 0), (a - b, -(b - a)),
    ]:  # fmt: skip
        assert left == right
        assert show(left) == show(right)
        assert not isinstance(left, Expr) or hash(left) == hash(right)


@given(dims())
def test_shown_size_reads_back(a: Dim) -> None:
    assert read_dim(show(a)) == a
    assert " " not in show(a)


@given(whole_dims(), whole_dims(), envs)
def test_substitution(a: Dim, b: Dim, env: Mapping[str, int]) -> None:
    """Replacing T by b, then evaluating, is evaluating with b's value for T."""
    replaced = substitute(a, {"T": b})
    assert evaluate(replaced, env) == evaluate(a, {**env, "T": evaluate(b, env)})  # type: ignore[dict-item]
    assert symbols_of(replaced) <= (symbols_of(a) - {"T"}) | symbols_of(b)
    assert substitute(a, {}) == a


@given(whole_dims(), whole_dims(), envs)
def test_bounds_contain_every_value(a: Dim, b: Dim, env: Mapping[str, int]) -> None:
    """What is certain by the ranges of the symbols holds for values in those ranges."""
    known = Bounds({s: (0, 50) for s in SYMBOLS})
    lo, hi = known.interval(a)
    assert lo <= evaluate(a, env) <= hi
    assert not known.at_most(a, b) or evaluate(a, env) <= evaluate(b, env)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5), st.integers(0, 9))
def test_covered_is_set_inclusion(spans: list[tuple[int, int]], end: int) -> None:
    """For plain numbers `covered` and `disjoint` are what sets of channels say."""
    known = Bounds({})
    union = {c for lo, hi in spans for c in range(lo, hi)}
    assert known.covered((0, end), spans) == (set(range(end)) <= union)
    for lo, hi in spans:
        if lo < hi and end:
            assert known.disjoint((0, end), (lo, hi)) == set(range(end)).isdisjoint(range(lo, hi))


def test_split_ranges() -> None:
    """[0:s] and [s:64] are disjoint and cover [0:64] wherever s stands; [0:s] and [32:64] aren't."""
    s, known = sym("s"), Bounds({"s": (0, 64)})
    assert known.disjoint((0, s), (s, 64))
    assert known.covered((0, 64), [(s, 64), (0, s)])
    assert not known.disjoint((0, s), (32, 64))
    assert known.disjoint((0, minimum(s, 32)), (32, 64))
    assert not known.covered((0, 64), [(0, s), (s + 1, 64)])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (T * 2 + 1, "2*T+1"),
        (T - 1, "T-1"),
        ((T + N) * (T - N), "-1*N*N+T*T"),
        (ceildiv(T, 32) * 16, "16*ceildiv(T,32)"),
        (maximum(T, 4, N), "max(T,4,N)"),
        (2.0 * T, "2*T"),
        (0.5 * T - 1.5, "0.5*T-1.5"),
        (maximum(T, T), "T"),
        (maximum(3, 4), "4"),
    ],
)
def test_printed_form(value: Dim, text: str) -> None:
    assert show(value) == text


@pytest.mark.parametrize(
    "text",
    ["", "T+", "T/2", "f(T)", "T**2", "True", "'T'", "T if N else 1", "min()", "ceildiv(T)", "ceildiv(4,0)",
     "1e999", "if", "(" * 500, "1j", "T.a"],
)  # fmt: skip
def test_unreadable_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|large"):
        read_dim(text)


def test_missing_symbol_and_fraction() -> None:
    with pytest.raises(KeyError, match="N"):
        evaluate(T + N, {"T": 1})
    assert size(T * 2.0, {"T": 3}) == 6


@given(types)
def test_type_reads_back(kind: TensorType) -> None:
    assert read_type(str(kind)) == kind


def test_type_sizes() -> None:
    kind = TensorType("bf16", (T, 576))
    assert (str(kind), show(kind.elements), show(kind.bytes)) == ("bf16[T,576]", "576*T", "1152*T")
    assert TensorType("f32", ()).bytes == DTYPES["f32"]
    assert kind.with_shape(N) == TensorType("bf16", (N,))


@pytest.mark.parametrize("text", ["f32", "f33[1]", "f32[1", "f32[,]", "F32[1]", "[1]", "f32[T T]"])
def test_unreadable_type(text: str) -> None:
    with pytest.raises(ValueError, match="isn't a"):
        read_type(text)


@given(st.lists(st.sampled_from(["a", "[b,c]", '"d,e"', '"\\""', "f(g,h)"])))
def test_split_top(parts: list[str]) -> None:
    """Commas in brackets and quotes don't split."""
    assert split_top(",".join(parts)) == parts
