"""ONNX files: ONNX's own node tests, files of several nodes with open sizes, and what is refused by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from flashrt import engine
from flashrt.errors import ModelError, RequestError, UnsupportedModel
from flashrt.frontend.onnx import load_onnx

ROOT = Path(__file__).resolve().parents[2]
FLOAT = TensorProto.FLOAT


def tool() -> Any:
    """tools/onnx_nodes.py as a module."""
    spec = importlib.util.spec_from_file_location("onnx_nodes", ROOT / "tools" / "onnx_nodes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NODES = tool()
SUBSET = (
    "test_add_bcast", "test_conv_with_autopad_same", "test_convtranspose_pads",
    "test_group_normalization_example_expanded",
    "test_layer_normalization_2d_axis0",
    "test_gather_negative_indices", "test_slice_neg_steps", "test_split_1d_uneven_split_opset18",
    "test_reduce_l2_keep_dims_random", "test_resize_upsample_scales_cubic", "test_lstm_with_initial_bias",
    "test_gemm_all_attributes", "test_scatternd_add", "test_div_uint8", "test_edge_pad",
    "test_onehot_with_axis",
)  # fmt: skip

# ONNX's modules that hold them; those of pools take seconds to make theirs
OPERATORS = (
    "add", "conv", "convtranspose", "groupnormalization", "layernormalization", "gather", "slice", "split",
    "reducel2", "resize", "lstm", "gemm", "scatternd", "div", "pad", "onehot",
)  # fmt: skip


@pytest.mark.parametrize("name", SUBSET)
def test_nodes(name: str, tmp_path: Path, cases: dict[str, Any]) -> None:
    verdict, why = NODES.verdict(cases[name], tmp_path)
    assert verdict == "right", why


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    return {case.name: case for case in NODES.cases_of(OPERATORS)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_node_is_wrong(tmp_path: Path) -> None:
    """All of ONNX's node tests; docs/networks.md gives the counts."""
    found = {case.name: NODES.verdict(case, tmp_path) for case in NODES.cases()}
    assert {name: why for name, (which, why) in found.items() if which == "wrong"} == {}
    assert sum(which == "right" for which, _ in found.values()) > 1000


# ---- files ---------------------------------------------------------------------------
def write(path: Path, nodes: list[Any], inputs: dict[str, Any], weights: Any = (), opset: int = 17) -> Path:
    """A file whose output is y. inputs: name → shape, with names for open sizes."""
    given = [helper.make_tensor_value_info(n, FLOAT, shape) for n, shape in inputs.items()]
    held = [numpy_helper.from_array(value, name) for name, value in dict(weights).items()]
    graph = helper.make_graph(
        nodes, "g", given, [helper.make_tensor_value_info("y", FLOAT, [None] * 3)], held
    )
    imports = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
        ("MaxPool", {"kernel_shape": [3, 3], "pads": [2, 1, 2, 1]}),
    ],
)
def test_pools(op: str, attrs: dict[str, Any], tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    path = write(tmp_path / "pool.onnx", [helper.make_node(op, ["x"], ["y"], **attrs)], {"x": [2, 3, 6, 6]})
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, {"x": x})
    with engine.open_plan(engine.obtain(str(path)).plan, threads=1) as program:
        got = program.call({"x": x})["y"]
    assert got.shape == want.shape and np.abs(got - want).max() < 1e-6


