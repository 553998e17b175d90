"""Rows of a file → quants with a scale (and a minimum) for each 32 or 16, as the packed layouts hold them.

Two ways lead there. `split` takes the blocks of a quantised format apart: the quants stay as they are, and
at most the product of two scales is rounded to f16 (a relative error of 2^-11). `rounded` rounds floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt.layouts import BLOCK, Q4M, Layout
from flashrt.weights import formats

U8 = NDArray[np.uint8]
F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]

_CLIPS = (1.0, 0.92, 0.84, 0.76)  # of a block's range: with so few quants its outer weights may be cut off
_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)  # the 16 values of IQ4_NL and IQ4_XS
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice those of E2M1


@dataclass(frozen=True, slots=True)
class Blocks:
    """q: [n, blocks, weights of a block], i8 or (with a minimum) u8. scale, minimum: f16 or f32 [n, blocks];
    w = scale·q + minimum."""

    q: NDArray[np.generic]
    scale: Floats
    minimum: Floats | None = None

    def finite(self) -> bool:
        """Whether all numbers fit their type."""
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


def _shifts(fields: U8, width: int, *by: int) -> U8:
    """Each run of `width` bytes once for each shift to the right, u8 [n, runs·shifts, width]."""
    runs = fields.reshape(len(fields), -1, 1, width)
    return (runs >> np.array(by, np.uint8)[:, None]).reshape(len(fields), -1, width)


def _to_f16(values: F32) -> F16:
    with np.errstate(over="ignore"):  # infinite ones are found by `Blocks.finite`
        return values.astype(np.float16)


def _five_bits(high: U8, low: U8) -> U8:
    """Bytes of 32 fifth bits and of 32 nibbles → 32 numbers of 0…31."""
    return _nibbles(low) | (np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4))


def _q5_0(rows: U8) -> Blocks:
    scale, high, low = _fields(rows, 22, 2, 6)
    return Blocks(_five_bits(high, low).view(np.int8) - np.int8(16), _half(scale)[..., 0])


def _q5_1(rows: U8) -> Blocks:
    scale, least, high, low = _fields(rows, 24, 2, 4, 8)
    return Blocks(_five_bits(high, low), _half(scale)[..., 0], _half(least)[..., 0])


def _iq4_nl(rows: U8) -> Blocks:
    scale, low = _fields(rows, 18, 2)
    return Blocks(_IQ4[_nibbles(low)], _half(scale)[..., 0])


def _iq4_xs(rows: U8) -> Blocks:
    scale, high, low, quants = _fields(rows, 136, 2, 4, 8)
    n = len(rows)
    top = np.ascontiguousarray(high).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    bottom = np.stack([low & 15, low >> 4], axis=-1).reshape(n, -1, 8)
    factor = (bottom | top.astype(np.uint8) << np.uint8(4)).astype(np.float32) - 32
    q = _IQ4[_nibbles(quants.reshape(n, -1, 16))]
    return Blocks(q, (_half(scale) * factor).reshape(n, -1))


def _mxfp4(rows: U8) -> Blocks:
    exponent, quants = _fields(rows, 17, 1)
    scale = np.ldexp(np.float32(1), exponent[..., 0].astype(int) - 128)
    return Blocks(_FP4[_nibbles(quants)], scale)


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
    return Blocks(products.astype(np.int8).reshape(n, -1, BLOCK), d)


def _k_factors(packed: U8) -> tuple[U8, U8]:
    """The factors of eight scales and of eight minima, six bits each, of Q4_K and Q5_K."""
    a, b, c = np.split(packed, 3, axis=2)
    factor = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=2)
    return factor, np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=2)


def _with_minima(q: Ints, scale: U8, least: U8, factor: Ints, offset: Ints) -> Blocks:
    """Blocks of products: f16 numbers of a file's block times the factors of its parts."""
    n = len(q)
    return Blocks(q, (_half(scale) * factor).reshape(n, -1), (-_half(least) * offset).reshape(n, -1))


def _q2_k(rows: U8) -> Blocks:
    factors, quants, scale, least = _fields(rows, 84, 16, 80, 82)
    q = (_shifts(quants, 32, 0, 2, 4, 6) & 3).reshape(len(rows), -1, 16)
    return _with_minima(q, scale, least, factors & 15, factors >> 4)


def _q4_k(rows: U8) -> Blocks:
    scale, least, packed, quants = _fields(rows, 144, 2, 4, 16)
    return _with_minima(_shifts(quants, 32, 0, 4) & 15, scale, least, *_k_factors(packed))


def _q5_k(rows: U8) -> Blocks:
    scale, least, packed, high, quants = _fields(rows, 176, 2, 4, 16, 48)
    q = _shifts(quants, 32, 0, 4) & 15 | (_shifts(high, 32, *range(8)) & 1) << np.uint8(4)
    return _with_minima(q, scale, least, *_k_factors(packed))


def _q6_k(rows: U8) -> Blocks:
    low, high, factors, scale = _fields(rows, 210, 128, 192, 208)
    four = _shifts(low, 64, 0, 4).reshape(len(rows), -1, 32) & 15
    q = (four | (_shifts(high, 32, 0, 2, 4, 6) & 3) << np.uint8(4)).view(np.int8) - np.int8(32)
    factor = np.ascontiguousarray(factors).view(np.int8)
    return Blocks(q.reshape(len(rows), -1, 16), (_half(scale) * factor).reshape(len(rows), -1))


