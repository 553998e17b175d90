"""ONNX operators that move, select and create elements, as torch functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from flashrt.errors import UnsupportedModel
from flashrt.frontend.onnx_known import Known, sizes
from flashrt.frontend.onnx_ops import Tensor, operator, unsupported

# TensorProto.DataType → torch
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
BY_NUMPY = {
    "float32": torch.float32, "uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16,
    "int32": torch.int32, "int64": torch.int64, "bool": torch.bool, "float16": torch.float16,
    "float64": torch.float64, "object": torch.int64,
}  # fmt: skip


def ints(values: Known) -> list[Any]:
    """A known vector as a list of numbers and open sizes."""
    return values.reshape(-1).tolist()


@operator("Shape")
def shape(x: Any, *, start: int = 0, end: int | None = None) -> Known:
    return sizes(list(x.shape)[start:end])


@operator("Size")
def size(x: Any) -> Known:
    return sizes([math.prod(x.shape)]).reshape(())


@operator("Cast")
def cast(x: Any, *, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    if to not in DTYPES:
        raise unsupported("to", to)
    return _cast(x, DTYPES[to])


def _cast(x: Any, kind: torch.dtype) -> Any:
    if isinstance(x, np.ndarray):
        if x.dtype == object and kind in (torch.int64, torch.int32):
            return x  # sizes stay sizes
        if x.dtype != object and kind != torch.bfloat16:
            name = str(kind).removeprefix("torch.")
            with np.errstate(all="ignore"):
                return x.astype(name)
        raise UnsupportedModel("a size that is left open becomes a real number")
    return x.to(kind)


@operator("CastLike")
def cast_like(x: Any, like: Any, *, saturate: int = 1, round_mode: str = "up") -> Any:
    return _cast(x, BY_NUMPY.get(like.dtype.name) if isinstance(like, np.ndarray) else like.dtype)


@operator("Reshape")
def reshape(x: Tensor, shape: Known, *, allowzero: int = 0) -> Tensor:
    wanted = ints(shape)
    if not allowzero:
        wanted = [x.shape[i] if isinstance(n, int) and n == 0 else n for i, n in enumerate(wanted)]
    elif 0 in wanted:
        raise unsupported("allowzero", 1)
    return x.reshape(wanted)


@operator("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Transpose")
def transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    order = list(range(x.dim()))[::-1] if perm is None else list(perm)
    return x if order == sorted(order) else x.permute(order)


@operator("Squeeze")
def squeeze(x: Tensor, axes: Known | None = None) -> Tensor:
    dims = [d for d, n in enumerate(x.shape) if n == 1] if axes is None else ints(axes)
    for dim in sorted((d % x.dim() for d in dims), reverse=True):
        if x.shape[dim] != 1:
            raise UnsupportedModel(f"axis {dim} of {list(x.shape)} isn't 1")
        x = x.squeeze(dim)
    return x


@operator("Unsqueeze")
def unsqueeze(x: Tensor, axes: Known) -> Tensor:
    rank = x.dim() + len(ints(axes))
    for dim in sorted(a % rank for a in ints(axes)):
        x = x.unsqueeze(dim)
    return x


@operator("Expand")
def expand(x: Tensor, shape: Known) -> Tensor:
    wanted = ints(shape)
    rank = max(x.dim(), len(wanted))
    wanted = [1] * (rank - len(wanted)) + wanted
    have = [1] * (rank - x.dim()) + list(x.shape)
    return x.expand([h if isinstance(w, int) and w == 1 else w for h, w in zip(have, wanted, strict=True)])


@operator("Tile")
def tile(x: Tensor, repeats: Known) -> Tensor:
    return x.repeat(ints(repeats))


@operator("Concat")
def concat(*xs: Tensor, axis: int) -> Tensor:
    return torch.cat(xs, axis)


@operator("Split")
def split(
    x: Tensor, split: Known | None = None, *, axis: int = 0, num_outputs: int | None = None, count: int
) -> Any:
    if split is not None:
        return tuple(torch.split(x, ints(split), axis))
    extent, n = x.shape[axis], num_outputs or count
    if not isinstance(extent, int):
        raise UnsupportedModel(f"axis {axis} has a size that the model leaves open")
    if n != count or (num_outputs is None and extent % n):
        raise UnsupportedModel(f"{extent} elements can't be split into {n} parts")
    width = -(-extent // n)
    widths = [max(0, min(width, extent - i * width)) for i in range(n)]
    return tuple(torch.split(x, widths, axis))


@operator("Slice")
def slice_(
    x: Tensor, starts: Known, ends: Known, axes: Known | None = None, steps: Known | None = None
) -> Tensor:
    chosen = range(len(starts)) if axes is None else ints(axes)
    by = [1] * len(starts) if steps is None else ints(steps)
    for lo, hi, axis, step in zip(ints(starts), ints(ends), chosen, by, strict=True):
        x = _sliced(x, axis % x.dim(), lo, hi, step)
    return x


def _sliced(x: Tensor, dim: int, lo: Any, hi: Any, step: int) -> Tensor:
    if step > 0:
        lo, hi = (min(v, 2**62) if isinstance(v, int) else v for v in (lo, hi))
        return torch.ops.aten.slice.Tensor(x, dim, lo, hi, step)
    extent = x.shape[dim]
    if not all(isinstance(v, int) for v in (lo, hi, extent)):
        raise UnsupportedModel("a backward slice has a size that the model leaves open")
    start, stop, _ = slice(lo, None if hi < -extent else hi, step).indices(extent)
    places = list(range(start, stop, step))
    if places == list(range(extent))[::-1]:
        return x.flip(dim)
    return picked(x, dim, torch.tensor(places, dtype=torch.int64))


def _indices(x: Tensor, axis: int, index: Tensor) -> Tensor:
    """Negative indices count from the end."""
    return torch.where(index < 0, index + x.shape[axis], index).to(torch.int64)


@operator("Gather")
def gather(x: Tensor, indices: Any, *, axis: int = 0) -> Tensor:
    axis %= x.dim()
    if isinstance(indices, np.ndarray):
        if indices.ndim == 0:
            at = indices.item()
            if isinstance(at, int) and at < 0:
                return x.select(axis, x.shape[axis] + at if isinstance(x.shape[axis], int) else at)
            return x.select(axis, at)
        if indices.dtype == object:
            raise UnsupportedModel("its indices are sizes that the model leaves open")
        extent = x.shape[axis]
        if (indices < 0).any() and not isinstance(extent, int):
            raise UnsupportedModel(f"negative indices into axis {axis}, whose size the model leaves open")
        indices = torch.from_numpy(np.where(indices < 0, indices + extent, indices).astype(np.int64))
    elif axis == 0 and x.dim() == 2 and x.is_floating_point():
        return F.embedding(indices.to(torch.int64), x)  # ids count from 0: a program checks those it is given
    else:
        indices = _indices(x, axis, indices)
    return picked(x, axis, indices)


def picked(x: Tensor, axis: int, indices: Tensor) -> Tensor:
    """The elements at places along an axis."""
    return x[(slice(None),) * axis + (indices,)]


@operator("GatherElements")
def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, _indices(x, axis, indices))


@operator("GatherND")
def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    if batch_dims:
        raise unsupported("batch_dims", batch_dims)
    return x[_places(x, indices)]


def _places(x: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    return tuple(_indices(x, k, indices[..., k]) for k in range(int(indices.shape[-1])))


@operator("ScatterND")
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    if reduction not in ("none", "add"):
        raise unsupported("reduction", reduction)
    return x.index_put(_places(x, indices), updates, accumulate=reduction == "add")


@operator("ScatterElements")
def scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    if reduction != "none":
        raise unsupported("reduction", reduction)
    return x.scatter(axis, _indices(x, axis, indices), updates)


@operator("OneHot")
def one_hot(indices: Tensor, depth: Known, values: Tensor, *, axis: int = -1) -> Tensor:
    n = int(depth.item())
    places = torch.arange(n)
    axis = axis + indices.dim() + 1 if axis < 0 else axis
    shape = [1] * (indices.dim() + 1)
    shape[axis] = n
    whole = torch.where(indices < 0, indices + n, indices).to(torch.int64).unsqueeze(axis)
    return torch.where(whole == places.reshape(shape), values[1], values[0])


@operator("ConstantOfShape")
def constant_of_shape(shape: Known, *, value: Any = None) -> Tensor:
    filling = np.zeros(1, np.float32) if value is None else value
    if filling.dtype.name not in BY_NUMPY:
        raise unsupported("value", filling.dtype.name)
    return torch.full(ints(shape), filling.reshape(-1)[0].item(), dtype=BY_NUMPY[filling.dtype.name])


@operator("Range")
def range_(start: Known, limit: Known, delta: Known) -> Tensor:
    kinds = {v.dtype.name for v in (start, limit, delta)} - {"object"} or {"int64"}
    kind = BY_NUMPY[next(iter(kinds))]
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=kind)


@operator("EyeLike")
def eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    rows, columns = (torch.arange(n) for n in x.shape)
    kind = x.dtype if dtype is None else DTYPES.get(dtype)
    if kind is None:
        raise unsupported("dtype", dtype)
    return (rows.unsqueeze(1) + k == columns).to(kind)


@operator("Trilu")
def trilu(x: Tensor, k: Known | None = None, *, upper: int = 1) -> Tensor:
    by = 0 if k is None else int(k.item())
    return torch.triu(x, by) if upper else torch.tril(x, by)


@operator("Pad")
def pad(
    x: Tensor, pads: Known, value: Known | None = None, axes: Known | None = None, *, mode: str = "constant"
) -> Tensor:
    widths = ints(pads)
    n = len(widths) // 2
    chosen = range(n) if axes is None else [a % x.dim() for a in ints(axes)]
    for i, dim in enumerate(chosen):
        before, after = widths[i], widths[n + i]
        if before < 0 or after < 0:
            raise unsupported("pads", widths)
        if mode == "constant":
            x = _padded(x, dim, before, after, 0 if value is None else value.item())
        elif before or after:
            x = _mirrored(x, dim, before, after, mode)
    return x


def _padded(x: Tensor, dim: int, before: int, after: int, value: Any) -> Tensor:
    if not (before or after):
        return x
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [before, after], value=value)


def _mirrored(x: Tensor, dim: int, before: int, after: int, mode: str) -> Tensor:
    """Padding with the tensor's own elements: a selection of them."""
    extent = x.shape[dim]
    if mode not in ("reflect", "edge", "wrap"):
        raise unsupported("mode", mode)
    if not isinstance(extent, int):
        return _mirrored_open(x, dim, before, after, mode)
    places = np.pad(np.arange(extent), (before, after), mode=mode)  # type: ignore[call-overload]
    return picked(x, dim, torch.from_numpy(places))


