"""Two small tokenizers as texts of tokenizer.json: byte-level BPE, and SentencePiece with byte tokens."""

from __future__ import annotations

import json
from typing import Any

from flashrt.frontend.imported import ChatFacts

SPECIALS = ("<|end|>", "<s>")
WORDS = ("he", "ll", "hell", "hello", " w", " wo", "日", "本", "é", " é", "👩", "  ")


def alphabet() -> list[str]:
    """The character of each byte in byte-level BPE."""
    printable = set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256))
    extra = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(extra)) for b in range(256)]


def _facts(tokenizer: dict[str, Any], /, **changes: Any) -> ChatFacts:
    values = {
        "tokenizer": json.dumps(tokenizer), "template": "", "bos": None, "eos": (0,),
        "special": {"bos_token": "<s>", "eos_token": "<|end|>"}, "context": 64,
    }  # fmt: skip
    return ChatFacts(**{**values, **changes})


def _added() -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": i, "content": text, **flags} for i, text in enumerate(SPECIALS)]


def _bpe(vocab: dict[str, int], merges: list[list[str]], **changes: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocab, "merges": merges, **changes,
    }  # fmt: skip


def _tokenizer(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    empty = {
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
    }
    return {"version": "1.0", **empty, "added_tokens": _added(), "model": model, **parts}


def _merged(pieces: list[list[str]], vocab: dict[str, int]) -> list[list[str]]:
    """Adds words to the vocabulary, one pair at a time; gives the merges that make them."""
    merges = []
    for piece in pieces:
        left = piece[0]
        for right in piece[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append([left, right])
            left += right
    return merges


def byte_level(**changes: Any) -> ChatFacts:
    """Specials 0 and 1, bytes 2…257, then words and the parts of words (parts of characters, too)."""
    letters = alphabet()
    vocab = {text: i for i, text in enumerate([*SPECIALS, *letters])}
    merges = _merged([[letters[b] for b in word.encode()] for word in WORDS], vocab)
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return _facts(_tokenizer(_bpe(vocab, merges), pre_tokenizer=kind, decoder=kind), **changes)


def sentence_piece(**changes: Any) -> ChatFacts:
    """Specials 0 and 1, byte tokens 2…257, then ▁, letters and words."""
    vocab = {
        text: i for i, text in enumerate([*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), "▁", *"helowa"])
    }
    merges = _merged([list("hello"), list("▁he"), list("▁wo")], vocab)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]  # fmt: skip
    model = _bpe(vocab, merges, unk_token="<s>", fuse_unk=True, byte_fallback=True)
    parts = {"normalizer": normalizer, "decoder": {"type": "Sequence", "decoders": decoders}}
    return _facts(_tokenizer(model, **parts), **changes)
