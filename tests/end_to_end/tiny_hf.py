"""Tiny random Hugging Face folders as `save_pretrained` writes them, with a tokenizer of words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 160
WHOLE = "1GB"  # larger than any of these models: one file
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def write_model(
    folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, shard: str = WHOLE, **facts: Any
) -> Any:
    """Writes a model with random weights stored as `dtype`; gives it back as transformers reads it, in f32.

    Weights are large enough that every layer matters to the logits; norms and biases differ from 1 and 0.
    """
    model = random_model(AutoConfig.for_model(kind, **{**SIZES, **facts}))
    return save_model(model.to(dtype), folder, shard=shard)


def random_model(config: Any) -> Any:
    """The configuration's model with random weights, float32."""
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * (1.4 / parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(noise * 0.1)
    return model


def save_model(model: Any, folder: Path, *, shard: str = WHOLE) -> Any:
    """Writes the model and a tokenizer; gives the model back as transformers reads it, in f32."""
    model.save_pretrained(folder, max_shard_size=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard != WHOLE)
    write_tokenizer(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def write_tokenizer(folder: Path) -> None:
    """One token a word: "w4 w5" is [4, 5], and so on up to the vocabulary."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"▁w{i}": i for i in range(4, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