def _mirrored_open(x: Tensor, dim: int, before: int, after: int, mode: str) -> Tensor:
    """The same along a size that is left open."""
    extent = x.shape[dim]
    if mode == "wrap":
        parts = [x.narrow(dim, extent - before, before), x, x.narrow(dim, 0, after)]
    elif mode == "edge":
        repeats = [1] * x.dim()
        first, last = x.narrow(dim, 0, 1), x.narrow(dim, extent - 1, 1)
        parts = [first.repeat(*repeats[:dim], before, *repeats[dim + 1 :]), x]
        parts.append(last.repeat(*repeats[:dim], after, *repeats[dim + 1 :]))
    else:
        parts = [x.narrow(dim, 1, before).flip(dim), x, x.narrow(dim, extent - 1 - after, after).flip(dim)]
    return torch.cat([p for p, n in zip(parts, (before, 1, after), strict=True) if n], dim)


@operator("DepthToSpace")
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    b, c, h, w = x.shape
    inner = c // blocksize**2
    if mode == "DCR":
        parts = x.reshape(b, blocksize, blocksize, inner, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(b, inner, blocksize, blocksize, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(b, inner, h * blocksize, w * blocksize)


@operator("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    b, c, h, w = x.shape
    parts = x.reshape(b, c, h // blocksize, blocksize, w // blocksize, blocksize)
    if mode == "DCR":
        parts = parts.permute(0, 3, 5, 1, 2, 4)
    elif mode == "CRD":
        parts = parts.permute(0, 1, 3, 5, 2, 4)
    else:
        raise unsupported("mode", mode)
    return parts.reshape(b, c * blocksize**2, h // blocksize, w // blocksize)
