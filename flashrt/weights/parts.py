"""Parts of weights: some of the rows, or of the columns, of what a source holds whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from flashrt.backend import BlockSource
from flashrt.errors import ModelError
from flashrt.ir.types import Weight
from flashrt.layouts import LAYOUTS, Layout, columns, pack_plain, unpack
from flashrt.weights.source import CHUNK, flat

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


class PartSource:
    """A `BlockSource` that also reads weights which are parts of others (`Weight.of`).

    source: reads whole weights; wholes: those, by name. Several threads may read.
    """

    def __init__(self, source: BlockSource, wholes: Mapping[str, Weight]) -> None:
        self._source, self._wholes = source, wholes

    def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
        """Fills `out` with rows [lo, hi) of the weight in its layout. Raises ModelError."""
        if not weight.of:
            self._source.read(weight, lo, hi, out)
            return
        if (whole := self._wholes.get(weight.of)) is None:
            raise ModelError(
                f"weight {weight.name} is a part of {weight.of}, which the plan lacks",
                hint="compile it again",
            )
        layout, width, at = LAYOUTS[weight.layout or "f32"], flat(weight)[1], 0
        if weight.turned:
            self._turned(weight, whole, lo, hi, out)
            return
        if weight.layout != whole.layout:
            for a, b in _pieces(weight.rows or (0, flat(whole)[0]), lo, hi):
                end = at + layout.bytes(b - a, width)
                out[at:end] = pack_plain(layout, self._floats(whole, a, b))
                at = end
            return
        for a, b in _pieces(weight.rows or (0, flat(whole)[0]), lo, hi):
            end = at + layout.bytes(b - a, width)
            if weight.columns:
                self._columns(weight, whole, layout, a, b, out[at:end])
            else:
                self._source.read(whole, a, b, out[at:end])
            at = end
        assert at == out.size, (weight.name, lo, hi, out.size)

    def _turned(self, weight: Weight, whole: Weight, lo: int, hi: int, out: U8) -> None:
        """Rows [lo, hi) of the transposes of the part's matrices, which stand below each other."""
        layout, (count, width), at = LAYOUTS[weight.layout or "f32"], flat(weight), 0
        each = count // weight.turned
        for i in range(lo // each, -(-hi // each)):
            pieces = _pieces(weight.rows or (0, flat(whole)[0]), i * width, (i + 1) * width)
            matrix = np.concatenate([self._floats(whole, a, b) for a, b in pieces])
            rows = matrix.T[max(lo - i * each, 0) : hi - i * each]
            end = at + layout.bytes(len(rows), width)
            out[at:end] = pack_plain(layout, rows)
            at = end

    def _floats(self, whole: Weight, a: int, b: int) -> F32:
        """Rows [a, b) of a whole weight."""
        layout, (n, k) = LAYOUTS[whole.layout or "f32"], flat(whole)
        first, last = a // layout.rows * layout.rows, min(-(-b // layout.rows) * layout.rows, n)
        data = np.empty(layout.bytes(last - first, k), np.uint8)
        self._source.read(whole, first, last, data)
        return unpack(layout, data, last - first, k)[a - first : b - first]

    def _columns(self, weight: Weight, whole: Weight, layout: Layout, a: int, b: int, out: U8) -> None:
        """The part's columns of rows [a, b) of the whole, a piece at a time."""
        k, (first, last) = flat(whole)[1], weight.columns
        step = max(CHUNK // max(layout.group_bytes(k), 1), 1) * layout.rows
        at = 0
        for lo in range(a, b, step):
            hi = min(lo + step, b)
            buffer = np.empty(layout.bytes(hi - lo, k), np.uint8)
            self._source.read(whole, lo, hi, buffer)
            mine = columns(layout, buffer, k, first, last)
            out[at : at + mine.size] = mine
            at += mine.size


def _pieces(ends: tuple[int, ...], lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Rows of the whole that are rows [lo, hi) of the part."""
    start = 0
    for a, b in zip(ends[::2], ends[1::2], strict=True):
        first, last = max(lo, start), min(hi, start + b - a)
        if first < last:
            yield a + first - start, a + last - start
        start += b - a
