"""The reference device: kernels of every layout on hand-written streams, ranges, ticks, aborts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from flashrt.backend import ABORT, Compute, Place, Rect
from flashrt.backends.reference import ReferenceBackend, ReferenceDevice
from flashrt.backends.reference.attention import Shape, attention, kv_write
from flashrt.backends.reference.kernels import read_kernel
from flashrt.backends.reference.quants import dequantize, quantize
from flashrt.errors import DeviceError, LawError, PlanError
from flashrt.ir import micro
from flashrt.ir.ops import LINEAR_EXACT, LINEAR_I8
from flashrt.ir.text import read_micro
from flashrt.layouts import LAYOUTS, MATRICES, U8, pack_plain, pack_quants, unpack
from flashrt.machine import Device, Measured
from tests.backends.memory import HandMemory

RNG = np.random.default_rng(11)
GUESS = Measured(1.0, "assumed")
F32 = NDArray[np.float32]


def device(id: str = "reference:0") -> ReferenceDevice:
    return ReferenceBackend().open(Device(id, "reference", "test", 1 << 30, GUESS, {}, GUESS))


def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def packed(layout: str, n: int, k: int) -> tuple[U8, F32]:
    """Random weights as bytes and as what they mean."""
    kind = LAYOUTS[layout]
    if kind.element is not None:
        data = pack_plain(kind, r(n, k))
    else:
        blocks = kind.blocks(k)
        low = -128 if kind.bits == 8 and not kind.minimum else 0
        q = RNG.integers(low, low + (1 << kind.bits), (n, blocks, kind.block))
        scale = RNG.uniform(0.01, 0.1, (n, blocks)).astype(kind.number)
        data = pack_quants(kind, q, scale, -scale * kind.number.type(7) if kind.minimum else None)
    return data, unpack(kind, data, n, k)


def compute(stream: micro.Stream, device: str = "reference:0") -> list[Compute]:
    return [cast(Compute, i) for i in stream.instrs if i.device == device]


def run_once(
    text: str, values: dict[int, Any], blocks: dict[str, U8], env: dict[str, int], pages: int = 1
) -> HandMemory:
    """Loads and runs all of a stream on one device."""
    stream, on = read_micro(text), device()
    memory = HandMemory(stream, {"reference:0": on}, env, pages)
    for slot, value in values.items():
        memory.put(slot, value)
    for name, data in blocks.items():
        memory.load_block(name, "reference:0", data)
    on.run(on.load(compute(stream), memory), 1)
    return memory


HEAD = """micro test
symbol T lo=1 hi=8 hint=1
split s positions=[0,16,32,48] start=32
"""
AT = "device=reference:0 lane=compute"

LINEAR = (
    HEAD
    + f"""weight w f32[40,70] sources=[w] layout=LAYOUT
weight b f32[40] sources=[b] layout=f32
slot 0 reference:0 f32[T,70]
slot 1 reference:0 f32[T,40]
slot 2 reference:0 f32[T,40]
slot 3 reference:0 u8[T,82]
slot 4 reference:0 f32[T,40]
block w reference:0 lo=0 hi=40 bytes=1
block b reference:0 lo=0 hi=40 bytes=1
dispatch {AT} kernel=linear.LAYOUT args=[%0,@w] dst=%1 numerics="act=f32 acc=f32"
bias {AT} block=@b
dispatch {AT} kernel=linear.LAYOUT+bias+residual args=[%0,@w,%1] dst=%2 numerics="act=f32 acc=f32"
quantize {AT} src=%0 dst=%3 scheme=i8/32
dispatch {AT} kernel=linear.LAYOUT args=[%3,@w] dst=%4 numerics="act=i8/32 acc=f32" signals=!0
"""
)


@pytest.mark.parametrize("layout", MATRICES)
def test_linear_in_every_layout(layout: str) -> None:
    data, w = packed(layout, 40, 70)
    x, b = r(3, 70), r(40)
    memory = run_once(
        LINEAR.replace("LAYOUT", layout), {0: x}, {"w": data, "b": pack_plain(LAYOUTS["f32"], b)}, {"T": 3}
    )
    # entries up to 60: 1e-4 is a few units of the last place of the partial sums
    np.testing.assert_allclose(memory.read(1), x @ w.T, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(memory.read(2), 2 * (x @ w.T) + b, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(memory.read(3), quantize(x))
    np.testing.assert_allclose(memory.read(4), dequantize(quantize(x)) @ w.T, rtol=1e-5, atol=1e-5)
    assert memory.ticks[0] == 1


EMBEDDING = (
    HEAD
    + f"""weight w f32[40,33] sources=[w] layout=LAYOUT
