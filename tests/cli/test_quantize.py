"""`--quantize`: wrong uses are refused before a model is read, and its cost is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.calling import ON_REFERENCE, call, done, refused
from tests.frontend.gguf_bytes import tiny_llama


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--quantize", "q3"), "known: q4, q8, bf16, lossless"),
        (("--quantize-exclude", "lm_head"), "--quantize-exclude goes with --quantize"),
        (("--quantize", "q8", "--quantize-exclude", "lmhead"), "no product or embedding is called 'lmhead'"),
    ],
)
def test_refused(made: Path, options: tuple[str, ...], message: str) -> None:
    refused(call("compile", made / "tiny.logical", *ON_REFERENCE, *options), message)


def test_a_plan_is_rounded_already(made: Path) -> None:
    refused(call("run", made / "packed", "-p", "a", "--quantize", "q8"), "--quantize can't change it")


@pytest.mark.slow
def test_what_rounding_costs_is_measured(tmp_path: Path, cache: Path) -> None:
    """A random model of one layer: 4 bits change its logits, and what isn't rounded is the model itself."""
    path = tiny_llama().write(tmp_path / "m.gguf")

    def measured(*options: str) -> dict[str, float]:
        result = done("compile", path, *ON_REFERENCE, "--quality", "--json", *options)
        found: dict[str, float] = json.loads(result.stdout)["quality"]
        return found

    same, rounded = measured(), measured("--quantize", "q4")
    most = measured("--quantize", "q4", "--quantize-exclude", "mlp,self_attn,embedding")
    assert same["tokens"] > 20 and same["agreement"] == 1.0
    assert same["perplexity"] == same["lossless_perplexity"] == rounded["lossless_perplexity"] > 1
    assert most == same, "a tied head was rounded although the embedding is excluded"
    assert 0 < abs(rounded["perplexity"] / same["perplexity"] - 1) < 0.2 and rounded["agreement"] > 0.5
    result = done("compile", path, *ON_REFERENCE, "--quality", "--quantize", "q4")
    told = result.stderr
    assert "tensors kept with loss: " in result.stdout and " in q4m.16x32" in result.stdout
    assert f"perplexity {rounded['perplexity']:.2f}, without rounding {same['perplexity']:.2f}" in told
