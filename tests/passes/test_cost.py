"""What products of few tokens cost: their bytes at the rate at which products read, where that is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrt.ir.types import evaluate
from flashrt.machine import Device
from flashrt.passes.cost import PRODUCTS, Costs, cost, price
from flashrt.passes.price import Prices
from flashrt.passes.spread import Part
from tests.passes.examples import device, known, machine, two_layers

ONE = {"T": 1, "S": 1, "M": 2, "C": 1, "P": 64, "N": 1}
SLOW, FAST = (device(read=known(1e9), gemv=known(rate)) for rate in (5e8, 4e9))
PLAIN = replace(SLOW, gemv=None)


def priced(on: Device) -> Costs:
    return cost(two_layers(), machine(on))


@pytest.mark.parametrize("on", [SLOW, FAST])
def test_products_cost_what_products_read(on: Device) -> None:
    """Dearer where they read slower than plain reads do, cheaper where faster; nothing else changes."""
    before, after = priced(PLAIN), priced(on)
    assert on.gemv
    ratio = on.gemv.value / PLAIN.read.value
    seen = set()
    for node in two_layers().nodes:
        old, new = before.of(node.name, on.id), after.of(node.name, on.id)
        seen.add(node.op in PRODUCTS)
        if node.op in PRODUCTS:
            took = [float(evaluate(c.est, ONE)) - on.launch.value for c in (old, new)]
            assert took[1] == pytest.approx(took[0] / ratio, rel=2e-3)
            assert (new.bytes, new.flops) == (old.bytes, old.flops)
        else:
            assert new == old
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("op", "rate"), [("linear", 5e8), ("expert_linear", 5e8), ("head_linear", 1e9), ("add", 1e9), ("", 1e9)]
)
def test_the_price_of_an_operation(op: str, rate: float) -> None:
    assert price(10**6, 0, "", SLOW, op).est == pytest.approx(1e12 / rate + 2.0)


def test_many_tokens_are_limited_by_arithmetic() -> None:
    """As before: of what is longer, reading is the shorter."""
    assert price(10**3, 10**9, "act=i8/32 acc=f32", SLOW, "linear").est == pytest.approx(1e15 / 4e11 + 2.0)


def test_parts_of_products_read_so_too_and_sums_of_them_do_not() -> None:
    graph = two_layers()
    node = next(n for n in graph.nodes if n.op == "linear")
    width = node.type.shape[-1]
    assert isinstance(width, int)

    def took(on: Device, **changes: object) -> float:
        prices = Prices(graph, cost(graph, machine(on)), machine(on), ONE)
        part = Part(node.name, node, on.id, node.inputs, node.name, **changes)  # type: ignore[arg-type]
        return prices.est(part) - on.launch.value

    half = {"lo": 0, "hi": width // 2}
    assert took(SLOW, **half) == pytest.approx(2 * took(PLAIN, **half), rel=2e-3)
    assert took(SLOW, sum=True) == pytest.approx(took(PLAIN, sum=True))
