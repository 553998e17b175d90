"""A Python function that makes a model, `package.module:function` → graph and weights, through torch.export.

The function takes no arguments and returns `(module, inputs)`: a torch.nn.Module and example inputs, as a
tuple or as a dictionary by parameter name. A third element may say which sizes vary, as `dynamic_shapes` of
torch.export does. Instead of a function there may be a module (an object) with an attribute `example_inputs`.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend.export import LARGEST, imported
from flashrt.frontend.imported import Imported

MADE = "it returns (module, inputs) or (module, inputs, dynamic_shapes), as torch.export.export takes them"


def load_callable(name: str, *, largest: int = LARGEST) -> Imported:
    """Imports the function, with the working folder on the path, calls it, and traces what it returns.

    largest: bound for sizes that are left open.

    Raises:
        ModelError: it can't be imported, or returns something else.
        UnsupportedModel: torch can't trace the module, or it has something flashrt can't run.
    """
    module, inputs, dynamic = _made(name)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
    try:
        with torch.no_grad():
            program = torch.export.export(module.eval(), args, kwargs, dynamic_shapes=dynamic, strict=False)
    except Exception as error:  # torch raises anything
        first = (str(error).strip().splitlines() or [""])[0]
        raise UnsupportedModel(f"{name} can't be traced: {type(error).__name__}: {first[:300]}") from error
    return imported(program, name.rpartition(":")[2], largest)


def _made(name: str) -> tuple[torch.nn.Module, Any, Any]:
    function = _found(name)
    made = (function, function.example_inputs) if hasattr(function, "example_inputs") else function()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise ModelError(f"{name} returned {type(made).__name__}, not a module with its inputs", hint=MADE)
    module, inputs, *dynamic = made
    return module, (inputs,) if isinstance(inputs, torch.Tensor) else inputs, dynamic[0] if dynamic else None


def _found(name: str) -> Any:
    place, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value = importlib.import_module(place)
    except ImportError as error:
        raise ModelError(f"{name}: the module {place} can't be imported: {error}") from None
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ModelError(f"{name}: {place} has no {attribute}", hint=MADE)
        value = getattr(value, part)
    if not callable(value):
        raise ModelError(f"{name} is no function", hint=MADE)
    return value
