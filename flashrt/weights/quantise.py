"""Rows of a file → quants with a scale (and a minimum) for 32 weights each, as the packed layouts hold them.

Two ways lead there. `split` takes the blocks of a quantised format apart: the quants stay as they are, and
at most the product of two scales is rounded to f16 (a relative error of 2^-11). `rounded` rounds floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashrt.layouts import BLOCK, Layout

U8 = NDArray[np.uint8]
F16 = NDArray[np.float16]
F32 = NDArray[np.float32]

_CLIPS = (1.0, 0.92, 0.84, 0.76)  # of a block's range: with so few quants its outer weights may be cut off
_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)  # the 16 values of IQ4_NL and IQ4_XS
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice those of E2M1


@dataclass(frozen=True, slots=True)
class Blocks:
    """q: [n, nblk, 32], i8 or (with a minimum) 0…15. scale, minimum: f16 [n, nblk]; w = scale·q + minimum."""

    q: NDArray[np.generic]
    scale: F16
    minimum: F16 | None = None

    def finite(self) -> bool:
        """Whether all numbers fit f16."""
        parts = (self.scale,) if self.minimum is None else (self.scale, self.minimum)
        return all(bool(np.isfinite(p).all()) for p in parts)


def join(parts: Sequence[Blocks]) -> Blocks:
    """The rows of all parts, which have the same layout, one after the other."""
    if len(parts) == 1:
        return parts[0]
    minima = [p.minimum for p in parts if p.minimum is not None]
    return Blocks(
        np.concatenate([p.q for p in parts]),
        np.concatenate([p.scale for p in parts]),
        np.concatenate(minima) if minima else None,
    )


# ---- formats whose quants a layout holds ---------------------------------------------
def _fields(rows: U8, size: int, *cuts: int) -> list[U8]:
    """Blocks of `size` bytes, u8 [n, blocks, size], cut into fields at the given bytes."""
    return np.split(rows.reshape(len(rows), -1, size), cuts, axis=2)


def _half(field: U8) -> F32:
    """f16 numbers in the last axis as f32."""
    return np.ascontiguousarray(field).view(np.float16).astype(np.float32)


def _nibbles(field: U8) -> U8:
    """Bytes of 16 pairs → 32 nibbles: the low ones first."""
    return np.concatenate([field & 15, field >> 4], axis=-1)


def _to_f16(values: F32) -> F16:
    with np.errstate(over="ignore"):  # infinite ones are found by `Blocks.finite`
        return values.astype(np.float16)


def _q5_0(rows: U8) -> Blocks:
    scale, high, low = _fields(rows, 22, 2, 6)
    fifth = np.unpackbits(high, axis=-1, bitorder="little")
    q = (_nibbles(low) | (fifth << np.uint8(4))).view(np.int8) - np.int8(16)
    return Blocks(q, _half(scale)[..., 0].astype(np.float16))


def _iq4_nl(rows: U8) -> Blocks:
    scale, low = _fields(rows, 18, 2)
    return Blocks(_IQ4[_nibbles(low)], _half(scale)[..., 0].astype(np.float16))


def _iq4_xs(rows: U8) -> Blocks:
    scale, high, low, quants = _fields(rows, 136, 2, 4, 8)
    n = len(rows)
    top = np.ascontiguousarray(high).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    bottom = np.stack([low & 15, low >> 4], axis=-1).reshape(n, -1, 8)
    factor = (bottom | top.astype(np.uint8) << np.uint8(4)).astype(np.float32) - 32
    q = _IQ4[_nibbles(quants.reshape(n, -1, 16))]
    return Blocks(q, _to_f16(_half(scale) * factor).reshape(n, -1))


def _mxfp4(rows: U8) -> Blocks:
    exponent, quants = _fields(rows, 17, 1)
    scale = np.ldexp(np.float32(1), exponent[..., 0].astype(int) - 128)
    return Blocks(_FP4[_nibbles(quants)], _to_f16(scale))


def _q3_k(rows: U8) -> Blocks:
    """The factors (-32…31) and the quants (-4…3) of 16 weights become one integer. Its sign is turned, so
    that the largest product, 128, has a place in an i8; the scale's sign makes up for it."""
    high, low, factors, scale = _fields(rows, 110, 32, 96, 108)
    n, count = low.shape[:2]
    fours = np.arange(0, 8, 2, dtype=np.uint8)
    bottom = np.stack([factors[..., :8] & 15, factors[..., :8] >> 4], axis=2).reshape(n, count, 16)
    top = (factors[..., None, 8:] >> fours[:, None] & 3).reshape(n, count, 16)
    factor = (bottom | top << np.uint8(4)).view(np.int8) - np.int8(32)
    two = (low.reshape(n, count, 2, 1, 32) >> fours[:, None] & 3).reshape(n, count, 16, 16)
    bits = np.arange(8, dtype=np.uint8)[:, None]
    third = (high[..., None, :] >> bits & 1).reshape(n, count, 16, 16)
    q = (two | third << np.uint8(2)).view(np.int8) - np.int8(4)
    products = -factor.astype(np.int16)[..., None] * q
    d = np.repeat(-_half(scale), 8, axis=2).reshape(n, -1)
    return Blocks(products.astype(np.int8).reshape(n, -1, BLOCK), d.astype(np.float16))


