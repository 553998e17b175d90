"""What the three levels share: sizes as expressions in symbols, tensor types, attributes.

A graph declares symbols (`T` tokens in this step, `N` rows of logits wanted, …).
Every size, byte count and estimate is a `Dim`: a number or an `Expr` in those
symbols. An `Expr` is a polynomial kept in one normal form, so that equal sizes
compare equal and print the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from keyword import iskeyword

Env = Mapping[str, int]
Monomial = tuple["str | Call", ...]

LARGEST = 1e300  # what a text form may hold
SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class Call:
    """max, min, or ceildiv of sizes: an indivisible factor of a monomial."""

    fn: str
    args: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.fn}({','.join(show(a) for a in self.args)})"


@dataclass(frozen=True, slots=True)
class Expr:
    """A polynomial in symbols, never a constant (constants are plain numbers).

    `terms` is sorted; each is (factors, coefficient), coefficient not 0.
    """

    terms: tuple[tuple[Monomial, int | float], ...]

    def __add__(self, other: Dim) -> Dim:
        return _sum([self, other])

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        return _sum([self, other * -1])

    def __rsub__(self, other: Dim) -> Dim:
        return _sum([other, self * -1])

    def __mul__(self, other: Dim) -> Dim:
        if not isinstance(other, Expr):
            return self._scaled(other)
        out: dict[Monomial, int | float] = {}
        for left, a in self.terms:
            for right, b in other.terms:
                key = tuple(sorted(left + right, key=str))
                out[key] = out.get(key, 0) + a * b
        return _normal(out)

    __rmul__ = __mul__

    def _scaled(self, by: int | float) -> Dim:
        """Times a number: the order of the terms stays."""
        if by == 1 and isinstance(by, int):
            return self
        terms = tuple((m, c * by) for m, c in self.terms)
        return Expr(terms) if all(c != 0 for _, c in terms) else _normal(dict(terms))

    def __neg__(self) -> Dim:
        return self * -1

    def __str__(self) -> str:
        return show(self)


Dim = int | float | Expr


def _terms(value: Dim) -> tuple[tuple[Monomial, int | float], ...]:
    return value.terms if isinstance(value, Expr) else (((), value),)


def _normal(terms: Mapping[Monomial, int | float]) -> Dim:
    kept = {m: c for m, c in terms.items() if c != 0}
    if not kept:
        return 0
    if len(kept) == 1:
        (only,) = kept.items()
        return Expr((only,)) if only[0] else only[1]
    return Expr(tuple(sorted(kept.items(), key=lambda t: (-len(t[0]), str([str(a) for a in t[0]])))))


def _sum(values: Iterable[Dim]) -> Dim:
    out: dict[Monomial, int | float] = {}
    for value in values:
        for monomial, c in _terms(value):
            out[monomial] = out.get(monomial, 0) + c
    return _normal(out)


def sym(name: str) -> Expr:
    """The symbol `name` as an expression."""
    assert SYMBOL.match(name) and not iskeyword(name), name
    return Expr((((name,), 1),))


def maximum(*values: Dim) -> Dim:
    """The largest of the values."""
    return _call("max", values)


def minimum(*values: Dim) -> Dim:
    """The smallest of the values."""
    return _call("min", values)


def ceildiv(a: Dim, b: Dim) -> Dim:
    """a / b rounded up."""
    return _call("ceildiv", (a, b))


_FUNCTIONS = {"max": max, "min": min, "ceildiv": lambda a, b: -(-a // b)}


def _call(fn: str, values: tuple[Dim, ...]) -> Dim:
    if fn != "ceildiv":
        values = tuple(dict.fromkeys(values))
        if len(values) == 1:
            return values[0]
    if not any(isinstance(v, Expr) for v in values):
        return _FUNCTIONS[fn](*values)  # type: ignore[no-any-return, operator]
    return Expr((((Call(fn, values),), 1),))


def product(values: Iterable[Dim]) -> Dim:
    """The product of the values; 1 for none."""
    out: Dim = 1
    for value in values:
        out = out * value
    return out


def evaluate(value: Dim, env: Env) -> int | float:
    """The number that `value` is when the symbols are `env`. KeyError names a missing symbol."""
    if not isinstance(value, Expr):
        return value
    total: int | float = 0
    for monomial, c in value.terms:
        for atom in monomial:
            c = c * (env[atom] if isinstance(atom, str) else _apply(atom, env))
        total = total + c
    return total


def _apply(call: Call, env: Env) -> int | float:
    return _FUNCTIONS[call.fn](*(evaluate(a, env) for a in call.args))  # type: ignore[no-any-return, operator]


def size(value: Dim, env: Env) -> int:
    """`evaluate` for a whole number."""
    got = evaluate(value, env)
    assert got == int(got), f"{show(value)} is {got}"
    return int(got)


def substitute(value: Dim, env: Mapping[str, Dim]) -> Dim:
    """`value` with symbols replaced."""
    if not isinstance(value, Expr):
        return value
    out: list[Dim] = []
    for monomial, c in value.terms:
        term: Dim = c
        for atom in monomial:
            if isinstance(atom, str):
                term = term * env.get(atom, sym(atom))
            else:
                term = term * _call(atom.fn, tuple(substitute(a, env) for a in atom.args))
        out.append(term)
    return _sum(out)


def symbol_name(value: Dim) -> str | None:
    """The name when `value` is one symbol and nothing else."""
    match value:
        case Expr(terms=(((str() as name,), 1),)):
            return name
    return None


def symbols_of(value: Dim) -> frozenset[str]:
    """The names of the symbols in `value`."""
    found: set[str] = set()
    for monomial, _ in _terms(value):
        for atom in monomial:
            if isinstance(atom, str):
                found.add(atom)
            else:
                found.update(*(symbols_of(a) for a in atom.args))
    return frozenset(found)


def show(value: Dim) -> str:
    """The text form, without spaces; `read_dim` reads it back."""
    if not isinstance(value, Expr):
        return _number(value)
    parts = []
    for monomial, c in value.terms:
        factors = [str(atom) for atom in monomial]
        if c != 1 or not factors:
            factors.insert(0, _number(c))
        parts.append("*".join(factors))
    return "+".join(parts).replace("+-", "-")


def _number(value: int | float) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(value)


@lru_cache(maxsize=1 << 14)  # the layers of a model repeat the same sizes
def read_dim(text: str) -> Dim:
    """Reads what `show` prints. Raises ValueError with the part that isn't a size."""
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        value = _read(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text[:80]!r} isn't a size: {error}") from None
    if not all(abs(c) < LARGEST for _, c in _terms(value)):
        raise ValueError(f"{text[:80]!r} is too large")
    return value


