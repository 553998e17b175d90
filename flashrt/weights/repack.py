"""Rows of a file's quantised blocks → the packed layouts, without loss and without unpacking.

The packed layouts keep four consecutive weights of a channel together, so
everything here moves 32-bit words, each holding four quants of one channel:
a q8 block is eight words, a q4 block four words of two nibbles a byte. Rows are
turned into planes first, one for each word of a block, so that what is done to
the words runs over long stretches of memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from flashrt.layouts import Layout

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]

_LOW, _HIGH = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
_FOUR = np.uint32(4)

# the packed layout → the format with the same quants. A block is one f16 scale (Q4_1: then the minimum),
# then the quants: 32 i8, or 16 bytes of nibbles
FORMATS: Mapping[str, str] = {"q8.16x32": "Q8_0", "q4.16x32": "Q4_0", "q4m.16x32": "Q4_1"}


def store(layout: Layout, rows: U8, out: U8) -> None:
    """Writes rows, starting on a row group, to `out`; rows missing in the last group become zero.

    rows: u8 [n, bytes of a row] in the format that FORMATS names for the layout, `Layout.grouped`.
    """
    r, words, scales = layout.rows, layout.bits, 1 + layout.minimum  # 32 quants: as many words as bits
    if missing := -len(rows) % r:
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.uint8)])
    groups, nblk = len(rows) // r, rows.shape[1] // (4 * words + 2 * scales)
    halves = np.ascontiguousarray(rows).view(np.uint16).reshape(groups, r, nblk, -1)
    record, at = out.reshape(groups, -1), nblk * words * r * 4
    packed = record[:, :at].view(np.uint32).reshape(groups, nblk, words, r).transpose(2, 0, 1, 3)
    quants = _words(halves, scales).transpose(3, 0, 2, 1)
    if layout.bits == 8:
        packed[...] = quants
    else:
        _pair(np.ascontiguousarray(quants), packed)
    tail = record[:, at:].view(np.uint16).reshape(groups, scales, nblk, r)
    tail[...] = halves[..., :scales].transpose(0, 3, 2, 1)


def _words(halves: NDArray[np.uint16], scales: int) -> U32:
    """The quants of blocks [groups, r, nblk, halves of a block]."""
    if scales == 2:  # blocks of whole words
        return halves.view(np.uint32)[..., 1:]
    return np.ascontiguousarray(halves[..., scales:]).view(np.uint32)


def _pair(planes: U32, out: U32) -> None:
    """GGUF's pairs of nibbles (k, k+16) to the layouts' pairs (k, k+4): four planes to four planes."""
    even, odd = planes[0::2], planes[1::2]
    low, high = even & _LOW, odd & _LOW
    high <<= _FOUR
    np.bitwise_or(low, high, out=out[:2])
    np.right_shift(even, _FOUR, out=low)
    low &= _LOW
    np.bitwise_and(odd, _HIGH, out=high)
    np.bitwise_or(low, high, out=out[2:])
