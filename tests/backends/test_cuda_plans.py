"""Whole plans on a GPU: the tiny model gives the reference's tokens, with and without joined kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashrt.backend import OpenDevice
from flashrt.backends.cuda import CudaDevice, prefill
from flashrt.backends.cuda.args import Attention, Launch, Rope
from flashrt.backends.cuda.compile import source
from flashrt.backends.cuda.driver import Driver
from flashrt.backends.cuda.kernels import offered
from flashrt.backends.reference import ReferenceBackend
from flashrt.ir.ops import (
    ATTENTION_BF16,
    ATTENTION_CACHED,
    ATTENTION_EXACT,
    LINEAR_BF16,
    LINEAR_EXACT,
    LINEAR_I8,
)
from flashrt.machine import Device, Machine, Measured
from flashrt.passes import pipeline
from flashrt.program import Plan, Program, Variant
from tests.backends import cuda_streams
from tests.backends.kernel_texts import attention_text
from tests.generating import PAGES, generate
from tests.tiny import VOCAB, tiny_graph, tiny_import, tiny_source

GRAPH = tiny_graph()
RATE = Measured(1e12, "assumed")
GPU = Device(
    "gpu:0", "gpu", "test", 1 << 34, RATE, {"f32": RATE}, Measured(1.0, "assumed"), kernels=offered()
)


@pytest.fixture(scope="module")
def gpu(driver: Driver) -> CudaDevice:
    return CudaDevice(GPU, driver)


def opened(device: OpenDevice, spec: Device, **options: Any) -> Program:
    machine = Machine((spec,))
    planned = pipeline.compile_graph(GRAPH, machine, pipeline.Options(**options))
    variant = Variant.of("all", 1, 64, planned.physical, planned.stream)
    plan = Plan("tiny", "", "", {}, GRAPH, (variant,), machine, tiny_import().weights)
    host = ReferenceBackend().open(spec)
    return Program(plan, {spec.id: device}, host, pages=PAGES, source=tiny_source(GRAPH), poison=True)


def reference(**options: Any) -> Any:
    spec = replace(GPU, kind="reference", kernels=ReferenceBackend().kernels())
    with opened(ReferenceBackend().open(spec), spec, **options) as program:
        return generate(program.call, 2)


@pytest.mark.parametrize(
    "off", [frozenset(), frozenset({"elide", "pack"})], ids=["all passes", "some passes"]
)
@pytest.mark.parametrize(
    "numerics,attention,tolerance",
    [
        (LINEAR_EXACT, ATTENTION_EXACT, 1e-5),
        (LINEAR_EXACT, ATTENTION_CACHED, 1e-2),
        (LINEAR_I8, ATTENTION_CACHED, 1e-2),
        (LINEAR_BF16, ATTENTION_BF16, 4e-2),
    ],
)
def test_the_tiny_model(
    gpu: CudaDevice, off: frozenset[str], numerics: str, attention: str, tolerance: float
) -> None:
    options = {"numerics": numerics, "attention": attention, "disabled": off}
    want = reference(**options)
    with opened(gpu, GPU, **options) as program:
        got = generate(program.call, 2)
    for (tokens, logits), (right, meant) in zip(got, want, strict=True):
        a, b = (np.frombuffer(x, np.float32)[:VOCAB] for x in (logits, meant))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())
        if attention == ATTENTION_EXACT:
            assert tokens == right


@pytest.mark.parametrize("room", [prefill.ROOM, 8 << 10, 64])
@pytest.mark.parametrize("transient", [prefill.TRANSIENT, 3000])
def test_attention_of_many_tokens_by_the_library(
    gpu: CudaDevice, room: int, transient: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a prompt, several sequences in a step: the library's attention is that of the kernel.

    All heads at once, one by one, or with more keys than there is room for; a prompt whole, or in pieces."""
    monkeypatch.setattr(prefill, "MANY", 1)
    monkeypatch.setattr(prefill, "ROOM", room)
    monkeypatch.setattr(prefill, "TRANSIENT", transient)
    called: list[object] = []
    attend = prefill.LibraryAttention.__call__
    monkeypatch.setattr(prefill.LibraryAttention, "__call__", lambda self: called.append(attend(self)))
    options = {"numerics": LINEAR_EXACT, "attention": ATTENTION_BF16}
    want = reference(**options)
    with opened(gpu, GPU, **options) as program:
        got = generate(program.call, 2)
    assert called
    for (_, logits), (_, meant) in zip(got, want, strict=True):
        a, b = (np.frombuffer(x, np.float32)[:VOCAB] for x in (logits, meant))
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-2 * np.abs(b).max())


