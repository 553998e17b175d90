"""Attention on tensor cores, of a bf16 cache with rounded queries and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from flashrt.backends.cuda import CudaDevice, args, encode
from flashrt.backends.cuda.args import Launch, Step
from flashrt.ir.ops import ATTENTION_BF16
from flashrt.layouts import LAYOUTS, U8, pack_plain
from tests.backends import cpu_streams
from tests.backends.cuda_streams import F32, DeviceMemory, guard_intact, in_turns, run
from tests.backends.kernel_texts import AT, attention_text

RNG = np.random.default_rng(13)
TOLERANCE = 5e-3  # of the largest value: weights are rounded at other maxima than the reference's
PLAIN = "causal=true,window=0,softcap=0.0"
# one sequence begins, one comes to the end of a page, one has several tokens in the step
LENGTHS, TOKENS = (0, 31, 100, 201), (1, 1, 4, 1)


def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def text_of(heads: int, kv_heads: int, d: int, dv: int, attrs: str = PLAIN, **more: Any) -> str:
    given = {"numerics": ATTENTION_BF16, "pages": "S,M"} | more
    return attention_text(heads, kv_heads, d, dv, f",{attrs}", **given)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches of attention on tensor cores; ranges of keys never get blocks of their own."""
    found: list[Launch] = []
    make = encode._on_tensor_cores

    def kept(*given: Any) -> Step:
        step = make(*given)
        assert isinstance(step, Launch)
        found.append(step)
        return step

    monkeypatch.setattr(encode, "FULL_TENSOR", 0)
    monkeypatch.setattr(encode, "_on_tensor_cores", kept)
    return found


class Given(NamedTuple):
    values: dict[int, NDArray[Any]]
    state: F32
    blocks: dict[str, U8]
    env: dict[str, Any]


