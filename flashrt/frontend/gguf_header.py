"""The header of a GGUF file: metadata and where each tensor lies. Reads no weights.

The file is not trusted: every length is checked against the bytes that are
left before anything is allocated, so a broken file costs no more time or
memory than its own size.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.weights.formats import GGUF_FORMATS, Format

V = TypeVar("V")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# numbers of the value types that aren't strings or arrays → numpy dtype
_SCALARS: Mapping[int, str] = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_TYPE_NAMES: Mapping[type[Any], str] = {
    bool: "a boolean", int: "a whole number", float: "a number", str: "a string",
    list: "an array of strings", np.ndarray: "an array of numbers",
}  # fmt: skip
_MAX_DIMS = 4
_MAX_NAME = 65535
_BROKEN = "the file is damaged or wasn't written by a GGUF converter: fetch or convert it again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. shape: row-major, output channels first. offset: in the file; bytes: there.

    file: which of a model's files, when it is in several.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    file: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says about itself. size: bytes of the file. others: the model's further files.

    Metadata values are bool, int, float, str, list[str] or numpy arrays.
    """

    path: Path
    size: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    others: tuple[Path, ...] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files of the model; `TensorInfo.file` counts them."""
        return (self.path, *self.others)

    @overload
    def get(self, key: str, kind: type[V]) -> V: ...
    @overload
    def get(self, key: str, kind: type[V], default: V) -> V: ...
    def get(self, key: str, kind: type[V], default: V | None = None) -> V:
        """The value of a key. Raises ModelError naming the key when it is missing without default,
        or has another type (a whole number may stand where a number is wanted)."""
        if key not in self.metadata:
            if default is None:
                raise ModelError(f"{self.path}: metadata key {key} is missing", hint=_BROKEN)
            return default
        value = self.metadata[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            got = _TYPE_NAMES[type(value)]
            raise ModelError(
                f"{self.path}: metadata key {key} is {got}, not {_TYPE_NAMES[kind]}", hint=_BROKEN
            )
        return value  # type: ignore[no-any-return]

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to 2^31. Raises ModelError naming the key."""
        value = self.get(key, int) if default is None else self.get(key, int, default)
        if not 1 <= value <= 2**31:
            raise ModelError(f"{self.path}: metadata key {key} is {value}, out of range", hint=_BROKEN)
        return value

    def tensor(self, name: str) -> TensorInfo:
        """The tensor of that name. Raises ModelError."""
        if name not in self.tensors:
            raise ModelError(f"{self.path}: tensor {name} is missing", hint=_BROKEN)
        return self.tensors[name]

    def floats(self, name: str) -> NDArray[np.float32]:
        """The numbers of a small F32 tensor (RoPE factors). Raises ModelError."""
        info = self.tensor(name)
        if info.format != "F32":
            raise ModelError(f"{self.path}: tensor {name} is {info.format}, not F32", hint=_BROKEN)
        with open(self.paths[info.file], "rb") as file:
            file.seek(info.offset)
            return np.frombuffer(file.read(info.bytes), np.float32).reshape(info.shape)


