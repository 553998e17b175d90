"""recognise: raw operators become named, flat operations that compute the same."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from flashrt.ir import laws, logical, ops
from flashrt.ir.text import read_logical, show_node, to_text
from flashrt.passes.recognise import recognise
from tests.passes.evaluating import outputs, raw, values_of

LANGUAGE_MODELS = [
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt2", "olmo2", "phi", "helium",
]  # fmt: skip
LAYER = [
    "input_layernorm rms_norm", "self_attn.q_proj linear", "self_attn.k_proj linear",
    "self_attn.v_proj linear", "self_attn.rope_q rope", "self_attn.rope_k rope",
    "self_attn.attention attention", "self_attn.o_proj linear",
    "attn_residual add", "post_attention_layernorm rms_norm", "mlp.gate_proj linear", "mlp.up_proj linear",
    "mlp.gated gated", "mlp.down_proj linear", "mlp_residual add",
]  # fmt: skip


def small(*nodes: str, inputs: str = "x f32[T,8]", weights: str = "", output: str = "out") -> logical.Graph:
    """A raw graph over a few lines; several inputs or weights are separated by `;`."""
    lines = ["logical small", "symbol T lo=1 hi=64 hint=4", "symbol N lo=1 hi=64 hint=2"]
    lines += [f"input {i.strip()}" for i in inputs.split(";")]
    for weight in filter(None, weights.split(";")):
        name, kind = weight.split()
        lines.append(f"weight {name} {kind} sources=[{name}]")
    return read_logical("\n".join([*lines, *nodes, f"output out {output}"]))


def same(graph: logical.Graph, **inputs: np.ndarray) -> logical.Graph:
    """The recognised graph, after it has given what the raw one gives."""
    got = recognise(graph)
    laws.check(got)
    given = {"x": np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32), **inputs}
    values = values_of(graph)
    want, have = outputs(graph, values, given)["out"], outputs(got, values, given)["out"]
    assert want.shape == have.shape and want.dtype == have.dtype
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)
    return got


def operations(graph: logical.Graph) -> list[str]:
    return [n.op for n in graph.nodes]


# ---- whole models -------------------------------------------------------------------------
@pytest.mark.parametrize("model", LANGUAGE_MODELS)
def test_a_recognised_model_computes_what_the_raw_one_does(model: str) -> None:
    graph = raw(model)
    values = values_of(graph)
    want, have = outputs(graph, values), outputs(recognise(graph), values)
    assert np.abs(want["logits"]).max() > 1  # the random model isn't degenerate
    np.testing.assert_allclose(have["logits"], want["logits"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(have["tokens"], want["tokens"])


@pytest.mark.parametrize("model", [*LANGUAGE_MODELS, "mlp"])
def test_types_follow_the_rules_and_the_text_reads_back(model: str) -> None:
    got = recognise(raw(model))
    laws.check(got)
    types = {f"%{v.name}": v.type for v in got.inputs} | {f"@{w.name}": w.type for w in got.weights}
    types |= {f"%{n.name}": n.type for n in got.nodes}
    for node in got.nodes:
        inferred = ops.infer(node.op, [types[a] for a in node.inputs], node.attrs)
        assert inferred in (None, node.type), show_node(node)
    assert read_logical(to_text(got)) == got


@pytest.mark.parametrize("model", LANGUAGE_MODELS)
def test_nothing_raw_and_no_view_is_left(model: str) -> None:
    assert {n.op for n in recognise(raw(model)).nodes} <= set(ops.OPS) - {"view"}


@pytest.mark.parametrize("model", ["llama", "qwen2", "mistral"])
def test_a_layer_is_exactly_its_fifteen_operations(model: str) -> None:
    got = recognise(raw(model))
    layer = [
        f"{n.name.removeprefix('layers.0.')} {n.op}" for n in got.nodes if n.name.startswith("layers.0.")
    ]
    assert layer == LAYER
    around = [f"{n.name} {n.op}" for n in got.nodes if not n.name.startswith("layers.0.")]
    assert around == [
        "embed_tokens embedding", "rotary_emb rope_table",
        "logit_rows rows", "norm rms_norm", "lm_head linear", "sample sample",
    ]  # fmt: skip


def test_norms_of_heads_have_the_width_of_a_head() -> None:
    nodes = {n.name: n for n in recognise(raw("qwen3")).nodes}
    assert nodes["layers.0.self_attn.q_norm"].attr("width") == 24
    assert nodes["layers.0.self_attn.rope_q"].inputs[0] == "%layers.0.self_attn.q_norm"


def test_gemma_adds_one_to_norm_weights_and_caps_its_logits() -> None:
    got = recognise(raw("gemma2"))
    norms = [n for n in got.nodes if n.op == "rms_norm"]
    assert len(norms) == 5 and all(n.attr("offset") == 1.0 for n in norms)
    assert [n.attr("cap") for n in got.nodes if n.op == "softcap"] == [9.0]


def test_gemma3_has_one_table_per_kind_of_layer() -> None:
    got = recognise(raw("gemma3"))
    tables = {n.name: n.inputs[1] for n in got.nodes if n.op == "rope_table"}
    used = [tables[n.inputs[1][1:]] for n in got.nodes if n.op == "rope"]
    assert len(tables) == 2 and set(used) == set(tables.values())


def test_partial_rotary_turns_whole_heads_with_a_short_table() -> None:
    nodes = {n.name: n for n in recognise(raw("phi")).nodes}
    rope = nodes["layers.0.self_attn.rope_q"]
    assert rope.attr("head_dim") == 16 and nodes[rope.inputs[1][1:]].type.shape[1] == 8


def test_golden(golden) -> None:  # type: ignore[no-untyped-def]
    golden("recognise/llama.logical", to_text(recognise(raw("llama"))))


def test_golden_of_a_model_that_rotates_pairs(golden) -> None:  # type: ignore[no-untyped-def]
    golden("recognise/helium.logical", to_text(recognise(raw("helium"))))


@pytest.mark.parametrize("model", [*LANGUAGE_MODELS, "mlp"])
def test_again_changes_nothing(model: str) -> None:
    once = recognise(raw(model))
    if model in LANGUAGE_MODELS:
        assert recognise(once) == once
    assert Counter(operations(recognise(once))) == Counter(operations(once))


def test_an_exported_module_keeps_the_shapes_of_its_outputs() -> None:
    graph = raw("mlp")
    got = recognise(graph)
    x = np.random.default_rng(1).standard_normal((6, 32)).astype(np.float32)
    values = values_of(graph)
    want, have = outputs(graph, values, {"x": x}), outputs(got, values, {"x": x})
    for name in want:
        np.testing.assert_allclose(have[name], want[name], rtol=1e-5, atol=1e-5)
    assert [op for op in operations(got) if op.startswith("aten")] == ["aten.softmax"]


def test_time_grows_with_the_nodes() -> None:
    graph = raw("llama")
    head = [n for n in graph.nodes if "layers.0" not in n.name]
    layer = [n for n in graph.nodes if "layers.0" in n.name]
    nodes = [n for n in head if n.name.startswith(("view", "embed", "rotary"))]
    last = "embed_tokens"
    for i in range(24):
        for node in layer:
            inputs = tuple(a.replace("layers.0", f"layers.{i}") for a in node.inputs)
            inputs = tuple(
                f"%{last}" if a == "%embed_tokens" else a.replace(f"@layers.{i}", "@layers.0") for a in inputs
            )
            name, origin = (s.replace("layers.0", f"layers.{i}") for s in (node.name, node.origin))
            nodes.append(replace(node, name=name, origin=origin, inputs=inputs))
        last = f"layers.{i}"
    tail = [n for n in head if n not in nodes]
    nodes += [replace(n, inputs=tuple(f"%{last}" if a == "%layers.0" else a for a in n.inputs)) for n in tail]
    start = time.process_time()
    got = recognise(replace(graph, nodes=tuple(nodes)))
    assert len(got.nodes) == 24 * len(LAYER) + 6
    assert time.process_time() - start < 2  # 0.2 s on one slow core; a quadratic pass takes far longer


# ---- single rewrites --------------------------------------------------------------------
def norm(square: str, root: str, by: str) -> list[str]:
    return [
        f"%square = {square} f32[T,8]" + (" attrs={exponent=2}" if "pow" in square else ""),
        "%mean = aten.mean(%square) f32[T,1] attrs={dim=[1],keepdim=true}",
        "%eps = aten.add(%mean) f32[T,1] attrs={alpha=1,other=0.01}",
        f"%root = {root}",
        f"%n = {by}(%x,%root) f32[T,8]",
    ]


@pytest.mark.parametrize(
    "square, root, by",
    [
        ("aten.pow(%x)", "aten.rsqrt(%eps) f32[T,1]", "aten.mul"),
        ("aten.mul(%x,%x)", "aten.pow(%eps) f32[T,1] attrs={exponent=-0.5}", "aten.mul"),
        ("aten.pow(%x)", "aten.sqrt(%eps) f32[T,1]", "aten.div"),
    ],
)
@pytest.mark.parametrize("weight", ["none", "plain", "one plus"])
def test_rms_norm_in_all_its_spellings(square: str, root: str, by: str, weight: str) -> None:
    lines = norm(square, root, by)
    if weight == "one plus":
        lines += ["%one = aten.add(@w) f32[8] attrs={alpha=1,other=1.0}", "%out = aten.mul(%n,%one) f32[T,8]"]
    elif weight == "plain":
        lines += ["%out = aten.mul(@w,%n) f32[T,8]"]
    got = same(small(*lines, weights="w f32[8]", output="n" if weight == "none" else "out"))
    assert operations(got) == ["rms_norm"]
    (node,) = got.nodes
    assert (node.attr("weight"), node.attr("offset")) == (weight != "none", float(weight == "one plus"))
    assert node.attr("eps") == 0.01


def test_a_norm_over_another_axis_is_none() -> None:
    lines = [
        line.replace("dim=[1]", "dim=[0]")
        for line in norm("aten.pow(%x)", "aten.rsqrt(%eps) f32[T,1]", "aten.mul")
    ]
    lines[1] = "%mean = aten.mean(%square) f32[1,8] attrs={dim=[0],keepdim=true}"
    lines[2:4] = [
        "%eps = aten.add(%mean) f32[1,8] attrs={alpha=1,other=0.01}",
        "%root = aten.rsqrt(%eps) f32[1,8]",
    ]
    assert "rms_norm" not in operations(same(small(*lines, output="n")))


def test_another_power_is_no_root_mean_square() -> None:
    lines = norm("aten.pow(%x)", "aten.rsqrt(%eps) f32[T,1]", "aten.mul")
    got = same(small(lines[0].replace("exponent=2", "exponent=4"), *lines[1:], output="n"))
    assert "rms_norm" not in operations(got)


def test_a_centred_norm_is_a_layer_norm_though_the_difference_is_computed_twice() -> None:
    lines = [
        "%middle = aten.mean(%x) f32[T,1] attrs={dim=[1],keepdim=true}",
        "%less = aten.sub(%x,%middle) f32[T,8] attrs={alpha=1}",
        "%again = aten.sub(%x,%middle) f32[T,8] attrs={alpha=1}",
        *norm("aten.pow(%less)", "aten.rsqrt(%eps) f32[T,1]", "aten.mul"),
        "%out = aten.mul(@w,%n) f32[T,8]",
    ]
    lines = [line.replace("aten.mul(%x,", "aten.mul(%again,") for line in lines]
    (node,) = same(small(*lines, weights="w f32[8]")).nodes
    assert (node.op, node.inputs, node.attr("eps")) == ("layer_norm", ("%x", "@w"), 0.01)


@pytest.mark.parametrize(("given", "missing"), [("@w", "bias=null,"), ("", "bias=null,weight=null,")])
def test_a_layer_norm_may_lack_its_bias_or_both(given: str, missing: str) -> None:
    inputs = ",".join(["%x", given] if given else ["%x"])
    line = f"%out = aten.layer_norm({inputs}) f32[T,8] attrs={{{missing}eps=0.01,normalized_shape=[8]}}"
    (node,) = same(small(line, weights="w f32[8]" if given else "")).nodes
    assert node.op == "layer_norm"


def test_a_layer_norm_with_a_bias_alone_stays_raw() -> None:
    line = "%out = aten.layer_norm(%x,@w) f32[T,8] attrs={eps=0.01,normalized_shape=[8],weight=null}"
    assert operations(recognise(small(line, weights="w f32[8]"))) == ["aten.layer_norm"]


@pytest.mark.parametrize("square", ["aten.square(%x) f32[T,8]", "aten.pow(%x) f32[T,8] attrs={exponent=2}"])
def test_a_square_is_a_product_with_itself(square: str) -> None:
    (node,) = same(small(f"%out = {square}")).nodes
    assert (node.op, node.inputs) == ("mul", ("%x", "%x"))


def test_rms_norm_as_one_operator_takes_the_eps_of_its_type() -> None:
    line = "%out = aten.rms_norm(%x,@w) f32[T,8] attrs={eps=null,normalized_shape=[8]}"
    (node,) = same(small(line, weights="w f32[8]")).nodes
    assert (node.op, node.attr("eps")) == ("rms_norm", 2.0**-23)


@pytest.mark.parametrize("op", ["aten.mm", "aten.matmul"])
def test_a_product_with_a_transposed_weight_is_a_linear(op: str) -> None:
    turned = "%t = aten.transpose(@w) f32[8,3] attrs={dim0=0,dim1=1}"
    assert operations(same(small(turned, f"%out = {op}(%x,%t) f32[T,3]", weights="w f32[3,8]"))) == ["linear"]


def test_a_product_with_a_weight_as_it_lies_stays_raw() -> None:
    got = same(small("%out = aten.mm(%x,@w) f32[T,3]", weights="w f32[8,3]"))
    assert operations(got) == ["aten.mm"]


def test_a_linear_over_each_head_sees_heads_as_rows() -> None:
    got = same(
        small(
            "%heads = aten.view(%x) f32[T,2,4]",
            "%turned = aten.transpose(%heads) f32[2,T,4] attrs={dim0=0,dim1=1}",
            "%y = aten.linear(%turned,@w) f32[2,T,3] attrs={bias=null}",
            "%back = aten.transpose(%y) f32[T,2,3] attrs={dim0=0,dim1=1}",
            "%out = aten.view(%back) f32[T,6]",
            weights="w f32[3,4]",
        )
    )
    assert operations(got) == ["view", "linear", "view"]


@pytest.mark.parametrize(
    "lines, act",
    [
        (["%out = aten.silu(%x) f32[T,8]"], "silu"),
        (["%s = aten.sigmoid(%x) f32[T,8]", "%out = aten.mul(%x,%s) f32[T,8]"], "silu"),
        (['%out = aten.gelu(%x) f32[T,8] attrs={approximate="none"}'], "gelu"),
        (['%out = aten.gelu(%x) f32[T,8] attrs={approximate="tanh"}'], "gelu_tanh"),
        (["%out = aten.relu(%x) f32[T,8]"], "relu"),
        (["%out = aten.tanh(%x) f32[T,8]"], "tanh"),
        (["%out = aten.sigmoid(%x) f32[T,8]"], "sigmoid"),
    ],
)
def test_activations(lines: list[str], act: str) -> None:
    (node,) = same(small(*lines)).nodes
    assert (node.op, node.attr("act")) == ("activation", act)


def test_the_gate_may_stand_on_either_side() -> None:
    for product in ("aten.mul(%s,%b)", "aten.mul(%b,%s)"):
        got = same(
            small(
                "%a = aten.slice(%x) f32[T,4] attrs={dim=1,end=4,start=0,step=1}",
                "%b = aten.slice(%x) f32[T,4] attrs={dim=1,end=8,start=4,step=1}",
                "%s = aten.silu(%a) f32[T,4]",
                f"%out = {product} f32[T,4]",
            )
        )
        assert operations(got) == ["slice", "slice", "gated"]
        assert [n.attr("lo") for n in got.nodes[:2]] == [0, 4]


@pytest.mark.parametrize(
    "inner", ["aten.div(%x) f32[T,8] attrs={other=4.0}", "aten.mul(%x) f32[T,8] attrs={other=0.25}"]
)
def test_softcap(inner: str) -> None:
    lines = [f"%i = {inner}", "%t = aten.tanh(%i) f32[T,8]", "%out = aten.mul(%t) f32[T,8] attrs={other=4.0}"]
    (node,) = same(small(*lines)).nodes
    assert (node.op, node.attr("cap")) == ("softcap", 4.0)


def test_an_uneven_cap_is_three_operations() -> None:
    lines = ["%i = aten.div(%x) f32[T,8] attrs={other=4.0}", "%t = aten.tanh(%i) f32[T,8]"]
    got = same(small(*lines, "%out = aten.mul(%t) f32[T,8] attrs={other=3.0}"))
    assert operations(got) == ["scale", "activation", "scale"]


def test_times_one_and_plus_nothing_vanish() -> None:
    lines = [
        "%a = aten.mul(%x) f32[T,8] attrs={other=1.0}",
        "%b = aten.add(%a) f32[T,8] attrs={alpha=1,other=0}",
    ]
    got = same(small(*lines, "%out = aten.relu(%b) f32[T,8]"))
    assert operations(got) == ["activation"]


def test_a_vector_is_added_to_rows_and_a_column_stays_raw() -> None:
    assert operations(same(small("%out = aten.add(%x,@w) f32[T,8] attrs={alpha=1}", weights="w f32[8]"))) == [
        "add"
    ]
    column = "%c = aten.mean(%x) f32[T,1] attrs={dim=[1],keepdim=true}"
    got = same(small(column, "%out = aten.add(%x,%c) f32[T,8] attrs={alpha=1}"))
    assert operations(got) == ["aten.mean", "aten.add"]


def test_a_weight_of_each_head_is_no_vector_of_the_row() -> None:
    got = same(
        small(
            "%h = aten.view(%x) f32[T,2,4]",
            "%m = aten.mul(%h,@w) f32[T,2,4]",
            "%out = aten.view(%m) f32[T,8]",
            weights="w f32[4]",
        )
    )
    assert operations(got) == ["view", "aten.mul", "view"]


def test_operands_in_another_order_are_put_in_order() -> None:
    got = same(
        small(
            "%h = aten.view(%x) f32[T,2,4]",
            "%a = aten.transpose(%h) f32[2,T,4] attrs={dim0=0,dim1=1}",
            "%b = aten.view(%x) f32[2,T,4]",
            "%out = aten.add(%a,%b) f32[2,T,4] attrs={alpha=1}",
        )
    )
    assert "add" not in operations(got)


def test_integers_keep_their_operators() -> None:
    lines = ["%d = aten.mul(%i) i32[T] attrs={other=2}", '%out = aten.to(%d) f32[T] attrs={dtype="f32"}']
    got = same(small(*lines, inputs="x f32[T,8]; i i32[T]"), i=np.arange(5, dtype=np.int32))
    assert operations(got) == ["aten.mul", "aten.to"]


def test_views_that_copy_stay() -> None:
    got = same(
        small("%t = aten.transpose(%x) f32[8,T] attrs={dim0=0,dim1=1}", "%out = aten.view(%t) f32[8*T]")
    )
    assert operations(got) == ["aten.permute", "aten.view"]


def test_steps_and_expansions_stay_raw() -> None:
    lines = [
        "%s = aten.slice(%x) f32[T,4] attrs={dim=1,end=8,start=0,step=2}",
        "%out = aten.relu(%s) f32[T,4]",
    ]
    assert operations(same(small(*lines))) == ["aten.slice", "aten.relu"]
    lines = [
        "%e = aten.unsqueeze(%x) f32[T,1,8] attrs={dim=1}",
        "%out = aten.expand(%e) f32[T,3,8] attrs={size=[(T),3,8]}",
    ]
    assert operations(same(small(*lines))) == ["view", "aten.expand"]


def test_rows_go_above_a_norm_that_nothing_else_reads() -> None:
    lines = [
        *norm("aten.pow(%x)", "aten.rsqrt(%eps) f32[T,1]", "aten.mul"),
        "%out = aten.index(%n,%i) f32[N,8] attrs={indices=[1]}",
    ]
    graph = small(*lines, inputs="x f32[T,8]; i i32[N]")
    index = np.array([3, 0], np.int32)
    assert operations(same(graph, i=index)) == ["rows", "rms_norm"]
    both = read_logical(to_text(graph) + "output normed n\n")
    assert operations(same(both, i=index)) == ["rms_norm", "rows"]


def test_an_index_on_channels_isnt_rows() -> None:
    graph = small("%out = aten.index(%x,%i) f32[T,N] attrs={indices=[null,1]}", inputs="x f32[T,8]; i i32[N]")
    assert operations(same(graph, i=np.array([3, 0], np.int32))) == ["aten.index"]


ROPE = [
    "%angle = aten.cat(%freqs,%freqs) f32[T,4] attrs={dim=1}",
    "%c = aten.cos(%angle) f32[T,4]", "%cos = aten.mul(%c) f32[T,4] attrs={other=0.5}",
    "%s = aten.sin(%angle) f32[T,4]", "%sin = aten.mul(%s) f32[T,4] attrs={other=0.5}",
    "%heads = aten.view(%x) f32[T,2,4]",
    "%q = aten.transpose(%heads) f32[2,T,4] attrs={dim0=0,dim1=1}",
    "%a = aten.mul(%q,%cos) f32[2,T,4]",
    "%lo = aten.slice(%q) f32[2,T,2] attrs={dim=2,end=2,start=0,step=1}",
    "%hi = aten.slice(%q) f32[2,T,2] attrs={dim=2,end=4,start=2,step=1}",
    "%neg = aten.neg(%hi) f32[2,T,2]",
    "%half = aten.cat(%neg,%lo) f32[2,T,4] attrs={dim=2}",
    "%b = aten.mul(%half,%sin) f32[2,T,4]",
    "%turned = aten.add(%a,%b) f32[2,T,4] attrs={alpha=1}",
    "%back = aten.transpose(%turned) f32[T,2,4] attrs={dim0=0,dim1=1}",
    "%out = aten.view(%back) f32[T,8]",
]  # fmt: skip
BY_PRODUCT = [
    "%column = aten.view(%positions) i32[T,1]",
    '%float = aten.to(%column) f32[T,1] attrs={dtype="f32"}',
    "%freqs = aten.mul(%float,@inv_freq) f32[T,2]",
]
BY_MATRIX = [
    "%row = aten.view(%positions) i32[1,T]",
    '%float = aten.to(%row) f32[1,T] attrs={dtype="f32"}',
    "%w = aten.view(@inv_freq) f32[2,1]",
    "%outer = aten.matmul(%w,%float) f32[2,T]",
    "%freqs = aten.transpose(%outer) f32[T,2] attrs={dim0=0,dim1=1}",
]


def rope(*lines: str) -> logical.Graph:
    return small(*lines, inputs="x f32[T,8]; positions i32[T]", weights="inv_freq f32[2]")


@pytest.mark.parametrize("angles", [BY_PRODUCT, BY_MATRIX], ids=["product", "matrix"])
def test_rope_and_its_table(angles: list[str]) -> None:
    got = same(rope(*angles, *ROPE), positions=np.array([0, 7, 2, 40, 3], np.int32))
    assert operations(got) == ["rope_table", "rope"]
    assert got.nodes[0].attr("scale") == 0.5 and got.nodes[1].attr("head_dim") == 4


@pytest.mark.parametrize(
    "old, new",
    [
        ("aten.cat(%neg,%lo)", "aten.cat(%lo,%neg)"),
        ("aten.neg(%hi)", "aten.neg(%lo)"),
        ("%sin = aten.mul(%s) f32[T,4] attrs={other=0.5}", "%sin = aten.mul(%s) f32[T,4] attrs={other=0.25}"),
        ("%b = aten.mul(%half,%sin)", "%b = aten.mul(%half,%cos)"),
    ],
)
def test_what_only_looks_like_rope_isnt(old: str, new: str) -> None:
    lines = [line.replace(old, new) for line in (*BY_PRODUCT, *ROPE)]
    assert lines != [*BY_PRODUCT, *ROPE]
    got = same(rope(*lines), positions=np.array([0, 7, 2, 40, 3], np.int32))
    assert "rope" not in operations(got)


# ---- weights: a matrix may be packed, so only a product or a lookup reads it ---------------
@pytest.mark.parametrize(
    "lines, weights",
    [
        (["%m = aten.mul(@w) f32[8,8] attrs={other=2.0}", "%out = aten.mm(%x,%m) f32[T,8]"], "w f32[8,8]"),
        (
            [
                "%s = aten.add(@w,@v) f32[8] attrs={alpha=1}",
                "%out = aten.add(%x,%s) f32[T,8] attrs={alpha=1}",
            ],
            "w f32[8]; v f32[8]",
        ),
        (
            [
                "%s = aten.slice(@w) f32[8] attrs={dim=0,end=12,start=4,step=1}",
                "%out = aten.add(%x,%s) f32[T,8] attrs={alpha=1}",
            ],
            "w f32[16]",
        ),
        (
            [
                "%t = aten.transpose(@w) f32[8,3] attrs={dim0=0,dim1=1}",
                "%e = aten.exp(%t) f32[8,3]",
                "%out = aten.mm(%x,%e) f32[T,3]",
            ],
            "w f32[3,8]",
        ),
        (
            [
                "%s = aten.slice(@w) f32[8,4] attrs={dim=1,end=6,start=2,step=1}",
                "%e = aten.exp(%s) f32[8,4]",
                "%out = aten.mm(%x,%e) f32[T,4]",
            ],
            "w f32[8,12]",
        ),
    ],
)
def test_arithmetic_on_weights_stays_raw(lines: list[str], weights: str) -> None:
    got = same(small(*lines, weights=weights))
    for node in got.nodes:
        if any(a[0] == "@" for a in node.inputs):
            assert node.op.startswith("aten."), show_node(node)


def test_rows_of_a_square_value_are_those_in_memory() -> None:
    graph = read_logical("""logical square
symbol N lo=1 hi=64 hint=2
input x f32[8,8]
input i i32[N]
%out = aten.index(%x,%i) f32[8,N] attrs={indices=[null,1]}
output out out
""")
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    assert operations(same(graph, x=x, i=np.array([3, 0], np.int32))) == ["aten.index"]
