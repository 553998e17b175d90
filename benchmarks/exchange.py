"""What does it cost two core groups to hand something over, once each way?

python -m benchmarks.exchange [--devices cpu:0-0,cpu:1-1] [--exchanges 500] [--repeats 50]

Each group adds 16 numbers, sets a tick, and waits for the other's; both walk their rows in compiled code.
The same rows without ticks, on one group, are what the adding costs.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from benchmarks.measure import machine
from flashrt.engine import _backend, machine_picture
from flashrt.ir import laws
from flashrt.ir.text import read_micro
from flashrt.runtime.arena import Residents
from flashrt.runtime.executor import Executor

AIM = 3.0  # microseconds one way


def text(here: str, there: str, exchanges: int, together: bool) -> str:
    """A stream of additions, by turns on both devices or all on the first."""
    lines = [
        "micro exchange",
        "symbol T lo=1 hi=1 hint=1",
        "input x f32[T,16]",
        f"slot %0 {here} f32[T,16] input=x",
        f"slot %1 {here} f32[T,16]",
        f"slot %2 {there} f32[T,16] input=x",
        f"slot %3 {there} f32[T,16]",
        "output y %1",
    ]
    for i in range(exchanges):
        first, second = 2 * i, 2 * i + 1
        waits = f"waits=[!{first - 1}] " if i else ""
        if together:
            lines.append(_add(here, 0, 1, f"{waits}signals=!{first} "))
            lines.append(_add(there, 2, 3, f"waits=[!{first}] signals=!{second} "))
        else:
            lines += [_add(here, 0, 1, ""), _add(here, 0, 1, "")]
    return "\n".join(lines) + "\n"


def _add(device: str, src: int, dst: int, ticks: str) -> str:
    at = device.rpartition(":")[2].partition("-")[0]
    return (
        f"dispatch device={device} lane=compute {ticks}kernel=add args=[%{src},%{src}] dst=%{dst} "
        f'numerics="acc=f32" region={at}'
    )


def measure(devices: tuple[str, str], exchanges: int, repeats: int, *, together: bool) -> list[float]:
    """Microseconds of each step over its number of rows, both devices' counted."""
    stream = read_micro(text(*devices, exchanges, together))
    laws.check(stream)
    picture, cpu = machine_picture(devices), _backend("cpu")
    opened = {id: cpu.open(picture.device(id)) for id in devices}
    host = _backend("reference").open(picture.devices[0])
    executor = Executor(stream, Residents(opened, _Nothing(), {}), host)
    x, took = np.ones((1, 16), np.float32), []
    try:
        for _ in range(repeats):
            executor.step({"x": x}, {"T": 1})
            took.append(executor.took * 1e-3 / (2 * exchanges))
    finally:
        executor.close()
        for device in opened.values():
            device.close()
    return took


class _Nothing:
    """No weights."""

    def read(self, *_: object) -> None:
        raise AssertionError("there are no weights")


def main() -> None:
    """Prints what an exchange takes, one way, and whether that is within the aim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cpu:0-0,cpu:1-1")
    parser.add_argument("--exchanges", type=int, default=500, help="there and back, in one step")
    parser.add_argument("--repeats", type=int, default=50)
    given = parser.parse_args()
    first, second = given.devices.split(",")
    alone = measure((first, second), given.exchanges, given.repeats, together=False)
    shared = measure((first, second), given.exchanges, given.repeats, together=True)
    cost = statistics.median(shared) - statistics.median(alone)
    print(machine())
    print(f"alone     {statistics.median(alone):.2f} us a row, {min(alone):.2f} at best")
    print(f"by turns  {statistics.median(shared):.2f} us a row, {min(shared):.2f} at best")
    print(f"exchange  {cost:.2f} us one way (aim: {AIM:.0f}){'' if cost <= AIM else ': MISSED'}")


if __name__ == "__main__":
    main()
