"""What a step is predicted to take: parts that devices make beside each other count once."""

from __future__ import annotations

from dataclasses import replace

from flashrt.ir.clock import simulate
from flashrt.passes.pipeline import compile_graph
from flashrt.passes.spread import Parted
from flashrt.passes.task import seats_of
from flashrt.runtime.elastic import elastic
from flashrt.runtime.idle import Rests
from tests.passes.examples import known
from tests.passes.models import model
from tests.passes.test_deal import equal


def test_parts_count_once() -> None:
    """Attention by heads, which nothing moves, beside a head that is cut where it may move."""
    graph = model(context=4096)
    on = equal(2)
    on = replace(on, devices=tuple(replace(d, read=known(1e9)) for d in on.devices))
    planned = compile_graph(graph, on)
    assert any(isinstance(s, Parted) for s in seats_of(planned.physical).values())
    found = elastic(planned.stream, Rests(planned.stream))
    assert found is not None
    env = {s.name: s.hint for s in planned.stream.symbols}
    simulated = simulate(planned.stream, {}).step_time * 1e-6
    assert 0.8 * simulated < found.step(env, found.start, {}) < 1.1 * simulated
    busy = found.busy(env, found.start)
    assert sum(busy.values()) > 1.5 * found.step(env, found.start, {})
