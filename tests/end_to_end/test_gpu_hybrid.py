"""The benchmark of a GPU that is too small runs, on devices that pretend to be one and a processor."""

from __future__ import annotations

import re
from dataclasses import replace
from zlib import crc32

import numpy as np

from benchmarks.gpu_experts import Chosen
from benchmarks.gpu_experts import run as run_experts
from benchmarks.gpu_hybrid import Asked, Hybrid, rates, run
from benchmarks.llama_shape import RandomSource, Shape
from flashrt.backend import U8, OpenDevice
from flashrt.backends.null import NullBackend
from flashrt.backends.reference import ReferenceBackend
from flashrt.backends.reference.kernels import kernels
from flashrt.ir.types import Weight, size
from flashrt.machine import Device, Link, Machine, Measured
from flashrt.passes.cost import block_bytes

SHAPE = Shape(layers=3, hidden=512, ffn=2048, heads=8, kv_heads=2, head=64, vocab=1024)
ASKED = Asked(SHAPE, prompts=(24, 80), answer=2, tokens=32, numerics="exact", cache=96, times=1)
SMALL, LARGE = 6 << 20, 64 << 20  # bytes of a GPU that has room for half of the weights, and for all of them


def assumed(value: float) -> Measured:
    return Measured(value, "assumed")


class Pretend:
    """A host that reads a gigabyte a second and a GPU that reads fifty. computes: whether they do that."""

    def __init__(self, computes: bool) -> None:
        self._backend = ReferenceBackend() if computes else NullBackend()

    def machine(self) -> Machine:
        gpu = Device(
            "gpu:0", "gpu", "pretend", 1 << 30, assumed(5e10), {"f32": assumed(5e12), "bf16": assumed(5e13)},
            assumed(0.1), kernels=kernels(),
        )  # fmt: skip
        host = Device(
            "cpu:0", "cpu", "pretend", 1 << 30, assumed(1e9), {"f32": assumed(2e10)}, assumed(0.1),
            kernels=kernels(),
        )  # fmt: skip
        pairs = (("cpu:0", "gpu:0"), ("gpu:0", "cpu:0"))
        return Machine((gpu, host), tuple(Link(a, b, assumed(1e9), assumed(1.0)) for a, b in pairs))

    def open(self, spec: Device) -> OpenDevice:
        return self._backend.open(spec)

    def peak(self) -> int:
        return 0


class Steady:
    """Weights that are the same whoever reads which rows first."""

    def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
        whole = np.empty(block_bytes(weight), np.uint8)
        RandomSource(crc32(weight.name.encode())).read(weight, 0, size(weight.type.shape[0], {}), whole)
        start = block_bytes(weight, 0, lo)
        out[:] = whole[start : start + len(out)]


def test_it_runs_and_tells() -> None:
    known, told = run(Pretend(computes=False), ASKED, [SMALL])
    assert "cpu:0 reads 1.0 GB/s with 1 cores; link 1.0 and 1.0 GB/s" in known
    for name in ("decode at 24", "prefill 24", "prefill 80"):
        assert re.search(rf"{name} +[\d.]+ tok/s  limit +[\d.]+  share +[\d.]+  plan +[\d.]+", told), told
    assert re.search(r"the GPU is idle for [\d.]+ of it", told)
    taken, allowed = re.search(r"([\d.]+) MB by our count, ([\d.]+) MB allowed", told).groups()  # type: ignore[union-attr]
    assert 0 < float(taken) <= float(allowed)
    assert "GB pass" in told


def test_what_products_read_is_told() -> None:
    machine = Pretend(computes=False).machine()
    gpu, host = machine.devices
    known = rates(replace(machine, devices=(gpu, replace(host, gemv=assumed(7e8)))))
    assert "reads 1.0 GB/s with 1 cores, products read 0.7 GB/s; link" in known


def test_tokens_are_those_of_a_gpu_with_room_for_everything() -> None:
    """Whether weights pass, are computed with on the host, or lie on the GPU."""
    computer, found = Pretend(computes=True), []
    for budget in (SMALL, LARGE):
        hybrid = Hybrid(computer, computer.machine(), ASKED, budget, Steady())
        found.append([int(hybrid.step(32, 0)[0]), *(int(hybrid.step(1, 32 + at)[0]) for at in range(3))])
        passes = {b.device for v in hybrid.plan.variants for b in v.stream.blocks if b.home == "ring"}
        assert passes == ({"gpu:0"} if budget == SMALL else set())
        hybrid.close()
    assert found[0] == found[1]


def test_the_benchmark_of_experts_runs_and_tells() -> None:
    """Where the GPU keeps some, the tokens are the same, and in the end those asked for most are there."""
    shape = Shape(
        layers=3,
        hidden=256,
        ffn=256,
        heads=4,
        kv_heads=2,
        head=64,
        vocab=512,
        experts=16,
        top_k=2,
        context=64,
    )
    chosen = Chosen(shape, 1_800_000, settle=1.0, answer=8, numerics="exact")
    told = "\n".join(run_experts(Pretend(computes=True), chosen))
    assert re.search(r"with: 0 layers' experts on gpu:0, and [1-9] experts of each of 3 more", told), told
    assert re.search(r"  [1-9]\d?% of choices kept, [1-9]\d* exchanged$", told, re.M), told
    assert len(re.findall(r"decode +[\d.]+ tok/s  plan [\d.]+", told)) == 3 and told.endswith("same 1.00")
