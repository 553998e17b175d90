"""Folders of text encoders: which are some, and what sentence-transformers adds to a model. No torch.

A folder of sentence-transformers lists modules in `modules.json`: transformer, pooling, maybe unit length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend.chat_facts import read_json
from flashrt.frontend.imported import TextFacts

ENCODERS = (
    "albert", "bert", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert",
    "electra", "ernie", "esm", "eurobert", "fnet", "ibert", "layoutlm", "megatron-bert", "mobilebert",
    "modernbert", "mpnet", "nomic_bert", "nystromformer", "rembert", "roberta", "roberta-prelayernorm",
    "roc_bert", "roformer", "splinter", "squeezebert", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
GENERATING = ("ForCausalLM", "LMHeadModel")  # how the names of classes that continue a text end
# a flag of an older pooling's config.json → what newer ones call it; in the order in which they are joined
POOLINGS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}  # fmt: skip
_FLAG = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class Sentence:
    """From the states of a text's tokens to its embedding.

    poolings: values of POOLINGS; of several, results are joined. unit: whether the length becomes 1.
    """

    poolings: tuple[str, ...]
    unit: bool


def is_encoder(folder: Path) -> bool:
    """Whether a model folder is for `encoder.load_encoder`. Raises ModelError when a JSON file is broken."""
    if (folder / "modules.json").is_file():
        return True
    config = read_json(folder / "config.json")
    classes = config.get("architectures") or ()
    return config.get("model_type") in ENCODERS and not any(str(c).endswith(GENERATING) for c in classes)


def read_sentence(folder: Path) -> tuple[Path, Sentence | None]:
    """The folder of the transformer, and what follows it; None where there is no `modules.json`.

    Raises:
        ModelError: a file is missing or broken.
        UnsupportedModel: a module or a pooling that isn't known, by its name.
    """
    if not (folder / "modules.json").is_file():
        return folder, None
    modules = _modules(folder / "modules.json")
    kinds = [str(m.get("type", "?")).rpartition(".")[2] for m in modules]
    places = [folder / str(m.get("path", "")) for m in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise UnsupportedModel(
            f"{folder / 'modules.json'} lists {', '.join(kinds)}",
            hint="known: Transformer, Pooling and maybe Normalize, in this order",
        )
    return places[0], Sentence(_poolings(places[1] / "config.json"), len(kinds) == 3)


def _modules(path: Path) -> list[Mapping[str, Any]]:
    try:
        modules = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise ModelError(f"{path} isn't a list of modules")
    return modules


def _poolings(path: Path) -> tuple[str, ...]:
    facts = read_json(path)
    if not facts:
        raise ModelError(f"{path} is missing or empty", hint="download the whole model")
    named = facts.get("pooling_mode")
    if named is None:
        flags = [k for k in facts if k.startswith(_FLAG) and facts[k]]
        named = [POOLINGS[k] for k in POOLINGS if k in flags] + [k for k in flags if k not in POOLINGS]
    found = tuple(map(str, named if isinstance(named, list) else [named])) or ("mean",)
    if unknown := [p for p in found if p not in POOLINGS.values()]:
        raise UnsupportedModel(
            f"{path}: the pooling {unknown[0].removeprefix(_FLAG)} isn't supported",
            hint=f"known: {', '.join(POOLINGS.values())}",
        )
    return found


def read_text(folder: Path, longest: int) -> TextFacts:
    """The tokenizer of a folder, cutting texts to `longest` tokens or less where a file says so.

    Raises:
        ModelError: tokenizer.json or another file is broken.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return TextFacts("", longest)
    try:
        tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path} isn't a tokenizer: {error}") from None
    limits = (
        read_json(folder / "sentence_bert_config.json").get("max_seq_length"),
        read_json(folder / "tokenizer_config.json").get("model_max_length"),
    )
    limit = next((n for n in limits if isinstance(n, int) and n > 0), longest)
    tokenizer.enable_truncation(min(limit, longest))
    tokenizer.no_padding()
    return TextFacts(tokenizer.to_str(), longest)
