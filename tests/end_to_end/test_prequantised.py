"""Quantised checkpoints, and plain ones kept in fewer bits: the logits of transformers on what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flashrt import engine
from flashrt.compiler import CompileOptions
from flashrt.layouts import LAYOUTS, unpack
from flashrt.program import Plan
from flashrt.weights.index import rounded
from flashrt.weights.source import IndexSource, flat
from tests.cli.calling import ON_REFERENCE, call, refused
from tests.end_to_end.flat import F32, Flat
from tests.end_to_end.test_transformers import theirs
from tests.end_to_end.tiny_hf import VOCAB, WHOLE, write_model
from tests.quantised_checkpoints import FORMS, Form, config, quantised, tensors

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
}  # fmt: skip
LOSSLESS = 1e-3  # of logits with a standard deviation of about 1
IDS = np.random.default_rng(3).integers(3, VOCAB, 40).tolist()
QUICK = ("awq-128", "gptq-4")
ALL = [pytest.param(n, marks=() if n in QUICK else (pytest.mark.slow,)) for n in FORMS]


def write_quantised(folder: Path, form: Form, kind: str = "llama", shard: str = WHOLE, **facts: Any) -> Any:
    """A folder whose linear layers but the head are in that form; the model that it means, in f32."""
    write_model(folder, kind, shard=shard, **{**SIZES, **facts})
    turned = kind == "gpt2"  # its plain matrices are stored [in, out]
    rng = np.random.default_rng(0)
    meant: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        kept: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            meant[name] = tensor.float()
            if not name.endswith("_proj.weight"):
                kept[name] = tensor
                continue
            w = tensor.float().numpy()
            made = quantised(w.T if turned else w, form, rng)
            meant[name] = torch.from_numpy(made.value.T.copy() if turned else made.value)
            kept |= tensors(name.removesuffix(".weight"), made, form)
        save_file(kept, path)
    model = _model_of(folder, meant)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config(form)}))
    return model


def _model_of(folder: Path, weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model of the folder's configuration with these weights, saved and loaded as one does."""
    plain = folder / "meant"
    plain.mkdir()
    (plain / "config.json").write_text((folder / "config.json").read_text())
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def planned(folder: Path, device: str = "cpu:0", **options: Any) -> Plan:
    chosen = CompileOptions(context=64, tokens=64, sequences=64, **options)
    return engine.obtain(str(folder), chosen, devices=(device,)).plan


def logits(plan: Plan) -> F32:
    with engine.open_plan(plan, pages=8, threads=1, poison=True) as program:
        return Flat(program, {"a": IDS}).step([("a", len(IDS))])["a"]


def layouts(plan: Plan) -> dict[str, str]:
    return {w.name: w.layout for w in plan.logical.weights if len(w.type.shape) == 2}


def check(got: F32, wanted: F32, tolerance: float) -> None:
    assert wanted.std() > 0.3
    assert np.abs(got - wanted).max() < tolerance
    assert (got.argmax(1) == wanted.argmax(1)).all()


@pytest.mark.parametrize("name", ALL)
def test_quantised_checkpoints(tmp_path: Path, name: str) -> None:
    form = FORMS[name]
    model = write_quantised(tmp_path, form)
    device = "cpu:0" if name in QUICK else "reference:0"
    plan = planned(tmp_path, device, quantize="lossless" if form.ordered else "")
    kept = [layout for weight, layout in layouts(plan).items() if "_proj" in weight]
    assert kept and all((x == "f32") == form.ordered for x in kept), kept
    check(logits(plan), theirs(model, IDS), LOSSLESS)


