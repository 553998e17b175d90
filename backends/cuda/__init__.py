"""The CUDA backend: kernels in CUDA C++ that are compiled where they run, regions as CUDA graphs.

torch brings memory, streams and graphs, and a library's matrix products; it is imported when a device is
opened, so that machines without CUDA can import this package.
"""

from flashrt.backends.cuda.device import CudaBackend, CudaDevice, missing

__all__ = ["CudaBackend", "CudaDevice", "missing"]
