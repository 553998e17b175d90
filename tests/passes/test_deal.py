"""Several devices: never slower than the simple answers, within every budget, quickly, and said why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from flashrt.errors import PlanError
from flashrt.ir import logical, physical
from flashrt.ir.clock import simulate
from flashrt.ir.laws import violations
from flashrt.machine import Link, Machine
from flashrt.passes.cost import block_bytes, cost
from flashrt.passes.pins import Pin
from flashrt.passes.pipeline import Options, Planned, compile_graph
from flashrt.passes.place import placements
from flashrt.passes.shard import shard
from flashrt.passes.transfer import transfer
from tests.passes.examples import device, known, two_layers
from tests.passes.models import model

SPEEDS = {  # bytes per second, flop per second, microseconds
    "cpu:0": (2e10, 4e11, 0.5),
    "gpu:0": (1e11, 4e12, 3.0),
    "npu:0": (3e10, 2e12, 8.0),
    "gpu:1": (8e10, 3e12, 3.0),
}


def machine(count: int, link: float, limit: int) -> Machine:
    """The first devices of SPEEDS; link: bytes per second between them; limit: bytes of each."""
    devices = tuple(
        device(id, read=known(r), rates={"f32": known(f)}, launch=known(us), limit=limit)
        for id, (r, f, us) in list(SPEEDS.items())[:count]
    )
    pairs = [(a.id, b.id) for a in devices for b in devices if a is not b]
    links = [Link(a, b, known(link), known(5.0)) for a, b in pairs]
    links += [Link("disk", d.id, known(2e9), known(50.0)) for d in devices]
    return Machine(devices, tuple(links))


def weight_bytes(graph: logical.Graph) -> int:
    return sum(block_bytes(w) for w in graph.weights)


def step_time(planned: Planned) -> float:
    return simulate(planned.stream, {}, 3).step_time


def attempt(graph: logical.Graph, on: Machine, **options: object) -> Planned | None:
    try:
        return compile_graph(graph, on, Options(**options))  # type: ignore[arg-type]
    except PlanError:
        return None


def in_order_of_speed(graph: logical.Graph, on: Machine, speed: list[str]) -> Planned | None:
    """Whole layers on the fastest device until it is full, then on the next one; the ends with the first
    and the last layer."""
    layers = sorted({int(n.name.split(".")[1]) for n in graph.nodes if n.name.startswith("layers.")})
    sizes = [sum(block_bytes(w) for w in graph.weights if w.name.startswith(f"layers.{i}.")) for i in layers]
    ends = weight_bytes(graph) - sum(sizes)
    for slack in (0.0, 0.25, 0.5):  # for state and results, which the sizes don't tell
        places, room = [], {d: on.device(d).budget * (1 - slack) for d in speed}
        room[speed[0]] -= ends
        for size in sizes:
            place = next((d for d in speed if room[d] >= size), None)
            if place is None:
                break
            room[place] -= size
            places.append(place)
        else:
            pins = [Pin(f"layers.{i}.*", d) for i, d in zip(layers, places, strict=True)]
            pins += [Pin(n, places[0]) for n in ("embedding", "rope_table")]
            pins += [Pin(n, places[-1]) for n in ("last", "norm", "logits")]
            if (planned := attempt(graph, on, pins=tuple(pins))) is not None:
                return planned
    return None


@cache
def case_graph(prompt: int, kind: str) -> logical.Graph:
    """The model of the grid, for steps at the end of a prompt."""
    sizes = dict(hidden=2048, ffn=704 if kind == "experts" else 5632, vocab=32000)
    sizes |= dict(experts=8, top_k=2) if kind == "experts" else {}
    return model(LAYERS, tied=kind == "tied", tokens=min(prompt, CHUNK), context=max(prompt, 256), **sizes)


def simple_answers(
    graph: logical.Graph, on: Machine, known: dict[object, float | None]
) -> Iterator[tuple[str, float]]:
    """Each device alone, and in order of speed. known: what one device takes, whatever the links are."""
    for each in on.devices:
        key = (each.id, each.limit, len(on.devices) > 1)
        if key not in known:
            planned = attempt(graph, on, devices=(each.id,))
            uses = {n.device for n in planned.physical.nodes} if planned else set()
            took = step_time(planned) if planned else None
            if uses - {each.id}:  # it needs a neighbour, and the link to it
                yield each.id, step_time(planned)  # type: ignore[arg-type]
                continue
            known[key] = took
        if (took := known[key]) is not None:
            yield each.id, took
    speed = [d.id for d in sorted(on.devices, key=lambda d: -d.read.value) if not d.id.startswith("npu")]
    if (filled := in_order_of_speed(graph, on, speed)) is not None:
        yield "in order of speed", step_time(filled)


KINDS = ("tied", "dense", "experts")
GRID = list(product((1, 2, 3, 4), (1e9, 8e9, 64e9), (0.05, 0.3, 0.6, 2.0), (1, 8, 512, 8192), KINDS))
CHUNK = 512  # tokens of one step at most: a longer prompt runs in chunks
LAYERS = 6
SOME = GRID[::59]  # every value of each axis


def check_case(
    case: tuple[int, float, float, int, str], known: dict[object, float | None] | None = None
) -> float | None:
    """How many times faster the plan is than the best simple answer; None where nothing fits at all.

    Two cases of five may use sums.
    """
    count, link, share, prompt, kind = case
    graph = case_graph(prompt, kind)
    on = machine(count, link, int(share * weight_bytes(graph)))
    simple = dict(simple_answers(graph, on, {} if known is None else known))
    got = attempt(graph, on, sums=GRID.index(case) % 5 < 2)
    if got is None:
        assert not simple
        return None
    assert not violations(got.physical) and not violations(got.stream)
    assert all(n.because for n in got.physical.nodes)
    for name, took in simple.items():
        assert step_time(got) <= took * 1.0101, name
    return min(simple.values(), default=float("inf")) / step_time(got)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_never_slower_than_the_simple_answers(case: tuple[int, float, float, int, str]) -> None:
    check_case(case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("prompt", "kind"), list(product((1, 8, 512, 8192), KINDS)))
def test_never_slower_anywhere(prompt: int, kind: str) -> None:
    """The whole grid, a twelfth at a time."""
    known: dict[object, float | None] = {}
    cases = [c for c in GRID if c[3:] == (prompt, kind)]
    fits = [x for case in cases if (x := check_case(case, known)) is not None]
    # the cache of a long context takes most of what the smaller budgets have
    fitting, quicker = (0.2, 0.05) if prompt == 8192 else (0.4, 0.15)
    assert len(fits) > fitting * len(cases)
    assert sum(x > 1.05 for x in fits) > quicker * len(cases)  # and often it is worth it


def test_every_axis_is_sampled() -> None:
    for axis, values in zip(zip(*SOME, strict=True), zip(*GRID, strict=True), strict=True):
        assert set(axis) == set(values)


def equal(count: int, **changes: object) -> Machine:
    """Devices of one speed, near each other."""
    one = device("cpu:0", read=known(2e10), rates={"f32": known(4e11)}, launch=known(0.5), **changes)
    devices = tuple(replace(one, id=f"cpu:{i}") for i in range(count))
    pairs = [(a.id, b.id) for a in devices for b in devices if a is not b]
    return Machine(devices, tuple(Link(a, b, known(1e10), known(2.0)) for a, b in pairs))


def test_two_equal_devices_are_nearly_twice_as_fast() -> None:
    graph = model(hidden=1024, ffn=4096, vocab=32000)
    two, one = compile_graph(graph, equal(2)), compile_graph(graph, equal(1))
    assert step_time(two) < 0.6 * step_time(one)
    assert {s.positions[0] for s in two.physical.splits} == {0}
    assert {s.positions[-1] for s in two.physical.splits} <= {1024, 4096, 1536, 32000}
    assert all(s.start in s.positions and len(s.positions) <= 9 for s in two.physical.splits)


def test_cuts_follow_the_speed() -> None:
    """A device of a third of the speed gets about a quarter."""
    on = equal(2)
    slow = replace(on.devices[1], read=known(2e10 / 3))
    graph = model(hidden=1024, ffn=4096, vocab=32000)
    got = compile_graph(graph, replace(on, devices=(on.devices[0], slow)))
    head = next(s for s in got.physical.splits if s.positions[-1] == 32000)
    assert 0.65 < head.start / 32000 < 0.85


def test_moving_a_cut_moves_the_time() -> None:
    """The cut's start is where the clock is best; all-here and all-there take what one device takes."""
    graph = model(hidden=1024, ffn=4096, vocab=32000)
    got = compile_graph(graph, equal(2))
    head = next(s for s in got.physical.splits if s.positions[-1] == 32000)
    times = {at: simulate(got.stream, {head.name: at}).step_time for at in head.positions}
    assert min(times, key=lambda at: times[at]) == head.start
    assert times[0] > times[head.start] and times[32000] > times[head.start]


