"""What was compiled runs without torch, transformers and the compiler's libraries, and starts quickly.

Each program here is a process of its own; seconds are those of its processor time, whatever else runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashrt import engine
from tests.end_to_end import child
from tests.end_to_end.tiny_hf import write_model

FRONTEND = {"torch", "transformers", "safetensors", "gguf", "onnx"}
COMPILER = {"numba", "networkx", "scipy"}
PROMPT, TOKENS = "w4 w5 w6 w7 w8", 3

REPORT = """
import json, sys
print(json.dumps([result, sorted({name.partition(".")[0] for name in sys.modules})]))
"""
GENERATE = """
from flashrt.engine import LLM
with LLM({model!r}, threads=2) as llm:
    done = llm.generate({prompt!r}, raw=True, max_tokens={tokens}, ignore_eos=True)
result = [done.tokens, done.text]
"""


def run(program: str) -> tuple[Any, set[str], float]:
    """A program's `result`, the top-level modules it had imported at its end, its processor seconds."""
    ran = child.run("-c", program + REPORT)
    result, modules = json.loads(ran.output.splitlines()[-1])
    return result, set(modules), ran.cpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_model(path, "llama")
    return path


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Any:
    """The tokens and their text, by a first process that may compile plan and kernels: a later one finds
    both in the cache. (This process may hold kernels that it compiled into another cache.)"""
    result, _, _ = run(GENERATE.format(model=str(folder), prompt=PROMPT, tokens=TOKENS))
    return result


def test_a_plan_runs_by_itself(folder: Path, wanted: Any, tmp_path: Path) -> None:
    """A packed plan, in another process, with neither the model's folder nor its libraries."""
    engine.compile(str(folder), tmp_path / "plan", pack=True)
    (tmp_path / "plan").rename(tmp_path / "moved")
    result, modules, taken = run(GENERATE.format(model=str(tmp_path / "moved"), prompt=PROMPT, tokens=TOKENS))
    assert result == wanted
    assert not modules & (FRONTEND | COMPILER)
    assert taken < 3.0


def test_a_model_that_is_in_the_cache(folder: Path, wanted: Any) -> None:
    result, modules, taken = run(GENERATE.format(model=str(folder), prompt=PROMPT, tokens=TOKENS))
    assert result == wanted
    assert not modules & (FRONTEND | COMPILER)
    assert taken < 3.0


@pytest.mark.parametrize(
    ("module", "seconds"), [("flashrt", 0.3), ("flashrt.cli.main", 1.0), ("flashrt.engine", 2.0)]
)
def test_import(module: str, seconds: float) -> None:
    """Measured on a quiet machine: 0.05, 0.4 and 0.6 seconds."""
    _, modules, taken = run(f"import {module}; result = None")
    assert not modules & (FRONTEND | COMPILER)
    assert taken < seconds, f"importing {module} takes {taken:.2f} s"
