"""flashrt compiles a model into an execution plan for this machine and runs it.

    import flashrt
    llm = flashrt.LLM("smollm2")
    print(llm.generate("Why is the sky blue?").text)

Names are loaded when first used: `import flashrt` imports neither torch nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flashrt.engine import LLM as LLM
    from flashrt.engine import compile as compile
    from flashrt.engine import load as load
    from flashrt.errors import FlashrtError as FlashrtError
    from flashrt.llm.request import Sampling as Sampling

_DOORS = {
    "LLM": "flashrt.engine",
    "compile": "flashrt.engine",
    "load": "flashrt.engine",
    "FlashrtError": "flashrt.errors",
    "Sampling": "flashrt.llm.request",
}
__all__ = ["LLM", "FlashrtError", "Sampling", "__version__", "compile", "load"]


def __getattr__(name: str) -> Any:
    if name not in _DOORS:
        raise AttributeError(f"module 'flashrt' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(import_module(_DOORS[name]), name)


def __dir__() -> list[str]:
    return __all__
