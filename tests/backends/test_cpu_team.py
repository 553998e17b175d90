"""The table and the team: regions, ticks, rings, aborts, idleness."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from flashrt.backend import ABORT, Place, Rect
from flashrt.backends.cpu import CpuBackend, CpuDevice
from flashrt.backends.cpu.walk import IDLE_NS
from flashrt.errors import DeviceError
from flashrt.ir.ops import EXACT, LINEAR_EXACT, LINEAR_I8
from flashrt.layouts import LAYOUTS, pack_plain
from tests.backends.cpu_streams import F32, compute, cpu, packed, prepared, reference, run, spec

RNG = np.random.default_rng(9)
AT = "device=cpu:0 lane=compute"
NUMERICS = f'numerics="{LINEAR_EXACT}"'

# small rows (thread 0 alone) and large ones (shared) in turn, of which each reads what the last one wrote
LAYER = f"""weight norm f32[256] sources=[n] layout=f32
weight up f32[1024,256] sources=[u] layout=q4m.16x32
weight down f32[256,512] sources=[d] layout=q8.16x32
weight bias f32[256] sources=[b] layout=f32
slot %0 cpu:0 f32[T,256]
slot %1 cpu:0 f32[T,256]
slot %2 cpu:0 f32[T,1024]
slot %3 cpu:0 f32[T,512]
slot %4 cpu:0 f32[T,256]
slot %5 cpu:0 f32[T,256]
block norm cpu:0 lo=0 hi=256 bytes=0
block up cpu:0 lo=0 hi=1024 bytes=0
block down cpu:0 lo=0 hi=256 bytes=0
block bias cpu:0 lo=0 hi=256 bytes=0
dispatch {AT} kernel=rms_norm args=[%0,@norm] dst=%1 attrs={{eps=1e-05,width=256}}
dispatch {AT} kernel=scale args=[%1] dst=%1 attrs={{by=1.5}}
dispatch {AT} kernel=linear.q4m.16x32 args=[%1,@up] dst=%2 {NUMERICS}
dispatch {AT} kernel=gated args=[%2[0:512],%2[512:1024]] dst=%3 attrs={{act="silu"}}
bias {AT} block=@bias
dispatch {AT} kernel=linear.q8.16x32+bias+residual args=[%3,@down,%0] dst=%4 {NUMERICS}
dispatch {AT} kernel=add args=[%4,%0] dst=%5
"""
BLOCKS = {
    "norm": pack_plain(LAYOUTS["f32"], RNG.standard_normal(256)),
    "up": packed("q4m.16x32", 1024, 256),
    "down": packed("q8.16x32", 256, 512),
    "bias": pack_plain(LAYOUTS["f32"], RNG.standard_normal(256)),
}


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = cpu(2)
    yield device
    device.close()


def x(t: int) -> F32:
    return RNG.standard_normal((t, 256)).astype(np.float32)


@pytest.mark.parametrize("t", [1, 16])
def test_a_region_gives_the_bits_of_its_rows_one_by_one(t: int) -> None:
    values = {0: x(t)}
    want = run(cpu(), LAYER, values, BLOCKS, alone=True, T=t).read(5).copy()
    exact = run(reference(), LAYER, values, BLOCKS, T=t).read(5)
    assert np.abs(want - exact).max() < 2e-6 * np.abs(exact).max()
    for threads in (1, 2, 3):
        device = cpu(threads)
        assert run(device, LAYER, values, BLOCKS, T=t).read(5).tobytes() == want.tobytes()
        device.close()


@pytest.mark.parametrize("numerics", [LINEAR_EXACT, LINEAR_I8])
@pytest.mark.parametrize("groups", [1, 3, 12, 37])
def test_every_channel_is_computed_whoever_takes_it(groups: int, numerics: str) -> None:
    n, k = 16 * groups - 5, 7360  # so wide that a group of channels is a turn
    rounded = numerics == LINEAR_I8
    text = f"""weight w f32[{n},{k}] sources=[w] layout=q4.16x32
