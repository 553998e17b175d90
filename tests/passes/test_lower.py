"""lower: the serial stream, weights loaded around their uses, parts made where they are merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flashrt.ir import micro
from flashrt.ir.laws import check
from flashrt.ir.text import read_physical, to_text
from flashrt.passes.lower import lower
from tests.passes.examples import serial, split_mlp

Golden = Callable[[str, str], None]

MERGES = """physical merges
symbol T lo=1 hi=4 hint=1
input x f32[T,64]
weight w f32[64,64] sources=[w] layout=f32
%a#0 = linear(%x,@w) f32[T,32] device=cpu:0 of=a shard=[0:32] numerics="act=f32 acc=f32" est=1us because=test
%a#1 = linear(%x,@w) f32[T,32] device=cpu:0 of=a shard=[32:64] numerics="act=f32 acc=f32" est=1us because=test
%a = merge(%a#0,%a#1) f32[T,64] device=cpu:0 of=a est=1us because=test
%b = {user}(%a#0) f32[T,32] device=cpu:0 of=b attrs={by=2.0} numerics="acc=f32" est=1us because=test
output a a
output b b
"""


def dispatches(stream: micro.Stream) -> dict[str, micro.Dispatch]:
    """The last dispatch of each node."""
    return {i.node: i for i in stream.instrs if isinstance(i, micro.Dispatch)}


def test_golden_one_device(golden: Golden) -> None:
    stream = serial()
    check(stream)
    golden("lower/two_layers.micro", to_text(stream))


def test_golden_two_devices(golden: Golden) -> None:
    """A split mlp: `act` is merged by a dispatch and a transfer that write its parts."""
    stream = lower(split_mlp())
    check(stream)
    golden("lower/split_mlp.micro", to_text(stream))


def test_one_slot_for_each_value() -> None:
    """No slot is written twice, none has a place yet, and every block loads once."""
    stream = serial()
    written = [i.dst for i in stream.instrs if isinstance(i, micro.Dispatch | micro.Quantize) if i.dst]
    assert len(written) == len(set(written))
    assert all(s.offset is None and s.alias is None for s in stream.slots)
    loads = [i.block for i in stream.instrs if isinstance(i, micro.Prefetch)]
    assert sorted(loads) == sorted(b.name for b in stream.blocks)


def test_one_quantize_for_products_of_one_input() -> None:
    """gate#1 and up#1 read the same quantised value."""
    stream = lower(split_mlp())
    assert sum(isinstance(i, micro.Quantize) for i in stream.instrs) == 1
    got = dispatches(stream)
    assert got["gate#1"].args[0] == got["up#1"].args[0]


def test_blocks_cover_every_position_of_the_split() -> None:
    """Both devices hold the rows of any split point; a split confined to 32…64 needs fewer."""
    blocks = {(b.name, b.device): (b.lo, b.hi) for b in lower(split_mlp()).blocks}
    assert blocks["gate", "gpu:0"] == blocks["gate", "cpu:0"] == (0, 96)
    near = replace(split_mlp(), splits=(replace(split_mlp().splits[0], positions=(32, 64)),))
    sized = {(b.name, b.device): (b.lo, b.hi, b.bytes) for b in lower(near).blocks}
    assert sized["gate", "gpu:0"] == (0, 64, 64 * 2 * 18)
    assert sized["gate", "cpu:0"] == (32, 96, 64 * 2 * 18)
    assert sized["up.bias", "cpu:0"] == (32, 96, 64 * 4)


@pytest.mark.parametrize(
    ("user", "own_slot"), [("scale", False), ("view", True), ("host.aten.erf", True)], ids=lambda v: str(v)
)
def test_part_with_another_user(user: str, own_slot: bool) -> None:
    """A part stays in the merged slot unless another user needs it dense: then it is copied there."""
    stream = lower(read_physical(MERGES.replace("{user}", user)))
    check(stream)
    got = dispatches(stream)
    merged = next(o.value for o in stream.outputs if o.name == "a")
    if own_slot:
        assert got["a#0"].kernel == "view" and got["a#0"].dst == micro.SlotRef(int(merged[1:]), 0, 32)
        assert got["b"].args == (got["a#0"].args[0],)
    else:
        assert got["b"].args == (micro.SlotRef(int(merged[1:]), 0, 32),) == (got["a#0"].dst,)


def test_output_that_was_transferred_is_handed_over_by_a_compute_lane() -> None:
    """The caller looks when compute lanes are through, so a copy lane may not be the last."""
    graph = split_mlp()
    output = replace(graph.outputs[0], value="down@cpu:0")
    nodes = tuple(n for n in graph.nodes if n.name not in ("odd", "logits"))
    stream = lower(replace(graph, nodes=nodes, outputs=(output,)))
    check(stream)
    assert dispatches(stream)["down@cpu:0"].kernel == "view"


def test_loading_is_priced_with_a_machine() -> None:
    """5 us latency and 2 GB/s from disk."""
    load = next(i for i in serial().instrs if isinstance(i, micro.Prefetch) and i.block == "embed")
    assert load.est == pytest.approx(5 + 8704 / 2e9 * 1e6, rel=1e-3)
