"""One stream on the CPU and on the reference device: the harness of the CPU backend's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from flashrt.backend import Compute, OpenDevice
from flashrt.backends.cpu import CpuDevice
from flashrt.backends.reference import ReferenceBackend
from flashrt.backends.reference.arrays import DTYPE
from flashrt.ir import micro
from flashrt.ir.text import read_micro
from flashrt.layouts import LAYOUTS, U8, pack_plain, pack_quants
from flashrt.machine import Device, Measured
from tests.backends.memory import HandMemory

GUESS = Measured(1.0, "assumed")
F32 = NDArray[np.float32]
HEAD = """micro test
symbol T lo=1 hi=512 hint=1
symbol S lo=1 hi=16 hint=1
symbol M lo=1 hi=64 hint=1
symbol P lo=1 hi=64 hint=8
"""
Values = Mapping[int, Any]


def spec(id: str = "cpu:0", cores: int = 2) -> Device:
    return Device(id, "cpu", "test", 1 << 30, GUESS, {}, GUESS, cores=cores)


def cpu(threads: int = 1) -> CpuDevice:
    return CpuDevice(spec(), threads)


def reference() -> OpenDevice:
    return ReferenceBackend().open(spec())


def packed(layout: str, n: int, k: int, seed: int = 5) -> U8:
    """Random weights [n, k] in a layout."""
    rng, kind = np.random.default_rng(seed), LAYOUTS[layout]
    if kind.element is not None:
        return pack_plain(kind, rng.standard_normal((n, k)).astype(np.float32))
    blocks = kind.blocks(k)
    low = -128 if kind.bits == 8 and not kind.minimum else 0
    q = rng.integers(low, low + (1 << kind.bits), (n, blocks, kind.block))
    scale = rng.uniform(0.01, 0.1, (n, blocks)).astype(kind.number)
    return pack_quants(kind, q, scale, -scale * kind.number.type(7) if kind.minimum else None)


def compute(stream: micro.Stream) -> list[Compute]:
    return [cast(Compute, i) for i in stream.instrs]


def prepared(
    device: OpenDevice, text: str, values: Values, blocks: Mapping[str, U8], env: Mapping[str, int]
) -> HandMemory:
    """A memory in which every slot is NaN bytes but those given."""
    memory = HandMemory(read_micro(HEAD + text), {"cpu:0": device}, env, pages=env.get("P", 8))
    for place in memory.places.values():
        place.buffer[:] = 0xFF
    for slot, value in values.items():
        memory.put(slot, value)
    for name, data in blocks.items():
        memory.load_block(name, "cpu:0", data)
    return memory


def run(
    device: OpenDevice,
    text: str,
    values: Values,
    blocks: Mapping[str, U8] | None = None,
    state: F32 | None = None,
    *,
    alone: bool = False,
    **env: int,
) -> HandMemory:
    """Runs all of a stream for one step, as one region or (`alone`) instruction by instruction.

    state: contents of state `kv`.
    """
    memory = prepared(device, text, values, blocks or {}, env)
    if state is not None:
        kv_view(memory)[: state.size] = state.reshape(-1)
    parts = regions(compute(memory.stream)) if alone else [compute(memory.stream)]
    for part in parts:
        device.run(device.load(part, memory), 1)
    return memory


def regions(instrs: Sequence[Compute]) -> list[list[Compute]]:
    """Each instruction alone, a bias with its dispatch."""
    out: list[list[Compute]] = [[]]
    for instr in instrs:
        out[-1].append(instr)
        if not isinstance(instr, micro.Bias):
            out.append([])
    return out[:-1]


def kv_view(memory: HandMemory) -> Any:
    """All elements of state `kv`, f32 or bf16: a view."""
    place = memory.state("kv", "cpu:0")
    dtype = next(s.type.dtype for s in memory.stream.states if s.name == "kv")
    return place.buffer[place.offset : place.offset + place.bytes].view(DTYPE[dtype])


def guard_intact(memory: HandMemory) -> bool:
    """Whether the 64 bytes before each slot are as `prepared` left them."""
    return all((p.buffer[: p.offset] == 0xFF).all() for p in memory.places.values())


def agree(text: str, values: Values, out: int, blocks: Mapping[str, U8] | None = None, *,
          tolerance: float = 2e-6, state: F32 | None = None, **env: int) -> F32:  # fmt: skip
    """Slot `out` on one thread: close to the reference, and the same bits on 2 and 3 threads."""
    want = run(reference(), text, values, blocks, state, alone=False, **env).read(out)
    results = []
    for threads in (1, 2, 3):
        device = cpu(threads)
        memory = run(device, text, values, blocks, state, alone=False, **env)
        device.close()
        assert guard_intact(memory)
        results.append(memory.read(out).copy())
    scale = max(float(np.abs(want).max(initial=0)), 1e-30) if want.dtype.kind == "f" else 1.0
    np.testing.assert_allclose(results[0] / scale, want / scale, rtol=0, atol=tolerance)
    for other in results[1:]:
        assert other.tobytes() == results[0].tobytes()
    return results[0]
