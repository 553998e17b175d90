"""How fast an open device multiplies: products of its own kernels, again and again.

What comes out is what a plan can have of the device, packing and rounding of activations included.
"""

from __future__ import annotations

import time

from flashrt.backend import U8, Compute, OpenDevice
from flashrt.ir.ops import LINEAR_BF16, LINEAR_I8
from flashrt.ir.text import read_micro
from flashrt.ir.types import Weight
from flashrt.layouts import LAYOUTS
from flashrt.runtime.arena import Residents, StreamMemory

LAYOUT = "q8.16x32"
TOKENS, WIDTH = 256, 1024  # the product is [TOKENS, WIDTH] x [WIDTH, WIDTH]
# dtype of activations → (numerics, how `quantize` rounds to it, type of what is rounded)
ROUNDED = {
    "i8": (LINEAR_I8, "i8/32", f"u8[T,{WIDTH + 4 * WIDTH // 32}]"),
    "bf16": (LINEAR_BF16, "bf16", f"bf16[32*ceildiv(T,32),{WIDTH}]"),
}

FEW = "q4.16x32"  # layout of the weights that one token is multiplied with
GEMV = (f"linear.{FEW}", LINEAR_I8)  # (kernel, numerics) that a device must have for `gemv_rate`
MATRIX = (14336, 4096)  # of each of them
MATRICES = 16  # half a gigabyte
ROOM = 8  # they take at most this part of the device's free memory


def kernel_of(dtype: str) -> tuple[str, str]:
    """(kernel, numerics) that a device must have for its rate in `dtype` to be measured."""
    return f"linear.{LAYOUT}", ROUNDED[dtype][0]


def matrix_rate(device: OpenDevice, dtype: str, seconds: float) -> float:
    """Flop per second of products with activations in `dtype`, a key of ROUNDED, in about that time.

    Raises DeviceError when the device fails.
    """
    numerics, scheme, rounded = ROUNDED[dtype]
    kernel, id = f"linear.{LAYOUT}", device.spec.id
    nbytes = LAYOUTS[LAYOUT].bytes(WIDTH, WIDTH)
    text = f"""micro rate
symbol T lo={TOKENS} hi={TOKENS} hint={TOKENS}
weight w f32[{WIDTH},{WIDTH}] sources=[w] layout={LAYOUT}
slot %0 {id} f32[T,{WIDTH}]
slot %1 {id} {rounded}
slot %2 {id} f32[T,{WIDTH}]
block w {id} lo=0 hi={WIDTH} bytes={nbytes} home=resident
quantize device={id} lane=compute src=%0 dst=%1 scheme="{scheme}"
dispatch device={id} lane=compute kernel={kernel} args=[%1,@w] dst=%2 numerics="{numerics}"
"""
    return 2.0 * TOKENS * WIDTH * WIDTH / _run(device, text, TOKENS, seconds)


def gemv_rate(device: OpenDevice, seconds: float, least: int = 0) -> float:
    """Bytes per second of packed weights that products of one token read, one after the other, in about that
    time.

    least: bytes of weights of which no cache keeps much; they take no more than there is room for.
    The device has `GEMV`. Raises DeviceError when it fails, or has no room for one matrix.
    """
    (kernel, numerics), id, (n, k) = GEMV, device.spec.id, MATRIX
    nbytes = LAYOUTS[FEW].bytes(n, k)
    free = device.spec.memory if device.spec.free is None else device.spec.free
    wanted = max(MATRICES, -(-least // nbytes))
    names = [f"w{at}" for at in range(max(1, min(wanted, free // ROOM // nbytes)))]
    lines = [
        "micro rate",
        "symbol T lo=1 hi=1 hint=1",
        *(f"weight {w} f32[{n},{k}] sources=[{w}] layout={FEW}" for w in names),
        f"slot %0 {id} f32[T,{k}]",
        f"slot %1 {id} u8[T,{k + 4 * k // 32}]",
        f"slot %2 {id} f32[T,{n}]",
        *(f"block {w} {id} lo=0 hi={n} bytes={nbytes} home=resident" for w in names),
        f'quantize device={id} lane=compute src=%0 dst=%1 scheme="i8/32"',
        *(
            f'dispatch device={id} lane=compute kernel={kernel} args=[%1,@{w}] dst=%2 numerics="{numerics}"'
            for w in names
        ),
    ]
    return len(names) * nbytes / _run(device, "\n".join(lines) + "\n", 1, seconds)


def _run(device: OpenDevice, text: str, tokens: int, seconds: float) -> float:
    """Seconds of a run of a stream, on average of those in about that time; one before them warms up."""
    stream = read_micro(text)
    residents = Residents({device.spec.id: device}, _Zeros(), {"T": tokens})
    memory = StreamMemory(stream, residents)
    instrs: list[Compute] = [i for i in stream.instrs if isinstance(i, Compute)]
    code = device.load(instrs, memory)
    device.run(code, 1)
    begin, runs = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < seconds or not runs:
        runs += 1
        device.run(code, runs + 1)
    return elapsed / runs


class _Zeros:
    """Weights that are all zero: a product takes as long with them as with any others."""

    def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
        out[:] = 0
