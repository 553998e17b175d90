"""cost, shard, place and transfer: figures, choices and their causes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flashrt.errors import PlanError
from flashrt.ir.laws import check
from flashrt.ir.text import read_logical, to_text
from flashrt.ir.types import TensorType, Weight, evaluate, read_type, show, sym
from flashrt.passes.budget import peak_activations
from flashrt.passes.cost import block_bytes, cost, kernel_of
from flashrt.passes.place import place
from flashrt.passes.shard import shard
from flashrt.passes.transfer import transfer
from tests.passes.examples import device, known, machine, placed, two_layers

Golden = Callable[[str, str], None]

ODD = read_logical(
    """logical odd
symbol T lo=1 hi=8 hint=2
input x f32[T,64]
weight w f32[64,64] sources=[w] layout=q4.16x32
%a = linear(%x,@w) f32[T,64] numerics="act=f32 acc=f32"
%b = aten.erf(%a) f32[T,64] numerics="acc=f32"
%c = linear(%b,@w) f32[T,64] numerics="act=f32 acc=f32"
output c c
"""
)


def test_golden(golden: Golden) -> None:
    """A whole graph on one processor: estimates, bytes, budget and cause of every node."""
    graph = placed(two_layers(), machine())
    check(graph)
    golden("place/two_layers.physical", to_text(graph))


def test_golden_costs(golden: Golden) -> None:
    """Each node on each device: microseconds, bytes and flops, as sizes in the symbols."""
    both = machine(device(), device("gpu:0", read=known(2e11), launch=known(5.0)))
    rows = cost(two_layers(), both).rows
    lines = [
        f"{node} {on}: est=({show(c.est)})us bytes={show(c.bytes)} flops={show(c.flops)}\n"
        for (node, on), c in rows.items()
    ]
    golden("cost/two_layers.txt", "".join(lines))


def test_golden_cuts(golden: Golden) -> None:
    """Each node: the unit it may be split in (0: it stays whole), and why."""
    both = machine(device(), device("gpu:0"))
    big = read_logical(to_text(ODD).replace("64", "4096"))
    cuts = {"small": shard(ODD, cost(ODD, both), both), "big": shard(big, cost(big, both), both)}
    lines = [
        f"{size} {name}: unit={cut.unit} {cut.because}\n"
        for size, found in cuts.items()
        for name, cut in found.items()
    ]
    golden("shard/odd.txt", "".join(lines))


def test_roofline() -> None:
    """launch + max(bytes / read, flops / rate), with the weight's packed bytes."""
    table = cost(ODD, machine())
    a = table.of("a", "cpu:0")
    assert (show(a.bytes), show(a.flops)) == (f"512*T+{64 * 64 // 2 + 2 * 64 * 2}", "8192*T")
    for t in (1, 1000):
        assert evaluate(a.est, {"T": t}) == pytest.approx(
            2 + max((512 * t + 2304) / 20e9, 8192 * t / 100e9) * 1e6, rel=1e-3
        )


def test_int8_rate() -> None:
    """Products of INT8 activations are priced at the device's INT8 rate."""
    node = replace(ODD.nodes[0], numerics="act=i8/32 acc=f32")
    quick = cost(replace(ODD, nodes=(node,)), machine()).of("a", "cpu:0")
    assert evaluate(quick.est, {"T": 10_000}) == pytest.approx(2 + 512 * 10_000 / 20e9 * 1e6, rel=0.01)


def test_attention_reads_its_keys() -> None:
    """The bytes of attention grow with the context, once for each sequence; without a symbol C
    they are those of a full page table."""
    graph = two_layers()
    known_c = cost(graph, machine()).of("layers.0.attention", "cpu:0")
    assert "256*C*S" in show(known_c.bytes)
    unknown = replace(graph, symbols=tuple(s for s in graph.symbols if s.name != "C"))
    assert "4100*M*S" in show(cost(unknown, machine()).of("layers.0.attention", "cpu:0").bytes)


def test_embedding_reads_rows_only() -> None:
    got = cost(two_layers(), machine()).of("embedding", "cpu:0").bytes
    assert show(got) == "328*T"  # id, 64 + 4 bytes of row, 256 of result


def test_block_bytes() -> None:
    """Rows of a packed matrix, of a plain one, of a vector, of whole numbers."""
    q4 = Weight("w", read_type("f32[64,40]"), ("w",), "q4.16x32")
    assert block_bytes(q4) == 64 * 2 * 18
    assert block_bytes(q4, 16, 48) == 32 * 2 * 18
    assert block_bytes(Weight("w", read_type("f32[5,7]"), ("w",), "bf16"), 1, 3) == 2 * 7 * 2
    assert block_bytes(Weight("b", read_type("f32[10]"), ("b",)), 2, 5) == 12
    assert block_bytes(Weight("i", read_type("i64[10]"), ("i",))) == 80


def test_kernel_names() -> None:
    nodes = {n.name: n for n in two_layers().nodes}
    weights = {w.name: w for w in two_layers().weights}
    names = [kernel_of(nodes[n], weights) for n in ("embedding", "layers.0.qkv", "layers.0.o", "norm")]
    assert names == ["embedding.q8.16x32", "linear.q4.16x32+bias", "linear.q4.16x32+residual", "rms_norm"]


