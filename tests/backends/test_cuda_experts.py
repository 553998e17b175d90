"""CUDA kernels for mixtures of experts against the reference: on a GPU where there is one, else emulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flashrt.backends.cuda import CudaDevice
from flashrt.backends.cuda.kernels import ROUNDED, STORED
from flashrt.backends.cuda.linear import NAMES
from flashrt.errors import PlanError
from flashrt.layouts import LAYOUTS, pack_plain
from tests.backends.cpu_streams import packed
from tests.backends.cuda_streams import F32, agree, in_turns, run
from tests.backends.kernel_texts import AT
from tests.backends.test_cpu_experts import NUMERICS, ROUTE, product, routes
from tests.backends.test_cuda_kernels import LINEAR, f32, linear

RNG = np.random.default_rng(11)
EXACT = 'numerics="acc=f32"'
TOLERANCE = {"f32": 4e-6, "i8": 4e-6, "bf16": 4e-3}


def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def cases() -> list[tuple[str, str]]:
    return [(layout, "f32") for layout in STORED] + [(x, how) for x in ROUNDED for how in ("bf16", "i8")]


@pytest.mark.parametrize("layout,how", [c for c in cases() if c != ("bf16", "i8")])
@pytest.mark.parametrize(
    "experts,n,k,top_k,t,shared,bias",
    [
        (9, 48, 64, 2, 1, True, False),  # every pair an item of its own
        (5, 32, 70, 3, 7, False, True),
        (7, 80, 544, 1, 40, True, True),  # several items of an expert, inputs that fill no round of the warps
        (4, 16, 1056, 2, 3, True, False),
    ],
)
def test_a_product(
    gpu: CudaDevice, layout: str, how: str, experts: int, n: int, k: int, top_k: int, t: int, shared: bool,
    bias: bool,
) -> None:  # fmt: skip
    if layout == "bf16" and how == "bf16" and k % 32:
        k = 96  # as products have it, it only has kernels for whole blocks of 32
    text = product(layout, experts, n, k, top_k, how, shared=shared, bias=bias)
    values = {0: r(t if shared else t * top_k, k), 2: routes(t, experts, top_k)}
    blocks = {"w": packed(layout, experts * n, k), "b": f32(r(experts * n))}
    agree(gpu, text, values, 1, blocks, tolerance=TOLERANCE[how], T=t)


@pytest.mark.parametrize(
    "layout,how",
    [("q4m.16x32", "i8"), ("q8.16x32", "f32"), ("q4.16x32", "f32"), ("bf16", "f32"), ("f32", "f32")],
)
def test_a_token_has_the_same_bits_alone_and_among_others(gpu: CudaDevice, layout: str, how: str) -> None:
    experts, n, k = 12, 48, 576
    text = product(layout, experts, n, k, 2, how, shared=True, bias=False)
    w, x, table = packed(layout, experts * n, k), r(60, k), routes(60, experts, 2, only=5)
    together = run(gpu, text, {0: x, 2: table}, {"w": w}, T=60).read(1)
    for t in (0, 1, 30, 59):
        alone = run(gpu, text, {0: x[t], 2: table[t]}, {"w": w}, T=1).read(1)
        assert alone.tobytes() == together[2 * t : 2 * t + 2].tobytes()


def test_an_expert_gives_the_bits_of_a_linear(gpu: CudaDevice) -> None:
    w, x = packed("q4.16x32", 48, 1100), r(3, 1100)
    table = np.array([[0, 1.0]] * 3, np.float32)
    text = product("q4.16x32", 1, 48, 1100, 1, "f32", shared=True, bias=False)
    got = run(gpu, text, {0: x, 2: table}, {"w": w}, T=3).read(1)
    want = run(gpu, linear("q4.16x32", 48, 1100, "", LINEAR), {0: x}, {"w": w}, T=3).read(1)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("layout", ROUNDED)
@pytest.mark.parametrize(
    "experts,n,k,t,bias,tile",
    [
        (5, 80, 416, 52, True, 4),
        (3, 272, 96, 90, False, 8),
        (4, 16, 32, 68, False, 8),
        (7, 96, 96, 33, True, 4),
    ],
)
def test_tiles_of_many_tokens(
    gpu: CudaDevice, layout: str, experts: int, n: int, k: int, t: int, bias: bool, tile: int
) -> None:
    """32 or 64 pairs of an expert at a time; then some experts aren't there."""
    k = k if layout == "bf16" else k - 7
    text = product(layout, experts, n, k, 2, "bf16", shared=bias, bias=bias)
    values = {0: r(t if bias else 2 * t, k), 2: routes(t, experts, 2)}
    blocks = {"w": packed(layout, experts * n, k), "b": f32(r(experts * n))}
    agree(gpu, text, values, 1, blocks, tolerance=TOLERANCE["bf16"], T=t)
    if launches := getattr(gpu.driver, "launches", None):
        assert launches[-1] == f"expert_tiles_{NAMES[layout]}_{tile}"
    values[2][1, 1], values[2][t - 1, 0] = np.nan, experts
    got = run(gpu, text, values, blocks, T=t).read(1)
    assert np.flatnonzero(np.isnan(got).all(axis=1)).tolist() == [3, 2 * t - 2]
    assert np.flatnonzero(np.isnan(got).any(axis=1)).tolist() == [3, 2 * t - 2]


