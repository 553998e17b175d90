"""Attention that a model spells out is found, with the mask it really has, or left alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flashrt.frontend import gate, hooks, lm

CONTEXT, VOCAB, HEADS, HEAD = 48, 50, 2, 8
Masked = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """One attention of two heads; `masked` makes what the softmax reads from q·kᵀ [1,H,T,T]."""

    def __init__(self, masked: Masked) -> None:
        super().__init__()
        self.config, self.masked = SimpleNamespace(), masked
        self.table, self.places = nn.Embedding(VOCAB, HEADS * HEAD), nn.Embedding(CONTEXT, HEADS * HEAD)
        self.parts = nn.ModuleList(nn.Linear(HEADS * HEAD, HEADS * HEAD) for _ in range(3))
        self.head = nn.Linear(HEADS * HEAD, VOCAB)
        self.seen = nn.Buffer(torch.ones(CONTEXT, CONTEXT).tril(), persistent=False)
        self.bias = nn.Parameter(torch.randn(CONTEXT, CONTEXT))

    def forward(self, input_ids: torch.Tensor, logits_to_keep: Any = slice(None), **ignored: Any) -> Any:
        x = self.table(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        q, k, v = (p(x).view(1, -1, HEADS, HEAD).transpose(1, 2) for p in self.parts)
        weights = self.masked(q @ k.transpose(-1, -2)).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        return SimpleNamespace(logits=self.head(mixed[:, logits_to_keep]))


def _model(masked: Callable[[Model, torch.Tensor], torch.Tensor]) -> tuple[Model, Any]:
    torch.manual_seed(0)
    hooks.register()
    model = Model(lambda scores: masked(model, scores)).eval()
    return model, lm.export(model, "cpu", CONTEXT, tokens=CONTEXT)


def _facts(program: Any) -> tuple[float, int] | None:
    """(scale, window) of the attention that was found."""
    sites = [n for n in program.graph.nodes if n.target is torch.ops.flashrt.attention.default]
    return (sites[0].args[4], sites[0].args[5]) if sites else None


def _later(scores: torch.Tensor) -> torch.Tensor:
    """Keys after the query [T,T]."""
    places = torch.arange(scores.shape[-1])
    return places[None] > places[:, None]


def _buffer(model: Model, scores: torch.Tensor) -> torch.Tensor:
    seen = model.seen[: scores.shape[-2], : scores.shape[-1]]
    return scores / 2 * seen - 1e4 * (1 - seen)


def _fill(model: Model, scores: torch.Tensor) -> torch.Tensor:
    return (scores * 0.5).masked_fill(_later(scores), -torch.inf)


def _written(model: Model, scores: torch.Tensor) -> torch.Tensor:
    scores.mul_(0.5).masked_fill_(_later(scores), torch.finfo(torch.float32).min)
    return scores


def _window(model: Model, scores: torch.Tensor) -> torch.Tensor:
    seen = ~_later(scores) & ~_later(scores).T.roll(0).logical_and(_far(scores))
    return torch.where(seen, scores * 0.5, torch.tensor(-1e9))


def _far(scores: torch.Tensor) -> torch.Tensor:
    places = torch.arange(scores.shape[-1])
    return places[None] <= places[:, None] - 5


@pytest.mark.parametrize(
    ("masked", "window"), [(_buffer, 0), (_fill, 0), (_written, 0), (_window, 5)],
    ids=["buffer", "filled", "written in place", "window"],
)  # fmt: skip
def test_masks_are_conveyed(masked: Any, window: int) -> None:
    model, program = _model(masked)
    scale, found = _facts(program) or (0.0, -1)
    assert scale == pytest.approx(0.5, rel=1e-4) and found == window
    assert gate._rows(program, VOCAB, CONTEXT) == "" and gate._logits(program, model, VOCAB) == ""


def test_no_mask_is_the_mask_that_transformers_would_build() -> None:
    assert _facts(_model(lambda model, scores: scores * 0.25)[1]) == (pytest.approx(0.25, rel=1e-4), 0)


def _slopes(model: Model, scores: torch.Tensor) -> torch.Tensor:
    return _fill(model, scores) + torch.arange(scores.shape[-1]) * 0.1


def _learned(model: Model, scores: torch.Tensor) -> torch.Tensor:
    return _fill(model, scores) + model.bias[: scores.shape[-2], : scores.shape[-1]]


def _capped(model: Model, scores: torch.Tensor) -> torch.Tensor:
    return torch.tanh(scores).masked_fill(_later(scores), -torch.inf)


def _chunks(model: Model, scores: torch.Tensor) -> torch.Tensor:
    chunk = torch.arange(scores.shape[-1]) // 45  # differs for long sequences only
    return _fill(model, scores).masked_fill(chunk[None] != chunk[:, None], -torch.inf)


@pytest.mark.parametrize("masked", [_slopes, _learned, _capped, _chunks])
def test_anything_else_is_left_alone(masked: Any) -> None:
    program = _model(masked)[1]
    assert _facts(program) is None
    assert "1 of 1 layers have no attention" in gate._sites(program, 1)
