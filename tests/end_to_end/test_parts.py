"""Attention by heads, and blocks as sums, through the runtime: on two devices the tokens of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt import program
from flashrt.backend import Backend
from flashrt.backends.cpu import CpuBackend
from flashrt.backends.reference import ReferenceBackend
from flashrt.compiler import CompileOptions, compile_model
from flashrt.ir import laws
from flashrt.machine import Device, Link, Machine, Measured
from flashrt.program import Plan, Program
from tests.generating import PAGES, Result, generate
from tests.tiny import tiny_graph, tiny_import, tiny_source

OPTIONS = CompileOptions(tokens=64)
BACKENDS: dict[str, Backend] = {"reference": ReferenceBackend(), "cpu": CpuBackend()}
SLOW = 20.0  # microseconds of a link's latency: sums, which need fewer copies, pay


def assumed(value: float) -> Measured:
    return Measured(value, "assumed")


def machine(kind: str, count: int, latency: float = 1.0) -> Machine:
    """So slow that sharing pays even in a tiny model."""
    devices = tuple(
        Device(
            f"{kind}:{i}", kind, "test", 1 << 30, assumed(1e8), {"f32": assumed(1e12)}, assumed(0.1),
            kernels=BACKENDS[kind].kernels(), cpus=(i,) if kind == "cpu" else (),
        )
        for i in range(count)
    )  # fmt: skip
    links = [
        Link(a.id, b.id, assumed(1e10), assumed(latency)) for a in devices for b in devices if a is not b
    ]
    return Machine(devices, (*links, *(Link("disk", d.id, assumed(1e7), assumed(50.0)) for d in devices)))


def opened(plan: Plan) -> Program:
    devices = {d.id: BACKENDS[d.kind].open(d) for d in plan.machine.devices}
    host = BACKENDS["reference"].open(replace(plan.machine.devices[0], id="host", kind="reference"))
    return Program(plan, devices, host, pages=PAGES, source=tiny_source(tiny_graph()), poison=True)


def tokens(plan: Plan) -> Result:
    with opened(plan) as running:
        return generate(running.call)


def ops(plan: Plan, device: str) -> Iterator[tuple[str, str]]:
    for variant in plan.variants:
        for node in variant.physical.nodes:
            if node.device == device and node.part is not None:
                yield variant.name, node.op


@pytest.mark.parametrize("kind", BACKENDS)
def test_heads_give_the_same_bits(kind: str) -> None:
    """Both variants share the heads of the cache, a long prompt's chunks and single tokens alike."""
    alone = compile_model(tiny_import(), machine(kind, 1), OPTIONS)
    shared = compile_model(tiny_import(), machine(kind, 2), OPTIONS)
    for device in (f"{kind}:0", f"{kind}:1"):
        assert {("small", "attention"), ("large", "attention")} <= set(ops(shared, device))
    assert not [n for v in shared.variants for n in v.physical.nodes if n.op == "add" and n.of != n.name]
    assert tokens(shared) == tokens(alone)


@pytest.mark.parametrize("kind", BACKENDS)
def test_sums_are_close(kind: str) -> None:
    """In the fast mode products may be sums; the first logits differ by rounding only."""
    fast = replace(OPTIONS, numerics="fast")
    alone = compile_model(tiny_import(), machine(kind, 1), fast)
    shared = compile_model(tiny_import(), machine(kind, 2, SLOW), fast)
    for variant in shared.variants:
        laws.check(variant.physical)
    assert any(w.columns for v in shared.variants for w in v.stream.weights)
    for (_, got), (_, want) in zip(tokens(shared), tokens(alone), strict=True):
        a, b = (np.frombuffer(x, np.float32)[:96] for x in (got, want))
        np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


def test_only_the_fast_mode_sums() -> None:
    for mode in ("exact", "int8"):
        plan = compile_model(tiny_import(), machine("reference", 2, SLOW), replace(OPTIONS, numerics=mode))
        assert not any(w.columns for v in plan.variants for w in v.stream.weights)


def test_a_plan_with_parts_is_packed_once(tmp_path: Path) -> None:
    """Parts are read from the packed weights they are parts of, which are in the file once."""
    plan = compile_model(tiny_import(), machine("reference", 2), OPTIONS)
    blocks: Any = program._blocks(plan)
    assert not any("#" in name for name in blocks)
    assert any(w.of for v in plan.variants for w in v.stream.weights)
