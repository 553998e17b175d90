"""Products with activations in INT8 and bf16 against the reference: layouts, ragged shapes, threads."""

from __future__ import annotations

import numpy as np
import pytest

from flashrt.backends.cpu import encode
from flashrt.backends.cpu.cache import available, function_of
from flashrt.backends.cpu.kernels import candidates
from flashrt.ir.ops import LINEAR_BF16, LINEAR_I8
from flashrt.layouts import LAYOUTS, MATRICES
from tests.backends.cpu_streams import F32, agree, cpu, packed, run
from tests.backends.test_cpu_kernels import AT, f32

RNG = np.random.default_rng(4)
PACKED = [name for name in MATRICES if LAYOUTS[name].bits]
SHAPES = [(48, 64, 1, ""), (40, 70, 7, "+bias+residual"), (5, 33, 13, "+bias"), (130, 96, 50, "+residual")]


def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


ROUNDED = {
    LINEAR_I8: ("i8/32", lambda k: f"u8[T,{k + 4 * -(-k // 32)}]"),
    LINEAR_BF16: ("bf16", lambda k: f"bf16[32*ceildiv(T,32),{32 * -(-k // 32)}]"),
}


def linear(numerics: str, layout: str, n: int, k: int, epilogue: str) -> str:
    scheme, type = ROUNDED[numerics]
    bias = f"bias {AT} block=@b\n" if "bias" in epilogue else ""
    residual = ",%2" if "residual" in epilogue else ""
    return f"""weight w f32[{n},{k}] sources=[w] layout={layout}
weight b f32[{n}] sources=[b] layout=f32
slot %0 cpu:0 f32[T,{k}]
slot %1 cpu:0 f32[T,{n}]
slot %2 cpu:0 f32[T,{n}]
slot %3 cpu:0 {type(k)}
block w cpu:0 lo=0 hi={n} bytes=0
block b cpu:0 lo=0 hi={n} bytes=0
quantize {AT} src=%0 dst=%3 scheme="{scheme}"
{bias}dispatch {AT} kernel=linear.{layout}{epilogue} args=[%3,@w{residual}] dst=%1 numerics="{numerics}"
"""


@pytest.fixture(params=[LINEAR_I8, LINEAR_BF16])
def numerics(request: pytest.FixtureRequest) -> str:
    """Each way to round that this processor has a kernel for."""
    if not function_of("linear.q4.16x32", request.param):
        pytest.skip(f"this processor has no kernel for {request.param}")
    return str(request.param)


@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("n,k,t,epilogue", SHAPES)
def test_products(numerics: str, layout: str, n: int, k: int, t: int, epilogue: str) -> None:
    values = {0: r(t, k), 2: r(t, n)}
    blocks = {"w": packed(layout, n, k), "b": f32(r(n))}
    agree(linear(numerics, layout, n, k, epilogue), values, 1, blocks, T=t)


@pytest.mark.parametrize("layout", PACKED)
def test_a_row_has_the_same_bits_alone_and_among_others(numerics: str, layout: str) -> None:
    text, x, w = linear(numerics, layout, 40, 70, ""), r(47, 70), packed(layout, 40, 70)
    together = run(cpu(), text, {0: x}, {"w": w}, T=47).read(1)
    for t in range(47):
        alone = run(cpu(), text, {0: x[t]}, {"w": w}, T=1).read(1)
        assert alone.tobytes() == together[t].tobytes()


@pytest.mark.parametrize("tokens", [3, 13, 47])
@pytest.mark.parametrize("layout", PACKED)
def test_tiles_dot_products_and_plain_arithmetic_give_the_same_bits(
    layout: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = [name for name in candidates(f"linear.{layout}", LINEAR_I8) if available(name)]
    if len(able) == 1:
        pytest.skip("this processor has neither AVX512-VNNI nor AMX")
    text, x, w = linear(LINEAR_I8, layout, 40, 70, ""), r(tokens, 70), packed(layout, 40, 70)
    results = []
    for name in able:
        monkeypatch.setattr(encode, "function_of", lambda kernel, numerics, name=name: name)
        results.append(run(cpu(), text, {0: x}, {"w": w}, T=tokens).read(1).tobytes())
    assert set(results) == {results[0]}


@pytest.mark.parametrize("k", [64, 70, 5])
def test_rounding_to_bf16(k: int) -> None:
    text = f"""slot %0 cpu:0 f32[T,{k}]
slot %1 cpu:0 bf16[32*ceildiv(T,32),{32 * -(-k // 32)}]
quantize {AT} src=%0 dst=%1 scheme="bf16"
"""
    x = r(5, k)
    x[0, :5] = [np.nan, np.inf, -np.inf, 3.4e38, 1 + 2.0**-8]
    got = agree(text, {0: x}, 1, tolerance=0, T=5)
    assert np.isnan(got[0, 0].astype(np.float32)) and not got[5:].any()
