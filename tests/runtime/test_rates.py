"""The rate of a product on an open device counts its work over its time."""

from __future__ import annotations

from contextlib import closing

import pytest

from flashrt.backends.cpu import CpuBackend
from flashrt.backends.reference import ReferenceBackend
from flashrt.layouts import LAYOUTS
from flashrt.probes import host
from flashrt.runtime import rates
from tests.passes.examples import device

SMALL = (64, 128)
BYTES = LAYOUTS[rates.FEW].bytes(*SMALL)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs in a second."""
    now = iter([10.0, 10.0, 10.5, 11.0])
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(now))


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("dtype", rates.ROUNDED)
def test_on_the_reference_device(dtype: str) -> None:
    if rates.kernel_of(dtype) not in ReferenceBackend().kernels():
        pytest.skip(f"no reference for {dtype}")
    opened = ReferenceBackend().open(device())
    products = 2 * rates.TOKENS * rates.WIDTH**2
    assert rates.matrix_rate(opened, dtype, 0.6) == pytest.approx(2 * products / 1.0)
    opened.close()


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("free", "matrices"),
    [(None, 16), (8 * 20 * BYTES, 16), (8 * 5 * BYTES + 7, 5), (8 * BYTES - 1, 1), (0, 1)],
)
def test_products_of_one_token_read_all_that_memory_has_room_for(
    free: int | None, matrices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eighth of what is free, but one matrix in any case."""
    monkeypatch.setattr(rates, "MATRIX", SMALL)
    with closing(ReferenceBackend().open(device(free=free))) as opened:
        assert rates.gemv_rate(opened, 0.6) == pytest.approx(2 * matrices * BYTES / 1.0)


@pytest.mark.usefixtures("clock")
def test_more_than_caches_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MATRIX", SMALL)
    with closing(ReferenceBackend().open(device(free=8 * 40 * BYTES))) as opened:
        assert rates.gemv_rate(opened, 0.6, 20 * BYTES + 1) == pytest.approx(2 * 21 * BYTES / 1.0)


def test_products_of_one_token_on_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MATRIX", SMALL)
    backend = CpuBackend()
    assert rates.GEMV in backend.kernels()
    with closing(backend.open(host.host())) as opened:
        assert 1e6 < rates.gemv_rate(opened, 0.01) < 1e13
