"""The NPU backend on its stand-in (onnxruntime on the CPU): graphs, buckets, pieces, splits, errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashrt.backends.npu import PROVIDERS, describe, device_spec, providers
from flashrt.backends.npu.device import bucket
from flashrt.backends.npu.pieces import cut, read_rows
from flashrt.errors import DeviceError, LawError, PlanError
from flashrt.ir.text import read_micro
from flashrt.layouts import LAYOUTS, U8, pack_plain
from flashrt.machine import Device
from tests.backends.memory import HandMemory
from tests.backends.npu_streams import (
    AT,
    GUESS,
    HEAD,
    RNG,
    TOLERANCE,
    Bench,
    compare,
    counted_sessions,
    error,
    installed,
    mlp,
    numbered,
    packed,
    reference,
)

ANYWHERE = ["cpu", "openvino-cpu"]
HOST = Device("cpu:0", "cpu", "a processor", 1 << 30, GUESS, {"f32": GUESS}, GUESS, cores=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path))
    return tmp_path


def linear(layout: str, n: int, k: int, bias: bool, residual: bool) -> tuple[str, dict[str, U8]]:
    name = f"linear.{layout}" + "+bias" * bias + "+residual" * residual
    text = f"""weight w f32[{n},{k}] sources=[w] layout={layout}
