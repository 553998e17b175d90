"""The spine bears what comes: split devices, moving splits, a weight ring, swapped programs, edited
text, delayed lanes. Each must give the tokens of the plain run, bit for bit (logits included)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt.backend import U8, Rect
from flashrt.backends.reference import ReferenceBackend
from flashrt.compiler import CompileOptions, compile_model
from flashrt.errors import DeviceError, LawError, ModelError, RequestError
from flashrt.ir import laws, logical, micro, physical, text
from flashrt.ir.types import Weight
from flashrt.machine import Device, Machine, Measured
from flashrt.passes import pipeline
from flashrt.passes.lower import lower
from flashrt.program import Plan, Program, Variant
from flashrt.runtime.arena import Residents
from flashrt.runtime.executor import Executor
from tests.generating import PAGES, Call, Result, generate
from tests.tiny import ArraySource, tiny_graph, tiny_import, tiny_source

SPLIT = Path(__file__).with_name("split.physical")
GRAPH = tiny_graph()


def assumed(value: float) -> Measured:
    return Measured(value, "assumed")


BACKEND = ReferenceBackend()
MACHINE = Machine(
    tuple(
        Device(
            f"reference:{i}", "reference", "numpy", 1 << 30, assumed(1e10), {"f32": assumed(1e11)},
            assumed(1.0), kernels=BACKEND.kernels(),
        )
        for i in range(2)
    )
)  # fmt: skip
ONE = replace(MACHINE, devices=MACHINE.devices[:1])


def open_devices() -> dict[str, Any]:
    return {d.id: BACKEND.open(d) for d in MACHINE.devices}


def a_plan(*streams: tuple[physical.Graph, micro.Stream], graph: logical.Graph = GRAPH) -> Plan:
    variants = tuple(
        Variant.of(f"v{i}", 1, 64, p, replace(s, name=f"v{i}")) for i, (p, s) in enumerate(streams)
    )
    return Plan("tiny", "", "", {}, graph, variants, MACHINE, tiny_import().weights)


def opened(plan: Plan, source: Any = None, devices: Any = None) -> Program:
    host = BACKEND.open(replace(MACHINE.devices[0], id="host"))
    return Program(
        plan, devices or open_devices(), host, pages=PAGES, source=source or tiny_source(GRAPH), poison=True
    )


def planned(graph: logical.Graph = GRAPH, **options: Any) -> pipeline.Planned:
    return pipeline.compile_graph(graph, ONE, pipeline.Options(**options), check=checked)


def checked(name: str, value: object) -> None:
    if isinstance(value, micro.Stream):
        laws.check(value, stage=name)


@pytest.fixture(scope="module")
def plain() -> Result:
    """The run everything is compared with: one device, every weight resident."""
    plan = compile_model(tiny_import(), ONE, CompileOptions(tokens=64))
    with opened(plan) as program:
        return generate(program.call)


ALL = tuple(pipeline.PERFORMANCE)


def split_stream(*, passes: tuple[str, ...] = ALL) -> tuple[physical.Graph, micro.Stream]:
    graph = text.read_physical(SPLIT.read_text(), path=str(SPLIT))
    laws.check(graph)
    stream = lower(graph, MACHINE)
    laws.check(stream, stage="lower")
    room = pipeline.weight_room(graph.budgets)
    for name in passes:
        stream = pipeline.PERFORMANCE[name](stream, pipeline.Options(), room)
        laws.check(stream, stage=name)
    return graph, stream


@pytest.mark.parametrize("passes", [(), ("overlap",), ALL], ids=str)
def test_split_over_two_devices(plain: Result, passes: tuple[str, ...]) -> None:
    graph, stream = split_stream(passes=passes)
    assert {i.device for i in stream.instrs} == {"reference:0", "reference:1"}
    with opened(a_plan((graph, stream))) as program:
        assert generate(program.call) == plain


def moving(program: Program, splits: tuple[physical.Split, ...]) -> Call:
    """The program with every split at another position in every step."""
    steps = iter(range(1 << 30))

    def call(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
        step = next(steps)
        at = {s.name: s.positions[(step + k) % len(s.positions)] for k, s in enumerate(splits)}
        return program.call(inputs, {**symbols, **at})

    return call


def test_split_moved_every_step(plain: Result) -> None:
    graph, stream = split_stream()
    with opened(a_plan((graph, stream))) as program:
        assert generate(moving(program, graph.splits)) == plain


def test_split_outside_its_positions_is_refused() -> None:
    graph, stream = split_stream()
    with opened(a_plan((graph, stream))) as program, pytest.raises(RequestError, match="split s=33"):
        generate(lambda inputs, symbols, _: program.call(inputs, {**symbols, "s": 33}))


def weight_bytes(stream: micro.Stream) -> int:
    return sum(b.bytes for b in stream.blocks)


def ring_plan(graph: logical.Graph = GRAPH, share: float = 0.35) -> pipeline.Planned:
    total = weight_bytes(planned(graph).stream)
    return planned(graph, weight_bytes={"reference:0": int(total * share)}, window=2)


def test_ring_holding_30_percent_of_the_weights() -> None:
    graph = tiny_graph(4)
    whole, plan = planned(graph), ring_plan(graph, 0.30)
    stream = plan.stream
    with opened(a_plan((whole.physical, whole.stream), graph=graph), tiny_source(graph)) as program:
        plain = generate(program.call)
    held = dict(stream.rings)["reference:0"] + sum(b.bytes for b in stream.blocks if b.home == "resident")
    assert dict(stream.rings)["reference:0"] > 0 and held <= 0.30 * weight_bytes(stream)
    source = tiny_source(graph)
    with opened(a_plan((plan.physical, stream), graph=graph), source) as program:
        assert generate(program.call) == plain
    ring = {b.name for b in stream.blocks if b.home == "ring"}
    reads = [name for name, _, _ in source.reads]
    assert ring and all(reads.count(name) > 5 for name in ring), "ring blocks are read again in each step"


def test_ring_with_a_slow_disk(plain: Result) -> None:
    class Slow(ArraySource):
        def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
            time.sleep(0.002)
            super().read(weight, lo, hi, out)

    plan = ring_plan()
    assert {i.lane for i in plan.stream.instrs} == {"compute", "copy_in"}
    with opened(a_plan((plan.physical, plan.stream)), Slow(tiny_source(GRAPH).packed)) as program:
        assert generate(program.call) == plain


def test_variants_swapped_by_the_number_of_tokens(plain: Result) -> None:
    plan = compile_model(tiny_import(), ONE, CompileOptions(tokens=64))
    used = set()
    with opened(plan) as program:

        def call(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
            used.add(len(inputs["ids"]) > 16)
            return program.call(inputs, symbols)

        assert generate(call) == plain
    assert used == {False, True}


def test_programs_swapped_in_mid_generation(plain: Result) -> None:
    """A resident, a ring and a split program take turns, one step each, on one KV cache."""
    streams = [planned().stream, ring_plan().stream, split_stream()[1]]
    residents = Residents(open_devices(), tiny_source(GRAPH), {"P": PAGES})
    host = BACKEND.open(replace(MACHINE.devices[0], id="host"))
    executors = [Executor(s, residents, host, poison=True) for s in streams]
    turn = iter(range(1 << 30))

    def call(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
        executor = executors[next(turn) % len(executors)]
        outputs, _ = executor.step(inputs, symbols)
        executor.drain()
        return outputs

    assert generate(call) == plain
    for executor in executors:
        executor.close()


def test_edited_micro_text_runs(plain: Result) -> None:
    """An instruction moved by hand, its region cut in two, a comment added: read back, verified, run."""
    plan = planned()
    lines = text.to_text(plan.stream).splitlines()
    rope = next(i for i, line in enumerate(lines) if "kernel=rope_table" in line)
    lines[rope - 1], lines[rope] = lines[rope], lines[rope - 1]
    middle = next(i for i, line in enumerate(lines) if "kernel=gated" in line)
    lines[middle:] = [re.sub(r" region=\d+", " region=7", line) for line in lines[middle:]]
    lines.insert(middle, "# from here on a second region")
    stream = text.read_micro("\n".join(lines))
    assert stream != plan.stream
    laws.check(stream, stage="edited")
    with opened(a_plan((plan.physical, stream))) as program:
        assert generate(program.call) == plain


def test_badly_edited_micro_text_is_refused() -> None:
    lines = text.to_text(planned().stream).splitlines()
    gated = next(i for i, line in enumerate(lines) if "kernel=gated" in line)
    lines[gated], lines[gated + 1] = lines[gated + 1], lines[gated]
    with pytest.raises(LawError, match="written"):
        laws.check(text.read_micro("\n".join(lines)), stage="edited")


class Delayed:
    """A device whose every run and copy starts late."""

    def __init__(self, device: Any, seconds: float) -> None:
        self._device, self._seconds = device, seconds

    def run(self, code: Any, epoch: int) -> None:
        time.sleep(self._seconds)
        self._device.run(code, epoch)

    def copy(self, src: Rect, dst: Rect) -> None:
        time.sleep(self._seconds)
        self._device.copy(src, dst)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@pytest.mark.parametrize("late", ["reference:0", "reference:1"])
def test_delayed_lane(plain: Result, late: str) -> None:
    devices = open_devices()
    devices[late] = Delayed(devices[late], 0.003)
    graph, stream = split_stream()
    with opened(a_plan((graph, stream)), devices=devices) as program:
        assert generate(moving(program, graph.splits)) == plain


def test_missing_wait_is_caught_by_the_laws() -> None:
    """Each wait of the split stream is needed: without it the verifier refuses the stream."""
    _, stream = split_stream()
    for index, instr in enumerate(stream.instrs):
        for wait in instr.waits:
            fewer = replace(instr, waits=tuple(w for w in instr.waits if w != wait))
            broken = replace(stream, instrs=(*stream.instrs[:index], fewer, *stream.instrs[index + 1 :]))
            assert laws.violations(broken), f"{text.show_instr(instr)} ran without {wait}"


def failing_once(source: ArraySource, after: int) -> ArraySource:
    class Failing(ArraySource):
        def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
            super().read(weight, lo, hi, out)
            if len(self.reads) == after:
                raise ModelError(f"tensor {weight.name}: the disk is gone")

    return Failing(source.packed)


def test_failed_lane_is_an_error_and_the_next_step_is_clean(plain: Result) -> None:
    plan = ring_plan()
    source = failing_once(tiny_source(GRAPH), after=30)
    failures: Iterator[int] = iter(range(10))
    with opened(a_plan((plan.physical, plan.stream)), source) as program:

        def call(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
            try:
                return program.call(inputs, symbols)
            except ModelError as error:
                assert "the disk is gone" in str(error)
                assert next(failures) == 0
                return program.call(inputs, symbols)

        assert generate(call) == plain
    assert next(failures) == 1, "the fault never happened"


def test_index_outside_is_refused_before_anything_runs() -> None:
    plan = planned()
    with opened(a_plan((plan.physical, plan.stream))) as program:

        def call(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
            return program.call({**inputs, "ids": np.full_like(inputs["ids"], 96)}, symbols)

        with pytest.raises(RequestError, match="token id 96 is outside"):
            generate(call)


def test_interrupt_ends_a_waiting_step() -> None:
    """A lane that waits for a tick that never comes gives up when another lane fails."""

    class Broken(Delayed):
        def run(self, code: Any, epoch: int) -> None:
            raise DeviceError("reference:1 is gone")

    devices = open_devices()
    devices["reference:1"] = Broken(devices["reference:1"], 0)
    graph, stream = split_stream()
    with (
        opened(a_plan((graph, stream)), devices=devices) as program,
        pytest.raises(DeviceError, match="gone"),
    ):
        generate(program.call)
