"""What a GPU gives stays within what the plan says; and what happens where it has less.

Its memory is counted, kernels don't run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashrt import engine
from flashrt.backend import ROOM, TRANSIENT, WORKSPACE
from flashrt.backends.cpu import CpuBackend
from flashrt.backends.cuda import CudaBackend, CudaDevice
from flashrt.backends.cuda.args import Launch
from flashrt.backends.cuda.kernels import offered
from flashrt.backends.cuda.operands import Scratch
from flashrt.backends.reference import ReferenceBackend
from flashrt.cli.options import open_model
from flashrt.compiler import CompileOptions, compile_model
from flashrt.errors import DeviceError
from flashrt.frontend.imported import Imported
from flashrt.ir.micro import Dispatch
from flashrt.ir.ops import LINEAR_BF16, PAGE
from flashrt.ir.physical import Budget
from flashrt.llm.generate import Generator
from flashrt.llm.kv import pages_for
from flashrt.llm.request import Request, Sampling
from flashrt.machine import Device, Link, Machine, Measured
from flashrt.passes import budget
from flashrt.program import Plan, Program
from flashrt.runtime import room
from tests.backends.cuda_emulated import EmulatedDriver
from tests.cli.tiny_plan import chat, constants, graph
from tests.tiny import CONTEXT, DIM, HEADS, VOCAB, tiny_graph, tiny_import, tiny_source

LAYERS = 6
PAGES = CONTEXT // PAGE
GPU = "gpu:0"
LIBRARY = WORKSPACE["gpu"][f"linear {LINEAR_BF16}"].device  # of a library of the GPU's, which isn't here


class Counting(EmulatedDriver):
    """A GPU that gives memory and computes nothing, so that the host has to set ticks."""

    def __init__(self, index: int = 0, most: int = 1 << 40) -> None:
        super().__init__(index, most)
        self.polls = False

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch.kernel)


def assumed(value: float) -> Measured:
    return Measured(value, "assumed")


def spec(kind: str, limit: int | None = None) -> Device:
    kernels = {"gpu": offered(), "cpu": CpuBackend().kernels()}[kind]
    return Device(
        f"{kind}:0", kind, "test", 1 << 34, assumed(1e8), {"f32": assumed(1e12)}, assumed(0.1),
        kernels=kernels, cores=1, limit=limit, workspace=WORKSPACE[kind],
    )  # fmt: skip


def compiled(*devices: Device, **options: Any) -> Plan:
    pairs = [(a.id, b.id) for a in devices for b in devices if a is not b]
    links = [Link(a, b, assumed(1e10), assumed(1.0)) for a, b in pairs]
    links += [Link("disk", d.id, assumed(1e7), assumed(50.0)) for d in devices]
    made = CompileOptions(**{"tokens": 64, "sequences": 3, **options})
    return compile_model(tiny_import(LAYERS), Machine(devices, tuple(links)), made)


def budgets(plan: Plan) -> list[Budget]:
    return [b for v in plan.variants for b in v.budgets if b.device == GPU]


def ran(plan: Plan, driver: EmulatedDriver) -> dict[str, int]:
    """Prompts in large steps and small ones, greedy and drawn; by owner, what is then held of the GPU."""
    devices: dict[str, Any] = {
        d.id: CudaDevice(d, driver) if d.kind == "gpu" else CpuBackend().open(d) for d in plan.machine.devices
    }
    host = ReferenceBackend().open(replace(plan.machine.devices[-1], id="host", kind="reference"))
    weights = tiny_source(tiny_graph(LAYERS))
    with Program(plan, devices, host, pages=PAGES, source=weights) as program:
        for temperature in (0.0, 0.8, 0.0):
            generator = Generator(
                program.call, context=CONTEXT, eos=(), pages=PAGES, max_tokens_per_step=64, max_sequences=3
            )
            for name, length in (("a", 70), ("b", 9), ("c", 1)):
                prompt = tuple(i % 90 for i in range(length))
                generator.add(Request(name, prompt, Sampling(max_tokens=4, temperature=temperature, seed=1)))
            generator.run()
        assert {e.stream.name for e in program._executors.values()} == {v.name for v in plan.variants}
        held: dict[str, int] = {
            owner: n for (device, owner), n in program.residents.held.items() if device == GPU
        }
        assert sum(held.values()) == driver.used
    return held


@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
def test_a_processor_without_all_kinds_of_arithmetic(share: float) -> None:
    """It gets no part of an attention that large steps compute in a way that it can't: such as bf16."""
    alone = budgets(compiled(spec("gpu"), numerics="fast"))
    least = alone[-1].state + max(b.activations + b.workspace for b in alone)
    gpu = spec("gpu", least + int(share * alone[-1].weights) + (1 << 15))
    few = tuple((kernel, numerics) for kernel, numerics in spec("cpu").kernels if "bf16" not in numerics)
    plan = compiled(gpu, replace(spec("cpu"), kernels=few), numerics="fast")
    for variant in plan.variants:
        for i in (i for i in variant.stream.instrs if isinstance(i, Dispatch)):
            able = plan.machine.device(i.device).supports(i.kernel, i.numerics)
            assert able or i.kernel.startswith("host.") or i.kernel in ("kv_write", "view", "slice"), i


