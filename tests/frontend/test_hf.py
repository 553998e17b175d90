"""Hugging Face folders: the graph computes what the model computes, and every damage has its own error."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, processors
from transformers import AutoConfig, AutoModelForCausalLM

from flashrt.errors import FlashrtError, ModelError, UnsupportedModel
from flashrt.frontend import hub
from flashrt.frontend.hf import load_hf, trace_config
from flashrt.frontend.imported import Imported
from flashrt.ir.text import read_logical, to_text
from tests.frontend import aten

SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 99, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One cache of the gate's verdicts for the whole file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHRT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def _save(folder: Path, kind: str, **facts: Any) -> torch.nn.Module:
    """A folder with a random model and a word tokenizer that puts <s> first."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **facts)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1))
    model.save_pretrained(folder)
    words = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "<unk>", "a", "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return model  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module, Imported]:
    folder = tmp_path_factory.mktemp("llama")
    model = _save(folder, "llama", **SIZES)
    return folder, model, load_hf(str(folder))


@pytest.fixture
def copy(llama: tuple[Path, torch.nn.Module, Imported], tmp_path: Path) -> Path:
    """A folder to damage."""
    return Path(shutil.copytree(llama[0], tmp_path / "model"))


def _change(path: Path, **facts: Any) -> None:
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in {**old, **facts}.items() if v is not None}))


