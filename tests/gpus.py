"""Drivers of GPUs for tests: the real ones, or kernels emulated on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flashrt.backends.cuda.driver import Driver


def drivers(where: str, count: int = 1) -> list[Driver]:
    """One for each of so many GPUs; skips the test where that can't be. where: "gpu", "emulated" or "late"
    (emulated, each kernel a while after it was enqueued)."""
    from flashrt.backends.cuda import missing  # only here: other tests need no torch

    if where == "gpu":
        if reason := missing():
            pytest.skip(reason)
        import torch

        from flashrt.backends.cuda.driver import GpuDriver

        if torch.cuda.device_count() < count:
            pytest.skip(f"there are fewer than {count} GPUs")
        return [GpuDriver(index) for index in range(count)]
    if not missing():
        pytest.skip("there is a GPU")
    from tests.backends.cuda_emulated import COMPILER, EmulatedDriver, LateDriver

    if COMPILER is None:
        pytest.skip("no g++ to compile the emulated kernels")
    make: Any = {"emulated": EmulatedDriver, "late": LateDriver}[where]
    return [make() for _ in range(count)]
