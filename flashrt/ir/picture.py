"""A picture of a physical graph: devices as columns, time downwards, transfers as arrows between them.

Layers that are placed alike are drawn once. The result is SVG that stands in a page of `show.to_html`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from flashrt.ir import physical
from flashrt.ir.types import Dim

LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.(\d+)\.")
CAP = 600  # boxes of a picture
WIDTH, GAP, EDGE = 300, 190, 20  # of a column, between two, at the borders
HEAD, ROW, BOX, BAND = 66, 46, 38, 26  # heights: head of a column, a row, a box, a band's title
COLOURS = {"linear": "#dbe9fb", "attention": "#fde6c8", "merge": "#e6e6e6", "sum": "#e6e6e6"}
OTHERS = "#eef5e8"
STYLE = """
.picture { max-width: 100%; height: auto; font: 12px system-ui, sans-serif }
.picture .name { font-weight: 600 } .picture .small { fill: #666; font-size: 10.5px }
.picture .head { font-size: 15px; font-weight: 700 } .picture .band { fill: #888; font-size: 12px }
.picture .way { fill: none; stroke: #c2410c; stroke-width: 1.6 } .picture .tip { fill: #c2410c }
.picture .label { fill: #9a3412; font-size: 10.5px }
"""

Figure = Callable[[Dim], float]


@dataclass(frozen=True, slots=True)
class Band:
    """Nodes that are drawn together, under a title."""

    title: str
    nodes: tuple[physical.Node, ...]


def bands(graph: physical.Graph) -> list[Band]:
    """What comes before the layers, the layers, what comes after; consecutive layers whose nodes differ
    only in their number are one band."""
    before: list[physical.Node] = []
    after: list[physical.Node] = []
    layers: dict[tuple[str, int], list[physical.Node]] = {}
    for node in graph.nodes:
        if found := LAYER.search(node.name):
            # a layer's nodes may stand in the next one's: what another device needs of it, for instance
            layers.setdefault((node.name[: found.end(2)], int(found[3])), []).append(node)
        else:
            (after if layers else before).append(node)
    made: list[tuple[list[int], list[physical.Node]]] = []
    for (_, number), nodes in layers.items():
        if made and _alike(made[-1][1], nodes):
            made[-1][0].append(number)
        else:
            made.append(([number], nodes))
    middle = [Band(_titled(numbers), tuple(nodes)) for numbers, nodes in made]
    return [Band("", tuple(before)), *middle, Band("after the layers" if layers else "", tuple(after))]


def _alike(one: Sequence[physical.Node], other: Sequence[physical.Node]) -> bool:
    return list(map(_signature, one)) == list(map(_signature, other))


def _signature(node: physical.Node) -> tuple[object, ...]:
    return LAYER.sub(r"\1\2.*.", node.name), node.op, node.device, node.shard


def _titled(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"layers {layers[0]} to {layers[-1]}: {len(layers)} times the same"


# ---- where everything stands ---------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Box:
    """A node in its device's column, at a row. y: of its upper edge."""

    node: physical.Node
    column: int
    y: int

    @property
    def x(self) -> int:
        return _x(self.column)


def _x(column: int) -> int:
    return EDGE + column * (WIDTH + GAP)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes, (y, title) of the bands, the height, and how many nodes found no room."""

    boxes: tuple[Box, ...]
    titles: tuple[tuple[int, str], ...]
    height: int
    left_out: int


def lay_out(graph: physical.Graph, devices: Sequence[str]) -> Drawing:
    """Each node stands below what it needs and below what its device does before; transfers take no room."""
    boxes: list[Box] = []
    titles: list[tuple[int, str]] = []
    top, left_out = HEAD, 0
    for band in bands(graph):
        shown = band.nodes[: max(0, CAP - len(boxes))]
        left_out += len(band.nodes) - len(shown)
        if band.title and shown:
            titles.append((top, band.title))
            top += BAND
        rows = _rows(shown, devices)
        boxes += [
            Box(n, devices.index(n.device), top + rows[n.name] * ROW) for n in shown if n.op != "transfer"
        ]
        top += (max(rows.values(), default=-1) + 1) * ROW
    return Drawing(tuple(boxes), tuple(titles), top, left_out)


def _rows(nodes: Sequence[physical.Node], devices: Sequence[str]) -> dict[str, int]:
    """Name → row within the band. A transfer has the row of what it carries."""
    rows: dict[str, int] = {}
    free = dict.fromkeys(devices, 0)
    for node in nodes:
        above = max((rows[i[1:]] for i in node.inputs if i[1:] in rows), default=-1)
        if node.op == "transfer":
            rows[node.name] = max(above, 0)
            continue
        rows[node.name] = max(above + 1, free[node.device])
        free[node.device] = rows[node.name] + 1
    return rows


# ---- drawn ---------------------------------------------------------------------------
def to_svg(graph: physical.Graph, figure: Figure) -> str:
    """The picture. figure: the number of a size or an estimate for typical symbols."""
    devices = list(dict.fromkeys([b.device for b in graph.budgets] + [n.device for n in graph.nodes]))
    drawing = lay_out(graph, devices)
    width = 2 * EDGE + len(devices) * WIDTH + max(0, len(devices) - 1) * GAP
    note = f"<p>{drawing.left_out:,} nodes found no room in the picture.</p>" if drawing.left_out else ""
    return "".join(
        [
            f'<svg class="picture" viewBox="0 0 {width} {drawing.height + EDGE}" width="{width}" role="img">',
            *(_head(device, at, graph, figure, drawing.height) for at, device in enumerate(devices)),
            *(f'<text class="band" x="{EDGE}" y="{y + 17}">{escape(t)}</text>' for y, t in drawing.titles),
            *_ways(graph, drawing, figure),
            *(_box(box, figure) for box in drawing.boxes),
            f"</svg>{note}\n",
        ]
    )


def _head(device: str, column: int, graph: physical.Graph, figure: Figure, height: int) -> str:
    busy = sum(figure(n.est) for n in graph.nodes if n.device == device and n.op != "transfer")
    held = [
        f"{what} {_size(nbytes)}"
        for b in graph.budgets
        for what, nbytes in (
            ("weights", b.weights), ("state", b.state), ("activations", b.activations), ("shared", b.shared),
        )
        if b.device == device and nbytes
    ]  # fmt: skip
    x = _x(column)
    return (
        f'<rect x="{x - 8}" y="4" width="{WIDTH + 16}" height="{height}" rx="8" fill="#f7f7f5"/>'
        f'<text class="head" x="{x}" y="26">{escape(device)}</text>'
        f'<text class="small" x="{x + WIDTH}" y="26" text-anchor="end">{busy:,.1f} µs a step</text>'
        f'<text class="small" x="{x}" y="44">{", ".join(held)}</text>'
    )


def _box(box: Box, figure: Figure) -> str:
    node = box.node
    facts = [f"{figure(node.est):,.1f} µs"]
    if node.bytes != 0:
        facts.append(_size(figure(node.bytes)))
    if node.shard is not None:
        facts.append(f"channels {figure(node.shard.lo):,.0f} to {figure(node.shard.hi):,.0f}")
    told = escape(_cut(" · ".join(facts), 56))
    return (
        f"<g><title>{escape(node.because or node.name)}</title>"
        f'<rect x="{box.x}" y="{box.y}" width="{WIDTH}" height="{BOX}" rx="5" '
        f'fill="{COLOURS.get(node.op, OTHERS)}" stroke="#c8c8c4"/>'
        f'<text x="{box.x + 8}" y="{box.y + 16}"><tspan class="name">{escape(node.op)}</tspan> '
        f"{escape(_short(node))}</text>"
        f'<text class="small" x="{box.x + 8}" y="{box.y + 31}">{told}</text></g>'
    )


def _short(node: physical.Node) -> str:
    """The name without its layer, as far as it fits."""
    name = LAYER.sub(r"\1", node.name)
    return _cut(name, 44 - len(node.op))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(1, length - 1)] + "…"


def _ways(graph: physical.Graph, drawing: Drawing, figure: Figure) -> Iterator[str]:
    """An arrow for each transfer, from what it carries to the first that uses it there."""
    by_name = {n.name: n for n in graph.nodes}
    boxes = {box.node.name: box for box in drawing.boxes}
    users: dict[str, Box] = {}
    for box in reversed(drawing.boxes):
        users |= {i[1:]: box for i in box.node.inputs}
    for node in graph.nodes:
        if node.op != "transfer" or node.name not in users or not node.inputs:
            continue
        source = boxes.get(_origin(node, by_name))
        if source is not None and source.column != users[node.name].column:
            yield _way(source, users[node.name], node, figure)


def _origin(node: physical.Node, by_name: Mapping[str, physical.Node]) -> str:
    """The node whose value a transfer carries, over other transfers."""
    seen = set()
    while node.op == "transfer" and node.inputs and node.name not in seen:
        seen.add(node.name)
        source = by_name.get(node.inputs[0][1:])
        if source is None:
            return ""
        node = source
    return node.name


def _way(source: Box, target: Box, node: physical.Node, figure: Figure) -> str:
    right = target.column > source.column
    x1, y1 = source.x + (WIDTH if right else 0), source.y + BOX * 3 // 4
    x2, y2 = target.x + (0 if right else WIDTH), target.y + BOX // 4
    bend, tip = (60, -7) if right else (-60, 7)
    label = f"{_size(figure(node.bytes))}, {figure(node.est):,.1f} µs"
    return (
        f"<g><title>{escape(node.because or node.name)}</title>"
        f'<path class="way" d="M{x1} {y1} C{x1 + bend} {y1} {x2 - bend} {y2} {x2 + tip} {y2}"/>'
        f'<path class="tip" d="M{x2} {y2} l{tip} -4 v8 z"/>'
        f'<text class="label" x="{x1 + (6 if right else -6)}" y="{y1 - 5}" '
        f'text-anchor="{"start" if right else "end"}">{label}</text></g>'
    )


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"
