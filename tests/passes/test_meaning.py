"""Whatever passes are left out and however lanes run ahead, a stream computes the same."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt.backends.reference.evaluate import evaluate_graph, symbols_of_step
from flashrt.errors import DeviceError
from flashrt.ir import micro
from flashrt.ir.laws import violations
from flashrt.ir.types import Weight
from flashrt.layouts import LAYOUTS, pack_plain, unpack
from flashrt.passes.lower import lower
from flashrt.passes.pipeline import PERFORMANCE, Options, compile_graph
from tests.passes.evaluating import outputs, raw, step_inputs, values_of
from tests.passes.examples import batch, machine, serial, split_mlp, two_layers
from tests.passes.simulate import Array, Bytes, Step, packed, run

SUBSETS = [frozenset(c) for c in chain.from_iterable(combinations(PERFORMANCE, n) for n in range(6))]
STEPS_ONE = [batch(1, 5), batch(2, 1), batch(3, 8)]
STEPS_TWO = [batch(1, 5, 64), batch(2, 1, 0), batch(3, 8, 96), batch(4, 3, 32)]


def faster(stream: micro.Stream, disabled: frozenset[str], room: int, window: int = 2) -> micro.Stream:
    """The stream after the performance passes that aren't disabled."""
    rooms = {device: room for device in ("cpu:0", "gpu:0")}
    for name, rewrite in PERFORMANCE.items():
        if name not in disabled:
            stream = rewrite(stream, Options(window=window), rooms)
    return stream


def same(got: list[dict[str, Array]], want: list[dict[str, Array]]) -> None:
    for a, b in zip(got, want, strict=True):
        for name in b:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.fixture(scope="module")
def one() -> tuple[micro.Stream, Bytes, list[dict[str, Array]]]:
    stream = serial()
    weights = packed(stream.weights)
    return stream, weights, run(stream, weights, STEPS_ONE)


@pytest.fixture(scope="module")
def two() -> tuple[micro.Stream, Bytes, list[dict[str, Array]]]:
    stream = lower(split_mlp())
    weights = packed(stream.weights)
    return stream, weights, run(stream, weights, STEPS_TWO)


def test_serial_stream_means_the_graph(one: tuple[micro.Stream, Bytes, list[dict[str, Array]]]) -> None:
    """The lowered stream gives what the reference gives for the logical graph."""
    stream, weights, got = one

    def value(w: Weight) -> Array:
        shape = tuple(int(d) for d in w.type.shape)  # type: ignore[arg-type]
        if len(shape) == 2:
            return unpack(LAYOUTS[w.layout], weights[w.name], *shape)
        return weights[w.name].view(np.float32).reshape(shape)

    states: dict[str, Array] = {s.name: np.zeros((64, 2, 2, 16, 16), np.float32) for s in stream.states}
    for step, computed in zip(STEPS_ONE, got, strict=True):
        inputs = {i.name: step.inputs[i.name] for i in stream.inputs}
        want = evaluate_graph(two_layers(), inputs, value, states)
        assert np.isfinite(want["logits"]).all()
        for name in want:
            np.testing.assert_allclose(computed[name], want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("room", [12_000, 30_000])
@pytest.mark.parametrize("disabled", SUBSETS, ids=lambda s: "+".join(sorted(s)) or "none")
def test_one_device(
    one: tuple[micro.Stream, Bytes, list[dict[str, Array]]], disabled: frozenset[str], room: int
) -> None:
    """With any subset of the performance passes off: the laws hold and the outputs are the same."""
    stream, weights, want = one
    stream = faster(stream, disabled, room)
    assert violations(stream) == []
    same(run(stream, weights, STEPS_ONE, random.Random(room)), want)


@pytest.mark.parametrize("room", [4_000, 1_000_000])
@pytest.mark.parametrize("disabled", SUBSETS, ids=lambda s: "+".join(sorted(s)) or "none")
def test_two_devices(
    two: tuple[micro.Stream, Bytes, list[dict[str, Array]]], disabled: frozenset[str], room: int
) -> None:
    """The same over two devices, with a split that moves from step to step."""
    stream, weights, want = two
    stream = faster(stream, disabled, room)
    assert violations(stream) == []
    same(run(stream, weights, STEPS_TWO, random.Random(room)), want)


@settings(max_examples=40)
@given(st.integers(), st.integers(0, 5), st.integers(4_000, 40_000), st.sampled_from(SUBSETS))
def test_any_order_of_lanes(
    two: tuple[micro.Stream, Bytes, list[dict[str, Array]]],
    seed: int,
    window: int,
    room: int,
    disabled: frozenset[str],
) -> None:
    """However the lanes run ahead of each other, over steps of different sizes and splits."""
    stream, weights, want = two
    same(run(faster(stream, disabled, room, window), weights, STEPS_TWO, random.Random(seed)), want)


@pytest.mark.parametrize("name", ["llama", "gemma3", "helium"])
def test_raw_models(name: str) -> None:
    """A traced model through the whole pipeline, slow and fast, gives what its raw graph means."""
    graph = raw(name)
    # with as few pages as the step needs: the simulation sizes the cache for the largest pool
    graph = replace(graph, symbols=tuple(replace(s, hi=16) if s.name == "P" else s for s in graph.symbols))
    values, inputs = values_of(graph), step_inputs(graph)
    want: dict[str, Array] = outputs(graph, values, inputs)  # type: ignore[assignment]
    env = {s.name: s.hint for s in graph.symbols} | symbols_of_step(graph, inputs)
    plain = replace(graph, weights=tuple(replace(w, layout="f32") for w in graph.weights))
    for disabled in (frozenset(PERFORMANCE), frozenset[str]()):
        stream = compile_graph(plain, machine(), Options(disabled=disabled)).stream
        assert violations(stream) == []
        weights = {
            w.name: pack_plain(LAYOUTS["f32"], np.concatenate([np.atleast_1d(values[s]) for s in w.sources]))
            for w in stream.weights
        }
        (got,) = run(stream, weights, [Step(env, inputs)], random.Random(1))
        for output in want:
            np.testing.assert_allclose(got[output], want[output], rtol=1e-3, atol=1e-3)


def test_missing_waits_show() -> None:
    """The simulation does find fault: without waits the lanes spoil each other's values or loads."""
    stream = faster(lower(split_mlp()), frozenset(), 4_000)
    loose = replace(stream, instrs=tuple(replace(i, waits=()) for i in stream.instrs))
    assert {v.law for v in violations(loose)} == {"ordered"}
    weights = packed(stream.weights)
    want = run(stream, weights, STEPS_TWO)

    def right(seed: int) -> bool:
        try:
            same(run(loose, weights, STEPS_TWO, random.Random(seed)), want)
        except (AssertionError, DeviceError):
            return False
        return True

    assert not all(right(seed) for seed in range(10))
