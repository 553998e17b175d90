"""One cache for compiled kernels and verdicts, kept between runs; plans made by the tests are thrown away."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The cache in use: FLASHRT_CACHE where it is set, else a folder of pytest's own cache."""
    given = os.environ.get("FLASHRT_CACHE")
    folder = Path(given) if given else request.config.cache.mkdir("flashrt")  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHRT_CACHE", str(folder))
        yield folder
    if not given:
        shutil.rmtree(folder / "plans", ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def few_torch_threads() -> None:
    torch.set_num_threads(2)
