"""Real NPU stacks, where they are installed: the Hexagon simulator (slow: it proves correctness only)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flashrt.backends.npu import providers, sessions
from flashrt.errors import DeviceError
from flashrt.layouts import LAYOUTS, pack_plain
from tests.backends.npu_streams import (
    AT,
    RNG,
    TOLERANCE,
    Bench,
    compare,
    counted_sessions,
    error,
    installed,
    mlp,
    packed,
    reference,
)

pytestmark = pytest.mark.slow
HEXAGON = ["qnn", "qnn-int8"]
HIDDEN, FFN = 576, 1536  # of SmolLM2-135M


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own."""
    monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path))
    yield tmp_path


@pytest.mark.parametrize("name", HEXAGON)
def test_tiny_mlp(name: str) -> None:
    text, blocks = mlp(64, 128)
    compare(name, text, blocks, 64, 4, 1, 3, 17)


@pytest.mark.parametrize("name", HEXAGON)
def test_mlp_of_the_shape_of_smollm2(name: str) -> None:
    text, blocks = mlp(HIDDEN, FFN)
    compare(name, text, blocks, HIDDEN, 4, 1, 6)


NORM = f"""weight w f32[96] sources=[w] layout=f32
weight h f32[16] sources=[h] layout=f32
weight p f32[64,96] sources=[p] layout=q8.16x32
weight b f32[64] sources=[b] layout=f32
slot %0 npu f32[T,96]
slot %1 npu f32[T,96]
slot %2 npu f32[T,64]
slot %3 npu f32[T,64]
block w npu lo=0 hi=96 bytes=0
block h npu lo=0 hi=16 bytes=0
block p npu lo=0 hi=64 bytes=0
block b npu lo=0 hi=64 bytes=0
dispatch {AT} kernel=rms_norm args=[%0,@w] dst=%1 attrs={{eps=1e-05,offset=0,weight=true,width=96}}
bias {AT} block=@b
dispatch {AT} kernel=linear.q8.16x32+bias args=[%1,@p] dst=%2
dispatch {AT} kernel=rms_norm args=[%2,@h] dst=%3 attrs={{eps=1e-05,offset=1,weight=true,width=16}}
output y %3
"""


def test_norms_in_half_floats_survive_large_activations() -> None:
    blocks = {
        "w": pack_plain(LAYOUTS["f32"], RNG.uniform(0.5, 1.5, 96)),
        "h": pack_plain(LAYOUTS["f32"], RNG.uniform(0.5, 1.5, 16)),
        "p": packed("q8.16x32", 64, 96),
        "b": pack_plain(LAYOUTS["f32"], RNG.standard_normal(64)),
    }
    bench, exact = Bench(installed("qnn"), NORM, blocks, "f16"), Bench(reference(), NORM, blocks)
    x = RNG.standard_normal((3, 96)).astype(np.float32)
    x[0, 5] = 3000.0  # as language models make them: its square is beyond half floats
    got, want = (b.step({0: x}, 3, T=3) for b in (bench, exact))
    assert error(got, want) < TOLERANCE["f16"]


def test_compiled_graphs_are_kept_and_damaged_ones_made_anew(cache: Path) -> None:
    text, blocks = mlp(64, 128)
    x = RNG.standard_normal((2, 64)).astype(np.float32)

    def result() -> np.ndarray:
        return Bench(installed("qnn"), text, blocks, "f16").step({0: x}, 4, T=2)

    first = result()
    (kept,) = (cache / "npu").glob("*.onnx")
    written = kept.stat().st_mtime_ns
    assert np.array_equal(result(), first) and kept.stat().st_mtime_ns == written
    kept.write_bytes(kept.read_bytes()[:1000])
    assert np.array_equal(result(), first) and kept.stat().st_size > 1000


def test_ranges_are_calibrated_kept_and_widened(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, blocks = mlp(64, 128)
    exact = Bench(reference(), text, blocks)
    x = RNG.standard_normal((4, 64)).astype(np.float32)
    bench = Bench(installed("qnn-int8"), text, blocks, "int8")
    with counted_sessions(monkeypatch) as opened:
        for scale in (1, 1, 0.1, 100):
            got, want = (b.step({0: x * np.float32(scale)}, 4, T=4) for b in (bench, exact))
            if scale >= 1:
                assert error(got, want) < TOLERANCE["int8"], scale
    assert len(opened) == 2, "opened once, and once more when the inputs outgrew their range"
    assert len(list((cache / "npu").glob("*.ranges.json"))) == 1
    again = Bench(installed("qnn-int8"), text, blocks, "int8")
    assert error(again.step({0: x * 100}, 4, T=4), exact.step({0: x * 100}, 4, T=4)) < TOLERANCE["int8"]


def test_what_the_provider_can_not_run_does_not_fall_back() -> None:
    from onnx import TensorProto, helper

    installed("qnn")
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Det", ["x"], ["y"])], "g",
        [info("x", TensorProto.FLOAT, [4, 4])], [info("y", TensorProto.FLOAT, [])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(DeviceError, match="QNNExecutionProvider can't run a graph"):
        sessions.open_session(model.SerializeToString(), providers.PROVIDERS["qnn"], 1)
