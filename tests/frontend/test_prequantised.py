"""Weights of AWQ, GPTQ and compressed-tensors checkpoints: what is read is what they mean, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flashrt.errors import FlashrtError, ModelError, UnsupportedModel
from flashrt.frontend import prequantised, prequantised_config, safetensors
from flashrt.ir.types import TensorType, Weight
from flashrt.layouts import LAYOUTS, unpack
from flashrt.weights.formats import native_layout
from flashrt.weights.index import EXACT_LAYOUT, WeightIndex
from flashrt.weights.packed import index_from_json, index_to_json
from flashrt.weights.source import IndexSource
from tests.quantised_checkpoints import FORMS, Form, Quantised, config, quantised, tensors

N, K = 48, 256


def written(folder: Path, form: Form, n: int = N, k: int = K) -> tuple[Path, Quantised]:
    """A file with one module, "a", and a plain tensor."""
    rng = np.random.default_rng(2)
    w = rng.standard_normal((n, k)).astype(np.float32) * np.float32(form.big) + np.float32(0.2 * form.big)
    made = quantised(w, form, rng)
    path = folder / "model.safetensors"
    save_file({**tensors("a", made, form), "norm.weight": torch.ones(4)}, path)
    return path, made


def opened(path: Path, facts: dict[str, Any]) -> WeightIndex:
    scheme = prequantised_config.read({"quantization_config": facts}, path.parent / "config.json")
    assert scheme
    return prequantised.joined(safetensors.read_index([path]), scheme)


def values(index: WeightIndex, layout: str, n: int, k: int, lo: int = 0, hi: int | None = None) -> Any:
    """Rows of "a" in a layout, as its definition has them."""
    hi = n if hi is None else hi
    weight = Weight("a", TensorType("f32", (n, k)), ("a.weight",), layout)
    data = np.empty(LAYOUTS[layout].bytes(hi - lo, k), np.uint8)
    IndexSource(index).read(weight, lo, hi, data)
    return unpack(LAYOUTS[layout], data, hi - lo, k)


@pytest.mark.parametrize("name", FORMS)
def test_what_is_read_is_what_was_meant(tmp_path: Path, name: str) -> None:
    form = FORMS[name]
    path, made = written(tmp_path, form)
    index = opened(path, config(form))
    assert set(index.tensors) == {"a.weight", "norm.weight"}
    kind = index.tensors["a.weight"].format
    exact = EXACT_LAYOUT.get(kind, "f32")
    assert (exact == "f32") == form.ordered, "the quants weren't kept"
    assert exact == native_layout(kind) or form.ordered
    for layout in {exact, "f32"}:
        np.testing.assert_array_equal(values(index, layout, N, K), made.value)
    np.testing.assert_array_equal(values(index, exact, N, K, 16, 48), made.value[16:48])


def test_what_decides_the_layout(tmp_path: Path) -> None:
    wanted = {
        "awq-32": "UINT4", "gptq-4": "INT4", "gptq-8-rows-uneven": "UINT8", "pack-4-uneven": "UINT4",
        "int8-rows": "INT8", "int8-tensor": "INT8_F32", "pack-4-rows": "INT8_F32",
        "pack-4-bf16-small": "UINT4", "gptq-act-order": "GROUPED",
    }  # fmt: skip
    for name, form in wanted.items():
        path, _ = written(tmp_path, FORMS[name])
        assert opened(path, config(FORMS[name])).tensors["a.weight"].format == form, name


@pytest.mark.parametrize("name", ["gptq-4-rows", "gptq-8-rows-uneven", "pack-8-rows-uneven", "int8-rows"])
def test_sizes_that_fill_no_block(tmp_path: Path, name: str) -> None:
    path, made = written(tmp_path, FORMS[name], 40, 72)
    index = opened(path, config(FORMS[name]))
    layout = native_layout(index.tensors["a.weight"].format)
    np.testing.assert_array_equal(values(index, layout, 40, 72), made.value)


@pytest.mark.parametrize(
    ("name", "layout", "off"),
    [("awq-32", "q4m.16x32", 2e-3), ("gptq-act-order", "q8.16x32", 2e-2), ("pack-4-rows", "q4.16x32", 2e-3),
     ("gptq-8-rows-uneven", "q8.16x32", 2e-2), ("awq-32", "bf16", 2e-2)],
)  # fmt: skip
def test_other_layouts_round(tmp_path: Path, name: str, layout: str, off: float) -> None:
    path, made = written(tmp_path, FORMS[name])
    got = values(opened(path, config(FORMS[name])), layout, N, K)
    assert 0 < np.abs(got - made.value).max() < off


def test_zero_points_of_v2_under_the_name_of_v1(tmp_path: Path) -> None:
    form = Form("gptq_v2")
    path, made = written(tmp_path, form)
    index = opened(path, {**config(form), "checkpoint_format": "gptq"})
    np.testing.assert_array_equal(values(index, "q4.16x32", N, K), made.value)


def test_bits_and_groups_of_their_own(tmp_path: Path) -> None:
    """`dynamic` gives modules other bits: they are read from the tensors."""
    form = Form("gptq", 8, 64)
    path, made = written(tmp_path, form)
    facts = {**config(form), "bits": 4, "group_size": 128, "dynamic": {"+:a": {"bits": 8, "group_size": 64}}}
    np.testing.assert_array_equal(values(opened(path, facts), "q8.16x32", N, K), made.value)


def test_a_plan_keeps_where_everything_lies(tmp_path: Path) -> None:
    path, made = written(tmp_path, FORMS["gptq-act-order"])
    index = opened(path, config(FORMS["gptq-act-order"]))
    again = index_from_json(index_to_json(index))
    assert again == index
    np.testing.assert_array_equal(values(again, "f32", N, K), made.value)


# ---- what a user can get wrong ---------------------------------------------------
def changed(name: str, **changes: Any) -> dict[str, Any]:
    return {**config(FORMS[name]), **changes}


def in_group(**changes: Any) -> dict[str, Any]:
    facts = config(FORMS["pack-4-bf16"])
    group = facts["config_groups"]["group_0"]
    group.update({k: v for k, v in changes.items() if k in group})
    group["weights"].update({k: v for k, v in changes.items() if k not in group})
    return facts


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, r"config\.json: .*quant_method is 'bitsandbytes'"),
    "fp8": ({"quant_method": "fp8"}, r"read: awq, gptq, compressed-tensors"),
    "mxfp4": ({"quant_method": "mxfp4"}, "'mxfp4'"),
    "no method": ({"bits": 4}, "quant_method is missing"),
    "gemv": (changed("awq-32", version="GEMV"), r"quantization_config\.version is 'GEMV'.*gemm"),
    "llm-awq": (changed("awq-32", backend="llm-awq"), "backend is 'llm-awq'"),
    "awq of 8 bits": (changed("awq-32", bits=8), "bits is 8"),
    "bits": (changed("gptq-4", bits=3), r"bits is 3.*read: 4, 8"),
    "group": (changed("gptq-4", group_size=16), r"group_size is 16.*multiples of 32"),
    "marlin": (changed("gptq-4", is_marlin_format=True), "is_marlin_format"),
    "marlin format": (changed("gptq-4", checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
    "sparse": (changed("pack-8", sparsity_config={"format": "sparse-24"}), r"sparsity_config\.format"),
    "keys and values": (changed("pack-8", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "floats": (changed("pack-8", format="float-quantized"), "format is 'float-quantized'"),
    "activations": (in_group(input_activations={"num_bits": 8}), r"group_0\.input_activations"),
    "packed group": (in_group(group_size=48), r"group_0\.weights\.group_size is 48"),
    "packed bits": (in_group(num_bits=2), r"weights\.num_bits is 2"),
    "strategy": (in_group(strategy="block"), "strategy is 'block'"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(tmp_path: Path, what: str) -> None:
    facts, message = REFUSED[what]
    with pytest.raises(UnsupportedModel, match=message):
        prequantised_config.read({"quantization_config": facts}, tmp_path / "config.json")


DAMAGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "no scales": ("gptq-4", {"a.scales": None}, r"a\.scales is in none of the model's files"),
    "no zero points": ("awq-32", {"a.qzeros": None}, r"a\.qzeros is in none"),
    "no shape": ("pack-8", {"a.weight_shape": None}, r"a\.weight_shape is in none"),
    "no integers": ("gptq-4", {"a.qweight": None}, r"no tensor X\.qweight is in the model's files"),
    "few scales": (
        "gptq-4", {"a.scales": lambda t: t[:-1]},
        r"model\.safetensors: tensor a\.scales has shape \[7, 48\], not groups of 32 in rows of 256"),
    "few channels": (
        "awq-32", {"a.qweight": lambda t: t[:, :-1]}, r"a\.qweight has shape \[256, 5\], not \[256, 6\]"),
    "few zero points": ("gptq-4-128-uneven", {"a.qzeros": lambda t: t[:, 1:]}, r"a\.qzeros has shape"),
    "type": ("gptq-4", {"a.qweight": lambda t: t.float()}, r"a\.qweight is F32; in gptq it is I32"),
    "columns": ("gptq-4", {"a.g_idx": lambda t: t[1:]}, r"a\.g_idx has shape \[255\]"),
    "groups": ("gptq-4", {"a.g_idx": lambda t: t + 90}, r"a\.g_idx .*numbers of groups"),
    "other shape": (
        "pack-8", {"a.weight_shape": lambda t: t * 2}, r"weight_packed.*X\.weight_shape says \[96, 512\]"),
    "three axes": ("pack-8", {"a.weight_packed": lambda t: t[None]}, r"a\.weight_packed .*a matrix"),
    "scales of rows": (
        "int8-rows", {"a.weight_scale": lambda t: t[:5]}, r"a\.weight_scale has shape \[5, 1\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(tmp_path: Path, what: str) -> None:
    name, changes, message = DAMAGE[what]
    form = FORMS[name]
    made = tensors("a", quantised(np.random.default_rng(0).standard_normal((N, K)).astype(np.float32), form,
                                  np.random.default_rng(1)), form)  # fmt: skip
    for tensor, change in changes.items():
        old = made.pop(tensor)
        if change is not None:
            made[tensor] = change(old).contiguous()
    save_file(made, tmp_path / "model.safetensors")
    with pytest.raises(FlashrtError, match=message) as caught:
        opened(tmp_path / "model.safetensors", config(form))
    assert isinstance(caught.value, ModelError) and caught.value.hint


def test_a_damaged_scale_is_found_when_weights_are_read(tmp_path: Path) -> None:
    form = FORMS["gptq-4"]
    made = quantised(np.ones((N, K), np.float32), form, np.random.default_rng(0))
    made.scale[3, 1] = float("inf")
    save_file(tensors("a", made, form), tmp_path / "model.safetensors")
    index = opened(tmp_path / "model.safetensors", config(form))
    with pytest.raises(ModelError, match=r"tensor a\.weight \(INT4\) has values that the f16 scales"):
        values(index, "q4.16x32", N, K)


def test_bits_that_no_weight_has(tmp_path: Path) -> None:
    path, _ = written(tmp_path, FORMS["pack-8"])
    with pytest.raises(ModelError, match=r"a\.weight_scale .* not weights of 4 bits, .*it has 8"):
        opened(path, config(Form("pack-quantized", 4, 64)))


def test_experts_of_a_layer_are_kept_alike(tmp_path: Path) -> None:
    """One of two has even zero points, and is kept as the other one is."""
    form = Form("awq", 4, 32, even=False)
    w = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    both = [quantised(w, f, np.random.default_rng(1)) for f in (form, Form("awq", 4, 32))]
    made = {k: v for e, x in enumerate(both) for k, v in tensors(f"mlp.experts.{e}.up_proj", x, form).items()}
    save_file(made, tmp_path / "model.safetensors")
    index = opened(tmp_path / "model.safetensors", config(form))
    assert {t.format for t in index.tensors.values()} == {"UINT4"}
    source = IndexSource(index)
    for e, x in enumerate(both):
        weight = Weight("a", TensorType("f32", (N, K)), (f"mlp.experts.{e}.up_proj.weight",), "q4mf.16x32")
        data = np.empty(LAYOUTS["q4mf.16x32"].bytes(N, K), np.uint8)
        source.read(weight, 0, N, data)
        np.testing.assert_array_equal(unpack(LAYOUTS["q4mf.16x32"], data, N, K), x.value)
