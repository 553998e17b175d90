"""How a plan folder keeps weights: the index as JSON, or the packed bytes themselves in one file.

    offset 0    magic "FRTPACK1", then u64 offset, u64 length and u32 crc32 of the directory
    64 …        blocks, each starting on a multiple of 64 bytes, in the layouts of flashrt/layouts.py
    directory   JSON: block name → offset, bytes, layout, shape, crc32

All numbers are little-endian. The directory stands last, because the checksums are known last.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from flashrt.backend import BlockSource
from flashrt.errors import ModelError, ParseError
from flashrt.ir.types import Weight
from flashrt.layouts import LAYOUTS
from flashrt.weights.index import File, Grouped, Tensor, WeightIndex
from flashrt.weights.source import CHUNK, flat, pread_all

U8 = NDArray[np.uint8]

_MAGIC = b"FRTPACK1"
_HEAD = struct.Struct("<8sQQI")
_ALIGN = 64
_AGAIN = "write it again: flashrt compile --pack"


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a packed file. shape: [rows, weights in a row]."""

    offset: int
    bytes: int
    layout: str
    shape: tuple[int, int]
    crc32: int


def write_packed(path: str | Path, blocks: Mapping[str, Weight], source: BlockSource) -> None:
    """Writes the blocks' packed bytes to one file, a piece at a time.

    Raises ModelError as the source does, OSError when the disk fails.
    """
    directory: dict[str, dict[str, Any]] = {}
    with open(path, "wb") as file:
        file.write(bytes(_ALIGN))
        for name, weight in blocks.items():
            directory[name] = asdict(_write_block(file, weight, source))
            file.write(bytes(-file.tell() % _ALIGN))
        text = json.dumps(directory).encode()
        offset = file.tell()
        file.write(text)
        file.seek(0)
        file.write(_HEAD.pack(_MAGIC, offset, len(text), zlib.crc32(text)))


def _write_block(file: IO[bytes], weight: Weight, source: BlockSource) -> Block:
    layout, (rows, k) = LAYOUTS[weight.layout or "f32"], flat(weight)
    offset, crc = file.tell(), 0
    step = max(CHUNK // max(layout.group_bytes(k), 1), 1) * layout.rows
    for lo in range(0, rows, step):
        hi = min(lo + step, rows)
        data = np.empty(layout.bytes(hi - lo, k), np.uint8)
        source.read(weight, lo, hi, data)
        crc = zlib.crc32(data.data, crc)
        file.write(data.data)
    return Block(offset, file.tell() - offset, layout.name, (rows, k), crc)


class PackedSource:
    """A `BlockSource` over a packed file. Each block's checksum is compared once, at its first use.

    Several threads may read. Raises ModelError when the file is missing or its directory is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock, self._checked = Lock(), set[str]()
        self._file = -1
        try:
            self._file = os.open(self._path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise ModelError(
                f"packed weights {path} can't be opened: {error.strerror}", hint=_AGAIN
            ) from None
        self.blocks = self._directory()

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
        """Fills `out` with rows [lo, hi) of the weight. Raises ModelError naming the block when it is
        missing, was packed for another plan, or is damaged."""
        block, layout, (rows, k) = self._block(weight), LAYOUTS[weight.layout or "f32"], flat(weight)
        assert 0 <= lo <= hi <= rows, (weight.name, lo, hi, rows)
        span = layout.span(lo, hi, k)
        assert out.size == span.stop - span.start, (weight.name, lo, hi, out.size)
        if out.size == block.bytes and weight.name not in self._checked:
            self._fill(weight.name, out, block.offset)
            self._compare(weight.name, block, zlib.crc32(out.data))
            return
        with self._lock:
            if weight.name not in self._checked:
                self._verify(weight.name, block)
        self._fill(weight.name, out, block.offset + span.start)

    def _block(self, weight: Weight) -> Block:
        block = self.blocks.get(weight.name)
        if block is None:
            raise ModelError(f"block {weight.name} isn't in the packed weights {self._path}", hint=_AGAIN)
        wanted = (weight.layout or "f32", flat(weight))
        if (block.layout, block.shape) != wanted:
            raise ModelError(
                f"block {weight.name} is packed as {block.layout} {list(block.shape)} in {self._path}, "
                f"the plan wants {wanted[0]} {list(wanted[1])}",
                hint=_AGAIN,
            )
        return block

    def _verify(self, name: str, block: Block) -> None:
        crc, buffer = 0, np.empty(min(CHUNK, block.bytes), np.uint8)
        for at in range(0, block.bytes, CHUNK):
            piece = buffer[: min(CHUNK, block.bytes - at)]
            self._fill(name, piece, block.offset + at)
            crc = zlib.crc32(piece.data, crc)
        self._compare(name, block, crc)

    def _compare(self, name: str, block: Block, crc: int) -> None:
        if crc != block.crc32:
            raise ModelError(
                f"block {name} in {self._path} is damaged: checksum {crc:08x}, not {block.crc32:08x}",
                hint=_AGAIN,
            )
        self._checked.add(name)

    def _fill(self, name: str, out: U8, offset: int) -> None:
        try:
            got = pread_all(self._file, out, offset)
        except OSError as error:
            raise ModelError(f"block {name} can't be read from {self._path}: {error.strerror}") from None
        if got < out.size:
            raise ModelError(
                f"block {name} is cut short: {self._path} ends at byte {offset + got}", hint=_AGAIN
            )

    def _directory(self) -> dict[str, Block]:
        """The checked directory. Raises ModelError."""
        size = os.fstat(self._file).st_size
        head = os.pread(self._file, _HEAD.size, 0)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise ModelError(
                f"{self._path} isn't a file of packed weights, or was never finished", hint=_AGAIN
            )
        _, offset, length, crc = _HEAD.unpack(head)
        if offset + length > size:
            raise ModelError(
                f"packed weights {self._path} are cut short: {size} bytes of {offset + length}", hint=_AGAIN
            )
        text = os.pread(self._file, length, offset)
        if zlib.crc32(text) != crc:
            raise ModelError(f"the directory of the packed weights {self._path} is damaged", hint=_AGAIN)
        return dict(_blocks(json.loads(text)))


def _blocks(directory: Mapping[str, Any]) -> Iterator[tuple[str, Block]]:
    for name, entry in directory.items():
        rows, k = entry.pop("shape")
        yield name, Block(**entry, shape=(rows, k))


def index_to_json(index: WeightIndex) -> str:
    """The text form of a weight index."""
    tensors = {source: asdict(tensor) for source, tensor in index.tensors.items()}
    return json.dumps({"files": [asdict(f) for f in index.files], "tensors": tensors}, indent=1)


def index_from_json(text: str) -> WeightIndex:
    """Reads what `index_to_json` writes. Raises ParseError."""
    try:
        data = json.loads(text)
        files = tuple(File(**f) for f in data["files"])
        tensors = {source: _tensor(entry, len(files)) for source, entry in data["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParseError(f"the weight index doesn't parse: {type(error).__name__}: {error}") from None
    return WeightIndex(files, tensors)


def _tensor(entry: dict[str, Any], files: int) -> Tensor:
    grouped = entry.get("grouped")
    if grouped:
        inner = ("scales", "zeros", "order")
        parts = {name: grouped[name] and _tensor(grouped[name], files) for name in inner}
        grouped = Grouped(**{**grouped, **parts})
    tensor = Tensor(**{**entry, "shape": tuple(entry["shape"]), "grouped": grouped})
    if not 0 <= tensor.file < files:
        raise ValueError(f"tensor {tensor.name} is in file {tensor.file} of {files}")
    return tensor
