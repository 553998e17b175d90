"""The header of a safetensors file: where each tensor lies. The data isn't read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashrt.errors import ModelError
from flashrt.weights.formats import FORMATS
from flashrt.weights.index import Tensor, WeightIndex
from flashrt.weights.source import file_entry

LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


def read_index(paths: Sequence[Path]) -> WeightIndex:
    """The tensors of all files by name.

    Raises:
        ModelError: a file is missing, truncated or malformed; the message names it.
    """
    files, tensors = [], {}
    for number, path in enumerate(paths):
        if not path.is_file():
            raise ModelError(f"{path} is missing", hint="download the model again: a shard isn't there")
        tensors.update(_tensors(path, number))
        files.append(file_entry(path.absolute()))
    return WeightIndex(tuple(files), tensors)


def _tensors(path: Path, number: int) -> dict[str, Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise _broken(path, f"it has {size} bytes, its header alone should have {length}")
        header = _parse(path, file.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    return {name: _tensor(path, name, entry, number, start, size) for name, entry in header.items()}


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except ValueError:
        raise _broken(path, "its header isn't JSON") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header isn't a table of tensors")
    return header


def _tensor(path: Path, name: str, entry: Any, number: int, start: int, size: int) -> Tensor:
    try:
        form, shape = str(entry["dtype"]), tuple(int(d) for d in entry["shape"])
        lo, hi = (int(o) for o in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise _broken(path, f"the header's entry for {name} lacks dtype, shape or data_offsets") from None
    known = FORMATS.get(form)
    if not 0 <= lo <= hi or (known and known.bytes * math.prod(shape) != hi - lo):
        raise _broken(path, f"{name} {form}{list(shape)} doesn't fit its {hi - lo} bytes")
    if start + hi > size:
        raise _broken(path, f"{name} should end at byte {start + hi}, the file at {size}")
    return Tensor(name, number, start + lo, hi - lo, form, shape)


def _broken(path: Path, why: str) -> ModelError:
    return ModelError(
        f"{path} is truncated or not a safetensors file: {why}", hint="download or copy the file again"
    )
