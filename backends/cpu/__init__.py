"""The CPU backend: kernels compiled by numba once per processor, walked as a table by a thread team."""

from flashrt.backends.cpu.device import CpuBackend, CpuDevice

__all__ = ["CpuBackend", "CpuDevice"]
