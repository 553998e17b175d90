"""Random weights and a ragged step for any language model's graph, and its outputs by the reference."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt.backends.reference.evaluate import evaluate_graph
from flashrt.ir import logical
from flashrt.ir.text import read_logical
from flashrt.ir.types import Weight

RAW = Path(__file__).parent.parent / "golden" / "raw"
Array = NDArray[Any]


def raw(name: str) -> logical.Graph:
    """A raw graph as the frontend makes it from a tiny configuration."""
    path = RAW / f"{name}.logical"
    return read_logical(path.read_text(encoding="utf-8"), path=str(path))


def values_of(graph: logical.Graph) -> dict[str, Array]:
    """Source → a random value of the shape that the graph's weights give it."""
    out: dict[str, Array] = {}
    for w in graph.weights:
        assert len(w.sources) == 1, w
        shape = tuple(int(d) for d in w.type.shape)  # type: ignore[arg-type]
        rng = np.random.default_rng(zlib.crc32(w.sources[0].encode()))
        value: Array = rng.standard_normal(shape).astype(np.float32)
        if w.name.endswith("inv_freq"):
            value = (100.0 ** -np.linspace(0, 1, shape[0], endpoint=False)).astype(np.float32)
        elif len(shape) == 2:
            value *= np.float32(1.4 / np.sqrt(shape[1]))
        elif "norm" in w.name and w.name.endswith("weight"):
            value = np.float32(1) + value * np.float32(0.1)
        out[w.sources[0]] = value
    return out


def step_inputs(graph: logical.Graph) -> dict[str, Array]:
    """Three sequences of 5, 1 and 3 new tokens, all from position 0, on shuffled pages; 4 rows of logits."""
    lengths = [5, 1, 3]
    t, n = sum(lengths), 4
    rng = np.random.default_rng(7)
    known: dict[str, Array] = {
        "ids": rng.integers(0, 100, t).astype(np.int32),
        "positions": np.concatenate([np.arange(x) for x in lengths]).astype(np.int32),
        "rows": np.array([4, 5, 8, 2], np.int32),
        "seq": np.repeat(np.arange(3), lengths).astype(np.int32),
        "pages": np.array([[3, 0], [1, 0], [2, 0]], np.int32),
        "temperature": np.zeros(n, np.float32),
        "top_k": np.zeros(n, np.int32),
        "top_p": np.ones(n, np.float32),
        "min_p": np.zeros(n, np.float32),
        "penalty": np.ones(n, np.float32),
        "seed": np.zeros(n, np.int64),
        "draw": np.zeros(n, np.int64),
        "history": np.full((n, 1), -1, np.int32),
    }
    return {i.name: known[i.name] for i in graph.inputs}


def part_of(whole: Array, weight: Weight) -> Array:
    """A weight's rows of the whole that it is a part of, turned where it is."""
    ranges = zip(weight.rows[::2], weight.rows[1::2], strict=True)
    part = np.concatenate([whole[a:b] for a, b in ranges])
    if not weight.turned:
        return part
    return np.concatenate([m.T for m in np.split(part, weight.turned)])


def outputs(
    graph: logical.Graph, values: dict[str, Array], inputs: dict[str, Array] | None = None
) -> dict[str, Array]:
    """The graph's outputs with weights made of `values`."""

    def weight(w: Weight) -> Array:
        whole = np.concatenate([values[s] for s in w.sources]) if len(w.sources) > 1 else values[w.sources[0]]
        return part_of(whole, w) if w.of else whole

    return evaluate_graph(graph, step_inputs(graph) if inputs is None else inputs, weight)
