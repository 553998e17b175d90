"""Dumps for people: a summary, a filtered listing, a DOT graph, an HTML page.

Figures are for the typical symbols (their hints) and the splits' start. A dump
of 400,000 instructions stays usable: the summary comes first, listings can be
filtered, and pages say how many rows they leave out.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape

from flashrt.ir import logical, micro, physical, picture
from flashrt.ir.text import Level, show_instr, show_node
from flashrt.ir.types import Dim, Env, evaluate, show

Record = logical.Node | physical.Node | micro.Instr
CAP = 5000  # rows of an HTML page


def typical(level: Level) -> Env:
    """The symbols at their hints and the splits at their start."""
    env = {s.name: s.hint for s in level.symbols}
    if not isinstance(level, logical.Graph):
        env |= {s.name: s.start for s in level.splits}
    return env


def records(level: Level) -> Sequence[Record]:
    """The nodes or instructions of a level."""
    return level.instrs if isinstance(level, micro.Stream) else level.nodes


def kind_of(record: Record) -> str:
    """The operation, the kernel, or the instruction's name."""
    if isinstance(record, logical.Node | physical.Node):
        return record.op
    return record.kernel if isinstance(record, micro.Dispatch) else type(record).__name__.lower()


def name_of(record: Record) -> str:
    """The node's name, or that of the node an instruction comes from."""
    return record.name if isinstance(record, logical.Node | physical.Node) else record.node


def line_of(record: Record) -> str:
    """The record as the text form writes it."""
    if isinstance(record, logical.Node | physical.Node):
        return show_node(record)
    return show_instr(record)


def _title(level: Level) -> str:
    kind = {logical.Graph: "logical", physical.Graph: "physical", micro.Stream: "micro"}[type(level)]
    return f"{kind} {level.name}"


# ---- summary -------------------------------------------------------------------------
@dataclass(slots=True)
class _Total:
    """Sums over records: how many, microseconds, bytes."""

    count: int = 0
    est: float = 0.0
    bytes: float = 0.0

    def add(self, record: Record, env: Env) -> None:
        self.count += 1
        self.est += _figure(getattr(record, "est", 0), env)
        self.bytes += _figure(getattr(record, "bytes", 0), env)


def _figure(value: Dim, env: Env) -> float:
    """The number for typical symbols; a symbol the level doesn't declare counts as 0."""
    try:
        return evaluate(value, env)
    except KeyError as missing:
        return _figure(value, {**env, missing.args[0]: 0})


def totals(level: Level) -> dict[str, dict[str, _Total]]:
    """Sums by kernel (or operation), by lane and by device; the last two where the level has them."""
    env = typical(level)
    found: dict[str, dict[str, _Total]] = {"kernel": {}, "lane": {}, "device": {}}
    for record in records(level):
        keys = {"kernel": kind_of(record)}
        if not isinstance(record, logical.Node):
            keys["device"] = record.device
        if not isinstance(record, logical.Node | physical.Node):
            keys["lane"] = f"{record.device} {record.lane}"
        for group, key in keys.items():
            found[group].setdefault(key, _Total()).add(record, env)
    return {group: rows for group, rows in found.items() if rows}


def summary(level: Level) -> str:
    """Counts, estimates and bytes by kernel, lane and device, largest first, as lines of text."""
    what = "instructions" if isinstance(level, micro.Stream) else "nodes"
    at = " ".join(f"{name}={value}" for name, value in typical(level).items())
    lines = [f"{_title(level)}: {len(records(level)):,} {what}" + (f"; figures for {at}" if at else "")]
    for group, rows in totals(level).items():
        width = max(len(group), *map(len, rows))
        lines += ["", f"{group:{width}}  {'count':>9}  {'est us':>12}  {'bytes':>15}"]
        ranked = sorted(rows.items(), key=lambda row: (-row[1].est, -row[1].count, row[0]))
        lines += [f"{k:{width}}  {t.count:>9,}  {t.est:>12,.1f}  {t.bytes:>15,.0f}" for k, t in ranked]
    return "\n".join(lines) + "\n"


# ---- listing -------------------------------------------------------------------------
def matching(level: Level, node: str = "", kernel: str = "") -> Iterator[tuple[int, Record]]:
    """(index, record) of what matches both globs; an empty glob matches all.

    node: of the node's name, of the value it is a shard of, or of the node an instruction comes from.
    kernel: of the operation, the kernel, or the instruction's name (`transfer`).
    """
    for at, record in enumerate(records(level)):
        named = [name_of(record), record.of] if isinstance(record, physical.Node) else [name_of(record)]
        if node and not any(fnmatchcase(name, node) for name in named):
            continue
        if not kernel or fnmatchcase(kind_of(record), kernel):
            yield at, record


