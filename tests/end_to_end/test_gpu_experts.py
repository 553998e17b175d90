"""Mixtures of experts on a GPU, real or emulated, and on one that is too small, beside a CPU: transformers'
logits, and the tokens of the CPU alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt.backends.cpu import CpuBackend
from flashrt.backends.cuda import CudaDevice
from flashrt.backends.cuda.driver import Driver
from flashrt.backends.cuda.kernels import offered
from flashrt.backends.reference import ReferenceBackend
from flashrt.compiler import CompileOptions, compile_model, keep_as_chosen
from flashrt.frontend import models, rope
from flashrt.ir import micro
from flashrt.llm.generate import Generator
from flashrt.llm.request import Sampling
from flashrt.machine import Device, Link, Machine, Measured
from flashrt.program import Plan, Program
from tests.end_to_end.flat import Flat, Generated, Part, generate
from tests.end_to_end.test_experts import MODELS, MORE
from tests.end_to_end.test_transformers import CONTEXT, TOLERANCE, theirs
from tests.end_to_end.tiny_hf import write_model

# bytes of a GPU that has room for everything but one layer's experts
BUDGETS = {"mixtral": 800_000, "qwen3_moe": 700_000, "gpt_oss": 800_000, "deepseek_v3": 450_000}
PAGES = 24
STEPS: list[list[Part]] = [[("a", 5), ("b", 9)], [("a", 1), ("b", 1), ("c", 8)], [("c", 1), ("a", 1)]]


def assumed(value: float) -> Measured:
    return Measured(value, "assumed")


def gpu(memory: int) -> Device:
    return Device(
        "gpu:0", "gpu", "test", memory, assumed(1e12), {"f32": assumed(1e13)}, assumed(0.1), kernels=offered()
    )


CPU = Device(
    "cpu:0", "cpu", "test", 1 << 30, assumed(5e10), {"f32": assumed(1e11)}, assumed(0.1),
    kernels=CpuBackend().kernels(), cores=1,
)  # fmt: skip
LARGE = 1 << 30


def machine(*devices: Device) -> Machine:
    pairs = [(a.id, b.id) for a in devices for b in devices if a is not b]
    links = [Link(a, b, assumed(1e10), assumed(1.0)) for a, b in pairs]
    return Machine(devices, (*links, *(Link("disk", d.id, assumed(1e7), assumed(50.0)) for d in devices)))


@dataclass(frozen=True)
class Written:
    """A model's folder, and the same as transformers has it."""

    name: str
    folder: Path
    model: Any


@pytest.fixture(scope="module", params=BUDGETS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    kind, facts = (MODELS | MORE)[request.param]
    folder = tmp_path_factory.mktemp(kind)
    model = write_model(folder, kind, **facts)
    rope.freeze(model, CONTEXT)
    return Written(request.param, folder, model)


def planned(folder: Path, where: Machine, quantize: str = "") -> Plan:
    options = CompileOptions(context=CONTEXT, tokens=32, sequences=32, quantize=quantize)
    imported = models.read_model(models.find(str(folder)), context=CONTEXT)
    return compile_model(keep_as_chosen(imported, options, where), where, options)


def opened(plan: Plan, driver: Driver) -> Program:
    devices: dict[str, Any] = {}
    for d in plan.machine.devices:
        devices[d.id] = CudaDevice(d, driver) if d.kind == "gpu" else CpuBackend().open(d)
    host = ReferenceBackend().open(replace(plan.machine.devices[-1], id="host", kind="reference"))
    return Program(plan, devices, host, pages=PAGES, poison=True)


def kernels(plan: Plan, op: str) -> set[str]:
    """The devices that run an operation."""
    instrs = (i for v in plan.variants for i in v.stream.instrs if isinstance(i, micro.Dispatch))
    return {i.device for i in instrs if i.kernel.partition("+")[0].partition(".")[0] == op}


@pytest.mark.parametrize("memory", ["enough", "too little"])
def test_logits(written: Written, driver: Driver, memory: str) -> None:
    """Prefill, prefill beside decode, decode."""
    if memory == "enough":
        plan = planned(written.folder, machine(gpu(LARGE)))
        assert kernels(plan, "expert_linear") == {"gpu:0"} and not kernels(plan, "host")
    else:
        plan = planned(written.folder, machine(gpu(BUDGETS[written.name]), CPU))
        assert "cpu:0" in kernels(plan, "expert_linear")
        assert kernels(plan, "attention") == {"gpu:0"}
    rng = np.random.default_rng(2)
    tokens = {n: rng.integers(3, written.model.config.vocab_size, 24).tolist() for n in "abc"}
    wanted = {n: theirs(written.model, ids) for n, ids in tokens.items()}
    with opened(plan, driver) as program:
        flat = Flat(program, tokens)
        for step in STEPS:
            starts = dict(flat.done)
            for name, logits in flat.step(step).items():
                errors = np.abs(logits - wanted[name][starts[name] : flat.done[name]])
                assert errors.max() < TOLERANCE, (step, name)


def test_tokens_are_those_of_the_cpu(written: Written, driver: Driver) -> None:
    found = []
    for where in (machine(CPU), machine(gpu(LARGE)), machine(gpu(BUDGETS[written.name] // 3), CPU)):
        with opened(planned(written.folder, where, "q4"), driver) as program:
            found.append(generated(program))
    for other in found[1:]:
        for name, (tokens, logits) in found[0].items():
            assert other[name][0] == tokens
            np.testing.assert_allclose(other[name][1], logits, rtol=0, atol=1e-5 * np.abs(logits).max())


def generated(program: Program) -> Generated:
    generator = Generator(
        program.call, context=CONTEXT, eos=(), pages=PAGES, max_tokens_per_step=16, max_sequences=4
    )
    prompts = {"a": (5, 17, 40), "b": tuple(range(30, 49))}
    return generate(generator, prompts, Sampling(max_tokens=3, temperature=0.0))
