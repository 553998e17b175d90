"""Latent attention and products by heads with CUDA against the reference: on a GPU, or emulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from flashrt.backends.cuda import CudaBackend, CudaDevice, missing
from flashrt.backends.cuda.kernels import PLAIN
from flashrt.ir.ops import ATTENTION_BF16, ATTENTION_CACHED, ATTENTION_EXACT
from tests.backends.cpu_streams import packed
from tests.backends.cuda_streams import F32, agree, run, spec
from tests.backends.test_cpu_latent import PAGES, heads_text, latent_text, mixed_step

RNG = np.random.default_rng(17)


@pytest.fixture(
    scope="module",
    params=[pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("emulated", marks=pytest.mark.slow)],
)
def gpu(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    if request.param == "gpu":
        if reason := missing():
            pytest.skip(reason)
        device = CudaBackend().open(replace(spec(), id="gpu:0"))
        device.spec = spec()
    else:
        if not missing():
            pytest.skip("there is a GPU")
        from tests.backends.cuda_emulated import COMPILER, EmulatedDriver

        if COMPILER is None:
            pytest.skip("no g++ to compile the emulated kernels")
        device = CudaDevice(spec(), EmulatedDriver())
    yield device
    device.close()


def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("heads,d,dv", [(9, 576, 512), (3, 24, 16), (2, 40, 12)])
@pytest.mark.parametrize("attrs", ["", ",window=20,softcap=1.5", ",causal=false"])
@pytest.mark.parametrize("numerics", [ATTENTION_EXACT, ATTENTION_CACHED, ATTENTION_BF16])
def test_attention(gpu: CudaDevice, heads: int, d: int, dv: int, attrs: str, numerics: str) -> None:
    values, state = mixed_step(heads, d, dv)
    text = latent_text(heads, d, dv, attrs, numerics).replace("scale=0.2", "scale=0.05")
    tolerance = 1e-2 if numerics == ATTENTION_BF16 else 4e-6
    agree(gpu, text, values, 6, state=state, tolerance=tolerance, times=2, T=12, P=PAGES)


@pytest.mark.parametrize("numerics", [ATTENTION_EXACT, ATTENTION_CACHED])
def test_a_token_has_the_same_bits_alone_and_in_a_chunk(gpu: CudaDevice, numerics: str) -> None:
    """Alone its keys are shared out among blocks, range by range."""
    t, pages, heads, d, dv = 150, np.arange(10)[None], 3, 24, 16
    values = {0: r(t, heads * d), 1: r(t, d - dv), 2: r(t, dv), 3: np.arange(t), 4: [0] * t, 5: pages}
    text = latent_text(heads, d, dv, "", numerics, "1,10")
    empty = np.zeros((PAGES, 1, 1, 16, d), np.float32)
    memory = run(gpu, text, values, state=empty, T=t, P=PAGES)
    chunk, kept = memory.read(6), memory.state_bytes("kv")
    written = kept.view(np.float32) if numerics == ATTENTION_EXACT else widened(kept)
    for at in (0, 127, 149):
        few = {i: np.asarray(v)[at : at + 1] if i != 5 else v for i, v in values.items()}
        got = run(gpu, text, few, state=written.reshape(empty.shape), T=1, P=PAGES).read(6)
        assert got.tobytes() == chunk[at : at + 1].tobytes(), at


def widened(bf16: np.ndarray) -> F32:  # type: ignore[type-arg]
    return (bf16.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("layout", PLAIN)
@pytest.mark.parametrize(
    "heads,d,n,k,t", [(3, 64, 32, 64, 1), (2, 40, 48, 33, 7), (5, 192, 80, 128, 37), (1, 20, 16, 12, 100)]
)
def test_a_product_by_heads(gpu: CudaDevice, layout: str, heads: int, d: int, n: int, k: int, t: int) -> None:
    blocks = {"w": packed(layout, heads * n, k)}
    agree(gpu, heads_text(layout, heads, d, n, k), {0: r(t, heads * d)}, 1, blocks, tolerance=2e-6, T=t)
