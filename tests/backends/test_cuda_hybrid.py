"""Plans over a GPU, real or emulated, and the CPU: the tokens of the reference, wherever the work stands."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt import engine
from flashrt.backend import ABORT, LOCKED, Place, Rect
from flashrt.backends.cpu import CpuBackend
from flashrt.backends.cpu.device import huge
from flashrt.backends.cuda import CudaBackend, CudaDevice, code, prefill
from flashrt.backends.cuda.args import Carry
from flashrt.backends.cuda.driver import Driver, GpuDriver
from flashrt.backends.cuda.kernels import offered
from flashrt.backends.reference import ReferenceBackend
from flashrt.compiler import CompileOptions, compile_model, keep_as_chosen
from flashrt.errors import DeviceError, ProgramError
from flashrt.frontend.imported import Imported
from flashrt.ir import laws, micro
from flashrt.ir.ops import ATTENTION_BF16
from flashrt.ir.order import loaded_at_start
from flashrt.ir.types import TensorType, Weight
from flashrt.layouts import BY_ROW, LAYOUTS
from flashrt.llm.generate import Generator
from flashrt.llm.request import Request, Sampling
from flashrt.machine import Device, Link, Machine, Measured
from flashrt.passes import beside, lending, pipeline
from flashrt.passes import pieces as cutting
from flashrt.passes.budget import held_bytes
from flashrt.passes.pins import Pin
from flashrt.passes.spread import Seat, Shared, Whole
from flashrt.passes.task import Earlier, Settled
from flashrt.program import Plan, Program, Variant, load, save
from flashrt.runtime.executor import LOOK
from flashrt.runtime.swap import Elder
from flashrt.runtime.trace import Trace
from tests.generating import PAGES, Result
from tests.tiny import (
    CONTEXT,
    HIDDEN,
    VOCAB,
    ArraySource,
    random_bytes,
    tiny_graph,
    tiny_import,
    tiny_source,
)

GRAPH = tiny_graph()
OPTIONS = CompileOptions(tokens=64)
TOKENS = 3
TABLE = 300_000  # rows of a table that is larger than LOCKED
RING = 16 << 10  # bytes, where weights pass in pieces


def assumed(value: float) -> Measured:
    return Measured(value, "assumed")


def spec(kind: str, read: float = 1e8) -> Device:
    """So slow that sharing pays even in a tiny model."""
    kernels = {"gpu": offered(), "cpu": CpuBackend().kernels()}[kind]
    return Device(
        f"{kind}:0", kind, "test", 1 << 30, assumed(read), {"f32": assumed(1e12)}, assumed(0.1),
        kernels=kernels, cores=1,
    )  # fmt: skip


def machine(*devices: Device) -> Machine:
    pairs = [(a.id, b.id) for a in devices for b in devices if a is not b]
    links = [Link(a, b, assumed(1e10), assumed(1.0)) for a, b in pairs]
    links += [Link("disk", d.id, assumed(1e7), assumed(50.0)) for d in devices]
    return Machine(devices, tuple(links))


BOTH = machine(spec("gpu"), spec("cpu"))


def opened(
    plan: Plan, driver: Driver | Mapping[str, Driver], source: Any = None, *, poison: bool = True
) -> Program:
    """driver: the GPU's, or by their ids those of several."""
    drivers = driver if isinstance(driver, Mapping) else {"gpu:0": driver}
    devices: dict[str, Any] = {
        d.id: CudaDevice(d, drivers[d.id]) if d.kind == "gpu" else CpuBackend().open(d)
        for d in plan.machine.devices
    }
    host = ReferenceBackend().open(replace(plan.machine.devices[-1], id="host", kind="reference"))
    weights = source or tiny_source(GRAPH)
    return Program(plan, devices, host, pages=PAGES, source=weights, poison=poison)


def checked(name: str, value: object) -> None:
    if isinstance(value, micro.Stream):
        laws.check(value, stage=name)


def variant(name: str, lo: int, hi: int, where: Machine = BOTH, **options: Any) -> Variant:
    made = pipeline.compile_graph(GRAPH, where, pipeline.Options(**options), check=checked)
    return Variant.of(name, lo, hi, made.physical, replace(made.stream, name=name))


def a_plan(*variants: Variant, where: Machine = BOTH) -> Plan:
    return Plan("tiny", "", "", {}, GRAPH, variants, where, tiny_import().weights)


@pytest.fixture(scope="module")
def right() -> Result:
    return reference(0.7)


def reference(temperature: float) -> Result:
    kind = ReferenceBackend()
    one = replace(BOTH.devices[0], id="reference:0", kind="reference", kernels=kind.kernels())
    plan = compile_model(tiny_import(), machine(one), OPTIONS)
    with Program(plan, {one.id: kind.open(one)}, None, pages=PAGES, source=tiny_source(GRAPH)) as program:
        return generated(program.call, temperature)


