"""A partition has no cycles: inputs that several devices share are copied once, results are exact."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from flashrt.backends.reference.evaluate import evaluate_graph
from flashrt.ir import logical
from flashrt.ir.laws import check
from flashrt.ir.text import read_logical
from flashrt.ir.types import Weight
from flashrt.layouts import LAYOUTS, unpack
from flashrt.passes.pins import read_pin
from flashrt.passes.pipeline import Options, Planned, compile_graph
from tests.passes.examples import device, known, machine
from tests.passes.simulate import Array, Step, packed, run

BOTH = machine(device("cpu:0"), device("cpu:1"))
NUMERICS = 'numerics="acc=f32" affinity=[gpu,npu,cpu] why="small"'

# (a + b) − (b + c)
DIFFERENCE = """\
logical difference
symbol T lo=1 hi=8 hint=2
input x f32[T,32]
%a = scale(%x) f32[T,32] attrs={by=2.0}
%b = scale(%x) f32[T,32] attrs={by=3.0}
%c = scale(%x) f32[T,32] attrs={by=5.0}
%left = add(%a,%b) f32[T,32]
%right = add(%b,%c) f32[T,32]
%minus = scale(%right) f32[T,32] attrs={by=-1.0}
%out = add(%left,%minus) f32[T,32]
output out out
"""
TIED = """\
logical tied
symbol T lo=1 hi=8 hint=2
input ids i32[T]
weight embed f32[64,32] sources=[embed] layout=f32
%h = embedding(%ids,@embed) f32[T,32]
%out = linear(%h,@embed) f32[T,64]
output out out
"""
CHAIN = """\
logical chain
symbol T lo=1 hi=8 hint=2
input x f32[T,32]
%a = activation(%x) f32[T,32] attrs={act="silu"}
%b = scale(%a) f32[T,32] attrs={by=3.0}
%c = activation(%b) f32[T,32] attrs={act="tanh"}
%d = scale(%c) f32[T,32] attrs={by=0.5}
output d d
"""
# a residual that both devices add to
RESIDUAL = """\
logical residual
symbol T lo=1 hi=8 hint=2
input x f32[T,32]
weight up f32[64,32] sources=[up] layout=q4.16x32
weight down f32[32,64] sources=[down] layout=q4.16x32
weight more f32[32,32] sources=[more] layout=q4.16x32
%r = scale(%x) f32[T,32] attrs={by=2.0}
%h = linear(%r,@up) f32[T,64]
%act = activation(%h) f32[T,64] attrs={act="silu"}
%y = linear(%act,@down,%r) f32[T,32] attrs={residual=true}
%z = linear(%y,@more,%y) f32[T,32] attrs={residual=true}
output y y
output z z
"""


def planned(text: str, *pins: str, on: object = BOTH) -> Planned:
    got = compile_graph(read_logical(text), on, Options(pins=tuple(map(read_pin, pins))))  # type: ignore[arg-type]
    check(got.physical)
    check(got.stream)
    return got


def outputs(got: Planned, step: Step) -> dict[str, Array]:
    """What the stream gives in the second of two steps, its lanes in a random order."""
    weights = packed(got.stream.weights)
    other = Step(step.symbols, {n: np.roll(v, 1, axis=0) for n, v in step.inputs.items()})
    return run(got.stream, weights, [other, step], random.Random(1))[1]


def by_the_reference(graph: logical.Graph, step: Step) -> dict[str, Array]:
    data = packed(graph.weights)

    def weight(w: Weight) -> Array:
        n, k = (int(d) for d in w.type.shape)  # type: ignore[arg-type]
        return unpack(LAYOUTS[w.layout], data[w.name], n, k)

    return evaluate_graph(graph, step.inputs, weight)


def step_of(graph: logical.Graph) -> Step:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 32)).astype(np.float32)
    inputs = {"x": x} if graph.inputs[0].name == "x" else {"ids": np.array([3, 63, 0, 7, 7], np.int32)}
    return Step({"T": 5}, inputs)


def copies(got: Planned) -> list[str]:
    return [n.name for n in got.physical.nodes if n.op == "transfer"]


PLACED = [
    (DIFFERENCE, ("a=cpu:0", "b=cpu:1", "c=cpu:1", "left=cpu:0", "right=cpu:1", "minus=cpu:1", "out=cpu:0"),
     ["b@cpu:0", "minus@cpu:0"]),
    (DIFFERENCE, ("a=cpu:0", "b=cpu:0", "c=cpu:1", "left=cpu:1", "right=cpu:1", "minus=cpu:0", "out=cpu:1"),
     ["a@cpu:1", "b@cpu:1", "right@cpu:0", "minus@cpu:1"]),
    (TIED, ("h=cpu:0", "out=cpu:1"), ["h@cpu:1"]),
    (CHAIN, ("a=cpu:0", "b=cpu:1", "c=cpu:0", "d=cpu:1"), ["a@cpu:1", "b@cpu:0", "c@cpu:1"]),
    (RESIDUAL, ("r=cpu:0", "h=cpu:0", "act=cpu:0", "y=cpu:1", "z=cpu:0"),
     ["r@cpu:1", "act@cpu:1", "y@cpu:0"]),
]  # fmt: skip


NAMES = ["shared", "diamond", "tied", "pingpong", "both"]


@pytest.mark.parametrize(("text", "pins", "copied"), PLACED, ids=NAMES)
def test_each_value_is_copied_once(text: str, pins: tuple[str, ...], copied: list[str]) -> None:
    got = planned(text, *pins)
    assert copies(got) == copied
    step = step_of(got.logical)
    want = by_the_reference(got.logical, step)
    for name, value in outputs(got, step).items():
        np.testing.assert_array_equal(value, want[name])


SLOW = machine(*(device(id, read=known(1e6), launch=known(0.1)) for id in ("cpu:0", "cpu:1")))


@pytest.mark.parametrize("text", [TIED, RESIDUAL], ids=["tied", "residual"])
def test_shared_products_of_the_planner(text: str) -> None:
    """The planner shares them by itself; wherever the cuts stand, the results are those of the reference."""
    got = planned(text, on=SLOW)
    assert got.physical.splits
    assert max(Counter(copies(got)).values()) == 1
    step = step_of(got.logical)
    want = by_the_reference(got.logical, step)
    for at in range(3):
        where = {s.name: s.positions[at * (len(s.positions) - 1) // 2] for s in got.physical.splits}
        made = outputs(got, Step({**step.symbols, **where}, step.inputs))
        for name, value in made.items():
            np.testing.assert_array_equal(value, want[name])
