"""Latent attention: found in a raw graph, computed over latents, kept as latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from flashrt.backends.reference.kernels import kernels
from flashrt.ir import laws, logical, micro
from flashrt.ir.text import read_logical, to_text
from flashrt.ir.types import TensorType, Weight, attrs
from flashrt.passes.latent import latent
from flashrt.passes.pipeline import Options, compile_graph
from flashrt.passes.recognise import recognise
from tests.passes.evaluating import outputs, raw, values_of
from tests.passes.examples import device, known, machine

HEADS, RANK, SHARED, PLAIN, VALUES = 2, 16, 8, 16, 12
LAYER = [
    "q_a_proj linear", "q_a_layernorm rms_norm", "q_b_proj linear", "kv_a_proj_with_mqa linear",
    "kv_a_proj_with_mqa.0_16 slice", "kv_a_layernorm rms_norm", "kv_a_proj_with_mqa.16_24 slice",
    "attention.query head_linear", "attention.rope_q rope_pairs", "attention.rope_k rope_pairs",
    "attention attention", "attention.values head_linear", "o_proj linear",
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> logical.Graph:
    return raw("deepseek_v3")


def agree(graph: logical.Graph) -> logical.Graph:
    """The recognised graph, after it has given the logits of the raw one."""
    got, values = recognise(graph), values_of(graph)
    laws.check(got)
    want, have = outputs(graph, values)["logits"], outputs(got, values)["logits"]
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-5)
    return got


def latents(graph: logical.Graph) -> int:
    return sum(n.op == "attention" and n.attr("latent") is True for n in graph.nodes)


def changed(graph: logical.Graph, change: Callable[[logical.Node], list[logical.Node]]) -> logical.Graph:
    return replace(graph, nodes=tuple(m for n in graph.nodes for m in change(n)))


def test_the_logits_are_those_of_the_model_as_it_is_written(model: logical.Graph) -> None:
    assert latents(agree(model)) == 2


def test_golden(model: logical.Graph, golden: Callable[[str, str], None]) -> None:
    text = to_text(recognise(model))
    golden("recognise/deepseek_v3.logical", text)
    assert read_logical(text) == recognise(model)


def test_again_changes_nothing(model: logical.Graph) -> None:
    once = recognise(model)
    assert recognise(once) == once


def test_a_layers_attention_is_exactly_its_thirteen_operations(model: logical.Graph) -> None:
    start = "layers.1.self_attn."
    nodes = [n for n in recognise(model).nodes if n.name.startswith(start)]
    assert [f"{n.name.removeprefix(start)} {n.op}" for n in nodes] == LAYER


def test_the_cache_holds_a_latent_and_a_key_for_each_token(model: logical.Graph) -> None:
    before, after = model.states[0].type, recognise(model).states[0].type
    assert str(before) == f"f32[P,2,{HEADS},16,{PLAIN + SHARED}]"
    assert str(after) == f"f32[P,1,1,16,{SHARED + RANK}]"


def scaled(factors: tuple[float, float]) -> Callable[[logical.Node], list[logical.Node]]:
    """Both parts of each query times a factor, as LongCat has them."""

    def change(node: logical.Node) -> list[logical.Node]:
        place = node.name.rpartition(".")[2]
        if not node.name.endswith("self_attn.slice") and not node.name.endswith("self_attn.slice.2"):
            return [node]
        inner = replace(node, name=f"{node.name}.unscaled")
        by = factors[0] if place == "slice" else factors[1]
        outer = replace(
            node, op="aten.mul", inputs=(f"%{inner.name}",), attrs=attrs(other=by),
            origin=node.origin.replace("split_with_sizes.default", "mul.Tensor"),
        )  # fmt: skip
        return [inner, outer]

    return change


def test_a_factor_of_queries_joins_the_scale(model: logical.Graph) -> None:
    got = agree(changed(model, scaled((0.5, 0.5))))
    scales = {n.attr("scale") for n in got.nodes if n.op == "attention"}
    before = {n.attr("scale") for n in model.nodes if n.op == "flashrt.attention"}
    assert latents(got) == 2 and scales == {0.5 * s for s in before}  # type: ignore[operator]


def test_two_factors_are_left_as_they_are(model: logical.Graph) -> None:
    assert latents(agree(changed(model, scaled((0.5, 0.25))))) == 0


def with_bias(graph: logical.Graph) -> logical.Graph:
    """The products that keys and values come from have a bias: it isn't a product of the latent alone."""

    def change(node: logical.Node) -> list[logical.Node]:
        if not node.name.endswith("kv_b_proj"):
            return [node]
        return [replace(node, inputs=(*node.inputs, f"@{node.name}.bias"), attrs=())]

    biases = [n.name for n in graph.nodes if n.name.endswith("kv_b_proj")]
    kind = TensorType("f32", (HEADS * (PLAIN + VALUES),))
    more = tuple(Weight(f"{name}.bias", kind, (f"{name}.bias",), "f32") for name in biases)
    return changed(replace(graph, weights=(*graph.weights, *more)), change)


