"""Latent attention and products by heads with CUDA against the reference: on a GPU, or emulated."""

from __future__ import annotations

import numpy as np
import pytest

from flashrt.backends.cuda import CudaDevice, latent
from flashrt.backends.cuda.kernels import PLAIN
from flashrt.ir.ops import ATTENTION_BF16, ATTENTION_CACHED, ATTENTION_EXACT
from tests.backends.cpu_streams import packed
from tests.backends.cuda_streams import F32, agree, run
from tests.backends.test_cpu_latent import PAGES, heads_text, latent_text, mixed_step

RNG = np.random.default_rng(17)


def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("heads,d,dv", [(9, 576, 512), (2, 40, 12)])
@pytest.mark.parametrize("attrs", ["", ",window=20,softcap=1.5", ",causal=false"])
@pytest.mark.parametrize("numerics", [ATTENTION_EXACT, ATTENTION_CACHED, ATTENTION_BF16])
def test_attention(gpu: CudaDevice, heads: int, d: int, dv: int, attrs: str, numerics: str) -> None:
    values, state = mixed_step(heads, d, dv)
    text = latent_text(heads, d, dv, attrs, numerics).replace("scale=0.2", "scale=0.05")
    tolerance = 1e-2 if numerics == ATTENTION_BF16 else 4e-6
    agree(gpu, text, values, 6, state=state, tolerance=tolerance, times=2, T=12, P=PAGES)


@pytest.mark.parametrize("attrs", ["", ",window=270"])
def test_a_token_has_the_same_bits_alone_and_in_a_chunk(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, attrs: str
) -> None:
    """Alone its keys are shared out among blocks, range by range; in the chunk a block has all of them."""
    heads, d, dv, positions = 3, 24, 16, np.array([250, 255, 256, 257, 285])
    text = latent_text(heads, d, dv, attrs, ATTENTION_EXACT, "1,18")
    t, state = len(positions), r(18, 1, 1, 16, d)
    values = {
        0: r(t, heads * d),
        1: r(t, d - dv),
        2: r(t, dv),
        3: positions,
        4: [0] * t,
        5: np.arange(18)[None],
    }
    monkeypatch.setattr(latent, "SPLIT", 1)
    chunk = agree(gpu, text, values, 6, state=state, tolerance=4e-6, T=t, P=18)
    monkeypatch.undo()
    written = run(gpu, text, values, state=state, T=t, P=18).state_bytes("kv").view(np.float32)
    for at in range(t):
        few = {i: np.asarray(v)[at : at + 1] if i != 5 else v for i, v in values.items()}
        got = run(gpu, text, few, state=written.reshape(state.shape), T=1, P=18).read(6)
        assert got.tobytes() == chunk[at : at + 1].tobytes(), positions[at]


@pytest.mark.parametrize("layout", PLAIN)
@pytest.mark.parametrize(
    "heads,d,n,k,t", [(3, 64, 32, 64, 1), (2, 40, 48, 33, 7), (5, 192, 80, 128, 37), (1, 20, 16, 12, 100)]
)
def test_a_product_by_heads(gpu: CudaDevice, layout: str, heads: int, d: int, n: int, k: int, t: int) -> None:
    blocks = {"w": packed(layout, heads * n, k)}
    agree(gpu, heads_text(layout, heads, d, n, k), {0: r(t, heads * d)}, 1, blocks, tolerance=2e-6, T=t)
