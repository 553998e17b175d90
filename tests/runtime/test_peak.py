"""What a running program holds stays within what its plan says, by device and owner; so does the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from flashrt.backend import WORKSPACE
from flashrt.backends.cpu import CpuBackend
from flashrt.backends.cpu.rows import (
    FEW,
    RUN,
    SHARED_BYTES,
    SUM_BLOCKS,
    TILE,
    TILE_SCRATCH,
    attention_bytes,
    i8_row_bytes,
    sample_bytes,
)
from flashrt.backends.reference import ReferenceBackend
from flashrt.compiler import CompileOptions, compile_model
from flashrt.ir.physical import Budget
from flashrt.llm.generate import Generator
from flashrt.llm.request import Request, Sampling
from flashrt.machine import Device, Machine, Measured
from flashrt.program import Plan, Program
from tests.tiny import CONTEXT, PAGE, tiny_graph, tiny_import, tiny_source

BACKENDS: dict[str, Any] = {"cpu": CpuBackend(), "reference": ReferenceBackend()}
SLACK = 1.05
LAYERS = 6
PAGES = CONTEXT // PAGE  # what plans count: one sequence of the whole context
GROUPS = ("cpu:0-0", "cpu:1-1")


def known(value: float) -> Measured:
    return Measured(value, "assumed")


def device(id: str, **changes: Any) -> Device:
    kind = id.partition(":")[0]
    cpus = (int(id[-1]),) if "-" in id else ()
    facts = Device(
        id, kind, "test", 1 << 30, known(1e9), {"f32": known(1e9), "i8": known(2e9)}, known(0.1),
        kernels=BACKENDS[kind].kernels(), cpus=cpus, pool="host" if cpus else "",
        workspace=WORKSPACE.get(kind, {}),
    )  # fmt: skip
    return replace(facts, **changes)


def compiled(*devices: Device, **options: Any) -> Plan:
    return compile_model(tiny_import(LAYERS), Machine(devices), CompileOptions(tokens=64, **options))


@contextmanager
def opened(plan: Plan) -> Iterator[Program]:
    devices: dict[str, Any] = {d.id: BACKENDS[d.kind].open(d) for d in plan.machine.devices}
    host = BACKENDS["reference"].open(replace(plan.machine.devices[0], id="host", kind="reference"))
    graph = tiny_graph(LAYERS)
    with Program(plan, devices, host, pages=PAGES, source=tiny_source(graph), poison=True) as program:
        yield program


def run(program: Program) -> tuple[int, ...]:
    """A prompt of 40 tokens in the large variant, then the small one, then the large one again."""
    tokens: list[int] = []
    for seed in (1, 2):
        generator = Generator(
            program.call, context=CONTEXT, eos=(), pages=PAGES, max_tokens_per_step=64, max_sequences=2
        )
        generator.add(Request("a", tuple(range(1, 41)), Sampling(max_tokens=5, seed=seed)))
        tokens += generator.run()[0].tokens
    return tuple(tokens)


def planned(plan: Plan) -> dict[str, Budget]:
    """Each device's budget with the larger figure of the variants, which take turns, for each owner."""
    out: dict[str, Budget] = {}
    for b in (b for v in plan.variants for b in v.budgets):
        a = out.get(b.device, b)
        out[b.device] = Budget(
            b.device, b.limit, max(a.weights, b.weights), max(a.state, b.state),
            max(a.activations, b.activations), max(a.shared, b.shared), max(a.workspace, b.workspace),
        )  # fmt: skip
    return out


def within(plan: Plan) -> dict[str, Budget]:
    """Runs a plan and compares: by device, of each owner and of all together."""
    figures = planned(plan)
    with opened(plan) as program:
        assert len(run(program)) == 10
        held = dict(program.residents.held)
        assert {e.stream.name for e in program._executors.values()} == {"small", "large"}
    assert {device for device, _ in held} == set(figures)
    for id, b in figures.items():
        measured = {owner: nbytes for (on, owner), nbytes in held.items() if on == id}
        assert all(v.peak <= v.limit for v in (b, *(x for y in plan.variants for x in y.budgets)))
        assert sum(measured.values()) <= SLACK * b.peak, (measured, b)
        assert measured.get("weights", 0) + measured.get("staging", 0) <= SLACK * b.weights
        assert measured.get("cache", 0) <= b.state
        assert measured.get("activations", 0) <= SLACK * b.activations, (measured, b)
        assert measured.get("workspace", 0) <= max(b.workspace, 0.01 * b.peak), (measured, b)
    return figures