def otherwise_rotated(graph: logical.Graph) -> logical.Graph:
    """Queries turn the other way round: x1·cos + x2·sin."""

    def change(node: logical.Node) -> list[logical.Node]:
        return [replace(node, op="aten.add") if node.name.endswith("self_attn.sub") else node]

    return changed(graph, change)


def doubled_keys(graph: logical.Graph) -> logical.Graph:
    """Keys are twice what the product gives."""

    def change(node: logical.Node) -> list[logical.Node]:
        if not node.name.endswith("self_attn.copy"):
            return [node]
        twice = replace(
            node, name=f"{node.name}.twice", op="aten.mul", inputs=node.inputs[1:], attrs=attrs(other=2.0)
        )
        return [twice, replace(node, inputs=(node.inputs[0], f"%{twice.name}"))]

    return changed(graph, change)


@pytest.mark.parametrize("change", [with_bias, otherwise_rotated, doubled_keys])
def test_what_is_no_latent_attention_stays(
    model: logical.Graph, change: Callable[[logical.Graph], logical.Graph]
) -> None:
    graph = change(model)
    got = agree(graph)
    assert latents(got) == 0 and got.states == graph.states


def stored(graph: logical.Graph, layout: str) -> logical.Graph:
    """The graph with its matrices in a layout."""
    weights = tuple(replace(w, layout=layout) if len(w.type.shape) == 2 else w for w in graph.weights)
    return replace(graph, weights=weights)


@pytest.mark.parametrize(
    "layout,keys,values", [("f32", "f32", "f32"), ("bf16", "bf16", "bf16"), ("q8.16x32", "f16", "f16")]
)
def test_a_plan_of_it(model: logical.Graph, layout: str, keys: str, values: str) -> None:
    """Of matrices in blocks, rows that don't begin at a block of rows are widened."""
    got = compile_graph(stored(model, layout), machine(), Options())
    laws.check(got.physical)
    laws.check(got.stream)
    kernels = [i.kernel for i in got.stream.instrs if isinstance(i, micro.Dispatch)]
    assert kernels.count("attention+latent") == 2 and not [k for k in kernels if k.startswith("host.")]
    assert sorted(k for k in kernels if k.startswith("head_linear")) == sorted(
        2 * [f"head_linear.{keys}", f"head_linear.{values}"]
    )
    whole = {b.name for b in got.stream.blocks if b.name.endswith("kv_b_proj.weight")}
    assert not whole  # only its parts are kept


ALONE = """logical alone
symbol T lo=1 hi=64 hint=1
symbol S lo=1 hi=4 hint=1
symbol M lo=1 hi=4 hint=1
symbol P lo=1 hi=64 hint=4
input q f32[T,48]
input c f32[T,32]
input k f32[T,8]
input table f32[T,8]
input positions i32[T]
input seq i32[T]
input pages i32[S,M]
weight w f32[64,32] sources=[w] layout=q8.16x32
state kv.0 f32[P,2,2,16,24]
%a = flashrt.latent_attention(INPUTS) f32[T,32] attrs={FACTS} reads=[kv.0] writes=[kv.0]
output out a
"""
INPUTS = "%q,%c,%k,%table,@w,%positions,%seq,%pages"
FACTS = (
    "causal=true,head_dim=24,heads=2,keys=0,kv_heads=2,pairs=false,scale=0.2,sinks=false,softcap=0.0,"
    "value_dim=16,values=16,window=0"
)


def test_rows_in_whole_blocks_stay_in_them() -> None:
    got = latent(read_logical(ALONE.replace("FACTS", FACTS).replace("INPUTS", INPUTS)))
    laws.check(got)
    parts = {w.name: (w.layout, w.rows, w.turned) for w in got.weights if w.of}
    assert parts == {
        "w#keys": ("f16", (0, 16, 32, 48), 2),  # its blocks would run across those of w
        "w#values": ("q8.16x32", (16, 32, 48, 64), 0),
    }
    assert [n.op for n in got.nodes] == ["head_linear", "rope", "rope", "attention", "head_linear"]
    assert got.outputs[0].value == got.nodes[-1].name


def test_two_processors_share_the_products_around_it(model: logical.Graph) -> None:
    """It doesn't divide by heads: there is one of keys."""
    on = machine(device("cpu:0"), device("cpu:1"))
    got = compile_graph(stored(model, "f32"), on, Options())
    laws.check(got.physical)
    laws.check(got.stream)
    assert all(n.part is None for n in got.physical.nodes if n.op in ("attention", "head_linear"))


def test_a_device_that_knows_other_attention_only_leaves_it_to_one_that_can(model: logical.Graph) -> None:
    """Taken for the usual kind it would compute something else."""
    usual = tuple(k for k in kernels() if k[0] != "attention+latent")
    on = machine(device("gpu:0", kernels=usual, read=known(1e12)), device("cpu:0"))
    got = compile_graph(stored(model, "f32"), on, Options())
    laws.check(got.stream)
    writers = {(i.kernel, i.device) for i in got.stream.instrs if isinstance(i, micro.Dispatch) and i.writes}
    readers = {(i.kernel, i.device) for i in got.stream.instrs if isinstance(i, micro.Dispatch) and i.reads}
    assert (writers, readers) == ({("kv_write", "cpu:0")}, {("attention+latent", "cpu:0")})
