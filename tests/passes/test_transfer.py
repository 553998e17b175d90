"""transfer: what crosses between devices is copied once for each device that wants it, and stays exact."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from flashrt.ir import physical
from flashrt.ir.laws import check
from flashrt.ir.text import read_physical, to_text
from flashrt.passes.lower import lower
from flashrt.passes.pipeline import PERFORMANCE, Options
from flashrt.passes.transfer import transfer
from tests.passes.examples import device, machine
from tests.passes.simulate import Array, Step, packed, run

Golden = Callable[[str, str], None]
BOTH = machine(device("gpu:0"), device("cpu:0"))

# (a + b) · (b + c) + b: gpu and cpu in turn, b read on both sides
ZIGZAG = """\
physical zigzag
symbol T lo=1 hi=8 hint=2
input x f32[T,16]
%a = scale(%x) f32[T,16] device=gpu:0 of=a attrs={by=2.0} numerics="acc=f32" est=1us because=test
%b = scale(%x) f32[T,16] device=cpu:0 of=b attrs={by=3.0} numerics="acc=f32" est=1us because=test
%c = scale(%x) f32[T,16] device=gpu:0 of=c attrs={by=5.0} numerics="acc=f32" est=1us because=test
%left = add(%a,%b) f32[T,16] device=gpu:0 of=left numerics="acc=f32" est=1us because=test
%right = add(%b,%c) f32[T,16] device=cpu:0 of=right numerics="acc=f32" est=1us because=test
%product = mul(%left,%right) f32[T,16] device=gpu:0 of=product numerics="acc=f32" est=1us because=test
%out = add(%product,%b) f32[T,16] device=cpu:0 of=out numerics="acc=f32" est=1us because=test
output out out
"""
# one matrix as embedding on the cpu and as head on the gpu
TIED = """\
physical tied
symbol T lo=1 hi=8 hint=2
input ids i32[T]
weight embed f32[32,16] sources=[embed] layout=f32
%h = embedding(%ids,@embed) f32[T,16] device=cpu:0 of=h numerics="acc=f32" est=1us because=test
%out = linear(%h,@embed) f32[T,32] device=gpu:0 of=out numerics="act=f32 acc=f32" est=1us because=test
output out out
"""


def test_golden(golden: Golden) -> None:
    """Each copy stands right behind what it copies, with its bytes, price and cause."""
    graph = transfer(read_physical(ZIGZAG), BOTH)
    check(graph)
    golden("transfer/zigzag.physical", to_text(graph))


def test_a_shared_value_is_copied_once() -> None:
    names = [n.name for n in transfer(read_physical(ZIGZAG), BOTH).nodes if n.op == "transfer"]
    assert names == ["b@gpu:0", "c@cpu:0", "right@gpu:0", "product@cpu:0"]


def test_nothing_left_to_do() -> None:
    graph = transfer(read_physical(ZIGZAG), BOTH)
    assert transfer(graph, BOTH) == graph


def outputs(graph: physical.Graph, inputs: dict[str, Array], disabled: frozenset[str]) -> Array:
    """What the graph gives in the second of two steps, its lanes in a random order."""
    stream = lower(transfer(graph, BOTH), BOTH)
    for name, faster in PERFORMANCE.items():
        if name not in disabled:
            stream = faster(stream, Options(), {"gpu:0": 1 << 20, "cpu:0": 1 << 20})
    check(stream)
    other = {name: np.roll(value, 1, axis=0) for name, value in inputs.items()}
    steps = [Step({"T": 5}, other), Step({"T": 5}, inputs)]
    return run(stream, packed(stream.weights), steps, random.Random(len(disabled)))[1]["out"]


@pytest.mark.parametrize("disabled", [frozenset(), frozenset(PERFORMANCE)], ids=["fast", "plain"])
def test_back_and_forth_is_exact(disabled: frozenset[str]) -> None:
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    a, b, c = (x * np.float32(by) for by in (2, 3, 5))
    got = outputs(read_physical(ZIGZAG), {"x": x}, disabled)
    np.testing.assert_array_equal(got, (a + b) * (b + c) + b)


@pytest.mark.parametrize("disabled", [frozenset(), frozenset(PERFORMANCE)], ids=["fast", "plain"])
def test_tied_weights_apart(disabled: frozenset[str]) -> None:
    graph = read_physical(TIED)
    ids = np.array([3, 31, 0, 7, 7], np.int32)
    table = packed(graph.weights)["embed"].view(np.float32).reshape(32, 16)
    got = outputs(graph, {"ids": ids}, disabled)
    np.testing.assert_allclose(got, table[ids] @ table.T, rtol=1e-5, atol=1e-6)