def noting(noted: list[Launch]) -> Driver:
    """A driver that notes launches; nothing is computed."""
    from tests.backends.cuda_emulated import EmulatedDriver

    class Noting(EmulatedDriver):
        def launch(self, launch: Launch) -> None:
            noted.append(launch)

    return Noting()


def launches(tokens: int, **options: Any) -> list[Launch]:
    """Of a step."""
    noted: list[Launch] = []
    with opened(CudaDevice(GPU, noting(noted)), GPU, **options) as program:
        ids = np.arange(tokens, dtype=np.int32)
        given = {"ids": ids, "positions": ids, "rows": ids[-1:], "seq": 0 * ids, "pages": ids[:1, None]}
        given |= {"temperature": np.zeros(1, np.float32), "top_k": np.zeros(1, np.int32)}
        given |= {name: np.ones(1, np.float32) for name in ("top_p", "min_p", "penalty")}
        given |= {name: np.ones(1, np.int64) for name in ("seed", "draw")}
        program.call({**given, "history": np.full((1, 1), -1, np.int32)}, {"C": 16})
    assert not any(name in launch.kernel for launch in noted for name in ("quantize", "round_bf16"))
    return noted


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize(
    "numerics,attention",
    [(LINEAR_EXACT, ATTENTION_CACHED), (LINEAR_I8, ATTENTION_CACHED), (LINEAR_BF16, ATTENTION_BF16)],
)
def test_few_launches_with_all_numerics(tokens: int, numerics: str, attention: str) -> None:
    """Attention; o, gate and up, down and the next qkv as one: nothing else in a layer, but `rope` for
    several tokens. Inputs are read early."""
    found = launches(tokens, numerics=numerics, attention=attention)
    names = [launch.kernel.split("_")[0] for launch in found]
    at = [i for i, name in enumerate(names) if name == "attention"]
    assert len(at) == len(GRAPH.states) > 1
    rope = ["rope"] * (tokens > 1)
    assert names[at[0] + 1 : at[1] + 1] == ["linear", *rope, "attention"]
    assert found[at[0] + 1].fields[0] == 4
    given = [launch.fields for launch in found]
    assert all(fields.late == 0 for fields in given if isinstance(fields, Rope | Attention))


def test_what_is_no_input_is_read_late() -> None:
    noted: list[Launch] = []
    text = attention_text(2, 1, 16, 16, ",causal=true")
    values = {slot: 0 for slot in range(6)}
    cuda_streams.run(CudaDevice(cuda_streams.spec(), noting(noted)), text, values, T=2)
    assert [launch.kernel for launch in noted] == ["pull", "rope", "attention_2_1"]
    fields = [launch.fields for launch in noted]
    assert all(given.late == 1 for given in fields if isinstance(given, Rope | Attention))


def test_every_kernel_waits_for_those_before_it() -> None:
    """Inputs are read before that wait, so none may start before `pull` is through: it lets nobody start, and
    behind it each waits."""
    kernels = source().split('extern "C" __global__')[1:]
    names = (re.findall(r"(\w+)\((?:const __grid_constant__ )?\w+ \w+\)", k)[0] for k in kernels)
    bodies = {name: k.partition("\n}\n")[0] for name, k in zip(names, kernels, strict=True)}
    templates = r"(linear|attention|attention_tensor|gemm|columns|expert_\w+|tiles)<"
    for name, body in bodies.items():
        assert "after_others()" in body or re.search(templates, body), name
    assert "let_others_start" not in bodies["pull"] and len(bodies) > 15


def test_a_step_is_cut_where_another_sequence_begins() -> None:
    seq = np.array([2, 2, 2, 0, 1, 1], np.int32)
    positions = np.array([5, 6, 7, 8, 0, 1], np.int32)

    def cut(most: int) -> list[tuple[int, int, int, int]]:
        return [(s.lo, s.hi, s.seq, s.keys) for s in prefill.spans(seq, positions, most)]

    assert cut(3) == [(0, 3, 2, 8), (3, 4, 0, 9), (4, 6, 1, 2)]
    assert cut(2) == [(0, 2, 2, 7), (2, 3, 2, 8), (3, 4, 0, 9), (4, 6, 1, 2)]
    assert not list(prefill.spans(seq[:0], positions[:0], 3))