slot %0 cpu:0 f32[T,{k}]
slot %1 cpu:0 u8[T,{k + 4 * k // 32}]
slot %2 cpu:0 f32[T,{n}]
block w cpu:0 lo=0 hi={n} bytes=0
quantize {AT} src=%0 dst=%1 scheme="i8/32"
dispatch {AT} kernel=linear.q4.16x32 args=[%{int(rounded)},@w] dst=%2 numerics="{numerics}"
"""
    values, blocks = {0: RNG.standard_normal((2, k))}, {"w": packed("q4.16x32", n, k)}
    want = run(cpu(), text, values, blocks, T=2).read(2)
    assert np.isfinite(want).all()
    for threads in (2, 3, 5, 8, 13):
        device = cpu(threads)
        assert run(device, text, values, blocks, T=2).read(2).tobytes() == want.tobytes(), threads
        device.close()


def test_many_steps_with_changing_sizes(device: CpuDevice) -> None:
    memory = prepared(device, LAYER, {}, BLOCKS, {"T": 16})
    code = device.load(compute(memory.stream), memory)
    inputs = x(16)
    memory.set({"T": 16})
    memory.put(0, inputs)
    device.run(code, 1)
    all_rows = memory.read(5).copy()
    for epoch, t in enumerate([1, 3, 16, 7] * 30, 2):
        memory.set({"T": t})
        memory.places[5].buffer[:] = 0xFF
        device.run(code, epoch)
        assert memory.read(5).tobytes() == all_rows[:t].tobytes()


def test_a_block_that_moved_is_read_where_it_lies_now(device: CpuDevice) -> None:
    memory = prepared(device, LAYER, {0: x(4)}, BLOCKS, {"T": 4})
    code = device.load(compute(memory.stream), memory)
    device.run(code, 1)
    first = memory.read(5).copy()
    old = memory.block("down", "cpu:0")
    memory.load_block("down", "cpu:0", packed("q8.16x32", 256, 512, seed=77))
    assert old is not None
    old.buffer[:] = 0xFF  # what lay there is poison now
    device.run(code, 2)
    second = memory.read(5).copy()
    want = run(
        cpu(), LAYER, {0: memory.read(0)}, {**BLOCKS, "down": packed("q8.16x32", 256, 512, seed=77)}, T=4
    )
    assert second.tobytes() == want.read(5).tobytes() != first.tobytes()


TICKS = f"""slot %0 cpu:0 f32[T,8]
slot %1 cpu:0 f32[T,8]
dispatch {AT} waits=[!0,!1@-1] signals=!2 kernel=scale args=[%0] dst=%1 attrs={{by=2.0}}
dispatch {AT} waits=[!2] signals=!3 kernel=add args=[%1,%0] dst=%1
"""


def test_waits_and_signals(device: CpuDevice) -> None:
    memory = prepared(device, TICKS, {0: np.ones((1, 8))}, {}, {"T": 1})
    code = device.load(compute(memory.stream), memory)

    def other_lane() -> None:
        time.sleep(0.02)
        memory.put(0, np.full((1, 8), 5.0))
        memory.ticks[1] = 3
        time.sleep(0.02)
        memory.ticks[0] = 4

    lane = threading.Thread(target=other_lane)
    lane.start()
    before = time.perf_counter_ns()
    device.run(code, 4)
    after = time.perf_counter_ns()
    lane.join()
    assert (memory.read(1) == 15).all() and list(memory.ticks[2:]) == [4, 4]
    (arrived, started, ended), (arrived2, started2, ended2) = device.stamps(code).tolist()
    assert before <= arrived < started <= ended <= arrived2 <= started2 <= ended2 <= after
    assert started - arrived > 30e6 and started2 - arrived2 < 10e6


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_an_abort_ends_a_wait_and_the_device_works_on(threads: int) -> None:
    device = cpu(threads)
    text = LAYER.replace("kernel=linear.q8", "waits=[!0] kernel=linear.q8")
    memory = prepared(device, text, {0: x(16)}, BLOCKS, {"T": 16})
    memory.ticks = np.zeros(1, np.int64)
    code = device.load(compute(memory.stream), memory)
    stop = threading.Timer(0.05, lambda: memory.words.__setitem__(ABORT, 1))
    stop.start()
    with pytest.raises(DeviceError, match="interrupted in step 1"):
        device.run(code, 1)
    memory.words[ABORT], memory.ticks[0] = 0, 2
    device.run(code, 2)
    want = run(cpu(), LAYER, {0: memory.read(0)}, BLOCKS, T=16)
    assert memory.read(5).tobytes() == want.read(5).tobytes()
    device.close()


def test_an_idle_team_uses_no_processor_time(device: CpuDevice) -> None:
    run(device, LAYER, {0: x(16)}, BLOCKS, T=16)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.02


def test_close_ends_the_threads() -> None:
    device = cpu(3)
    run(device, LAYER, {0: x(16)}, BLOCKS, T=16)
    helpers = list(device._team._helpers)
    assert len(helpers) == 2 and all(h.is_alive() for h in helpers)
    device.close()
    device.close()
    assert not any(h.is_alive() for h in helpers)


def test_more_threads_than_cores_still_finish() -> None:
    device = cpu(8)
    values = {0: x(16)}
    memory = prepared(device, LAYER, values, BLOCKS, {"T": 16})
    code = device.load(compute(memory.stream), memory)
    for epoch in range(1, 20):
        device.run(code, epoch)
    assert memory.read(5).tobytes() == run(cpu(), LAYER, values, BLOCKS, T=16).read(5).tobytes()
    device.close()


def test_helpers_that_sleep_are_woken() -> None:
    """However many of them sleep already when a step begins."""
    device, values = cpu(8), {0: x(16)}
    memory = prepared(device, LAYER, values, BLOCKS, {"T": 16})
    code = device.load(compute(memory.stream), memory)
    for epoch in range(1, 60):
        time.sleep(RNG.uniform(0.5, 1.5) * IDLE_NS / 1e9 if epoch % 6 else 0.02)
        device.run(code, epoch)
    assert memory.read(5).tobytes() == run(cpu(), LAYER, values, BLOCKS, T=16).read(5).tobytes()
    device.close()


def test_a_bias_is_stamped_with_its_dispatch(device: CpuDevice) -> None:
    memory = prepared(device, LAYER, {0: x(16)}, BLOCKS, {"T": 16})
    code = device.load(compute(memory.stream), memory)
    device.run(code, 1)
    stamps = device.stamps(code)
    assert stamps.shape == (7, 3) and (np.diff(stamps[[0, 1, 2, 3, 5, 6]].reshape(-1)) >= 0).all()
    assert list(stamps[4]) == [stamps[5, 0], stamps[5, 1], stamps[5, 1]]


def test_copy_and_write(device: CpuDevice) -> None:
    src, dst = Place(device.reserve(64), 0, 64), Place(device.reserve(64), 8, 48)
    device.write(np.arange(64, dtype=np.uint8), src)
    device.copy(Rect(src, 3, 4, 5, 10), Rect(dst, 1, 4, 5, 7))
    for row in range(4):
        start = 8 + 1 + 7 * row
        assert list(dst.buffer[start : start + 5]) == [3 + 10 * row + i for i in range(5)]
    assert dst.buffer[:9].sum() == 0 and dst.buffer.ctypes.data % 64 == 0


def test_the_backend_offers_what_it_can_run() -> None:
    offers = CpuBackend().kernels()
    assert ("linear.q4.16x32+bias+residual", LINEAR_EXACT) in offers and ("rope", EXACT) in offers
    assert ("attention", "acc=f32 chunk=page") in offers and len(set(offers)) == len(offers)
    for cores in (1, 64):
        device = CpuBackend().open(spec(cores=cores))
        assert device.threads == min(cores, len(os.sched_getaffinity(0)))
        device.close()