def read_header(path: str | Path) -> Header:
    """Reads the header of a GGUF file (versions 2 and 3, little-endian).

    Raises ModelError naming the file and the key or tensor at fault.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelError(f"{path} is not a GGUF file: it doesn't start with {_MAGIC.decode()}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror}") from None


class _Reader:
    """A position in the file. `what` names the entry being read, for messages."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size = path, data, len(data)
        self.at, self.what = 4, "the first bytes"

    def fail(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {self.what}: {problem}", lines=f"at byte {self.at}", hint=_BROKEN)

    def take(self, n: int) -> bytes:
        """The next n bytes."""
        if n > self.size - self.at:
            raise self.fail(f"{n} bytes wanted, {self.size - self.at} left in the file")
        self.at += n
        return self.data[self.at - n : self.at]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def name(self, what: str) -> str:
        """A key or a tensor's name: a string that isn't empty."""
        self.what = what
        length = self.u64()
        if not 0 < length <= _MAX_NAME:
            raise self.fail("its name is empty" if length == 0 else f"its name has {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.fail("its name isn't UTF-8") from None

    def header(self) -> Header:
        version = self.u32()
        if version not in _VERSIONS:
            big = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            raise UnsupportedModel(
                f"{self.path}: GGUF version {version}" + (" (a big-endian file)" if big else ""),
                hint=f"known: {', '.join(map(str, _VERSIONS))}, little-endian; convert the model again",
            )
        tensors, keys = self.u64(), self.u64()
        metadata = self.metadata(keys)
        return Header(self.path, self.size, metadata, self.tensors(tensors, self.alignment(metadata)))

    def metadata(self, count: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for i in range(count):
            key = self.name(f"metadata key {i + 1} of {count}")
            self.what = f"metadata key {key}"
            if key in out:
                raise self.fail("it stands twice")
            out[key] = self.value(self.u32())
        return out

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.take(self.u64()).decode(errors="replace")
        if kind == _ARRAY:
            return self.array(self.u32(), self.u64())
        dtype = self.scalar(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def scalar(self, kind: int) -> np.dtype[np.generic]:
        if kind not in _SCALARS:
            raise self.fail(f"unknown value type {kind}")
        return np.dtype(_SCALARS[kind])

    def array(self, kind: int, count: int) -> list[str] | NDArray[np.generic]:
        if kind == _STRING:
            return self.strings(count)
        dtype = self.scalar(kind)
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def strings(self, count: int) -> list[str]:
        """The longest part of a header: one tight loop."""
        if count * 8 > self.size - self.at:
            raise self.fail(f"an array of {count} strings in {self.size - self.at} bytes")
        data, at, size, length = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        out = []
        for i in range(count):
            if at + 8 > size or at + 8 + (n := length(data, at)[0]) > size:
                raise self.fail(f"string {i} of {count} ends after the file")
            end = at + 8 + n
            out.append(data[at + 8 : end].decode(errors="replace"))
            at = end
        self.at = at
        return out

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        key = "general.alignment"
        value = metadata.get(key, 32)
        if type(value) is not int or not 0 < value <= 2**20 or value & (value - 1):
            self.what = f"metadata key {key}"
            raise self.fail(f"{str(value)[:40]!r} isn't a power of two")
        return value

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        out: dict[str, TensorInfo] = {}
        for i in range(count):
            name = self.name(f"tensor {i + 1} of {count}")
            self.what = f"tensor {name}"
            if name in out:
                raise self.fail("it stands twice")
            out[name] = self.tensor(name, alignment)
        base = -(-self.at // alignment) * alignment
        return {name: self.located(info, base) for name, info in out.items()}

    def tensor(self, name: str, alignment: int) -> TensorInfo:
        """The entry of one tensor; its offset still counts from the data section."""
        dims = self.u32()
        if not 1 <= dims <= _MAX_DIMS:
            raise self.fail(f"{dims} dimensions")
        shape = tuple(self.u64() for _ in range(dims))[::-1]
        form = self.format(self.u32())
        if 0 in shape or shape[-1] % form.block:
            raise self.fail(f"shape {list(shape)} doesn't fit format {form.name} (blocks of {form.block})")
        offset = self.u64()
        if offset % alignment:
            raise self.fail(f"offset {offset} isn't a multiple of the alignment {alignment}")
        rows = 1
        for d in shape[:-1]:
            rows *= d
        return TensorInfo(name, form.name, shape, offset, rows * form.row_bytes(shape[-1]))

    def format(self, number: int) -> Format:
        if number not in GGUF_FORMATS:
            known = ", ".join(f.name for f in GGUF_FORMATS.values())
            raise UnsupportedModel(
                f"{self.path}: {self.what}: unknown tensor format {number}", hint=f"known formats: {known}"
            )
        return GGUF_FORMATS[number]

    def located(self, info: TensorInfo, base: int) -> TensorInfo:
        if base + info.offset + info.bytes > self.size:
            self.what = f"tensor {info.name}"
            raise self.fail(
                f"its {info.bytes} bytes from {base + info.offset} end after the file ({self.size} bytes)"
            )
        return TensorInfo(info.name, info.format, info.shape, base + info.offset, info.bytes)
