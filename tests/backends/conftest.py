"""A GPU for the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from flashrt.backends.cuda import CudaDevice
    from flashrt.backends.cuda.driver import Driver


@pytest.fixture(scope="module")
def gpu(driver: Driver) -> Iterator[CudaDevice]:
    from flashrt.backends.cuda import CudaDevice  # only here: tests of other backends need no torch
    from tests.backends.cuda_streams import spec

    device = CudaDevice(spec(), driver)
    yield device
    device.close()
