"""The step block: what changes from step to step, checked and written before the lanes start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt.backend import U8
from flashrt.errors import RequestError
from flashrt.ir import micro
from flashrt.ir.ops import PAGE
from flashrt.ir.order import root_of
from flashrt.ir.types import DTYPES, FLOATS, Dim, Env, TensorType, evaluate, size, symbol_name, symbols_of
from flashrt.runtime.arena import NUMPY, StreamMemory, host_view

Arrays = Mapping[str, NDArray[Any]]
Shape = tuple[Dim, ...]
FEW = 32  # values from which numpy is quicker than a list
REMEMBERED = 256  # sets of shapes
_RANK = {"b": 0, "i": 1, "u": 1, "f": 2}  # numpy's kinds of numbers: each may become one of a higher rank

# parameters of `sample`: (its argument, largest value)
_SAMPLING: Mapping[str, tuple[int, float]] = {
    "temperature": (1, 1e30), "top_p": (3, 1), "min_p": (4, 1), "penalty": (5, 1e30),
}  # fmt: skip


# ---- what the kernels rely on ------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Bound:
    """Every value of an input lies in 0…hi, a size in the step's symbols."""

    input: str
    hi: Dim
    what: str


def bounds_of(stream: micro.Stream) -> tuple[Bound, ...]:
    """What the kernels that read inputs rely on.

    A value outside would make a compiled kernel touch foreign memory, so they are checked before each step.
    """
    slots = {s.id: s for s in stream.slots}
    weights = {w.name: w.type.shape for w in stream.weights}
    states = {s.name: s.type.shape for s in stream.states}

    def shape(of: micro.Arg | str) -> Shape:
        match of:
            case micro.SlotRef():
                return slots[of.slot].type.shape
            case micro.BlockRef():
                return weights[of.block]
        return states[of]

    found: dict[Bound, None] = {}
    for instr in stream.instrs:
        if isinstance(instr, micro.Dispatch):
            for arg, hi, what in _relied_on(instr, shape):
                if isinstance(arg, micro.SlotRef) and (name := slots[root_of(arg.slot, slots)].input):
                    found[Bound(name, hi, what)] = None
    return tuple(found)


def _relied_on(
    instr: micro.Dispatch, shape: Callable[[micro.Arg | str], Shape]
) -> Iterator[tuple[micro.Arg, Dim, str]]:
    """(argument, its largest value, what it is)."""
    args = instr.args
    match instr.kernel.removeprefix("host.").partition("+")[0].partition(".")[0]:
        case "embedding":
            yield args[0], shape(args[1])[0] - 1, "token id"
        case "rows":
            yield args[1], shape(args[0])[0] - 1, "row"
        case "expert_cache":
            slots = instr.attr("slots")
            assert isinstance(slots, int)
            yield args[1], slots, "slot"
        case "kv_write" | "attention":
            positions, seq, pages = _paged(instr)
            (state,) = instr.writes or instr.reads
            yield positions, PAGE * shape(pages)[1] - 1, "position"
            yield seq, shape(pages)[0] - 1, "sequence"
            yield pages, shape(state)[0] - 1, "page"
        case "sample":
            for what, (index, hi) in _SAMPLING.items():
                yield args[index], hi, what


def _paged(instr: micro.Dispatch) -> tuple[micro.Arg, ...]:
    """positions, seq and pages: they stand behind k and v, behind q, or in a host row behind all three."""
    first = 2 if instr.kernel == "kv_write" else 3 if instr.writes else 1
    return instr.args[first : first + 3]


# ---- what the caller gives -----------------------------------------------------------
def as_arrays(inputs: Mapping[str, TensorType], given: Mapping[str, Any]) -> Arrays:
    """The inputs as arrays of their dtypes. Raises RequestError when a name or a value doesn't fit."""
    missing, extra = inputs.keys() - given.keys(), given.keys() - inputs.keys()
    if missing or extra:
        wrong = [f"{what} {sorted(n)}" for what, n in (("missing", missing), ("unknown", extra)) if n]
        raise RequestError(
            f"inputs don't match: {', '.join(wrong)}",
            hint=f"the program takes: {', '.join(f'{n} {t}' for n, t in inputs.items())}",
        )
    return {name: _as_array(name, type, given[name]) for name, type in inputs.items()}


def _as_array(name: str, type: TensorType, given: Any) -> NDArray[Any]:
    want = NUMPY[type.dtype]
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"input {name}: not an array of numbers: {error}") from None
    if array.dtype == want:
        return array
    rank = 2 if array.dtype == NUMPY["bf16"] else _RANK.get(array.dtype.kind, 3)
    if rank > (2 if type.dtype in FLOATS else _RANK[want.kind]):
        raise RequestError(f"input {name}: values of dtype {array.dtype}, expected {type}")
    with np.errstate(over="ignore"):
        converted = array.astype(want)
    if want.kind in "iu" and (converted != array).any():
        raise RequestError(f"input {name}: a value is too large for {type.dtype}")
    return converted


class Binding:
    """`bind` for the inputs of one program, which remembers: most steps have shapes seen before."""

    def __init__(self, inputs: Mapping[str, TensorType]) -> None:
        self._inputs = dict(inputs)
        self._symbols = sorted({s for t in inputs.values() for d in t.shape for s in symbols_of(d)})
        self._known: dict[Any, dict[str, int]] = {}

    def __call__(self, arrays: Arrays, given: Mapping[str, int]) -> dict[str, int]:
        key = (*[arrays[n].shape for n in self._inputs], *[given.get(s) for s in self._symbols])
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            of_shapes = {s: given[s] for s in self._symbols if s in given}
            found = self._known[key] = bind(self._inputs, arrays, of_shapes)
        return {**found, **given}