def test_files_in_parts(tmp_path: Path) -> None:
    model = write_quantised(tmp_path, FORMS["pack-4-uneven"], shard="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(logits(planned(tmp_path, quantize="lossless")), theirs(model, IDS), LOSSLESS)


@pytest.mark.slow
def test_matrices_that_plain_files_store_turned(tmp_path: Path) -> None:
    model = write_quantised(
        tmp_path, FORMS["gptq-4"], "gpt2", n_embd=128, n_layer=1, n_head=4, n_positions=64
    )
    plan = planned(tmp_path)
    assert {x for w, x in layouts(plan).items() if "c_proj" in w} == {"q4.16x32"}
    check(logits(plan), theirs(model, IDS), LOSSLESS)


@pytest.mark.slow
def test_experts(tmp_path: Path) -> None:
    model = write_quantised(tmp_path, FORMS["awq-32"], "qwen3_moe", **EXPERTS)
    plan = planned(tmp_path)
    assert {layouts(plan)[w] for w in layouts(plan) if ".experts." in w} == {"q4mf.16x32"}
    check(logits(plan), theirs(model, IDS), LOSSLESS)


@pytest.mark.slow
def test_columns_out_of_order_are_rounded(tmp_path: Path) -> None:
    model = write_quantised(tmp_path, FORMS["gptq-act-order"])
    plan = planned(tmp_path)
    assert {x for w, x in layouts(plan).items() if "_proj" in w} == {"q8.16x32"}
    assert rounded(plan.logical.weights, plan.weights)["GROUPED in q8.16x32"] == 14
    got, wanted = logits(plan), theirs(model, IDS)
    assert 0 < np.abs(got - wanted).max() < 0.2 * wanted.std()
    assert (got.argmax(1) == wanted.argmax(1)).mean() > 0.9


# ---- plain checkpoints ----------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f16")]
)
def test_plain_types_are_kept(tmp_path: Path, dtype: torch.dtype, layout: str) -> None:
    model = write_model(tmp_path, "llama", dtype=dtype)
    plan = planned(tmp_path)
    assert set(layouts(plan).values()) == {layout}
    assert layouts(planned(tmp_path, quantize="lossless")) == layouts(plan)
    check(logits(plan), theirs(model, IDS), LOSSLESS)


@pytest.mark.parametrize(
    "quantize",
    ["q4", pytest.param("q8", marks=pytest.mark.slow), pytest.param("bf16", marks=pytest.mark.slow)],
)
def test_a_plain_folder_is_rounded(tmp_path: Path, quantize: str) -> None:
    """The logits are those of transformers on the rounded weights; what is excluded stays."""
    model = write_model(tmp_path, "llama", dtype=torch.float32)
    plan = planned(tmp_path, quantize=quantize, quantize_exclude=("lm_head", "o_proj"))
    found = layouts(plan)
    stays = {w for w in found if "lm_head" in w or "o_proj" in w}
    wanted = {"q4": "q4m.16x32", "q8": "q8.16x32", "bf16": "bf16"}[quantize]
    assert {found[w] for w in stays} == {"f32"}
    assert {LAYOUTS[found[w]].grouped for w in set(found) - stays} == {wanted}
    before = theirs(model, IDS)
    _round(model, plan)
    check(logits(plan), theirs(model, IDS), LOSSLESS)
    assert np.abs(theirs(model, IDS) - before).max() > LOSSLESS, "nothing was rounded"


@pytest.mark.slow
def test_experts_of_a_plain_folder_are_rounded(tmp_path: Path) -> None:
    model = write_model(tmp_path, "qwen3_moe", **EXPERTS)
    plan = planned(tmp_path, quantize="q8")
    found = layouts(plan)
    assert {x for w, x in found.items() if w.endswith("mlp.gate.weight")} == {"f32"}
    assert {x for w, x in found.items() if ".experts." in w} == {"q8.16x32"}
    got, wanted = logits(plan), theirs(model, IDS)
    assert 0 < np.abs(got - wanted).mean() < 0.05 * wanted.std()


def _round(model: Any, plan: Plan) -> None:
    """Gives transformers' model the values that the plan's matrices have."""
    state, source = model.state_dict(), IndexSource(plan.weights, plan.constants)
    for weight in plan.logical.weights:
        if len(weight.type.shape) != 2:
            continue
        layout, (n, k) = LAYOUTS[weight.layout], flat(weight)
        data = np.empty(layout.bytes(n, k), np.uint8)
        source.read(weight, 0, n, data)
        rows = torch.from_numpy(unpack(layout, data, n, k))
        parts = rows.split([len(state[s]) for s in weight.sources])
        for name, part in zip(weight.sources, parts, strict=True):
            state[name].copy_(part)


# ---- the command line ------------------------------------------------------------
def test_refusals_end_in_one_message(tmp_path: Path) -> None:
    write_quantised(tmp_path, FORMS["gptq-4"])
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.scales"
    save_file({k: v for k, v in weights.items() if k != name}, tmp_path / "model.safetensors")
    refused(call("compile", tmp_path, *ON_REFERENCE), f"tensor {name} is in none of the model's files")
    facts = json.loads((tmp_path / "config.json").read_text())
    facts["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    refused(
        call("compile", tmp_path, *ON_REFERENCE),
        f"{tmp_path / 'config.json'}: quantization_config.quant_method is 'bitsandbytes'",
        "docs/checkpoints.md",
    )