slot 0 reference:0 i32[T]
slot 1 reference:0 f32[T,33]
block w reference:0 lo=0 hi=40 bytes=1
dispatch {AT} kernel=embedding.LAYOUT args=[%0,@w] dst=%1 numerics="acc=f32"
"""
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_embedding_in_every_layout(layout: str) -> None:
    data, w = packed(layout, 40, 33)
    ids = np.array([39, 0, 17, 16], np.int32)
    memory = run_once(EMBEDDING.replace("LAYOUT", layout), {0: ids}, {"w": data}, {"T": 4})
    np.testing.assert_array_equal(memory.read(1), w[ids])


SPLIT = (
    HEAD
    + f"""weight w f32[48,64] sources=[w] layout=q4m.16x32
weight b f32[48] sources=[b] layout=f32
slot 0 reference:0 f32[T,64]
slot 1 reference:0 f32[T,48]
block w reference:0 lo=16 hi=48 bytes=1
block b reference:0 lo=0 hi=48 bytes=1
bias {AT} block=@b[s:48]
dispatch {AT} kernel=linear.q4m.16x32+bias args=[%0,@w[s:48]] dst=%1[s:48] numerics="act=f32 acc=f32"
"""
)


@pytest.mark.parametrize("s", [16, 32, 48])
def test_ranges_move_with_the_split(s: int) -> None:
    """A block that starts at row 16 serves rows [s, 48); nothing left of s is written; s=48 does nothing."""
    data, w = packed("q4m.16x32", 48, 64)
    x, b = r(2, 64), r(48)
    blocks = {"w": data[LAYOUTS["q4m.16x32"].span(16, 48, 64)], "b": pack_plain(LAYOUTS["f32"], b)}
    memory = run_once(SPLIT, {0: x}, blocks, {"T": 2, "s": s})
    want = x @ w.T + b
    np.testing.assert_allclose(memory.read(1)[:, s:], want[:, s:], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(memory.read(1)[:, :s], 0)


ATTRS = "attrs={causal=true,head_dim=8,heads=4,kv_heads=2,scale=0.5,sinks=true,value_dim=8}"
ATTENTION = (
    HEAD
    + """symbol P lo=1 hi=100 hint=1
weight sinks f32[4] sources=[sinks] layout=f32
state kv.0 f32[P,2,2,16,8]
slot 0 reference:0 f32[T,64]
slot 1 reference:0 i32[T]
slot 2 reference:0 i32[T]
slot 3 reference:0 i32[1,2]
slot 4 reference:0 f32[T,32]
block sinks reference:0 lo=0 hi=4 bytes=16
"""
)
SPLIT_ATTENTION = f"""
dispatch {AT} kernel=kv_write args=[%0[32:48],%0[48:64],%1,%2,%3] {ATTRS} writes=[kv.0]
dispatch {AT} kernel=attention args=[%0[0:32],%1,%2,%3,@sinks] dst=%4 {ATTRS} reads=[kv.0]
"""
WHOLE_ATTENTION = f"""
dispatch {AT} kernel=host.attention dst=%4 {ATTRS} reads=[kv.0] writes=[kv.0] args=ARGS
""".replace("ARGS", "[%0[0:32],%0[32:48],%0[48:64],%1,%2,%3,@sinks]")


@pytest.mark.parametrize("rows", [SPLIT_ATTENTION, WHOLE_ATTENTION], ids=["two kernels", "host row"])
def test_attention_reads_channels_of_a_joint_qkv(rows: str) -> None:
    qkv, sinks = r(3, 64), r(4)
    positions, seq, pages = np.arange(3, dtype=np.int32), np.zeros(3, np.int32), np.array([[4, -1]], np.int32)
    memory = run_once(
        ATTENTION + rows,
        {0: qkv, 1: positions, 2: seq, 3: pages},
        {"sinks": pack_plain(LAYOUTS["f32"], sinks)},
        {"T": 3},
        pages=5,
    )
    shape, kv = Shape(4, 2, 8, 8, 0.5), np.zeros((5, 2, 2, 16, 8), np.float32)
    kv_write(kv, shape, qkv[:, 32:48], qkv[:, 48:], positions, seq, pages)
    np.testing.assert_array_equal(
        memory.read(4), attention(kv, shape, qkv[:, :32], positions, seq, pages, sinks)
    )
    assert memory.states["kv.0", "reference:0"].buffer[64:].view(np.float32).any()


HOST = (
    HEAD
    + """slot 0 gpu:0 f32[T,6]
