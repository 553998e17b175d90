"""Kernels for mixtures of experts against the reference: layouts, ragged counts of tokens, unused experts."""

from __future__ import annotations

import numpy as np
import pytest

from flashrt.backends.cpu import CpuBackend
from flashrt.ir.ops import LINEAR_BF16, LINEAR_EXACT, LINEAR_I8
from flashrt.layouts import LAYOUTS, MATRICES
from tests.backends.cpu_streams import F32, agree, cpu, packed, run
from tests.backends.test_cpu_kernels import AT, EXACT, LINEAR, f32

RNG = np.random.default_rng(8)
NUMERICS = {
    "f32": (LINEAR, ""),
    "i8": ('numerics="act=i8/32 acc=f32"', "i8/32"),
    "bf16": ('numerics="act=bf16 acc=f32"', "bf16"),
}
PACKED = [name for name, layout in LAYOUTS.items() if layout.bits and layout.rows == 16]


def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def routes(t: int, experts: int, top_k: int, only: int | None = None) -> F32:
    """Random routes [t, 2*top_k]; only: how many of the experts are ever chosen."""
    ids = np.array([RNG.permutation(only or experts)[:top_k] for _ in range(t)])
    return np.concatenate([ids, RNG.uniform(0, 1, (t, top_k))], axis=1).astype(np.float32)


def product(
    layout: str, experts: int, n: int, k: int, top_k: int, how: str, *, shared: bool, bias: bool
) -> str:
    numerics, scheme = NUMERICS[how]
    rows = "T" if shared else f"{top_k}*T"
    quantised = {"": f"f32[{rows},{k}]", "i8/32": f"u8[{rows},{k + 4 * -(-k // 32)}]"}
    small = quantised.get(scheme) or f"bf16[32*ceildiv({rows},32),{-(-k // 32) * 32}]"
    first = f'quantize {AT} src=%0 dst=%3 scheme="{scheme}"\n' if scheme else ""
    facts = f"bias={str(bias).lower()},experts={experts},shared={str(shared).lower()},top_k={top_k}"
    args = f"%{3 if scheme else 0},@w,%2" + (",@b" if bias else "")
    return f"""weight w f32[{experts * n},{k}] sources=[w] layout={layout}
weight b f32[{experts * n}] sources=[b] layout=f32
slot %0 cpu:0 f32[{rows},{k}]
slot %1 cpu:0 f32[{top_k}*T,{n}]
slot %2 cpu:0 f32[T,{2 * top_k}]
slot %3 cpu:0 {small}
block w cpu:0 lo=0 hi={experts * n} bytes=0
block b cpu:0 lo=0 hi={experts * n} bytes=0
{first}dispatch {AT} kernel=expert_linear.{layout} args=[{args}] dst=%1 attrs={{{facts}}} {numerics}
"""


def needs(layout: str, how: str) -> None:
    """Skips what this processor has no instructions for."""
    numerics = {"i8": LINEAR_I8, "bf16": LINEAR_BF16}.get(how, LINEAR_EXACT)
    if (f"expert_linear.{layout}", numerics) not in CpuBackend().kernels():
        pytest.skip(f"this processor has no kernel for {numerics}")


def cases() -> list[tuple[str, str]]:
    return [(layout, "f32") for layout in MATRICES] + [(x, how) for x in PACKED for how in ("i8", "bf16")]


@pytest.mark.parametrize("layout,how", cases())
@pytest.mark.parametrize(
    "experts,n,k,top_k,t,shared,bias",
    [(4, 48, 64, 2, 1, True, False), (5, 32, 70, 3, 7, False, True), (7, 528, 33, 1, 90, True, True)],
)
def test_a_product(
    layout: str, how: str, experts: int, n: int, k: int, top_k: int, t: int, shared: bool, bias: bool
) -> None:
    needs(layout, how)
    text = product(layout, experts, n, k, top_k, how, shared=shared, bias=bias)
    values = {0: r(t if shared else t * top_k, k), 2: routes(t, experts, top_k)}
    blocks = {"w": packed(layout, experts * n, k), "b": f32(r(experts * n))}
    agree(text, values, 1, blocks, tolerance=1e-5, T=t)


@pytest.mark.parametrize(
    "layout,how", [("q4m.16x32", "i8"), ("q8.16x32", "bf16"), ("q4.16x32", "f32"), ("f32", "f32")]
)
def test_a_token_has_the_same_bits_alone_and_among_others(layout: str, how: str) -> None:
    needs(layout, how)
    text, w = product(layout, 6, 32, 64, 2, how, shared=True, bias=False), packed(layout, 6 * 32, 64)
    x, table = r(80, 64), routes(80, 6, 2, only=4)
    together = run(cpu(), text, {0: x, 2: table}, {"w": w}, T=80).read(1)
    for t in (0, 1, 40, 79):
        alone = run(cpu(), text, {0: x[t], 2: table[t]}, {"w": w}, T=1).read(1)
        assert alone.tobytes() == together[2 * t : 2 * t + 2].tobytes()


