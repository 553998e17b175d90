"""An ONNX file (`.onnx`) → graph and weight index, by way of torch.export.

A file is read from opset 13 on; one of an older opset where its operators are still defined so. Operators and
attributes that aren't known are refused by name: `onnx_module` says how. Names of inputs and outputs stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import torch
from onnx import numpy_helper

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend import trace
from flashrt.frontend.bind import bind
from flashrt.frontend.copies import copied
from flashrt.frontend.export import LARGEST, quiet, values_of, with_symbols
from flashrt.frontend.imported import Imported
from flashrt.frontend.onnx_module import OPERATORS, OnnxModule, Part, Step, as_path
from flashrt.frontend.onnx_shape import DTYPES
from flashrt.ir.logical import Graph, Node
from flashrt.ir.types import SYMBOL, Input
from flashrt.weights.index import WeightIndex

OLDEST, NEWEST = 13, 28  # opsets whose definitions the operators here follow
TRIED = (3, 16, 64, 512)  # sizes that a model is traced with where it leaves them open
_AS_ATTRIBUTE = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def load_onnx(path: str | Path, *, largest: int = LARGEST) -> Imported:
    """Reads an ONNX file. Its inputs and outputs may be any tensors.

    largest: bound for sizes that the model leaves open.

    Raises:
        ModelError: the file isn't an ONNX model, or is damaged.
        UnsupportedModel: the model has something flashrt can't run; the message names it.
    """
    path = Path(path)
    model = _read(path)
    opset = _opset(model)
    model = _inlined(model, opset)
    part = _part(model.graph, model, opset, path.parent)
    inputs = [i for i in model.graph.input if i.name not in part.weights]
    module = OnnxModule(part, [i.name for i in inputs], opset).eval()
    program = _exported(module, inputs, largest)
    outputs = [o.name for o in model.graph.output]
    sizes = _sizes(program, inputs)
    graph = trace.import_program(
        program, path.stem, symbols=(), torch_names=sizes, prefixes=("nodes", "weights"), outputs=outputs
    )
    graph = _renamed(with_symbols(graph, program, largest, sizes), [i.name for i in inputs])
    _refuse_empty(graph)
    graph = copied(graph)
    constants = {s: values_of(program, s) for w in graph.weights for s in w.sources}
    index = WeightIndex((), {})
    return Imported(bind(graph, index, constants), index, constants)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"{path} is missing")
    try:
        model = onnx.load(path)
        onnx.checker.check_model(model)
    except FileNotFoundError as error:
        raise ModelError(f"{path} keeps weights in a file that isn't there: {error}") from None
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{path} breaks a rule of ONNX: {_first_line(error)}") from None
    except Exception as error:  # protobuf raises its own
        raise ModelError(f"{path} isn't an ONNX model, or it is damaged: {_first_line(error)}") from None
    return model


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _opset(model: Any) -> int:
    """The version of ONNX's own operators. Raises UnsupportedModel when it is newer than what is known."""
    version = next((int(o.version) for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if version > NEWEST:
        raise UnsupportedModel(
            f"the model uses opset {version} of ONNX", hint=f"export it with one of {OLDEST} to {NEWEST}"
        )
    return version


def _inlined(model: Any, opset: int) -> Any:
    """Functions of the model, and operators that aren't known but are defined by known ones, written out."""
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    wanted = {
        (node.domain, node.op_type)
        for node in _nodes(model.graph)
        if node.op_type not in OPERATORS and _has_body(node, opset)
    }
    if not wanted:
        return model
    try:
        return onnx.inliner.inline_selected_functions(model, sorted(wanted), inline_schema_functions=True)
    except RuntimeError:  # some need types that the model doesn't state: the operator will be refused
        return model


def _nodes(graph: Any) -> Iterable[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g)


def _schema(node: Any, opset: int) -> Any:
    try:
        return onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def _has_body(node: Any, opset: int) -> bool:
    schema = _schema(node, opset) if node.domain in ("", "ai.onnx") else None
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def _refuse_empty(graph: Graph) -> None:
    """Raises UnsupportedModel for values without elements."""
    types = [(i.name, i.type) for i in graph.inputs] + [(n.name, n.type) for n in graph.nodes]
    if empty := [f"{name} {kind}" for name, kind in types if 0 in kind.shape]:
        raise UnsupportedModel(f"{graph.name} has values without elements: {empty[0]}")


# ---- from ONNX's graph to ours -----------------------------------------------------------
def _part(graph: Any, model: Any, opset: int, folder: Path) -> Part:
    weights = {t.name: _array(t, folder) for t in graph.initializer}
    if graph.sparse_initializer:
        raise UnsupportedModel("the model has sparse weights")
    taken: dict[str, int] = {}
    steps = [_step(node, model, opset, folder, taken) for node in graph.node]
    constants = {s.outputs[0]: _constant(s) for s in steps if s.op == "Constant"}
    kept = tuple(s for s in steps if s.op != "Constant")
    return Part(kept, weights | constants, tuple(o.name for o in graph.output))


def _constant(step: Step) -> Any:
    if len(step.attrs) != 1:
        raise step.refuse("it has no value")
    ((name, value),) = step.attrs.items()
    if name == "value" and isinstance(value, np.ndarray):
        return value
    if name not in _AS_ATTRIBUTE:
        raise step.refuse(f"its value is a {name.removeprefix('value_')}")
    return np.asarray(value, _AS_ATTRIBUTE[name])


def _step(node: Any, model: Any, opset: int, folder: Path, taken: dict[str, int]) -> Step:
    path = as_path(node.name or next((o for o in node.output if o), node.op_type))
    taken[path] = taken.get(path, 0) + 1
    if taken[path] > 1:
        path += f"_{taken[path]}"
    step = Step(node.op_type, tuple(node.input), tuple(node.output), {}, path)
    if node.domain not in ("", "ai.onnx"):
        raise step.refuse(f"operators of {node.domain} aren't supported")
    schema = _schema(node, opset)
    if opset < OLDEST and (schema is None or schema.since_version != _schema(node, OLDEST).since_version):
        raise step.refuse(
            f"opset {opset} defines it differently from {OLDEST}",
            "convert the file: onnx.version_converter.convert_version(model, 17)",
        )
    branches = {a.name: _part(a.g, model, opset, folder) for a in node.attribute if a.type == a.GRAPH}
    attrs = {a.name: _attribute(step, a, folder) for a in node.attribute if a.type != a.GRAPH}
    return replace(step, attrs=attrs, branches=branches)


def _attribute(step: Step, attribute: Any, folder: Path) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.ref_attr_name:
        raise step.refuse(f"its attribute {attribute.name} refers to one of a function")
    if isinstance(value, onnx.TensorProto):
        return _array(value, folder)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, int | float):
        return value
    try:
        return tuple(v.decode() if isinstance(v, bytes) else v + 0 for v in value)
    except TypeError:
        raise step.refuse(f"its attribute {attribute.name} is a {type(value).__name__}") from None


def _array(tensor: Any, folder: Path) -> Any:
    _dtype(tensor.data_type, tensor.name)
    return numpy_helper.to_array(tensor, str(folder))


def _dtype(number: int, name: str) -> torch.dtype:
    if number not in DTYPES:
        called = onnx.TensorProto.DataType.Name(number)
        raise UnsupportedModel(
            f"{name} holds values of type {called}",
            hint="known: FLOAT, FLOAT16, BFLOAT16, DOUBLE, INT8 to INT64, UINT8, BOOL",
        )
    return DTYPES[number]


# ---- tracing -------------------------------------------------------------------------------
def _exported(module: OnnxModule, inputs: Any, largest: int) -> Any:
    """The traced program. Sizes that are left open are tried until one fits the model."""
    shapes = {i.name: _shape(i) for i in inputs}
    names = list(dict.fromkeys(d for shape in shapes.values() for d in shape if isinstance(d, str)))
    error: Exception | None = None
    for tried in [n for n in TRIED if n + 2 * len(names) <= largest] if names else (0,):
        example = {name: tried + 2 * k for k, name in enumerate(names)}
        try:
            return _traced(module, inputs, shapes, example, largest)
        except UnsupportedModel:
            raise
        except Exception as raised:  # torch raises anything
            error = error or raised
    assert error is not None
    raise UnsupportedModel(
        f"the model can't be traced: {type(error).__name__}: {_first_line(error)}",
        hint=f"give its open sizes ({', '.join(names)}) numbers: onnx.tools.update_model_dims"
        if names
        else "",
    ) from error


def _shape(value: Any) -> list[int | str]:
    """Numbers, and names of sizes that are left open."""
    kind = value.type
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        raise UnsupportedModel(f"the input {value.name} isn't a tensor with a known number of axes")
    dims = kind.tensor_type.shape.dim
    return [
        d.dim_value if d.HasField("dim_value") else d.dim_param or f"{value.name}_{i}"
        for i, d in enumerate(dims)
    ]


def _traced(
    module: OnnxModule,
    inputs: Any,
    shapes: Mapping[str, list[int | str]],
    example: Mapping[str, int],
    largest: int,
) -> Any:
    args = []
    for value in inputs:
        kind = _dtype(value.type.tensor_type.elem_type, value.name)
        shape = [example[d] if isinstance(d, str) else d for d in shapes[value.name]]
        args.append(torch.zeros(shape, dtype=kind))
    free = {d: torch.export.Dim(f"d{k}", min=1, max=largest) for k, d in enumerate(example)}
    auto = dict.fromkeys(example, torch.export.Dim.AUTO(min=1, max=largest))
    try:
        return _export(module, args, shapes.values(), free)
    except torch._dynamo.exc.UserError:  # sizes that depend on each other, or lie in a narrower range
        return _export(module, args, shapes.values(), auto)


def _export(
    module: OnnxModule, args: list[torch.Tensor], shapes: Iterable[Any], sizes: Mapping[str, Any]
) -> Any:
    dynamic = tuple({i: sizes[d] for i, d in enumerate(s) if isinstance(d, str)} for s in shapes)
    with torch.no_grad(), quiet():
        return torch.export.export(
            module, tuple(args), dynamic_shapes={"given": dynamic} if args else None, strict=False
        )


def _sizes(program: Any, inputs: Any) -> dict[str, str]:
    """torch's symbol → the name of the size in the file, where it is one that a graph may have."""
    found: dict[str, str] = {}
    given = [
        n
        for n in program.graph.nodes
        if n.op == "placeholder" and n.name in program.graph_signature.user_inputs
    ]
    for node, value in zip(given, inputs, strict=True):
        for size, name in zip(node.meta["val"].shape, _shape(value), strict=True):
            if isinstance(size, torch.SymInt) and isinstance(name, str) and size.node.expr.is_Symbol:
                found.setdefault(str(size.node.expr), re.sub(r"\W", "_", name))
    plain = len(set(found.values())) == len(found) and all(SYMBOL.match(n) for n in found.values())
    return found if plain else {}


def _renamed(graph: Graph, names: list[str]) -> Graph:
    """The graph with its inputs called as in the file."""
    given = {f"%{i.name}": f"%{n}" for i, n in zip(graph.inputs, names, strict=True)}
    if any(f"%{n.name}" in given.values() for n in graph.nodes):
        taken = {f"%{n.name}": f"%{n.name}.value" for n in graph.nodes if f"%{n.name}" in given.values()}
        given = {**taken, **given}

    def named(node: Node) -> Node:
        name = given.get(f"%{node.name}", f"%{node.name}")[1:]
        return replace(node, name=name, inputs=tuple(given.get(i, i) for i in node.inputs))

    return replace(
        graph,
        inputs=tuple(Input(n, i.type) for i, n in zip(graph.inputs, names, strict=True)),
        nodes=tuple(map(named, graph.nodes)),
        outputs=tuple(replace(o, value=given.get(f"%{o.value}", f"%{o.value}")[1:]) for o in graph.outputs),
    )