slot 1 gpu:0 f32[T,3]
slot 2 gpu:0 i64[T,2]
dispatch device=gpu:0 lane=compute kernel=host.aten.slice args=[%0] dst=%1 attrs={dim=1,start=0,step=2}
dispatch device=gpu:0 lane=compute kernel=host.aten.topk args=[%1] dst=%2 attrs={dim=1,k=2,result=1}
"""
)


def test_host_rows_are_whole_nodes() -> None:
    """`host.linear` has no layout in its name, and its bias stands among its arguments."""
    text = LINEAR[: LINEAR.index("dispatch")].replace("LAYOUT", "q8.16x32") + (
        f'dispatch {AT} kernel=host.linear args=[%0,@w,@b,%1] dst=%2 numerics="act=f32 acc=f32"'
    )
    (data, w), x, b, residual = packed("q8.16x32", 40, 70), r(2, 70), r(40), r(2, 40)
    memory = run_once(text, {0: x, 1: residual}, {"w": data, "b": pack_plain(LAYOUTS["f32"], b)}, {"T": 2})
    np.testing.assert_allclose(memory.read(2), x @ w.T + b + residual, rtol=1e-5, atol=1e-5)


def test_host_rows_of_another_device() -> None:
    stream, on = read_micro(HOST), device()
    memory = HandMemory(stream, {"gpu:0": on}, {"T": 2})
    memory.put(0, np.array([[1, 0, 3, 0, 2, 0], [9, 0, 8, 0, 7, 0]], np.float32))
    on.run(on.load(compute(stream, "gpu:0"), memory), 1)
    np.testing.assert_array_equal(memory.read(2), [[1, 2], [0, 1]])


# ---- time -----------------------------------------------------------------------
LANES = (
    HEAD
    + """slot 0 reference:0 f32[T,4]
