"""Paged attention and sampling on the CPU against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from flashrt.backend import ABORT
from flashrt.backends.cpu.cache import function_of
from flashrt.backends.reference.sample import sample_row, uniform
from flashrt.errors import DeviceError
from flashrt.ir.ops import ATTENTION_BF16, ATTENTION_CACHED, ATTENTION_EXACT
from tests.backends.cpu_streams import F32, agree, compute, cpu, kv_view, prepared, run
from tests.backends.kernel_texts import attention_text, sample_text

RNG = np.random.default_rng(4)
PAGES = 12
TOLERANCE = {
    ATTENTION_EXACT: 2e-6,
    ATTENTION_CACHED: 2e-6,
    ATTENTION_BF16: 8e-3,
}  # the second: weights are rounded at other maxima
EVERY = [n for n in TOLERANCE if function_of("attention", n)]


def r(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def mixed_step(heads: int, kv_heads: int, d: int, dv: int) -> tuple[dict[int, object], F32]:
    """A chunk of sequence 0 (positions 30…40) and one new token of sequence 1 (position 17)."""
    t = 12
    values: dict[int, object] = {
        0: r(t, heads * d), 1: r(t, kv_heads * d), 2: r(t, kv_heads * dv),
        3: [*range(30, 41), 17], 4: [0] * 11 + [1], 5: [[3, 9, 0, 11], [5, 2, 7, 7]],
    }  # fmt: skip
    state = r(PAGES, 2, kv_heads, 16, max(d, dv))
    # rows not yet written: seen by nobody
    state[0, :, :, 41 - 32 :] = state[2, :, :, 2:] = state[[1, 4, 6, 7, 8, 10, 11]] = np.nan
    return values, state


@pytest.mark.parametrize(
    "heads,kv_heads,d,dv", [(4, 4, 16, 16), (6, 2, 24, 24), (9, 3, 64, 64), (2, 1, 40, 24)]
)
@pytest.mark.parametrize(
    "attrs", ["", ",window=5", ",window=20", ",softcap=1.5", ",causal=false", ",window=16,causal=false"]
)
@pytest.mark.parametrize("numerics", EVERY)
def test_attention(heads: int, kv_heads: int, d: int, dv: int, attrs: str, numerics: str) -> None:
    values, state = mixed_step(heads, kv_heads, d, dv)
    text = attention_text(heads, kv_heads, d, dv, attrs, numerics=numerics)
    agree(text, values, 6, state=state, tolerance=TOLERANCE[numerics], T=12, P=PAGES)


@pytest.mark.parametrize("numerics", EVERY)
def test_sinks_take_probability(numerics: str) -> None:
    values, state = mixed_step(6, 2, 24, 24)
    blocks = {"sinks": (4 * r(6)).view(np.uint8)}
    text = attention_text(6, 2, 24, 24, "", sinks=True, numerics=numerics)
    agree(text, values, 6, blocks, state=state, tolerance=TOLERANCE[numerics], T=12, P=PAGES)


LONG = 397  # tokens of sequence 0, beside three of sequence 1


def long_step(attrs: str, numerics: str) -> tuple[str, dict[int, object], F32]:
    t, pages = LONG + 3, np.full((2, 26), 51)
    pages[0, :25], pages[1, :4] = np.arange(25), [30, 31, 32, 33]
    values: dict[int, object] = {
        0: r(t, 6 * 32), 1: r(t, 2 * 32), 2: r(t, 2 * 32),
        3: [*range(LONG), 50, 51, 52], 4: [0] * LONG + [1] * 3, 5: pages,
    }  # fmt: skip
    text = attention_text(6, 2, 32, 32, attrs, numerics=numerics).replace("i32[2,4]", "i32[2,26]")
    return text, values, r(52, 2, 2, 16, 32)


@pytest.mark.parametrize("numerics", EVERY)
@pytest.mark.parametrize("attrs", ["", ",window=70", ",causal=false"])
def test_a_long_chunk_beside_single_tokens(numerics: str, attrs: str) -> None:
    """Threads have tokens of their own here, in runs that end inside sequences."""
    text, values, state = long_step(attrs, numerics)
    agree(text, values, 6, state=state, tolerance=TOLERANCE[numerics], T=LONG + 3, P=52)


@pytest.mark.parametrize("numerics", EVERY)
@pytest.mark.parametrize("attrs", ["", ",window=200", ",softcap=2.0"])
def test_tokens_alone_share_their_keys_out_and_keep_their_bits(numerics: str, attrs: str) -> None:
    text, values, state = long_step(attrs, numerics)
    memory = run(cpu(), text, values, state=state, T=LONG + 3, P=52)
    chunk, written = memory.read(6).copy(), kv_view(memory).copy()
    for first, last in ((0, 1), (127, 129), (383, LONG), (LONG - 1, LONG + 2)):
        few = {i: np.asarray(v)[first:last] if i != 5 else v for i, v in values.items()}
        for threads in (1, 2, 3):
            device = cpu(threads)
            got = run(device, text, few, state=written, T=last - first, P=52).read(6)
            assert got.tobytes() == chunk[first:last].tobytes(), (first, last, threads)
            device.close()


def test_a_run_that_was_given_up_leaves_nothing_behind() -> None:
    """Whoever ends the last range of keys merges all of them: it is found by counting."""
    text, values, state = long_step("", ATTENTION_EXACT)
    few = {i: np.asarray(v)[LONG - 2 : LONG] if i != 5 else v for i, v in values.items()}
    device = cpu(2)
    memory = prepared(device, text, few, {}, {"T": 2, "P": 52})
    kv_view(memory)[:] = state.reshape(-1)
    code = device.load(compute(memory.stream), memory)
    device.run(code, 1)
    want = memory.read(6).copy()
    memory.read(6)[...] = 0
    for words in code.shared:
        words[:64].view(np.int64)[:] = 1  # as if one thread had left in the middle
    memory.words[ABORT] = 1
    with pytest.raises(DeviceError, match="interrupted"):
        device.run(code, 2)
    memory.words[ABORT] = 0
    device.run(code, 3)
    assert memory.read(6).tobytes() == want.tobytes()
    device.close()


def test_kv_write_touches_its_rows_only() -> None:
    values, state = mixed_step(2, 1, 40, 24)
    memory = run(cpu(2), attention_text(2, 1, 40, 24, ""), values, state=state, T=12, P=PAGES)
    after = kv_view(memory).reshape(state.shape).copy()
    k, v = np.asarray(values[1]), np.asarray(values[2])
    for t, (position, page) in enumerate(zip([*range(30, 41), 17], [9, 9, *[0] * 9, 2], strict=True)):
        row = position % 16
        assert np.array_equal(after[page, 0, 0, row, :40], k[t])
        assert np.array_equal(after[page, 1, 0, row, :24], v[t])
        after[page, 0, 0, row, :40], after[page, 1, 0, row, :24] = (
            state[page, 0, 0, row, :40],
            state[page, 1, 0, row, :24],
        )
    assert np.array_equal(after, state, equal_nan=True)


@pytest.mark.parametrize("numerics", EVERY)
def test_a_token_has_the_same_bits_alone_and_in_a_chunk(numerics: str) -> None:
    values, state = mixed_step(6, 2, 24, 24)
    text = attention_text(6, 2, 24, 24, "", numerics=numerics)
    memory = run(cpu(), text, values, state=state, T=12, P=PAGES)
    chunk, written = memory.read(6).copy(), kv_view(memory).copy()
    for t in range(12):
        alone = {i: np.asarray(v)[t : t + 1] if i != 5 else v for i, v in values.items()}
        got = run(cpu(), text, alone, state=written, T=1, P=PAGES).read(6)
        assert got.tobytes() == chunk[t].tobytes()


@pytest.mark.parametrize("numerics", EVERY)
def test_large_scores_stay_finite(numerics: str) -> None:
    values, state = mixed_step(4, 4, 16, 16)
    values[0] = np.asarray(values[0]) * np.float32(1e4)
    text = attention_text(4, 4, 16, 16, "", numerics=numerics)
    agree(text, values, 6, state=state, tolerance=TOLERANCE[numerics], T=12, P=PAGES)


# ---- sampling -------------------------------------------------------------------------
def parameters(t: int, **given: object) -> dict[int, object]:
    """One setting a row: the defaults draw from the whole row at temperature 1."""
    defaults: dict[str, object] = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0,
        "seed": RNG.integers(-(2**63), 2**63 - 1, t), "draw": np.arange(t), "history": -1,
    }  # fmt: skip
    return dict(enumerate({**defaults, **given}.values(), 1))


@pytest.mark.parametrize(
    "given",
    [
        {}, {"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 50.0}, {"top_k": 1}, {"top_k": 7},
        {"top_k": 5000}, {"top_p": 0.01}, {"top_p": 0.8}, {"min_p": 0.1}, {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8, "penalty": 1.3},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_sample_draws_what_the_definition_draws(given: dict[str, object], spread: float) -> None:
    t, v = 16, 300
    logits = (r(t, v) * np.float32(spread)).round(1)  # ties
    history = RNG.integers(-1, v + 5, (t, 9))
    values = {0: logits, **parameters(t, **given, history=history)}
    agree(sample_text(v, 9), values, 9, T=t)


def test_sample_of_odd_rows() -> None:
    v = 40
    logits = np.zeros((6, v), np.float32)
    logits[0] = np.nan
    logits[1, :] = -np.inf
    logits[2, 7] = np.nan
    logits[2, 9] = np.inf
    logits[3, [5, 11]] = 1e4, -1e4
    logits[4] = -np.inf
    logits[4, 31] = -3e38
    text, temperatures = sample_text(v, 2), (0.0, 1e-7, 1e-4, 1.0, 1e6)
    for temperature in temperatures:
        values = {0: logits, **parameters(6, temperature=temperature, penalty=2.0, history=[[3, 3]] * 6)}
        got = agree(text, values, 9, T=6)
        assert list(got[[0, 1]]) == [0, 0] and got[4] == 31
        assert got[2] == 9
        assert got[3] == 5 or temperature == 1e6


@pytest.mark.parametrize("penalty", [1e-39, 1e-30, 1e30])
def test_penalty_that_overflows_is_cut_back(penalty: float) -> None:
    logits = np.array([[0, 3e9, -3e9, 5, 4e9]], np.float32)
    values = {0: logits, **parameters(1, penalty=penalty, temperature=0.7, history=[[0, 1, 2, 2]])}
    agree(sample_text(5, 4), values, 9, T=1)


def test_frequencies_follow_the_probabilities() -> None:
    t, v = 16, 50
    row = r(v)
    p = np.exp(row.astype(np.float64))
    p /= p.sum()
    device, counts = cpu(), np.zeros(v)
    for batch in range(200):
        values = {0: np.tile(row, (t, 1)), **parameters(t, draw=np.arange(t) + t * batch, seed=5)}
        counts += np.bincount(run(device, sample_text(v, 1), values, T=t).read(9), minlength=v)
    n = counts.sum()
    assert np.abs((counts - n * p) / np.sqrt(n * p * (1 - p))).max() < 4


def test_uniform_matches_its_definition() -> None:
    # two tokens of equal weight: the draw shows on which side of a half the number fell
    t = 16
    seeds = RNG.integers(-(2**63), 2**63 - 1, t)
    values = {0: np.zeros((t, 2), np.float32), **parameters(t, seed=seeds, draw=seeds[::-1])}
    got = run(cpu(), sample_text(2, 1), values, T=t).read(9)
    want = [int(uniform(int(s), int(d)) >= 0.5) for s, d in zip(seeds, seeds[::-1], strict=True)]
    assert list(got) == want
    assert sample_row(np.zeros(2, np.float32), 1.0, 0, 1.0, 0.0, 1.0, 0.5, np.array([-1])) == 1


@pytest.mark.parametrize("attrs", ["", ",window=20", ",softcap=1.5"])
@pytest.mark.parametrize("d", [64, 128, 40])
def test_many_tokens_share_pages_and_keep_their_bits(d: int, attrs: str) -> None:
    """Runs of one sequence are taken page by page; alone, each token gets the same bits."""
    text = attention_text(4, 2, d, d, attrs)
    text = "".join(line for line in text.splitlines(keepends=True) if "kernel=kv_write" not in line)
    positions, seq = [*range(5, 45), *range(23), 63], [0] * 40 + [1] * 23 + [0]
    values = {0: r(64, 4 * d), 3: positions, 4: seq, 5: [[3, 9, 0, 11], [5, 2, 7, 8]]}
    state = r(PAGES, 2, 2, 16, d)
    together = agree(text, values, 6, state=state, tolerance=1e-5, T=64, P=PAGES)
    for t in (0, 15, 16, 39, 40, 62, 63):
        one = {**values, 0: values[0][t], 3: positions[t], 4: seq[t]}  # type: ignore[index]
        alone = run(cpu(), text, one, state=state, T=1, P=PAGES).read(6)
        assert alone.tobytes() == together[t].tobytes(), t
