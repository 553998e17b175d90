"""Plans for several devices, made by the planner: the tokens of one device, wherever the cuts stand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashrt.backend import Backend
from flashrt.backends.null import NullBackend
from flashrt.backends.reference import ReferenceBackend
from flashrt.compiler import CompileOptions, compile_model
from flashrt.ir import laws, physical
from flashrt.machine import Device, Link, Machine, Measured
from flashrt.program import Plan, Program
from tests.generating import PAGES, generate
from tests.tiny import tiny_graph, tiny_import, tiny_source

OPTIONS = CompileOptions(tokens=64)
BACKENDS: dict[str, Backend] = {"reference": ReferenceBackend(), "null": NullBackend()}


def assumed(value: float) -> Measured:
    return Measured(value, "assumed")


def device(id: str, read: float = 1e8, **changes: Any) -> Device:
    """So slow that sharing pays even in a tiny model."""
    kind = id.partition(":")[0]
    made = Device(
        id, kind, "test", 1 << 30, assumed(read), {"f32": assumed(1e12)}, assumed(0.1),
        kernels=BACKENDS[kind].kernels(),
    )  # fmt: skip
    return replace(made, **changes)


def machine(*devices: Device) -> Machine:
    pairs = [(a.id, b.id) for a in devices for b in devices if a is not b]
    links = [Link(a, b, assumed(1e10), assumed(1.0)) for a, b in pairs]
    links += [Link("disk", d.id, assumed(1e7), assumed(50.0)) for d in devices]
    return Machine(devices, tuple(links))


def opened(plan: Plan) -> Program:
    devices = {d.id: BACKENDS[d.kind].open(d) for d in plan.machine.devices}
    host = BACKENDS["reference"].open(replace(plan.machine.devices[0], id="host", kind="reference"))
    return Program(plan, devices, host, pages=PAGES, source=tiny_source(tiny_graph()), poison=True)


@pytest.fixture(scope="module")
def plain() -> Any:
    with opened(compile_model(tiny_import(), machine(device("reference:0")), OPTIONS)) as program:
        return generate(program.call)


@pytest.fixture(scope="module")
def shared() -> Plan:
    """Two equal devices: everything worth it is shared."""
    return compile_model(tiny_import(), machine(device("reference:0"), device("reference:1")), OPTIONS)


def splits_of(plan: Plan) -> dict[str, physical.Split]:
    return {s.name: s for v in plan.variants for s in v.physical.splits}


def test_both_variants_share(shared: Plan) -> None:
    """One variable for each width, between nothing here and nothing there; state on one device."""
    for variant in shared.variants:
        laws.check(variant.physical)
        assert {n.device for n in variant.physical.nodes} == {"reference:0", "reference:1"}
        widths = {"s64": 64, "s96": 96, "s128": 128}
        assert {s.name: s.positions[-1] for s in variant.physical.splits}.items() <= widths.items()
        for split in variant.physical.splits:
            assert split.positions[0] == 0 and 3 <= len(split.positions) <= 9
        homes = {(s, n.device) for n in variant.physical.nodes for s in n.reads}
        assert len(homes) == len(variant.physical.states)
        assert all(n.because for n in variant.physical.nodes)


def test_the_same_tokens(shared: Plan, plain: Any) -> None:
    with opened(shared) as program:
        assert generate(program.call) == plain


def test_cuts_moved_every_step(shared: Plan, plain: Any) -> None:
    steps = iter(range(1 << 30))
    splits = splits_of(shared)
    moved: set[tuple[str, int]] = set()

    def call(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
        step = next(steps)
        at = {name: s.positions[(step + k) % len(s.positions)] for k, (name, s) in enumerate(splits.items())}
        large = len(inputs["ids"]) > 16
        names = {s.name for s in shared.variants[large].physical.splits}
        moved.update((name, at[name]) for name in names)
        return program.call(inputs, {**symbols, **{name: at[name] for name in names}})

    with opened(shared) as program:
        assert generate(call) == plain
    assert {0, 64} <= {at for name, at in moved if name == "s64"}


def test_three_devices(plain: Any) -> None:
    """Three shards, the first two with a cut that may move."""
    made = compile_model(tiny_import(), machine(*(device(f"reference:{i}") for i in range(3))), OPTIONS)
    assert len({n.device for n in made.variants[0].physical.nodes}) == 3
    with opened(made) as program:
        assert generate(program.call) == plain


def beside_null() -> Plan:
    """The null device can run products and what follows them, so everything else is the reference's."""
    able = tuple((k, n) for k, n in BACKENDS["null"].kernels() if k.startswith(("linear", "gated")))
    return compile_model(
        tiny_import(), machine(device("reference:0"), device("null:0", kernels=able)), OPTIONS
    )


