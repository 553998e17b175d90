"""The step block: what changes from step to step, written before the lanes start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt.errors import RequestError
from flashrt.ir import micro
from flashrt.ir.types import DTYPES, Expr, TensorType, evaluate, show, size
from flashrt.runtime.arena import StreamMemory, host_view

NUMPY: Mapping[str, Any] = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "i64": np.int64,
    "i32": np.int32, "i16": np.int16, "i8": np.int8, "u8": np.uint8, "bool": np.bool_,
}  # fmt: skip
assert set(NUMPY) | {"bf16"} == set(DTYPES)

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Bound:
    """Values of an input that index something: 0 ≤ value < limit."""

    input: str
    limit: int | str  # a number, or the symbol that counts what is indexed
    what: str


def bounds_of(stream: micro.Stream) -> tuple[Bound, ...]:
    """What the inputs index, found from the kernels that read them.

    A value outside would make a compiled kernel read foreign memory, so they
    are checked before each step.
    """
    inputs = {s.id: s.input for s in stream.slots if s.input}
    weights = {w.name: w for w in stream.weights}
    found: dict[tuple[str, int | str], Bound] = {}

    def add(arg: micro.Arg, limit: int | str, what: str) -> None:
        if isinstance(arg, micro.SlotRef) and arg.slot in inputs:
            found[inputs[arg.slot], limit] = Bound(inputs[arg.slot], limit, what)

    for instr in stream.instrs:
        if not isinstance(instr, micro.Dispatch):
            continue
        if instr.kernel.startswith("embedding.") and isinstance(instr.args[1], micro.BlockRef):
            rows = weights[instr.args[1].block].type.shape[0]
            add(instr.args[0], size(rows, {}), "token id")
        elif instr.kernel == "rows":
            add(instr.args[1], "T", "row")
        elif instr.kernel == "kv_write":
            add(instr.args[3], "S", "sequence")
            add(instr.args[4], "P", "page")
    return tuple(found.values())


def bind(inputs: Mapping[str, TensorType], arrays: Arrays, given: Mapping[str, int]) -> dict[str, int]:
    """Symbols from the shapes of the arrays; `given` adds those in no shape.

    Raises RequestError when a name, dtype or shape doesn't fit.
    """
    missing, extra = inputs.keys() - arrays.keys(), arrays.keys() - inputs.keys()
    if missing or extra:
        raise RequestError(
            f"inputs don't match: missing {sorted(missing)}, unknown {sorted(extra)}",
            hint=f"the program takes: {', '.join(f'{n} {t}' for n, t in inputs.items())}",
        )
    env = dict(given)
    for name, type in inputs.items():
        shape = arrays[name].shape
        if len(shape) != len(type.shape):
            raise RequestError(f"input {name}: shape {shape} doesn't fit {type}")
        for want, got in zip(type.shape, shape, strict=True):
            if isinstance(want, Expr) and show(want).isidentifier():
                env.setdefault(show(want), got)
    for name, type in inputs.items():
        expected = tuple(evaluate(d, env) for d in type.shape)
        if expected != arrays[name].shape:
            raise RequestError(f"input {name}: shape {arrays[name].shape}, expected {type} = {expected}")
    return env


def write_step(
    memory: StreamMemory, bounds: tuple[Bound, ...], arrays: Arrays, env: Mapping[str, int]
) -> None:
    """Writes words and inputs. Raises RequestError for a symbol or an index outside its range."""
    for symbol in memory.stream.symbols:
        value = env.get(symbol.name, symbol.hint)
        if not symbol.lo <= value <= symbol.hi:
            raise RequestError(f"{symbol.name}={value} is outside {symbol.lo}…{symbol.hi}")
        memory.words[memory.word_of(symbol.name)] = value
    for split in memory.stream.splits:
        value = env.get(split.name, split.start)
        if value not in split.positions:
            raise RequestError(f"split {split.name}={value}: not one of {split.positions}")
        memory.words[memory.word_of(split.name)] = value
    for bound in bounds:
        values = arrays[bound.input]
        limit = env[bound.limit] if isinstance(bound.limit, str) else bound.limit
        if values.size and (values.min() < 0 or values.max() >= limit):
            bad = int(values.min() if values.min() < 0 else values.max())
            raise RequestError(f"input {bound.input}: {bound.what} {bad} is outside 0…{limit - 1}")
    for slot in memory.stream.slots:
        if slot.input:
            data = np.ascontiguousarray(arrays[slot.input], dtype=NUMPY[slot.type.dtype])
            flat = data.reshape(-1).view(np.uint8)
            host_view(memory.slot(slot.id))[: flat.size] = flat


def read_output(memory: StreamMemory, ref: micro.SlotRef, env: Mapping[str, int]) -> NDArray[Any]:
    """A copy of an output slot with this step's shape."""
    type = next(s.type for s in memory.stream.slots if s.id == ref.slot)
    shape = [size(d, env) for d in type.shape]
    count = int(np.prod(shape, dtype=np.int64))
    whole = host_view(memory.slot(ref.slot)).view(NUMPY[type.dtype])[:count].reshape(shape)
    if ref.lo is not None and ref.hi is not None:
        whole = whole[..., size(ref.lo, env) : size(ref.hi, env)]
    return whole.copy()
