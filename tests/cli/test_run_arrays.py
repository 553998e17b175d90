"""`flashrt run MODEL --input x.npz --output y.npz`: arrays in, arrays out, or one clear message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.calling import ON_REFERENCE, call, done, refused

TEXT = """\
logical net
symbol B lo=1 hi=64 hint=3
input x f32[B,32]
weight w f32[5,32] sources=[w] layout=f32
%y = linear(%x,@w) f32[B,5]
output out y
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A product, as a text with its weights beside it."""
    (tmp_path / "net.logical").write_text(TEXT)
    np.savez(tmp_path / "net.npz", w=weight())
    return tmp_path / "net.logical"


def weight() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)


def arrays(path: Path, **given: Any) -> Path:
    np.savez(path, **given)
    return path


def test_a_model_and_its_plan(net: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((4, 32)).astype(np.float32)
    source, target = arrays(tmp_path / "x.npz", x=x), tmp_path / "y.npz"
    result = done("run", net, "--input", source, "--output", target, *ON_REFERENCE)
    assert "out float32[4, 5]" in result.stderr and result.stdout == ""
    with np.load(target) as got:
        assert got.files == ["out"] and np.allclose(got["out"], x @ weight().T, atol=1e-5)
    done("compile", net, "-o", tmp_path / "plan", *ON_REFERENCE)
    result = done("run", tmp_path / "plan", "--input", source, "--output", target, "--json")
    assert json.loads(result.stdout)["outputs"] == {"out": "float32[4, 5]"}
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".y")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"z": np.zeros((1, 32), np.float32)}, ("missing ['x']", "unknown ['z']")),
        ({"x": np.zeros((1, 33), np.float32)}, ("input x", "(1, 33)")),
        ({"x": np.zeros((65, 32), np.float32)}, ("65 is outside 1…64",)),
        ({"x": np.zeros((1, 32), np.complex64)}, ("input x", "complex64", "f32[B,32]")),
        ({"x": np.array(["a"])}, ("input x", "<U1")),
    ],
)
def test_inputs_that_do_not_fit(net: Path, tmp_path: Path, given: dict[str, Any], words: Any) -> None:
    target = tmp_path / "y.npz"
    target.write_bytes(b"before")
    source = arrays(tmp_path / "x.npz", **given)
    refused(call("run", net, "--input", source, "--output", target, *ON_REFERENCE), *words)
    assert target.read_bytes() == b"before"


def test_files_that_do_not_fit(net: Path, tmp_path: Path) -> None:
    good, one = arrays(tmp_path / "x.npz", x=np.zeros((1, 32), np.float32)), tmp_path / "one.npy"
    np.save(one, np.zeros(3))
    text = tmp_path / "text.npz"
    text.write_text("no arrays")
    out = tmp_path / "y.npz"
    refused(call("run", net, "--input", tmp_path / "no.npz", "--output", out), "no.npz is missing")
    garbage = call("run", net, "--input", text, "--output", out)
    refused(garbage, "isn't an .npz file")
    assert "pickle" not in garbage.stderr
    refused(call("run", net, "--input", one, "--output", out), "one array without a name")
    refused(
        call("run", net, "--input", good, "--output", tmp_path / "no" / "y.npz"), "a folder that isn't there"
    )
    refused(call("run", net, "--input", good), "--input and --output go together")
    refused(call("run", net, "--input", good, "--output", out, "-p", "hi"), "takes the place of a prompt")


def test_a_language_model_takes_text(plan: str, tmp_path: Path) -> None:
    source = arrays(tmp_path / "x.npz", x=np.zeros(3))
    result = call("run", plan, "--input", source, "--output", tmp_path / "y.npz")
    refused(result, "is a language model", "--prompt")
    result = call("run", plan, "--raw", "-p", "a", "--output", tmp_path / "y.npz")
    refused(result, "answers with text")