def test_a_null_device_beside_the_reference() -> None:
    """What the null device makes is zeros, so another text comes of it, but every step ends."""
    made = beside_null()
    assert {n.device for n in made.variants[0].physical.nodes} == {"reference:0", "null:0"}
    with opened(made) as program:
        done = generate(program.call, tokens=10)
    assert [len(tokens) for tokens, _ in done] == [10, 10, 10]


def test_a_null_device_that_gets_no_channel(plain: Any) -> None:
    """With every cut where the null device has nothing, the tokens are those of one device."""
    made = beside_null()
    nodes = [n for v in made.variants for n in v.physical.nodes if n.device == "null:0"]
    assert {n.op for n in nodes if n.shard is None} <= {"merge", "transfer"}

    def nothing_there(graph: physical.Graph) -> dict[str, int]:
        """The null device's end of each cut, which may be the lower or the upper one."""
        lower = {str(n.shard.hi) for n in graph.nodes if n.shard and n.device == "null:0"}
        return {s.name: s.positions[0 if s.name in lower else -1] for s in graph.splits}

    def call(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
        variant = made.variants[len(inputs["ids"]) > 16]
        return program.call(inputs, {**symbols, **nothing_there(variant.physical)})

    with opened(made) as program:
        assert generate(call) == plain


def test_short_of_memory_the_cuts_stand(plain: Any) -> None:
    """Where no device can hold everything, shards hold their own rows only; both variants the same ones."""
    whole = compile_model(tiny_import(), machine(device("reference:0")), OPTIONS)
    (budget,) = whole.variants[1].physical.budgets
    limit = budget.state + budget.activations + int(0.8 * budget.weights)
    two = machine(device("reference:0", limit=limit), device("reference:1", limit=limit))
    made = compile_model(tiny_import(), two, OPTIONS)
    for variant in made.variants:
        laws.check(variant.physical)
        assert not [b for b in variant.stream.blocks if b.home == "ring"]
    kept: dict[str, dict[tuple[str, int, int], int]] = {}
    for block in (b for v in made.variants for b in v.stream.blocks):
        kept.setdefault(block.device, {})[block.name, block.lo, block.hi] = block.bytes
    room = limit - budget.activations
    for name, blocks in kept.items():
        state = max(b.state for v in made.variants for b in v.physical.budgets if b.device == name)
        assert sum(blocks.values()) <= room - state, name
    with opened(made) as program:
        assert generate(program.call) == plain


def test_streaming_beside_sharing(plain: Any) -> None:
    """So little memory that weights stream on both devices: both variants keep the same ones."""
    whole = compile_model(tiny_import(), machine(device("reference:0")), OPTIONS)
    (budget,) = whole.variants[1].physical.budgets
    limit = budget.state // 2 + budget.activations + int(0.4 * budget.weights)
    two = machine(device("reference:0", limit=limit), device("reference:1", limit=limit))
    made = compile_model(tiny_import(), two, OPTIONS)
    kept = [{(b.device, b.name, b.home) for b in v.stream.blocks} for v in made.variants]
    assert kept[0] == kept[1] and any(home == "ring" for _, _, home in kept[0])
    with opened(made) as program:
        assert generate(program.call) == plain
