"""Packed weight formats, by name: the byte layout every backend reads.

A matrix [N, K] is cut into row groups of `rows` output channels; a group is one
contiguous record, so any range of channels that starts and ends on a group is a
contiguous range of bytes. Inside a group the K axis is cut into blocks of 32.

    name            rows  record of one group (nblk = ceil(K/32))
    f32, f16, bf16     1  K elements
    q8.16x32          16  quants i8 [nblk][8][16 rows][4], scales f16 [nblk][16]
    q4.16x32          16  quants u4 [nblk][4][16 rows][4], scales f16 [nblk][16];  w = scale*(q-8)
    q4m.16x32         16  as q4, then minima f16 [nblk][16];                       w = scale*q + min

In q8, element (j, row, i) of a block is k = 4*j + i. In q4 a byte holds two
weights: (j, row, i) low nibble is k = 8*j + i, high nibble k = 8*j + 4 + i. So
64 consecutive bytes hold, for each of 16 channels, 4 (or 8) consecutive k: what
an INT8 dot product, a bf16 tile and a GPU warp each want to load at once.

Rows are padded to a whole group and K to a whole block with zero weights.
Vectors and tensors that aren't matrices are stored as f32, row-major.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BLOCK = 32  # weights that share a scale
U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layout:
    """One packed format.

    rows: output channels in a group. bits: of one quant, 0 for plain elements.
    minimum: whether each block has a minimum beside its scale.
    element: numpy dtype of plain elements, else None.
    """

    name: str
    rows: int
    bits: int = 0
    minimum: bool = False
    element: np.dtype[np.generic] | None = None

    def group_bytes(self, k: int) -> int:
        """Bytes of one row group for K = k."""
        if self.element is not None:
            return self.rows * k * self.element.itemsize
        return -(-k // BLOCK) * self.rows * (BLOCK * self.bits // 8 + 2 + 2 * self.minimum)

    def bytes(self, n: int, k: int) -> int:
        """Bytes of a packed [n, k] matrix."""
        return -(-n // self.rows) * self.group_bytes(k)

    def span(self, lo: int, hi: int, k: int) -> slice:
        """The byte range of channels [lo, hi); lo must start a group."""
        assert lo % self.rows == 0, (self.name, lo)
        return slice(lo // self.rows * self.group_bytes(k), -(-hi // self.rows) * self.group_bytes(k))


F32_ROWS = Layout("f32", 1, element=np.dtype(np.float32))
F16_ROWS = Layout("f16", 1, element=np.dtype(np.float16))
BF16_ROWS = Layout("bf16", 1, element=np.dtype(ml_dtypes.bfloat16))
Q8 = Layout("q8.16x32", 16, bits=8)
Q4 = Layout("q4.16x32", 16, bits=4)
Q4M = Layout("q4m.16x32", 16, bits=4, minimum=True)
LAYOUTS: Mapping[str, Layout] = {x.name: x for x in (F32_ROWS, F16_ROWS, BF16_ROWS, Q8, Q4, Q4M)}


def pack_plain(layout: Layout, w: NDArray[np.generic]) -> U8:
    """w [N, K] (or any shape) → bytes of f32, f16 or bf16 rows."""
    assert layout.element is not None
    return np.ascontiguousarray(w, dtype=layout.element).reshape(-1).view(np.uint8)


def pack_quants(
    layout: Layout,
    q: NDArray[np.generic],
    scale: NDArray[np.float16],
    minimum: NDArray[np.float16] | None = None,
) -> U8:
    """Quantised values to bytes, losslessly.

    q: [N, nblk, 32], i8 for q8, 0…15 for q4 and q4m. scale, minimum: f16 [N, nblk].
    """
    n, nblk, _ = q.shape
    pad = -n % layout.rows
    if pad:
        # zero scale makes the padding rows zero whatever the quants are
        q = np.pad(q, ((0, pad), (0, 0), (0, 0)))
        scale = np.pad(scale, ((0, pad), (0, 0)))
        minimum = None if minimum is None else np.pad(minimum, ((0, pad), (0, 0)))
    g, r = (n + pad) // layout.rows, layout.rows
    quants: U8
    if layout.bits == 8:
        quants = q.astype(np.uint8).reshape(g, r, nblk, 8, 4).transpose(0, 2, 3, 1, 4)
    else:
        pairs = q.astype(np.uint8).reshape(g, r, nblk, 4, 2, 4)
        quants = (pairs[..., 0, :] | (pairs[..., 1, :] << np.uint8(4))).transpose(0, 2, 3, 1, 4)
    parts: list[U8] = [quants.reshape(g, nblk * r * BLOCK * layout.bits // 8)]
    for per_block in (scale, minimum) if layout.minimum else (scale,):
        assert per_block is not None
        by_group = per_block.astype(np.float16).reshape(g, r, nblk).transpose(0, 2, 1)
        parts.append(np.ascontiguousarray(by_group).reshape(g, nblk * r).view(np.uint8))
    return np.concatenate(parts, axis=1).reshape(-1)


def unpack(layout: Layout, data: U8, n: int, k: int) -> F32:
    """Bytes of a packed [n, k] matrix → f32 [n, k]: the definition of what the bytes mean."""
    if layout.element is not None:
        return data.view(layout.element).reshape(n, k).astype(np.float32)
    nblk, r = -(-k // BLOCK), layout.rows
    g = -(-n // r)
    per_group = data.reshape(g, layout.group_bytes(k))
    nq = nblk * r * BLOCK * layout.bits // 8
    quants = per_group[:, :nq].reshape(g, nblk, BLOCK * layout.bits // 32, r, 4)
    if layout.bits == 8:
        q: F32 = quants.view(np.int8).transpose(0, 3, 1, 2, 4).astype(np.float32)
    else:
        both = np.stack([quants & 15, quants >> 4], axis=4)  # g, nblk, j, row, half, 4
        q = both.transpose(0, 3, 1, 2, 4, 5).astype(np.float32)
    q = q.reshape(g, r, nblk, BLOCK)
    halves = np.ascontiguousarray(per_group[:, nq:]).view(np.float16).reshape(g, 1 + layout.minimum, nblk, r)
    per_block = halves.transpose(0, 1, 3, 2).astype(np.float32)[..., None]  # g, which, row, nblk, 1
    if layout.minimum:
        w = per_block[:, 0] * q + per_block[:, 1]
    else:
        w = per_block[:, 0] * (q if layout.bits == 8 else q - 8)
    return np.ascontiguousarray(w.reshape(g * r, nblk * BLOCK)[:n, :k])


def columns(layout: Layout, data: U8, k: int, lo: int, hi: int) -> U8:
    """Bytes of whole row groups of K = k weights → those of their columns [lo, hi) alone.

    lo must start a block; hi must end one, or the row.
    """
    if layout.element is not None:
        item = layout.element.itemsize
        return data.reshape(-1, k, item)[:, lo:hi].reshape(-1)
    assert lo % BLOCK == 0 and (hi % BLOCK == 0 or hi == k), (layout.name, lo, hi, k)
    nblk, first, last = -(-k // BLOCK), lo // BLOCK, -(-hi // BLOCK)
    groups = data.reshape(-1, layout.group_bytes(k))
    nq = nblk * layout.rows * BLOCK * layout.bits // 8
    quants = groups[:, :nq].reshape(len(groups), 1, nblk, -1)[:, :, first:last]
    halves = groups[:, nq:].reshape(len(groups), 1 + layout.minimum, nblk, -1)[:, :, first:last]
    parts = [p.reshape(len(groups), -1) for p in (quants, halves)]
    return np.concatenate(parts, axis=1).reshape(-1)


def packed_bytes(layout: str, shape: tuple[int, ...], lo: int, hi: int) -> int:
    """Bytes of rows [lo, hi) of a weight: a matrix in its layout, anything else as plain rows."""
    found = LAYOUTS[layout]
    if len(shape) == 2:
        return found.bytes(hi - lo, shape[1])
    assert found.element is not None, f"{layout} holds matrices, not {shape}"
    return (hi - lo) * int(np.prod(shape[1:], dtype=np.int64)) * found.element.itemsize


def aligned(nbytes: int) -> int:
    """The size rounded up to whole cache lines of 64 bytes, as vector loads want: what it takes in memory."""
    return -(-nbytes // 64) * 64
