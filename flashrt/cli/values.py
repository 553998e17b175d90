"""Values of the command line, converted without pydantic where they are simple.

typer converts with pydantic, whose import and adapters take a tenth of a second before the command
begins. What is plainly right is converted here; anything else goes to typer, which says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import Any

from typer.core import TyperCommand, TyperGroup

_NUMBERS: dict[type, tuple[Callable[[str], float], re.Pattern[str]]] = {
    int: (int, re.compile(r"\d{1,18}", re.ASCII)),
    float: (float, re.compile(r"\d{1,18}(\.\d+)?", re.ASCII)),
}


class PlainCommand(TyperCommand):
    """A command that converts simple values itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        return list(map(_plainly, super().get_params(ctx)))


class PlainGroup(TyperGroup):
    """The same for a command that has others."""

    def get_params(self, ctx: Any) -> list[Any]:
        return list(map(_plainly, super().get_params(ctx)))


def _plainly(param: Any) -> Any:
    # a typer without descriptors of types knows nothing of pydantic
    if hasattr(param, "type_descriptor") and "process_value" not in vars(param):
        param.process_value = _first_plain(param)
    return param


def _first_plain(param: Any) -> Callable[[Any, Any], Any]:
    typers, info = param.process_value, param.type_descriptor.parameter_info
    kind = param.type_descriptor.annotation

    def convert(context: Any, value: Any) -> Any:
        if value is None and not param.required:
            found = () if param.multiple else None
        else:
            found = _plain(kind, value)
            small = found is not None and info.min is not None and found < info.min
            if found is None or small or info.max is not None or info.parser is not None:
                return typers(context, value)
        return found if param.callback is None else param.callback(context, param, found)

    return convert


def _plain(kind: Any, value: Any) -> Any:
    """The value as its kind; None where that isn't plain."""
    if kind == list[str] and isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
        return list(value)
    if not isinstance(kind, type):
        return None
    if isinstance(value, kind):
        return value
    if not isinstance(value, str):
        return None
    if issubclass(kind, Enum):
        return next((member for member in kind if member.value == value), None)
    number = _NUMBERS.get(kind)
    return number[0](value) if number and number[1].fullmatch(value) else None
