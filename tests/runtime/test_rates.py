"""The rate of a product on an open device counts its work over its time."""

from __future__ import annotations

import pytest

from flashrt.backends.reference import ReferenceBackend
from flashrt.runtime import rates
from tests.passes.examples import device


@pytest.mark.parametrize("dtype", rates.ROUNDED)
def test_on_the_reference_device(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if rates.kernel_of(dtype) not in ReferenceBackend().kernels():
        pytest.skip(f"no reference for {dtype}")
    opened = ReferenceBackend().open(device())
    now = iter([10.0, 10.0, 10.5, 11.0])
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(now))
    products = 2 * rates.TOKENS * rates.WIDTH**2
    assert rates.matrix_rate(opened, dtype, 0.6) == pytest.approx(2 * products / 1.0)
    opened.close()