def filtered(level: Level, node: str = "", kernel: str = "") -> Iterator[str]:
    """The lines of what matches (see `matching`), each with its index before it."""
    for at, record in matching(level, node, kernel):
        yield f"{at:>6}  {line_of(record)}"


# ---- DOT -----------------------------------------------------------------------------
def to_dot(level: Level) -> str:
    """The level as a Graphviz graph; physical and micro have a cluster for each device.

    Edges are values; of a stream, they are lane order (grey) and ticks (dotted: of the step before).
    """
    body = _stream_dot(level) if isinstance(level, micro.Stream) else _graph_dot(level)
    head = [f"digraph {_quoted(_title(level))} {{", "  rankdir=TB; node [shape=box, fontsize=10];"]
    return "\n".join([*head, *body, "}"]) + "\n"


def _quoted(*lines: str) -> str:
    safe = (x.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for x in lines)
    return '"' + "\\n".join(safe) + '"'


def _graph_dot(graph: logical.Graph | physical.Graph) -> Iterator[str]:
    ids = {i.name: f"in{at}" for at, i in enumerate(graph.inputs)}
    for i in graph.inputs:
        yield f"  {ids[i.name]} [shape=ellipse, label={_quoted(i.name, str(i.type))}];"
    nodes: tuple[logical.Node | physical.Node, ...] = graph.nodes
    groups: dict[str, list[str]] = defaultdict(list)
    for at, node in enumerate(nodes):
        ids[node.name] = f"n{at}"
        device = node.device if isinstance(node, physical.Node) else ""
        groups[device].append(f"  n{at} [label={_quoted(node.name, f'{node.op} {node.type}')}];")
    yield from _clusters(groups)
    for node in nodes:
        sources = dict.fromkeys(ids[i[1:]] for i in node.inputs if i[:1] == "%" and i[1:] in ids)
        yield from (f"  {source} -> {ids[node.name]};" for source in sources)


def _stream_dot(stream: micro.Stream) -> Iterator[str]:
    groups: dict[str, list[str]] = defaultdict(list)
    for at, instr in enumerate(stream.instrs):
        label = _quoted(f"{at} {kind_of(instr)}", f"{instr.lane} {instr.node}".rstrip())
        groups[instr.device].append(f"  n{at} [label={label}];")
    yield from _clusters(groups)
    last: dict[tuple[str, str], int] = {}
    setter = {instr.signals: at for at, instr in enumerate(stream.instrs)}
    for at, instr in enumerate(stream.instrs):
        lane = (instr.device, instr.lane)
        if lane in last:
            yield f"  n{last[lane]} -> n{at} [color=grey];"
        last[lane] = at
        for wait in instr.waits:
            if wait.tick in setter:
                style = ", style=dotted, constraint=false" if wait.step else ""
                yield f'  n{setter[wait.tick]} -> n{at} [label="!{wait.tick}"{style}];'


def _clusters(groups: dict[str, list[str]]) -> Iterator[str]:
    for number, (device, lines) in enumerate(groups.items()):
        if not device:
            yield from lines
            continue
        yield f"  subgraph cluster_{number} {{"
        yield f"    label={_quoted(device)};"
        yield from (f"  {line}" for line in lines)
        yield "  }"


