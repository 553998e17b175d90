"""Tokenizer and chat facts from the metadata of a GGUF file, as the text of a `tokenizer.json`.

Two families: `gpt2` (byte-level BPE; `tokenizer.ggml.pre` names how text is cut
beforehand) and `llama` (SentencePiece BPE with scores and byte tokens). Others
are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend.gguf_header import Header
from flashrt.frontend.imported import ChatFacts

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_KEY = "tokenizer.ggml."
_SPACE = "▁"

# How published tokenizers cut text before BPE, as regular expressions of the Oniguruma kind.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_BLANKS}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_PUNCTUATION}|{_BLANKS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    rf"|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_O200K = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", r"\p{N}{1,3}")
_TEKKEN = _CASED % ("", "", r"\p{N}")

_GPT2_STEPS = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]
_DIGIT_STEPS = [{"type": "Digits", "individual_digits": True}, *_GPT2_STEPS]


def _split(regex: str) -> list[dict[str, Any]]:
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return [cut, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]


# tokenizer.ggml.pre → steps before BPE
_PRE: Mapping[str, list[dict[str, Any]]] = {
    "default": _GPT2_STEPS, "gpt-2": _GPT2_STEPS, "olmo": _GPT2_STEPS, "phi-2": _GPT2_STEPS,
    "smollm": _DIGIT_STEPS, "starcoder": _DIGIT_STEPS, "refact": _DIGIT_STEPS, "command-r": _DIGIT_STEPS,
    "llama-bpe": _split(_LLAMA3), "llama3": _split(_LLAMA3), "llama-v3": _split(_LLAMA3),
    "smaug-bpe": _split(_LLAMA3), "dbrx": _split(_LLAMA3),
    "qwen2": _split(_QWEN2), "deepseek-r1-qwen": _split(_QWEN2),
    "gpt-4o": _split(_O200K), "llama4": _split(_O200K), "tekken": _split(_TEKKEN),
}  # fmt: skip
_NFC = ("qwen2", "deepseek-r1-qwen", "command-r")
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # these also begin with BOS by default
_PRE_OF_ARCHITECTURE = {"qwen2": "qwen2", "qwen3": "qwen2"}  # for old files without tokenizer.ggml.pre

# Control tokens that end a turn. Files name one as EOS; models emit the others as well.
_ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "<|endoftext|>"}
)
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def chat_facts(header: Header, context: int, vocab: int) -> ChatFacts:
    """Tokenizer, template and special tokens. context: tokens; vocab: rows of the embedding table.

    Raises ModelError naming file and key, UnsupportedModel for other tokenizer families.
    """
    tokens = _tokens(header, vocab)
    types = _types(header, len(tokens))
    ids = {
        name: i
        for name in ("bos", "eos", "unknown", "padding", "eot", "eom")
        if (i := _id(header, name, tokens)) is not None
    }
    return ChatFacts(
        tokenizer=json.dumps(_tokenizer(header, tokens, types, ids), ensure_ascii=False),
        template=header.get("tokenizer.chat_template", str, ""),
        bos=ids.get("bos") if _adds_bos(header) else None,
        eos=_ends(tokens, types, ids),
        special={key: tokens[ids[name]] for key, name in _SPECIAL.items() if name in ids},
        context=context,
    )


def _tokens(header: Header, vocab: int) -> list[str]:
    tokens: list[str] = header.get(_KEY + "tokens", list)
    if not 0 < len(tokens) <= vocab:
        raise _wrong(header, "tokens", f"has {len(tokens)} tokens; the embedding table has {vocab} rows")
    return tokens


def _types(header: Header, count: int) -> list[int]:
    """The kind of each token; all normal where the file doesn't say."""
    key = _KEY + "token_type"
    if key not in header.metadata:
        return [_NORMAL] * count
    types = header.get(key, np.ndarray)
    if len(types) != count:
        raise _wrong(header, "token_type", f"has {len(types)} entries for {count} tokens")
    return [int(t) for t in types]


