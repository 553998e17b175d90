"""ATen operations that move, select and create elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashrt.backends.reference.arrays import DTYPE, Array, shape_at
from flashrt.backends.reference.registry import Arrays, Function, Num, into
from flashrt.errors import PlanError
from flashrt.ir.types import TensorType

SHAPE: dict[str, Function] = {}


def sizes(out: TensorType) -> tuple[int, ...]:
    """The node's shape, which is numbers by now."""
    return shape_at(out, {})


@into(SHAPE, "reshape", "_unsafe_view", "flatten", "unflatten", "view_as")
def view(self: Array, out: TensorType, other: Array | None = None) -> Any:
    return self.reshape(sizes(out))


@into(SHAPE, "_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "dropout",
      "type_as", "native_dropout", "_assert_tensor_metadata", "feature_dropout")  # fmt: skip
def to(self: Array, other: Array | None = None) -> Any:
    return self  # the node's dtype says the rest; dropout is off at inference


@into(SHAPE, "swapaxes")
def transpose(self: Array, dim0: int, dim1: int) -> Any:
    return np.swapaxes(self, dim0, dim1)


@into(SHAPE, "numpy_T")
def t(self: Array) -> Any:
    return self.T


@into(SHAPE)
def permute(self: Array, dims: Sequence[int]) -> Any:
    return self.transpose(dims)


@into(SHAPE)
def movedim(self: Array, source: Any, destination: Any) -> Any:
    return np.moveaxis(self, source, destination)


def along(self: Array, dim: int, key: Any) -> Any:
    """self[…, key, …] with `key` at axis `dim`."""
    where: list[Any] = [slice(None)] * self.ndim
    where[dim] = key
    return self[tuple(where)]


