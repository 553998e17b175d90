"""How the user wants matrices kept: rounded to fewer bits, or without any loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flashrt.errors import PlanError
from flashrt.ir import logical
from flashrt.layouts import LAYOUTS

LOSSLESS = "lossless"
TARGETS: Mapping[str, str] = {"q4": "q4m.16x32", "q8": "q8.16x32", "bf16": "bf16"}
_READS_ROWS = ("linear", "embedding")  # operations, without "aten.", that read any layout


def storage(
    graph: logical.Graph, quantize: str, exclude: Sequence[str], exact: Mapping[str, str]
) -> logical.Graph:
    """weight layout=… → weight layout=…: matrices that only products and embeddings read.

    quantize: a name of TARGETS, for matrices that have more bits now; or LOSSLESS: each in `exact`, by the
    weight's name, which holds what its file has.
    exclude: operations or parts of names, as for `precision`; matrices that such a node reads stay as they
    are, so a head that shares the embedding's matrix stays with it.

    Raises:
        PlanError: an unknown `quantize`, or an `exclude` that nothing fits.
    """
    check_name(quantize)
    readers = _readers(graph)
    kept = _kept(readers, exclude)

    def chosen(name: str, layout: str) -> str:
        if name in kept or name not in exact:
            return layout
        if quantize == LOSSLESS:
            return exact[name]
        target = TARGETS[quantize]
        return target if _bits(layout) > _bits(target) else layout

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


def _bits(layout: str) -> int:
    found = LAYOUTS[layout]
    return 8 * found.element.itemsize if found.element is not None else found.bits


def _readers(graph: logical.Graph) -> dict[str, list[logical.Node]]:
    """The nodes that read each matrix, where all can read packed ones."""
    readers: dict[str, list[logical.Node]] = {w.name: [] for w in graph.weights if len(w.type.shape) == 2}
    for node in graph.nodes:
        for place, name in enumerate(node.inputs):
            if name[0] != "@" or name[1:] not in readers:
                continue
            op = _op(node)
            if op not in _READS_ROWS or (op == "linear" and place != 1):
                del readers[name[1:]]
            else:
                readers[name[1:]].append(node)
    return {name: nodes for name, nodes in readers.items() if nodes}


def _op(node: logical.Node) -> str:
    return node.op.removeprefix("aten.").split(".")[0]


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