def _id(header: Header, name: str, tokens: Sequence[str]) -> int | None:
    key = f"{name}_token_id"
    if _KEY + key not in header.metadata:
        return None
    value = header.get(_KEY + key, int)
    if not 0 <= value < len(tokens):
        raise _wrong(header, key, f"is {value}; there are {len(tokens)} tokens")
    return value


def _wrong(header: Header, key: str, problem: str) -> ModelError:
    return ModelError(
        f"{header.path}: metadata key {_KEY}{key} {problem}", hint="convert the model again, or edit that key"
    )


def _family(header: Header) -> str:
    family = header.get(_KEY + "model", str)
    if family not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{header.path}: {_KEY}model {family!r} is no known tokenizer", hint="known: gpt2, llama"
        )
    return family


def _pre(header: Header) -> str:
    architecture = header.get("general.architecture", str, "")
    pre = header.get(_KEY + "pre", str, _PRE_OF_ARCHITECTURE.get(architecture, "default"))
    if pre not in _PRE:
        raise UnsupportedModel(
            f"{header.path}: {_KEY}pre {pre!r} is no known pre-tokenizer", hint=f"known: {', '.join(_PRE)}"
        )
    return pre


def _adds_bos(header: Header) -> bool:
    usual = _family(header) == "llama" or _pre(header) in _WHOLE_WORDS_FIRST
    return header.get(_KEY + "add_bos_token", bool, usual)


def _ends(tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int]) -> tuple[int, ...]:
    named = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    others = [i for i, t in enumerate(tokens) if t in _ENDS and types[i] in (_CONTROL, _USER)]
    return tuple(dict.fromkeys([*named, *others]))


def _tokenizer(
    header: Header, tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int]
) -> dict[str, Any]:
    parts = _byte_level(header, tokens) if _family(header) == "gpt2" else _sentence_piece(header, tokens, ids)
    return {
        "version": "1.0", "truncation": None, "padding": None, "post_processor": None,
        "added_tokens": _added(tokens, types), **parts,
    }  # fmt: skip


def _added(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are found in the text before anything else, in order of id."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    seen: set[str] = set()
    out: list[dict[str, Any]] = []
    for i, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (_CONTROL, _USER) and text and text not in seen:
            out.append({"id": i, "content": text, **plain, "special": kind == _CONTROL})
            seen.add(text)
    return out


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Token → id. A repeated string keeps its first id; the others get a name that no text can
    produce and that says whose text they stand for (`flashrt.llm.chat` reads it)."""
    out: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if token in out:
            token = f"<|duplicate {i} of {out[token]}|>"
        out[token] = i
    return out


def _byte_level(header: Header, tokens: Sequence[str]) -> dict[str, Any]:
    pre = _pre(header)
    merges = header.get(_KEY + "merges", list)
    vocabulary = _vocabulary(tokens)
    for i, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise _wrong(header, "merges", f"entry {i} {merge[:40]!r} isn't two tokens that make a third")
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE[pre]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {**_bpe(vocabulary, merges), "ignore_merges": pre in _WHOLE_WORDS_FIRST},
    }


def _bpe(vocabulary: dict[str, int], merges: Sequence[Any]) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocabulary, "merges": merges,
    }  # fmt: skip


def _sentence_piece(header: Header, tokens: Sequence[str], ids: Mapping[str, int]) -> dict[str, Any]:
    prefix = header.get(_KEY + "add_space_prefix", bool, True)
    scores = header.get(_KEY + "scores", np.ndarray)
    if len(scores) != len(tokens):
        raise _wrong(header, "scores", f"has {len(scores)} entries for {len(tokens)} tokens")
    vocabulary = _vocabulary(tokens)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    first = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]  # fmt: skip
    unknown = tokens[ids["unknown"]] if "unknown" in ids else None
    merges = _merges_of_scores(tokens, [float(s) for s in scores], vocabulary)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**_bpe(vocabulary, merges), "unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


def _merges_of_scores(
    tokens: Sequence[str], scores: Sequence[float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two, the best score first: SentencePiece joins the neighbours whose
    union scores highest."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
