"""Tiny random Hugging Face folders: config, weights and a word tokenizer, as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def write_model(
    folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, shard: str = "1GB", **facts: Any
) -> Any:
    """Writes a model with random weights stored as `dtype`; gives it back as transformers reads it, in f32.

    Weights are large enough that every layer matters to the logits; norms and biases differ from 1 and 0.
    """
    config = AutoConfig.for_model(kind, **{**SIZES, **facts})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * (1.4 / parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(noise * 0.1)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def write_tokenizer(folder: Path) -> None:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
