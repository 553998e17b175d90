"""An ONNX graph as a torch module, which torch.export can trace.

Each operator is a function of `onnx_ops` or `onnx_nn`, and its signature is what it knows: positional
parameters are inputs, keyword-only ones attributes with ONNX's defaults. What isn't in the signature is
refused by name. The annotation says what an input has to be: `Tensor`; `Known` (a value that is known while
the graph is read: sizes, axes); or `Any`, either of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from flashrt.errors import UnsupportedModel
from flashrt.frontend import onnx_known, onnx_resize, onnx_shape
from flashrt.frontend.onnx_known import FOLDS, Known, settled
from flashrt.frontend.onnx_nn import Flipped
from flashrt.frontend.onnx_ops import OPS

OPERATORS: Mapping[str, Callable[..., Any]] = OPS
ROOMS = (onnx_resize, onnx_shape)  # importing them enters their operators


@dataclass(frozen=True, slots=True)
class Step:
    """One node. inputs: names, "" for one that is left out. path: its name as a path of modules.

    branches: the subgraphs of an `If`, by attribute.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    path: str
    branches: Mapping[str, Part] = field(default_factory=dict)

    def refuse(self, why: str, hint: str = "") -> UnsupportedModel:
        return UnsupportedModel(f"node {self.path} ({self.op}): {why}", hint=hint)


@dataclass(frozen=True, slots=True)
class Part:
    """A graph or subgraph. weights: its initialisers."""

    steps: tuple[Step, ...]
    weights: Mapping[str, Known]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    """A value: known, a tensor, or a small weight, which is both."""

    known: Known | None = None
    tensor: torch.Tensor | None = None
    transposed: torch.Tensor | None = None


class _Operator(torch.nn.Module):
    """A module for each node, so that what is traced has its name."""

    def forward(self, function: Callable[..., Any], *args: Any, **attrs: Any) -> Any:
        return function(*args, **attrs)


class OnnxModule(torch.nn.Module):
    """forward(*inputs) → outputs, in the order of the graph.

    Raises:
        UnsupportedModel: an operator, attribute or input isn't known; the message names it.
    """

    def __init__(self, graph: Part, inputs: Sequence[str], opset: int) -> None:
        super().__init__()
        self.graph, self.inputs, self.opset = graph, tuple(inputs), opset
        self.nodes, self.weights = torch.nn.Module(), torch.nn.Module()
        self._held: dict[str, _Held] = {}
        self._add(graph)

    def _add(self, part: Part) -> None:
        for step in part.steps:
            _inside(self.nodes, step.path)
            for branch in step.branches.values():
                self._add(branch)
        flipped = _flipped(part)
        for name, value in part.weights.items():
            self._held[name] = self._weight(name, value, name in flipped)

    def _weight(self, name: str, value: Known, flipped: bool) -> _Held:
        small = value.ndim <= 1 and value.size <= onnx_known.MOST and value.dtype.kind in "fiub"
        path = as_path(name)
        folder, _, last = path.rpartition(".")
        module = _inside(self.weights, folder) if folder else self.weights
        tensor = torch_of(value)
        if hasattr(module, last):
            last += "_"
        module.register_buffer(last, tensor.t().contiguous() if flipped else tensor)
        stored = getattr(module, last)
        known = value if small else None
        return _Held(known, None, stored) if flipped else _Held(known, stored)

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        env = dict(self._held)
        env |= {name: _Held(tensor=x) for name, x in zip(self.inputs, given, strict=True)}
        return tuple(_tensor(x) for x in self._run(self.graph, env))

    def _run(self, part: Part, env: dict[str, _Held]) -> list[_Held]:
        for step in part.steps:
            results = self._branch(step, env) if step.branches else self._call(step, env)
            # a trailing output that nobody asked for may be left out, one that is named may not
            if missing := [name for name in step.outputs[len(results) :] if name]:
                raise step.refuse(
                    f"its output {step.outputs.index(missing[0]) + 1} ({missing[0]}) isn't computed"
                )
            env.update(zip(step.outputs, results, strict=False))
        return [env[name] for name in part.outputs]

    def _branch(self, step: Step, env: dict[str, _Held]) -> list[_Held]:
        """An `If` whose condition is known."""
        condition = env[step.inputs[0]].known if step.op == "If" else None
        if condition is None:
            why = "its condition depends on data" if step.op == "If" else "loops aren't supported"
            raise step.refuse(why, "fix what it depends on, or export the model without control flow")
        chosen = step.branches["then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"]
        return self._run(chosen, dict(env))

    def _call(self, step: Step, env: Mapping[str, _Held]) -> list[_Held]:
        args = [env[name] if name else None for name in step.inputs]
        folded = _folded(step, args)
        if folded is not None:
            return [_Held(folded)]
        function = OPERATORS.get(step.op)
        if function is None:
            raise step.refuse("the operator isn't supported", "flashrt's docs/networks.md tells which aren't")
        values, attrs = _arguments(step, function, args, self.opset)
        module = self.nodes.get_submodule(step.path)
        try:
            got = module(function, *values, **attrs)
        except UnsupportedModel as error:
            raise step.refuse(error.what, error.hint) from None
        results = got if isinstance(got, tuple) else (got,)
        return [_Held(settled(r)) if isinstance(r, np.ndarray) else _Held(tensor=r) for r in results]