@pytest.mark.parametrize("numerics", ["exact", "int8", "fast"])
@pytest.mark.parametrize("id", ["cpu:0", "reference:0"])
def test_one_device(id: str, numerics: str) -> None:
    (budget,) = within(compiled(device(id), numerics=numerics)).values()
    assert budget.weights and budget.state and budget.activations
    assert bool(budget.workspace) == (id == "cpu:0")


def test_two_groups_of_one_memory() -> None:
    """What they share is held once, and charged once."""
    if not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("needs processors 0 and 1")
    figures = within(compiled(*map(device, GROUPS)))
    assert set(figures) == set(GROUPS), "the planner should use both"


def test_two_memories() -> None:
    assert set(within(compiled(device("reference:0"), device("reference:1")))) >= {"reference:0"}


@pytest.mark.parametrize("id", ["cpu:0", "reference:0"])
def test_a_ring_for_three_tenths_of_the_weights(id: str) -> None:
    """Both variants use one ring; tokens are those of a plan with room for everything."""
    whole = compiled(device(id))
    b = planned(whole)[id]
    tight = compiled(device(id, limit=b.peak - b.weights * 7 // 10))
    assert any(block.home == "ring" for v in tight.variants for block in v.stream.blocks)
    within(tight)
    with opened(whole) as one, opened(tight) as other:
        assert run(one) == run(other)


def test_kernels_keep_to_what_plans_count() -> None:
    """The sizes that the CPU's kernels ask for, against the contract, for models small and large."""
    allowed = WORKSPACE["cpu"]

    def core(op: str, channels: int) -> int:
        return allowed[op].core + allowed[op].channel * channels

    for k in (32, 576, 1536, 4096, 14336, 53248):
        for sums in (1, 2):
            assert RUN * i8_row_bytes(k, sums) + (512 + TILE) * SUM_BLOCKS <= core("linear", k)
        assert core("linear", k) >= TILE_SCRATCH
    for k, v in ((16, 16), (64, 64), (128, 128), (192, 128), (256, 256), (576, 512)):
        assert attention_bytes(k, v) <= core("attention", k + v)
        assert 16 * 4 * v <= core("attention", k + v)
    for heads in (1, 8, 128):
        assert SHARED_BYTES + 8 * FEW * heads <= allowed["attention"].team
    for v in (96, 49152, 152064, 262144):
        assert sample_bytes(v) <= core("sample", v)


# ---- the whole process ---------------------------------------------------------------
INTERPRETER = 64 << 20  # bytes of the tokenizer, compiled kernels, threads and what Python keeps
CHILD = """
import json, sys
from flashrt import engine
from flashrt.compiler import CompileOptions

def anonymous():
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith("RssAnon"))

options = CompileOptions(numerics=sys.argv[1], context=2048)
plan = engine.obtain("smollm2", options, devices=sys.argv[2].split(",")).plan
before = anonymous()
with engine.LLM("smollm2", plan=plan, live=False) as llm:
    llm.program.open()
    llm.generate("All work and no play makes Jack a dull boy. " * int(sys.argv[3]), max_tokens=4)
    grown = anonymous() - before
    owners = ("weights", "state", "activations", "workspace")
    figures = {}
    for b in (b for v in plan.variants for b in v.budgets):
        of = figures.setdefault(b.device, dict.fromkeys(owners, 0))
        for owner in owners:
            of[owner] = max(of[owner], getattr(b, owner))
print(json.dumps([grown, sum(sum(of.values()) for of in figures.values())]))
"""


@pytest.mark.model
@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("devices", ["cpu:0", ",".join(GROUPS)])
def test_the_process_grows_as_the_plan_says(numerics: str, devices: str) -> None:
    """A prompt of several large steps, then small ones, in a process of its own."""
    if devices != "cpu:0" and not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("needs processors 0 and 1")
    for repeats in ("1", "80"):  # the first one may compile the plan and kernels
        command = [sys.executable, "-c", CHILD, numerics, devices, repeats]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, figure = json.loads(done.stdout.splitlines()[-1])
    assert grown <= SLACK * figure + INTERPRETER
    assert grown >= 0.5 * figure, "the plan should say what it takes, not far more"
