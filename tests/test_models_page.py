"""docs/models.md is what tools/sweep_models writes, names the types there are, and its trials can fail."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

from tools.sweep_models import __main__ as sweep
from tools.sweep_models import configs, table, trial
from tools.sweep_models.table import Page, Result

PAGE = table.FILE.read_text(encoding="utf-8")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for all trials, so that a type is checked for safety once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHRT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


# ---- the page --------------------------------------------------------------------------
def test_the_page_is_as_the_tool_writes_it() -> None:
    assert table.write(table.read(PAGE)) == PAGE


def test_every_type_stands_in_the_page_once() -> None:
    page = table.read(PAGE)
    if page.transformers != version("transformers"):
        pytest.skip(f"the page is of transformers {page.transformers}")
    assert sorted(r.type for r in page.results) == list(trial.types())


def test_nothing_in_the_page_is_wrong() -> None:
    assert [r.type for r in table.read(PAGE).results if r.verdict in ("wrong", "failed")] == []


def test_a_page_can_be_read_back() -> None:
    results = (
        Result("a", "right", "full, window 8", 1e-06, ("gather", "sin")),
        Result("b", "refused", "b has layers of kind x"),
        Result("c", "wrong", "full"),
    )
    page = Page("5.0", "2.0", results)
    assert table.read(table.write(page)) == page
    with pytest.raises(ValueError, match="cells"):
        table.read(table.write(page).replace("| b has", "| b | has"))


# ---- trials ----------------------------------------------------------------------------
def test_a_trial_of_a_right_type() -> None:
    result = trial.attempt("mistral")
    assert (result.verdict, result.slow) == ("right", ())
    assert result.note == f"window {configs.WINDOW}" and 0 < result.error < 1e-5


def test_a_trial_of_a_refused_type_tells_why() -> None:
    result = trial.attempt("mamba")
    assert result.verdict == "refused" and "linear_attention (layer 0)" in result.note


def test_a_trial_whose_logits_differ_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(model: Any, ids: list[int]) -> Any:
        return np.roll(theirs(model, ids), 1, axis=0)

    theirs = trial.theirs
    monkeypatch.setattr(trial, "theirs", shifted)
    assert trial.attempt("mistral").verdict == "wrong"


def test_a_type_without_a_small_form_is_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LARGEST", 1000)
    result = trial.attempt("gpt2")
    assert result.verdict == "untried" and "parameters are left" in result.note


@pytest.mark.parametrize(
    "seconds, most, told", [(1, 1 << 34, "1 s of processor time"), (60, 1 << 30, "ended with code")]
)
def test_limits_end_a_trial(seconds: int, most: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(name: str) -> Result:
        block = bytearray(1 if most > 1 << 30 else 1 << 34)  # more than a fork has lying about, unused
        while block:
            pass
        raise AssertionError

    monkeypatch.setattr(trial, "attempt", busy)
    result = sweep._apart("gpt2", seconds, most)
    assert result.verdict == "failed" and told in result.note