@pytest.fixture
def attention(tmp_path: Path) -> Path:
    """Products, and shape arithmetic on open sizes as exporters write it: [B,T,8] → 2 heads and back."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x:0", "w"], ["h"], name="/proj/MatMul"),
        helper.make_node("Shape", ["x:0"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["b"], axis=0),
        helper.make_node("Gather", ["s", "one"], ["t"], axis=0),
        helper.make_node("Concat", ["b", "t", "two", "four"], ["split"], axis=0),
        helper.make_node("Reshape", ["h", "split"], ["heads"]),
        helper.make_node("Transpose", ["heads"], ["q"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["heads"], ["k"], perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["q", "k"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "q"], ["o"]),
        helper.make_node("Transpose", ["o"], ["back"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["back", "flat"], ["y"]),
    ]
    whole = {"zero": [0], "one": [1], "two": [2], "four": [4], "flat": [0, 0, 8]}
    weights = {n: np.array(v, np.int64) for n, v in whole.items()}
    weights["w"] = rng.standard_normal((8, 8)).astype(np.float32)
    return write(tmp_path / "attention.onnx", nodes, {"x:0": ["batch", "time", 8]}, weights)


def test_open_sizes(attention: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(str(attention), providers=["CPUExecutionProvider"])
    graph = load_onnx(attention).graph
    assert {s.name for s in graph.symbols} == {"batch", "time"} and graph.inputs[0].name == "x:0"
    assert "proj.MatMul" in {n.name for n in graph.nodes}
    with engine.open_plan(engine.obtain(str(attention)).plan, threads=1) as program:
        for shape in ((1, 1, 8), (2, 5, 8), (4, 31, 8)):
            x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
            got, want = program.call({"x:0": x})["y"], session.run(None, {"x:0": x})[0]
            assert got.shape == want.shape and np.abs(got - want).max() < 1e-5
        with pytest.raises(RequestError, match="time=513 is outside"):
            program.call({"x:0": np.zeros((1, 513, 8), np.float32)})


def test_a_vector_in_the_middle_is_no_vector_of_channels(tmp_path: Path) -> None:
    """x [3,4,4] times scale [1,4,1]: a square makes the two axes look alike."""
    node = helper.make_node("Mul", ["x", "scale"], ["y"])
    scale = np.arange(1, 5, dtype=np.float32).reshape(1, 4, 1)
    path = write(tmp_path / "middle.onnx", [node], {"x": [3, 4, 4]}, {"scale": scale})
    x = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
    with engine.open_plan(engine.obtain(str(path)).plan, threads=1) as program:
        assert np.array_equal(program.call({"x": x})["y"], x * scale)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "opset", "words"),
    [
        ("NonZero", 1, {}, 17, ["NonZero", "isn't supported", "docs/networks.md"]),
        ("CumSum", 1, {}, 17, ["input"]),
        ("AveragePool", 1, {"kernel_shape": [2], "dilations": [2]}, 19, ["AveragePool", "dilations=(2,)"]),
        ("Softmax", 1, {}, 11, ["Softmax", "opset 11 defines it differently"]),
        ("Add", 2, {}, 99, ["opset"]),
    ],
)
def test_refused_by_name(
    op: str, inputs: int, attrs: dict[str, Any], opset: int, words: list[str], tmp_path: Path
) -> None:
    node = helper.make_node(op, ["x", "z"][:inputs], ["y"], **attrs)
    path = write(tmp_path / "m.onnx", [node], {n: [1, 2, 8] for n in ("x", "z")[:inputs]}, opset=opset)
    with pytest.raises(ModelError) as error:
        load_onnx(path)
    for word in words:
        assert word in str(error.value)


def test_unknown_attributes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that a later version of ONNX adds to an operator we know."""
    monkeypatch.setattr(onnx.checker, "check_model", lambda model: None)
    node = helper.make_node("Relu", ["x"], ["y"], slope=0.5)
    path = write(tmp_path / "m.onnx", [node], {"x": [2]})
    with pytest.raises(UnsupportedModel, match=r"node y \(Relu\): the attribute slope isn't supported"):
        load_onnx(path)


@pytest.mark.parametrize("content", [b"", b"\x08\x07garbage" * 9, b"GIF89a"])
def test_damaged_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"bad\.onnx"):
        load_onnx(path)


def test_weights_beside_the_file(attention: Path, tmp_path: Path) -> None:
    model = onnx.load(attention)
    where = tmp_path / "out.onnx"
    onnx.save(model, where, save_as_external_data=True, location="out.onnx.data", size_threshold=0)
    assert load_onnx(where).graph.nodes == load_onnx(attention).graph.nodes
    (tmp_path / "out.onnx.data").unlink()
    with pytest.raises(ModelError, match=r"out\.onnx"):
        load_onnx(where)


@pytest.mark.parametrize("device", ["cpu:0", "reference:0"])
def test_nothing_but_shapes_and_constants(device: str, tmp_path: Path) -> None:
    """Outputs that nothing computes: the input, the input in another shape, a weight."""
    nodes = [helper.make_node("Reshape", ["x", "flat"], ["y"]), helper.make_node("Identity", ["w"], ["z"])]
    weights = {"flat": np.array([6]), "w": np.arange(4, dtype=np.float32).reshape(2, 2)}
    path = write(tmp_path / "m.onnx", nodes, {"x": [2, 3]}, weights)
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_value_info("z", FLOAT, [2, 2]))
    onnx.save(model, path)
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    with engine.open_plan(engine.obtain(str(path), devices=(device,)).plan, threads=1) as program:
        got = program.call({"x": x})
    assert np.array_equal(got["y"], x.reshape(6)) and np.array_equal(got["z"], weights["w"])
