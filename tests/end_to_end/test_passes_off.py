"""Every subset of the performance passes left out gives the same bits: they change speed, never meaning."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest

from flashrt import engine
from flashrt.ir import laws, logical, micro, physical
from flashrt.llm.generate import Generator
from flashrt.llm.request import Sampling
from flashrt.machine import Machine
from flashrt.passes import pipeline
from flashrt.program import Plan, Variant
from tests.end_to_end.flat import Generated, assert_same_bits, generate
from tests.tiny import CONTEXT, VOCAB, tiny_graph, tiny_import, tiny_source

PAGES = 24
GRAPH = tiny_graph()
PROMPTS = {f"{n} tokens": [(11 * i + n) % VOCAB for i in range(n)] for n in (5, 40, 1)}
HOW = Sampling(max_tokens=5, temperature=0.7, seed=3)
NAMES = tuple(pipeline.PERFORMANCE)
SUBSETS = [off for count in range(len(NAMES) + 1) for off in combinations(NAMES, count)]
FEW = [(), ("prefetch",), ("overlap", "elide"), ("pack", "region"), NAMES]
SHARES = {"resident": 1.0, "streamed": 0.35}  # of the weights that has room


@cache
def machine(kind: str) -> Machine:
    return engine.machine_picture([f"{kind}:0"])


def lawful(stage: str, value: object) -> None:
    """The door of every pass. What `place` makes has its laws once `transfer` is through."""
    if isinstance(value, logical.Graph | physical.Graph | micro.Stream) and stage != "place":
        laws.check(value, stage=stage)


@cache
def weight_bytes(kind: str) -> int:
    return sum(b.bytes for b in pipeline.compile_graph(GRAPH, machine(kind)).stream.blocks)


def compiled(kind: str, room: str, off: tuple[str, ...]) -> pipeline.Planned:
    limits = {f"{kind}:0": int(SHARES[room] * weight_bytes(kind))} if room == "streamed" else {}
    options = pipeline.Options(disabled=frozenset(off), window=2, weight_bytes=limits)
    return pipeline.compile_graph(GRAPH, machine(kind), options, check=lawful)


def ran(kind: str, plan: pipeline.Planned) -> Generated:
    """Prefill of three sequences, one of them in chunks, then decode."""
    variant = Variant.of("all", 1, 64, plan.physical, plan.stream)
    whole = Plan("tiny", "", "", {}, GRAPH, (variant,), machine(kind), tiny_import().weights)
    with engine.open_plan(whole, pages=PAGES, threads=2, poison=True, source=tiny_source(GRAPH)) as program:
        generator = Generator(
            program.call, context=CONTEXT, eos=(), pages=PAGES, max_tokens_per_step=32, max_sequences=8
        )
        return generate(generator, PROMPTS, HOW)


@cache
def wanted(kind: str) -> Generated:
    """With every pass, and room for all weights."""
    return ran(kind, compiled(kind, "resident", ()))


@pytest.mark.parametrize("room", SHARES)
@pytest.mark.parametrize("off", SUBSETS, ids=lambda off: "-".join(off) or "none")
def test_on_the_reference(off: tuple[str, ...], room: str) -> None:
    assert_same_bits(ran("reference", compiled("reference", room, off)), wanted("reference"))


@pytest.mark.parametrize("room", SHARES)
@pytest.mark.parametrize("off", FEW, ids=lambda off: "-".join(off) or "none")
def test_on_the_cpu(off: tuple[str, ...], room: str) -> None:
    assert_same_bits(ran("cpu", compiled("cpu", room, off)), wanted("cpu"))


def test_each_pass_does_something() -> None:
    """Else leaving it out would prove nothing."""
    for name in NAMES:
        assert compiled("cpu", "streamed", (name,)).stream != compiled("cpu", "streamed", ()).stream, name