# ---- names ---------------------------------------------------------------------------
def as_path(name: str) -> str:
    """`/encoder/layer.0/MatMul` → `encoder.layer.0.MatMul`."""
    parts = [re.sub(r"\W", "_", p) for p in re.split(r"[/.:]+", name)]
    return ".".join(p for p in parts if p) or "_"


def _inside(root: torch.nn.Module, path: str) -> torch.nn.Module:
    """The module at a path, made where it isn't there."""
    for part in path.split("."):
        if part not in root._modules:
            root.add_module(part, _Operator())
        root = root._modules[part]
    return root


def _flipped(part: Part) -> set[str]:
    """Weights that are only ever the right side of a product: they are kept as [out, in], like a linear's."""
    uses: dict[str, set[bool]] = {name: set() for name in part.outputs}
    for step in part.steps:
        for place, name in enumerate(step.inputs):
            product = step.op == "MatMul" or (step.op == "Gemm" and not step.attrs.get("transB"))
            uses.setdefault(name, set()).add(product and place == 1 and not step.branches)
    inner = {n for s in part.steps for b in s.branches.values() for t in b.steps for n in t.inputs}
    return {
        name
        for name, value in part.weights.items()
        if uses.get(name) == {True} and name not in inner and value.ndim == 2 and value.dtype.kind == "f"
    }


# ---- arguments -------------------------------------------------------------------------
def torch_of(value: Known) -> torch.Tensor:
    """An array as a tensor of its dtype; sizes that are open become a tensor of them."""
    if value.dtype == object:
        flat = [torch.scalar_tensor(v, dtype=torch.int64) for v in value.flat]
        return torch.stack(flat).reshape(value.shape)
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(value))


def _tensor(held: _Held) -> torch.Tensor:
    if held.tensor is not None:
        return held.tensor
    if held.transposed is not None:
        return held.transposed.t()
    assert held.known is not None
    return torch_of(held.known)


def _folded(step: Step, args: Sequence[_Held | None]) -> Known | None:
    """The value of a node whose inputs are known; None where it can't be had so."""
    function = FOLDS.get(step.op)
    if function is None:
        return None
    given = [None if a is None else a.known for a in args]
    if any(a is not None and a.known is None for a in args):
        return None
    attrs = {"op": step.op} if "op" in _kinds(function) else {}
    if not isinstance(function, np.ufunc) and step.attrs.keys() - _kinds(function).keys():
        return None
    try:
        with np.errstate(all="ignore"):
            got = function(*given, **step.attrs, **attrs)
    except (TypeError, ValueError, IndexError):  # no shape arithmetic: the operator itself says what is wrong
        return None
    return None if got is NotImplemented else settled(got)


@cache
def _kinds(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # numpy's own functions
        return {}


def _arguments(
    step: Step, function: Callable[..., Any], args: Sequence[_Held | None], opset: int
) -> tuple[list[Any], dict[str, Any]]:
    parameters = _kinds(function)
    added = {"op": step.op, "opset": opset, "count": len(step.outputs)}
    known = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY and name not in added]
    if unknown := sorted(step.attrs.keys() - set(known)):
        listed = ", ".join(known) or "none"
        raise step.refuse(f"the attribute {unknown[0]} isn't supported", f"supported attributes: {listed}")
    places = [p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    if places and places[-1].kind is places[-1].VAR_POSITIONAL:
        places += [places[-1]] * len(args)
    values = []
    for i, held in enumerate(args):
        if held is not None and i >= len(places):
            raise step.refuse(f"its input {i + 1} ({step.inputs[i]}) isn't supported")
        if i < len(places):
            values.append(_argument(step, i, places[i], held))
    return values, {**step.attrs, **{k: v for k, v in added.items() if k in parameters}}


def _argument(step: Step, place: int, parameter: inspect.Parameter, held: _Held | None) -> Any:
    if held is None:
        return None
    if parameter.annotation.startswith("Known"):
        if held.known is None:
            raise step.refuse(
                f"its {parameter.name} ({step.inputs[place]}) depends on data",
                "sizes and axes have to be known when the model is read",
            )
        return held.known
    if parameter.annotation == "Any":
        return _tensor(held) if held.known is None else held.known
    if "Flipped" in parameter.annotation and held.transposed is not None:
        return Flipped(held.transposed)
    return _tensor(held)