def test_one_copy_of_the_weights_in_one_memory() -> None:
    """Devices of one memory hold all positions of every cut, and count the weights once."""
    graph = model(hidden=1024, ffn=4096, vocab=32000)
    whole = weight_bytes(graph)
    limit = int(0.75 * whole)  # of each: together more than the weights, each less
    apart = equal(2, limit=limit)
    pooled = replace(apart, devices=tuple(replace(d, pool="host", memory=4 * whole) for d in apart.devices))
    got = compile_graph(graph, pooled).physical
    assert not violations(got)
    assert sum(b.weights for b in got.budgets) == pytest.approx(whole, rel=0.01)
    assert sum(b.shared for b in got.budgets) > 0.7 * whole
    assert all(s.positions[0] == 0 for s in got.splits) and len(got.splits) >= 3
    own = compile_graph(graph, apart).physical
    assert sum(b.weights for b in own.budgets) <= 2 * limit and not any(b.shared for b in own.budgets)
    assert len(own.splits) < len(got.splits)  # some cuts can't move, for want of memory


def test_devices_of_one_memory_are_near() -> None:
    """Without links in the picture: a copy within a memory is assumed to be quick."""
    apart = replace(equal(2), links=())
    pooled = replace(apart, devices=tuple(replace(d, pool="host") for d in apart.devices))
    link = pooled.link("cpu:0", "cpu:1")
    assert (link.rate.value, link.latency.value, link.rate.how) == (1e10, 2.0, "assumed")
    graph = model(hidden=1024, ffn=4096, vocab=32000)
    assert step_time(compile_graph(graph, pooled)) < 0.8 * step_time(compile_graph(graph, apart))


