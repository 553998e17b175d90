"""Packed weight formats, by name: the byte layout every backend reads.

A matrix [N, K] is cut into row groups of `rows` output channels; a group is one
contiguous record, so any range of channels that starts and ends on a group is a
contiguous range of bytes. Inside a group the K axis is cut into blocks of 32;
`f` layouts have f32 scales (and minima), those of `16x16` two in each such block.

    name            rows  record of one group (nblk = ceil(K/32))
    f32, f16, bf16     1  K elements
    q8.16x32          16  quants i8 [nblk][8][16 rows][4], scales f16 [nblk][16]
    q4.16x32          16  quants u4 [nblk][4][16 rows][4], scales f16 [nblk][16];  w = scale*(q-8)
    q4m.16x32         16  as q4, then minima f16 [nblk][16];                       w = scale*q + min
    q8f.16x16         16  quants as q8, scales f32 [2*nblk][16]
    q8mf.16x32        16  as q8 with u8, scales f32 [nblk][16], minima f32 [nblk][16];  w = scale*q + min
    q4mf.16x32        16  as q4m, with f32 [nblk][16]
    q4mf.16x16        16  as q4m, with f32 [2*nblk][16]

In q8, element (j, row, i) of a block is k = 4*j + i. In q4 a byte holds two
weights: (j, row, i) low nibble is k = 8*j + i, high nibble k = 8*j + 4 + i. So
64 consecutive bytes hold, for each of 16 channels, 4 (or 8) consecutive k: what
an INT8 dot product, a bf16 tile and a GPU warp each want to load at once.

Of each of these there is a form with one row in a group (`q4.1x32`): for tables of which rows are
looked up, which then lie in one piece. Products have no kernels for it.

Rows are padded to a whole group and K to a whole block with zero weights.
Vectors and tensors that aren't matrices are stored as f32, row-major.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BLOCK = 32  # what K is padded to, and cut at
U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layout:
    """One packed format.

    rows: output channels in a group. bits: of one quant, 0 for plain elements.
    minimum: whether each scale has a minimum beside it. block: weights that share a scale.
    wide: whether scales and minima are f32, not f16. element: numpy dtype of plain elements, else None.
    """

    name: str
    rows: int
    bits: int = 0
    minimum: bool = False
    block: int = BLOCK
    wide: bool = False
    element: np.dtype[np.generic] | None = None

    @property
    def grouped(self) -> str:
        """The layout with the same numbers whose groups have 16 rows, or itself."""
        return self.name.replace(".1x", ".16x")

    @property
    def number(self) -> np.dtype[np.floating[Any]]:
        """numpy dtype of scales and minima."""
        return np.dtype(np.float32 if self.wide else np.float16)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales (or of the minima) of a group's 32 columns."""
        return BLOCK // self.block * self.rows * self.number.itemsize

    @property
    def quant_bytes(self) -> int:
        """Bytes of the quants of a group's 32 columns."""
        return self.rows * BLOCK * self.bits // 8

    @property
    def block_bytes(self) -> int:
        """Bytes of a group's 32 columns, which stand in two or three places."""
        return self.quant_bytes + (1 + self.minimum) * self.scale_bytes

    @property
    def weight_bits(self) -> float:
        """Bits that a weight takes, with its share of a scale and a minimum."""
        if self.element is not None:
            return 8 * self.element.itemsize
        return 8 * self.block_bytes / (BLOCK * self.rows)

    def blocks(self, k: int) -> int:
        """Scales of a row of k weights, padded to 32."""
        return -(-k // BLOCK) * (BLOCK // self.block)

    def group_bytes(self, k: int) -> int:
        """Bytes of one row group for K = k."""
        if self.element is not None:
            return self.rows * k * self.element.itemsize
        return -(-k // BLOCK) * self.block_bytes

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
Q8F = Layout("q8f.16x16", 16, bits=8, block=16, wide=True)
Q8MF = Layout("q8mf.16x32", 16, bits=8, minimum=True, wide=True)
Q4MF = Layout("q4mf.16x32", 16, bits=4, minimum=True, wide=True)
Q4MF_16 = Layout("q4mf.16x16", 16, bits=4, minimum=True, block=16, wide=True)
_PLAIN = (F32_ROWS, F16_ROWS, BF16_ROWS)
_GROUPED = (Q8, Q4, Q4M, Q8F, Q8MF, Q4MF, Q4MF_16)
_BY_ROW = tuple(replace(x, name=x.name.replace(".16x", ".1x"), rows=1) for x in _GROUPED)
LAYOUTS: Mapping[str, Layout] = {x.name: x for x in (*_PLAIN, *_GROUPED, *_BY_ROW)}
MATRICES = tuple(x.name for x in (*_PLAIN, *_GROUPED))  # layouts of matrices that products read
BY_ROW: Mapping[str, str] = {x.name: y.name for x, y in zip(_GROUPED, _BY_ROW, strict=True)}
# what a matrix in a layout is rounded to for devices that lack it: scales become f16, or the quants i8
COARSER: Mapping[str, str] = {
    Q8F.name: Q8.name, Q8MF.name: Q8.name, Q4MF.name: Q4M.name, Q4MF_16.name: Q8.name,
}  # fmt: skip


def pack_plain(layout: Layout, w: NDArray[np.generic]) -> U8:
    """w [N, K] (or any shape) → bytes of f32, f16 or bf16 rows."""
    assert layout.element is not None
    return np.ascontiguousarray(w, dtype=layout.element).reshape(-1).view(np.uint8)


def pack_quants(
    layout: Layout,
    q: NDArray[np.generic],
    scale: NDArray[np.floating[Any]],
    minimum: NDArray[np.floating[Any]] | None = None,
) -> U8:
    """Quantised values to bytes, losslessly.

    q: [N, blocks, block]: i8, u8 with a minimum, or 0…15 for 4 bits; blocks make up a multiple of 32
    weights. scale, minimum: [N, blocks], numbers that fit the layout's.
    """
    n, r = len(q), layout.rows
    q = q.reshape(n, q.shape[1] * q.shape[2] // BLOCK, BLOCK)
    pad = -n % r
    if pad:
        # zero scale makes the padding rows zero whatever the quants are
        q = np.pad(q, ((0, pad), (0, 0), (0, 0)))
        scale = np.pad(scale, ((0, pad), (0, 0)))
        minimum = None if minimum is None else np.pad(minimum, ((0, pad), (0, 0)))
    g, nblk = (n + pad) // r, q.shape[1]
    quants: U8
    if layout.bits == 8:
        quants = q.astype(np.uint8).reshape(g, r, nblk, 8, 4).transpose(0, 2, 3, 1, 4)
    else:
        pairs = q.astype(np.uint8).reshape(g, r, nblk, 4, 2, 4)
        quants = (pairs[..., 0, :] | (pairs[..., 1, :] << np.uint8(4))).transpose(0, 2, 3, 1, 4)
    parts: list[U8] = [quants.reshape(g, nblk * layout.quant_bytes)]
    for numbers in (scale, minimum) if layout.minimum else (scale,):
        assert numbers is not None
        by_group = numbers.astype(layout.number).reshape(g, r, numbers.shape[1]).transpose(0, 2, 1)
        parts.append(np.ascontiguousarray(by_group).reshape(g, r * numbers.shape[1]).view(np.uint8))
    return np.concatenate(parts, axis=1).reshape(-1)


def unpack(layout: Layout, data: U8, n: int, k: int) -> F32:
    """Bytes of a packed [n, k] matrix → f32 [n, k]: the definition of what the bytes mean."""
    if layout.element is not None:
        return data.view(layout.element).reshape(n, k).astype(np.float32)
    nblk, r = -(-k // BLOCK), layout.rows
    g = -(-n // r)
    per_group = data.reshape(g, layout.group_bytes(k))
    nq = nblk * layout.quant_bytes
    quants = per_group[:, :nq].reshape(g, nblk, BLOCK * layout.bits // 32, r, 4)
    if layout.bits == 8:
        signed = quants if layout.minimum else quants.view(np.int8)
        q: F32 = signed.transpose(0, 3, 1, 2, 4).astype(np.float32)
    else:
        both = np.stack([quants & 15, quants >> 4], axis=4)  # g, nblk, j, row, half, 4
        q = both.transpose(0, 3, 1, 2, 4, 5).astype(np.float32)
    blocks = layout.blocks(k)
    q = q.reshape(g, r, blocks, layout.block)
    numbers = np.ascontiguousarray(per_group[:, nq:]).view(layout.number)
    numbers = numbers.reshape(g, 1 + layout.minimum, blocks, r)
    per_block = numbers.transpose(0, 1, 3, 2).astype(np.float32)[..., None]  # g, which, row, blocks, 1
    if layout.minimum:
        w = per_block[:, 0] * q + per_block[:, 1]
    else:
        w = per_block[:, 0] * (q if layout.bits == 8 else q - 8)
    return np.ascontiguousarray(w.reshape(g * r, nblk * BLOCK)[:n, :k])


def columns(layout: Layout, data: U8, k: int, lo: int, hi: int) -> U8:
    """Bytes of whole row groups of K = k weights → those of their columns [lo, hi) alone.

    lo must start a block of 32; hi must end one, or the row.
    """
    if layout.element is not None:
        item = layout.element.itemsize
        return data.reshape(-1, k, item)[:, lo:hi].reshape(-1)
    assert lo % BLOCK == 0 and (hi % BLOCK == 0 or hi == k), (layout.name, lo, hi, k)
    nblk, first, last = -(-k // BLOCK), lo // BLOCK, -(-hi // BLOCK)
    groups = data.reshape(-1, layout.group_bytes(k))
    nq = nblk * layout.quant_bytes
    quants = groups[:, :nq].reshape(len(groups), 1, nblk, -1)[:, :, first:last]
    numbers = groups[:, nq:].reshape(len(groups), 1 + layout.minimum, nblk, -1)[:, :, first:last]
    parts = [p.reshape(len(groups), -1) for p in (quants, numbers)]
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
