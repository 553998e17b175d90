"""Weight bytes out of files: every format into its layout, in any range, and broken files named."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.ir.types import TensorType, Weight
from flashrt.layouts import LAYOUTS, pack_quants, unpack
from flashrt.weights import repack
from flashrt.weights.formats import FORMATS, native_layout
from flashrt.weights.index import Tensor, WeightIndex
from flashrt.weights.source import CHUNK, IndexSource, digest, file_entry, flat, stored_rows

ELEMENTS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def encode(form: str, values: np.ndarray) -> np.ndarray:
    """f32 values [n, k] → the bytes of each row in a format."""
    if form in ELEMENTS:
        return np.ascontiguousarray(values.astype(ELEMENTS[form])).view(np.uint8).reshape(len(values), -1)
    return quantize(values, GGMLQuantizationType[form])


def decode(form: str, rows: np.ndarray) -> np.ndarray:
    if form in ELEMENTS:
        return rows.view(ELEMENTS[form]).astype(np.float32)
    return dequantize(rows, GGMLQuantizationType[form])


def make(folder: Path, tensors: dict[str, tuple[str, np.ndarray]], **facts: dict[str, object]) -> WeightIndex:
    """A file of tensors one after the other, at odd offsets, and its index. facts: more fields, by tensor."""
    path, at, entries, parts = folder / "weights.bin", 3, {}, [b"???"]
    for name, (form, values) in tensors.items():
        data = encode(form, values).tobytes()
        more = facts.get(name, {})
        shape = values.shape[::-1] if more.get("transposed") else values.shape
        entries[name] = Tensor(name, 0, at, len(data), form, shape, **more)  # type: ignore[arg-type]
        parts.append(data)
        at += len(data)
    path.write_bytes(b"".join(parts))
    return WeightIndex((file_entry(path),), entries)


def weight(sources: tuple[str, ...], shape: tuple[int, ...], layout: str) -> Weight:
    return Weight("w", TensorType("f32", shape), sources, layout)


def read(source: IndexSource, w: Weight, lo: int, hi: int) -> np.ndarray:
    """Rows [lo, hi) as floats."""
    layout, (_, k) = LAYOUTS[w.layout], flat(w)
    out = np.full(layout.bytes(hi - lo, k), 0xA5, np.uint8)
    source.read(w, lo, hi, out)
    return unpack(layout, out, hi - lo, k)


def values(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, k)).astype(np.float32)


@pytest.mark.parametrize("form", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0"])
def test_native_layout_keeps_every_bit(tmp_path: Path, form: str) -> None:
    x = values(37, 96)
    source = IndexSource(make(tmp_path, {"w": (form, x)}))
    want = decode(form, encode(form, x))
    w = weight(("w",), (37, 96), native_layout(form))
    assert np.array_equal(read(source, w, 0, 37), want)
    assert np.array_equal(read(source, w, 16, 32), want[16:32])
    assert np.array_equal(read(source, w, 32, 37), want[32:])


@pytest.mark.parametrize("form", ["Q4_K", "Q6_K"])
def test_f32_rows_are_the_dequantised_weights(tmp_path: Path, form: str) -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 60, (5, FORMATS[form].row_bytes(256)), dtype=np.uint8)
    path = tmp_path / "w.bin"
    path.write_bytes(rows.tobytes())
    index = WeightIndex((file_entry(path),), {"w": Tensor("w", 0, 0, rows.nbytes, form, (5, 256))})
    got = read(IndexSource(index), weight(("w",), (5, 256), "f32"), 0, 5)
    assert np.array_equal(got, decode(form, rows))


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q8_0"])
def test_repacking_words_is_what_the_layout_defines(form: str) -> None:
    """The word tricks against `pack_quants`, byte for byte, padding included."""
    rows = encode(form, values(21, 64))
    name = next(layout for layout, held in repack.FORMATS.items() if held == form)
    layout, blocks = LAYOUTS[name], rows.reshape(21, 2, -1)
    head = 4 if layout.minimum else 2
    scales = np.ascontiguousarray(blocks[..., :head]).view(np.float16)
    quants = blocks[..., head:]
    q = quants.view(np.int8) if layout.bits == 8 else np.concatenate([quants & 15, quants >> 4], axis=-1)
    out = np.empty(layout.bytes(21, 64), np.uint8)
    repack.store(layout, rows, out)
    assert np.array_equal(
        out, pack_quants(layout, q, scales[..., 0], scales[..., 1] if layout.minimum else None)
    )


@given(data=st.data())
def test_any_range_of_joined_sources(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Ranges that cross the borders of parts, which needn't fall on row groups."""
    form = data.draw(st.sampled_from(["Q4_1", "Q8_0", "F16", "F32"]))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    parts = {f"p{i}": (form, values(n, 32, i)) for i, n in enumerate(sizes)}
    source = IndexSource(make(tmp_path_factory.mktemp("joined"), parts))
    want = np.concatenate([decode(form, encode(form, x)) for _, x in parts.values()])
    layout = LAYOUTS[native_layout(form)]
    lo = data.draw(st.integers(0, (len(want) - 1) // layout.rows)) * layout.rows
    hi = data.draw(st.integers(lo + 1, len(want)))
    w = weight(tuple(parts), want.shape, layout.name)
    assert np.array_equal(read(source, w, lo, hi), want[lo:hi])


@pytest.mark.parametrize("form", ["F32", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("heads", [1, 3])
def test_pairwise_rope_rows_are_put_back(tmp_path: Path, form: str, heads: int) -> None:
    x = values(heads * 32, 64)
    stored = x.reshape(heads, 2, 16, 64).swapaxes(1, 2).reshape(x.shape)  # what llama.cpp's converter does
    source = IndexSource(make(tmp_path, {"w": (form, stored)}, w={"rope_heads": heads}))
    w = weight(("w",), x.shape, native_layout(form))
    want = decode(form, encode(form, x))
    assert np.array_equal(read(source, w, 0, heads * 32), want)
    assert np.array_equal(read(source, w, 16, heads * 32 - 5), want[16 : heads * 32 - 5])


def test_stored_rows_is_a_permutation_within_each_head() -> None:
    order = stored_rows(8, 0, 16)
    assert sorted(order[:8]) == list(range(8)) and sorted(order) == list(range(16))
    assert list(order[:8]) == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("form", ["F32", "F16", "BF16"])
def test_transposed(tmp_path: Path, form: str) -> None:
    x = values(24, 40)
    source = IndexSource(make(tmp_path, {"w": (form, x.T)}, w={"transposed": True}))
    w = weight(("w",), (24, 40), native_layout(form))
    assert np.array_equal(read(source, w, 5, 19), decode(form, encode(form, x))[5:19])


def test_plain_formats_convert_and_shift(tmp_path: Path) -> None:
    x = values(4, 8)
    source = IndexSource(make(tmp_path, {"a": ("F32", x), "b": ("BF16", x)}, a={"shift": -1.0}))
    assert np.array_equal(read(source, weight(("a",), (4, 8), "f32"), 0, 4), x - np.float32(1))
    assert np.array_equal(
        read(source, weight(("b",), (4, 8), "f32"), 1, 3), x.astype(ml_dtypes.bfloat16)[1:3]
    )
    assert np.array_equal(read(source, weight(("b",), (4, 8), "bf16"), 0, 4), x.astype(ml_dtypes.bfloat16))


def test_vectors_scalars_and_constants(tmp_path: Path) -> None:
    x = values(1, 50)[0]
    index = make(tmp_path, {"v": ("F32", x.reshape(50, 1))})
    tensor = index.tensors["v"]
    index = WeightIndex(index.files, {"v": Tensor("v", 0, tensor.offset, tensor.bytes, "F32", (50,))})
    source = IndexSource(index, {"c": np.arange(6.0).reshape(3, 2), "s": np.array(2.5)})
    assert np.array_equal(read(source, weight(("v",), (50,), "f32"), 0, 50)[:, 0], x)
    assert np.array_equal(read(source, weight(("c",), (3, 2), "f32"), 1, 3), [[2, 3], [4, 5]])
    assert read(source, weight(("s",), (), "f32"), 0, 1) == 2.5


def test_larger_than_a_chunk(tmp_path: Path) -> None:
    x = values(48, CHUNK // 64)
    source = IndexSource(make(tmp_path, {"w": ("Q8_0", x)}))
    w = weight(("w",), x.shape, "q8.16x32")
    assert np.array_equal(read(source, w, 0, 48), decode("Q8_0", encode("Q8_0", x)))


def test_relative_paths_start_at_root(tmp_path: Path) -> None:
    index = make(tmp_path, {"w": ("F32", values(2, 4))})
    file = index.files[0]
    moved = WeightIndex((type(file)("weights.bin", file.size, file.digest),), index.tensors)
    assert read(IndexSource(moved, root=tmp_path), weight(("w",), (2, 4), "f32"), 0, 2).shape == (2, 4)


# --- errors


def test_changed_file_is_named(tmp_path: Path) -> None:
    index = make(tmp_path, {"w": ("F32", values(2, 4))})
    path = tmp_path / "weights.bin"
    data = path.read_bytes()
    path.write_bytes(b"!" + data[1:])
    with pytest.raises(ModelError, match=r"weights\.bin has changed.*\n.*\ncompile the model again"):
        IndexSource(index)
    path.write_bytes(data[:-1])
    with pytest.raises(ModelError, match="it had 35 bytes, now 34"):
        IndexSource(index)
    path.unlink()
    with pytest.raises(ModelError, match=r"weights\.bin can't be opened"):
        IndexSource(index)


@pytest.mark.parametrize("form", ["F32", "Q8_0"])
def test_file_truncated_while_open_names_the_tensor(tmp_path: Path, form: str) -> None:
    index = make(tmp_path, {"first": (form, values(16, 32)), "second": (form, values(16, 32))})
    source = IndexSource(index)
    os.truncate(tmp_path / "weights.bin", index.tensors["second"].offset + 5)
    assert read(source, weight(("first",), (16, 32), native_layout(form)), 0, 16).shape == (16, 32)
    with pytest.raises(ModelError, match="tensor second is cut short"):
        read(source, weight(("second",), (16, 32), native_layout(form)), 0, 16)


def test_tensor_with_too_few_bytes(tmp_path: Path) -> None:
    index = make(tmp_path, {"w": ("F32", values(4, 4))})
    short = Tensor("w", 0, 3, 63, "F32", (4, 4))
    with pytest.raises(ModelError, match="tensor w has 63 bytes"):
        read(IndexSource(WeightIndex(index.files, {"w": short})), weight(("w",), (4, 4), "f32"), 0, 4)


@pytest.mark.parametrize("shape", [(4, 5), (5, 4), (2, 8)])
def test_wrong_shapes(tmp_path: Path, shape: tuple[int, int]) -> None:
    source = IndexSource(make(tmp_path, {"w": ("F32", values(4, 4))}))
    with pytest.raises(ModelError, match=r"weight w is f32.* tensor w has shape"):
        read(source, weight(("w",), shape, "f32"), 0, shape[0])


def test_missing_lossy_and_unknown(tmp_path: Path) -> None:
    index = make(tmp_path, {"w": ("F32", values(16, 32))})
    source = IndexSource(index)
    with pytest.raises(ModelError, match="tensor nowhere is in no file"):
        read(source, weight(("nowhere",), (16, 32), "f32"), 0, 16)
    with pytest.raises(ModelError, match=r"tensor w is F32, not what q4\.16x32 holds"):
        read(source, weight(("w",), (16, 32), "q4.16x32"), 0, 16)
    odd = WeightIndex(index.files, {"w": Tensor("w", 0, 3, 64, "Q9_X", (16, 32))})
    with pytest.raises(UnsupportedModel, match="unknown tensor format Q9_X"):
        read(IndexSource(odd), weight(("w",), (16, 32), "f32"), 0, 16)


def test_digest_depends_on_size_and_start(tmp_path: Path) -> None:
    a, b, c = (tmp_path / x for x in "abc")
    a.write_bytes(bytes(2 << 20))
    b.write_bytes(bytes((2 << 20) + 1))
    c.write_bytes(b"x" + bytes((2 << 20) - 1))
    assert len({digest(a), digest(b), digest(c)}) == 3
    with pytest.raises(ModelError, match="can't be read"):
        digest(tmp_path / "none")


@pytest.mark.model
def test_whole_model_repacks_without_holding_it_twice() -> None:
    """Every tensor of the bundled model, exact, with less than 8 MB beyond the output."""
    import tracemalloc

    from flashrt.frontend import models
    from flashrt.frontend.gguf import weight_index
    from flashrt.frontend.gguf_header import read_header

    index = weight_index(read_header(models.find("smollm2").place))
    source = IndexSource(index)
    for name in ("model.embed_tokens.weight", "model.layers.7.self_attn.k_proj.weight"):
        tensor = index.tensors[name]
        w = weight((name,), tensor.shape, native_layout(tensor.format))
        out = np.empty(LAYOUTS[w.layout].bytes(*flat(w)), np.uint8)
        tracemalloc.start()
        source.read(w, 0, tensor.shape[0], out)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20
        with open(index.files[0].path, "rb") as file:
            file.seek(tensor.offset)
            stored = np.frombuffer(file.read(tensor.bytes), np.uint8).reshape(tensor.shape[0], -1)
        want = decode(tensor.format, stored)
        if tensor.rope_heads:
            want = want.reshape(tensor.rope_heads, -1, 2, tensor.shape[1]).swapaxes(1, 2).reshape(want.shape)
        assert np.array_equal(unpack(LAYOUTS[w.layout], out, *flat(w)), want)
