"""Latent attention and products by heads on the CPU against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from flashrt.ir.ops import ATTENTION_EXACT
from flashrt.layouts import MATRICES
from tests.backends.cpu_streams import F32, agree, cpu, kv_view, packed, run
from tests.backends.kernel_texts import AT, attention_text
from tests.backends.test_cpu_attention import EVERY, TOLERANCE
from tests.backends.test_cpu_kernels import LINEAR

RNG = np.random.default_rng(11)
PAGES = 12
# heads, channels of a key, of them its value: DeepSeek-V3's with fewer heads, and sizes that fill no vector
SHAPES = [(5, 576, 512), (3, 24, 16), (2, 40, 12), (16, 128, 64)]


def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def latent_text(heads: int, d: int, dv: int, attrs: str, numerics: str, pages: str = "2,4") -> str:
    """As `attention_text`, of one head of keys that hold their values."""
    text = attention_text(heads, 1, d, dv, attrs + ",latent=true", numerics=numerics, pages=pages)
    text = text.replace("[P,2,1,", "[P,1,1,").replace(
        f"slot %1 cpu:0 f32[T,{d}]", f"slot %1 cpu:0 f32[T,{d - dv}]"
    )
    return text.replace("kernel=attention ", "kernel=attention+latent ")


def mixed_step(heads: int, d: int, dv: int) -> tuple[dict[int, object], F32]:
    """A chunk of sequence 0 (positions 30…40) and one new token of sequence 1 (position 17)."""
    t = 12
    values: dict[int, object] = {
        0: r(t, heads * d), 1: r(t, d - dv), 2: r(t, dv),
        3: [*range(30, 41), 17], 4: [0] * 11 + [1], 5: [[3, 9, 0, 11], [5, 2, 7, 7]],
    }  # fmt: skip
    state = r(PAGES, 1, 1, 16, d)
    # rows not yet written: seen by nobody
    state[0, :, :, 41 - 32 :] = state[2, :, :, 2:] = state[[1, 4, 6, 7, 8, 10, 11]] = np.nan
    return values, state


@pytest.mark.parametrize("heads,d,dv", SHAPES)
@pytest.mark.parametrize("attrs", ["", ",window=20,softcap=1.5", ",causal=false"])
@pytest.mark.parametrize("numerics", EVERY)
def test_attention(heads: int, d: int, dv: int, attrs: str, numerics: str) -> None:
    values, state = mixed_step(heads, d, dv)
    text = latent_text(heads, d, dv, attrs, numerics)
    agree(text.replace("scale=0.2", "scale=0.05"), values, 6, state=state, tolerance=TOLERANCE[numerics],
          T=12, P=PAGES)  # fmt: skip


@pytest.mark.parametrize("heads,d,dv", SHAPES[:2])
@pytest.mark.parametrize("numerics", EVERY)
def test_a_token_has_the_same_bits_alone_and_in_a_chunk(heads: int, d: int, dv: int, numerics: str) -> None:
    """Alone its keys are shared out among threads, page by page for all heads."""
    t, pages = 150, np.arange(10)[None]
    values: dict[int, object] = {
        0: r(t, heads * d), 1: r(t, d - dv), 2: r(t, dv), 3: np.arange(t), 4: [0] * t, 5: pages,
    }  # fmt: skip
    text = latent_text(heads, d, dv, "", numerics, "1,10")
    memory = run(cpu(), text, values, state=np.zeros((PAGES, 1, 1, 16, d), np.float32), T=t, P=PAGES)
    chunk, written = memory.read(6).copy(), kv_view(memory).copy()
    for at in (0, 127, 149):
        few = {i: np.asarray(v)[at : at + 1] if i != 5 else v for i, v in values.items()}
        for threads in (1, 3):
            device = cpu(threads)
            got = run(device, text, few, state=written, T=1, P=PAGES).read(6)
            assert got.tobytes() == chunk[at : at + 1].tobytes(), (at, threads)
            device.close()


def test_kv_write_touches_its_rows_only() -> None:
    values, state = mixed_step(2, 40, 12)
    memory = run(cpu(2), latent_text(2, 40, 12, "", ATTENTION_EXACT), values, state=state, T=12, P=PAGES)
    after = kv_view(memory).reshape(state.shape).copy()
    k, v = np.asarray(values[1]), np.asarray(values[2])
    for t, (position, page) in enumerate(zip([*range(30, 41), 17], [9, 9, *[0] * 9, 2], strict=True)):
        row = position % 16
        assert np.array_equal(after[page, 0, 0, row], [*k[t], *v[t]])
        after[page, 0, 0, row] = state[page, 0, 0, row]
    assert np.array_equal(after, state, equal_nan=True)


# ---- products by heads ------------------------------------------------------------------------------
def heads_text(layout: str, heads: int, d: int, n: int, k: int) -> str:
    """x %0 [T, heads*d] → %1 [T, heads*(d-k+n)], with block w."""
    return f"""weight w f32[{heads * n},{k}] sources=[w] layout={layout}
slot %0 cpu:0 f32[T,{heads * d}]
slot %1 cpu:0 f32[T,{heads * (d - k + n)}]
block w cpu:0 lo=0 hi={heads * n} bytes=0
dispatch {AT} kernel=head_linear.{layout} args=[%0,@w] dst=%1 attrs={{heads={heads}}} {LINEAR}
"""


@pytest.mark.parametrize("layout", MATRICES)
@pytest.mark.parametrize(
    "heads,d,n,k,t", [(3, 64, 32, 64, 1), (2, 40, 48, 33, 7), (5, 192, 80, 128, 37), (1, 20, 16, 12, 300)]
)
def test_a_product(layout: str, heads: int, d: int, n: int, k: int, t: int) -> None:
    blocks = {"w": packed(layout, heads * n, k)}
    agree(heads_text(layout, heads, d, n, k), {0: r(t, heads * d)}, 1, blocks, tolerance=1e-5, T=t)


@pytest.mark.parametrize("layout", ["f32", "q8.16x32"])
def test_a_product_has_the_bits_of_a_linear(layout: str) -> None:
    """Of each head alone, whatever tokens and heads are beside it."""
    x, w = r(40, 3 * 64), packed(layout, 3 * 32, 64)
    got = run(cpu(2), heads_text(layout, 3, 64, 32, 64), {0: x}, {"w": w}, T=40).read(1)
    each = len(w) // 3
    for head in range(3):
        alone = heads_text(layout, 1, 64, 32, 64)
        part = {"w": w[each * head : each * (head + 1)]}
        for t in (0, 39):
            one = run(cpu(), alone, {0: x[t, 64 * head : 64 * (head + 1)]}, part, T=1).read(1)
            assert one.tobytes() == got[t, 32 * head : 32 * (head + 1)].tobytes()
