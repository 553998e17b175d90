"""Every exception a user of flashrt can meet.

The tree is flat on purpose: `FlashrtError` is what a caller catches, its
subclasses say which part of the request was wrong. A message has up to three
parts: what went wrong and where, the lines around it, and the next step.
"""

from __future__ import annotations


class FlashrtError(Exception):
    """Something the user can cause and can repair.

    Args:
        what: one sentence: what is wrong and where.
        lines: the text around the fault (IR lines, a key and its value).
        hint: the next step.
    """

    def __init__(self, what: str, *, lines: str = "", hint: str = "") -> None:
        self.what, self.lines, self.hint = what, lines, hint
        super().__init__("\n".join(part for part in (what, lines, hint) if part))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.lines, self.hint))


def _rebuild(kind: type[FlashrtError], what: str, lines: str, hint: str) -> FlashrtError:
    return kind(what, lines=lines, hint=hint)


class ModelError(FlashrtError):
    """The model can't be read: not a model, truncated, a tensor is missing or has a wrong shape."""


class UnsupportedModel(ModelError):
    """The model is well-formed, but something in it isn't supported; the message names it."""


class ParseError(FlashrtError):
    """A text form (.logical, .physical, .micro, JSON) doesn't parse; the message gives the line."""


class LawError(FlashrtError):
    """A graph or stream breaks a law of its level; the message gives law, place and repair."""


class PlanError(FlashrtError):
    """No plan can be made: a budget, a device or a kernel is missing."""


class ProgramError(FlashrtError):
    """A plan folder can't be used: corrupt, made by another version, or for another machine."""


class RequestError(FlashrtError):
    """A request can't be served: prompt too long, empty, or a parameter is out of range."""


class KnobError(FlashrtError):
    """An environment variable or option has a value outside its type or range."""


class DeviceError(FlashrtError):
    """A device failed, was lost, or was interrupted while it ran."""
