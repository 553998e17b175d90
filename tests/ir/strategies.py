"""Random sizes, graphs and streams that use every field: what the text forms must carry."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from hypothesis import strategies as st

from flashrt.ir import logical, micro, physical
from flashrt.ir.types import (
    DTYPES,
    Dim,
    Input,
    Output,
    State,
    Symbol,
    TensorType,
    Weight,
    attrs,
    ceildiv,
    maximum,
    minimum,
    sym,
)

Level = logical.Graph | physical.Graph | micro.Stream

odd_names = st.text(max_size=6) | st.sampled_from(
    ['a b', 'say "x"', "back\\slash", "kernel(x) f32[1]", "a,b", "x]", "{k=v}", "# no comment", "%3", "@w",
     "", "línea·é", "two\nlines", "tab\t", "\u2028", "a = b(c)", "\x85", "'", "layers.3.mlp[0:4]"]
)  # fmt: skip
names = st.sampled_from(["x", "layers.3.mlp.up", "cpu:0", "up#0@gpu:1", "q4.16x32+bias"]) | odd_names
symbols = st.sampled_from(["T", "N", "s0", "_a1", "max"])
counts = st.integers(0, 10**6)


def dims(depth: int = 3) -> st.SearchStrategy[Dim]:
    """Sizes: numbers, symbols, sums, products and calls."""
    leaf = (
        st.integers(-(10**6), 10**6) | symbols.map(sym) | st.sampled_from([0.5, 0.1, 1e-7, 2.0, 1e20, -3.25])
    )
    return st.recursive(leaf, _larger, max_leaves=depth)


def _larger(inner: st.SearchStrategy[Dim]) -> st.SearchStrategy[Dim]:
    pair = st.tuples(inner, inner)
    return (
        pair.map(lambda p: p[0] + p[1])
        | pair.map(lambda p: p[0] * p[1])
        | pair.map(lambda p: p[0] - p[1])
        | pair.map(lambda p: maximum(*p))
        | pair.map(lambda p: minimum(*p))
        | st.tuples(inner, st.integers(1, 64)).map(lambda p: ceildiv(*p))
    )


def tuples_of(each: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(each, max_size=most).map(tuple)


types = st.builds(TensorType, st.sampled_from(list(DTYPES)), tuples_of(dims(2)))
_leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | odd_names | symbols.map(sym)
)
values = st.recursive(_leaves, lambda v: tuples_of(v), max_leaves=4)
ends = st.none() | st.tuples(dims(2), dims(2))
slot_refs = st.builds(lambda n, e: micro.SlotRef(n, *(e or (None, None))), counts, ends)
block_refs = st.builds(lambda n, e: micro.BlockRef(n, *(e or (None, None))), names.filter(bool), ends)

# what a field of each annotation may hold; "name" and "inputs" of nodes need more, see below
ANNOTATED: dict[str, st.SearchStrategy[Any]] = {
    "str": names,
    "int": counts,
    "int | None": st.none() | counts,
    "Dim": dims(),
    "TensorType": types,
    "Attrs": st.dictionaries(symbols, values, max_size=3).map(lambda d: attrs(**d)),
    "tuple[str, ...]": tuples_of(names),
    "tuple[int, ...]": tuples_of(counts),
    "tuple[Wait, ...]": tuples_of(st.builds(micro.Wait, counts, st.sampled_from([0, -1]))),
    "tuple[Arg, ...]": tuples_of(slot_refs | block_refs),
    "SlotRef": slot_refs,
    "SlotRef | None": st.none() | slot_refs,
    "BlockRef": block_refs,
    "Range | None": st.none() | st.builds(physical.Range, dims(2), dims(2)),
}


def record(kind: type, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Every field of a record: its default or a value of its annotation."""
    chosen = {}
    for field in fields(kind):
        strategy = given.get(field.name, ANNOTATED[str(field.type)])
        chosen[field.name] = strategy if field.default is MISSING else st.just(field.default) | strategy
    return st.builds(kind, **chosen)


operands = tuples_of(st.tuples(st.sampled_from("%@"), names).map("".join))
instructions = st.one_of(*(record(kind) for kind in micro.INSTRUCTIONS))
sizes = tuples_of(st.tuples(names, counts), most=2)
PARTS: dict[str, st.SearchStrategy[Any]] = {
    "name": names,
    "symbols": tuples_of(record(Symbol, name=symbols)),
    "splits": tuples_of(record(physical.Split, name=symbols), most=2),
    "inputs": tuples_of(record(Input), most=2),
    "weights": tuples_of(record(Weight), most=2),
    "states": tuples_of(record(State), most=2),
    "budgets": tuples_of(record(physical.Budget), most=2),
    "slots": tuples_of(record(micro.Slot)),
    "blocks": tuples_of(record(micro.Block), most=2),
    "instrs": tuples_of(instructions, most=4),
    "outputs": tuples_of(record(Output), most=2),
    "arenas": sizes,
    "rings": sizes,
}


def level(kind: type, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        kind, **{f.name: given[f.name] if f.name in given else PARTS[f.name] for f in fields(kind)}
    )


logical_graphs = level(logical.Graph, nodes=tuples_of(record(logical.Node, inputs=operands)))
physical_graphs = level(physical.Graph, nodes=tuples_of(record(physical.Node, inputs=operands)))
streams = level(micro.Stream)
levels: st.SearchStrategy[Level] = logical_graphs | physical_graphs | streams
