"""Integers whose scales lie in tensors of their own, as AWQ, GPTQ and compressed-tensors write them.

A weight is scale·(q - zero), q counted from 0. A word (i32) holds p = 32/bits numbers, the first in its
lowest bits; AWQ's words hold channels 0 2 4 6 1 3 5 7 of eight. Matrices are [N, K], with G groups in a row:

    packing  q                zero points               scales
    gptq     i32 [K/p, N]     i32 [G, N/p]              [G, N]
    awq      i32 [K, N/p]     i32 [G, N/p]              [G, N]
    packed   i32 [N, K/p]     i32 [N/p, G] or i8 [N, G] [N, G], [N, 1] or [1]
    int8     i8 [N, K]        i8 [N, G]                 [N, G], [N, 1] or [1]

i8 count from -2^(bits-1). Sources: for gptq AutoGPTQ 0.7.1, whose zero points are stored less one, unlike
those of "gptq_v2" (https://github.com/vllm-project/vllm/pull/26092); for awq AutoAWQ 0.2.9 (`WQLinear_GEMM`);
for the others https://huggingface.co/docs/transformers/quantization/compressed_tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt.layouts import Layout
from flashrt.weights import formats
from flashrt.weights.index import Grouped, Tensor
from flashrt.weights.quantise import Blocks

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
Numbers = NDArray[np.floating[Any]]
Read = Callable[[Tensor, int, int], U8]  # (tensor, from byte, how many) → its bytes

STRIP = 1024  # channels taken at a time from tensors that keep a channel in a column
_AWQ = [0, 4, 1, 5, 2, 6, 3, 7]  # where a word has the channels 0…7
_COLUMNS = ("awq", "gptq")


@dataclass(frozen=True, slots=True)
class Integers:
    """Some channels. q: u8 [n, K]; scale: [n, G]; zero: u8 [n, G], None where each is 2^(bits-1)."""

    q: U8
    scale: F32
    zero: U8 | None


def in_columns(tensor: Tensor) -> bool:
    """Whether its channels are columns, so that few of them are found all over the tensor."""
    return tensor.grouped is not None and tensor.grouped.packing in _COLUMNS


# ---- to floats and blocks ------------------------------------------------------------
def to_f32(tensor: Tensor, a: int, b: int, read: Read) -> F32:
    """Channels [a, b), f32 [n, K], each rounded once."""
    given, k = _of(tensor), tensor.shape[1]
    found = integers(tensor, a, b, read)
    column = np.arange(k) // given.group
    if given.order is not None:
        column = group_of_columns(given.order, read)
    zero = np.float32(middle(given)) if found.zero is None else found.zero[:, column].astype(np.float32)
    return (found.q.astype(np.float32) - zero) * found.scale[:, column]


def blocks(layout: Layout, tensor: Tensor, a: int, b: int, read: Read) -> Blocks | None:
    """Channels [a, b) in the layout's blocks, with the quants that the file has; None where it can't hold
    them. Scales and minima are rounded to its numbers."""
    held = numbers(layout, tensor, a, b, read)
    if held is None:
        return None
    found, k = integers(tensor, a, b, read), tensor.shape[1]
    zero = np.full(found.scale.shape, middle(_of(tensor)), np.uint8) if found.zero is None else found.zero
    q, missing = found.q, layout.blocks(k) * layout.block - k
    if missing:  # filled up with weights of zero
        q = np.concatenate([q, np.repeat(zero[:, -1:], missing, axis=1)], axis=1)
    if layout.bits == 8 and not layout.minimum:
        group = np.minimum(np.arange(q.shape[1]), k - 1) // _of(tensor).group
        q = (q - zero[:, group]).view(np.int8)
    return Blocks(q.reshape(b - a, -1, layout.block), *held)


def numbers(
    layout: Layout, tensor: Tensor, a: int, b: int, read: Read
) -> tuple[Numbers] | tuple[Numbers, Numbers] | None:
    """Scales, and minima if the layout has them, of the blocks of channels [a, b), [n, blocks]; None where it
    can't hold the quants."""
    given, count = _of(tensor), layout.blocks(tensor.shape[1])
    centred = given.zeros is None or (layout.bits == 8 and given.bits == 4)
    if given.order is not None or layout.bits < given.bits or not (layout.minimum or centred):
        return None
    scale, times = scales(given, a, b, read), -(-given.group // layout.block)

    def of_blocks(values: F32) -> Numbers:
        with np.errstate(over="ignore"):  # infinite ones are found by `Blocks.finite`
            return np.repeat(values.astype(layout.number), times, axis=1)[:, :count]

    if not layout.minimum:
        return (of_blocks(scale),)
    zero = np.uint8(middle(given)) if given.zeros is None else zero_points(given, a, b, read)
    return of_blocks(scale), of_blocks(-scale * zero)


def middle(grouped: Grouped) -> int:
    """The zero point of integers that lie evenly around zero."""
    return 1 << grouped.bits - 1


def _of(tensor: Tensor) -> Grouped:
    assert tensor.grouped is not None, tensor.name
    return tensor.grouped


# ---- what the tensors hold -----------------------------------------------------------
def integers(tensor: Tensor, a: int, b: int, read: Read) -> Integers:
    """Channels [a, b) as they are stored."""
    grouped = _of(tensor)
    q = _QUANTS[grouped.packing](tensor, a, b, read)
    zero = None if grouped.zeros is None else zero_points(grouped, a, b, read)
    return Integers(np.ascontiguousarray(q), scales(grouped, a, b, read), zero)


def scales(grouped: Grouped, a: int, b: int, read: Read) -> F32:
    """Scales of channels [a, b), f32 [n, G]."""
    tensor = grouped.scales
    form = formats.find(tensor.format)
    if math.prod(tensor.shape) == 1:
        return np.full((b - a, 1), formats.to_f32(form, read(tensor, 0, form.bytes)))
    if grouped.packing in _COLUMNS:
        return np.ascontiguousarray(formats.to_f32(form, _strip(tensor, a, b, form.bytes, read)).T)
    return formats.to_f32(form, _rows(tensor, a, b, form.bytes, read))


def zero_points(grouped: Grouped, a: int, b: int, read: Read) -> U8:
    """Zero points of channels [a, b), u8 [n, G], counted from 0."""
    tensor = grouped.zeros
    assert tensor is not None
    if tensor.format == "I8":
        found = _rows(tensor, a, b, 1, read) + np.uint8(middle(grouped))
        return np.broadcast_to(found.reshape(-1, 1), (b - a, 1)) if tensor.shape == (1,) else found
    p = 32 // grouped.bits
    first, last = a // p, -(-b // p)
    if grouped.packing in _COLUMNS:
        words = _numbers(_strip(tensor, first, last, 4, read), grouped.bits)
        found = (_in_order(words) if grouped.packing == "awq" else words).T
    else:
        words = _numbers(_rows(tensor, first, last, 4, read).reshape(-1, tensor.shape[1], 4), grouped.bits)
        found = words.transpose(0, 2, 1).reshape(-1, tensor.shape[1])
    mask = np.uint8((1 << grouped.bits) - 1)
    return found[a - first * p : b - first * p] + np.uint8(grouped.less) & mask


def group_of_columns(order: Tensor, read: Read) -> NDArray[np.int64]:
    """The group of each column, i64 [K]."""
    item = formats.find(order.format)
    assert item.element is not None
    return read(order, 0, order.shape[0] * item.bytes).view(item.element).astype(np.int64)


def _gptq(tensor: Tensor, a: int, b: int, read: Read) -> U8:
    bits, k = _of(tensor).bits, tensor.shape[1]
    words = columns(tensor, k * bits // 32, 4 * tensor.shape[0], 4 * a, 4 * b, read)
    by_channel = words.reshape(len(words), b - a, 4).transpose(1, 0, 2).reshape(b - a, -1)
    return _numbers(by_channel, bits)


def _awq(tensor: Tensor, a: int, b: int, read: Read) -> U8:
    bits, (n, k) = _of(tensor).bits, tensor.shape
    p = 32 // bits
    first, last = a // p, -(-b // p)
    words = columns(tensor, k, 4 * n // p, 4 * first, 4 * last, read)
    return _in_order(_numbers(words, bits))[:, a - first * p : b - first * p].T


def _packed(tensor: Tensor, a: int, b: int, read: Read) -> U8:
    bits, k = _of(tensor).bits, tensor.shape[1]
    row = 4 * -(-k * bits // 32)
    return _numbers(read(tensor, a * row, (b - a) * row).reshape(b - a, row), bits)[:, :k]


def _int8(tensor: Tensor, a: int, b: int, read: Read) -> U8:
    k = tensor.shape[1]
    return read(tensor, a * k, (b - a) * k).reshape(b - a, k) + np.uint8(128)


_QUANTS = {"gptq": _gptq, "awq": _awq, "packed": _packed, "int8": _int8}


# ---- bytes -----------------------------------------------------------------------------
def _numbers(words: U8, bits: int) -> U8:
    """Bytes of words along the last axis → the numbers they hold."""
    if bits == 8:
        return words
    return np.stack([words & 15, words >> 4], axis=-1).reshape(*words.shape[:-1], -1)


def _in_order(numbers: U8) -> U8:
    """Numbers of AWQ's words, along the last axis, in the order of channels."""
    return numbers.reshape(*numbers.shape[:-1], -1, 8)[..., _AWQ].reshape(numbers.shape)


def _rows(tensor: Tensor, a: int, b: int, item: int, read: Read) -> U8:
    """Bytes of rows [a, b) of a tensor [N, …], or all of one of a single row."""
    row = item * math.prod(tensor.shape[1:])
    if tensor.shape[0] == 1:
        return read(tensor, 0, row).reshape(1, row)
    return read(tensor, a * row, (b - a) * row).reshape(b - a, row)


def _strip(tensor: Tensor, a: int, b: int, item: int, read: Read) -> U8:
    """Bytes of columns [a, b) of a tensor [rows, columns]."""
    rows, width = tensor.shape
    return columns(tensor, rows, width * item, a * item, b * item, read)


def columns(tensor: Tensor, rows: int, row: int, a: int, b: int, read: Read) -> U8:
    """Bytes [a, b) of each of the rows, which have `row` bytes."""
    if b - a == row:
        return read(tensor, 0, rows * row).reshape(rows, row)
    out = np.empty((rows, b - a), np.uint8)
    for r in range(rows):
        out[r] = read(tensor, r * row + a, b - a)
    return out
