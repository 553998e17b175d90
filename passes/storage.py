"""How matrices are kept: as the user wants, rounded to fewer bits or without any loss, and as devices can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flashrt.errors import PlanError
from flashrt.ir import logical
from flashrt.ir.types import Dim
from flashrt.layouts import BY_ROW, COARSER, LAYOUTS
from flashrt.machine import Device, Machine

LOSSLESS = "lossless"
TARGETS: Mapping[str, str] = {"q4": "q4m.16x32", "q8": "q8.16x32", "bf16": "bf16"}
_LOOKUP = "embedding"
_READS_ROWS = ("linear", _LOOKUP, "moe")  # operations, without their library, that read any layout
_EXPERTS = (3, 4)  # matrices among the inputs of "moe"


def storage(
    graph: logical.Graph, quantize: str, exclude: Sequence[str], exact: Mapping[str, str]
) -> logical.Graph:
    """weight layout=… → weight layout=…: matrices that only products, experts and embeddings read.

    quantize: a name of TARGETS, for matrices that have more bits now; or LOSSLESS: each in `exact`, by the
    weight's name, which holds what its file has.
    exclude: operations or parts of names, as for `precision`; matrices that such a node reads stay as they
    are, so a head that shares the embedding's matrix stays with it. A router's matrix is never rounded: it
    is small, and other experts are another model.

    Raises:
        PlanError: an unknown `quantize`, or an `exclude` that nothing fits.
    """
    check_name(quantize)
    readers = _readers(graph)
    kept = _kept(readers, exclude) | (_routers(graph) if quantize != LOSSLESS else set())

    def chosen(name: str, layout: str) -> str:
        if name in kept or name not in exact:
            return layout
        if quantize == LOSSLESS:
            return exact[name]
        target = TARGETS[quantize]
        return target if LAYOUTS[layout].weight_bits > LAYOUTS[target].weight_bits else layout

    return replace(
        graph,
        weights=tuple(
            replace(w, layout=chosen(w.name, w.layout or "f32")) if w.name in readers else w
            for w in graph.weights
        ),
    )


def check_name(quantize: str) -> None:
    """Raises PlanError for an unknown way to keep weights."""
    if quantize not in (*TARGETS, LOSSLESS):
        raise PlanError(f"unknown --quantize {quantize!r}", hint=f"known: {', '.join((*TARGETS, LOSSLESS))}")


def readable(graph: logical.Graph, machine: Machine, *, lossless: bool = False) -> logical.Graph:
    """weight layout=… → weight layout=…: layouts that some device has no kernels for become coarser ones, or
    f32 where nothing may be lost.
    """
    lacking = {name for name in COARSER if not all(_reads(d, name) for d in machine.devices)}
    instead = {name: "f32" if lossless else COARSER[name] for name in lacking}
    weights = (replace(w, layout=instead.get(w.layout, w.layout)) for w in graph.weights)
    return replace(graph, weights=tuple(weights))


def tables(graph: logical.Graph, machine: Machine) -> logical.Graph:
    """weight layout=q4.16x32 → weight layout=q4.1x32: matrices of which rows are looked up, and nothing else.

    A row then lies in one piece, and not among fifteen others. Only where every device that has a kernel for
    the one has one for the other.
    """
    readers = _readers(graph)
    looked_up = {name for name, nodes in readers.items() if all(_op(n) == _LOOKUP for n in nodes)}
    kernels = [{k for k, _ in d.kernels} for d in machine.devices]
    by_row = {
        x: y
        for x, y in BY_ROW.items()
        if all(f"{_LOOKUP}.{x}" not in known or f"{_LOOKUP}.{y}" in known for known in kernels)
    }
    weights = (
        replace(w, layout=by_row.get(w.layout, w.layout)) if w.name in looked_up else w for w in graph.weights
    )
    return replace(graph, weights=tuple(weights))


def _reads(device: Device, layout: str) -> bool:
    """Whether a device can do with a layout what it can do with the coarser one."""
    kernels, coarser = set(device.kernels), COARSER[layout]
    return all((k.replace(coarser, layout), n) in kernels for k, n in device.kernels if coarser in k)


def _readers(graph: logical.Graph) -> dict[str, list[logical.Node]]:
    """The nodes that read each matrix, where all can read packed ones."""
    readers: dict[str, list[logical.Node]] = {w.name: [] for w in graph.weights if len(w.type.shape) == 2}
    sizes = {w.name: w.type.shape[0] for w in graph.weights if w.name in readers}
    for node in graph.nodes:
        for place, name in enumerate(node.inputs):
            if name[0] != "@" or name[1:] not in readers:
                continue
            if not _reads_any_layout(node, place, sizes[name[1:]]):
                del readers[name[1:]]
            else:
                readers[name[1:]].append(node)
    return {name: nodes for name, nodes in readers.items() if nodes}


def _reads_any_layout(node: logical.Node, place: int, rows: Dim) -> bool:
    """Whether an input may be a matrix of so many rows in any layout."""
    op = _op(node)
    if op == "moe":  # an expert's rows have to be whole groups of every layout's
        experts = node.attr("experts")
        assert isinstance(experts, int) and isinstance(rows, int)
        return place in _EXPERTS and rows // experts % max(x.rows for x in LAYOUTS.values()) == 0
    return op in _READS_ROWS and (op != "linear" or place == 1)


def _routers(graph: logical.Graph) -> set[str]:
    """Matrices of the products that experts are chosen by."""
    nodes, seen = {f"%{n.name}": n for n in graph.nodes}, set[str]()
    waiting = [value for n in graph.nodes if _op(n) == "moe" for value in n.inputs[1:3]]
    found: set[str] = set()
    while waiting:
        value = waiting.pop()
        node = nodes.get(value)
        if node is None or value in seen:
            continue
        seen.add(value)
        if _op(node) == "linear":
            found.add(node.inputs[1][1:])
        else:
            waiting += node.inputs
    return found


def _op(node: logical.Node) -> str:
    return node.op.removeprefix("aten.").removeprefix("flashrt.").split(".")[0]


def _kept(readers: Mapping[str, Sequence[logical.Node]], exclude: Sequence[str]) -> set[str]:
    """The weights that `exclude` means. Raises PlanError."""
    kept: set[str] = set()
    for part in exclude:
        fits = {
            name
            for name, nodes in readers.items()
            for n in nodes
            if part == _op(n) or f".{part}." in f".{n.name}."
        }
        if not fits:
            names = (n.name for nodes in readers.values() for n in nodes)
            known = dict.fromkeys(p for name in names for p in name.split(".") if not p.isdigit())
            raise PlanError(
                f"--quantize-exclude: no product or embedding is called {part!r}",
                hint=f"known: {', '.join(dict.fromkeys((*_READS_ROWS, *known)))}",
            )
        kept |= fits
    return kept
