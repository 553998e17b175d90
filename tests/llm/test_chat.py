"""Prompts, templates and tokens of a language model's text side."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flashrt.errors import ModelError, RequestError, UnsupportedModel
from flashrt.llm.chat import Chat
from tests.llm import tiny_chat

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}bot:{% endif %}"
)
USER = [{"role": "user", "content": "hello"}]
BYTES = Chat(tiny_chat.byte_level())
PIECES = Chat(tiny_chat.sentence_piece())


def test_import_is_light() -> None:
    code = "import flashrt.llm.chat, flashrt.weights.packed, sys; "
    code += "print({'torch', 'transformers', 'tokenizers', 'jinja2', 'gguf'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@given(st.text())
def test_text_survives(text: str) -> None:
    for chat in (BYTES, PIECES):
        assert chat.decode(chat.encode(text)) == text.replace("▁", " " if chat is PIECES else "▁")


@given(st.lists(st.integers(0, 290)))
def test_byte_level_decodes_as_tokenizers_does(ids: list[int]) -> None:
    theirs = Tokenizer.from_str(tiny_chat.byte_level().tokenizer)
    assert BYTES.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert BYTES.decode(ids, special=True) == theirs.decode(ids, skip_special_tokens=False)


@given(st.text(alphabet="helo wé日"))
def test_sentence_piece_decodes_as_tokenizers_does(text: str) -> None:
    """For well-formed text; the package breaks a whole run of byte tokens when one of them is bad."""
    theirs = Tokenizer.from_str(tiny_chat.sentence_piece().tokenizer)
    ids = PIECES.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert PIECES.decode(ids) == theirs.decode(ids)


def test_special_tokens_only_when_asked() -> None:
    assert BYTES.encode("<|end|>", special=True) == [0]
    plain = BYTES.encode("<|end|>")
    assert 0 not in plain and BYTES.decode(plain) == "<|end|>"
    assert (BYTES.decode([0]), BYTES.decode([0], special=True)) == ("", "<|end|>")


def test_threads_do_not_mix_up_special_tokens() -> None:
    wanted = {True: BYTES.encode("a<|end|>b", True), False: BYTES.encode("a<|end|>b", False)}
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda i: (i % 2 == 0, BYTES.encode("a<|end|>b", i % 2 == 0)), range(400)))
    assert all(ids == wanted[special] for special, ids in got)


def test_ids_outside_the_vocabulary() -> None:
    assert BYTES.decode([10**6, -1, 2**40]) == "" and BYTES.token(-1) == ""


def test_repeated_tokens_decode_alike() -> None:
    facts = json.loads(tiny_chat.byte_level().tokenizer)
    h = facts["model"]["vocab"]["h"]
    facts["model"]["vocab"][f"<|duplicate 999 of {h}|>"] = 999
    chat = Chat(tiny_chat.byte_level(tokenizer=json.dumps(facts)))
    assert chat.decode([999, h]) == "hh" and chat.encode("h") == [h]


# --- prompts


def test_raw_prompt_and_bos() -> None:
    with_bos = Chat(tiny_chat.byte_level(bos=1))
    text = BYTES.encode("hello")
    assert BYTES.prompt("hello") == text
    assert with_bos.prompt("hello") == [1, *text]
    assert with_bos.prompt("<s>hello") == [1, *text]
    assert with_bos.prompt("") == [1]
    with pytest.raises(RequestError, match="prompt is empty"):
        BYTES.prompt("")
    assert BYTES.prompt("hello") == text


def test_template() -> None:
    chat = Chat(tiny_chat.byte_level(template=TEMPLATE, bos=1))
    assert chat.render(USER) == "user: hello<|end|>bot:"
    assert chat.render(USER, add_generation_prompt=False) == "user: hello<|end|>"
    assert chat.conversation(USER) == chat.encode("user: hello<|end|>bot:", special=True)
    assert 0 in chat.conversation(USER)


def test_special_text_in_a_message_becomes_the_token() -> None:
    """As in transformers, and as the module's rules say."""
    chat = Chat(tiny_chat.byte_level(template="{{ messages[0].content }}"))
    assert chat.conversation([{"role": "user", "content": "<|end|>"}]) == [0]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages|tojson }}", '[{"role": "user", "content": "hello"}]'),
        ("{{ {'é': 1}|tojson(indent=1) }}", '{\n "é": 1\n}'),
        ("{{ strftime_now('%%')}}", "%"),
        ("{{ tools is none }}{{ bos_token }}", "True<s>"),
        ("{% for m in messages %}\n  x\n  {% break %}\n{% endfor %}", "  x\n"),
        ("a\n{%- generation %} b {% endgeneration -%}\nc", "a b c"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
    ],
)
def test_template_names(template: str, text: str) -> None:
    assert Chat(tiny_chat.byte_level(template=template)).render(USER) == text


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses: roles must alternate"),
        ("{% for %}", "isn't valid"),
        ("{{ messages[0].content.parts.more }}", "failed"),
        ("{{ 1 / 0 }}", "failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),
        ("{{ messages.append(1) }}", "failed"),
        ("{% for i in range(10000000) %}x{% endfor %}", "failed"),
        ("{% include 'other' %}", "failed"),
        ("{{ '' }}", "empty prompt"),
    ],
)
def test_template_errors(template: str, error: str) -> None:
    chat = Chat(tiny_chat.byte_level(template=template))
    with pytest.raises(RequestError, match=error):
        chat.conversation(USER)


def test_no_template_and_bad_messages() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        BYTES.render(USER)
    chat = Chat(tiny_chat.byte_level(template=TEMPLATE))
    for messages in ([], ["hello"], [{"content": "x"}], [{"role": 3}]):
        with pytest.raises(RequestError, match="each with a role"):
            chat.render(messages)  # type: ignore[arg-type]


def test_a_tokenizer_that_is_loaded_ahead() -> None:
    chat, broken = Chat(tiny_chat.byte_level()), Chat(replace(tiny_chat.byte_level(), tokenizer="{"))
    for each in (chat, broken):
        each.prepare()
    assert chat.encode("hello") == BYTES.encode("hello")
    with pytest.raises(ModelError, match="can't be loaded"):  # where it is needed, not before
        broken.encode("hello")


def test_broken_and_unknown_tokenizers() -> None:
    with pytest.raises(ModelError, match="can't be loaded"):
        Chat(tiny_chat.byte_level(tokenizer='{"model": 3}')).encode("x")
    facts = json.loads(tiny_chat.byte_level().tokenizer)
    facts["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Chat(tiny_chat.byte_level(tokenizer=json.dumps(facts))).decode([5])


def test_text_that_is_no_text() -> None:
    with pytest.raises(RequestError, match="can't be encoded"):
        BYTES.encode("\ud800")
