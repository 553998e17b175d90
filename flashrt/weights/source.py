"""Weight bytes out of the model's own files, repacked on the way.

Files are read with `pread` in pieces of about a megabyte: a file that is cut
short while it is in use gives an error (a mapped one would kill the process),
and memory never holds a tensor twice.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashrt.errors import ModelError
from flashrt.ir.types import Weight, evaluate
from flashrt.layouts import LAYOUTS, Layout, pack_quants
from flashrt.weights import formats, grouped, grouped_words, quantise, repack
from flashrt.weights.index import File, Tensor, WeightIndex

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

CHUNK = 1 << 20  # bytes read at a time
_DIGESTED = 1 << 20


def digest(path: str | Path) -> str:
    """sha256 of the file's size and its first MiB, which holds the headers. Raises ModelError."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return hashlib.sha256(size.to_bytes(8, "little") + file.read(_DIGESTED)).hexdigest()
    except OSError as error:
        raise ModelError(f"weight file {path} can't be read: {error.strerror}") from None


def file_entry(path: str | Path) -> File:
    """The index entry of a file as it is now, by its absolute path. Raises ModelError."""
    path = Path(path).absolute()
    found = digest(path)
    return File(str(path), path.stat().st_size, found)


def flat(weight: Weight) -> tuple[int, int]:
    """(rows, weights in a row) of a weight: its first axis, and the rest. A scalar is one row of one."""
    shape = [int(evaluate(d, {})) for d in weight.type.shape]
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows [lo, hi) of a weight that one source holds: a tensor of a file, or a constant."""

    name: str
    lo: int
    hi: int
    tensor: Tensor | None
    constant: NDArray[np.generic] | None


class IndexSource:
    """A `BlockSource` over a weight index.

    Plain layouts are filled from any format (de-quantised through float32 where the format has blocks,
    rounded to nearest). Quantised ones take over the quants of the formats that they hold; whatever else is
    asked of q8, q8f and q4m is rounded to their blocks, see `flashrt.weights.quantise`. Several threads may
    read.

    Args:
        index: where the tensors lie.
        constants: values that are in no file, by source name.
        root: folder that relative file paths start from.

    Raises:
        ModelError: a file is missing or isn't the one the index was made from.
    """

    def __init__(
        self,
        index: WeightIndex,
        constants: Mapping[str, NDArray[np.generic]] | None = None,
        root: Path | None = None,
    ) -> None:
        self._index, self._constants = index, constants or {}
        self._files: list[int] = []
        try:
            for file in index.files:
                self._files.append(_open(file, root))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the files. Idempotent."""
        while self._files:
            os.close(self._files.pop())

    def __del__(self) -> None:
        self.close()

    def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
        """Fills `out` with rows [lo, hi) of the weight in its layout (see flashrt/layouts.py).

        lo must start a row group. Raises ModelError naming the tensor when it is missing, has another
        shape, can't be stored in that layout, or its bytes are missing.
        """
        layout = LAYOUTS[weight.layout or "f32"]
        rows, k = flat(weight)
        assert 0 <= lo <= hi <= rows and lo % layout.rows == 0, (weight.name, lo, hi, rows)
        span = layout.span(lo, hi, k)
        assert out.size == span.stop - span.start, (weight.name, lo, hi, out.size)
        parts = self._parts(weight, rows, k)
        if layout.bits == 0 and self._read_straight(parts, layout, lo, hi, k, out):
            return
        step = max(CHUNK // (4 * k), 1)
        if any(p.tensor and grouped.in_columns(p.tensor) for p in parts):
            step = max(step, grouped.STRIP)
        step = -(-step // layout.rows) * layout.rows
        for a in range(lo, hi, step):
            b = min(a + step, hi)
            piece = layout.span(a, b, k)
            self._fill(
                weight, parts, layout, a, b, k, out[piece.start - span.start : piece.stop - span.start]
            )

    def _parts(self, weight: Weight, rows: int, k: int) -> list[_Part]:
        parts: list[_Part] = []
        at = 0
        for name in weight.sources:
            tensor, constant = self._index.tensors.get(name), self._constants.get(name)
            held = constant if tensor is None else tensor
            if held is None:
                raise ModelError(
                    f"weight {weight.name}: tensor {name} is in no file of the model",
                    hint="the model's files are incomplete, or belong to another model",
                )
            shape = held.shape
            n, width = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
            if width != k:
                raise _shape_error(weight, name, shape)
            parts.append(_Part(name, at, at + n, tensor, constant))
            at += n
        if at != rows:
            raise _shape_error(weight, weight.sources[0], (at, k))
        return parts

    def _read_straight(self, parts: list[_Part], layout: Layout, lo: int, hi: int, k: int, out: U8) -> bool:
        """Reads rows that need no change straight into `out`; False where they do."""
        if not all(p.tensor and _same_bytes(p.tensor, layout) for p in parts):
            return False
        row = layout.group_bytes(k)
        for part, a, b in _overlaps(parts, lo, hi):
            assert part.tensor is not None
            at, end = (part.lo + a - lo) * row, (part.lo + b - lo) * row
            self._pread(part.tensor, a * row, out[at:end])
        return True

    def _fill(
        self, weight: Weight, parts: list[_Part], layout: Layout, lo: int, hi: int, k: int, out: U8
    ) -> None:
        """Rows [lo, hi), few enough to hold, to packed bytes."""
        if layout.element is not None:
            done = 0
            for part, a, b in _overlaps(parts, lo, hi):
                end = done + layout.bytes(b - a, k)
                out[done:end].view(layout.element)[...] = self._plain(part, a, b, k).reshape(-1)
                done = end
            return
        overlaps = list(_overlaps(parts, lo, hi))
        if all(_same_quants(part.tensor, layout) for part, _, _ in overlaps):
            got = [self._rows(part.tensor, a, b) for part, a, b in overlaps if part.tensor]
            repack.store(layout, got[0] if len(got) == 1 else np.concatenate(got), out)
            return
        if self._stored(overlaps, layout, k, out):
            return
        blocks = quantise.join([self._blocks(weight, part, layout, a, b, k) for part, a, b in overlaps])
        out[...] = pack_quants(layout, blocks.q, blocks.scale, blocks.minimum)

    def _stored(self, overlaps: list[tuple[_Part, int, int]], layout: Layout, k: int, out: U8) -> bool:
        """Words of 4-bit numbers straight to packed bytes; False where some have to be unpacked."""
        at = 0
        for part, a, b in overlaps:
            end = at + layout.bytes(b - a, k)
            if part.tensor is None or part.tensor.grouped is None:
                return False
            if not grouped_words.store(layout, part.tensor, a, b, self._bytes, out[at:end]):
                return False
            at = end
        return True

    def _plain(self, part: _Part, a: int, b: int, k: int) -> NDArray[np.generic]:
        """Rows [a, b) of a part as floats [b-a, k]."""
        if part.tensor is None:
            assert part.constant is not None
            return part.constant.reshape(part.hi - part.lo, k)[a:b]
        if part.tensor.grouped:
            return grouped.to_f32(part.tensor, a, b, self._bytes)
        form = formats.find(part.tensor.format)
        rows = self._columns(part.tensor, a, b) if part.tensor.transposed else self._rows(part.tensor, a, b)
        got = formats.to_f32(form, rows)
        return got + np.float32(part.tensor.shift) if part.tensor.shift else got

    def _blocks(self, weight: Weight, part: _Part, layout: Layout, a: int, b: int, k: int) -> quantise.Blocks:
        """Rows [a, b) of a part in the layout's blocks: its own quants where the layout holds them."""
        tensor, found = part.tensor, None
        if tensor and tensor.grouped:
            found = grouped.blocks(layout, tensor, a, b, self._bytes)
        elif tensor and not tensor.transposed and not tensor.shift:
            found = quantise.split(tensor.format, layout, self._rows(tensor, a, b))
        if found is None:
            found = quantise.rounded(layout, self._plain(part, a, b, k).astype(np.float32))
        held = tensor.format if tensor else "a constant"
        if found is None:
            raise ModelError(
                f"weight {weight.name}: tensor {part.name} is {held}, not what {layout.name} holds",
                hint=f"store it as {formats.native_layout(held)}",
            )
        if not found.finite():
            raise ModelError(
                f"weight {weight.name}: tensor {part.name} ({held}) has values that the "
                f"f{8 * layout.number.itemsize} scales of {layout.name} can't hold",
                hint="compile with --quantize lossless; if that fails too, the file is damaged",
            )
        return found

    def _rows(self, tensor: Tensor, a: int, b: int) -> U8:
        """Bytes of rows [a, b), u8 [b-a, row_bytes], in the order the graph means."""
        row = _row_bytes(tensor)
        if not tensor.rope_heads:
            return self._bytes(tensor, a * row, (b - a) * row).reshape(b - a, row)
        head = tensor.shape[0] // tensor.rope_heads
        order = stored_rows(head, a, b)
        first, last = a // head * head, -(-b // head) * head
        return self._bytes(tensor, first * row, (last - first) * row).reshape(-1, row)[order - first]

    def _columns(self, tensor: Tensor, a: int, b: int) -> U8:
        """As `_rows`, of a tensor stored [in, out] in a plain format."""
        n, k = tensor.shape[0], math.prod(tensor.shape[1:])
        item = formats.find(tensor.format).bytes
        out = np.empty((b - a, k, item), np.uint8)
        step = max(CHUNK // (n * item), 1)
        order = stored_rows(n // tensor.rope_heads, a, b) if tensor.rope_heads else slice(a, b)
        for at in range(0, k, step):
            end = min(at + step, k)
            stored = self._bytes(tensor, at * n * item, (end - at) * n * item).reshape(end - at, n, item)
            out[:, at:end] = stored[:, order].transpose(1, 0, 2)
        return out.reshape(b - a, k * item)

    def _bytes(self, tensor: Tensor, at: int, count: int) -> U8:
        out = np.empty(count, np.uint8)
        self._pread(tensor, at, out)
        return out

    def _pread(self, tensor: Tensor, at: int, out: U8) -> None:
        """Fills `out` from byte `at` of the tensor. Raises ModelError naming the tensor."""
        path = self._index.files[tensor.file].path
        if at + out.size > tensor.bytes:
            raise ModelError(
                f"tensor {tensor.name} has {tensor.bytes} bytes in {path}, fewer than its shape needs"
            )
        try:
            got = pread_all(self._files[tensor.file], out, tensor.offset + at)
        except OSError as error:
            raise ModelError(f"tensor {tensor.name} can't be read from {path}: {error.strerror}") from None
        if got < out.size:
            raise ModelError(
                f"tensor {tensor.name} is cut short: {path} ends at byte {tensor.offset + at + got}",
                hint="the file was truncated: fetch it again",
            )


def _open(file: File, root: Path | None) -> int:
    """A descriptor of the file. Raises ModelError when it isn't the one the index was made from."""
    path = (root or Path()) / file.path
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise ModelError(
            f"weight file {path} can't be opened: {error.strerror}",
            hint="put it back, or compile the model again",
        ) from None
    if size != file.size or digest(path) != file.digest:
        raise ModelError(
            f"weight file {path} has changed since the model was compiled",
            lines=f"it had {file.size} bytes, now {size}" if size != file.size else "its header differs",
            hint="compile the model again, or put the old file back",
        )
    return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))


def pread_all(descriptor: int, out: U8, offset: int) -> int:
    """Bytes read into `out`; fewer than its size only at the end of the file."""
    view, got = out.data, 0
    while got < out.size:
        n = os.preadv(descriptor, [view[got:]], offset + got)
        if n == 0:
            break
        got += n
    return got


def stored_rows(head: int, a: int, b: int) -> NDArray[np.int64]:
    """Where rows [a, b) stand in a tensor whose heads are stored for pairwise RoPE.

    The graph rotates channel i with i + head/2; such a file keeps the two side by side.
    """
    row = np.arange(a, b)
    half, i = np.divmod(row % head, head // 2)
    return row // head * head + 2 * i + half


def _overlaps(parts: list[_Part], lo: int, hi: int) -> Iterator[tuple[_Part, int, int]]:
    """(part, from, to), rows counted in the part, that make up rows [lo, hi) of the weight."""
    for part in parts:
        a, b = max(lo, part.lo), min(hi, part.hi)
        if a < b:
            yield part, a - part.lo, b - part.lo


def _row_bytes(tensor: Tensor) -> int:
    form, k = formats.find(tensor.format), math.prod(tensor.shape[1:])
    if k % form.block:
        raise ModelError(
            f"tensor {tensor.name}: rows of {k} don't fit format {form.name} (blocks of {form.block})"
        )
    return form.row_bytes(k)


def _same_bytes(tensor: Tensor, layout: Layout) -> bool:
    changed = tensor.rope_heads or tensor.transposed or tensor.shift or tensor.grouped
    return not changed and formats.find(tensor.format).element == layout.element


def _same_quants(tensor: Tensor | None, layout: Layout) -> bool:
    if tensor is None or tensor.transposed or tensor.shift or tensor.grouped:
        return False
    return tensor.format == repack.FORMATS.get(layout.grouped)


def _shape_error(weight: Weight, name: str, shape: tuple[int, ...]) -> ModelError:
    return ModelError(
        f"weight {weight.name} is {weight.type}, but tensor {name} has shape {list(shape)}",
        hint="the weights belong to another model, or the configuration is wrong",
    )
