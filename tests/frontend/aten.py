"""Runs a raw graph with torch's own operators: what the tests compare an import against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flashrt.frontend.gate import _attend
from flashrt.frontend.imported import Imported
from flashrt.ir.logical import Node
from flashrt.ir.types import Expr, evaluate, size
from flashrt.weights import formats

Values = dict[str, torch.Tensor]
_DTYPES = {"f32": torch.float32, "i32": torch.int32, "i64": torch.int64, "bool": torch.bool}


def read_weight(imported: Imported, source: str) -> torch.Tensor:
    """One tensor by its place in its file (or a constant), as f32 in the shape the graph means."""
    if source in imported.constants:
        return torch.from_numpy(np.array(imported.constants[source]))
    tensor = imported.weights.tensors[source]
    path = imported.weights.files[tensor.file].path
    data = np.fromfile(path, np.uint8, count=tensor.bytes, offset=tensor.offset)
    values = formats.to_f32(formats.find(tensor.format), data[None]).reshape(-1)
    if tensor.transposed:
        return torch.from_numpy(values.reshape(tensor.shape[::-1]).T.copy())
    return torch.from_numpy(values.reshape(tensor.shape))


def run(imported: Imported, inputs: Mapping[str, torch.Tensor]) -> Values:
    """Every value of the graph, by name. The step is one sequence from its start; nothing is sampled."""
    graph = imported.graph
    env: dict[str, int] = {}
    for declared in graph.inputs:
        if declared.name in inputs:
            for dim, extent in zip(declared.type.shape, inputs[declared.name].shape, strict=True):
                if isinstance(dim, Expr):
                    env[str(dim)] = extent
    values: Values = {f"%{k}": v for k, v in inputs.items()}
    values |= {f"@{w.name}": read_weight(imported, w.sources[0]) for w in graph.weights}
    for node in graph.nodes:
        if node.op != "sample":
            got = _run(node, [values[i] for i in node.inputs if i in values], env)
            shape = tuple(size(d, env) for d in node.type.shape)
            assert tuple(got.shape) == shape, f"{node.name} is {tuple(got.shape)}, its type says {shape}"
            values[f"%{node.name}"] = got
    return {k[1:]: v for k, v in values.items()}


def _concrete(value: Any, env: Mapping[str, int]) -> Any:
    if isinstance(value, tuple):
        return [_concrete(v, env) for v in value]
    return evaluate(value, env) if isinstance(value, Expr) else value


def _run(node: Node, x: list[torch.Tensor], env: Mapping[str, int]) -> torch.Tensor:
    a = {k: _concrete(v, env) for k, v in node.attrs}
    match node.op.removeprefix("aten."):
        case "flashrt.attention":
            sinks = x[6] if a["sinks"] else None
            rest = a["scale"], a["window"], a["softcap"], a["causal"], sinks
            return _attend(x[0], x[1], x[2], 0, *rest)
        case "view":
            return x[0].reshape([size(d, env) for d in node.type.shape])
        case "to":
            return x[0].to(_DTYPES[a["dtype"]])
        case "cat":
            return torch.cat(x, a["dim"])
        case "index":
            return x[0][tuple(slice(None) if i is None else x[i] for i in a["indices"])]
        case "layer_norm":
            return torch.layer_norm(x[0], a["normalized_shape"], x[1], x[2], a["eps"])
        case name:
            result = getattr(torch.ops.aten, name)(*x, **{k: v for k, v in a.items() if k != "result"})
            return result[a["result"]] if "result" in a else result  # type: ignore[no-any-return]
