"""The small graphs and machines that the tests of the passes share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from flashrt.backends.reference.kernels import kernels
from flashrt.ir import logical, micro, physical
from flashrt.ir.text import read_logical, read_physical
from flashrt.machine import Device, Link, Machine, Measured
from flashrt.passes.cost import cost
from flashrt.passes.lower import lower
from flashrt.passes.place import place
from flashrt.passes.shard import shard
from flashrt.passes.transfer import transfer
from tests.passes.simulate import Step

HERE = Path(__file__).parent


def two_layers() -> logical.Graph:
    """A llama-like model of two layers, recognised."""
    return read_logical((HERE / "two_layers.logical").read_text(encoding="utf-8"))


def split_mlp() -> physical.Graph:
    """One layer over two devices, its mlp split at a channel that may move."""
    return read_physical((HERE / "split_mlp.physical").read_text(encoding="utf-8"))


def known(value: float) -> Measured:
    return Measured(value, "assumed")


def device(id: str = "cpu:0", **changes: object) -> Device:
    """A processor that has every kernel."""
    facts: dict[str, object] = dict(
        id=id, kind=id.partition(":")[0], name="pretend", memory=1 << 30, read=known(2e10),
        rates={"f32": known(1e11), "i8": known(4e11)}, launch=known(2.0), kernels=kernels(),
    )  # fmt: skip
    return Device(**(facts | changes))  # type: ignore[arg-type]


def machine(*devices: Device) -> Machine:
    """The devices (one processor by default), 10 GB/s apart, the disk giving 2 GB/s."""
    devices = devices or (device(),)
    ids = [d.id for d in devices]
    pairs = [(a, b) for a in ids for b in ids if a != b] + [("disk", d) for d in ids]
    links = (Link(a, b, known(2e9 if a == "disk" else 1e10), known(5.0)) for a, b in pairs)
    return Machine(devices, tuple(links))


def placed(graph: logical.Graph, on: Machine) -> physical.Graph:
    """The graph after cost, shard, place and transfer."""
    costs = cost(graph, on)
    return transfer(place(graph, costs, on, cuts=shard(graph, costs, on)), on)


@cache
def serial() -> micro.Stream:
    """two_layers, lowered on one processor."""
    return lower(placed(two_layers(), machine()), machine())


def batch(seed: int, t: int, split: int | None = None) -> Step:
    """A step of two sequences (or one) that takes all inputs the examples have."""
    rng = np.random.default_rng(seed)
    lengths = [t] if t < 2 else [t - 1, 1]
    positions = np.concatenate([np.arange(x) for x in lengths]).astype(np.int32)
    ids = rng.integers(0, 128, t).astype(np.int32)
    inputs = {
        "ids": ids, "x": ids, "positions": positions,
        "seq": np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        "pages": np.arange(2 * len(lengths), dtype=np.int32).reshape(len(lengths), 2),
        "rows": np.array([t - 1], np.int32),
    }  # fmt: skip
    symbols = {"T": t, "S": len(lengths), "M": 2, "C": t, "P": 64}
    symbols |= {"N": 1} if split is None else {"s": split}
    return Step(symbols, inputs)