weight b f32[{n}] sources=[b] layout=f32
slot %0 npu f32[T,{k + n}]
slot %1 npu f32[T,{n}]
block w npu lo=0 hi={n} bytes=0
block b npu lo=0 hi={n} bytes=0
"""
    text += f"bias {AT} block=@b\n" * bias
    # activations and residual are channels of one wider value
    rest = f",%0[{k}:{k + n}]" * residual
    text += f"dispatch {AT} kernel={name} args=[%0[0:{k}],@w{rest}] dst=%1\noutput y %1\n"
    blocks = {"w": packed(layout, n, k), "b": pack_plain(LAYOUTS["f32"], RNG.standard_normal(n))}
    return text, blocks


@pytest.mark.parametrize("name", ANYWHERE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias,residual", [(False, False), (True, False), (False, True), (True, True)])
def test_linear(name: str, layout: str, bias: bool, residual: bool) -> None:
    text, blocks = linear(layout, 48, 96, bias, residual)
    compare(name, text, blocks, 96 + 48, 1, 1, 3, 48)


ELEMENTWISE = {
    "silu": 'gated args=[%0[0:32],%0[32:64]] dst=%1 attrs={act="silu"}',
    "gelu": 'gated args=[%0[0:32],%0[32:64]] dst=%1 attrs={act="gelu"}',
    "gelu_tanh": 'gated args=[%0[0:32],%0[32:64]] dst=%1 attrs={act="gelu_tanh"}',
    "relu": 'gated args=[%0[0:32],%0[32:64]] dst=%1 attrs={act="relu"}',
    "tanh": 'activation args=[%0[0:32]] dst=%1 attrs={act="tanh"}',
    "sigmoid": 'activation args=[%0[0:32]] dst=%1 attrs={act="sigmoid"}',
    "add": "add args=[%0[0:32],%0[32:64]] dst=%1",
    "add a vector": "add args=[%0[0:32],@w] dst=%1",
    "mul": "mul args=[%0[0:32],%0[32:64]] dst=%1",
    "mul by a vector": "mul args=[%0[0:32],@w] dst=%1",
    "scale": "scale args=[%0[0:32]] dst=%1 attrs={by=0.3}",
    "slice": "slice args=[%0] dst=%1 attrs={lo=8,hi=40}",
    "rms_norm": "rms_norm args=[%0[0:32],@w] dst=%1 attrs={eps=1e-05,offset=1,weight=true,width=32}",
    "rms_norm of heads": "rms_norm args=[%0[0:32],@h] dst=%1 attrs={eps=1e-05,offset=0,weight=true,width=8}",
    "rms_norm, weights over groups": "rms_norm args=[%0[0:32],@w] dst=%1 attrs={eps=1e-05,offset=0,width=8}",
    "rms_norm alone": "rms_norm args=[%0[0:32]] dst=%1 attrs={eps=1e-05,width=32}",
    "layer_norm": "layer_norm args=[%0[0:32],@w,@b] dst=%1 attrs={eps=1e-05}",
}


def one(operation: str) -> tuple[str, dict[str, U8]]:
    text = "".join(
        f"weight {n} f32[{k}] sources=[{n}] layout=f32\n" for n, k in (("w", 32), ("b", 32), ("h", 8))
    )
    text += "slot %0 npu f32[T,64]\nslot %1 npu f32[T,32]\n"
    text += "".join(f"block {n} npu lo=0 hi={k} bytes=0\n" for n, k in (("w", 32), ("b", 32), ("h", 8)))
    text += f"dispatch {AT} kernel={operation}\noutput y %1\n"
    return text, {
        n: pack_plain(LAYOUTS["f32"], RNG.uniform(0.5, 1.5, k)) for n, k in (("w", 32), ("b", 32), ("h", 8))
    }


@pytest.mark.parametrize("name", ANYWHERE)
@pytest.mark.parametrize("operation", ELEMENTWISE.values(), ids=ELEMENTWISE.keys())
def test_elementwise_and_norms(name: str, operation: str) -> None:
    text, blocks = one(operation)
    compare(name, text, blocks, 64, 1, 1, 5, 48)


@pytest.mark.parametrize("name", ANYWHERE)
def test_an_mlp_gives_the_same_bits_for_any_number_of_tokens(name: str) -> None:
    """The promise behind "act=f32 acc=f32": a token's bits don't depend on the bucket it falls into."""
    text, blocks = mlp(64, 96)
    bench, exact = Bench(installed(name), text, blocks), Bench(reference(), text, blocks)
    x = RNG.standard_normal((48, 64)).astype(np.float32)
    want = bench.step({0: x}, 4, T=48)
    assert error(want, exact.step({0: x}, 4, T=48)) < TOLERANCE["f32"]
    for t in (1, 2, 3, 7, 16, 33):
        assert bench.step({0: x[:t]}, 4, T=t).tobytes() == want[:t].tobytes(), t


def test_a_bucket_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text, blocks = mlp(32, 64)
    bench = Bench(installed("cpu"), text, blocks)
    with counted_sessions(monkeypatch) as opened:
        for t in (1, 1, 5, 8, 6, 33, 48):
            bench.step({0: RNG.standard_normal((t, 32)).astype(np.float32)}, 4, T=t)
    assert len(opened) == 3, "buckets 1, 8 and 48"


def test_buckets_are_powers_of_two_up_to_the_largest() -> None:
    assert [bucket(n, 48) for n in (1, 2, 3, 4, 5, 31, 32, 33, 48)] == [1, 2, 4, 4, 8, 32, 32, 48, 48]


SPLIT = f"""weight w f32[128,32] sources=[w] layout=q8.16x32
slot %0 npu f32[T,32]
slot %1 npu f32[T,128]
slot %2 npu f32[T,128]
block w npu lo=0 hi=128 bytes=0
dispatch {AT} kernel=linear.q8.16x32 args=[%0,@w[0:s]] dst=%1[0:s]
dispatch {AT} kernel=linear.q8.16x32 args=[%0,@w[s:128]] dst=%1[s:128]
dispatch {AT} kernel=scale args=[%1] dst=%2 attrs={{by=2.0}}
output y %2
"""


def test_split_positions_both_ends_included() -> None:
    blocks = {"w": packed("q8.16x32", 128, 32)}
    bench, exact = Bench(installed("cpu"), SPLIT, blocks), Bench(reference(), SPLIT, blocks)
    x = RNG.standard_normal((3, 32)).astype(np.float32)
    want = exact.step({0: x}, 2, T=3, s=64)
    for s in (0, 32, 64, 96, 128, 0):
        assert error(bench.step({0: x}, 2, T=3, s=s), want) < TOLERANCE["f32"], s


TICKS = f"""slot %0 npu f32[T,8]
slot %1 npu f32[T,8]
slot %2 npu f32[T,8]
slot %3 npu f32[T,8]
slot %4 npu f32[T,2,4]
dispatch {AT} signals=!0 kernel=scale args=[%0] dst=%1 attrs={{by=2.0}}
dispatch {AT} kernel=scale args=[%1] dst=%2 attrs={{by=3.0}}
dispatch {AT} waits=[!0] signals=!1 kernel=add args=[%2,%1] dst=%3
dispatch {AT} kernel=view args=[%3] dst=%4
output y %4
"""


def test_a_piece_ends_where_it_must_and_keeps_only_what_others_read() -> None:
    stream = read_micro(HEAD + numbered(TICKS, "f32"))
    pieces = cut(tuple(read_rows(list(stream.instrs))), stream)  # type: ignore[arg-type]
    assert [[r.index for r in p.rows] for p in pieces] == [[0, 1], [2], [3]]
    assert [[ref.slot for ref in p.writes] for p in pieces] == [[1, 2], [3], [4]]
    text, _ = mlp(32, 64)
    stream = read_micro(HEAD + numbered(text, "f32"))
    (whole,) = cut(tuple(read_rows(list(stream.instrs))), stream)  # type: ignore[arg-type]
    assert [ref.slot for ref in whole.writes] == [4], "gate, up and their product stay in the graph"


def test_ticks_are_signalled_and_stamps_are_in_order() -> None:
    bench = Bench(installed("cpu"), TICKS, {})
    x = RNG.standard_normal((2, 8)).astype(np.float32)
    assert np.array_equal(bench.step({0: x}, 4, T=2), (x * 8).reshape(2, 2, 4))
    assert list(bench.memory.ticks) == [1, 1]
    stamps = bench.device.stamps(bench.code)
    assert (stamps[:, 0] <= stamps[:, 1]).all() and (stamps[:, 1] <= stamps[:, 2]).all()
    assert stamps[0, 2] > stamps[0, 1] and stamps[1, 0] == stamps[1, 2], "the session's time stands once"


def test_an_aborted_step_ends_the_wait() -> None:
    text = TICKS.replace("waits=[!0]", "waits=[!1]").replace(" signals=!0", "")
    bench = Bench(installed("cpu"), text, {})
    bench.memory.words[0] = 1
    with pytest.raises(DeviceError, match="aborted"):
        bench.step({0: np.zeros((1, 8), np.float32)}, 4, T=1)


def test_weights_that_are_taken_away_are_missed_by_name() -> None:
    text, blocks = linear("q8.16x32", 32, 32, False, False)
    bench = Bench(installed("cpu"), text, blocks)
    bench.memory.load_block("w", "npu", None)
    with pytest.raises(DeviceError, match="block w is used"):
        bench.step({0: np.zeros((1, 64), np.float32)}, 1, T=1)


# ---- what is refused -----------------------------------------------------------
@pytest.mark.parametrize(
    "line,said",
    [
        ('dispatch kernel=softcap args=[%0] dst=%1 attrs={cap=3.0} numerics="acc=f32"', "no kernel softcap"),
        ('dispatch kernel=scale args=[%0] dst=%1 attrs={by=3.0} numerics="acc=f16"', "has of it: acc=f32"),
        ("quantize src=%0 dst=%1 scheme=bf16", "no quantize bf16"),
    ],
)
def test_what_it_lacks_is_refused_when_it_is_loaded(line: str, said: str) -> None:
    line = line.replace(" ", f" {AT} ", 1)
    stream = read_micro(f"{HEAD}slot %0 npu f32[T,32]\nslot %1 npu f32[T,32]\n{line}\n")
    device = installed("cpu")
    with pytest.raises(PlanError, match=said):
        device.load(list(stream.instrs), HandMemory(stream, {"npu": device}, {"T": 1}))  # type: ignore[arg-type]


def test_a_bias_alone_is_refused() -> None:
    text, _ = linear("f32", 32, 32, True, False)
    stream = read_micro(HEAD + numbered(text.replace("+bias", ""), "f32"))
    with pytest.raises(LawError, match="directly before"):
        list(read_rows(list(stream.instrs)))  # type: ignore[arg-type]


def test_unknown_and_missing_providers_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="known: npu:cpu, npu:qnn"):
        device_spec("npu:abacus", HOST)
    monkeypatch.setattr(providers, "lack", lambda provider: f"{provider.ep} isn't installed here")
    with pytest.raises(PlanError, match=r"npu:qnn can't be used.*\n?.*pip install onnxruntime-qnn"):
        device_spec("npu:qnn", HOST)
    with pytest.raises(PlanError, match="pip install --force-reinstall --no-deps onnxruntime-cann"):
        device_spec("npu:cann", HOST)


@pytest.mark.parametrize("name", PROVIDERS)
def test_every_provider_says_what_it_really_is(name: str) -> None:
    text = describe(f"npu:{name}")
    assert PROVIDERS[name].what in text and PROVIDERS[name].form in text
    if name.endswith("cpu"):
        assert "stand-in" in text and "NPU" not in text


def test_the_planner_sees_the_stand_in_as_one() -> None:
    spec = device_spec("npu:cpu", HOST)
    assert (spec.id, spec.kind, spec.memory) == ("npu:cpu", "npu", HOST.memory)
    assert spec.name.startswith("stand-in: onnxruntime on the CPU")
    assert spec.supports("linear.q4.16x32+bias", "act=f32 acc=f32")
    assert not any(kernel.startswith(("attention", "rope", "embedding")) for kernel, _ in spec.kernels)


LARGE = f"""weight w f32[300000,4096] sources=[w] layout=q8.16x32
slot %0 npu f32[T,4096]
slot %1 npu f32[T,300000]
block w npu lo=0 hi=300000 bytes=0
dispatch {AT} kernel=linear.q8.16x32 args=[%0,@w] dst=%1
"""


def test_a_weight_too_large_for_a_graph_is_refused() -> None:
    stream = read_micro(HEAD + numbered(LARGE, "f32"))
    with pytest.raises(PlanError, match=r"4\.9 GB of float32 weights"):
        cut(tuple(read_rows(list(stream.instrs))), stream)  # type: ignore[arg-type]