def test_state_and_results_count() -> None:
    """A long context's cache and a long step's results leave less room for weights, on every device."""
    graph = model(tokens=512, context=8192)
    got = attempt(graph, machine(2, 64e9, 1 << 29))
    assert got is not None
    by_device = {b.device: b for b in got.physical.budgets}
    for budget in by_device.values():
        assert budget.activations > 0
        assert budget.weights + budget.state + budget.activations <= budget.limit
    assert sum(b.state for b in by_device.values()) == sum(4 * 512 * 2 * 2 * 16 * 64 for _ in graph.states)


def planner_seconds(layers: int, devices: int) -> float:
    graph = model(layers, hidden=1024, ffn=4096, vocab=32000)
    on = equal(devices)
    start = time.process_time()
    costs = cost(graph, on)
    ways = placements(graph, costs, on, cuts=shard(graph, costs, on))
    transfer(ways[0].graph, on)
    return time.process_time() - start


def test_eighty_layers_on_four_devices_in_seconds() -> None:
    """4 to 4.5 s of processor time alone; beside another busy thread of the same core twice that."""
    assert planner_seconds(80, 4) < 10


def test_causes_have_a_price_and_the_alternatives() -> None:
    got = compile_graph(model(), equal(2)).physical
    for node in got.nodes:
        assert " us" in node.because, node
        if node.op not in ("transfer", "merge"):
            assert "whole on cpu:0" in node.because and "whole on cpu:1" in node.because
    causes = {n.because for n in got.nodes if n.op not in ("transfer", "merge")}
    assert len(causes) < 12  # `explain` lists them


def test_golden_two_devices(golden: object) -> None:
    """A whole model shared by two devices."""
    from flashrt.ir.text import to_text

    slow = equal(2, memory=1 << 30)
    near = replace(slow, devices=tuple(replace(d, read=known(1e8), launch=known(0.1)) for d in slow.devices))
    got = compile_graph(two_layers(), near).physical
    assert isinstance(got, physical.Graph)
    golden("place/shared.physical", to_text(got))  # type: ignore[operator]
