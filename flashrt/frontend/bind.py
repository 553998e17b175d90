"""Joins a graph's weights to the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.ir.logical import Graph
from flashrt.ir.types import Weight
from flashrt.layouts import LAYOUTS, Q8F
from flashrt.weights.formats import FORMATS, native_layout
from flashrt.weights.index import Tensor, WeightIndex


def select(
    graph: Graph,
    index: WeightIndex,
    *,
    constants: Collection[str] = (),
    prefix: str = "",
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    transposed: Collection[str] = (),
) -> WeightIndex:
    """The index with just the graph's sources, under the names the graph uses.

    prefix: the model's common prefix ("model", "transformer"), which some checkpoints leave out and others
    write as part of a larger model's. aliases, transposed: see `lm.Traced`.

    Raises:
        ModelError: tensors are missing; the message names them.
    """
    tensors, missing = {}, []
    for source in (s for w in graph.weights for s in w.sources if s not in constants):
        found = _find(source, index, prefix, (aliases or {}).get(source, ()))
        if found is None:
            missing.append(source)
        elif source in transposed and not found.grouped:
            tensors[source] = replace(found, shape=found.shape[::-1], transposed=True)
        else:
            tensors[source] = found
    if missing:
        raise ModelError(
            f"the checkpoint lacks {len(missing)} of the model's {len(graph.weights)} tensors",
            lines="\n".join(f"    {m}" for m in missing[:8]) + ("\n    …" if len(missing) > 8 else ""),
            hint=f"it has {len(index.tensors)} tensors, such as {', '.join(list(index.tensors)[:3])}",
        )
    return WeightIndex(index.files, tensors)


def _find(source: str, index: WeightIndex, prefix: str, others: Iterable[str]) -> Tensor | None:
    for name in (source, *others):
        for spelling in _spellings(name, prefix):
            if spelling in index.tensors:
                return index.tensors[spelling]
    return None


def _spellings(name: str, prefix: str) -> Iterable[str]:
    """How a checkpoint may write a name: as the model does, as its inner part, or as part of a larger one."""
    inner = name.removeprefix(f"{prefix}.")
    yield name
    yield inner
    yield f"{prefix}.{inner}"
    yield f"language_model.{name}"
    yield f"{prefix}.language_model.{inner}"


def bind(graph: Graph, index: WeightIndex, constants: Mapping[str, NDArray[np.generic]]) -> Graph:
    """Sets the layout of each matrix that has none to its tensor's own; checks that all are there and fit.

    Raises:
        ModelError: a tensor or constant is missing or has another shape, with both shapes.
        UnsupportedModel: a tensor's format isn't one flashrt reads.
    """
    return replace(graph, weights=tuple(_bound(w, index, constants) for w in graph.weights))


def _bound(weight: Weight, index: WeightIndex, constants: Mapping[str, NDArray[np.generic]]) -> Weight:
    shapes, layouts = [], []
    for source in weight.sources:
        tensor = index.tensors.get(source)
        if tensor is not None and not tensor.grouped and tensor.format not in FORMATS:
            raise UnsupportedModel(
                f"tensor {source} is stored as {tensor.format}", hint=f"known formats: {', '.join(FORMATS)}"
            )
        if tensor is None and source not in constants:
            raise ModelError(f"tensor {source}, which the model's {weight.name} is made from, is missing")
        shapes.append(constants[source].shape if tensor is None else tensor.shape)
        if tensor is not None and len(weight.type.shape) == 2:
            layouts.append(native_layout(tensor.format))
    _check(weight, shapes)
    return replace(weight, layout=weight.layout or _common(layouts))


def _common(layouts: Sequence[str]) -> str:
    """One layout for parts that are stored in different ones: what all can be rounded to."""
    if len(set(layouts)) == 1:
        return layouts[0]
    return Q8F.name if any(LAYOUTS[x].bits for x in layouts) else "f32"


def _check(weight: Weight, shapes: Sequence[tuple[int, ...]]) -> None:
    """Sources are joined along the first axis; together they must have the weight's shape."""
    joined = shapes[0]
    if len(shapes) > 1:
        joined = (sum(s[0] for s in shapes), *joined[1:])
    if joined != weight.type.shape or len({s[1:] for s in shapes}) > 1:
        found, wanted = " + ".join(str(list(s)) for s in shapes), list(weight.type.shape)
        raise ModelError(
            f"tensor {', '.join(weight.sources)} has shape {found}, the model wants {wanted}",
            hint="the weights belong to another model, or its configuration was changed",
        )
