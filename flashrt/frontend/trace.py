"""A torch.export program → a logical graph of `aten.*` nodes.

Conventions, on which the pass `recognise` relies:

- A node's op is "aten.<name>" without overload; opaque operations of ours are "flashrt.<name>".
- Its inputs are the tensor arguments in the order of the schema. A list of tensors stands in place; when it
  has gaps (`x[:, rows]`), the attribute of its name gives, for each element, null or its place among the
  inputs. A tensor argument that is None is the attribute `<argument>=null`; one that is a number is an
  attribute too (`other=2.0`).
- Every other argument is an attribute under its name in the schema, defaults included, except device,
  layout, memory format and pinning. Dimensions count from 0; bounds of a slice are sizes.
- Casts are `aten.to` with `dtype`; reshapes are `aten.view` without attributes (the node's type says it).
- `split`, `chunk` and `unbind` become `aten.slice` and `aten.select`; result i of any other operation with
  several results is a node of its own with the attribute `result=i`.
- What changes nothing (dropout, contiguous, a cast to the same dtype, a whole slice, …) is left out, and so
  is what nothing uses. Arithmetic on sizes is folded into sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashrt.errors import UnsupportedModel
from flashrt.frontend import names
from flashrt.frontend.sizes import read_size
from flashrt.ir.logical import Graph, Node
from flashrt.ir.types import Attrs, Dim, Input, Output, Symbol, TensorType, Value, Weight, attrs

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    # half precision is a way to store and to compute, which later passes decide; a graph means f32
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f32", torch.bfloat16: "f32",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip

_SAME = {
    "alias",
    "detach",
    "detach_",
    "contiguous",
    "clone",
    "lift_fresh",
    "lift_fresh_copy",
    "dropout",
    "feature_dropout",
}
_CASTS = {"to", "_to_copy", "type_as"}
_VIEWS = {
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias", "view_copy", "view_as",
    "reshape_as",
}  # fmt: skip
_IF_SAME_SHAPE = {"aten.view", "aten.expand", "aten.slice", "aten.squeeze"}
_PIECES = {"split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk"}
_NO_ATTRIBUTE = (torch.device, torch.layout, torch.memory_format)
_DROPPED = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "requires_grad", "implicit"}


@dataclass(slots=True)
class _Draft:
    """A node before it has a name. An input is the draft's number, or a `%input` or `@weight`."""

    op: str
    inputs: tuple[int | str, ...]
    type: TensorType
    attrs: Attrs
    path: str
    origin: str


