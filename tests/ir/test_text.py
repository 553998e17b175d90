"""What prints reads back equal; what doesn't parse says where and why, and raises nothing but ParseError."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashrt.errors import ParseError
from flashrt.ir import logical, micro
from flashrt.ir.laws import violations
from flashrt.ir.text import from_text, read_logical, read_micro, read_physical, show_instr, to_text
from flashrt.ir.types import TensorType, sym
from tests.ir.strategies import Level, levels

SAMPLE = """\
micro tiny
symbol T lo=1 hi=64 hint=4
split s0 positions=[0,16,32] start=16
weight "odd name" f32[64,32] sources=[w,"a,b"] layout=q4.16x32
state kv f32[P,32]
slot %0 cpu:0 f32[T,32] input=x
slot %1 cpu:0 f32[T,32] offset=0 alias=%0
block "odd name" gpu:0 lo=0 hi=64 bytes=8192 home=resident
arena cpu:0 bytes=100
prefetch device=gpu:0 lane=copy_in waits=[!9@-1] signals=!1 block=w bytes=8192*s0 est=82us
dispatch device=cpu:0 lane=compute kernel=linear.q4+bias args=[%0[0:s0],@w,@"odd name"[s0:64]] dst=%1 \
attrs={act="silu",by=0.5,dims=[1,(T+1),[]],none=null} est=(2*T+0.5)us region=3
output y %1
"""


@given(levels)
@settings(max_examples=100)
def test_round_trip(level: Level) -> None:
    """Graphs and streams with every field and odd names read back equal, and print the same again."""
    text = to_text(level)
    assert from_text(text, path="round") == level
    assert to_text(from_text(text)) == text


def test_line_forms() -> None:
    """The forms that people write: comments, blank lines, fields in any order, Windows line ends."""
    plain = from_text(SAMPLE)
    assert from_text("# a note\n\n" + SAMPLE.replace("\n", "\r\n")) == plain
    assert from_text(SAMPLE.replace("lo=1 hi=64", "hi=64 lo=1")) == plain
    assert to_text(plain) == SAMPLE


def test_instruction_line() -> None:
    """Defaults are left out; sizes print as expressions."""
    instr = micro.Transfer(
        device="gpu:0", lane="copy_out", waits=(micro.Wait(3), micro.Wait(2, -1)), signals=4,
        src=micro.SlotRef(9, 0, sym("s3")), dst=micro.SlotRef(10, 0, sym("s3")), to="cpu:0", est=13,
    )  # fmt: skip
    assert show_instr(instr) == (
        "transfer device=gpu:0 lane=copy_out waits=[!3,!2@-1] signals=!4 "
        "src=%9[0:s3] dst=%10[0:s3] to=cpu:0 est=13us"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("frobnicate x", "unknown line 'frobnicate'; known: symbol, split, .*dispatch"),
        ("slot %3 cpu:0 f32[T] ofset=1", "unknown field 'ofset=1'; slot has: id, device, type, offset"),
        ("slot %3 cpu:0", "slot lacks type"),
        ("slot three cpu:0 f32[T]", "invalid literal"),
        ("slot %3 cpu:0 f33[T]", "'f33.T.' isn't a tensor type; dtypes: f64"),
        ("slot %3 cpu:0 f32[T T]", "isn't a tensor type"),
        ("evict device=x lane=y block=b block=b", "field 'block' stands twice"),
        ("evict device=x lane=y", "evict lacks block"),
        ("evict device=x lane=y block=b waits=[3]", "'3' isn't a tick"),
        ("evict device=x lane=y block=b waits=!3", "expected a list"),
        ("evict device=x lane=y block=b est=3", "expected microseconds"),
        ("evict device=x lane=y block=b est=(ceildiv(4,0))us", "zero"),
        ("evict device=x lane=y block=b est=ceildiv(T)us", "ceildiv takes 2"),
        ("evict device=x lane=y block=b signals=!3@-1", "a signal is of this step"),
        ("bias device=x lane=y block=%3", "'%3' isn't a block"),
        ("dispatch device=x lane=y kernel=k args=[3]", "'3' is neither a slot"),
        ("dispatch device=x lane=y kernel=k args=[%3[0:s]", "is neither a slot"),
        ("dispatch device=x lane=y kernel=k args=[] attrs={a=nope}", "'nope' isn't a value"),
        ("dispatch device=x lane=y kernel=k args=[] attrs={a=1,a=2}", "attribute 'a' stands twice"),
        ("arena cpu:0", "arena"),
        ("%a = add(%b) f32[T]", "a micro text has no nodes"),
        ('slot %3 "cpu f32[T]', ""),
    ],
)
def test_parse_error(line: str, message: str) -> None:
    """The message gives path and line, what is wrong, and what is known."""
    with pytest.raises(ParseError) as caught:
        from_text(SAMPLE + line + "\n", path="some/file.micro")
    number = SAMPLE.count("\n") + 1
    assert caught.value.what.startswith(f"some/file.micro:{number}: ")
    assert re.search(message, caught.value.what)
    assert line in caught.value.lines


@pytest.mark.parametrize("text", ["", "\n", "hello", "micro", "micro a b", 'micro "a', "logical"])
def test_no_header(text: str) -> None:
    with pytest.raises(ParseError):
        from_text(text)


def test_wrong_level() -> None:
    """Each reader takes its own level only."""
    assert read_micro(SAMPLE).name == "tiny"
    with pytest.raises(ParseError, match="x: this is a micro text, expected a logical one"):
        read_logical(SAMPLE, path="x")
    with pytest.raises(ParseError, match="expected a physical one"):
        read_physical(SAMPLE)


def read_or_refuse(text: str) -> None:
    """Reads a text; ParseError is the only error allowed. What was read obeys the round trip,
    and the laws can be asked about it."""
    try:
        level = from_text(text)
    except ParseError:
        return
    assert from_text(to_text(level)) == level
    violations(level)


JUNK = st.text(max_size=5) | st.sampled_from(
    ["[", "]", "(", ")", '"', "\\", "%", "@", "!", ",", "=", ":", " ", "\n", "-", "*", "(" * 300, "0" * 5000,
     "nan", "1e999", "None", "if", "ceildiv(1,0)", "T", "\u2028", "'", "max()", "[[", "{"]
)  # fmt: skip


@given(levels, st.data())
@settings(max_examples=100)
def test_mutated_text(level: Level, data: st.DataObject) -> None:
    """Cutting out and putting in pieces never raises anything but ParseError."""
    text = data.draw(st.sampled_from([SAMPLE, to_text(level)]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(JUNK) + text[at + data.draw(st.integers(0, 4)) :]
    read_or_refuse(text)


@given(st.sampled_from(["logical", "physical", "micro"]), st.text(max_size=60))
@example("micro", "evict device=x lane=y block=b est=" + "(" * 400 + "us")
@example("micro", "slot %" + "9" * 5000 + " a f32[1]")
def test_garbage(head: str, text: str) -> None:
    read_or_refuse(f"{head} x\n{text}")


def test_odd_names_stand_in_quotes() -> None:
    """Names that aren't plain words are JSON strings wherever they stand."""
    node = logical.Node('a "b"', "op (x)", ("%c, d", "@e) f"), TensorType("f32", ()))
    graph = logical.Graph("g h", (), (), (), (), (node,), ())
    text = to_text(graph)
    assert text == 'logical "g h"\n%"a \\"b\\"" = "op (x)"(%"c, d",@"e) f") f32[]\n'
    assert from_text(text) == graph