# ---- HTML ----------------------------------------------------------------------------
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #1b1b1b; background: #fff }
table { border-collapse: collapse; margin: 1em 0 } pre { background: #f4f4f2; padding: .8em; overflow: auto }
th, td { border: 1px solid #ddd; padding: .2em .5em; text-align: left; vertical-align: top }
th { background: #eee; position: sticky; top: 0 } td.n { text-align: right; color: #777 }
tr.step:hover { background: #fffbe0 } code { font-size: 12px } small { color: #666; display: block }
input { font: inherit; padding: .3em .5em; width: 24em; max-width: 90% }
tr:target { outline: 2px solid #c60 }
"""
_SCRIPT = """
const box = document.getElementById("filter"), rows = [...document.querySelectorAll("tr.step")];
const texts = rows.map(r => r.textContent.toLowerCase()), told = document.getElementById("told");
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  rows.forEach((row, i) => {
    const keep = words.every(w => texts[i].includes(w));
    row.hidden = !keep;
    shown += keep;
  });
  told.textContent = shown + " of " + rows.length + " rows";
});
"""


def to_html(level: Level, *, node: str = "", kernel: str = "", cap: int = CAP) -> str:
    """A page that needs nothing else: the summary, then one row for each node or instruction.

    A logical graph is a table; a physical graph has a picture and a column for each device, a stream a
    column for each lane. node, kernel: globs, see `matching`. cap: most rows; what is left out is said.
    """
    found = list(matching(level, node, kernel))
    title = escape(_title(level))
    return "".join(
        [
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f"<style>{_STYLE}{picture.STYLE}</style></head><body><h1>{title}</h1><pre>{escape(summary(level))}</pre>",
            _picture(level) if not node and not kernel else "",
            f"<p>{_told(len(found), cap)}</p>",
            '<p><input id="filter" placeholder="filter: words that a row must hold"> ',
            '<span id="told"></span></p>\n',
            *_table(level, found[:cap]),
            f"<script>{_SCRIPT}</script></body></html>\n",
        ]
    )


def _picture(level: Level) -> str:
    if not isinstance(level, physical.Graph):
        return ""
    env = typical(level)
    return picture.to_svg(level, lambda value: _figure(value, env))


def _told(count: int, cap: int) -> str:
    if count <= cap:
        return f"{count:,} rows."
    return (
        f"The first {cap:,} of {count:,} rows; {count - cap:,} are left out. "
        "Narrow them down by node or kernel."
    )


def _table(level: Level, rows: list[tuple[int, Record]]) -> Iterator[str]:
    columns, cells = _columns(level)
    yield "<table><thead><tr><th>#</th>"
    yield "".join(f"<th>{head}</th>" for head in columns)
    yield "</tr></thead><tbody>\n"
    for at, record in rows:
        yield f'<tr class="step" id="r{at}"><td class="n">{at}</td>'
        yield "".join(f"<td>{cell}</td>" for cell in cells(record))
        yield "</tr>\n"
    yield "</tbody></table>"


Cells = Callable[[Record], Iterable[str]]


def _columns(level: Level) -> tuple[list[str], Cells]:
    """The heads, and what gives a record's cells."""
    if isinstance(level, logical.Graph):
        rows = {"%" + node.name: at for at, node in enumerate(level.nodes)}
        return ["name", "op", "inputs", "type", "attributes", "how and where"], lambda r: _described(r, rows)
    env = typical(level)
    if isinstance(level, physical.Graph):
        devices = list(dict.fromkeys([b.device for b in level.budgets] + [n.device for n in level.nodes]))
        heads = [_device_head(device, level) for device in devices]
        return heads, lambda r: _placed(r, devices, lambda n: getattr(n, "device", ""), env)
    lanes = sorted({_lane(i) for i in level.instrs})
    return [escape(lane) for lane in lanes], lambda r: _placed(r, lanes, _lane, env)


def _lane(record: Record) -> str:
    assert not isinstance(record, logical.Node | physical.Node)
    return f"{record.device} {record.lane}"


def _device_head(device: str, graph: physical.Graph) -> str:
    held = [f"<small>{b.peak:,} of {b.limit:,} bytes</small>" for b in graph.budgets if b.device == device]
    return escape(device) + "".join(held)


def _described(record: Record, rows: dict[str, int]) -> Iterator[str]:
    """The cells of a logical node."""
    assert isinstance(record, logical.Node)
    yield escape(record.name)
    yield escape(record.op)
    yield " ".join(
        f'<a href="#r{rows[i]}">{escape(i)}</a>' if i in rows else escape(i) for i in record.inputs
    )
    yield f"<code>{escape(str(record.type))}</code>"
    yield "<br>".join(f"{escape(k)}={escape(_plain(v))}" for k, v in record.attrs)
    facts = [record.numerics, " ".join(record.affinity), record.why, record.origin]
    facts += [f"reads {' '.join(record.reads)}"] * bool(record.reads)
    facts += [f"writes {' '.join(record.writes)}"] * bool(record.writes)
    yield "".join(f"<small>{escape(fact)}</small>" for fact in facts if fact)


def _plain(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _placed(
    record: Record, columns: list[str], column_of: Callable[[Record], str], env: Env
) -> Iterator[str]:
    """An empty cell for each column but the record's own."""
    own = column_of(record)
    for column in columns:
        yield _summed_up(record, env) if column == own else ""


def _summed_up(record: Record, env: Env) -> str:
    """A placed node or an instruction in a few words; its whole line as the tool tip."""
    est = getattr(record, "est", 0)
    facts = [f"{_figure(est, env):,.1f} us"] if est else []
    facts += _facts(record)
    small = "".join(f"<small>{escape(fact)}</small>" for fact in facts)
    words = f"<b>{escape(kind_of(record))}</b> {escape(name_of(record))}"
    return f'<span title="{escape(line_of(record))}">{words}</span>{small}'


def _facts(record: Record) -> Iterator[str]:
    if isinstance(record, logical.Node):
        return
    if isinstance(record, physical.Node):
        if record.shard is not None:
            yield f"[{show(record.shard.lo)}:{show(record.shard.hi)}]"
        if record.because:
            yield record.because
        return
    if record.waits:
        yield "waits " + " ".join(f"!{w.tick}" + (f"@{w.step}" if w.step else "") for w in record.waits)
    if record.signals is not None:
        yield f"signals !{record.signals}"