def generated(call: Any, temperature: float = 0.7) -> Result:
    """Two prompts in one step, then single tokens: tokens and logits of each. Few: threads are fibers."""
    generator = Generator(call, context=CONTEXT, eos=(), pages=PAGES, max_tokens_per_step=16, max_sequences=2)
    found: dict[str, tuple[list[int], list[bytes]]] = {}
    for name, length in (("a", 3), ("b", 9)):
        prompt = tuple((11 * i + length) % VOCAB for i in range(length))
        sampling = Sampling(max_tokens=TOKENS, temperature=temperature, seed=length)
        generator.add(Request(name, prompt, sampling, logits=True))
        found[name] = [], []
    done = {}
    while not generator.idle:
        for event in generator.step():
            if event.logits is not None:
                found[event.request][1].append(event.logits.tobytes())
            if event.completion:
                done[event.request] = event.completion.tokens
    return [(done[name], b"".join(logits)) for name, (_, logits) in found.items()]


def agree(got: Result, right: Result) -> None:
    for (tokens, logits), (want, meant) in zip(got, right, strict=True):
        a, b = (np.frombuffer(x, np.float32) for x in (logits, meant))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
        assert tokens == want


MLP_HERE = (Pin("layers.*.mlp", "cpu:0"), Pin("layers.*.self_attn", "gpu:0"))
LAYER_HERE = (Pin("layers.0", "cpu:0"), Pin("layers.1", "gpu:0"))


NONE_OFF, SOME_OFF = (), ("elide", "pack")


@pytest.mark.parametrize(
    "pins,off",
    [(MLP_HERE, NONE_OFF), (MLP_HERE, SOME_OFF), (LAYER_HERE, tuple(pipeline.PERFORMANCE))],
    ids=["products", "products, some passes", "layer, no passes"],
)
@pytest.mark.parametrize("polls", [True, False], ids=["polls", "host looks"])
def test_fixed_sides(
    driver: Driver,
    right: Result,
    pins: tuple[Pin, ...],
    off: tuple[str, ...],
    polls: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "polls", polls)
    plan = a_plan(variant("all", 1, 64, pins=pins, disabled=frozenset(off)))
    assert {i.device for i in plan.variants[0].stream.instrs} == {"gpu:0", "cpu:0"}
    with opened(plan, driver) as program:
        agree(generated(program.call), right)