def test_fastest_device_that_fits() -> None:
    """The faster one wins, and the loser's figure is told; when it lacks memory, that is told."""
    slow, fast = device(), device("gpu:0", read=known(2e11), launch=known(0.5))
    graph = placed(two_layers(), machine(slow, fast))
    assert {n.device for n in graph.nodes} == {"gpu:0"}
    assert "us on cpu:0" in graph.nodes[0].because
    full = placed(two_layers(), machine(slow, replace(fast, memory=100_000)))
    assert {n.device for n in full.nodes} == {"cpu:0"}
    assert "gpu:0 needs" in full.nodes[0].because and "of 90000" in full.nodes[0].because


def test_devices_restricts_the_choice() -> None:
    both = machine(device(), device("gpu:0", read=known(2e11)))
    graph = place(two_layers(), cost(two_layers(), both), both, devices=["cpu:0"])
    assert {n.device for n in graph.nodes} == {"cpu:0"}
    with pytest.raises(PlanError, match=r"no device 'npu:7'\ndevices: cpu:0, gpu:0"):
        place(two_layers(), cost(two_layers(), both), both, devices=["npu:7"])


def test_unknown_operation_becomes_a_host_row() -> None:
    graph = placed(ODD, machine())
    assert [n.op for n in graph.nodes] == ["linear", "host.aten.erf", "linear"]
    assert graph.nodes[1].because.startswith(
        "no aten.erf kernel on cpu:0: runs on the reference implementation"
    )


def test_unknown_operation_travels_to_the_host(golden: Golden) -> None:
    """From a gpu the value goes to a host device and back; the shared input is copied once."""
    fast = device("gpu:0", read=known(2e13), rates={"f32": known(1e14)}, launch=known(0.1))
    graph = placed(ODD, machine(device(launch=known(100.0)), fast))
    check(graph)
    golden("place/host_row.physical", to_text(graph))


def test_missing_numerics_are_named() -> None:
    """A kernel that exists with other numerics only isn't taken."""
    only = tuple((k, "acc=f64" if k == "rms_norm" else n) for k, n in device().kernels)
    norm = next(n for n in placed(two_layers(), machine(device(kernels=only))).nodes if n.of == "norm")
    assert norm.op == "host.rms_norm"
    assert "no rms_norm kernel with acc=f32 on cpu:0" in norm.because


def test_affinity_is_kept() -> None:
    """A device with a kernel still doesn't get what its kind isn't for."""
    both = machine(device(), device("npu:0", read=known(2e12), rates={"f32": known(1e13), "i8": known(1e13)}))
    nodes = {n.of: n for n in placed(two_layers(), both).nodes if n.op != "transfer"}
    assert nodes["layers.0.attention"].device == "cpu:0"
    if nodes["layers.0.qkv"].device == "npu:0":
        assert "isn't for attention: precise" in nodes["layers.0.attention"].because


def test_weights_stream_when_they_must() -> None:
    """Too little memory for all weights: they stream, that is said, and the link bounds the time."""
    graph = placed(two_layers(), machine(device(memory=200_000)))
    (budget,) = graph.budgets
    assert budget.weights + budget.state + budget.activations == budget.limit
    assert "weights stream through" in graph.nodes[0].because


def test_no_plan() -> None:
    with pytest.raises(PlanError, match=r"two_layers fits no device\n.*cpu:0 needs \d+ bytes at least"):
        placed(two_layers(), machine(device(memory=150_000)))
    with pytest.raises(PlanError, match=r"b: no aten\.erf kernel on gpu:0, and there is no host device"):
        placed(ODD, machine(device("gpu:0")))


def test_shard_says_whether_sharing_could_pay() -> None:
    """With slow links a product stays whole; with fast ones it may split at whole row groups."""
    big = read_logical(to_text(ODD).replace("64", "4096"))
    near = machine(device(), device("gpu:0"))
    cuts = shard(big, cost(big, near), near)
    assert cuts["a"].unit == 16 and "saves at most" in cuts["a"].because
    assert cuts["b"].unit == 0
    slow = replace(near, links=())
    assert shard(ODD, cost(ODD, slow), slow)["a"].because.startswith("whole: sharing with gpu:0 saves")
    alone = machine()
    assert shard(ODD, cost(ODD, alone), alone)["a"].because == "whole: one device"


def test_transfer_once_for_each_device() -> None:
    """A value that two nodes of another device read is copied once."""
    graph = placed(ODD, machine())
    a, b, c = graph.nodes
    moved = replace(
        graph, nodes=(a, replace(b, device="gpu:0"), replace(c, inputs=("%a", "@w"), device="gpu:0"))
    )
    got = transfer(moved, machine(device(), device("gpu:0")))
    assert [n.name for n in got.nodes] == ["a", "a@gpu:0", "b", "c"]
    assert all(n.inputs[0] == "%a@gpu:0" for n in got.nodes[2:])
    assert got.nodes[1].device == "gpu:0"


def test_a_size_that_nothing_bounds_is_refused() -> None:
    graph = two_layers()
    node = replace(graph.nodes[0], type=TensorType("f32", (sym("U"), 4)))
    with pytest.raises(PlanError, match="nothing bounds its size"):
        peak_activations([node], graph)
