"""A .logical text with its weights beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from flashrt.errors import ModelError, ParseError
from flashrt.frontend.logical_file import load_logical

TEXT = """logical tiny
symbol B lo=1 hi=8 hint=1
input x f32[B,4]
weight fc.weight f32[3,4] sources=[fc.weight]
weight fc.bias f32[3] sources=[fc.bias] layout=f32
%fc = aten.linear(%x,@fc.weight,@fc.bias) f32[B,3]
output output fc
"""


def _save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path.with_suffix(".npz"), **arrays)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "tiny.logical").write_text(TEXT)
    return tmp_path / "tiny.logical"


def test_weights_from_both_files(path: Path) -> None:
    weight, bias = np.ones((3, 4), np.float16), np.arange(3, dtype=np.float32)
    save_file({"fc.weight": weight}, path.with_suffix(".safetensors"))
    _save_arrays(path, {"fc.bias": bias, "unused": bias})
    imported = load_logical(path)
    assert [w.layout for w in imported.graph.weights] == ["f16", "f32"]
    assert list(imported.weights.tensors) == ["fc.weight"]
    assert list(imported.constants) == ["fc.bias"]
    np.testing.assert_array_equal(imported.constants["fc.bias"], bias)


def test_missing_weights_are_named(path: Path) -> None:
    with pytest.raises(ModelError, match=r"no values for fc\.weight, fc\.bias") as caught:
        load_logical(path)
    assert "tiny.safetensors" in str(caught.value)


def test_wrong_shape(path: Path) -> None:
    _save_arrays(path, {"fc.bias": np.zeros(3), "fc.weight": np.zeros((4, 3))})
    with pytest.raises(ModelError, match=r"fc\.weight has shape \[4, 3\], the model wants \[3, 4\]"):
        load_logical(path)


def test_text_that_does_not_parse(path: Path) -> None:
    path.write_text(TEXT.replace("f32[B,3]", "float[B,3]"))
    with pytest.raises(ParseError, match=r"tiny\.logical:6"):
        load_logical(path)


def test_an_npz_that_is_none(path: Path) -> None:
    path.with_suffix(".npz").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"tiny\.npz isn't an \.npz file"):
        load_logical(path)
