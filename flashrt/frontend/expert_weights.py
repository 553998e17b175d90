"""Weights of experts: how a graph has them, and where a checkpoint does.

All experts of a layer are one weight: the rows of expert e stand behind those of expert e-1, so that one
expert is a range of rows. Of `gate_up` an expert's rows are its gate's, then those of `up`.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass, replace

from flashrt.ir.logical import Graph, Node
from flashrt.ir.types import Weight, attrs
from flashrt.weights.index import Tensor, WeightIndex

OP = "flashrt.moe"


# ---- graphs --------------------------------------------------------------------------
def flat_weights(graph: Graph) -> Graph:
    """Experts' weights as matrices: [E,N,K], or [E,K,N] where transposed, → [E*N,K]; biases [E,N] → [E*N]."""
    weights = {w.name: w for w in graph.weights}
    nodes = []
    for node in graph.nodes:
        if node.op == OP:
            transposed = bool(node.attr("transposed"))
            experts = weights[node.inputs[3][1:]].type.shape[0]
            for place, name in enumerate(node.inputs[3:]):
                weights[name[1:]] = _flat(weights[name[1:]], transposed and place < 2)
            assert isinstance(experts, int)
            node = replace(node, attrs=attrs(**dict(node.attrs), experts=experts))
        nodes.append(node)
    return replace(graph, weights=tuple(weights.values()), nodes=tuple(nodes))


def _flat(weight: Weight, transposed: bool) -> Weight:
    e, n, *k = weight.type.shape
    if transposed:
        n, k = k[0], [n]
    kind = weight.type.with_shape(e * n, *k)
    return replace(weight, type=kind, layout="" if k else "f32")


# ---- checkpoints ---------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Place:
    """Where a weight of experts is asked for. both: gate and up."""

    weight: Weight
    experts: int
    both: bool
    transposed: bool
    interleaved: bool


def arrange(graph: Graph, index: WeightIndex, prefix: str = "") -> tuple[Graph, WeightIndex]:
    """Graph and index with the sources of experts' weights as the checkpoint has them.

    It may hold all experts of a layer in one tensor (`experts.gate_up_proj`, or `gate_proj` and `up_proj`),
    or a tensor for each (`experts.3.gate_proj.weight`, Mixtral's `block_sparse_moe.experts.3.w1.weight`).
    What it lacks keeps its name, and `bind.select` names it. prefix: see there.
    """
    places = _places(graph)
    if not places:
        return graph, index
    sources = {s for w in graph.weights for s in w.sources}
    tensors = {_modern(name, prefix, sources): tensor for name, tensor in index.tensors.items()}
    weights = {w.name: w for w in graph.weights}
    for name, place in places.items():
        weights[name] = replace(place.weight, sources=_sources(place, tensors))
    return replace(graph, weights=tuple(weights.values())), WeightIndex(index.files, tensors)


# what checkpoints of Mixtral say, and what transformers' models do; the same of Granite and Aria
_MIXTRAL = (
    (".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."),
)  # fmt: skip
_JOINT = (
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
    ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    (".experts.fc1.weight", ".experts.gate_up_proj"), (".experts.fc2.weight", ".experts.down_proj"),
)  # fmt: skip
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.\w+\.weight\Z")


def _modern(name: str, prefix: str, sources: Set[str]) -> str:
    """A tensor's name as the model calls it, where it says so in other words."""
    if name in sources:
        return name
    if prefix and ".experts." in name:  # part of a larger model, or without the part that all names share
        inner = (
            name.removeprefix("language_model.").removeprefix(f"{prefix}.").removeprefix("language_model.")
        )
        name = f"{prefix}.{inner}"
    for old, new in _JOINT:
        if name.replace(old, new) in sources:
            return name.replace(old, new)
    renamed = name
    for old, new in _MIXTRAL:
        renamed = renamed.replace(old, new)
    joint = _EXPERT.match(renamed)
    known = renamed in sources or (joint is not None and f"{joint[1]}.gate_up_proj" in sources)
    return renamed if known else name


def _places(graph: Graph) -> dict[str, _Place]:
    weights = {f"@{w.name}": w for w in graph.weights}
    found = {}
    for node in (n for n in graph.nodes if n.op == OP):
        for place, name in enumerate(node.inputs[3:]):
            found[name[1:]] = _place(node, weights[name], place % 2 == 0, matrix=place < 2)
    return found


def _place(node: Node, weight: Weight, both: bool, *, matrix: bool) -> _Place:
    experts = node.attr("experts")
    assert isinstance(experts, int)
    transposed, interleaved = (bool(node.attr(k)) for k in ("transposed", "interleaved"))
    return _Place(weight, experts, both, matrix and transposed, both and interleaved)


def _sources(place: _Place, tensors: dict[str, Tensor]) -> tuple[str, ...]:
    """The names of a weight's tensors; those that are cut out of others are added to `tensors`."""
    (source,) = place.weight.sources
    module, _, last = source.rpartition(".")
    if source in tensors:
        return _cut(place, source, tensors) if place.transposed else _whole(place, source, tensors)
    if len(place.weight.type.shape) == 1:
        return (source,)  # of a bias, only the frontend of the file may know the parts
    parts = ("gate_proj", "up_proj") if place.both else (last,)
    joint = [f"{module}.{name}.weight" for name in parts]
    if all(name in tensors and len(tensors[name].shape) == 3 for name in joint):
        whole = [tensors.pop(name) for name in joint]
        if not place.both:
            tensors[source] = whole[0]
            return _whole(place, source, tensors)
        for name, tensor in zip(parts, whole, strict=True):  # an expert's gate, then its up
            tensors.update((f"{module}.{e}.{name}.weight", _expert(tensor, e)) for e in range(place.experts))
    each = tuple(f"{module}.{e}.{name}.weight" for e in range(place.experts) for name in parts)
    return each if each[0] in tensors else (source,)


def _whole(place: _Place, source: str, tensors: dict[str, Tensor]) -> tuple[str, ...]:
    """One tensor [E,N,K], or a bias [E,N], as its rows."""
    tensor = tensors[source]
    if len(tensor.shape) > len(place.weight.type.shape):
        e, n, *rest = tensor.shape
        heads = e if place.interleaved else 0
        tensors[source] = replace(tensor, shape=(e * n, *rest), rope_heads=heads)
    return (source,)


def _cut(place: _Place, source: str, tensors: dict[str, Tensor]) -> tuple[str, ...]:
    """One tensor [E,K,N] as a transposed matrix for each expert."""
    names = []
    for e in range(place.experts):
        one = _expert(tensors[source], e)
        names.append(f"{source}.{e}")
        tensors[names[-1]] = replace(
            one, shape=one.shape[::-1], transposed=True, rope_heads=int(place.interleaved)
        )
    return tuple(names)


def _expert(tensor: Tensor, e: int) -> Tensor:
    """Expert e's matrix of a tensor that holds them all."""
    size = tensor.bytes // tensor.shape[0]
    return replace(
        tensor,
        name=f"{tensor.name}[{e}]",
        offset=tensor.offset + e * size,
        bytes=size,
        shape=tensor.shape[1:],
    )
