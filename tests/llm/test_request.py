"""Requests are checked at the door; a sequence counts its own way to the end."""

from __future__ import annotations

import math

import pytest

from flashrt.errors import RequestError
from flashrt.llm.request import Request, Sampling, Sequence


@pytest.mark.parametrize(
    ("name", "value", "range_"),
    [
        ("temperature", -0.1, "from 0"),
        ("temperature", math.nan, "from 0"),
        ("temperature", math.inf, "from 0"),
        ("temperature", "hot", "from 0"),
        ("top_k", -1, "from 0"),
        ("top_k", 1.5, "whole number"),
        ("top_p", 0, "above 0 to 1"),
        ("top_p", 1.01, "above 0 to 1"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("penalty", 0, "above 0"),
        ("max_tokens", -1, "from 0"),
        ("max_tokens", True, "whole number"),
        ("seed", -1, "from 0"),
        ("seed", 2**63, "from 0"),
        ("stop", ("",), "none of them empty"),
        ("stop", "word", "tuple of texts"),
    ],
)
def test_out_of_range(name: str, value: object, range_: str) -> None:
    """The message has the name, the value and what is allowed."""
    with pytest.raises(RequestError, match=range_) as error:
        Sampling(**{name: value})  # type: ignore[arg-type]
    assert f"{name}={value!r}" in str(error.value)


def test_edges_are_allowed() -> None:
    Sampling(temperature=1e-7, top_p=1e-9, min_p=1, penalty=1e-3, max_tokens=0, seed=0, stop=("é",))


def test_empty_prompt() -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        Request("a", ())


def test_negative_token() -> None:
    with pytest.raises(RequestError, match=r"prompt\[1\]=-3"):
        Request("a", (5, -3))


def test_prompt_longer_than_the_context() -> None:
    with pytest.raises(RequestError, match="5 tokens, the context holds 4"):
        Sequence(Request("a", (1,) * 5), context=4)


@pytest.mark.parametrize(("prompt", "wanted", "limit"), [(4, 9, 0), (3, 9, 1), (1, 2, 2), (2, 0, 0)])
def test_limit(prompt: int, wanted: int, limit: int) -> None:
    """Prompt and output together stay within a context of 4; a limit of 0 is finished at once."""
    sequence = Sequence(Request("a", (1,) * prompt, Sampling(max_tokens=wanted)), context=4)
    assert sequence.limit == limit
    assert sequence.finish == ("length" if limit == 0 else None)


def test_a_sequence_to_its_end() -> None:
    sequence = Sequence(Request("a", (7, 8), Sampling(max_tokens=2)), context=10)
    assert (sequence.todo, sequence.generated) == (2, 0)
    for token in (3, 4):
        sequence.computed = sequence.known
        assert sequence.finish is None
        sequence.append(token)
        assert sequence.todo == 1
    assert sequence.finish == "length"
    assert sequence.output == (3, 4)
    assert sequence.tokens(1, 4).tolist() == [8, 3, 4]
    with pytest.raises(ValueError, match="read-only"):
        sequence.tokens(0, 2)[0] = 1


def test_seeds() -> None:
    """A seed that was asked for is used; without one each sequence draws its own."""
    plain, seeded = Request("a", (1,)), Request("a", (1,), Sampling(seed=9))
    assert Sequence(seeded, 4).seed == 9
    assert len({Sequence(plain, 4).seed for _ in range(8)}) == 8
