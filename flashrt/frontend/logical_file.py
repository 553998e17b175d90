"""A `.logical` text, with its weights in a file beside it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashrt.errors import ModelError
from flashrt.frontend import safetensors
from flashrt.frontend.bind import bind
from flashrt.frontend.imported import Imported
from flashrt.ir.text import read_logical
from flashrt.weights.index import WeightIndex


def load_logical(path: str | Path) -> Imported:
    """Reads `<stem>.logical`, and the sources of its weights from `<stem>.safetensors`, `<stem>.npz` or both.

    Raises:
        ParseError: the text isn't a logical graph; with path and line.
        ModelError: a weight is in neither file, or has another shape.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    graph = read_logical(text, path=str(path))
    stored = path.with_suffix(".safetensors")
    index = safetensors.read_index([stored]) if stored.is_file() else WeightIndex((), {})
    sources = [s for w in graph.weights for s in w.sources]
    tensors = {s: index.tensors[s] for s in sources if s in index.tensors}
    constants = _arrays(path.with_suffix(".npz"), [s for s in sources if s not in tensors])
    missing = [s for s in sources if s not in tensors and s not in constants]
    if missing:
        raise ModelError(
            f"{path}: no values for {', '.join(missing[:5])}" + (" …" if len(missing) > 5 else ""),
            hint=f"put them beside it, by these names, in {stored.name} or {path.stem}.npz",
        )
    index = WeightIndex(index.files, tensors)
    return Imported(bind(graph, index, constants), index, constants)


def _arrays(path: Path, names: list[str]) -> dict[str, NDArray[np.generic]]:
    """Those of the named arrays that the file has; none when there is no file."""
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {n: arrays[n] for n in names if n in arrays}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ModelError(f"{path} isn't an .npz file: {error}") from None
