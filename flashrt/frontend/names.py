"""Names of nodes: where in the model an operation stands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CALL = re.compile(r"@\d+")  # a module called again: `norm@1`


def strip(path: str, prefixes: Sequence[str]) -> str:
    """The path without its wrapper and model prefix: `lm.model.layers.3` → `layers.3` for ["lm", "model"]."""
    for prefix in prefixes:
        if path == prefix:
            path = ""
        path = path.removeprefix(prefix + ".")
    return path


def module_path(stack: object) -> str:
    """The innermost module of an FX node's `nn_module_stack`, "" for none."""
    if not isinstance(stack, dict) or not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^L\['self'\]\.?|\._modules|\['|'\]", lambda m: "." if m[0] == "['" else "", path)
    return _CALL.sub("", path).strip(".")


def _ancestors(path: str) -> Iterable[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def name_nodes(places: Sequence[tuple[str, str]], taken: Iterable[str]) -> list[str]:
    """Unique names for nodes at (module path, operation).

    The operation that ends a module, its submodules included, is called as the
    module; any other `<module>.<operation>`, with `.2`, `.3`, … when repeated.
    """
    last: dict[str, int] = {}
    for i, (path, _) in enumerate(places):
        last.update((a, i) for a in _ancestors(path))
    used, names = set(taken), []
    for i, (path, op) in enumerate(places):
        bare = path if last.get(path) == i else f"{path}.{op}".lstrip(".")
        name, count = bare, 1
        while name in used:
            count += 1
            name = f"{bare}.{count}"
        used.add(name)
        names.append(name)
    return names