def step_of(
    heads: int, kv_heads: int, d: int, dv: int, lengths: Sequence[int], tokens: Sequence[int]
) -> Given:
    """Sequences with so many keys in the cache and tokens in the step, which come in any order. Keys and
    pages beyond a context and channels beyond a head are no numbers."""
    many = [-(-(n + t) // 16) for n, t in zip(lengths, tokens, strict=True)]
    nowhere, order = sum(many), iter(RNG.permutation(sum(many)))
    state = np.full((nowhere + 1, 2, kv_heads, 16, max(d, dv)), np.nan, np.float32)
    table = np.full((len(many), max(many) + 1), nowhere, np.int32)
    for s, (pages, length) in enumerate(zip(many, lengths, strict=True)):
        for n in range(pages):
            page = table[s, n] = next(order)
            keys = min(16, max(0, length - 16 * n))
            state[page, 0, :, :keys, :d] = r(kv_heads, keys, d)
            state[page, 1, :, :keys, :dv] = r(kv_heads, keys, dv)
    t, turn = sum(tokens), RNG.permutation(sum(tokens))
    seq = np.repeat(np.arange(len(many), dtype=np.int32), tokens)[turn]
    positions = np.concatenate([n + np.arange(t) for n, t in zip(lengths, tokens, strict=True)])[turn]
    values = {
        0: r(t, heads * d), 1: r(t, kv_heads * d), 2: r(t, kv_heads * dv),
        3: positions.astype(np.int32), 4: seq, 5: table,
    }  # fmt: skip
    env = {"T": t, "S": len(many), "M": table.shape[1], "P": nowhere + 1}
    return Given(values, state, {"sinks": pack_plain(LAYOUTS["f32"], r(heads))}, env)


def check(gpu: CudaDevice, text: str, given: Given, out: int = 6, tolerance: float = TOLERANCE) -> None:
    values, state, blocks, env = given
    want = cpu_streams.run(cpu_streams.reference(), text, values, blocks, state, **env).read(out)
    memory = run(gpu, text, values, blocks, state, times=2, **env)
    a, b = (x[: env["T"]].astype(np.float32) for x in (memory.read(out), want))
    scale = float(np.abs(b).max())
    np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=tolerance)
    assert guard_intact(memory) and nothing_behind(memory, 6)


def nothing_behind(memory: DeviceMemory, slot: int) -> bool:
    """Whether what lies behind a slot's rows is as `run` left it."""
    place, dtype, shape = memory.place_of(slot)
    behind = place.buffer[place.offset + int(np.prod(shape)) * dtype.itemsize :]
    return bool((behind == 0xFF).all())


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "heads,kv_heads,d,dv,attrs",
    [
        (8, 2, 128, 128, PLAIN),
        (3, 3, 64, 64, "causal=true,window=37,softcap=0.0"),
        (4, 2, 16, 16, "causal=false,window=0,softcap=0.0"),
        (3, 1, 80, 80, "causal=true,window=16,softcap=2.0"),
        (5, 1, 8, 8, "causal=false,window=50,softcap=0.0"),
        (12, 2, 40, 24, PLAIN),
        (7, 1, 24, 72, "causal=true,window=1,softcap=0.0"),
        (8, 1, 96, 64, "causal=true,window=64,softcap=5.0"),
        (12, 1, 32, 32, PLAIN),
        (17, 1, 16, 16, PLAIN),
        (4, 2, 256, 256, PLAIN),
        (2, 2, 136, 200, "causal=true,window=90,softcap=0.0"),
    ],
)
def test_against_the_reference(
    gpu: CudaDevice, launched: list[Launch], heads: int, kv_heads: int, d: int, dv: int, attrs: str,
    sinks: bool,
) -> None:  # fmt: skip
    """Groups of all sizes, whole and odd widths; seven tokens in a bucket of eight."""
    given = step_of(heads, kv_heads, d, dv, LENGTHS, TOKENS)
    check(gpu, text_of(heads, kv_heads, d, dv, attrs, sinks=sinks), given)
    assert {step.grid for step in launched} == {(8, kv_heads * -(-heads // kv_heads // 8), 1)}


def test_a_result_may_be_rounded(gpu: CudaDevice, launched: list[Launch]) -> None:
    text = text_of(4, 2, 32, 32)
    text = text.replace("block sinks", "slot %7 cpu:0 bf16[32*ceildiv(T,32),128]\nblock sinks", 1)
    text += f"quantize {AT} src=%6 dst=%7 scheme=bf16\n"
    check(gpu, text, step_of(4, 2, 32, 32, LENGTHS, TOKENS), 7)
    assert launched and all(args.Attention(*step.fields).y_as for step in launched)  # type: ignore[arg-type]


def test_a_warp_has_more_pages_than_entries_of_the_table_at_once(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 81 pages of a warp, entries come 32 at a time."""
    monkeypatch.setattr(cpu_streams, "HEAD", cpu_streams.HEAD.replace("hi=64", "hi=512"))
    given = step_of(1, 1, 16, 16, (2042, 5160), (1, 1))
    check(gpu, text_of(1, 1, 16, 16), given, tolerance=2 * TOLERANCE)


@pytest.mark.parametrize("d", [128, 256])
def test_the_same_bits_in_whatever_order_warps_run(gpu: CudaDevice, d: int) -> None:
    text = text_of(2, 1, d, d)
    values, state, blocks, env = step_of(2, 1, d, d, (330, 5), (2, 1))

    def bits() -> bytes:
        got = run(gpu, text, values, blocks, state, **env).read(6)
        assert np.isfinite(got).all()
        return bytes(got.tobytes())

    want = bits()
    for down, late in ((1, -1), (0, 0), (1, 1), (0, 2), (1, 3)):
        in_turns(gpu, down, late)
        try:
            assert bits() == want, (down, late)
        finally:
            in_turns(gpu, 0, -1)


@pytest.mark.parametrize(
    "d,numerics", [(20, ATTENTION_BF16), (16, "acc=f32 chunk=page kv=bf16"), (16, "acc=f32 chunk=page")]
)
def test_what_runs_elsewhere(gpu: CudaDevice, launched: list[Launch], d: int, numerics: str) -> None:
    """Rows that aren't whole pieces of 16 bytes, and what isn't rounded."""
    check(gpu, text_of(2, 1, d, d, numerics=numerics), step_of(2, 1, d, d, (20,), (2,)))
    assert not launched
