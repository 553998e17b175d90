"""What does it cost to cross between the host's memory and a GPU's, as plans over both do?

python -m benchmarks.gpu_copies [--seconds 0.3]

Rates and times of `copy` of the device, with memory that is page-locked (as activations and the weights that
stream are) and without; what it costs to lock memory; and how long a token's activations take over and back.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from flashrt.backend import U8, Place, Rect
from flashrt.backends.cpu.device import huge
from flashrt.backends.cuda import CudaBackend, CudaDevice
from flashrt.machine import Device, Measured

SIZES = (16 << 10, 256 << 10, 4 << 20, 64 << 20)
LOCKED = 4 << 30


def main() -> None:
    """Prints one line for each question."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    seconds = parser.parse_args().seconds
    guess = Measured(1e12, "assumed")
    device = CudaBackend().open(Device("gpu:0", "gpu", "GPU", 1 << 34, guess, {}, guess))
    _rates("locked", device, device.pinned(SIZES[-1]), seconds)
    _rates("pageable", device, np.ones(SIZES[-1], np.uint8), seconds)
    _round_trip(device, seconds)
    _strided(device, seconds)
    _lock(device, seconds)
    device.close()


def _rates(what: str, device: CudaDevice, memory: U8, seconds: float) -> None:
    buffer = device.reserve(SIZES[-1])

    def told(src: Rect, dst: Rect) -> str:
        return _told(_took(lambda: device.copy(src, dst), seconds), src.row_bytes)

    for nbytes in SIZES:
        here, there = _row(memory, nbytes), _row(buffer, nbytes)
        print(f"{what:8} {nbytes >> 10:6} KiB  {told(here, there)} there  {told(there, here)} back")


def _lock(device: CudaDevice, seconds: float) -> None:
    begun = time.perf_counter()
    memory = huge(LOCKED)
    memory[:: 1 << 12] = 1
    filled = time.perf_counter()
    device.lock(memory)
    took, touch = time.perf_counter() - filled, filled - begun
    print(f"lock {LOCKED >> 30} GiB: {took:.2f} s (to touch it first: {touch:.2f} s)")
    here, there = _row(memory, SIZES[-1], 12345 * 64), _row(device.reserve(SIZES[-1]), SIZES[-1])
    took = _took(lambda: device.copy(here, there), seconds)
    print(f"weights in it: {_told(took, SIZES[-1])} there")


def _round_trip(device: CudaDevice, seconds: float) -> None:
    here, there = _row(device.pinned(SIZES[0]), SIZES[0]), _row(device.reserve(SIZES[0]), SIZES[0])

    def both() -> None:
        device.copy(there, here)
        device.copy(here, there)

    print(f"round trip of {SIZES[0] >> 10} KiB: {_took(both, seconds) * 1e6:.1f} us")


def _strided(device: CudaDevice, seconds: float) -> None:
    """Half the channels of 512 tokens: as splits move them."""
    rows, width = 512, 4096 * 4
    here = Place(device.pinned(rows * width), 0, rows * width)
    there = Place(device.reserve(rows * width), 0, rows * width)
    half = (0, rows, width // 2, width)
    took = _took(lambda: device.copy(Rect(here, *half), Rect(there, *half)), seconds)
    print(f"half the channels of {rows} tokens: {_told(took, rows * width // 2)} there")


def _row(buffer: U8, nbytes: int, offset: int = 0) -> Rect:
    return Rect(Place(buffer, offset, nbytes), 0, 1, nbytes, nbytes)


def _took(work: Callable[[], None], seconds: float) -> float:
    """Median seconds."""
    work()
    times, end = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _told(took: float, nbytes: int) -> str:
    return f"{took * 1e6:9.1f} us {nbytes / took / 1e9:6.1f} GB/s"


if __name__ == "__main__":
    main()