@pytest.mark.parametrize("t", [2, 40])
@pytest.mark.parametrize("layout", ["f32", "bf16"])
def test_only_chosen_experts_are_read(gpu: CudaDevice, layout: str, t: int) -> None:
    """The weights of experts that no token chose are NaN, and nothing notices."""
    w = np.full((20, 32, 64), np.nan, np.float32)
    w[[1, 4]] = r(2, 32, 64)
    table = np.array([[1, 4, 0.5, 0.5], [4, 1, 0.5, 0.5]] * (t // 2), np.float32)
    text = product(layout, 20, 32, 64, 2, "f32", shared=True, bias=False)
    data = pack_plain(LAYOUTS[layout], w)
    assert np.isfinite(run(gpu, text, {0: r(t, 64), 2: table}, {"w": data}, T=t).read(1)).all()


@pytest.mark.parametrize("experts", [6, 40])
@pytest.mark.parametrize("layout", ["f32", "q4.16x32", "bf16"])
def test_an_expert_that_is_not_there_gives_nan(gpu: CudaDevice, layout: str, experts: int) -> None:
    table = np.array([[experts, 4, 0.5, 0.5], [-1, np.nan, 0.5, 0.5], [0, 5, 1, 1]], np.float32)
    text = product(layout, experts, 32, 64, 2, "f32", shared=True, bias=True)
    blocks = {"w": packed(layout, experts * 32, 64), "b": f32(r(experts * 32))}
    got = run(gpu, text, {0: r(3, 64), 2: table}, blocks, T=3).read(1)
    assert np.isnan(got).all(axis=1).tolist() == [True, False, True, True, False, False]
    assert np.isnan(got).any(axis=1).tolist() == [True, False, True, True, False, False]


def test_experts_of_a_part_of_a_group_are_refused(gpu: CudaDevice) -> None:
    text = product("q4.16x32", 4, 24, 64, 2, "f32", shared=True, bias=False)
    with pytest.raises(PlanError, match="the 24 rows of an expert"):
        run(gpu, text, {0: r(1, 64), 2: routes(1, 4, 2)}, {"w": packed("q4.16x32", 96, 64)}, T=1)


@pytest.mark.parametrize(
    "layout,how,t",
    [("q4.16x32", "f32", 1), ("q4m.16x32", "i8", 5), ("bf16", "f32", 5), ("q8.16x32", "bf16", 5)],
)
def test_the_same_bits_on_any_number_of_processors_and_in_any_order_of_warps(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, layout: str, how: str, t: int
) -> None:
    experts, n, k, driver = 12, 112, 1120, gpu.driver
    text = product(layout, experts, n, k, 2, how, shared=False, bias=True)
    values = {0: r(2 * t, k), 2: routes(t, experts, 2, only=6)}
    blocks = {"w": packed(layout, experts * n, k), "b": f32(r(experts * n))}
    want = agree(gpu, text, values, 1, blocks, tolerance=TOLERANCE[how], T=t)
    for processors, down, late in [(1, 0, -1), (2, 1, -1), (7, 0, 16), (3, 1, 17), (5, 0, 5)]:
        monkeypatch.setattr(driver, "limits", replace(driver.limits, processors=processors))
        in_turns(gpu, down, late)
        got = run(gpu, text, values, blocks, T=t).read(1)
        in_turns(gpu, 0, -1)
        assert got.tobytes() == want.tobytes(), (processors, down, late)


def test_a_step_of_fewer_tokens_than_its_bucket_and_a_second_step(gpu: CudaDevice) -> None:
    """37 tokens in a bucket of 64: what is left over from the first step counts for nothing in the second."""
    text = product("q4.16x32", 6, 32, 64, 2, "f32", shared=True, bias=False)
    values, blocks = {0: r(37, 64), 2: routes(37, 6, 2)}, {"w": packed("q4.16x32", 6 * 32, 64)}
    agree(gpu, text, values, 1, blocks, times=3, T=37)


# ---- routing ---------------------------------------------------------------------------
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", ["true", "false"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "experts,top_k,groups,top_groups,group_score",
    [
        (4, 2, 1, 1, "max"), (60, 5, 1, 1, "max"), (64, 6, 8, 3, "sum2"), (24, 3, 4, 2, "max"),
        (128, 8, 1, 1, "max"), (8, 2, 8, 4, "sum2"),
    ],
)  # fmt: skip
def test_a_route(
    gpu: CudaDevice, score: str, normalise: str, bias: bool, experts: int, top_k: int, groups: int,
    top_groups: int, group_score: str,
) -> None:  # fmt: skip
    facts = (
        f'bias={str(bias).lower()},group_score="{group_score}",groups={groups},normalise={normalise},'
        f'scale=2.5,score="{score}",top_groups={top_groups},top_k={top_k}'
    )
    text = routed(experts, top_k, facts, bias)
    got = agree(gpu, text, {0: 3 * r(9, experts)}, 1, {"b": f32(0.3 * r(experts))}, tolerance=1e-6, T=9)
    assert all(len(set(row)) == top_k for row in got[:, :top_k].astype(int))


def routed(experts: int, top_k: int, facts: str, bias: bool) -> str:
    text = ROUTE.replace("ATTRS", facts).replace("ARGS", "%0,@b" if bias else "%0")
    text = text.replace("2K", str(2 * top_k)).replace("[E]", f"[{experts}]").replace("T,E", f"T,{experts}")
    return text.replace("hi=E", f"hi={experts}")


def test_of_equal_experts_the_first_are_chosen_and_nan_last(gpu: CudaDevice) -> None:
    facts = (
        'bias=false,group_score="max",groups=1,normalise=true,scale=1.0,score="sigmoid",top_groups=1,top_k=4'
    )
    values = [[1, 3, 3, 3, 0], [np.nan] * 5, [np.nan, 1, np.nan, 2, -np.inf]]
    got = run(gpu, routed(5, 4, facts, False), {0: values}, {"b": f32(r(5))}, T=3).read(1)
    assert got[:, :4].tolist() == [[1, 2, 3, 0], [0, 1, 2, 3], [3, 1, 4, 0]]
    assert np.isnan(got[1, 4:]).all()


@pytest.mark.parametrize("t,width,top_k", [(1, 64, 2), (7, 35, 3), (40, 300, 8)])
def test_a_weighted_sum(gpu: CudaDevice, t: int, width: int, top_k: int) -> None:
    text = f"""slot %0 cpu:0 f32[{top_k}*T,{width}]
slot %1 cpu:0 f32[T,{2 * top_k}]
slot %2 cpu:0 f32[T,{width}]
dispatch {AT} kernel=expert_sum args=[%0,%1] dst=%2 attrs={{top_k={top_k}}} {EXACT}
"""
    agree(gpu, text, {0: r(t * top_k, width), 1: routes(t, 9, top_k)}, 2, tolerance=0, T=t)


def mixture(layout: str, experts: int, slots: int, n: int, k: int, top_k: int, how: str) -> str:
    """Slot 7: the sum of what experts of a cache and others make, slot 8: that of all of one weight."""
    numerics, scheme = NUMERICS[how]
    x = f"u8[T,{k + k // 32 * 4}]" if scheme else f"f32[T,{k}]"
    first = f'quantize {AT} src=%0 dst=%9 scheme="{scheme}"\n' if scheme else ""
    of, facts = 9 if scheme else 0, f"bias=false,shared=true,top_k={top_k}"
    ranges = f"%4[0:{2 * top_k}]", f"%4[{2 * top_k}:{4 * top_k}]"

    def product(weight: str, route: str, dst: int, count: int) -> str:
        return (
            f"dispatch {AT} kernel=expert_linear.{layout} args=[%{of},@{weight},{route}] dst=%{dst} "
            f"attrs={{{facts},experts={count}}} {numerics}\n"
        )

    return f"""weight w f32[{experts * n},{k}] sources=[w] layout={layout}
weight far f32[{experts * n},{k}] sources=[w] layout={layout}
weight near f32[{slots * n},{k}] sources=[w] layout={layout}
state kv i32[{2 * experts}]
slot %0 cpu:0 f32[T,{k}]
slot %1 cpu:0 f32[T,{2 * top_k}]
slot %2 cpu:0 i32[{2 * experts}]
slot %3 cpu:0 f32[{top_k}*T,{n}]
slot %4 cpu:0 f32[T,{4 * top_k}]
slot %5 cpu:0 f32[{top_k}*T,{n}]
slot %6 cpu:0 f32[{top_k}*T,{n}]
slot %7 cpu:0 f32[T,{n}]
slot %8 cpu:0 f32[T,{n}]
slot %9 cpu:0 {x}
block w cpu:0 lo=0 hi={experts * n} bytes=0
block far cpu:0 lo=0 hi={experts * n} bytes=0
block near cpu:0 lo=0 hi={slots * n} bytes=0
{first}dispatch {AT} kernel=expert_cache args=[%1,%2] dst=%4 attrs={{experts={experts},layer=1,slots={slots},top_k={top_k}}} {EXACT} reads=[kv] writes=[kv]
{product("near", ranges[0], 5, slots)}{product("far", ranges[1], 6, experts)}\
dispatch {AT} kernel=expert_join args=[%5,%6,{ranges[0]}] dst=%7 attrs={{top_k={top_k}}} {EXACT}
{product("w", "%1", 3, experts)}dispatch {AT} kernel=expert_sum args=[%3,%1] dst=%8 attrs={{top_k={top_k}}} {EXACT}
"""  # noqa: E501 (lines of a .micro)


@pytest.mark.parametrize("layout,how", [("q4.16x32", "f32"), ("q8.16x32", "i8"), ("f32", "f32")])
@pytest.mark.parametrize("t,experts,top_k", [(1, 33, 8), (7, 9, 3)])
def test_a_cache_of_experts_and_the_others_make_the_bits_of_all(
    gpu: CudaDevice, layout: str, how: str, t: int, experts: int, top_k: int
) -> None:
    """Neither side reads weights of the other's experts: those are NaN here. Choices are counted."""
    slots, n, k = 5, 48, 96
    table = np.zeros((2, experts), np.int32)
    table[0] = slots + 1  # another layer's
    held = {int(e): s for s, e in enumerate(RNG.permutation(experts)[: slots - 1])}
    table[1, list(held)] = [s + 1 for s in held.values()]
    w = packed(layout, experts * n, k).reshape(experts, -1)
    far, near = w.copy(), np.full((slots, w.shape[1]), 0xFF, np.uint8)
    for e, s in held.items():
        near[s], far[e] = w[e], 0xFF
    blocks = {"w": w.reshape(-1), "far": far.reshape(-1), "near": near.reshape(-1)}
    route, text = routes(t, experts, top_k), mixture(layout, experts, slots, n, k, top_k, how)
    values = {0: r(t, k), 1: route, 2: table.reshape(-1)}
    nothing = np.zeros(2 * experts, np.float32)
    memory = run(gpu, text, values, blocks, nothing, T=t)
    assert np.isfinite(memory.read(8)).all()
    assert memory.read(7).tobytes() == memory.read(8).tobytes()
    counted = memory.state_bytes("kv").view(np.int32).reshape(2, experts)
    asked = np.bincount(route[:, :top_k].astype(int).reshape(-1), minlength=experts)
    assert not counted[0].any() and counted[1].tolist() == asked.tolist()
    agree(gpu, text, values, 7, blocks, state=nothing, tolerance=TOLERANCE[how], T=t)


@pytest.mark.parametrize("t,width", [(1, 64), (7, 35), (2, 700)])
def test_a_clamped_gate(gpu: CudaDevice, t: int, width: int) -> None:
    args = f"%0[0:{width}],%0[{width}:{2 * width}]"
    text = f"""slot %0 cpu:0 f32[T,{2 * width}]
slot %1 cpu:0 f32[T,{width}]
dispatch {AT} kernel=gated_clamped args=[{args}] dst=%1 attrs={{alpha=1.702,limit=2.0}} {EXACT}
"""
    agree(gpu, text, {0: 3 * r(t, 2 * width)}, 1, tolerance=3e-6, T=t)


@pytest.mark.parametrize("dim,rotated", [(32, 32), (40, 24), (9, 6), (1024, 64)])
def test_rope_pairs(gpu: CudaDevice, dim: int, rotated: int) -> None:
    text = f"""slot %0 cpu:0 f32[T,{3 * dim}]
slot %1 cpu:0 f32[T,{rotated}]
slot %2 cpu:0 f32[T,{3 * dim}]
dispatch {AT} kernel=rope_pairs args=[%0,%1] dst=%2 attrs={{head_dim={dim}}} {EXACT}
"""
    agree(gpu, text, {0: r(5, 3 * dim), 1: r(5, rotated)}, 2, tolerance=0, T=5)
