"""A GPU for the tests of kernels: a real one, or kernels emulated on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from flashrt.backends.cuda import CudaDevice


@pytest.fixture(
    scope="module",
    params=[pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("emulated", marks=pytest.mark.slow)],
)
def gpu(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    # only here: tests of other backends need no torch
    from flashrt.backends.cuda import CudaBackend, CudaDevice, missing
    from tests.backends.cuda_streams import spec

    if request.param == "gpu":
        if reason := missing():
            pytest.skip(reason)
        device = CudaBackend().open(replace(spec(), id="gpu:0"))
        device.spec = spec()
    else:
        if not missing():
            pytest.skip("there is a GPU")
        from tests.backends.cuda_emulated import COMPILER, EmulatedDriver

        if COMPILER is None:
            pytest.skip("no g++ to compile the emulated kernels")
        device = CudaDevice(spec(), EmulatedDriver())
    yield device
    device.close()
