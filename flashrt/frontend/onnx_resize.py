"""ONNX's Resize: along each axis a product with a small matrix, or a selection where each row has one 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flashrt.errors import UnsupportedModel
from flashrt.frontend.onnx_known import Known
from flashrt.frontend.onnx_ops import Tensor, operator, unsupported
from flashrt.frontend.onnx_shape import ints, picked

_PLACES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")


@operator("Resize")
def resize(
    x: Tensor, roi: Any = None, scales: Known | None = None, sizes: Known | None = None, *,
    antialias: int = 0, axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel", cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0, extrapolation_value: float = 0.0, keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest", nearest_mode: str = "round_prefer_floor",
) -> Tensor:  # fmt: skip
    if antialias or keep_aspect_ratio_policy != "stretch":
        raise UnsupportedModel("antialias and keep_aspect_ratio_policy aren't supported")
    if coordinate_transformation_mode not in _PLACES:
        raise unsupported("coordinate_transformation_mode", coordinate_transformation_mode)
    dims = [a % x.dim() for a in axes] if axes is not None else list(range(x.dim()))
    by_scale = scales is not None and scales.size > 0
    for i, dim in enumerate(dims):
        extent = x.shape[dim]
        scale = float(scales[i]) if by_scale and scales is not None else None
        wanted = None if by_scale or sizes is None else ints(sizes)[i]
        if scale == 1 or wanted is extent:
            continue
        if not isinstance(extent, int) or not isinstance(wanted, int | None):
            raise UnsupportedModel("it resizes an axis whose size the model leaves open")
        if scale is not None and coordinate_transformation_mode == "align_corners" and extent * scale % 1:
            raise UnsupportedModel(f"align_corners with {extent} elements times {scale} isn't supported")
        out = math.floor(extent * scale) if scale is not None else wanted
        assert out is not None
        where = _places(out, extent, scale or out / extent, coordinate_transformation_mode)
        if mode == "nearest":
            x = picked(x, dim, torch.from_numpy(_nearest(where, extent, nearest_mode)))
        elif mode in ("linear", "cubic") and x.is_floating_point():
            matrix = _matrix(where, extent, mode, cubic_coeff_a, bool(exclude_outside))
            weight = torch.from_numpy(matrix.astype(np.float32)).to(x.dtype)
            x = torch.matmul(x.transpose(dim, -1), weight.t()).transpose(dim, -1)
        else:
            raise unsupported("mode", mode)
    return x


def _places(out: int, extent: int, scale: float, mode: str) -> NDArray[np.float64]:
    """For each element of the result, where it lies in the input."""
    at = np.arange(out, dtype=np.float64)
    if mode == "align_corners":
        return at * (extent - 1) / (out - 1) if out > 1 else np.zeros(1)
    if mode == "asymmetric":
        return at / scale
    if mode == "pytorch_half_pixel" and out == 1:
        return np.zeros(1)
    return (at + 0.5) / scale - 0.5


def _nearest(where: NDArray[np.float64], extent: int, mode: str) -> NDArray[np.int64]:
    rounded = {
        "round_prefer_floor": np.ceil(where - 0.5), "round_prefer_ceil": np.floor(where + 0.5),
        "floor": np.floor(where), "ceil": np.ceil(where),
    }  # fmt: skip
    if mode not in rounded:
        raise unsupported("nearest_mode", mode)
    return np.clip(rounded[mode], 0, extent - 1).astype(np.int64)


def _matrix(
    where: NDArray[np.float64], extent: int, mode: str, a: float, exclude: bool
) -> NDArray[np.float64]:
    """[out, in]: what each element of the input counts; elements beyond the edge are the edge's."""
    reach = 1 if mode == "linear" else 2
    first = np.floor(where).astype(np.int64)
    matrix = np.zeros((len(where), extent))
    for tap in range(1 - reach, reach + 1):
        place = first + tap
        weight = _weight(np.abs(where - place), mode, a)
        if exclude:
            weight = np.where((place < 0) | (place >= extent), 0, weight)
        np.add.at(matrix, (np.arange(len(where)), np.clip(place, 0, extent - 1)), weight)
    return matrix / matrix.sum(1, keepdims=True) if exclude else matrix


def _weight(distance: NDArray[np.float64], mode: str, a: float) -> NDArray[np.float64]:
    """Of an element at a distance; the cubic is Keys' (1981)."""
    if mode == "linear":
        return np.maximum(0, 1 - distance)
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
