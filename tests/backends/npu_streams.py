"""Streams on one NPU provider and on the reference device: the harness of the NPU backend's tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pytest

from flashrt.backend import OpenDevice
from flashrt.backends.npu import PROVIDERS, NpuBackend, NpuDevice
from flashrt.backends.npu.kernels import HALF, LINEAR_U16, U16, Form
from flashrt.backends.npu.providers import lack
from flashrt.backends.reference import ReferenceBackend
from flashrt.ir.ops import EXACT, LINEAR_EXACT, LINEAR_F16
from flashrt.ir.text import read_micro
from flashrt.layouts import LAYOUTS, U8
from flashrt.machine import Device, Measured
from tests.backends.memory import HandMemory
from tests.tiny import random_bytes

GUESS = Measured(1.0, "assumed")
HEAD = """micro test
symbol T lo=1 hi=48 hint=1
split s positions=[0,32,64,96,128] start=64
"""
AT = "device=npu lane=compute"
RNG = np.random.default_rng(4)
NUMERICS: Mapping[Form, tuple[str, str]] = {
    "f32": (LINEAR_EXACT, EXACT), "f16": (LINEAR_F16, HALF), "int8": (LINEAR_U16, U16),
}  # fmt: skip
# largest error over largest value: f32 sums in another order; half floats; a byte a weight
TOLERANCE: Mapping[Form, float] = {"f32": 3e-6, "f16": 5e-3, "int8": 2e-2}


def installed(name: str) -> NpuDevice:
    """The open device, or a skip that says what is missing."""
    if missing := lack(PROVIDERS[name]):
        pytest.skip(f"{missing}: pip install {PROVIDERS[name].package}")
    return NpuBackend().open(Device(f"npu:{name}", "npu", "test", 1 << 30, GUESS, {}, GUESS, cores=1))


def reference() -> OpenDevice:
    return ReferenceBackend().open(Device("npu", "reference", "test", 1 << 30, GUESS, {}, GUESS))


def numbered(text: str, form: Form) -> str:
    """Each dispatch with the numerics that its operation has in a form."""
    linear, other = NUMERICS[form]

    def line(row: str) -> str:
        if not row.startswith("dispatch"):
            return row
        moves = "kernel=view" in row or "kernel=slice" in row
        numerics = linear if "kernel=linear" in row else EXACT if moves else other
        return f'{row} numerics="{numerics}"'

    return "\n".join(map(line, text.splitlines())) + "\n"


class Bench:
    """A stream loaded on a device, ready for many steps."""

    def __init__(
        self, device: OpenDevice, text: str, blocks: Mapping[str, U8], form: Form = "f32", hi: int = 48
    ) -> None:
        self.device = device
        stream = read_micro(HEAD.replace("hi=48", f"hi={hi}") + numbered(text, form))
        self.memory = HandMemory(stream, {"npu": device}, {"T": 1, "s": 64})
        for name, data in blocks.items():
            self.memory.load_block(name, "npu", data)
        self.code = device.load(list(stream.instrs), self.memory)  # type: ignore[arg-type]
        self.epoch = 0

    def step(self, values: Mapping[int, np.ndarray], result: int, **env: int) -> np.ndarray:
        """One step on poisoned memory; gives a slot."""
        self.memory.set(env)
        for place in self.memory.places.values():
            place.buffer[:] = 0xFF
        for slot, value in values.items():
            self.memory.put(slot, value)
        self.epoch += 1
        self.device.run(self.code, self.epoch)
        return self.memory.read(result).copy()


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest error over the largest value."""
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / np.abs(want).max())


def compare(name: str, text: str, blocks: Mapping[str, U8], width: int, result: int, *sizes: int) -> None:
    """The same text on a provider and on the reference, at each number of tokens."""
    device = installed(name)
    form = device.provider.form
    bench, exact = Bench(device, text, blocks, form), Bench(reference(), text, blocks)
    for t in sizes:
        x = RNG.standard_normal((t, width)).astype(np.float32)
        got, want = (b.step({0: x}, result, T=t) for b in (bench, exact))
        assert error(got, want) < TOLERANCE[form], (t, form)


def packed(layout: str, n: int, k: int) -> U8:
    return random_bytes(RNG, LAYOUTS[layout], n, k)


def mlp(hidden: int, ffn: int) -> tuple[str, dict[str, U8]]:
    """A gated MLP without its norm: slot 0 → slot 4, its sum with slot 0."""
    text = f"""weight gate f32[{ffn},{hidden}] sources=[g] layout=q4m.16x32
weight up f32[{ffn},{hidden}] sources=[u] layout=q8.16x32
weight down f32[{hidden},{ffn}] sources=[d] layout=q8.16x32
slot %0 npu f32[T,{hidden}]
slot %1 npu f32[T,{ffn}]
slot %2 npu f32[T,{ffn}]
slot %3 npu f32[T,{ffn}]
slot %4 npu f32[T,{hidden}]
block gate npu lo=0 hi={ffn} bytes=0
block up npu lo=0 hi={ffn} bytes=0
block down npu lo=0 hi={hidden} bytes=0
dispatch {AT} kernel=linear.q4m.16x32 args=[%0,@gate] dst=%1
dispatch {AT} kernel=linear.q8.16x32 args=[%0,@up] dst=%2
dispatch {AT} kernel=gated args=[%1,%2] dst=%3 attrs={{act="silu"}}
dispatch {AT} kernel=linear.q8.16x32+residual args=[%3,@down,%0] dst=%4
output y %4
"""
    return text, {
        "gate": packed("q4m.16x32", ffn, hidden),
        "up": packed("q8.16x32", ffn, hidden),
        "down": packed("q8.16x32", hidden, ffn),
    }


@contextmanager
def counted_sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes in bytes of the graphs that are opened meanwhile."""
    from flashrt.backends.npu import launch

    opened: list[int] = []
    real = launch.open_session

    def counting(data: bytes, *rest: object) -> object:
        opened.append(len(data))
        return real(data, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "open_session", counting)
    yield opened