def bind(inputs: Mapping[str, TensorType], arrays: Arrays, given: Mapping[str, int]) -> dict[str, int]:
    """Symbols from the shapes of the arrays; `given` adds those in no shape.

    Raises RequestError when a shape doesn't fit.
    """
    env = dict(given)
    for name, type in inputs.items():
        shape = arrays[name].shape
        if len(shape) != len(type.shape):
            raise RequestError(f"input {name}: shape {shape} doesn't fit {type}")
        for want, got in zip(type.shape, shape, strict=True):
            if (symbol := symbol_name(want)) is not None:
                env.setdefault(symbol, got)
    for name, type in inputs.items():
        try:
            expected = tuple(evaluate(d, env) for d in type.shape)
        except KeyError as missing:
            raise RequestError(
                f"input {name}: the shape {type} needs {missing.args[0]}",
                hint="give its value beside the inputs",
            ) from None
        if expected != arrays[name].shape:
            raise RequestError(f"input {name}: shape {arrays[name].shape}, expected {type} = {expected}")
    return env


# ---- in and out ----------------------------------------------------------------------
class StepWriter:
    """Writes what changes from step to step into the memory of one stream, after checking it.

    An array that nobody can write to, and that is the very one of the step before, is neither checked
    nor written again: most inputs of a step that decodes are.
    """

    def __init__(self, memory: StreamMemory) -> None:
        self._memory, self._bounds = memory, bounds_of(memory.stream)
        self._checked: list[tuple[NDArray[Any], float] | None] = [None] * len(self._bounds)
        self._written: dict[int, NDArray[Any]] = {}  # by slot: several devices may have one of an input

    def write(self, arrays: Arrays, given: Mapping[str, int]) -> dict[str, int]:
        """Writes words and inputs; gives every symbol and split variable of the step.

        arrays: of the inputs' dtypes and of their shapes at `given`.

        Raises RequestError for a symbol or an index outside its range; then nothing is written.
        """
        memory = self._memory
        env = _chosen(memory.stream, given)
        self._check({**given, **env}, arrays)
        for name, value in env.items():
            memory.words[memory.word_of(name)] = value
        for slot, (name, flat) in enumerate(memory.inputs):
            array = arrays[name]
            if self._written.get(slot) is array and _final(array):
                continue
            self._written.pop(slot, None)  # first: Ctrl-C may strike while the bytes change
            flat[: array.size] = array.reshape(-1)
            if _final(array):
                self._written[slot] = array
        return env

    def _check(self, env: Env, arrays: Arrays) -> None:
        for i, bound in enumerate(self._bounds):
            array, hi, known = arrays[bound.input], evaluate(bound.hi, env), self._checked[i]
            if known is not None and known[0] is array and known[1] == hi and _final(array):
                continue
            _check(bound, array, hi)
            self._checked[i] = (array, hi) if _final(array) else None


def _final(array: NDArray[Any]) -> bool:
    """Whether its values stay as they are: it is read-only, and no view of what may be written elsewhere."""
    return array.base is None and not array.flags.writeable


def _chosen(stream: micro.Stream, given: Mapping[str, int]) -> dict[str, int]:
    """Symbols and split variables: as given, else typical (symbols) or where they start (splits)."""
    env = {}
    for symbol in stream.symbols:
        value = env[symbol.name] = given.get(symbol.name, symbol.hint)
        if not symbol.lo <= value <= symbol.hi:
            raise RequestError(f"{symbol.name}={value} is outside {symbol.lo}…{symbol.hi}")
    for split in stream.splits:
        value = env[split.name] = given.get(split.name, split.start)
        if value not in split.positions:
            raise RequestError(f"split {split.name}={value}: not one of {split.positions}")
    return env


def _check(bound: Bound, values: NDArray[Any], hi: float) -> None:
    if not values.size:
        return
    if values.size <= FEW:
        listed = values.reshape(-1).tolist()
        # min and max of a list may step over a NaN
        least, most = (min(listed), max(listed)) if all(v == v for v in listed) else (np.nan, np.nan)
    else:
        least, most = values.min(), values.max()
    if not (least >= 0 and most <= hi):  # NaN compares false
        bad = most if least >= 0 else least
        raise RequestError(f"input {bound.input}: {bound.what} {bad} is outside 0…{hi}")


def read_output(
    memory: StreamMemory, slot: int, type: TensorType, env: Env, here: U8 | None = None
) -> NDArray[Any]:
    """A copy of an output slot, of type `type`, with this step's shape. here: where the host has it."""
    shape = [size(d, env) for d in type.shape]
    count, place = math.prod(shape) * DTYPES[type.dtype], memory.slot(slot)
    if here is not None:
        return here[:count].view(NUMPY[type.dtype]).reshape(shape).copy()
    if isinstance(place.buffer, np.ndarray):
        return host_view(place)[:count].view(NUMPY[type.dtype]).reshape(shape).copy()
    copied = np.empty(count, np.uint8)
    memory.remote(slot).read(place, copied)
    return copied.view(NUMPY[type.dtype]).reshape(shape)
