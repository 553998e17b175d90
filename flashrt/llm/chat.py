"""Text and messages to token ids and back.

Rules, the same for every model:

- Messages go through the model's chat template, which alone decides whether a BOS token stands first.
- A raw prompt gets the BOS token where the tokenizer adds one, once. An empty raw prompt is that BOS token
  alone, or a RequestError where there is none.
- Special tokens written out in a prompt or message (`<|im_end|>`) become those tokens, as in transformers:
  the rendered template is one text. Remove them from text you don't trust, or `encode` it by itself.
- Bytes that form no character decode to U+FFFD, one for each longest ill-formed part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from threading import Lock, Thread
from typing import Any

from flashrt.errors import ModelError, RequestError, UnsupportedModel
from flashrt.frontend.imported import ChatFacts
from flashrt.llm.text import TextStream

Message = Mapping[str, Any]

_DUPLICATE = re.compile(r"<\|duplicate (\d+) of (\d+)\|>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")
# transformers marks the assistant's text with these tags; they print nothing
_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters for bytes: printable Latin-1 stands for itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


class Chat:
    """The text side of one language model. Loads its tokenizer at first use (the `tokenizers` package)."""

    def __init__(self, facts: ChatFacts) -> None:
        self.facts = facts
        self._lock, self._loading = Lock(), Lock()
        self._loaded: Any = None

    def prepare(self) -> None:
        """Begins to load the tokenizer on another thread; whoever needs it first waits for that."""

        def load() -> None:
            with suppress(ModelError):  # it comes again where the tokenizer is needed
                _ = self._tokenizer

        Thread(target=load, name="flashrt-tokenizer", daemon=True).start()

    # --- ids → text

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of the ids. special: whether special tokens show. Ids that are no token give nothing."""
        shown = self.token_bytes if special else self._plain_bytes
        text = b"".join(map(shown, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._pieces.strip else text

    def stream(self, *, special: bool = False) -> TextStream:
        """A fresh stream; its pieces joined are what `decode` gives."""
        return TextStream(self.token_bytes if special else self._plain_bytes, self._pieces.strip)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; b"" where there is no such token."""
        return self._pieces.bytes_of(self.token(token), token)

    def token(self, token: int) -> str:
        """A token as the vocabulary writes it; "" where there is no such token."""
        token = self._pieces.duplicates.get(token, token)
        found: str | None = self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        return found or ""

    def _plain_bytes(self, token: int) -> bytes:
        return b"" if token in self._pieces.special else self.token_bytes(token)

    # --- text → ids

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text, without BOS. special: whether special tokens written out in it become those
        tokens; otherwise they are ordinary text."""
        tokenizer = self._tokenizer
        with self._lock:
            tokenizer.encode_special_tokens = not special
            try:
                ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            except (TypeError, UnicodeEncodeError) as error:
                raise RequestError(f"the text can't be encoded: {error}") from None
        return ids

    def prompt(self, text: str) -> list[int]:
        """The ids of a raw prompt: no template, BOS where the tokenizer adds one.

        Raises RequestError when nothing comes out (empty text and no BOS).
        """
        ids = self.encode(text, special=True)
        bos = self.facts.bos
        if bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        if not ids:
            raise RequestError("the prompt is empty", hint="this model has no BOS token to begin with")
        return ids

    def conversation(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any
    ) -> list[int]:
        """The ids of a conversation. Raises RequestError as `render` does, and when nothing comes out."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **extra)
        ids = self.encode(text, special=True)
        if not ids:
            raise RequestError("the chat template made an empty prompt of these messages")
        return ids

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The text of a conversation by the model's template. extra: more names for the template (`tools`).

        Raises RequestError when there is no template, a message has no role, or the template refuses.
        """
        if not self.facts.template:
            raise RequestError(
                "this model has no chat template", hint="send the text as a raw prompt (--raw)"
            )
        if not messages or not all(
            isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages
        ):
            raise RequestError("messages must be a list of objects, each with a role")
        names = {**self.facts.special, "tools": None, **extra}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text: str = self._template.render(**names)
        except RequestError:
            raise
        except Exception as error:  # the template is the model's own program: anything may come out of it
            raise RequestError(f"the chat template failed on these messages: {error}") from error
        return text

    # --- loaded at first use

    @property
    def _tokenizer(self) -> Any:
        with self._loading:
            if self._loaded is None:
                self._loaded = _load(self.facts.tokenizer)
        return self._loaded

    @cached_property
    def _pieces(self) -> _Pieces:
        return _Pieces(self._tokenizer, self.facts.tokenizer)

    @cached_property
    def _template(self) -> Any:
        return _compile(self.facts.template)


def _load(text: str) -> Any:
    """The tokenizer of a tokenizer.json. Raises ModelError. Other threads run Python meanwhile."""
    from tokenizers import Tokenizer  # not at import: 0.1 s that a plan's tools don't need

    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the package raises plain Exception
        raise ModelError(f"the model's tokenizer can't be loaded: {error}") from None


def encoded(tokenizer: str, text: str) -> tuple[list[int], list[int]]:
    """(ids, types) of a text's tokens as a text encoder takes them: with its special tokens, and cut.

    tokenizer: the text of a `tokenizer.json`.
    """
    made = _load(tokenizer).encode(text)
    return list(made.ids), list(made.type_ids)


class _Pieces:
    """How tokens stand for bytes.

    tokenizer: a loaded one; text: what it was loaded from.
    added: id → text of tokens that aren't in BPE's alphabet. special: ids that `decode` leaves out.
    duplicates: id → the id with the same text. strip: leading spaces of a text to drop.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.added = {id: token.content for id, token in added.items()}
        self.special = {id for id, token in added.items() if token.special}
        self.duplicates = {int(a): int(b) for a, b in _DUPLICATE.findall(text)}
        decoder = tokenizer.decoder  # its state is its part of the text: reading all of that takes longer
        self._decoder = _decoder(json.loads(decoder.__getstate__()) if decoder else {"type": "none"})
        self.strip = self._decoder[1]

    def bytes_of(self, piece: str, token: int) -> bytes:
        """The bytes of a piece of the vocabulary."""
        if self.duplicates.get(token, token) in self.added:
            return piece.encode()
        return self._decoder[0](piece)


def _decoder(spec: Mapping[str, Any]) -> tuple[Callable[[str], bytes], int]:
    """(piece → bytes, leading spaces to strip) of a tokenizer.json decoder. Raises UnsupportedModel."""
    parts = {d["type"]: d for d in spec["decoders"]} if spec["type"] == "Sequence" else {spec["type"]: spec}
    if set(parts) == {"ByteLevel"}:
        return _byte_level, 0
    if set(parts) == {"Metaspace"}:
        return _spaced, int(parts["Metaspace"].get("prepend_scheme", "always") != "never")
    if set(parts) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _spaced, int("Strip" in parts)
    raise UnsupportedModel(
        f"the tokenizer's decoder {'+'.join(parts)} isn't supported",
        hint="known: ByteLevel, Metaspace, and sequences of Replace, ByteFallback, Fuse, Strip",
    )


_ALPHABET = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[c] for c in piece])
    except KeyError:
        return piece.encode()


def _spaced(piece: str) -> bytes:
    """SentencePiece: `▁` is a space, `<0xE2>` a byte."""
    if match := _BYTE.match(piece):
        return bytes([int(match[1], 16)])
    return piece.replace("▁", " ").encode()


def _compile(template: str) -> Any:
    """A template in a sandbox, with the names that chat templates expect. Raises RequestError."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise RequestError(f"the chat template refuses: {message}")

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    text = _GENERATION.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", template)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise RequestError(f"the model's chat template isn't valid: {error}") from None