@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("beside", [(), ("cpu",)], ids=["alone", "beside a processor"])
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_the_peak_is_within_the_budget(numerics: str, beside: tuple[str, ...], share: float) -> None:
    """With room for all weights, for some, and for none but those that pass."""
    others = tuple(map(spec, beside))
    (small, large) = budgets(compiled(spec("gpu"), numerics=numerics))
    least = large.state + max(b.activations + b.workspace for b in (small, large))
    limit = least + int(share * large.weights) + (1 << 15)
    plan = compiled(spec("gpu", limit), *others, numerics=numerics)
    driver = Counting()
    held = ran(plan, driver)
    rooms = budgets(plan)
    taken = max(b.weights for b in rooms) + max(b.state for b in rooms)
    taken += max(b.activations + b.workspace for b in rooms)
    library = LIBRARY if any(b.workspace >= ROOM + LIBRARY for b in rooms) else 0
    assert taken <= limit
    assert driver.peak <= taken - library
    assert held["workspace"] <= max(b.workspace for b in rooms) - library
    assert held["activations"] <= max(b.activations for b in rooms)
    assert held.get("weights", 0) + held.get("staging", 0) <= max(b.weights for b in rooms)
    assert driver.used <= driver.peak


def test_a_gpu_of_two_gigabytes_has_room_for_more_than_what_it_sets_aside() -> None:
    for numerics in ("exact", "int8", "fast"):
        for b in budgets(compiled(spec("gpu", 2 << 30), numerics=numerics)):
            assert b.workspace <= (2 << 30) // 10
            assert b.activations <= TRANSIENT


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's memory where its numerics are, and what is taken in pieces no further than that."""
    for numerics, queries, library in (("fast", 8 * 64 * HEADS * DIM, LIBRARY), ("exact", 0, 0)):
        whole = compiled(spec("gpu"), numerics=numerics).variants[-1].physical
        always = ROOM + (4 << 20) + library + 2 * 4 * 3 * VOCAB
        assert budget.workspace(whole.nodes, whole, spec("gpu")) == always
        assert budget.transient(whole.nodes, whole, spec("gpu")) == max(80 * 3 * VOCAB, queries)
        with monkeypatch.context() as patched:
            patched.setattr(budget, "TRANSIENT", 1000)
            assert budget.transient(whole.nodes, whole, spec("gpu")) == 1000


def test_scratch_is_there_once() -> None:
    given = list[int]()

    def alloc(nbytes: int) -> Any:
        given.append(nbytes)
        return np.zeros(nbytes, np.uint8)

    scratch = Scratch(alloc)
    first = scratch("sums", 100)
    assert scratch("sums", 60) is first and scratch("other", 4) is not first
    assert scratch.has(first) and not scratch.has(first.copy())
    larger = scratch("sums", 101)
    assert scratch.has(larger) and not scratch.has(first) and len(scratch.all()) == 2
    assert given == [100, 16, 101]
    scratch.clear()
    assert not scratch.all()


# ---- a GPU with less memory than the plan takes --------------------------------------------
@pytest.fixture
def a_plan() -> Plan:
    model = Imported(graph(), tiny_import().weights, constants(), chat())
    return compile_model(model, Machine((spec("gpu"),)), CompileOptions(tokens=32, sequences=3))