def with_moving_cuts(program: Program) -> Any:
    """A program's `call`, with other positions of its splits in each step."""
    steps, variants = iter(range(1 << 30)), program.plan.variants

    def call(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
        step, variant = next(steps), variants[len(inputs["ids"]) > variants[0].hi]
        splits = enumerate(variant.physical.splits)
        at = {s.name: s.positions[(step + k) % len(s.positions)] for k, s in splits}
        return program.call(inputs, {**symbols, **at})

    return call


def test_cuts_that_move(driver: Driver, right: Result) -> None:
    plan = compile_model(tiny_import(), BOTH, OPTIONS)
    assert any(v.physical.splits for v in plan.variants)
    with opened(plan, driver) as program:
        agree(generated(with_moving_cuts(program)), right)


def without(device: Device, *kernels: str) -> Device:
    """A device that lacks some kernels."""
    return replace(device, kernels=tuple(k for k in device.kernels if k[0].split(".")[0] not in kernels))


def test_host_rows(driver: Driver, right: Result) -> None:
    """What neither can run stands on the CPU, between transfers."""
    where = machine(without(spec("gpu"), "gated"), without(spec("cpu"), "gated", "linear"))
    plan = a_plan(variant("all", 1, 64, where))
    rows = [i for i in plan.variants[0].stream.instrs if getattr(i, "kernel", "") == "host.gated"]
    assert rows and {i.device for i in rows} == {"cpu:0"}
    with opened(plan, driver) as program:
        agree(generated(program.call), right)


def test_a_host_row_on_a_gpu_is_refused(driver: Driver) -> None:
    one = variant("all", 1, 64, devices=("gpu:0",))
    instrs = tuple(
        replace(i, kernel="host.gated", region=None)
        if isinstance(i, micro.Dispatch) and i.kernel == "gated"
        else i
        for i in one.stream.instrs
    )
    plan = a_plan(replace(one, stream=replace(one.stream, instrs=instrs)))
    with opened(plan, driver) as program, pytest.raises(ProgramError, match=r"host\.gated stands on gpu:0"):
        program.open()


def streaming() -> Plan:
    """Small steps compute the feed-forward blocks on the CPU; large ones bring weights to the GPU, window by
    window."""
    small = variant("small", 1, 4, pins=MLP_HERE)
    here = {b.name for b in small.stream.blocks if b.device == "cpu:0"}
    large = variant("large", 5, 64, devices=("gpu:0",), weight_bytes={"gpu:0": 24_000}, window=1)
    streamed = {b.name for b in large.stream.blocks if b.home == "ring"}
    assert any("mlp" in name for name in streamed & here) and len(streamed) < len(large.stream.blocks)
    lenders = [b for b in small.stream.blocks if b.device == "cpu:0" and b.name in streamed]
    stream = replace(large.stream, blocks=(*large.stream.blocks, *lenders))
    return a_plan(small, replace(large, stream=stream))


def test_weights_stream_from_where_they_are_kept(
    driver: Driver, right: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from the file, though a large step is the first one; and from memory that stays where it is."""
    plan, source, locked = streaming(), tiny_source(GRAPH), list[int]()
    lock = driver.lock

    def noted(memory: Any) -> bool:
        locked.append(memory.nbytes)
        return lock(memory)

    monkeypatch.setattr(driver, "lock", noted)
    blocks = {(v.name, b.name): b for v in plan.variants for b in v.stream.blocks}
    kept = {name for (v, name), b in blocks.items() if v == "small" and b.device == "cpu:0"}
    lent = [b for (v, name), b in blocks.items() if v == "large" and b.home == "ring" and name in kept]
    with opened(plan, driver, source) as program:
        agree(generated(program.call), right)
        read = [name for name, _, _ in source.reads]
        assert all(read.count(b.name) == 1 for b in lent)
        assert sum(locked) >= sum(b.bytes for b in lent)


def looked_up() -> tuple[Imported, ArraySource]:
    """The tiny model with a table of its own for its tokens, far larger than the rest."""
    table = Weight("table.weight", TensorType("f32", (TABLE, HIDDEN)), ("table.weight",), "q8.16x32")
    embed = next(n for n in GRAPH.nodes if n.op == "embedding")
    nodes = (replace(n, inputs=(n.inputs[0], "@table.weight")) if n is embed else n for n in GRAPH.nodes)
    graph = replace(GRAPH, nodes=tuple(nodes), weights=(*GRAPH.weights, table))
    source = tiny_source(GRAPH)
    layout = LAYOUTS[BY_ROW[table.layout]]
    source.packed["table.weight"] = random_bytes(np.random.default_rng(5), layout, TABLE, HIDDEN)
    return replace(tiny_import(), graph=graph), source


def test_a_gpu_looks_rows_up_in_the_hosts_memory(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that doesn't fit it stays there, in a layout with whole rows, and all the rest is one lane of
    the GPU, so that the next step can begin before the host has seen this one's tokens."""
    model, source = looked_up()
    where = machine(replace(spec("gpu"), limit=8 << 20), spec("cpu", 1e6))
    plan = compile_model(keep_as_chosen(model, OPTIONS, where), where, OPTIONS)
    for variant in plan.variants:
        laws.check(variant.stream)
        assert {(i.device, i.lane) for i in variant.stream.instrs} == {("gpu:0", "compute")}
        (lookup,) = (n for n in variant.physical.nodes if n.op == "embedding")
        assert (lookup.device, lookup.keeper) == ("gpu:0", "cpu:0") and "keeps the table" in lookup.because
        (there,) = (b for b in variant.stream.blocks if b.name == "table.weight")
        assert (there.device, there.home) == ("cpu:0", "resident")
        cpu = next(b for b in variant.physical.budgets if b.device == "cpu:0")
        assert cpu.weights >= there.bytes > where.device("gpu:0").budget
    kind, host = ReferenceBackend(), replace(where.devices[1], id="reference:0", kind="reference")
    only = machine(replace(host, kernels=kind.kernels()))
    alone = compile_model(keep_as_chosen(model, OPTIONS, only), only, OPTIONS)
    devices = {"reference:0": kind.open(only.devices[0])}
    with Program(alone, devices, None, pages=PAGES, source=source) as program:
        want = generated(program.call, 0.7)
    with opened(plan, driver, source) as program:
        agree(generated(program.call), want)
        executor = program._executors[plan.variants[0].name]
        assert executor._whole is not None
    monkeypatch.setattr(driver, "lock", lambda memory: False)
    with (
        opened(plan, driver, source) as program,
        pytest.raises(DeviceError, match=r"can't read table\.weight"),
    ):
        generated(program.call)


def with_positions(model: Imported, rows: int) -> Imported:
    """A second embedding, of positions, added to the first and scaled."""
    graph = model.graph
    table = Weight("pos.weight", TensorType("f32", (rows, HIDDEN)), ("pos.weight",), "f32")
    embed = next(n for n in graph.nodes if n.op == "embedding")
    second = replace(embed, name="pos", inputs=("%positions", "@pos.weight"))
    both = replace(embed, name="both", op="add", inputs=("%embed_tokens", "%pos"))
    last = replace(embed, name="scaled", op="scale", inputs=("%both",), attrs=(("by", 2.0),))
    at = graph.nodes.index(embed) + 1
    rest = (
        replace(n, inputs=tuple("%scaled" if i == "%embed_tokens" else i for i in n.inputs))
        for n in graph.nodes[at:]
    )
    nodes = (*graph.nodes[:at], second, both, last, *rest)
    return replace(model, graph=replace(graph, nodes=nodes, weights=(*graph.weights, table)))


@pytest.mark.parametrize(
    "rows,pin,there",
    [(256, (), "gpu:0"), (256, ("embed_tokens=cpu:0",), "cpu:0"), (2000, (), "cpu:0")],
    ids=["small tables too", "pinned", "too large to be on both sides"],
)
def test_what_is_made_of_inputs_moves_together(rows: int, pin: tuple[str, ...], there: str) -> None:
    model = with_positions(looked_up()[0], rows)
    where = machine(replace(spec("gpu"), limit=8 << 20), spec("cpu", 1e6))
    options = replace(OPTIONS, pins=pin)
    plan = compile_model(keep_as_chosen(model, options, where), where, options)
    for each in plan.variants:
        laws.check(each.physical)
        at = {n.name: n.device for n in each.physical.nodes}
        assert at["embed_tokens"] == there
        if there == "gpu:0":
            assert {at[name] for name in ("pos", "both", "scaled", "rotary_emb")} == {there}


def test_an_engine_opens_a_device_that_only_keeps(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No instruction runs on the processor; a program that takes over has its table without reading it."""
    model, source = looked_up()
    where = machine(replace(spec("gpu"), limit=8 << 20), spec("cpu", 1e6))
    plan = compile_model(keep_as_chosen(model, OPTIONS, where), where, OPTIONS)
    save(plan, tmp_path / "plan")
    again = load(tmp_path / "plan")
    assert [v.stream for v in again.variants] == [v.stream for v in plan.variants]
    backend = engine._backend
    monkeypatch.setattr(
        engine, "_backend", lambda kind: CudaBackend(lambda n: driver) if kind == "gpu" else backend(kind)
    )
    with engine.open_plan(plan, pages=PAGES, least=1, source=source) as program:
        got = generated(program.call)
        read = len(source.reads)
        elder = Elder.of(program)
        with engine.open_plan(plan, pages=PAGES, least=1, source=source, elder=elder) as second:
            agree(generated(second.call), got)
        assert "table.weight" not in {name for name, _, _ in source.reads[read:]}


@pytest.mark.parametrize("limit", [260_000, 340_000, 400_000])
def test_no_rows_are_left_for_the_link(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings so small that the processor makes all of the head."""
    for module in (lending, cutting, beside):
        monkeypatch.setattr(module, "SMALL", 1 << 10)
    model, _ = looked_up()
    where = machine(replace(spec("gpu"), limit=limit), spec("cpu", 1e6))
    plan = compile_model(keep_as_chosen(model, OPTIONS, where), where, OPTIONS)
    for each in plan.variants:
        laws.check(each.stream)


def in_pieces(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Large steps bring the processor's weights to the GPU in pieces, and those of some channels of the head,
    while the processor computes the others."""
    for module in (lending, cutting):
        monkeypatch.setattr(module, "SMALL", 1 << 10)
    monkeypatch.setattr(cutting, "EVEN", 16)
    here = (*MLP_HERE, Pin("lm_head", "cpu:0"), Pin("embed_tokens", "cpu:0"))
    small = variant("small", 1, 4, pins=here)
    held = held_bytes(
        Earlier((small.physical,)).held(), {w.name: w for w in small.physical.weights}, ["gpu:0"]
    )
    state, beside = next(b.state for b in small.budgets if b.device == "gpu:0"), {"gpu:0": 1 << 20}
    limit = state + beside["gpu:0"] + held
    where = machine(replace(spec("gpu"), limit=limit + RING), spec("cpu"))
    small = variant("small", 1, 4, where, pins=here)
    names = [n.name for n in pipeline.prepare(GRAPH, pipeline.Options()).nodes]
    seats: dict[str, Seat] = dict.fromkeys(names, Whole("gpu:0"))
    seats |= dict.fromkeys(("embed_tokens", "sample"), Whole("cpu:0"))
    seats["lm_head"] = Shared(("gpu:0", "cpu:0"), (0, 64, VOCAB))
    earlier = Earlier((small.physical,), beside)
    large = variant("large", 5, 64, where, earlier=earlier, settled=Settled(seats))
    return a_plan(small, large, where=where)


def test_weights_pass_in_pieces(driver: Driver, right: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of what the processor keeps, each a block of its own, from where that lies."""
    plan, source = in_pieces(monkeypatch), tiny_source(GRAPH)
    large = plan.variants[1]
    whole = {w.name: w.of for w in large.stream.weights if w.of}
    cut = [b for b in large.stream.blocks if b.home == "ring" and b.name in whole]
    assert {whole[b.name] for b in cut} == {
        "embed_tokens.weight",
        *(f"layers.{i}.mlp.gate_up.weight" for i in (0, 1)),
    }
    assert all(b.bytes <= RING // cutting.PIECES for b in cut) and len(cut) > 6
    with opened(plan, driver, source) as program:
        for _ in range(3):
            agree(generated(program.call), right)
        read = Counter(name for name, _, _ in source.reads)
        assert not whole.keys() & read.keys() and all(read[name] == 1 for name in whole.values())


def passing(**options: Any) -> Plan:
    """Feed-forward blocks of one layer on the CPU, those of another pass through the GPU meanwhile."""
    pins = (Pin("layers.0.mlp", "cpu:0"), Pin("layers.0.self_attn", "gpu:0"), Pin("layers.1", "gpu:0"))
    made = variant("all", 1, 64, pins=pins, weight_bytes={"gpu:0": 30_000}, repeats=True, **options)
    assert loaded_at_start(made.stream)
    ring = [b for b in made.stream.blocks if b.home == "ring"]
    lenders = (replace(b, device="cpu:0", home="resident", offset=None) for b in ring)
    return a_plan(replace(made, stream=replace(made.stream, blocks=(*made.stream.blocks, *lenders))))


@pytest.mark.parametrize("polls", [True, False], ids=["polls", "host looks"])
def test_weights_pass_while_the_cpu_computes(
    driver: Driver, right: Result, polls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels find the weights that they need, step after step, and a step is one piece; nothing is read
    from the file twice."""
    monkeypatch.setattr(driver, "polls", polls)
    plan, source = passing(), tiny_source(GRAPH)
    for poison in (False, True):
        with opened(plan, driver, source, poison=poison) as program:
            for _ in range(3):
                agree(generated(program.call), right)
            if polls:
                code = next(c for c in program._executors["all"]._codes if hasattr(c, "_pieces"))
                assert len(code._pieces) == 1
            program.trace = Trace()
            generated(program.call)
            for step in program.trace.steps:
                mine = [at for at, i in enumerate(plan.variants[0].stream.instrs) if i.lane == "copy_in"]
                stamps = step.stamps[mine]
                assert (np.diff(stamps, axis=1) >= 0).all() and (np.diff(stamps[:, 2]) >= 0).all()
    counts = Counter(name for name, _, _ in source.reads)
    assert max(counts.values()) == 2  # once for each program


def test_a_library_attends_when_no_kernel_waits_for_the_host(
    driver: Driver, right: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it loads or allocates may have to wait for kernels; a step is one piece all the same."""
    monkeypatch.setattr(prefill, "MANY", 1)
    plan, called = passing(attention=ATTENTION_BF16), list[int]()
    with opened(plan, driver) as program:
        program.open()
        executor = program._executors["all"]
        loaded = next(c for c in executor._codes if isinstance(c, code.Code))
        ticks, first = executor.memory.ticks, executor.memory.ticks.ctypes.data
        attend, live = prefill.LibraryAttention.__call__, code.Code._live

        def checked(self: code.Code, work: Any, waits: Any, epoch: int) -> None:
            def now() -> None:
                for carry in waits:
                    awaited = zip(carry[:4], carry[4:8], strict=True)
                    assert all(ticks[(at - first) // 8] >= epoch + step for at, step in awaited if at)
                called.append(len(waits))
                work()

            live(self, now, waits, epoch)

        monkeypatch.setattr(code.Code, "_live", checked)
        count = list[object]()
        monkeypatch.setattr(prefill.LibraryAttention, "__call__", lambda self: count.append(attend(self)))
        for _ in range(3):
            for (_, logits), (_, meant) in zip(generated(program.call), right, strict=True):
                a, b = (np.frombuffer(x, np.float32) for x in (logits, meant))
                np.testing.assert_allclose(a[:VOCAB], b[:VOCAB], rtol=0, atol=2e-2 * np.abs(b).max())
        assert len(loaded._pieces) == 1
    assert len(count) > len(called) > 0 and any(called)  # at a bucket's first run, kernels come one by one


def test_a_library_is_not_called_in_a_step_that_is_given_up(driver: Driver) -> None:
    with opened(passing(), driver) as program:
        program.open()
        executor = program._executors["all"]
        loaded = next(c for c in executor._codes if isinstance(c, code.Code))
        carry = Carry(tick_0=executor.memory.ticks.ctypes.data, epoch=0, abort=0, stamps=0, holds=0)
        executor.memory.ticks[0], called = 4, list[int]()
        timer = threading.Timer(0.05, lambda: executor.memory.words.__setitem__(ABORT, 1))
        timer.start()
        with pytest.raises(DeviceError, match="interrupted in step 5"):
            loaded._live(lambda: called.append(1), [carry], 5)
        executor.memory.words[ABORT] = 0
        loaded._live(lambda: called.append(2), [carry], 4)
        assert called == [2]


def test_kernels_behind_a_wait_for_weights_start_late(driver: Driver) -> None:
    """They read weights before anything else; behind other waits they may."""
    plan = passing()
    stream = plan.variants[0].stream
    loads = {i.signals for i in stream.instrs if isinstance(i, micro.Prefetch)}
    with opened(plan, driver, poison=False) as program:
        generated(program.call)
        executor = program._executors["all"]
        code = next(c for c in executor._codes if hasattr(c, "_pieces"))
        first = executor.memory.ticks.ctypes.data
        held = Counter[tuple[bool, int]]()
        for bucket in code._pieces[0].buckets.values():
            for step in bucket.steps:
                if isinstance(carry := getattr(step, "fields", None), Carry) and carry.tick_0:
                    held[(carry.tick_0 - first) // 8 in loads, carry.holds] += 1
    assert held.keys() == {(True, 1), (False, 0)}


def loses_the_processor(program: Program, when: Callable[[], bool]) -> None:
    """From now on its part of a step fails, whenever that is so."""
    cpu = program.devices["cpu:0"]
    run = cpu.run

    def sometimes(loaded: Any, epoch: int) -> None:
        if when():
            raise DeviceError("cpu:0 is lost")
        run(loaded, epoch)

    cpu.run = sometimes  # type: ignore[method-assign,assignment]


def test_a_lane_of_copies_gives_up(driver: Driver, right: Result) -> None:
    """An error of the processor ends a step in which weights are on their way; the next one is right."""
    plan, failing = passing(), True
    with opened(plan, driver, poison=False) as program:
        agree(generated(program.call), right)
        loses_the_processor(program, lambda: failing)
        for _ in range(2):
            with pytest.raises(DeviceError, match="is lost"):
                generated(program.call)
        failing = False
        agree(generated(program.call), right)


def late_driver() -> Driver:
    """Kernels run on a thread of their own, and late."""
    from tests.backends.cuda_emulated import COMPILER, LateDriver

    if COMPILER is None:
        pytest.skip("no g++ to compile the emulated kernels")
    return LateDriver()


@pytest.mark.parametrize("made", ["products", "passing"])
def test_a_step_begins_without_a_thread_for_the_gpu(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it enqueues needs nobody; whatever strikes while the processor computes, the next step is
    right."""
    plan = passing() if made == "passing" else a_plan(variant("all", 1, 64, pins=MLP_HERE))
    began, start = list[bool](), code.Code.start

    def noted(self: code.Code, epoch: int) -> bool:
        began.append(start(self, epoch))
        return began[-1]

    monkeypatch.setattr(code.Code, "start", noted)
    right, errors = reference(0.0), list[BaseException]()
    with opened(plan, late_driver(), poison=False) as program:
        for _ in range(3):
            agree(generated(program.call, 0.0), right)
        assert began[-TOKENS:] == [True] * TOKENS and not began[0]
        run = program.devices["cpu:0"].run

        def struck(loaded: Any, epoch: int) -> None:
            if errors:
                raise errors[0]
            run(loaded, epoch)

        monkeypatch.setattr(program.devices["cpu:0"], "run", struck)
        for error in (DeviceError("cpu:0 is lost"), KeyboardInterrupt()):
            errors.append(error)
            for _ in range(2):
                with pytest.raises(type(error)):
                    generated(program.call, 0.0)
            errors.clear()
            agree(generated(program.call, 0.0), right)
        assert began[-1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("late", [0, 3], ids=["at once", "in the middle of a long step"])
def test_a_gpu_that_fails_is_noticed(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor waits for its ticks in compiled code; a step that fails says why, and the next one is
    right."""
    plan, right = a_plan(variant("all", 1, 64, pins=MLP_HERE)), reference(0.0)
    looks, dead = list[int](), False
    start, look = code.Code.start, code.Code.look

    def started(self: code.Code, epoch: int) -> bool:
        return dead or start(self, epoch)  # nothing is enqueued: no tick comes

    def looked(self: code.Code) -> None:
        looks.append(1)
        if dead and len(looks) > late:
            raise DeviceError("gpu:0: CUDA_ERROR_ILLEGAL_ADDRESS")
        look(self)

    monkeypatch.setattr(code.Code, "start", started)
    monkeypatch.setattr(code.Code, "look", looked)
    with opened(plan, late_driver(), poison=False) as program:
        for _ in range(3):
            agree(generated(program.call, 0.0), right)
        looks.clear()
        dead = True
        with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
            generated(program.call, 0.0)
        dead = False
        agree(generated(program.call, 0.0), right)
        time.sleep(3 * LOOK)
        looks.clear()
        time.sleep(3 * LOOK)
        assert not looks  # nobody looks at an idle GPU


def test_sizes_are_those_of_the_step() -> None:
    """Also behind one of other sizes that isn't recorded yet."""
    plan = a_plan(variant("all", 1, 64, pins=MLP_HERE))
    with opened(plan, late_driver(), poison=False) as program:

        def tokens(count: int) -> list[int]:
            ids = (np.arange(count, dtype=np.int32) * 7 + 5) % VOCAB
            found = program.call(given(ids), {"C": count}, outputs=("tokens",))["tokens"]
            return [int(token) for token in found]

        for _ in range(3):
            want = tokens(2)
        assert len(want) == 2
        for other in (1, 3, 7):
            tokens(other)
            assert tokens(2) == want


def given(ids: Any) -> dict[str, Any]:
    """A prompt of one sequence, of which every token's successor is asked for."""
    count, none = len(ids), {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}
    return {
        "ids": ids, "positions": np.arange(count, dtype=np.int32), "rows": np.arange(count, dtype=np.int32),
        "seq": np.zeros(count, np.int32), "pages": np.arange(4, dtype=np.int32)[None],
        **{name: np.full(count, value, np.float32) for name, value in none.items()},
        "top_k": np.zeros(count, np.int32),
        "seed": np.ones(count, np.int64), "draw": np.ones(count, np.int64),
        "history": np.full((count, 1), -1, np.int32),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("made", ["products", "streaming", "passing"])
def test_kernels_run_late(made: str) -> None:
    """Nothing is taken for done that was only enqueued."""
    products = {"streaming": streaming, "passing": passing}
    plan = products.get(made, lambda: a_plan(variant("all", 1, 64, pins=MLP_HERE)))()
    with opened(plan, late_driver(), poison=made != "passing") as program:
        agree(generated(program.call, 0.0), reference(0.0))


def test_memory_is_counted(driver: Driver) -> None:
    """What the plan says and what code keeps for itself, by now: all that the device gave."""
    plan = a_plan(variant("all", 1, 64, devices=("gpu:0",)))
    before = getattr(driver, "used", None)
    with opened(plan, driver) as program:
        program.open()
        opening = sum(program.residents.held.values())
        generated(program.call)
        held = program.residents.held
        assert sum(held.values()) > opening and held["gpu:0", "workspace"] > 0
        if before is not None:
            assert sum(held.values()) == getattr(driver, "used", 0) - before
    assert not program.residents.held


@pytest.mark.parametrize("kind", ["pinned", "locked", "pageable"])
def test_rows_cross_both_ways(driver: Driver, kind: str) -> None:
    """Some channels of some rows, to others on the device, and back to where nothing was."""
    device = CudaDevice(spec("gpu"), driver)
    memory = {"pinned": driver.pinned, "locked": huge, "pageable": lambda n: np.zeros(n, np.uint8)}[kind](
        LOCKED
    )
    memory[: LOCKED // 2] = np.arange(LOCKED // 2) % 251
    if kind == "locked":
        device.lock(memory)
    buffer, half = device.reserve(LOCKED), LOCKED // 2
    there = Rect(Place(buffer, 4096, half), 16, 7, 100, 300)
    device.copy(Rect(Place(memory, 64, half), 32, 7, 100, 500), there)
    device.copy(there, Rect(Place(memory, half, half), 8, 7, 100, 200))
    got = memory[half : half + 7 * 200].reshape(7, 200)
    want = np.stack([memory[96 + 500 * row :][:100] for row in range(7)])
    np.testing.assert_array_equal(got[:, 8:108], want)
    assert not got[:, :8].any() and not got[:, 108:].any()
    whole = Rect(Place(buffer, 0, half), 0, 1, half, half)
    device.copy(Rect(Place(memory, 0, half), 0, 1, half, half), whole)
    device.read(Place(buffer, 0, half), memory[half:])
    np.testing.assert_array_equal(memory[:half], memory[half:])
    device.close()


class Full:
    """A driver that has no more memory once `full` is set."""

    def __init__(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self._alloc = False, driver.alloc
        monkeypatch.setattr(driver, "alloc", self.alloc)

    def alloc(self, nbytes: int) -> Any:
        if self.full:
            raise MemoryError(f"{nbytes} bytes wanted, 0 free")
        return self._alloc(nbytes)


def test_no_room_at_open(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    Full(driver, monkeypatch).full = True
    plan = a_plan(variant("all", 1, 64, devices=("gpu:0",)))
    with (
        opened(plan, driver) as program,
        pytest.raises(DeviceError, match=r"gpu:0 has no room.*wanted, 0 free"),
    ):
        program.open()


def test_no_room_in_a_step(driver: Driver, right: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails and says why; when there is room, it is right, and so are those that follow."""
    memory, failed = Full(driver, monkeypatch), list[str]()
    plan = a_plan(variant("all", 1, 64, devices=("gpu:0",)))

    def call(*given: Any) -> Any:
        memory.full = True
        try:
            return program.call(*given)
        except DeviceError as error:
            failed.append(error.what)
        memory.full = False
        return program.call(*given)

    with opened(plan, driver) as program:
        program.open()
        agree(generated(call), right)
    assert failed and all("gpu:0 has no room for a step" in what for what in failed)


def test_buckets_are_dropped(driver: Driver, right: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "KEPT", 1)
    plan = a_plan(variant("all", 1, 64, devices=("gpu:0",)))
    with opened(plan, driver) as program:
        agree(generated(program.call), right)


def test_one_wait_for_a_region_that_nobody_looks_into(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ticks between instructions of one device don't cut its code; those that others wait for do, unless
    kernels look at them."""
    alone = variant("all", 1, 64, devices=("gpu:0",))
    ticks = tuple(
        replace(i, signals=at, waits=(micro.Wait(at - 1),) if at else ())
        for at, i in enumerate(alone.stream.instrs)
    )
    everywhere = replace(alone, stream=replace(alone.stream, instrs=ticks))
    both = variant("all", 1, 64, pins=MLP_HERE)
    assert [pieces(one, driver) for one in (alone, everywhere, both)] == [1, 1, 1]
    monkeypatch.setattr(driver, "polls", False)
    assert [pieces(one, driver) for one in (alone, everywhere)] == [1, 1]
    assert pieces(both, driver) > 2


def carried() -> Variant:
    """Feed-forward blocks on the CPU; the GPU's code makes all copies."""
    both = variant("all", 1, 64, pins=MLP_HERE)
    copies = [i for i in both.stream.instrs if isinstance(i, micro.Transfer)]
    assert copies and {(i.device, i.lane) for i in copies} == {("gpu:0", "compute")}
    assert {i.source for i in copies} == {"", "cpu:0"}
    return both


def test_a_step_is_one_launch(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host neither copies nor launches while a step is under way; it reads results behind it."""
    log, steps = list[str](), list[tuple[int, int]]()
    record, copy = driver.record, driver.copy

    def replayed(work: Any) -> Any:
        graph = record(work)

        def launched() -> None:
            log.append("launch")
            graph()

        return launched

    def noted(*pairs: tuple[Rect, Rect]) -> None:
        log.append("copy")
        copy(*pairs)

    monkeypatch.setattr(driver, "record", replayed)
    monkeypatch.setattr(driver, "copy", noted)

    def call(*given: Any) -> Any:
        log.clear()
        found = program.call(*given)
        steps.append((log.count("launch"), log.count("copy")))
        return found

    with opened(a_plan(carried()), driver, poison=False) as program:
        right = reference(0.0)
        for _ in range(3):
            steps.clear()
            agree(generated(call, 0.0), right)
    assert set(steps) == {(1, 0)}


def test_the_gpu_waits_for_a_late_processor(driver: Driver, right: Result) -> None:
    """Its products come late: the GPU's lane tells how long it waited, in the host's time."""
    plan = a_plan(carried())
    with opened(plan, driver) as program:
        # emulated, the kernels in front take some tenths of a second
        cpu, late = program.devices["cpu:0"], 0.02 if isinstance(driver, GpuDriver) else 1.0
        run = cpu.run

        def slow(loaded: Any, epoch: int) -> None:
            time.sleep(late)
            run(loaded, epoch)

        cpu.run = slow  # type: ignore[method-assign,assignment]
        for _ in range(2):  # steps are recorded when they come for the second time, which takes a while
            agree(generated(program.call), right)
        program.trace = Trace()
        generated(program.call)
        for step in program.trace.steps:
            mine = [at for at, i in enumerate(plan.variants[0].stream.instrs) if i.device == "gpu:0"]
            stamps = step.stamps[mine]
            assert (np.diff(stamps, axis=1) >= 0).all() and (np.diff(stamps[:, 2]) >= 0).all()
            assert (stamps[:, 0] >= step.begun).all() and (stamps[:, 2] <= step.ended).all()
            assert (stamps[:, 1] - stamps[:, 0]).sum() >= 0.9e9 * late
            assert (stamps[:, 2] - stamps[:, 1]).sum() <= step.ended - step.begun - 0.9e9 * late


def test_the_gpu_gives_up_with_the_processor(driver: Driver, right: Result) -> None:
    """An error of the processor ends a step that the GPU is in; the next one is right."""
    plan, failing, failed = a_plan(carried()), True, 0
    with opened(plan, driver) as program:
        loses_the_processor(program, lambda: failing)

        def call(*given: Any) -> Any:
            nonlocal failing, failed
            failing = True
            with pytest.raises(DeviceError, match="cpu:0 is lost"):
                program.call(*given)
            failing, failed = False, failed + 1
            return program.call(*given)

        agree(generated(call), right)
    assert failed


def pieces(one: Variant, driver: Driver) -> int:
    """Into how many pieces the GPU's code is cut."""
    with opened(a_plan(one), driver) as program:
        program.open()
        (executor,) = program._executors.values()
        return sum(len(c._pieces) for c in executor._codes if isinstance(c, code.Code))
