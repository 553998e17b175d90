"""Dumps for people: figures add up, filters pick, DOT and HTML are well-formed and carry every name."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings

from flashrt.ir import logical, micro, physical, picture
from flashrt.ir.show import CAP, filtered, records, summary, to_dot, to_html, totals
from flashrt.ir.text import read_logical, read_physical
from flashrt.ir.types import TensorType
from tests.ir.strategies import Level, levels
from tests.ir.streams import streamed

SPLIT = """\
physical two
symbol T lo=1 hi=64 hint=4
split s0 positions=[0,16,32,48,64] start=48
input x f32[T,32]
weight w f32[64,32] sources=[w]
budget cpu:0 limit=1000 weights=400
budget gpu:0 limit=2000
%layers.0.up#0 = linear(%x,@w) f32[T,s0] device=gpu:0 of=layers.0.up shard=[0:s0] est=(s0)us \
because="a <&> b"
%layers.0.up#1 = linear(%x,@w) f32[T,64-s0] device=cpu:0 of=layers.0.up shard=[s0:64] est=(2*T)us because=free
%to = transfer(%layers.0.up#0) f32[T,s0] device=cpu:0 of=layers.0.up shard=[0:s0] est=1us because=merge
%layers.0.up = merge(%to,%layers.0.up#1) f32[T,64] device=cpu:0 of=layers.0.up est=1us because=joined
output y layers.0.up
"""
VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps the rows of the table and what links and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.outside: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [v or "" for k, v in attrs if k in ("src", "href") and not (v or "").startswith("#")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def test_summary_adds_up() -> None:
    """Counts, microseconds and bytes by kernel, lane and device are the sums over the instructions."""
    found = totals(streamed(3))
    for rows in found.values():
        assert sum(t.count for t in rows.values()) == 24
    # per layer: 80 for the prefetch, 1 + T at T=1, s0 at its start 512
    assert found["kernel"]["prefetch"].est == 3 * 80
    assert found["lane"]["cpu:0 compute"].est == 3 * (2 + 512)
    assert found["device"]["cpu:0"].bytes == 3 * 4 * 1024 * 512
    text = summary(streamed(3))
    assert text.startswith("micro streamed: 24 instructions; figures for T=1 s0=512\n")
    assert re.search(r"^linear\.f32 +6 +1,536\.0 +6,291,456$", text, re.MULTILINE)


def test_summary_of_graphs() -> None:
    assert re.search(r"cpu:0 +3 +10\.0 ", summary(read_physical(SPLIT)))
    assert summary(read_logical("logical none")) == "logical none: 0 nodes\n"


def test_undeclared_symbol_counts_as_zero() -> None:
    text = SPLIT.replace("est=(2*T)us", "est=(2*C+5)us")
    assert totals(read_physical(text))["device"]["cpu:0"].est == 7


def test_filter() -> None:
    """Globs of node and kernel, alone and together; each line keeps its index."""
    stream = streamed(12)
    ends = [line for line in filtered(stream, node="layers.1.*")]
    assert [int(line.split()[0]) for line in ends] == [8, 9, 11, 12]
    assert len(list(filtered(stream, kernel="linear*"))) == 24
    assert len(list(filtered(stream, kernel="evict"))) == 12
    assert len(list(filtered(stream, node="layers.1*", kernel="linear*"))) == 6
    assert len(list(filtered(stream))) == len(stream.instrs)
    shards = list(filtered(read_physical(SPLIT), node="layers.0.up"))
    assert [int(line.split()[0]) for line in shards] == [0, 1, 2, 3]


def test_physical_dot() -> None:
    """A cluster for each device, an edge for each value."""
    text = to_dot(read_physical(SPLIT))
    assert text.count("subgraph cluster_") == 2
    assert set(re.findall(r"(\w+) -> (\w+);", text)) == {
        ("in0", "n0"), ("in0", "n1"), ("n0", "n2"), ("n2", "n3"), ("n1", "n3"),
    }  # fmt: skip


def test_micro_dot() -> None:
    """Grey lane order, labelled ticks, dotted ones of the step before."""
    stream = streamed(5)
    text = to_dot(stream)
    assert text.count("[color=grey]") == len(stream.instrs) - 5
    ticks = sum(len(i.waits) for i in stream.instrs)
    assert len(re.findall(r'label="!\d+"', text)) == ticks
    assert text.count("style=dotted") == 4


@given(levels)
@settings(max_examples=50)
def test_anything_shows(level: Level) -> None:
    """Whatever the names: DOT's quotes and braces close, HTML's tags nest, every row is there."""
    dot = re.sub(r'"(?:\\.|[^"\\])*"', "", to_dot(level))
    assert '"' not in dot and dot.count("{") == dot.count("}")
    assert len(Page(to_html(level)).rows) == 1 + len(records(level))
    assert summary(level)
    assert len(list(filtered(level))) == len(records(level))


def test_physical_page() -> None:
    """Devices are columns with their budgets; a node stands in its device's column with its cause."""
    page = Page(to_html(read_physical(SPLIT)))
    head, first, second = page.rows[:3]
    assert head == ["#", "cpu:0400 of 1,000 bytes", "gpu:00 of 2,000 bytes"]
    assert first[1] == "" and first[2] == "linear layers.0.up#048.0 us[0:s0]a <&> b"
    assert second[1].startswith("linear layers.0.up#1") and second[2] == ""
    assert page.outside == []


def test_physical_picture() -> None:
    """Shards of one value side by side; an arrow from what is sent to who uses it; no box for a transfer."""
    graph = read_physical(SPLIT)
    boxes = {box.node.name: box for box in picture.lay_out(graph, ["cpu:0", "gpu:0"]).boxes}
    first, second, merged = (boxes[n] for n in ("layers.0.up#0", "layers.0.up#1", "layers.0.up"))
    assert len(boxes) == 3 and (first.column, second.column, merged.column) == (1, 0, 0)
    assert first.y == second.y < merged.y
    svg = to_html(graph).partition("<svg")[2].partition("</svg>")[0]
    assert svg.count('class="way"') == 1 and svg.count("<rect") == 3 + 2
    arrow = f"M{first.x} {first.y + picture.BOX * 3 // 4}"
    assert arrow in svg and f"{merged.x + picture.WIDTH + 7} {merged.y + picture.BOX // 4}" in svg


def test_layers_placed_alike_are_drawn_once() -> None:
    """A layer that is placed otherwise has its own band, and so has what stands before and after layers."""
    nodes = [
        physical.Node(name, "add", (), TensorType("f32", (1,)), "gpu:0" if odd else "cpu:0", name)
        for name, odd in (
            ("embed", False), ("layers.0.a", False), ("layers.1.a", False), ("layers.0.b", False),
            ("layers.2.a", True), ("layers.1.b", False), ("layers.2.b", False), ("head", False),
        )
    ]  # fmt: skip
    graph = physical.Graph("g", (), (), (), (), (), (), tuple(nodes), ())
    found = [(b.title, [n.name for n in b.nodes]) for b in picture.bands(graph)]
    assert found == [
        ("", ["embed"]),
        ("layers 0 to 1: 2 times the same", ["layers.0.a", "layers.0.b"]),
        ("layer 2", ["layers.2.a", "layers.2.b"]),
        ("after the layers", ["head"]),
    ]


def test_a_long_graph_is_cut() -> None:
    nodes = tuple(
        physical.Node(f"n{i}", "add", (), TensorType("f32", (1,)), "cpu:0", f"n{i}")
        for i in range(picture.CAP + 7)
    )
    text = to_html(physical.Graph("g", (), (), (), (), (), (), nodes, ()))
    assert "7 nodes found no room in the picture." in text
    assert "<svg" not in to_html(physical.Graph("g", (), (), (), (), (), (), nodes, ()), node="n1")


def test_micro_page() -> None:
    """Lanes are columns; rows can be filtered before they are made."""
    stream = streamed(3)
    page = Page(to_html(stream))
    assert page.rows[0] == ["#", "cpu:0 compute", "cpu:0 copy_out", "gpu:0 compute", "gpu:0 copy_in",
                            "gpu:0 copy_out"]  # fmt: skip
    for instr, row in zip(stream.instrs, page.rows[1:], strict=True):
        (own,) = [head for head, cell in zip(page.rows[0][1:], row[1:], strict=True) if cell]
        assert own == f"{instr.device} {instr.lane}"
    assert len(Page(to_html(stream, kernel="linear*")).rows) == 1 + 6


def test_logical_page_of_2000_nodes() -> None:
    """All of them, with links from inputs to where they are made."""
    nodes = tuple(
        logical.Node(f"n{i}", "add", (f"%n{i - 1}" if i else "%x", "%x"), TensorType("f32", (1,)))
        for i in range(2000)
    )
    text = to_html(logical.Graph("long", (), (), (), (), nodes, ()))
    page = Page(text)
    assert len(page.rows) == 2001 and page.outside == []
    assert '<a href="#r1233">%n1233</a>' in text
    assert "2,000 rows." in text


@pytest.mark.parametrize("layers", [700, pytest.param(50_000, marks=pytest.mark.slow)])
def test_long_streams_are_capped(layers: int) -> None:
    """The summary counts everything; the rows stop at the cap, and the page says so."""
    stream = streamed(layers)
    text = to_html(stream)
    count = len(stream.instrs)
    assert f"micro streamed: {count:,} instructions" in text
    assert f"The first {CAP:,} of {count:,} rows; {count - CAP:,} are left out." in text
    assert text.count('<tr class="step"') == CAP
    assert len(text) < 4_000_000


def test_nothing_is_fetched() -> None:
    """A page works without a network."""
    stream = micro.Stream("s", (), (), (), (), (), (), (), (), ())
    for level in (stream, physical.Graph("p", (), (), (), (), (), (), (), ())):
        text = to_html(level)
        assert "http" not in text and "@import" not in text and "url(" not in text
