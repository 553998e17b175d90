"""Streams of text: whole characters only, nothing of a stop string, and all of the rest."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrt.errors import RequestError
from flashrt.llm.chat import Chat
from flashrt.llm.text import StopStrings, TextStream
from tests.llm import tiny_chat

FAMILIES = {"bytes": tiny_chat.byte_level, "pieces": tiny_chat.sentence_piece}
family = st.sampled_from(sorted(FAMILIES))
ids = st.lists(st.integers(0, 300))


@cache
def chat(name: str) -> Chat:
    return Chat(FAMILIES[name]())


def pieces(draw: st.DrawFn, whole: list[int] | str) -> list[list[int]] | list[str]:
    """`whole` cut anywhere."""
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]  # type: ignore[return-value]


@st.composite
def chunked_ids(draw: st.DrawFn) -> list[list[int]]:
    return pieces(draw, draw(ids))  # type: ignore[return-value]


@given(family, chunked_ids(), st.booleans())
def test_stream_is_the_final_text(name: str, chunks: list[list[int]], special: bool) -> None:
    stream = chat(name).stream(special=special)
    shown = [stream.push(chunk) for chunk in chunks] + [stream.finish()]
    assert "".join(shown) == chat(name).decode([i for chunk in chunks for i in chunk], special=special)


@given(family, ids)
def test_what_was_shown_never_changes(name: str, tokens: list[int]) -> None:
    """At any time, what was shown begins the text of everything that comes later."""
    stream, shown = chat(name).stream(), ""
    for i, token in enumerate(tokens):
        shown += stream.push([token])
        for end in (i + 1, len(tokens)):
            assert chat(name).decode(tokens[:end]).startswith(shown)


@given(family, st.text(alphabet="heloé日本👩 w\n", max_size=20))
def test_no_replacement_character_in_good_text(name: str, text: str) -> None:
    tokens = chat(name).encode(text)
    stream = chat(name).stream()
    shown = [stream.push([t]) for t in tokens] + [stream.finish()]
    assert "�" not in "".join(shown)
    assert "".join(shown) == text


def test_a_character_of_four_tokens_comes_at_the_last() -> None:
    letters = tiny_chat.alphabet()
    tokens = [2 + b for b in "👩".encode()]
    assert [chat("bytes").token(t) for t in tokens] == [letters[b] for b in "👩".encode()]
    stream = chat("bytes").stream()
    assert [stream.push([t]) for t in tokens] == ["", "", "", "👩"]


def test_an_incomplete_character_comes_at_the_end() -> None:
    stream = TextStream(lambda token: bytes([token]))
    assert stream.push([0x41, 0xE2, 0x82]) == "A"
    assert stream.finish() == "�"


def test_endless_garbage_is_shown_at_once() -> None:
    """Bytes that can't begin a character aren't held, so nothing piles up."""
    stream = TextStream(lambda token: bytes([token]))
    assert [stream.push([0x80]) for _ in range(100)] == ["�"] * 100


@st.composite
def stopped_text(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    text = st.text(alphabet="abc", max_size=20)
    stops = draw(st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
    return stops, pieces(draw, draw(text))  # type: ignore[return-value]


def expected(text: str, stops: list[str]) -> tuple[str, str]:
    """Character by character: the text before the stop string that is complete first, and that string."""
    for end in range(1, len(text) + 1):
        if found := [s for s in stops if text[:end].endswith(s)]:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, ""


@given(stopped_text())
def test_stop_strings_whatever_the_cutting(case: tuple[list[str], list[str]]) -> None:
    stops, chunks = case
    stop = StopStrings(stops)
    shown = "".join([stop.push(chunk) for chunk in chunks] + [stop.finish()])
    assert (shown, stop.stopped) == expected("".join(chunks), stops)


@given(stopped_text())
def test_nothing_of_a_stop_string_is_shown_early(case: tuple[list[str], list[str]]) -> None:
    """What is shown at any time never ends with what may still become a stop string."""
    stops, chunks = case
    stop, shown = StopStrings(stops), ""
    for chunk in chunks:
        shown += stop.push(chunk)
        if not stop.stopped:
            ends = [shown[-n:] for s in stops for n in range(1, len(s)) if n <= len(shown)]
            held = "".join(chunks)[len(shown) :]
            assert not any(
                s.startswith(end) and held.startswith(s[len(end) :]) for end in ends for s in stops
            )


def test_stop_string_in_the_middle_of_a_stream() -> None:
    stop = StopStrings(["DEFGHIJ"])
    assert [stop.push(x) for x in ("ABC", "DEF", "GH", "IJKLM", "N")] == ["ABC", "", "", "", ""]
    assert (stop.stopped, stop.finish()) == ("DEFGHIJ", "")


def test_held_text_is_flushed() -> None:
    stop = StopStrings(["DEFGHIJ"])
    assert stop.push("ABCDEF") == "ABC"
    assert (stop.finish(), stop.finish()) == ("DEF", "")
    assert StopStrings([]).push("text") == "text"


def test_empty_stop_string() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["a", ""])
