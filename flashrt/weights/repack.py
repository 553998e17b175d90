"""Rows of a file's quantised blocks → the packed layouts, without loss and without unpacking.

The packed layouts keep four consecutive weights of a channel together, so
everything here moves 32-bit words, each holding four quants of one channel:
a q8 block is eight words, a q4 block four words of two nibbles a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashrt.layouts import Layout

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]

_LOW = np.uint32(0x0F0F0F0F)


@dataclass(frozen=True, slots=True)
class Quants:
    """Rows of quantised weights in the layouts' own words.

    words: [n, nblk, words of a block]. scales: f16 bits [n, nblk, 1 or 2]: scale, then minimum.
    """

    words: U32
    scales: U16


def _q8_0(rows: U8) -> Quants:
    """34 bytes a block: scale f16, then 32 i8."""
    halves = _blocks(rows, 34).view(np.uint16)
    return Quants(np.ascontiguousarray(halves[..., 1:]).view(np.uint32), halves[..., :1])


def _q4_0(rows: U8) -> Quants:
    """18 bytes a block: scale f16, then 16 bytes of nibbles."""
    halves = _blocks(rows, 18).view(np.uint16)
    return Quants(_nibbles(np.ascontiguousarray(halves[..., 1:]).view(np.uint32)), halves[..., :1])


def _q4_1(rows: U8) -> Quants:
    """20 bytes a block: scale f16, minimum f16, then 16 bytes of nibbles."""
    blocks = _blocks(rows, 20)
    return Quants(_nibbles(blocks.view(np.uint32)[..., 1:]), blocks.view(np.uint16)[..., :2])


def _blocks(rows: U8, size: int) -> U8:
    return np.ascontiguousarray(rows).reshape(len(rows), -1, size)


def _nibbles(words: U32) -> U32:
    """GGUF's pairs (k, k+16) to the layouts' pairs (k, k+4): four words of a block to four words."""
    low, high = words & _LOW, (words >> np.uint32(4)) & _LOW
    out = np.empty(words.shape, np.uint32)
    for half, source in enumerate((low, high)):
        out[..., 2 * half : 2 * half + 2] = source[..., 0::2] | (source[..., 1::2] << np.uint32(4))
    return out


# format → (the packed layout with the same quants, rows u8 [n, row_bytes] → quants)
QUANTS: Mapping[str, tuple[str, Callable[[U8], Quants]]] = {
    "Q8_0": ("q8.16x32", _q8_0), "Q4_0": ("q4.16x32", _q4_0), "Q4_1": ("q4m.16x32", _q4_1),
}  # fmt: skip


def store(layout: Layout, quants: Quants, out: U8) -> None:
    """Writes rows, starting on a row group, to `out`; rows missing in the last group become zero."""
    n, nblk, words = quants.words.shape
    groups, r = -(-n // layout.rows), layout.rows
    record = out.reshape(groups, -1)
    at = nblk * words * r * 4
    packed = record[:, :at].view(np.uint32).reshape(groups, nblk, words, r)
    scales = record[:, at:].view(np.uint16).reshape(groups, -1, nblk, r)
    packed[...] = _grouped(quants.words, groups, r).transpose(0, 2, 3, 1)
    scales[...] = _grouped(quants.scales, groups, r).transpose(0, 3, 2, 1)


def _grouped(rows: NDArray[np.generic], groups: int, r: int) -> NDArray[np.generic]:
    """[n, …] → [groups, r, …], padded with zeros."""
    missing = groups * r - len(rows)
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
    return rows.reshape(groups, r, *rows.shape[1:])
