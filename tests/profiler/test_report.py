"""The profiler's arithmetic, on a trace made by hand: two steps on two devices, times in nanoseconds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flashrt.ir import micro
from flashrt.ir.micro import SlotRef, Stream, Wait
from flashrt.ir.types import Symbol, sym
from flashrt.machine import Device, Machine, Measured
from flashrt.profiler import report
from flashrt.profiler.report import Lane
from flashrt.runtime.trace import StepTrace

T = sym("T")


def measured(value: float) -> Measured:
    return Measured(value, "measured")


def device(id: str, read: float, flops: float) -> Device:
    return Device(id, id[:3], id, 1 << 30, measured(read), {"f32": measured(flops)}, measured(1.0))


MACHINE = Machine((device("cpu:0", 10e9, 1e12), device("gpu:0", 100e9, 10e12)))


def dispatch(node: str, kernel: str, **facts: object) -> micro.Dispatch:
    given = {"device": "cpu:0", "lane": "compute", "args": (), "dst": SlotRef(0), **facts}
    return micro.Dispatch(kernel=kernel, node=node, **given)  # type: ignore[arg-type]


INSTRS: tuple[micro.Instr, ...] = (
    dispatch("layers.0.mlp.up", "linear.f32", bytes=1000 * T, flops=2000 * T, est=10 * T),
    micro.Transfer(
        device="cpu:0", lane="copy_out", waits=(Wait(1),), src=SlotRef(0), dst=SlotRef(1), to="gpu:0",
        bytes=400 * T, est=5, node="layers.0.mlp.up",
    ),
    dispatch("layers.1.mlp.up", "linear.f32", device="gpu:0", bytes=1000 * T, flops=9_000_000, est=3),
    dispatch("norm", "rms_norm", bytes=100, est=1),
    dispatch("sample", "host.sample", bytes=7, est=1),
)  # fmt: skip
SYMBOLS = (Symbol("T", 1, 64, 1), Symbol("S", 1, 4, 1))
STREAM = Stream("small", SYMBOLS, (), (), (), (), (), (), INSTRS, ())
STREAMS = {"small": STREAM}


def step(epoch: int, begun: int, ended: int, tokens: int, stamps: list[tuple[int, int, int]]) -> StepTrace:
    moved = np.array([(begun + a, begun + s, begun + e) if e else (0, 0, 0) for a, s, e in stamps], np.int64)
    return StepTrace("small", epoch, begun, ended, {"T": tokens, "S": 1}, moved)


PREFILL = step(
    1, 1_000_000, 1_100_000, 4,
    [(0, 1_000, 21_000), (0, 21_000, 31_000), (0, 31_000, 33_000), (21_000, 22_000, 23_000), (0, 0, 0)],
)  # fmt: skip
DECODE = step(
    2, 1_150_000, 1_200_000, 1,
    [(0, 0, 10_000), (0, 10_000, 14_000), (0, 14_000, 15_000), (10_000, 10_000, 12_000), (0, 0, 0)],
)  # fmt: skip
STEPS = [PREFILL, DECODE]


def by(what: report.By, steps: list[StepTrace] = STEPS) -> dict[tuple[str, str], report.Row]:
    return {(r.name, r.device): r for r in report.rows(steps, STREAMS, MACHINE, what)}


def test_a_row() -> None:
    row = by("kernel")["linear.f32", "cpu:0"]
    assert (row.count, row.total, row.mean, row.waiting) == (2, 30.0, 15.0, 1.0)
    assert (row.p50, row.p99) == (15.0, pytest.approx(19.9))  # of 10 and 20
    assert (row.bytes, row.estimate) == (5000, 50)  # 1000 T and 10 T at T = 4 and 1
    assert row.gb_per_s == pytest.approx(5000 / 30e-6 / 1e9)
    # bytes are the nearer limit: 5000 bytes at 10 GB/s would take 0.5 of the 30 us
    assert row.share == pytest.approx(0.5 / 30)


def test_the_matrix_rate_is_the_limit_where_it_is_nearer() -> None:
    row = by("kernel", [DECODE])["linear.f32", "gpu:0"]
    assert row.share == pytest.approx(9e6 / 10e12 / 1e-6)  # flops take 0.9 us of 1 us, bytes 0.01


def test_rows_by_instruction_kernel_and_layer() -> None:
    assert set(by("kernel")) == {
        ("linear.f32", "cpu:0"), ("linear.f32", "gpu:0"), ("transfer", "cpu:0"), ("rms_norm", "cpu:0"),
    }  # fmt: skip
    assert set(by("instruction")) == {
        ("layers.0.mlp.up linear.f32", "cpu:0"), ("layers.0.mlp.up transfer", "cpu:0"),
        ("layers.1.mlp.up linear.f32", "gpu:0"), ("norm rms_norm", "cpu:0"),
    }  # fmt: skip
    layers = by("layer")
    assert set(layers) == {("layers.0", "cpu:0"), ("layers.1", "gpu:0"), ("norm", "cpu:0")}
    assert (layers["layers.0", "cpu:0"].count, layers["layers.0", "cpu:0"].total) == (4, 44.0)


def test_the_most_expensive_comes_first() -> None:
    totals = [r.total for r in report.rows(STEPS, STREAMS, MACHINE, "kernel")]
    assert totals == sorted(totals, reverse=True) and len(totals) == 4


def test_every_grouping_has_the_same_sums() -> None:
    groupings: tuple[report.By, ...] = ("instruction", "kernel", "layer")
    fields = ("count", "total", "waiting", "bytes", "estimate")
    sums = [tuple(sum(getattr(r, f) for r in by(how).values()) for f in fields) for how in groupings]
    assert sums[0] == sums[1] == sums[2] == (8, 50.0, 1 + 21 + 31 + 1 + 10 + 14, 12200, 68)


def test_account() -> None:
    account = report.account(STEPS, STREAMS)
    assert (account.count, account.wall, account.steps, account.between) == (2, 200.0, 150.0, 50.0)
    assert account.lanes == (
        Lane("cpu:0 compute", 33.0, 2.0, 115.0),
        Lane("cpu:0 copy_out", 14.0, 31.0, 105.0),
        Lane("gpu:0 compute", 3.0, 45.0, 102.0),
    )
    for lane in account.lanes:
        assert lane.busy + lane.waiting + lane.rest == account.steps


def test_phases() -> None:
    assert report.of_phase(STEPS, "prefill") == [PREFILL]
    assert report.of_phase(STEPS, "decode") == [DECODE]
    assert report.of_phase(STEPS, "all") == STEPS


def test_perfetto() -> None:
    trace = json.loads(json.dumps(report.perfetto(STEPS, STREAMS)))
    events = trace["traceEvents"]
    assert all(type(e["pid"]) is int and type(e["tid"]) is int for e in events)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(processes.values()) == ["cpu:0", "gpu:0", "runtime"]
    runs = [e for e in events if e["ph"] == "X"]
    tracks = {(processes[e["pid"]], threads[e["pid"], e["tid"]]) for e in runs}
    assert tracks == {
        ("runtime", "steps"), ("cpu:0", "compute"), ("cpu:0", "copy_out"), ("gpu:0", "compute"),
    }  # fmt: skip
    first = next(e for e in runs if e["name"] == "linear.f32")
    assert (first["ts"], first["dur"]) == (1.0, 20.0)  # microseconds since the first step began
    assert first["args"] == {"node": "layers.0.mlp.up", "estimate_us": 40.0}
    waits = [e for e in runs if e["name"] == "wait"]
    assert {(e["ts"], e["dur"]) for e in waits} >= {(0.0, 21.0), (0.0, 31.0)}
    assert sum(e["dur"] for e in runs if e["name"] not in ("wait",) and "step" not in e["name"]) == 50.0
