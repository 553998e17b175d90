"""Packed weights: what is written is read, in any range; damage is named; the index survives JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flashrt.errors import ModelError, ParseError
from flashrt.ir.types import TensorType, Weight
from flashrt.layouts import LAYOUTS
from flashrt.weights.index import File, Tensor, WeightIndex
from flashrt.weights.packed import PackedSource, index_from_json, index_to_json, write_packed
from flashrt.weights.source import flat

WEIGHTS = {
    "layers.0.up": Weight("layers.0.up", TensorType("f32", (40, 64)), ("a",), "q4m.16x32"),
    "norm": Weight("norm", TensorType("f32", (7,)), ("b",), "f32"),
    "head": Weight("head", TensorType("f32", (33, 96)), ("c",), "q8.16x32"),
}


class Noise:
    """A BlockSource whose byte i of a weight is fixed by the weight and i."""

    def read(self, weight: Weight, lo: int, hi: int, out: np.ndarray) -> None:
        out[...] = whole(weight)[LAYOUTS[weight.layout].span(lo, hi, flat(weight)[1])]


def whole(weight: Weight) -> np.ndarray:
    n, k = flat(weight)
    rng = np.random.default_rng(len(weight.name))
    return rng.integers(0, 256, LAYOUTS[weight.layout].bytes(n, k), dtype=np.uint8)


def read(source: PackedSource, weight: Weight, lo: int, hi: int) -> np.ndarray:
    out = np.empty(LAYOUTS[weight.layout].bytes(hi - lo, flat(weight)[1]), np.uint8)
    source.read(weight, lo, hi, out)
    return out


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    write_packed(path, WEIGHTS, Noise())
    return path


def test_round_trip(packed: Path) -> None:
    source = PackedSource(packed)
    for w in WEIGHTS.values():
        n, _ = flat(w)
        assert np.array_equal(read(source, w, 0, n), whole(w))
        assert source.blocks[w.name].offset % 64 == 0
    head = WEIGHTS["head"]
    assert np.array_equal(read(source, head, 16, 33), whole(head)[LAYOUTS[head.layout].span(16, 33, 96)])


def test_written_in_pieces_is_the_same(tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrt.weights.packed.CHUNK", 1000)
    write_packed(tmp_path / "pieces.bin", WEIGHTS, Noise())
    assert (tmp_path / "pieces.bin").read_bytes() == packed.read_bytes()
    assert np.array_equal(read(PackedSource(packed), WEIGHTS["head"], 0, 33), whole(WEIGHTS["head"]))


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_a_flipped_bit_names_its_block_and_no_other(packed: Path, name: str) -> None:
    data = bytearray(packed.read_bytes())
    data[PackedSource(packed).blocks[name].offset + 5] ^= 1
    packed.write_bytes(data)
    source = PackedSource(packed)
    for w in WEIGHTS.values():
        if w.name == name:
            rows = flat(w)[0]
            for hi in (rows, rows, min(LAYOUTS[w.layout].rows, rows)):  # all of it, and its first group
                with pytest.raises(ModelError, match=f"block {name} in .* is damaged"):
                    read(source, w, 0, hi)
        else:
            assert np.array_equal(read(source, w, 0, flat(w)[0]), whole(w))


def test_truncated_while_open_names_the_block(packed: Path) -> None:
    source = PackedSource(packed)
    data = packed.read_bytes()
    with open(packed, "r+b") as file:
        file.truncate(source.blocks["head"].offset + 9)
    with pytest.raises(ModelError, match="block head is cut short"):
        read(source, WEIGHTS["head"], 0, 33)
    packed.write_bytes(data[:-1])
    with pytest.raises(ModelError, match="are cut short"):
        PackedSource(packed)


@pytest.mark.parametrize("at", [0, 9, 17, 25, -3])
def test_damaged_directory(packed: Path, at: int) -> None:
    data = bytearray(packed.read_bytes())
    data[at] ^= 0x40
    packed.write_bytes(data)
    with pytest.raises(ModelError, match="packed weights"):
        PackedSource(packed)


def test_another_plan(packed: Path, tmp_path: Path) -> None:
    source = PackedSource(packed)
    with pytest.raises(ModelError, match="block gone isn't in"):
        read(source, Weight("gone", TensorType("f32", (4, 4)), (), "f32"), 0, 4)
    with pytest.raises(ModelError, match=r"block norm is packed as f32 \[7, 1\].* wants f16"):
        read(source, Weight("norm", TensorType("f32", (7,)), (), "f16"), 0, 7)
    with pytest.raises(ModelError, match="can't be opened"):
        PackedSource(tmp_path / "none")


def test_index_json_round_trip() -> None:
    tensors = {
        "q": Tensor("blk.0.attn_q.weight", 1, 64, 128, "Q4_1", (4, 32), rope_heads=2),
        "n": Tensor("n", 0, 0, 16, "F32", (4,), transposed=True, shift=-1.0),
    }
    index = WeightIndex((File("a", 5, "00"), File("b", 6, "ff")), tensors)
    assert index_from_json(index_to_json(index)) == index


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"files": [], "tensors": {"a": {}}}', '{"files":1,"tensors":{}}']
)
def test_broken_index_json(text: str) -> None:
    with pytest.raises(ParseError, match="weight index"):
        index_from_json(text)


def test_index_json_checks_file_numbers() -> None:
    index = WeightIndex((File("a", 5, "00"),), {"t": Tensor("t", 0, 0, 4, "F32", (1,))})
    data = json.loads(index_to_json(index))
    data["tensors"]["t"]["file"] = 1
    with pytest.raises(ParseError, match="in file 1 of 1"):
        index_from_json(json.dumps(data))