def test_only_chosen_experts_are_read() -> None:
    """The weights of experts that no token chose are NaN, and nothing notices."""
    w = np.full((6, 32, 64), np.nan, np.float32)
    w[[1, 4]] = r(2, 32, 64)
    table = np.array([[1, 4, 0.5, 0.5], [4, 1, 0.5, 0.5]], np.float32)
    text = product("f32", 6, 32, 64, 2, "f32", shared=True, bias=False)
    got = run(cpu(), text, {0: r(2, 64), 2: table}, {"w": f32(w)}, T=2).read(1)
    assert np.isfinite(got).all()


def test_an_expert_that_is_not_there_gives_nan() -> None:
    table = np.array([[6, 4, 0.5, 0.5], [-1, np.nan, 0.5, 0.5]], np.float32)
    text = product("f32", 6, 32, 64, 2, "f32", shared=True, bias=False)
    got = run(cpu(), text, {0: r(2, 64), 2: table}, {"w": packed("f32", 6 * 32, 64)}, T=2).read(1)
    assert np.isnan(got).all(axis=1).tolist() == [True, False, True, True]


ROUTE = f"""weight b f32[E] sources=[b] layout=f32
slot %0 cpu:0 f32[T,E]
slot %1 cpu:0 f32[T,2K]
block b cpu:0 lo=0 hi=E bytes=0
dispatch {AT} kernel=route args=[ARGS] dst=%1 attrs={{ATTRS}} {EXACT}
"""


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", ["true", "false"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "experts,top_k,groups,top_groups,group_score",
    [
        (4, 2, 1, 1, "max"),
        (60, 5, 1, 1, "max"),
        (64, 6, 8, 3, "sum2"),
        (24, 3, 4, 2, "max"),
        (128, 8, 1, 1, "max"),
    ],
)
def test_a_route(
    score: str, normalise: str, bias: bool, experts: int, top_k: int, groups: int, top_groups: int,
    group_score: str,
) -> None:  # fmt: skip
    facts = (
        f'bias={str(bias).lower()},group_score="{group_score}",groups={groups},normalise={normalise},'
        f'scale=2.5,score="{score}",top_groups={top_groups},top_k={top_k}'
    )
    text = ROUTE.replace("ATTRS", facts).replace("ARGS", "%0,@b" if bias else "%0")
    text = text.replace("2K", str(2 * top_k)).replace("[E]", f"[{experts}]").replace("T,E", f"T,{experts}")
    text = text.replace("hi=E", f"hi={experts}")
    got = agree(text, {0: 3 * r(9, experts)}, 1, {"b": f32(0.3 * r(experts))}, tolerance=1e-6, T=9)
    assert all(len(set(row)) == top_k for row in got[:, :top_k].astype(int))


def test_of_equal_experts_the_first_are_chosen() -> None:
    facts = (
        'bias=false,group_score="max",groups=1,normalise=true,scale=1.0,score="softmax",top_groups=1,top_k=2'
    )
    text = ROUTE.replace("ATTRS", facts).replace("ARGS", "%0").replace("2K", "4")
    text = text.replace("[E]", "[5]").replace("T,E", "T,5").replace("hi=E", "hi=5")
    got = agree(text, {0: [[1, 3, 3, 3, 0]]}, 1, {"b": f32(r(5))}, T=1)
    assert got[0, :2].tolist() == [1, 2]


@pytest.mark.parametrize("t,width,top_k", [(1, 64, 2), (7, 35, 3), (40, 96, 8)])
def test_a_weighted_sum(t: int, width: int, top_k: int) -> None:
    text = f"""slot %0 cpu:0 f32[{top_k}*T,{width}]
slot %1 cpu:0 f32[T,{2 * top_k}]
slot %2 cpu:0 f32[T,{width}]
dispatch {AT} kernel=expert_sum args=[%0,%1] dst=%2 attrs={{top_k={top_k}}} {EXACT}
"""
    agree(text, {0: r(t * top_k, width), 1: routes(t, 9, top_k)}, 2, T=t)


@pytest.mark.parametrize("t,width", [(1, 64), (7, 35)])
def test_a_clamped_gate(t: int, width: int) -> None:
    args = f"%0[0:{width}],%0[{width}:{2 * width}]"
    text = f"""slot %0 cpu:0 f32[T,{2 * width}]
slot %1 cpu:0 f32[T,{width}]
dispatch {AT} kernel=gated_clamped args=[{args}] dst=%1 attrs={{alpha=1.702,limit=2.0}} {EXACT}
"""
    agree(text, {0: 3 * r(t, 2 * width)}, 1, tolerance=3e-6, T=t)
