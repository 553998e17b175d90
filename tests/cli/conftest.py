"""A plan made once, a cache of its own, and the command line as a function."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.tiny_plan import write_logical, write_plan


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `plan`, `packed` and `tiny.logical`; not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    write_plan(folder / "plan")
    write_plan(folder / "packed", pack=True)
    write_logical(folder)
    return folder


@pytest.fixture(scope="session")
def plan(made: Path) -> str:
    """A plan of the tiny model on the reference device; not to be changed."""
    return str(made / "plan")


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    """A copy of `made` that may be changed."""
    return Path(shutil.copytree(made, tmp_path / "own"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FLASHRT_CACHE", str(folder))
    monkeypatch.setenv("FLASHRT_RUNTIME", str(folder / "runtime"))
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "FLASHRT_THREADS", "FLASHRT_POISON"):
        monkeypatch.delenv(name, raising=False)
    yield folder