@into(SHAPE)
def slice_(self: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return along(self, dim, slice(start, end, step))


@into(SHAPE)
def narrow(self: Array, dim: int, start: int, length: int) -> Any:
    return along(self, dim, slice(start, start + length))


@into(SHAPE)
def select(self: Array, dim: int, index: int) -> Any:
    return along(self, dim, index)


@into(SHAPE)
def unsqueeze(self: Array, dim: int) -> Any:
    return np.expand_dims(self, dim)


@into(SHAPE)
def squeeze(self: Array, out: TensorType) -> Any:
    return self.reshape(sizes(out))


@into(SHAPE, "expand_as", "broadcast_to")
def expand(self: Array, out: TensorType, other: Array | None = None) -> Any:
    return np.broadcast_to(self, sizes(out))


@into(SHAPE, "concat", "concatenate")
def cat(tensors: Arrays, dim: int = 0) -> Any:
    kept = [x for x in tensors if x.shape != (0,)]  # ATen lets a bare empty tensor stand in a cat
    return np.concatenate(kept or tensors, axis=dim)


@into(SHAPE)
def stack(tensors: Arrays, dim: int = 0) -> Any:
    return np.stack(tensors, axis=dim)


@into(SHAPE, "split_with_sizes")
def split(self: Array, split_size: Any = None, split_sizes: Any = None, dim: int = 0) -> Any:
    by = split_size if split_sizes is None else split_sizes
    extent = self.shape[dim]
    widths = [min(by, extent - lo) for lo in range(0, extent, by)] if isinstance(by, int) else list(by)
    return tuple(np.split(self, np.cumsum(widths)[:-1], axis=dim))


@into(SHAPE)
def chunk(self: Array, chunks: int, dim: int = 0) -> Any:
    return split(self, split_size=-(-self.shape[dim] // chunks), dim=dim)


@into(SHAPE)
def unbind(self: Array, dim: int = 0) -> Any:
    return tuple(np.moveaxis(self, dim, 0))


@into(SHAPE)
def embedding(weight: Array, indices: Array) -> Any:
    return weight[indices]


@into(SHAPE)
def index(self: Array, tensors: Arrays, indices: Sequence[int | None] | None = None) -> Any:
    return self[_places(tensors, indices)]


def _places(tensors: Arrays, indices: Sequence[int | None] | None) -> tuple[Any, ...]:
    """`indices` holds, for each axis, None (all of it) or a place among the node's inputs (self is 0)."""
    if indices is None:
        return tuple(tensors)
    return tuple(slice(None) if i is None else tensors[i - 1] for i in indices)


@into(SHAPE)
def index_put(
    self: Array, tensors: Arrays, indices: Sequence[int | None] | None = None, accumulate: bool = False
) -> Any:
    got, values = self.copy(), tensors[-1]
    where = _places(tensors[:-1], indices)
    if accumulate:
        np.add.at(got, where, values)
    else:
        got[where] = values
    return got


@into(SHAPE)
def index_select(self: Array, dim: int, index: Array) -> Any:
    return np.take(self, index, axis=dim)


@into(SHAPE)
def gather(self: Array, dim: int, index: Array) -> Any:
    where: list[Any] = list(
        np.indices(index.shape, sparse=True)
    )  # index may be smaller than self on other axes
    where[dim] = index
    return self[tuple(where)]


@into(SHAPE)
def scatter(self: Array, dim: int, index: Array, src: Array | None = None, value: float | None = None) -> Any:
    got = self.copy()
    where: list[Any] = list(np.indices(index.shape, sparse=True))
    where[dim] = index
    got[tuple(where)] = value if src is None else src[tuple(slice(0, n) for n in index.shape)]
    return got


@into(SHAPE)
def repeat(self: Array, repeats: Sequence[int]) -> Any:
    return np.tile(self, repeats)


@into(SHAPE)
def repeat_interleave(self: Array, repeats: Num, dim: int | None = None) -> Any:
    return np.repeat(self, np.asarray(repeats), axis=dim)


@into(SHAPE, "pad")
def constant_pad_nd(self: Array, pad: Sequence[int], value: float | None = 0, mode: str = "constant") -> Any:
    if mode != "constant" or any(p < 0 for p in pad):
        raise PlanError(f"aten.pad: only constant padding of 0 or more, got mode={mode!r} pad={tuple(pad)}")
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    return np.pad(self, [(0, 0)] * (self.ndim - len(pairs)) + pairs, constant_values=value or 0)


@into(SHAPE)
def roll(self: Array, shifts: Any, dims: Any = ()) -> Any:
    return np.roll(self, shifts, axis=dims if dims != () else None)


@into(SHAPE)
def flip(self: Array, dims: Sequence[int]) -> Any:
    return np.flip(self, axis=tuple(dims))


@into(SHAPE)
def tril(self: Array, diagonal: int = 0) -> Any:
    return np.tril(self, diagonal)


@into(SHAPE)
def triu(self: Array, diagonal: int = 0) -> Any:
    return np.triu(self, diagonal)


@into(SHAPE)
def masked_fill(self: Array, mask: Array, value: Num) -> Any:
    return np.where(mask, np.asarray(value).astype(self.dtype), self)


@into(SHAPE)
def where(condition: Array, self: Num, other: Num) -> Any:
    return np.where(condition, self, other)


@into(SHAPE)
def copy(self: Array, src: Array) -> Any:
    return np.broadcast_to(src, self.shape)


@into(SHAPE)
def slice_scatter(
    self: Array, src: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    got = self.copy()
    slice_(got, dim, start, end, step)[...] = src
    return got


@into(SHAPE)
def select_scatter(self: Array, src: Array, dim: int, index: int) -> Any:
    got = self.copy()
    along(got, dim, slice(index, index + 1 or None))[...] = np.expand_dims(src, dim)
    return got


# ---- creation ---------------------------------------------------------------
@into(SHAPE)
def arange(out: TensorType, start: float = 0, end: float = 0, step: float = 1) -> Any:
    return start + np.arange(sizes(out)[0], dtype=DTYPE[out.dtype]) * step


@into(SHAPE, "full_like", "new_full", "scalar_tensor", "fill", "tensor")
def full(
    out: TensorType, self: Array | None = None, fill_value: float | None = None,
    s: float | None = None, value: float | None = None,
) -> Any:  # fmt: skip
    filling = next((x for x in (fill_value, s, value) if x is not None), 0)
    return np.full(sizes(out), filling)


@into(SHAPE, "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "zero")
def zeros(out: TensorType, self: Array | None = None) -> Any:
    return np.zeros(sizes(out), np.float32)


@into(SHAPE, "ones_like", "new_ones")
def ones(out: TensorType, self: Array | None = None) -> Any:
    return np.ones(sizes(out), np.float32)