def _ternary(form: str, rows: U8) -> Blocks:
    """TQ1_0 and TQ2_0: -1, 0 or 1 times the f16 number at the end of 256 weights."""
    found = formats.find(form)
    scale = np.repeat(_half(_fields(rows, found.bytes, found.bytes - 2)[1])[..., 0], 8, axis=1)
    return Blocks(_multiples(formats.to_f32(found, rows), scale).astype(np.int8), scale)


def _codebook(form: str, rows: U8) -> Blocks:
    """The other IQ formats: a book's small numbers times an odd factor, in eighths of the number that 256
    weights share. What 16 weights have in common becomes their scale, the rest is a byte."""
    found = formats.find(form)
    first, *_, last = _fields(rows, found.bytes, 2, found.bytes - 8)
    shared = _half(first)[..., 0] if form != "IQ1_M" else _scattered(last)
    unit = np.repeat(shared * np.float32(0.125), 16, axis=1)
    whole = _multiples(formats.to_f32(found, rows), unit)
    common = np.maximum(np.gcd.reduce(whole, axis=2), 1)
    return Blocks((whole // common[..., None]).astype(np.int8), unit * common)


def _multiples(values: F32, unit: F32) -> NDArray[np.int16]:
    """Which multiple of its unit each value is: [n, k], [n, blocks] → [n, blocks, weights of a block]."""
    blocks = values.reshape(*unit.shape, -1)
    with np.errstate(invalid="ignore"):  # a damaged number is found by `Blocks.finite`
        times = np.divide(blocks, unit[..., None], out=np.zeros_like(blocks), where=blocks != 0)
        return np.rint(times).astype(np.int16)


def _scattered(fields: U8) -> F32:
    """The f16 number whose bits lie in the upper four of four words, f32 [n, blocks]."""
    fours = np.ascontiguousarray(fields).view(np.uint16) >> 12 << np.array([0, 4, 8, 12], np.uint16)
    return np.bitwise_or.reduce(fours, axis=2).view(np.float16).astype(np.float32)


_SPLIT: Mapping[tuple[str, str], Callable[[U8], Blocks]] = {
    ("Q5_0", "q8.16x32"): _q5_0, ("IQ4_NL", "q8.16x32"): _iq4_nl, ("IQ4_XS", "q8.16x32"): _iq4_xs,
    ("Q3_K", "q8.16x32"): _q3_k, ("MXFP4", "q8.16x32"): _mxfp4, ("Q4_K", "q4m.16x32"): _q4_k,
    ("IQ4_XS", "q8f.16x16"): _iq4_xs, ("Q6_K", "q8f.16x16"): _q6_k, ("Q4_K", "q4mf.16x32"): _q4_k,
    ("Q2_K", "q4mf.16x16"): _q2_k, ("Q5_K", "q8mf.16x32"): _q5_k, ("Q5_1", "q8mf.16x32"): _q5_1,
    **{(form, "q8.16x32"): partial(_ternary, form) for form in ("TQ1_0", "TQ2_0")},
    **{(form, "q8f.16x16"): partial(_codebook, form)
       for form in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
}  # fmt: skip


def split(form: str, layout: Layout, rows: U8) -> Blocks | None:
    """The quants of rows in a format, u8 [n, row_bytes], where the layout holds them; else None."""
    take = _SPLIT.get((form, layout.grouped))
    if take is None:
        return None
    found = take(rows)
    times = found.q.shape[2] // layout.block  # a layout may have more scales than the format

    def numbers(values: Floats) -> Floats:
        with np.errstate(over="ignore"):  # infinite ones are found by `Blocks.finite`
            return np.repeat(values.astype(layout.number), times, axis=1)

    return Blocks(
        found.q.reshape(len(rows), -1, layout.block),
        numbers(found.scale),
        None if found.minimum is None else numbers(found.minimum),
    )


# ---- floats ---------------------------------------------------------------------------
def rounded(layout: Layout, values: F32) -> Blocks | None:
    """Floats [n, k] rounded to the layout's blocks; None for a layout that floats aren't rounded to.

    q8, q8f: no weight is off by more than half a scale, which is the block's largest magnitude / 127, in q8
    rounded up to f16. q4m: 16 steps between the block's ends, or between ends drawn in where that lowers the
    mean square.
    """
    n, k = values.shape
    if k % BLOCK:
        values = np.pad(values, ((0, 0), (0, -k % BLOCK)))
    blocks = values.reshape(n, values.shape[1] // layout.block, layout.block)
    with np.errstate(invalid="ignore", over="ignore"):  # what isn't finite is found by `Blocks.finite`
        return _rounded_blocks(layout, blocks)


def _rounded_blocks(layout: Layout, blocks: F32) -> Blocks | None:
    if layout.bits == 8 and not layout.minimum:
        return _rounded_i8(blocks, layout.wide)
    return _rounded_u4(blocks) if layout.grouped == Q4M.name else None


def _rounded_i8(blocks: F32, wide: bool) -> Blocks:
    steps = np.maximum(blocks.max(axis=2), -blocks.min(axis=2)) / np.float32(127)
    scale = steps if wide else _up(steps)
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


def _inverse(scale: Floats) -> F32:
    wide = scale.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
