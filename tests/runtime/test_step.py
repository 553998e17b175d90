"""The step block: what a caller gives becomes arrays and symbols, or an error before anything runs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashrt.backends.reference import ReferenceBackend
from flashrt.errors import RequestError
from flashrt.ir.text import read_micro
from flashrt.ir.types import TensorType, read_type, sym
from flashrt.runtime.arena import Residents, StreamMemory
from flashrt.runtime.step import Binding, StepWriter, as_arrays, bind, bounds_of, read_output
from tests.passes.examples import device

STREAM = """\
micro t
symbol T lo=1 hi=4 hint=1
symbol N lo=1 hi=4 hint=2
symbol S lo=1 hi=4 hint=1
symbol M lo=1 hi=8 hint=1
symbol P lo=1 hi=64 hint=8
split s positions=[0,16,32] start=16
input ids i32[T]
input at i32[T]
input seq i32[T]
input pages i32[S,M]
input rows i32[N]
input k f32[T,32]
weight table f32[10,32] sources=[table] layout=f32
state kv f32[P,2,2,16,16]
slot %0 cpu:0 i32[T] input=ids
slot %1 cpu:0 i32[T] input=at
slot %2 cpu:0 i32[T] input=seq
slot %3 cpu:0 i32[S,M] input=pages
slot %4 cpu:0 i32[N] input=rows
slot %5 cpu:0 f32[T,32] input=k
slot %6 cpu:0 i32[T,1] alias=%0
slot %7 cpu:0 f32[T,32]
slot %8 cpu:0 f32[N,32]
block table cpu:0 lo=0 hi=10 bytes=1280 home=resident
dispatch device=cpu:0 lane=compute kernel=embedding.f32 args=[%6,@table] dst=%7
dispatch device=cpu:0 lane=compute kernel=kv_write args=[%5,%5,%1,%2,%3] writes=[kv] \
attrs={head_dim=16,kv_heads=2,value_dim=16}
dispatch device=cpu:0 lane=compute kernel=rows args=[%7,%4] dst=%8
output y %8
"""
T = sym("T")
TYPES = {"x": TensorType("f32", (T, 4)), "ids": TensorType("i32", (T,))}


class Zeros:
    def read(self, weight: Any, lo: int, hi: int, out: Any) -> None:
        out[:] = 0


def memory() -> StreamMemory:
    on = {"cpu:0": ReferenceBackend().open(device("cpu:0"))}
    return StreamMemory(read_micro(STREAM), Residents(on, Zeros(), {"P": 8}))


def inputs(**given: Any) -> dict[str, Any]:
    """A step of three tokens of one sequence with two pages."""
    i32 = {"ids": [1, 2, 3], "at": [0, 1, 31], "seq": [0, 0, 0], "pages": [[7, 0]], "rows": [2, 0], **given}
    return {n: np.array(v, np.int32) for n, v in i32.items()} | {"k": np.zeros((3, 32), np.float32)}


ENV = {"T": 3, "N": 2, "S": 1, "M": 2, "P": 8}


# ---- arrays ---------------------------------------------------------------------------
def test_values_are_converted() -> None:
    got = as_arrays(TYPES, {"x": [[1, 2, 3, 4]], "ids": np.array([2**31 - 1], np.int64)})
    assert (got["x"].dtype, got["ids"].dtype) == (np.float32, np.int32)
    assert got["x"].tolist() == [[1, 2, 3, 4]] and got["ids"].tolist() == [2**31 - 1]


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "i64", "i16", "u8", "bool"])
def test_every_dtype_takes_its_own(dtype: str) -> None:
    type = read_type(f"{dtype}[T]")
    kind = {"bf16": ml_dtypes.bfloat16, "bool": np.bool_}.get(dtype) or np.dtype(
        {"f": "f", "i": "i", "u": "u"}[dtype[0]] + str(int(dtype[1:]) // 8)
    )
    value = np.array([0, 1], kind)
    assert as_arrays({"x": type}, {"x": value})["x"] is value


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ids": [1.5]}, "float64"),
        ({"ids": [np.nan]}, "float64"),
        ({"ids": ["a"]}, "dtype <U1"),
        ({"ids": [1j]}, "complex"),
        ({"ids": [None]}, "object"),
        ({"ids": [2**31]}, "too large for i32"),
        ({"ids": np.array([2**64 - 1], np.uint64)}, "too large for i32"),
        ({"ids": [[1], [1, 2]]}, "not an array"),
        ({"ids": [1], "more": [1]}, "unknown ['more']"),
        ({}, "missing ['ids']"),
    ],
    ids=str,
)
def test_values_that_do_not_fit(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as error:
        as_arrays({"ids": TYPES["ids"]}, given)
    assert says in str(error.value)


# ---- symbols --------------------------------------------------------------------------
def test_symbols_come_from_shapes() -> None:
    arrays = {"x": np.zeros((3, 4)), "ids": np.zeros(3)}
    assert bind(TYPES, arrays, {"C": 7}) == {"T": 3, "C": 7}


@pytest.mark.parametrize(
    ("x", "ids", "given"),
    [((3, 4), (2,), {}), ((3, 5), (3,), {}), ((3,), (3,), {}), ((3, 4), (3,), {"T": 2})],
)
def test_shapes_that_do_not_fit(x: tuple[int, ...], ids: tuple[int, ...], given: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=r"input (x|ids): shape"):
        bind(TYPES, {"x": np.zeros(x), "ids": np.zeros(ids)}, given)


def test_a_symbol_in_no_shape_of_its_own_must_be_given() -> None:
    types = {"x": TensorType("f32", (2 * T,))}
    with pytest.raises(RequestError, match="needs T"):
        bind(types, {"x": np.zeros(6)}, {})
    assert bind(types, {"x": np.zeros(6)}, {"T": 3}) == {"T": 3}


# ---- written --------------------------------------------------------------------------
def test_words_and_inputs_are_written() -> None:
    into = memory()
    env = StepWriter(into).write(inputs(), ENV)
    assert env == {**ENV, "s": 16}
    assert {n: int(into.words[into.word_of(n)]) for n in env} == env
    type_of = {slot.id: slot.type for slot in into.stream.slots}
    assert read_output(into, 0, type_of[0], env).tolist() == [1, 2, 3]
    assert read_output(into, 3, type_of[3], env).tolist() == [[7, 0]]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ids": [0, 10, 0]}, "input ids: token id 10 is outside 0…9"),  # through an alias of the input
        ({"ids": [0, -1, 0]}, "token id -1"),
        ({"at": [0, 32, 0]}, "position 32 is outside 0…31"),  # two pages of 16
        ({"at": [-(2**31), 0, 0]}, "position -2147483648"),
        ({"seq": [0, 1, 0]}, "sequence 1 is outside 0…0"),
        ({"pages": [[8, 0]]}, "page 8 is outside 0…7"),
        ({"rows": [3, 0]}, "row 3 is outside 0…2"),
    ],
    ids=str,
)
def test_an_index_outside_is_refused_and_nothing_written(given: dict[str, Any], says: str) -> None:
    into = memory()
    before = into.words.copy()
    with pytest.raises(RequestError, match=says):
        StepWriter(into).write(inputs(**given), ENV)
    assert (into.words == before).all()


@pytest.mark.parametrize(("name", "value"), [("T", 0), ("T", 5), ("M", 9), ("s", 8)])
def test_a_symbol_outside_its_range(name: str, value: int) -> None:
    into = memory()
    with pytest.raises(RequestError, match=f"{name}={value}"):
        StepWriter(into).write(inputs(), {**ENV, name: value})


def read_only(values: dict[str, Any]) -> dict[str, Any]:
    for array in values.values():
        array.flags.writeable = False
    return values


def test_the_same_read_only_array_is_written_once() -> None:
    into = memory()
    writer, given = StepWriter(into), read_only(inputs())
    writer.write(given, ENV)
    (ids,) = (flat for name, flat in into.inputs if name == "ids")
    ids[:] = 9  # shows whether it is written again
    writer.write(given, ENV)
    assert ids[:3].tolist() == [9, 9, 9]
    writer.write({**given, **read_only({"ids": given["ids"].copy()})}, ENV)
    assert ids[:3].tolist() == [1, 2, 3]


def test_an_array_that_may_change_is_written_each_time() -> None:
    """Writeable, or a view of something writeable, however the array itself is flagged."""
    into = memory()
    writer, given, behind = StepWriter(into), inputs(), np.array([1, 2, 3], np.int32)
    view = behind[:]
    view.flags.writeable = False
    for ids, change in ((given["ids"], given["ids"]), (view, behind)):
        writer.write({**given, "ids": ids}, ENV)
        change[0] = 7
        writer.write({**given, "ids": ids}, ENV)
        (flat,) = (flat for name, flat in into.inputs if name == "ids")
        assert flat[:3].tolist() == [7, 2, 3]
        change[0] = 10
        with pytest.raises(RequestError, match="token id 10"):
            writer.write({**given, "ids": ids}, ENV)


def test_the_same_array_is_checked_again_where_its_bound_moved() -> None:
    into = memory()
    writer, given = StepWriter(into), read_only(inputs())
    writer.write(given, ENV)
    with pytest.raises(RequestError, match="position 31 is outside 0…15"):
        writer.write({**given, "pages": np.array([[7]], np.int32)}, {**ENV, "M": 1})


def test_shapes_seen_before_give_the_same_symbols() -> None:
    bound = Binding(TYPES)
    for _ in range(2):
        arrays = {"x": np.zeros((3, 4)), "ids": np.zeros(3)}
        assert bound(arrays, {"C": 7, "s": 1}) == {"T": 3, "C": 7, "s": 1}
        assert bound(arrays, {"C": 7}) == {"T": 3, "C": 7}
        assert bound({"x": np.zeros((2, 4)), "ids": np.zeros(2)}, {"C": 8}) == {"T": 2, "C": 8}
        with pytest.raises(RequestError, match="shape"):
            bound(arrays, {"T": 2})


SAMPLED = """\
micro t
symbol N lo=1 hi=4 hint=1
{slots}
slot %0 cpu:0 f32[N,9]
slot %9 cpu:0 i32[N]
dispatch device=cpu:0 lane=compute kernel=sample args=[%0,%1,%2,%3,%4,%5,%6,%7,%8] dst=%9
"""


def test_sampling_parameters_are_bounded() -> None:
    """A min_p above 1 or a NaN would send the compiled sampler looking for a token that isn't there."""
    kinds = {"temperature": "f32", "top_k": "i32", "top_p": "f32", "min_p": "f32", "penalty": "f32",
             "seed": "i64", "draw": "i64", "history": "i32"}  # fmt: skip
    shapes = {n: f"{kind}[N{',3' if n == 'history' else ''}]" for n, kind in kinds.items()}
    lines = [f"input {n} {type}" for n, type in shapes.items()]
    lines += [f"slot %{i} cpu:0 {type} input={n}" for i, (n, type) in enumerate(shapes.items(), 1)]
    stream = read_micro(SAMPLED.format(slots="\n".join(lines)))
    on = {"cpu:0": ReferenceBackend().open(device("cpu:0"))}
    into = StreamMemory(stream, Residents(on, Zeros(), {}))
    good = {n: np.zeros((1, 3) if n == "history" else 1, f"{kind[0]}{int(kind[1:]) // 8}")
            for n, kind in kinds.items()}  # fmt: skip
    StepWriter(into).write(good, {"N": 1})
    for name, bad in [("min_p", 1.5), ("min_p", np.nan), ("top_p", -1), ("temperature", np.inf),
                      ("temperature", np.nan), ("penalty", np.nan)]:  # fmt: skip
        with pytest.raises(RequestError, match=f"input {name}: {name}"):
            StepWriter(into).write({**good, name: np.array([bad], np.float32)}, {"N": 1})


def test_a_host_row_of_attention_is_bounded_too() -> None:
    """It is the whole node: positions, seq and pages stand behind q, k and v."""
    text = STREAM.replace("kernel=kv_write args=[%5,", "kernel=host.attention dst=%7 args=[%5,%5,")
    assert {(b.input, b.what) for b in bounds_of(read_micro(text))} == {
        ("ids", "token id"), ("at", "position"), ("seq", "sequence"), ("pages", "page"), ("rows", "row")
    }  # fmt: skip
