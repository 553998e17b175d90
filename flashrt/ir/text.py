"""Printing and parsing of the three levels. What prints reads back equal.

A file is a header line (`logical smollm2`) and one line a record; `#` starts a
comment line. Fields print as `key=value` in the order of the dataclass, and are
left out when they hold their default, so printing and parsing both derive from
the fields. How a field prints is decided by its annotation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, fields
from functools import cache, lru_cache
from typing import Any, TypeVar

from flashrt.errors import ParseError
from flashrt.ir import logical, micro, physical
from flashrt.ir.types import (
    SYMBOL,
    Attrs,
    Expr,
    Input,
    Output,
    State,
    Symbol,
    Value,
    Weight,
    read_dim,
    read_type,
    show,
    split_top,
)

Level = logical.Graph | physical.Graph | micro.Stream
L = TypeVar("L", logical.Graph, physical.Graph, micro.Stream)

_BARE = re.compile(r"[A-Za-z0-9_./+:#@%-]+\Z")
_QUOTED = r'"(?:\\.|[^"\\])*"'
_TOKEN = re.compile(rf'(?:[^\s"]|{_QUOTED})+')


def _tokens(line: str) -> list[str]:
    """The line cut at blanks outside quotes."""
    words = line.split()
    if "\\" not in line and not any(word.count('"') % 2 for word in words):
        return words  # no blank in quotes: the usual case, and several times as fast
    if _TOKEN.sub("", line).strip():
        raise ValueError("a quoted name isn't closed")
    return _TOKEN.findall(line)


# ---- one codec per annotation: (print, parse) --------------------------------
def _word(text: str) -> str:
    return text if _BARE.match(text) else json.dumps(text, ensure_ascii=False)


def _unword(text: str) -> str:
    if text.startswith('"'):
        got = json.loads(text)
        assert isinstance(got, str)
        return got
    if not _BARE.match(text):
        raise ValueError(f"{text!r} isn't a name; quote it")
    return text


def _listed(text: str) -> list[str]:
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError(f"expected a list [..], got {text!r}")
    return split_top(text[1:-1])


def _range(text: str) -> tuple[Any, Any]:
    parts = split_top(text, ":")
    if len(parts) != 2:
        raise ValueError(f"expected lo:hi, got {text!r}")
    return read_dim(parts[0]), read_dim(parts[1])


def _show_ref(head: str, lo: Any, hi: Any) -> str:
    return head if lo is None else f"{head}[{show(lo)}:{show(hi)}]"


def _show_arg(arg: micro.Arg) -> str:
    if isinstance(arg, micro.SlotRef):
        return _show_ref(f"%{arg.slot}", arg.lo, arg.hi)
    return _show_ref(f"@{_word(arg.block)}", arg.lo, arg.hi)


_ARG = re.compile(rf'([%@])({_QUOTED}|[^\["]*)(?:\[(.*)\])?\Z')


def _read_arg(text: str) -> micro.Arg:
    match = _ARG.match(text)
    if match:
        lo, hi = (None, None) if match[3] is None else _range(match[3])
        if match[1] == "@":
            return micro.BlockRef(_unword(match[2]), lo, hi)
        if match[2].isdecimal():
            return micro.SlotRef(int(match[2]), lo, hi)
    raise ValueError(f"{text!r} is neither a slot (%7) nor a block (@name)")


def _read_slot(text: str) -> micro.SlotRef:
    arg = _read_arg(text)
    if not isinstance(arg, micro.SlotRef):
        raise ValueError(f"{text!r} isn't a slot")
    return arg


def _read_block(text: str) -> micro.BlockRef:
    arg = _read_arg(text)
    if not isinstance(arg, micro.BlockRef):
        raise ValueError(f"{text!r} isn't a block")
    return arg


def _show_wait(wait: micro.Wait) -> str:
    return f"!{wait.tick}" + (f"@{wait.step}" if wait.step else "")


def _read_wait(text: str) -> micro.Wait:
    match = re.match(r"!(\d+)(?:@(-\d+))?\Z", text)
    if not match:
        raise ValueError(f"{text!r} isn't a tick (!3 or !3@-1)")
    return micro.Wait(int(match[1]), int(match[2] or 0))


def _show_value(value: Value) -> str:
    if isinstance(value, Expr):
        return f"({show(value)})"
    if isinstance(value, tuple):
        return f"[{','.join(_show_value(v) for v in value)}]"
    return json.dumps(value, ensure_ascii=False)


def _read_value(text: str) -> Value:
    if text.startswith("(") and text.endswith(")"):
        return read_dim(text[1:-1])
    if text.startswith("["):
        return tuple(_read_value(v) for v in _listed(text))
    try:
        value = json.loads(text, parse_constant=_constant)
    except json.JSONDecodeError:
        raise ValueError(f"{text!r} isn't a value") from None
    assert value is None or isinstance(value, bool | int | float | str)
    return value


def _constant(text: str) -> float:
    if text == "NaN":
        raise ValueError("NaN can't be an attribute: it isn't equal to itself")
    return float(text)


def _show_attrs(values: Attrs) -> str:
    return "{" + ",".join(f"{k}={_show_value(v)}" for k, v in values) + "}"


@lru_cache(maxsize=1 << 14)
def _read_attrs(text: str) -> Attrs:
    if not (text.startswith("{") and text.endswith("}")):
        raise ValueError(f"expected attributes {{k=v,..}}, got {text!r}")
    found: dict[str, Value] = {}
    for part in split_top(text[1:-1]):
        key, _, value = part.partition("=")
        if not SYMBOL.match(key):
            raise ValueError(f"{key!r} isn't an attribute's name")
        if key in found:
            raise ValueError(f"attribute {key!r} stands twice")
        found[key] = _read_value(value)
    return tuple(sorted(found.items()))


def _read_us(text: str) -> Any:
    if not text.endswith("us"):
        raise ValueError(f"expected microseconds (82us), got {text!r}")
    return read_dim(text[:-2].removeprefix("(").removesuffix(")") if text.startswith("(") else text[:-2])


def _show_us(value: Any) -> str:
    return f"({show(value)})us" if isinstance(value, Expr) else f"{show(value)}us"


def _read_tick(text: str) -> int:
    wait = _read_wait(text)
    if wait.step:
        raise ValueError("a signal is of this step: !3")
    return wait.tick


_WORDS = (lambda v: f"[{','.join(_word(w) for w in v)}]", lambda t: tuple(_unword(w) for w in _listed(t)))
_CODECS: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "str": (_word, _unword),
    "int": (str, int),
    "int | None": (str, int),
    "Dim": (show, read_dim),
    "TensorType": (str, read_type),
    "Attrs": (_show_attrs, _read_attrs),
    "tuple[str, ...]": _WORDS,
    "tuple[int, ...]": (lambda v: f"[{','.join(map(str, v))}]", lambda t: tuple(map(int, _listed(t)))),
    "tuple[Wait, ...]": (
        lambda v: f"[{','.join(map(_show_wait, v))}]",
        lambda t: tuple(map(_read_wait, _listed(t))),
    ),
    "tuple[Arg, ...]": (
        lambda v: f"[{','.join(map(_show_arg, v))}]",
        lambda t: tuple(map(_read_arg, _listed(t))),
    ),
    "SlotRef": (_show_arg, _read_slot),
    "SlotRef | None": (_show_arg, _read_slot),
    "BlockRef": (_show_arg, _read_block),
    "Range | None": (lambda v: _show_ref("", v.lo, v.hi), lambda t: physical.Range(*_range(t[1:-1]))),
    "us": (_show_us, _read_us),
    "tick": (lambda v: f"!{v}", _read_tick),
    "slot": (lambda v: f"%{v}", lambda t: _read_slot(t).slot),
}


def _codec(field: Field[Any]) -> tuple[Callable[[Any], str], Callable[[str], Any]]:
    special = {"est": "us", "signals": "tick", "alias": "slot"}.get(field.name)
    return _CODECS[special or str(field.type)]


_FIELDS: dict[type, dict[str, tuple[Field[Any], Callable[[Any], str], Callable[[str], Any]]]] = {}


def _fields(kind: type) -> dict[str, tuple[Field[Any], Callable[[Any], str], Callable[[str], Any]]]:
    if kind not in _FIELDS:
        _FIELDS[kind] = {f.name: (f, *_codec(f)) for f in fields(kind)}
    return _FIELDS[kind]


def _show_fields(record: Any, skip: tuple[str, ...]) -> str:
    out = ""
    for name, (field, show_one, _) in _fields(type(record)).items():
        value = getattr(record, name)
        if name not in skip and value != field.default:
            out += f" {name}={show_one(value)}"
    return out


def _read_fields(kind: type, tokens: Iterable[str], known: dict[str, Any]) -> Any:
    for token in tokens:
        key, value = _read_field(kind, token)
        if key in known:
            raise ValueError(f"field {key!r} stands twice")
        known[key] = value
    if missing := [name for name in _required(kind) if name not in known]:
        raise ValueError(f"{kind.__name__.lower()} lacks {', '.join(missing)}")
    return kind(**known)


@lru_cache(maxsize=1 << 14)  # most fields of a stream stand in hundreds of its lines
def _read_field(kind: type, token: str) -> tuple[str, Any]:
    key, equals, text = token.partition("=")
    table = _fields(kind)
    if key not in table or not equals:
        raise ValueError(f"unknown field {token!r}; {kind.__name__.lower()} has: {', '.join(table)}")
    return key, table[key][2](text)


@cache
def _required(kind: type) -> tuple[str, ...]:
    return tuple(name for name, (field, *_) in _fields(kind).items() if field.default is MISSING)


# ---- lines ---------------------------------------------------------------------
_Node = logical.Node | physical.Node
_NODE_HEAD = ("name", "op", "inputs", "type")


def show_node(node: _Node) -> str:
    """`%name = op(%a,@w) f32[T,8] key=value …`"""
    args = ",".join(_sigil(a) for a in node.inputs)
    return f"%{_word(node.name)} = {_word(node.op)}({args}) {node.type}{_show_fields(node, _NODE_HEAD)}"


def _sigil(name: str) -> str:
    return name[:1] + _word(name[1:])


_NAME = rf'(?:{_QUOTED}|[^\s"(),]+)'
_NODE = re.compile(
    rf"%({_NAME}) = ({_NAME})\(((?:[%@]{_NAME},)*(?:[%@]{_NAME})?)\) ([a-z]+\d*\[\S*\])(?: (.*))?\Z"
)


def _read_node(kind: type, line: str) -> Any:
    match = _NODE.match(line)
    if not match:
        raise ValueError("expected: %name = op(%value,@weight) type field=value …")
    inputs = tuple(a[:1] + _unword(a[1:]) for a in split_top(match[3]))
    known = {
        "name": _unword(match[1]),
        "op": _unword(match[2]),
        "inputs": inputs,
        "type": read_type(match[4]),
    }
    return _read_fields(kind, _tokens(match[5] or ""), known)


# keyword → (record, fields that stand without a key, where they go in the level)
_RECORDS: dict[str, tuple[type, tuple[str, ...], str]] = {
    "symbol": (Symbol, ("name",), "symbols"),
    "split": (physical.Split, ("name",), "splits"),
    "input": (Input, ("name", "type"), "inputs"),
    "weight": (Weight, ("name", "type"), "weights"),
    "state": (State, ("name", "type"), "states"),
    "budget": (physical.Budget, ("device",), "budgets"),
    "slot": (micro.Slot, ("id", "device", "type"), "slots"),
    "block": (micro.Block, ("name", "device"), "blocks"),
    "output": (Output, ("name", "value"), "outputs"),
}
_LEVELS: dict[str, type[Level]] = {
    "logical": logical.Graph,
    "physical": physical.Graph,
    "micro": micro.Stream,
}
_INSTRUCTIONS: dict[str, type[micro.Instr]] = {i.__name__.lower(): i for i in micro.INSTRUCTIONS}


def show_instr(instr: micro.Instr) -> str:
    """`dispatch device=cpu:0 lane=compute …`"""
    return type(instr).__name__.lower() + _show_fields(instr, ())


def _show_record(keyword: str, record: Any) -> str:
    heads = []
    for name in _RECORDS[keyword][1]:
        text = _fields(type(record))[name][1](getattr(record, name))
        heads.append(f"%{text}" if keyword == "slot" and name == "id" else text)
    return " ".join([keyword, *heads]) + _show_fields(record, _RECORDS[keyword][1])


def lines(level: Level) -> Iterator[str]:
    """The text form, line by line."""
    yield f"{_keyword(level)} {_word(level.name)}"
    for keyword, (_, _, place) in _RECORDS.items():
        if keyword != "output":
            for record in getattr(level, place, ()):
                yield _show_record(keyword, record)
    if isinstance(level, micro.Stream):
        for keyword, sizes in (("arena", level.arenas), ("ring", level.rings)):
            for device, size in sizes:
                yield f"{keyword} {_word(device)} bytes={size}"
        yield from map(show_instr, level.instrs)
    else:
        yield from map(show_node, level.nodes)
    for output in level.outputs:
        yield _show_record("output", output)


def _keyword(level: Level) -> str:
    return next(k for k, kind in _LEVELS.items() if kind is type(level))


def to_text(level: Level) -> str:
    """The whole text form; `from_text` reads it back equal."""
    return "\n".join(lines(level)) + "\n"


def from_text(text: str, *, path: str = "<text>") -> Level:
    """Reads any of the three levels.

    Raises:
        ParseError: with path, line number and the line.
    """
    # not splitlines: a name may hold one of the other separators it knows
    numbered = enumerate((line.rstrip("\r") for line in text.split("\n")), 1)
    rows = [(i, line) for i, line in numbered if line.strip() and line[0] != "#"]
    head = rows[0][1].split(" ", 1) if rows else [""]
    if head[0] not in _LEVELS or len(head) != 2:
        raise ParseError(
            f"{path}: no level header", hint=f"the first line is one of: {', '.join(_LEVELS)}, then a name"
        )
    kind = _LEVELS[head[0]]
    parts: dict[str, list[Any]] = {f.name: [] for f in fields(kind)}
    for number, line in rows[1:]:
        try:
            place, record = _read_line(kind, line)
        except (ValueError, AssertionError, RecursionError, MemoryError) as error:
            raise ParseError(f"{path}:{number}: {error}", lines=f"    {line[:200]}") from None
        if place not in parts:
            raise ParseError(
                f"{path}:{number}: a {head[0]} text has no {place}", lines=f"    {line[:200]}"
            ) from None
        parts[place].append(record)
    try:
        name = _unword(head[1])
    except ValueError as error:
        raise ParseError(f"{path}:{rows[0][0]}: {error}") from None
    return kind(**{k: tuple(v) for k, v in parts.items() if k != "name"}, name=name)


def _read_line(kind: type[Level], line: str) -> tuple[str, Any]:
    if line.startswith("%"):
        node = physical.Node if kind is physical.Graph else logical.Node
        return "nodes", _read_node(node, line)
    keyword, *tokens = _tokens(line)
    if keyword in _INSTRUCTIONS:
        return "instrs", _read_fields(_INSTRUCTIONS[keyword], tokens, {})
    if keyword in ("arena", "ring"):
        return f"{keyword}s", _read_memory(keyword, tokens)
    if keyword not in _RECORDS:
        known = ", ".join([*_RECORDS, *_INSTRUCTIONS, "%name = …"])
        raise ValueError(f"unknown line {keyword!r}; known: {known}")
    record, heads, place = _RECORDS[keyword]
    if len(tokens) < len(heads):
        raise ValueError(f"{keyword} lacks {', '.join(heads[len(tokens) :])}")
    given = {}
    for name, text in zip(heads, tokens, strict=False):
        if keyword == "slot" and name == "id":
            text = text.removeprefix("%")
        given[name] = _fields(record)[name][2](text)
    return place, _read_fields(record, tokens[len(heads) :], given)


def _read_memory(keyword: str, tokens: list[str]) -> tuple[str, int]:
    if len(tokens) != 2 or not tokens[1].startswith("bytes="):
        raise ValueError(f"expected: {keyword} device bytes=…")
    return _unword(tokens[0]), int(tokens[1].removeprefix("bytes="))


def read_logical(text: str, *, path: str = "<text>") -> logical.Graph:
    """`from_text` for a .logical; ParseError when it is another level."""
    return _as(logical.Graph, text, path)


def read_physical(text: str, *, path: str = "<text>") -> physical.Graph:
    """`from_text` for a .physical; ParseError when it is another level."""
    return _as(physical.Graph, text, path)


def read_micro(text: str, *, path: str = "<text>") -> micro.Stream:
    """`from_text` for a .micro; ParseError when it is another level."""
    return _as(micro.Stream, text, path)


def _as(kind: type[L], text: str, path: str) -> L:
    level = from_text(text, path=path)
    if not isinstance(level, kind):
        wanted = next(k for k, v in _LEVELS.items() if v is kind)
        raise ParseError(f"{path}: this is a {_keyword(level)} text, expected a {wanted} one")
    return level
