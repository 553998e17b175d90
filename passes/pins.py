"""What a user pins to a device: `layers.*.mlp=cpu:0`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from flashrt.errors import PlanError
from flashrt.ir import logical
from flashrt.ir.types import Weight

CLOSE = 6  # names that an error lists


@dataclass(frozen=True, slots=True)
class Pin:
    """Nodes whose name, place in the model or weight fits a pattern are on the device."""

    pattern: str
    device: str

    def __str__(self) -> str:
        return f"{self.pattern}={self.device}"


def read_pin(text: str) -> Pin:
    """Reads `PATTERN=DEVICE`. Raises PlanError."""
    pattern, _, device = text.rpartition("=")
    if not pattern or not device:
        raise PlanError(f"{text!r} places nothing", hint="write PATTERN=DEVICE: 'layers.*.mlp=cpu:0'")
    return Pin(pattern, device)


def pinned(graph: logical.Graph, pins: Sequence[Pin], devices: Sequence[str]) -> Mapping[str, Pin]:
    """Node → the pin that holds it.

    A pattern is a shell pattern; it fits a whole name or, as `layers.0.mlp` does, what stands before a dot.

    Raises:
        PlanError: a pin to a device that isn't there or that fits nothing, or two that disagree.
    """
    weights = {w.name: w for w in graph.weights}
    found: dict[str, Pin] = {}
    for pin in pins:
        if pin.device not in devices:
            raise PlanError(f"{pin}: no device {pin.device!r} in use", hint=f"devices: {', '.join(devices)}")
        fits = [n for n in graph.nodes if any(_fits(name, pin.pattern) for name in _names(n, weights))]
        if not fits:
            raise PlanError(
                f"{pin}: nothing is called {pin.pattern!r}", hint=_close(graph, weights, pin.pattern)
            )
        for node in fits:
            other = found.setdefault(node.name, pin)
            if other.device != pin.device:
                raise PlanError(
                    f"{other} and {pin} both place {node.name}", hint="narrow one of the patterns down"
                )
    return found


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _names(node: logical.Node, weights: Mapping[str, Weight]) -> Iterator[str]:
    """What a node may be called: as here, as in the model, by its weights and what they are made from."""
    yield node.name
    yield from node.origin.split(" ")[:1]
    for name in node.inputs:
        if name[0] == "@":
            yield from (name[1:], *weights[name[1:]].sources)


def _close(graph: logical.Graph, weights: Mapping[str, Weight], pattern: str) -> str:
    names = dict.fromkeys(
        re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for n in graph.nodes for name in _names(n, weights) if name
    )
    close = get_close_matches(pattern, names, CLOSE, 0.4) or list(names)[:CLOSE]
    return f"close: {', '.join(close)}"