def _check_logits(imported: Imported, model: torch.nn.Module) -> aten.Values:
    ids = torch.randint(3, 99, (12,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    rows = torch.tensor([0, 5, 11], dtype=torch.int32)
    values = aten.run(imported, {"ids": ids, "positions": torch.arange(12, dtype=torch.int32), "rows": rows})
    with torch.no_grad():
        wanted = model(input_ids=ids[None].long(), use_cache=False).logits[0]
    got = values[imported.graph.outputs[0].value]
    torch.testing.assert_close(got, wanted[rows], rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    return values


# ---- the graph -----------------------------------------------------------------
def test_llama_computes_the_same(llama: tuple[Path, torch.nn.Module, Imported]) -> None:
    _, model, imported = llama
    _check_logits(imported, model)


def test_llama_graph(llama: tuple[Path, torch.nn.Module, Imported]) -> None:
    graph = llama[2].graph
    counts = Counter(n.op for n in graph.nodes)
    assert (counts["aten.linear"], counts["flashrt.attention"], counts["aten.rsqrt"], counts["sample"]) == (
        15,
        2,
        5,
        1,
    )
    assert counts["aten.to"] == 1  # positions; nothing else is cast
    names = {n.name for n in graph.nodes}
    assert len(names) == len(graph.nodes)
    assert {
        "embed_tokens",
        "layers.1.self_attn.q_proj",
        "layers.1.mlp.down_proj",
        "layers.0",
        "norm",
        "lm_head",
    } <= names
    assert [str(s.type) for s in graph.states] == ["f32[P,2,2,16,8]"] * 2
    assert [s.name for s in graph.symbols] == ["T", "N", "S", "M", "C", "P", "H"]
    assert [(o.name, o.value) for o in graph.outputs] == [("logits", "select"), ("tokens", "sample")]
    assert graph.nodes[-1].inputs[:2] == ("%select", "%temperature")
    assert read_logical(to_text(graph)) == graph


def test_attention_site(llama: tuple[Path, torch.nn.Module, Imported]) -> None:
    first, second = (n for n in llama[2].graph.nodes if n.op == "flashrt.attention")
    assert first.inputs[3:] == ("%positions", "%seq", "%pages")
    assert dict(first.attrs) == {
        "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 8, "scale": 8**-0.5, "window": 0,
        "softcap": 0.0, "causal": True, "sinks": False,
    }  # fmt: skip
    assert (first.reads, first.writes) == (("kv.0",), ("kv.0",))
    assert (second.reads, second.writes) == (("kv.1",), ("kv.1",))


def test_weights_are_found_by_name(llama: tuple[Path, torch.nn.Module, Imported]) -> None:
    _, model, imported = llama
    held = dict(model.named_parameters())
    assert len(imported.graph.weights) == len(held) + len(imported.constants)
    for weight in imported.graph.weights:
        (source,) = weight.sources
        if source in held:
            torch.testing.assert_close(
                aten.read_weight(imported, source), held[source].detach(), rtol=0, atol=0
            )


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        pytest.param("qwen2", SIZES, marks=pytest.mark.slow),
        pytest.param("mistral", SIZES | {"sliding_window": 5}, marks=pytest.mark.slow),
        ("gemma2", SIZES | {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 2.0}),
        ("gpt2", GPT2),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_other_models_compute_the_same(kind: str, facts: dict[str, Any], tmp_path: Path) -> None:
    model = _save(tmp_path, kind, **facts)
    imported = load_hf(str(tmp_path))
    _check_logits(imported, model)
    attention = [n for n in imported.graph.nodes if n.op == "flashrt.attention"]
    match kind:
        case "qwen2":
            assert sum(w.name.endswith("bias") for w in imported.graph.weights) == 6
        case "mistral":
            assert [a.attr("window") for a in attention] == [5, 5]
        case "gemma2":
            assert [(a.attr("window"), a.attr("softcap")) for a in attention] == [(5, 2.0), (0, 2.0)]
        case "gpt2":
            assert "aten.addmm" not in {n.op for n in imported.graph.nodes}
            weight = next(w for w in imported.graph.weights if w.name == "h.0.mlp.c_fc.weight")
            assert weight.type.shape == (128, 32)
            assert imported.weights.tensors[weight.sources[0]].transposed


@pytest.mark.parametrize("shipped", [True, False])
def test_tied_head(tmp_path: Path, shipped: bool) -> None:
    model = _save(tmp_path, "llama", **SIZES, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    if shipped:
        save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    imported = load_hf(str(tmp_path))
    _check_logits(imported, model)
    uses = [n.op for n in imported.graph.nodes if "@embed_tokens.weight" in n.inputs]
    assert uses == ["aten.embedding", "aten.linear"]
    assert "lm_head.weight" not in {w.name for w in imported.graph.weights}


def test_bf16_shards_keep_their_format(copy: Path) -> None:
    tensors = {k: v.bfloat16() for k, v in load_file(copy / "model.safetensors").items()}
    (copy / "model.safetensors").unlink()
    parts = {"a.safetensors": list(tensors)[:5], "b.safetensors": list(tensors)[5:]}
    for file, names in parts.items():
        save_file({n: tensors[n] for n in names}, copy / file)
    table = {n: file for file, names in parts.items() for n in names}
    _change(copy / "model.safetensors.index.json", weight_map=table)
    imported = load_hf(str(copy))
    assert [Path(f.path).name for f in imported.weights.files] == ["a.safetensors", "b.safetensors"]
    for weight in imported.graph.weights:
        assert (weight.type.dtype, weight.layout) == ("f32", "bf16" if len(weight.type.shape) == 2 else "f32")


def test_names_without_the_model_prefix(copy: Path) -> None:
    path = copy / "model.safetensors"
    save_file({k.removeprefix("model."): v for k, v in load_file(path).items()}, path)
    assert load_hf(str(copy)).weights.tensors["model.norm.weight"].name == "norm.weight"


def test_trace_config_needs_no_folder() -> None:
    graph, constants, names = trace_config(
        AutoConfig.for_model("qwen3", **SIZES | {"num_hidden_layers": 1}, head_dim=8), name="q", context=64
    )
    assert graph.name == "q"
    assert names["layers.0.self_attn.q_norm.weight"] == "model.layers.0.self_attn.q_norm.weight"
    assert constants["model.rotary_emb.inv_freq"].shape == (4,)
    assert {w.layout for w in graph.weights if len(w.type.shape) == 2} == {""}


def test_rope_that_depends_on_length_is_frozen() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    facts = SIZES | {"num_hidden_layers": 1, "rope_parameters": rope}
    config = AutoConfig.for_model("llama", **facts)
    near = trace_config(config, name="x", context=32)[1]["model.rotary_emb.inv_freq"]
    far = trace_config(config, name="x", context=256)[1]["model.rotary_emb.inv_freq"]
    assert near[0] == far[0] == 1.0 and near[-1] > far[-1]


# ---- chat facts ----------------------------------------------------------------
def test_every_end_token_counts(copy: Path) -> None:
    _change(copy / "generation_config.json", eos_token_id=[5, 2])
    _change(
        copy / "tokenizer_config.json", eos_token={"content": "<unk>"}, bos_token="<s>", chat_template="{{x}}"
    )
    chat = load_hf(str(copy)).chat
    assert chat is not None
    assert chat.eos == (5, 2, 3)
    assert (chat.bos, chat.template, chat.context) == (1, "{{x}}", 64)
    assert chat.special == {"bos_token": "<s>", "eos_token": "<unk>"}


def test_template_file_and_explicit_bos(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("from the file")
    _change(copy / "tokenizer_config.json", add_bos_token=False, chat_template="other")
    chat = load_hf(str(copy), context=17).chat
    assert chat is not None
    assert (chat.template, chat.bos, chat.context) == ("from the file", None, 17)


# ---- what a user can get wrong ---------------------------------------------------
def _damage_tensor(folder: Path, name: str, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor)
    save_file(tensors, folder / "model.safetensors")


def _truncate(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count] if count else b"\xff" * 64)


DAMAGE: dict[str, tuple[Any, type[FlashrtError], str]] = {
    "missing tensor": (
        lambda d: _damage_tensor(d, "model.norm.weight", None),
        ModelError, r"lacks 1 of .*\n +model\.norm\.weight"),
    "missing head": (lambda d: _damage_tensor(d, "lm_head.weight", None), ModelError, r"lm_head\.weight"),
    "wrong shape": (
        lambda d: _damage_tensor(d, "model.norm.weight", lambda t: t[:-1].clone()),
        ModelError, r"model\.norm\.weight has shape \[31\], the model wants \[32\]"),
    "truncated": (
        lambda d: _truncate(d / "model.safetensors", 100), ModelError, r"model\.safetensors is truncated"),
    "no header": (
        lambda d: _truncate(d / "model.safetensors", 0), ModelError, r"model\.safetensors is truncated"),
    "missing shard": (
        lambda d: _change(d / "model.safetensors.index.json", weight_map={"x": "gone.safetensors"}),
        ModelError, r"gone\.safetensors is missing"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ModelError, r"has no \*\.safetensors"),
    "pickle only": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        UnsupportedModel, "pickle format only"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), ModelError, r"tokenizer\.json is missing"),
    "bad tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), ModelError, "isn't a tokenizer"),
    "bad config": (lambda d: (d / "config.json").write_text("{"), ModelError, r"config\.json can't be read"),
    "no type": (lambda d: _change(d / "config.json", model_type=None), ModelError, "has no model_type"),
    "unknown type": (
        lambda d: _change(d / "config.json", model_type="lllama"),
        UnsupportedModel, r"'lllama'.*\n.*close to it: llama"),
    "quantised": (
        lambda d: _change(d / "config.json", quantization_config={"quant_method": "gptq"}),
        UnsupportedModel, r"config\.json: quantization_config\.bits is missing"),
    "recurrent": (
        lambda d: _change(d / "config.json", model_type="lfm2", layer_types=["conv", "full_attention"]),
        UnsupportedModel, "layers of kind conv"),
    "encoder": (
        lambda d: _change(d / "config.json", model_type="bart"), UnsupportedModel, "encoder and decoder"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(copy: Path, damage: str) -> None:
    hurt, error, message = DAMAGE[damage]
    hurt(copy)
    with pytest.raises(error, match=message):
        load_hf(str(copy))


@pytest.mark.parametrize("context", [0, 65])
def test_context_out_of_range(copy: Path, context: int) -> None:
    with pytest.raises(ModelError, match="takes 1 to 64"):
        load_hf(str(copy), context=context)


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> str:
        assert kwargs["etag_timeout"] <= 10
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"nobody/nothing can't be downloaded.*\n.*--local-dir"):
        load_hf("nobody/nothing")
    with pytest.raises(ModelError, match="isn't a folder"):
        load_hf("/no/such/folder")


@pytest.mark.slow
def test_8b_traces_in_seconds() -> None:
    import resource
    import time

    facts = SIZES | {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    }  # fmt: skip
    start = time.process_time()
    graph = trace_config(AutoConfig.for_model("llama", **facts), name="8b", context=8192)[0]
    assert time.process_time() - start < 15
    assert len(graph.states) == 32
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1.5e6
