"""fuse: fewer products, the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from flashrt.ir import laws, logical
from flashrt.ir.text import read_logical, to_text
from flashrt.passes.fuse import fuse, fuse_residuals, fuse_siblings, joint_name
from flashrt.passes.recognise import recognise
from tests.passes.evaluating import outputs, raw, values_of


def two(n: str = "32", m: str = "16", *, a: str = "f32", b: str = "f32", more: str = "") -> logical.Graph:
    """Linears m.q_proj and m.k_proj of one value, whose outputs have n and m channels, in layouts a and b."""
    return read_logical(f"""logical two
symbol T lo=1 hi=64 hint=4
input x f32[T,8]
weight m.q_proj.weight f32[{n},8] sources=[q] layout={a}
weight m.k_proj.weight f32[{m},8] sources=[k] layout={b}
%m.q_proj = linear(%x,@m.q_proj.weight) f32[T,{n}]
%m.k_proj = linear(%x,@m.k_proj.weight) f32[T,{m}]
{more}
output q m.q_proj
output k m.k_proj
""")


def residual(add: str = "%sum = add(%x,%y) f32[T,8]", output: str = "sum", more: str = "") -> logical.Graph:
    """A linear y of x, and a sum with x."""
    return read_logical(f"""logical sums
symbol T lo=1 hi=64 hint=4
input x f32[T,8]
weight w f32[8,8] sources=[w] layout=f32
weight b f32[8] sources=[b] layout=f32
%y = linear(%x,@w,@b) f32[T,8] attrs={{bias=true}}
{add}
{more}
output out {output}
""")


def whole_numbers(graph: logical.Graph) -> dict[str, np.ndarray]:
    """Weights whose products with whole numbers are exact in float32, whatever the order of summing."""
    return {k: np.round(v * 8) for k, v in values_of(graph).items()}  # type: ignore[call-overload]


def same_bits(before: logical.Graph, after: logical.Graph) -> None:
    laws.check(after)
    x = np.random.default_rng(0).integers(-9, 10, (5, 8)).astype(np.float32)
    values = whole_numbers(before)
    want, have = outputs(before, values, {"x": x}), outputs(after, values, {"x": x})
    for name in want:
        assert np.any(want[name] != 0)
        np.testing.assert_array_equal(have[name], want[name])


@pytest.mark.parametrize(
    "model", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt2", "olmo2", "phi"]
)
def test_a_fused_model_computes_what_it_did(model: str) -> None:
    graph = recognise(raw(model))
    got = fuse(graph)
    laws.check(got)
    values = values_of(graph)
    want, have = outputs(graph, values), outputs(got, values)
    np.testing.assert_allclose(have["logits"], want["logits"], rtol=1e-5, atol=1e-5)


def test_llama_has_four_products_a_layer() -> None:
    got = fuse(recognise(raw("llama")))
    assert [n.name for n in got.nodes if n.op == "linear"] == [
        "layers.0.self_attn.qkv", "layers.0.self_attn.o_proj",
        "layers.0.mlp.gate_up", "layers.0.mlp.down_proj", "lm_head",
    ]  # fmt: skip
    assert not [n for n in got.nodes if n.op == "add"]


def test_golden(golden) -> None:  # type: ignore[no-untyped-def]
    golden("fuse/qwen2.logical", to_text(fuse(recognise(raw("qwen2")))))


def test_siblings_become_one_product_and_slices_under_their_names() -> None:
    got = fuse_siblings(two())
    same_bits(two(), got)
    assert [(n.name, n.op) for n in got.nodes] == [
        ("m.qk", "linear"),
        ("m.q_proj", "slice"),
        ("m.k_proj", "slice"),
    ]
    (weight,) = got.weights
    assert (weight.name, weight.sources, str(weight.type)) == ("m.qk.weight", ("q", "k"), "f32[48,8]")
    assert [(n.attr("lo"), n.attr("hi")) for n in got.nodes[1:]] == [(0, 32), (32, 48)]


def test_biases_are_joined_like_the_weights() -> None:
    got = fuse(recognise(raw("qwen2")))
    weights = {w.name: w for w in got.weights}
    assert weights["layers.0.self_attn.qkv.bias"].sources == tuple(
        f"model.layers.0.self_attn.{p}_proj.bias" for p in "qkv"
    )


@pytest.mark.parametrize(
    "graph",
    [
        two(a="f16"),  # another layout
        two(m="24", a="q8.16x32", b="q8.16x32"),  # 24 channels end inside a record of 16
        two(more="%again = linear(%x,@m.q_proj.weight) f32[T,32]"),  # a weight that is used twice
    ],
)
def test_what_cant_be_joined_stays(graph: logical.Graph) -> None:
    assert fuse_siblings(graph) == graph


def test_rows_of_plain_layouts_need_no_alignment() -> None:
    got = fuse_siblings(two(n="5", m="3"))
    same_bits(two(n="5", m="3"), got)
    assert len(got.weights) == 1


def test_one_bias_among_two_keeps_them_apart() -> None:
    lines = (
        to_text(two())
        .replace("@m.k_proj.weight)", "@m.k_proj.weight,@b)")
        .replace("f32[T,16]", "f32[T,16] attrs={bias=true}")
    )
    graph = read_logical(
        lines.replace("%m.q_proj =", "weight b f32[16] sources=[b] layout=f32\n%m.q_proj =", 1)
    )
    assert fuse_siblings(graph) == graph


@pytest.mark.parametrize(
    "names, want",
    [
        (
            ["layers.3.self_attn.q_proj", "layers.3.self_attn.k_proj", "layers.3.self_attn.v_proj"],
            "layers.3.self_attn.qkv",
        ),
        (["layers.3.mlp.gate_proj", "layers.3.mlp.up_proj"], "layers.3.mlp.gate_up"),
        (["h.0.w1", "h.0.w3"], "h.0.w1+w3"),
        (["h.0.attn.q_proj", "h.0.attn.k_proj", "h.0.mlp.fc1"], "h.0.attn.qk+mlp.fc1"),
        (["up", "gate"], "up+gate"),
    ],
)
def test_joint_names(names: list[str], want: str) -> None:
    assert joint_name(names) == want


# ---- residual sums ------------------------------------------------------------------------
@pytest.mark.parametrize("operands", ["%x,%y", "%y,%x"])
def test_a_sum_joins_the_linear_it_ends(operands: str) -> None:
    graph = residual(
        f"%sum = add({operands}) f32[T,8]", more="%z = scale(%sum) f32[T,8] attrs={by=2.0}", output="z"
    )
    got = fuse_residuals(graph)
    same_bits(graph, got)
    assert [n.op for n in got.nodes] == ["linear", "scale"]
    assert got.nodes[0].name == "y" and got.nodes[0].inputs == ("%x", "@w", "@b", "%x")
    assert got.nodes[0].attr("residual") is True and got.nodes[1].inputs == ("%y",)


def test_an_output_follows_the_linear() -> None:
    got = fuse_residuals(residual())
    same_bits(residual(), got)
    assert got.outputs[0].value == "y"


@pytest.mark.parametrize(
    "graph",
    [
        residual(
            output="y", more="%z = scale(%sum) f32[T,8] attrs={by=2.0}"
        ),  # the product is an output itself
        residual(more="%z = add(%y,%sum) f32[T,8]", output="z"),  # read twice
        residual("%sum = add(%y,@b) f32[T,8]"),  # a vector, not a residual
        residual("%sum = add(%y,%y) f32[T,8]"),
    ],
)
def test_other_sums_stay(graph: logical.Graph) -> None:
    assert fuse_residuals(graph) == graph


def test_the_later_of_two_products_takes_the_sum() -> None:
    graph = residual("%v = linear(%x,@u) f32[T,8]", more="%sum = add(%v,%y) f32[T,8]")
    graph = read_logical(
        to_text(graph).replace("weight b", "weight u f32[8,8] sources=[u] layout=f32\nweight b")
    )
    got = fuse_residuals(graph)
    same_bits(graph, got)
    assert [n.name for n in got.nodes] == ["y", "v"] and got.nodes[1].inputs == ("%x", "@u", "%y")


def test_a_chain_of_sums_is_renamed_throughout() -> None:
    graph = recognise(raw("phi"))  # attention and MLP side by side: two sums a layer
    got = fuse_residuals(graph)
    assert sum(n.op == "add" for n in got.nodes) == 1
    values = values_of(graph)
    np.testing.assert_allclose(
        outputs(got, values)["logits"], outputs(graph, values)["logits"], rtol=1e-5, atol=1e-5
    )