def _read(tree: ast.expr, text: str) -> Dim:
    match tree:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return sym(name)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _read(inner, text) * -1
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _read(left, text) + _read(right, text)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _read(left, text) - _read(right, text)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _read(left, text) * _read(right, text)
        case ast.Call(func=ast.Name(id=fn), args=args, keywords=[]) if fn in _FUNCTIONS and args:
            if fn == "ceildiv" and len(args) != 2:
                raise ValueError(f"{text!r}: ceildiv takes 2 sizes")
            return _call(fn, tuple(_read(a, text) for a in args))
    raise ValueError(f"{text!r} isn't a size")


# bytes per element of every dtype a value can have
DTYPES: Mapping[str, int] = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1,
}  # fmt: skip
FLOATS = frozenset({"f64", "f32", "f16", "bf16"})


@dataclass(frozen=True, slots=True)
class TensorType:
    """dtype and shape of a value, row-major and dense: `f32[T,576]`."""

    dtype: str
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        assert self.dtype in DTYPES, self.dtype

    @property
    def elements(self) -> Dim:
        return product(self.shape)

    @property
    def bytes(self) -> Dim:
        return self.elements * DTYPES[self.dtype]

    def with_shape(self, *shape: Dim) -> TensorType:
        return TensorType(self.dtype, shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(show(d) for d in self.shape)}]"


_TYPE = re.compile(r"([a-z]+\d*)\[(.*)\]\Z")


@lru_cache(maxsize=1 << 14)
def read_type(text: str) -> TensorType:
    """Reads `f32[T,576]`. Raises ValueError."""
    match = _TYPE.match(text)
    if not match or match[1] not in DTYPES:
        raise ValueError(f"{text!r} isn't a tensor type; dtypes: {', '.join(DTYPES)}")
    return TensorType(match[1], tuple(read_dim(d) for d in split_top(match[2])))


_NESTED = re.compile(r"[\[\](){}\"]")


def split_top(text: str, by: str = ",") -> list[str]:
    """Splits at `by` outside brackets and quotes; '' gives []."""
    if not _NESTED.search(text):
        return text.split(by) if text else []
    parts, depth, quoted, last, i = [], 0, False, 0, 0
    while i < len(text):
        c = text[i]
        if quoted:
            if c == "\\":
                i += 1
            elif c == '"':
                quoted = False
        elif c == '"':
            quoted = True
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == by and depth == 0:
            parts.append(text[last:i])
            last = i + 1
        i += 1
    return [*parts, text[last:]] if text else []


# Attribute values: what a text form can hold. Tuples may nest.
Value = None | bool | int | float | str | Expr | tuple["Value", ...]
Attrs = tuple[tuple[str, Value], ...]


def attrs(**values: Value) -> Attrs:
    """Attributes in their one order (by key)."""
    return tuple(sorted(values.items()))


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size that changes from step to step: `symbol T lo=1 hi=512 hint=1`.

    `hint` is the typical value; estimates shown to people use it.
    """

    name: str
    lo: int
    hi: int
    hint: int


@dataclass(frozen=True, slots=True)
class Input:
    """A value handed in with each step (it lives in the step block)."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class Weight:
    """A block of constant data: one tensor, or several joined along axis 0.

    `type` is what it means (usually f32 [out, in]); `layout` names the packed
    format it is stored in (set by `precision`, see flashrt/layouts.py);
    `sources` are the tensors of the weight index it is made from.

    of: the weight that this one is a part of, or ""; rows: where the ranges of its rows begin and end there,
    `(0,64,128,160)`; columns: the same for one range of its columns. Empty: all. turned: not 0 where the rows
    are so many equal matrices, of which this one has the transposes, one below the other.
    """

    name: str
    type: TensorType
    sources: tuple[str, ...]
    layout: str = ""
    of: str = ""
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    turned: int = 0

    def in_whole(self, lo: int, hi: int) -> tuple[int, int] | None:
        """Where rows [lo, hi) are in the weight of which this one is some rows side by side; None where it
        isn't."""
        if not self.of or len(self.rows) != 2 or self.columns or self.turned:
            return None
        return self.rows[0] + lo, self.rows[0] + hi


@dataclass(frozen=True, slots=True)
class State:
    """Memory that outlives a step, such as `kv.3`: f32[P,2,heads,page,dim] with P pages.

    Where values are part of their keys: f32[P,1,heads,page,dim].
    """

    name: str
    type: TensorType

    @property
    def paged(self) -> bool:
        """Whether it is the pages of a cache."""
        return any("P" in symbols_of(d) for d in self.type.shape)


@dataclass(frozen=True, slots=True)
class Output:
    """A value handed back after each step."""

    name: str
    value: str