slot 1 reference:0 f32[T,4]
slot 2 reference:0 f32[T,4]
dispatch device=reference:0 lane=copy_in kernel=scale args=[%0] dst=%1 attrs={by=2.0} waits=[!1@-1] signals=!0
dispatch device=reference:0 lane=compute kernel=scale args=[%1] dst=%2 attrs={by=5.0} waits=[!0] signals=!1
"""
)


def lanes(memory: HandMemory, on: ReferenceDevice) -> Iterator[Any]:
    for lane in ("copy_in", "compute"):
        yield on.load([cast(Compute, i) for i in memory.stream.instrs if i.lane == lane], memory)


def test_two_lanes_keep_their_order_over_steps() -> None:
    """The consumer starts first and waits; the producer of a step waits for the consumer of the last."""
    on = device()
    memory = HandMemory(read_micro(LANES), {"reference:0": on}, {"T": 1})
    copy_in, compute_lane = lanes(memory, on)
    seen: list[float] = []

    def consume() -> None:
        for epoch in (1, 2, 3):
            on.run(compute_lane, epoch)
            seen.append(float(memory.read(2)[0, 0]))

    thread = threading.Thread(target=consume)
    thread.start()
    for epoch in (1, 2, 3):
        time.sleep(0.01)
        assert memory.ticks[1] == epoch - 1  # the consumer is still waiting
        memory.put(0, np.full((1, 4), epoch, np.float32))
        on.run(copy_in, epoch)
        while memory.ticks[1] < epoch:
            time.sleep(1e-4)
    thread.join(5)
    assert seen == [10, 20, 30] and memory.ticks.tolist() == [3, 3]
    arrived, started, ended = on.stamps(compute_lane)[0]
    assert started - arrived > 5e6 and started <= ended <= time.perf_counter_ns()


def test_abort_ends_a_wait() -> None:
    on = device()
    memory = HandMemory(read_micro(LANES), {"reference:0": on}, {"T": 1})
    _, compute_lane = lanes(memory, on)
    threading.Timer(0.02, lambda: memory.words.__setitem__(ABORT, 1)).start()
    with pytest.raises(DeviceError, match="aborted"):
        on.run(compute_lane, 1)
    assert memory.ticks[1] == 0


def test_blocks_are_looked_up_at_each_run() -> None:
    stream, on = read_micro(SPLIT), device()
    memory = HandMemory(stream, {"reference:0": on}, {"T": 1, "s": 16})
    memory.put(0, r(1, 64))
    memory.load_block("b", "reference:0", pack_plain(LAYOUTS["f32"], np.zeros(48, np.float32)))
    code = on.load(compute(stream), memory)
    with pytest.raises(DeviceError, match="block w is used"):
        on.run(code, 1)
    for epoch in (2, 3):  # a ring puts the block elsewhere in each step
        data, w = packed("q4m.16x32", 32, 64)
        memory.load_block("w", "reference:0", data)
        on.run(code, epoch)
        np.testing.assert_allclose(memory.read(1)[:, 16:], memory.read(0) @ w.T, rtol=1e-5, atol=1e-5)


def test_failure_names_the_instruction() -> None:
    stream, on = read_micro(LANES.replace("by=5.0", "other=5.0")), device()
    memory = HandMemory(stream, {"reference:0": on}, {"T": 1})
    memory.ticks[:] = 1
    _, broken = lanes(memory, on)
    with pytest.raises(DeviceError, match=r"(.|\n)*kernel=scale(.|\n)*dst=%2"):
        on.run(broken, 1)


# ---- loading and memory -----------------------------------------------------------
def test_unknown_kernels_name_known_ones() -> None:
    for name in ("linear.q5.16x32", "linaer.f32", "aten.nothing", "linear.f32+silu"):
        with pytest.raises(PlanError, match="close to it"):
            read_kernel(name)


def test_bias_must_stand_before_its_dispatch() -> None:
    stream, on = read_micro(SPLIT), device()
    memory = HandMemory(stream, {"reference:0": on}, {"T": 1})
    bias, linear = compute(stream)
    for wrong in ([linear], [bias], [bias, bias, linear]):
        with pytest.raises(LawError, match="bias"):
            on.load(wrong, memory)


def test_claimed_kernels_load() -> None:
    pairs = ReferenceBackend().kernels()
    assert len(set(pairs)) == len(pairs)
    assert {("linear.q4.16x32+bias+residual", LINEAR_I8), ("linear.bf16", LINEAR_EXACT)} <= set(pairs)
    assert {
        ("kv_write", "acc=f32"),
        ("attention", "acc=f32 chunk=page"),
        ("embedding.q8.16x32", "acc=f32"),
    } <= set(pairs)
    for name, _ in pairs:
        read_kernel(name)


def test_memory_is_aligned_and_copies_rectangles() -> None:
    on = device()
    a, b = on.reserve(100), on.reserve(100)
    assert a.ctypes.data % 64 == b.ctypes.data % 64 == 0 and len(a) == 100 and not a.any()
    on.write(np.arange(60, dtype=np.uint8), Place(a, 4, 60))
    on.copy(Rect(Place(a, 4, 60), 2, 3, 4, 10), Rect(Place(b, 8, 40), 1, 3, 4, 5))
    np.testing.assert_array_equal(
        b[9:24].reshape(3, 5)[:, :4], [[2, 3, 4, 5], [12, 13, 14, 15], [22, 23, 24, 25]]
    )
    assert b.sum() == sum(range(2, 6)) + sum(range(12, 16)) + sum(range(22, 26))
    on.close()
    on.close()