@dataclass(slots=True)
class _Reader:
    """What is known while the program is read: bound maps an FX node to a draft, input or weight."""

    symbols: Mapping[str, str]
    prefixes: Sequence[str]
    drafts: list[_Draft] = field(default_factory=list)
    bound: dict[Any, int | str] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    weights: dict[str, Weight] = field(default_factory=dict)

    # ---- values
    def type_of(self, value: torch.Tensor) -> TensorType:
        return TensorType(_dtype(value.dtype), tuple(self.size(s) for s in value.shape))

    def size(self, value: Any) -> Dim:
        return read_size(value, self.symbols)

    def value(self, arg: Any) -> Value:
        """A non-tensor argument as an attribute value."""
        if isinstance(arg, torch.fx.Node):
            arg = arg.meta["val"]
        if isinstance(arg, torch.dtype):
            return _dtype(arg)
        if isinstance(arg, torch.SymInt):
            got = self.size(arg)
            assert not isinstance(got, float)
            return got
        if isinstance(arg, list | tuple):
            return tuple(self.value(a) for a in arg)
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        raise UnsupportedModel(f"a traced operation has the argument {arg!r}, which can't be written down")

    # ---- arguments
    def split_arguments(self, node: torch.fx.Node) -> tuple[tuple[int | str, ...], dict[str, Value]]:
        """The tensor arguments and the others of one call."""
        tensors: list[int | str] = []
        others: dict[str, Value] = {}
        given = dict(node.kwargs)
        schema = node.target._schema  # type: ignore[union-attr]
        for place, argument in enumerate(schema.arguments):
            name = argument.name
            arg = node.args[place] if place < len(node.args) else given.get(name, _default(argument))
            if name in _DROPPED or isinstance(arg, _NO_ATTRIBUTE):
                continue
            if _is_tensor(arg):
                tensors.append(self.bound[arg])
            elif isinstance(arg, list | tuple) and any(_is_tensor(a) for a in arg):
                first = len(tensors)
                present = [a for a in arg if a is not None]
                tensors += [self.bound[a] for a in present]
                if len(present) < len(arg):
                    places = iter(range(first, len(tensors)))
                    others[name] = tuple(None if a is None else next(places) for a in arg)
            else:
                others[name] = self.value(arg)
        return tuple(tensors), others

    # ---- nodes
    def read(self, node: torch.fx.Node) -> None:
        """Adds the drafts of one call. An error names the module."""
        try:
            self.read_one(node)
        except UnsupportedModel as error:
            place = names.strip(names.module_path(node.meta.get("nn_module_stack")), self.prefixes)
            where = f" (in {place})" if place else ""
            raise UnsupportedModel(f"{error.what}{where}", lines=error.lines, hint=error.hint) from error

    def read_one(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            self.read_result(node)
        elif isinstance(value, torch.Tensor):
            self.read_call(node, value)
        # anything else is arithmetic on sizes, an assertion, or has its results picked by getitem

    def read_call(self, node: torch.fx.Node, value: torch.Tensor) -> None:
        op = _name(node)
        kind = self.type_of(value)
        source = node.args[0] if node.args else None
        if op in _SAME and _is_tensor(source):
            _refuse_training(op, node)
            self.bound[node] = self.bound[source]
            return
        inputs, others = self.split_arguments(node)
        if op in _CASTS:
            if _dtype(_type(source).dtype) == kind.dtype:
                self.bound[node] = self.bound[source]
                return
            op, inputs, others = "to", inputs[:1], {"dtype": kind.dtype}
        elif op in _VIEWS:
            op, inputs, others = "view", inputs[:1], {}
        elif op == "expand_as":
            op, inputs = "expand", inputs[:1]
        space = node.target._schema.name.split("::")[0]  # type: ignore[union-attr]
        op = f"{space}.{op}"
        self.normalise(op, node, kind, others)
        whole = op in _IF_SAME_SHAPE and others.get("step", 1) == 1
        if whole and _is_tensor(source) and self.type_of(_type(source)) == kind:
            self.bound[node] = self.bound[source]
            return
        self.add(node, op, inputs, kind, others)

    def normalise(self, op: str, node: torch.fx.Node, kind: TensorType, others: dict[str, Value]) -> None:
        """Counts dimensions from 0 and writes out the bounds of slices."""
        source = node.args[0] if node.args else None
        if op == "aten.expand":
            others["size"] = kind.shape  # type: ignore[assignment]
        if isinstance(source, list | tuple):
            source = source[0] if source else None  # zeros([]) has an empty shape there
        if not _is_tensor(source):
            return
        shape = self.type_of(_type(source)).shape
        rank = len(kind.shape) if op in ("aten.unsqueeze", "aten.stack") else len(shape)
        for key in ("dim", "dim0", "dim1", "dims"):
            if key in others:
                others[key] = _from_zero(others[key], rank)
        if op == "aten.slice":
            dim = others["dim"]
            assert isinstance(dim, int)
            start = others["start"] or 0
            if isinstance(start, int) and start < 0:
                start = start + shape[dim]  # type: ignore[assignment]
            others["start"] = start
            if others["step"] == 1:
                others["end"] = start + kind.shape[dim]  # type: ignore[operator]

    def read_result(self, node: torch.fx.Node) -> None:
        """One result of an operation with several."""
        call, index = node.args
        assert isinstance(call, torch.fx.Node) and isinstance(index, int)
        op = _name(call)
        kind = self.type_of(node.meta["val"])
        inputs, others = self.split_arguments(call)
        self.normalise(f"aten.{op}", call, kind, others)
        dim = others.get("dim", 0)
        if op == "unbind":
            self.add(node, "aten.select", inputs, kind, {"dim": dim, "index": index})
        elif op in _PIECES:
            assert isinstance(dim, int)
            pieces = call.meta["val"]
            start = sum((self.size(p.shape[dim]) for p in pieces[:index]), 0)
            bounds: dict[str, Any] = {"dim": dim, "start": start, "end": start + kind.shape[dim], "step": 1}
            self.add(node, "aten.slice", inputs, kind, bounds)
        else:
            self.add(node, f"aten.{op}", inputs, kind, {**others, "result": index})

    def add(
        self,
        node: torch.fx.Node,
        op: str,
        inputs: tuple[int | str, ...],
        kind: TensorType,
        others: dict[str, Value],
    ) -> None:
        full = names.module_path(node.meta.get("nn_module_stack"))
        self.bound[node] = len(self.drafts)
        path = names.strip(full, self.prefixes)
        self.drafts.append(_Draft(op, inputs, kind, attrs(**others), path, f"{full} {_target(node)}".strip()))

    def read_weight(self, node: torch.fx.Node, fqn: str) -> None:
        """Declares a parameter, buffer or constant of the program."""
        name = names.strip(fqn, self.prefixes)
        if name in self.weights:
            name = fqn
        kind = self.type_of(node.meta["val"])
        self.weights[name] = Weight(name, kind, (fqn,), "" if len(kind.shape) == 2 else "f32")
        self.bound[node] = f"@{name}"


def _dtype(dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPE_NAMES)
        raise UnsupportedModel(f"the model computes with {dtype}", hint=f"known: {known}")
    return DTYPE_NAMES[dtype]


def _refuse_training(op: str, node: torch.fx.Node) -> None:
    """A dropout that is switched on isn't a copy."""
    if op in ("dropout", "feature_dropout") and node.args[2] is not False:
        raise UnsupportedModel("the program was exported in training mode", hint="call module.eval() first")


def _default(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else None


def _is_tensor(arg: object) -> bool:
    return isinstance(arg, torch.fx.Node) and isinstance(arg.meta.get("val"), torch.Tensor)


def _type(arg: Any) -> torch.Tensor:
    value = arg.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _name(node: torch.fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        raise UnsupportedModel(f"the traced program calls {node.target}, which isn't a tensor operation")
    return str(schema.name).split("::")[1]


def _target(node: torch.fx.Node) -> str:
    """The torch operation, as the origin of a node names it."""
    return str(node.args[0].target if node.target is operator.getitem else node.target)  # type: ignore[union-attr]


def _from_zero(dim: Value, rank: int) -> Value:
    if isinstance(dim, tuple):
        return tuple(_from_zero(d, rank) for d in dim)
    return dim + rank if isinstance(dim, int) and dim < 0 else dim


def functional(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without writes into its values. Raises UnsupportedModel when it changes its state."""
    calls = [n for n in program.graph.nodes if hasattr(n.target, "_schema")]
    if any(n.target._schema.is_mutable and _name(n) not in _SAME for n in calls):
        program = program.run_decompositions({})
    signature = program.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if changed:
        raise UnsupportedModel(
            f"the program changes {', '.join(changed[:3])} when it runs",
            hint="export the module in eval mode",
        )
    return program


def bindings(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Placeholder → name in the state dict or constants."""
    signature = program.graph_signature
    return {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }


def _live(drafts: Sequence[_Draft], outputs: Sequence[int | str]) -> list[int]:
    """Numbers of the drafts that an output needs, in order."""
    wanted = {o for o in outputs if isinstance(o, int)}
    for i in range(len(drafts) - 1, -1, -1):
        if i in wanted:
            wanted.update(a for a in drafts[i].inputs if isinstance(a, int))
    return sorted(wanted)


def import_program(
    program: torch.export.ExportedProgram,
    name: str,
    *,
    symbols: Sequence[Symbol],
    torch_names: Mapping[str, str] | None = None,
    prefixes: Sequence[str] = (),
    outputs: Sequence[str] | None = None,
) -> Graph:
    """The program's raw graph; the source of a weight is its name in the program's state dict or constants.

    symbols: those to declare. torch_names: torch's symbol (`s77`) → ours. prefixes: leading parts of module
    paths and parameter names to leave out, in order. outputs: their names; when None, `output`, or
    `output.0`, `output.1`, ….

    Raises:
        UnsupportedModel: something in the program has no form in a logical graph.
    """
    program = functional(program)
    reader = _Reader(torch_names or {}, prefixes)
    held = bindings(program)
    results: list[int | str] = []
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in held:
            reader.read_weight(node, held[node.name])
        elif node.op == "placeholder" and _is_tensor(node):
            reader.inputs.append(Input(node.name, reader.type_of(_type(node))))
            reader.bound[node] = f"%{node.name}"
        elif node.op == "call_function":
            reader.read(node)
        elif node.op == "output":
            results = [reader.bound[a] for a in node.args[0] if _is_tensor(a)]
    return _finish(reader, name, symbols, results, outputs)


def _finish(
    reader: _Reader,
    name: str,
    symbols: Sequence[Symbol],
    results: Sequence[int | str],
    outputs: Sequence[str] | None,
) -> Graph:
    live = _live(reader.drafts, results)
    kept = [reader.drafts[i] for i in live]
    found = names.name_nodes([(d.path, d.op.split(".")[1]) for d in kept], [i.name for i in reader.inputs])
    named = {i: f"%{n}" for i, n in zip(live, found, strict=True)}

    def refer(value: int | str) -> str:
        return named[value] if isinstance(value, int) else value

    nodes = tuple(
        Node(n, d.op, tuple(map(refer, d.inputs)), d.type, d.attrs, origin=d.origin)
        for n, d in zip(found, kept, strict=True)
    )
    read = [*(a for node in nodes for a in node.inputs), *map(refer, results)]
    used = dict.fromkeys(a[1:] for a in read if a[0] == "@")
    if outputs is None:
        outputs = ["output"] if len(results) == 1 else [f"output.{i}" for i in range(len(results))]
    weights = tuple(reader.weights[w] for w in used)
    returned = tuple(Output(o, refer(r).removeprefix("%")) for o, r in zip(outputs, results, strict=True))
    return Graph(name, tuple(symbols), tuple(reader.inputs), weights, (), nodes, returned)
