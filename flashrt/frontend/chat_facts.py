"""Tokenizer, chat template and end tokens of a Hugging Face model folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flashrt.errors import ModelError
from flashrt.frontend.imported import ChatFacts

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} when there is no such file. Raises ModelError naming the file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} isn't a JSON object")
    return value


def read_chat(folder: Path, config: Mapping[str, Any], context: int) -> ChatFacts:
    """The chat facts of a folder whose config.json is `config`.

    Raises:
        ModelError: tokenizer.json is missing or broken, or another file is broken.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path} is missing",
            hint="download the model's tokenizer.json, or make one: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        )
    text = path.read_text("utf-8")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path} isn't a tokenizer: {error}") from None
    facts = read_json(folder / "tokenizer_config.json")
    special = _special(facts, read_json(folder / "special_tokens_map.json"))
    return ChatFacts(
        tokenizer=text,
        template=_template(folder, facts),
        bos=_bos(tokenizer, facts, special),
        eos=_eos(tokenizer, read_json(folder / "generation_config.json"), config, special),
        special=special,
        context=context,
    )


def _special(facts: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; each is a string or an object with its content."""
    found = {}
    for role in SPECIAL:
        token = facts.get(role) or more.get(role)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[role] = token
    return found


def _template(folder: Path, facts: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = facts.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several by name
        template = {t.get("name"): t.get("template") for t in template}.get("default")
    return template if isinstance(template, str) else ""


def _bos(tokenizer: Tokenizer, facts: Mapping[str, Any], special: Mapping[str, str]) -> int | None:
    """The token that stands before every text: by explicit setting, else where the tokenizer puts one."""
    wanted = facts.get("add_bos_token")
    token = special.get("bos_token")
    bos = tokenizer.token_to_id(token) if token else None
    if isinstance(wanted, bool):
        return bos if wanted else None
    first = tokenizer.encode("a").ids[:1]
    plain = tokenizer.encode("a", add_special_tokens=False).ids[:1]
    return first[0] if first and first != plain else None


def _eos(
    tokenizer: Tokenizer, generation: Mapping[str, Any], config: Mapping[str, Any], special: Mapping[str, str]
) -> tuple[int, ...]:
    """Every token that ends a text, whichever file names it."""
    token = special.get("eos_token")
    named = tokenizer.token_to_id(token) if token else None
    found = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id")), *_ids(named)]
    return tuple(dict.fromkeys(found))


def _ids(value: Any) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
