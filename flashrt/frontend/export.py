"""A saved torch.export program (`.pt2`) → graph and weight index.

The file is a zip archive. A weight stored whole and uncompressed in it is read
from there by offset; any other is kept as a constant.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend import trace
from flashrt.frontend.bind import bind
from flashrt.frontend.copies import copied
from flashrt.frontend.imported import Imported
from flashrt.ir.logical import Graph
from flashrt.ir.types import Expr, Symbol, symbols_of
from flashrt.weights.index import Tensor, WeightIndex
from flashrt.weights.source import file_entry

LARGEST = 512  # of a size that the program leaves without bound
_FORMATS: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
_LOCAL_HEADER = 30  # bytes before the name in a zip entry's own header


def load_export(path: str | Path, *, largest: int = LARGEST) -> Imported:
    """Reads a program that `torch.export.save` wrote. Its inputs and outputs may be any tensors.

    largest: bound for sizes that the program leaves without one.

    Raises:
        ModelError: the file isn't such a program, or is damaged.
        UnsupportedModel: the program has something flashrt can't run; the message names it.
    """
    path = Path(path)
    program = _read(path)
    graph = trace.import_program(program, path.stem, symbols=())
    graph = copied(with_symbols(graph, program, largest))
    sources = [s for w in graph.weights for s in w.sources]
    index = _index(path, program, sources)
    constants = {s: values_of(program, s) for s in sources if s not in index.tensors}
    return Imported(bind(graph, index, constants), index, constants)


def imported(program: Any, name: str, largest: int) -> Imported:
    """A program that is in no file: its weights become constants."""
    graph = copied(with_symbols(trace.import_program(program, name, symbols=()), program, largest))
    constants = {s: values_of(program, s) for w in graph.weights for s in w.sources}
    index = WeightIndex((), {})
    return Imported(bind(graph, index, constants), index, constants)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"{path} is missing")
    try:
        with zipfile.ZipFile(path) as archive:
            if not any(name.endswith("/models/model.json") for name in archive.namelist()):
                raise ModelError(
                    f"{path} is a zip archive, but no torch.export program",
                    hint="write it with torch.export.save(torch.export.export(module, args), path)",
                )
        with quiet():
            return torch.export.load(path)
    except zipfile.BadZipFile:
        raise ModelError(
            f"{path} isn't a torch.export program, or it is truncated",
            hint="write it with torch.export.save(torch.export.export(module, args), path)",
        ) from None
    except ModelError:
        raise
    except Exception as error:  # torch raises anything on damaged archives
        first = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(f"{path} can't be loaded: {type(error).__name__}: {first[:300]}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """torch logs a traceback before it raises; the error we raise says it already."""
    logger = logging.getLogger("torch.export")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


# ---- symbols -----------------------------------------------------------------
def with_symbols(
    graph: Graph, program: Any, largest: int, names: Mapping[str, str] = MappingProxyType({})
) -> Graph:
    """Declares every symbol that occurs, with the program's range. names: torch's symbol → the graph's."""
    ranges = {names.get(str(s), str(s)): bounds for s, bounds in program.range_constraints.items()}
    hints = {names.get(s, s): hint for s, hint in _hints(program).items()}
    declared = []
    for name in sorted(_used(graph)):
        if name not in ranges or (name.startswith("u") and name not in names.values()):
            raise UnsupportedModel(f"{graph.name} has a size that depends on data ({name})")
        lo = max(1, _bound(ranges[name].lower, 1))
        hi = _bound(ranges[name].upper, max(largest, lo))
        declared.append(Symbol(name, lo, hi, min(max(hints.get(name, lo), lo), hi)))
    return Graph(graph.name, tuple(declared), graph.inputs, graph.weights, (), graph.nodes, graph.outputs)


def _used(graph: Graph) -> set[str]:
    types = [*(i.type for i in graph.inputs), *(n.type for n in graph.nodes)]
    values: list[Any] = [d for kind in types for d in kind.shape]
    values += [v for n in graph.nodes for _, v in n.attrs]
    found: set[str] = set()
    while values:
        value = values.pop()
        if isinstance(value, tuple):
            values += value
        elif isinstance(value, Expr):
            found |= symbols_of(value)
    return found


def _bound(value: Any, otherwise: int) -> int:
    """A bound of a range as a number; torch writes infinity as a symbol."""
    return int(value) if getattr(value, "is_Integer", False) or isinstance(value, int) else otherwise


def _hints(program: Any) -> dict[str, int]:
    """The sizes that the program was traced with."""
    found: dict[str, int] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            for size in getattr(node.meta.get("val"), "shape", ()):
                if isinstance(size, torch.SymInt) and size.node.has_hint():
                    found[str(size.node.expr)] = int(size.node.hint)
    return found


# ---- weights -----------------------------------------------------------------
def _index(path: Path, program: Any, sources: list[str]) -> WeightIndex:
    """The weights that can be read straight out of the archive."""
    tensors = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for source, entry, member in _members(archive):
            value = program.state_dict.get(source)
            if source in sources and value is not None and _plain(value, entry, member):
                offset = _data_offset(file, member)
                form = _FORMATS[value.dtype]
                tensors[source] = Tensor(source, 0, offset, member.file_size, form, tuple(value.shape))
    return WeightIndex((file_entry(path.absolute()),), tensors)


def _members(archive: zipfile.ZipFile) -> Iterator[tuple[str, dict[str, Any], zipfile.ZipInfo]]:
    """(name in the state dict, its description, its file in the archive) of each weight."""
    infos = {info.filename: info for info in archive.infolist()}
    for name in infos:
        folder, _, last = name.rpartition("/")
        if last.endswith("_weights_config.json"):
            for source, entry in json.loads(archive.read(name))["config"].items():
                member = infos.get(f"{folder}/{entry['path_name']}")
                if member is not None:
                    yield source, entry, member


def _plain(value: torch.Tensor, entry: Mapping[str, Any], member: zipfile.ZipInfo) -> bool:
    """Whether the archive holds just the tensor's elements, row-major and uncompressed."""
    whole = member.file_size == value.numel() * value.element_size() and value.is_contiguous()
    stored = member.compress_type == zipfile.ZIP_STORED and not entry.get("use_pickle")
    return whole and stored and value.dtype in _FORMATS


def _data_offset(file: Any, member: zipfile.ZipInfo) -> int:
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER)
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return int(member.header_offset) + _LOCAL_HEADER + name + extra


def values_of(program: Any, source: str) -> NDArray[np.generic]:
    """A weight or constant of a program; half precision as float32."""
    value = program.constants.get(source, program.state_dict.get(source))
    assert isinstance(value, torch.Tensor), source
    value = value.detach().cpu()
    if value.dtype in (torch.bfloat16, torch.float16):
        value = value.float()
    values: NDArray[np.generic] = value.contiguous().numpy()
    return values