def _q4_k(rows: U8) -> Blocks:
    scale, least, packed, quants = _fields(rows, 144, 2, 4, 16)
    n = len(rows)
    a, b, c = np.split(packed, 3, axis=2)
    factor = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=2)
    offset = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=2)
    q = np.stack([quants.reshape(n, -1, 32) & 15, quants.reshape(n, -1, 32) >> 4], axis=2)
    return Blocks(
        q.reshape(n, -1, BLOCK),
        _to_f16(_half(scale) * factor).reshape(n, -1),
        _to_f16(-_half(least) * offset).reshape(n, -1),
    )


_SPLIT: Mapping[tuple[str, str], Callable[[U8], Blocks]] = {
    ("Q5_0", "q8.16x32"): _q5_0, ("IQ4_NL", "q8.16x32"): _iq4_nl, ("IQ4_XS", "q8.16x32"): _iq4_xs,
    ("Q3_K", "q8.16x32"): _q3_k, ("MXFP4", "q8.16x32"): _mxfp4, ("Q4_K", "q4m.16x32"): _q4_k,
}  # fmt: skip


def split(form: str, layout: Layout, rows: U8) -> Blocks | None:
    """The quants of rows in a format, u8 [n, row_bytes], where the layout holds them; else None."""
    found = _SPLIT.get((form, layout.name))
    return found(rows) if found else None


# ---- floats ---------------------------------------------------------------------------
def rounded(layout: Layout, values: F32) -> Blocks | None:
    """Floats [n, k] rounded to the layout's blocks; None for a layout that floats aren't rounded to.

    q8: no weight is off by more than half a scale, which is the block's largest magnitude / 127 rounded up
    to f16. q4m: 16 steps between the block's ends, or between ends drawn in where that lowers the mean
    square.
    """
    n, k = values.shape
    if k % BLOCK:
        values = np.pad(values, ((0, 0), (0, -k % BLOCK)))
    blocks = values.reshape(n, -1, BLOCK)
    with np.errstate(invalid="ignore", over="ignore"):  # what isn't finite is found by `Blocks.finite`
        return _rounded_blocks(layout, blocks)


def _rounded_blocks(layout: Layout, blocks: F32) -> Blocks | None:
    if layout.bits == 8:
        return _rounded_i8(blocks)
    return _rounded_u4(blocks) if layout.minimum else None


def _rounded_i8(blocks: F32) -> Blocks:
    most = np.maximum(blocks.max(axis=2), -blocks.min(axis=2))
    scale = _up(most / np.float32(127))
    q = np.rint(blocks * _inverse(scale)[..., None])
    return Blocks(q.astype(np.int8), scale)


def _rounded_u4(blocks: F32) -> Blocks:
    low, high = blocks.min(axis=2), blocks.max(axis=2)
    middle, reach = (low + high) / 2, (high - low) / 2
    best: tuple[F32, U8, F16, F16] | None = None
    for clip in _CLIPS:
        minimum = _to_f16(middle - reach * np.float32(clip))
        base = minimum.astype(np.float32)
        scale = _up(np.maximum(middle + reach * np.float32(clip) - base, 0) / np.float32(15))
        steps = np.rint((blocks - base[..., None]) * _inverse(scale)[..., None]).clip(0, 15)
        off = steps * scale.astype(np.float32)[..., None] + base[..., None] - blocks
        error = np.einsum("nbk,nbk->nb", off, off)
        q = steps.astype(np.uint8)
        if best is None:
            best = error, q, scale, minimum
            continue
        better = error < best[0]
        best = (
            np.where(better, error, best[0]),
            np.where(better[..., None], q, best[1]),
            np.where(better, scale, best[2]),
            np.where(better, minimum, best[3]),
        )
    assert best is not None
    return Blocks(best[1], best[2], best[3])


def _up(values: F32) -> F16:
    """The next f16 that isn't below."""
    near = _to_f16(values)
    return np.where(near.astype(np.float32) < values, np.nextafter(near, np.float16(np.inf)), near)


def _inverse(scale: F16) -> F32:
    wide = scale.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
