"""One stream on a GPU, real or emulated, and on the reference device: the harness of the CUDA tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt.backend import U8, Place
from flashrt.backends.cuda import CudaDevice
from flashrt.backends.reference.arrays import DTYPE, shape_at
from flashrt.ir.text import read_micro
from flashrt.machine import Device, Measured
from tests.backends import cpu_streams
from tests.backends.memory import HandMemory

GUESS = Measured(1.0, "assumed")
F32 = NDArray[np.float32]
Values = Mapping[int, Any]


def spec() -> Device:
    return Device("cpu:0", "gpu", "test", 1 << 34, GUESS, {}, GUESS)


class DeviceMemory(HandMemory):
    """A memory that the host can't see."""

    device: CudaDevice

    def place_of(self, slot: int) -> tuple[Place, np.dtype[Any], tuple[int, ...]]:
        type = next(s.type for s in self.stream.slots if s.id == slot)
        env = {name: int(self.words[i + 1]) for i, name in enumerate(self.names)}
        return self.places[slot], DTYPE[type.dtype], shape_at(type, env)

    def put(self, slot: int, value: NDArray[Any]) -> None:
        place, dtype, shape = self.place_of(slot)
        full = np.broadcast_to(np.asarray(value, dtype), shape)
        self.device.write(np.ascontiguousarray(full).reshape(-1).view(np.uint8), place)

    def read(self, slot: int) -> NDArray[Any]:
        place, dtype, shape = self.place_of(slot)
        out = np.empty(int(np.prod(shape)) * dtype.itemsize, np.uint8)
        self.device.read(place, out)
        return out.view(dtype).reshape(shape)

    def load_block(self, name: str, device: str, data: NDArray[np.uint8] | None) -> None:
        assert data is not None
        place = self.fresh(device, len(data))
        self.device.write(np.ascontiguousarray(data), place)
        self.blocks[name, device] = place

    def state_bytes(self, state: str) -> U8:
        place = self.state(state, "cpu:0")
        out = np.empty(place.bytes, np.uint8)
        self.device.read(place, out)
        return out


def run(
    device: CudaDevice, text: str, values: Values, blocks: Mapping[str, U8] | None = None,
    state: F32 | None = None, *, alone: bool = False, times: int = 1, **env: int,
) -> DeviceMemory:  # fmt: skip
    """Runs a stream `times` steps, as one region or (`alone`) instruction by instruction; every slot is NaN
    bytes but those given."""
    memory = DeviceMemory(read_micro(cpu_streams.HEAD + text), {"cpu:0": device}, env, pages=env.get("P", 8))
    memory.device = device
    for place in memory.places.values():
        device.write(np.full(len(place.buffer), 0xFF, np.uint8), Place(place.buffer, 0, len(place.buffer)))
    for slot, value in values.items():
        memory.put(slot, value)
    for name, data in (blocks or {}).items():
        memory.load_block(name, "cpu:0", data)
    if state is not None:
        dtype = DTYPE[next(s.type.dtype for s in memory.stream.states if s.name == "kv")]
        place = memory.state("kv", "cpu:0")
        data = np.ascontiguousarray(state.astype(dtype)).reshape(-1).view(np.uint8)
        device.write(data[: place.bytes], place)
    whole = cpu_streams.compute(memory.stream)
    for part in cpu_streams.regions(whole) if alone else [whole]:
        code = device.load(part, memory)
        for epoch in range(times):
            device.run(code, epoch + 1)
    return memory


def guard_intact(memory: DeviceMemory) -> bool:
    """Whether the 64 bytes before each slot are as `run` left them."""
    return all(bool((p.buffer[: p.offset] == 0xFF).all()) for p in memory.places.values())


def agree(
    device: CudaDevice, text: str, values: Values, out: int, blocks: Mapping[str, U8] | None = None, *,
    tolerance: float = 2e-6, state: F32 | None = None, alone: bool = False, times: int = 1, **env: int,
) -> NDArray[Any]:  # fmt: skip
    """Slot `out` on the device, close to the reference's."""
    want = cpu_streams.run(cpu_streams.reference(), text, values, blocks, state, alone=False, **env).read(out)
    memory = run(device, text, values, blocks, state, alone=alone, times=times, **env)
    assert guard_intact(memory)
    got = memory.read(out)
    if want.dtype.kind != "f":
        np.testing.assert_array_equal(got, want)
    else:
        scale = max(float(np.abs(want).max(initial=0)), 1e-30)
        np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=tolerance)
    return got


def in_turns(device: CudaDevice, down: int, late: int, block: int = -1) -> None:
    """The order in which emulated threads run. late: a warp that is slower than all others; block: only
    there."""
    from tests.backends.cuda_emulated import EmulatedDriver, library

    if isinstance(device.driver, EmulatedDriver):
        library().take_turns(down, late, block)
