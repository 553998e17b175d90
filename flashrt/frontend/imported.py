"""What every frontend hands over: a model as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flashrt.ir import logical
from flashrt.weights.index import WeightIndex


@dataclass(frozen=True, slots=True)
class ChatFacts:
    """What a language model needs besides its graph.

    tokenizer: the text of a `tokenizer.json`. template: a Jinja chat template, or "" where there is none.
    bos, eos: token ids (bos None where the tokenizer adds none). special: names such as bos_token and
    eos_token, for the template. context: the longest sequence, in tokens.
    """

    tokenizer: str
    template: str
    bos: int | None
    eos: tuple[int, ...]
    special: Mapping[str, str]
    context: int


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What a text encoder needs besides its graph.

    tokenizer: the text of a `tokenizer.json` that cuts texts to what the model takes, "" where there is
    none. longest: the longest text, in tokens.
    """

    tokenizer: str
    longest: int


@dataclass(frozen=True, slots=True)
class Imported:
    """A model: its logical graph (operators as the source writes them), where its weights lie,
    constants that are in no file (RoPE frequencies), chat facts for a language model, and text facts for a
    text encoder."""

    graph: logical.Graph
    weights: WeightIndex
    constants: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    chat: ChatFacts | None = None
    text: TextFacts | None = None
