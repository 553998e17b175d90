"""Numbers of 4 bits, as AWQ, GPTQ and compressed-tensors pack them → packed layouts, without unpacking.

A layout keeps eight consecutive weights of a channel in a word: byte i has weight i in its low half and
weight 4+i in its high one. So everything here moves words; see flashrt/weights/grouped.py for what the files
hold, and for the way that takes anything.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flashrt.layouts import BLOCK, Layout
from flashrt.weights import grouped
from flashrt.weights.grouped import Read
from flashrt.weights.index import Tensor

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]

_LOW, _HIGH, _APART = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0), np.uint32(0x00FF00FF)
_FOUR, _EIGHT, _HALF = np.uint32(4), np.uint32(8), np.uint32(16)
_EVEN, _ODD = [0, 4, 1, 5], [2, 6, 3, 7]  # AWQ's channels in the low and in the high halves of a word's bytes


def store(layout: Layout, tensor: Tensor, a: int, b: int, read: Read, out: U8) -> bool:
    """Writes channels [a, b) in the layout to `out`; False where they have to be unpacked for that."""
    n, k, given = b - a, tensor.shape[1], tensor.grouped
    assert given is not None
    words = _WORDS.get(given.packing)
    if words is None or {given.bits, layout.bits} != {4} or n % layout.rows or k % BLOCK:
        return False
    numbers = grouped.numbers(layout, tensor, a, b, read)
    if numbers is None or not all(np.isfinite(x).all() for x in numbers):
        return False
    groups, nblk, r = n // layout.rows, k // BLOCK, layout.rows
    record, at = out.reshape(groups, -1), nblk * layout.quant_bytes
    packed = record[:, :at].view(np.uint32).reshape(groups, nblk, 4, r)
    packed[...] = words(tensor, a, b, read).reshape(nblk, 4, groups, r).transpose(2, 0, 1, 3)
    tail = record[:, at:].view(layout.number).reshape(groups, len(numbers), -1, r)
    for place, values in enumerate(numbers):
        tail[:, place] = values.reshape(groups, r, -1).transpose(0, 2, 1)
    return True


def _spread(words: U32) -> U32:
    """Words with weight i in bits 4·i → the layouts' words."""
    low, high = words & np.uint32(0xFFFF), words >> _HALF
    return _to_bytes(low) | _to_bytes(high) << _FOUR


def _to_bytes(nibbles: U32) -> U32:
    """Four nibbles in the low half of each word → one in each of its bytes."""
    pairs = (nibbles | nibbles << _EIGHT) & _APART
    return (pairs | pairs << _FOUR) & _LOW


def _gptq(tensor: Tensor, a: int, b: int, read: Read) -> U32:
    """Words of channels [a, b), u32 [K/8, n]."""
    rows = tensor.shape[1] // 8
    return _spread(grouped.columns(tensor, rows, 4 * tensor.shape[0], 4 * a, 4 * b, read).view(np.uint32))


def _packed(tensor: Tensor, a: int, b: int, read: Read) -> U32:
    row = tensor.shape[1] // 2
    return _spread(read(tensor, a * row, (b - a) * row).view(np.uint32).reshape(b - a, -1)).T


def _awq(tensor: Tensor, a: int, b: int, read: Read) -> U32:
    """Eight rows of words, each of eight channels, become eight words of a channel."""
    n, k = tensor.shape
    first, last = a // 8, -(-b // 8)
    stored = grouped.columns(tensor, k, n // 2, 4 * first, 4 * last, read).view(np.uint32)
    eights = stored.reshape(k // 8, 2, 4, last - first)
    low, high = eights[:, 0], eights[:, 1]
    out = np.empty((k // 8, last - first, 8, 4), np.uint8)  # rows, words, channels, bytes
    for channels, bytes_ in (
        (_EVEN, (low & _LOW) | (high & _LOW) << _FOUR),
        (_ODD, (low >> _FOUR & _LOW) | (high & _HIGH)),
    ):
        out[:, :, channels] = bytes_.view(np.uint8).reshape(k // 8, 4, -1, 4).transpose(0, 2, 3, 1)
    return out.view(np.uint32).reshape(k // 8, -1)[:, a - 8 * first : b - 8 * first]


_WORDS = {"gptq": _gptq, "awq": _awq, "packed": _packed}