def takes(plan: Plan, pages: int) -> int:
    """Bytes of the GPU that a plan takes with so many pages."""
    rooms = budgets(plan)
    page = max(b.state for b in rooms) // pages_for(CONTEXT)
    beside = max(b.weights for b in rooms) + max(b.activations + b.workspace for b in rooms)
    return beside + pages * page


def with_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> list[Counting]:
    """A GPU with so much memory from now on; those that were opened."""
    opened, backend = list[Counting](), engine._backend

    def driver(index: int) -> Counting:
        opened.append(Counting(index, most))
        return opened[-1]

    monkeypatch.setattr(
        engine, "_backend", lambda kind: CudaBackend(driver) if kind == "gpu" else backend(kind)
    )
    return opened


@pytest.mark.parametrize("wanted,least,free,pages", [(48, 16, 48, 48), (48, 16, 47, 24), (48, 16, 16, 16),
                                                     (40, 16, 19, 16), (5, 5, 5, 5)])  # fmt: skip
def test_a_cache_that_fits(a_plan: Plan, wanted: int, least: int, free: int, pages: int) -> None:
    """Half as large, and so on, where something else has memory of the device; nothing stays reserved."""
    driver = Counting(0, takes(a_plan, free))
    device = CudaDevice(a_plan.machine.devices[0], driver)
    assert room.fitting(a_plan, {GPU: device}, wanted, least) == pages
    assert not driver.used


def test_host_memory_doesnt_limit_the_cache_of_a_gpu(a_plan: Plan) -> None:
    whole = pages_for(CONTEXT)
    assert room.page_count(a_plan, CONTEXT, 3, free=0) == 3 * whole
    tight = tuple(
        replace(v, budgets=tuple(replace(b, limit=takes(a_plan, whole)) for b in v.budgets))
        for v in a_plan.variants
    )
    assert room.page_count(replace(a_plan, variants=tight), CONTEXT, 3, free=0) == whole


def test_a_smaller_cache_is_said_once(
    a_plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And generating goes on, in the cache that there is."""
    with_memory(monkeypatch, takes(a_plan, 30))
    with open_model("tiny", engine.Compiled(a_plan, True), None, sequences=3, live=False) as llm:
        assert llm.program.pages == llm.generator.pool.free == 24
        told = capsys.readouterr().err
        assert told.count("the KV cache has room for 384 tokens instead of 768") == 1 and GPU in told
        prompts = [[1] * 40, [2] * 90, [3]]
        for name, prompt in enumerate(prompts):
            llm.generator.add(Request(str(name), tuple(prompt), Sampling(max_tokens=3, ignore_eos=True)))
        assert [len(c.tokens) for c in llm.generator.run()] == [3, 3, 3]
    assert not capsys.readouterr().err


def test_no_room_at_all(a_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lacks, where, and what to do, before anything is loaded; the device is closed."""
    opened = with_memory(monkeypatch, takes(a_plan, pages_for(CONTEXT)) - 1)
    with pytest.raises(DeviceError, match=r"gpu:0 has no room for \w+: it takes 0\.\d\d GB") as caught:
        engine.LLM("tiny", plan=a_plan, sequences=3, live=False)
    assert "256 tokens" in caught.value.what and "free)" in caught.value.what
    assert "--budget gpu:0=" in caught.value.hint
    (driver,) = opened
    assert not driver.used and not driver.launches


def test_a_step_without_memory_fails_alone(a_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else takes all that is left before the first step: that one fails, and says why. When there
    is memory again, the requests go on."""
    opened = with_memory(monkeypatch, 1 << 40)
    with engine.LLM("tiny", plan=a_plan, sequences=3, live=False) as llm:
        llm.program.open()
        driver = opened[0]
        driver.most = driver.used
        llm.generator.add(Request("a", (1, 2, 3), Sampling(max_tokens=3, ignore_eos=True)))
        with pytest.raises(DeviceError, match=r"gpu:0 has no room for a step: .* free"):
            llm.generator.step()
        llm.generator.add(Request("b", (4,), Sampling(max_tokens=2, ignore_eos=True)))
        driver.most = 1 << 40
        assert [len(c.tokens) for c in llm.generator.run()] == [3, 2]
