"""A GGUF model in several files reads as the same model in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flashrt.errors import ModelError
from flashrt.frontend.gguf import weight_index
from flashrt.frontend.gguf_config import config_values
from flashrt.frontend.gguf_header import read_header
from flashrt.frontend.gguf_shards import read_shards
from flashrt.frontend.models import Source
from flashrt.ir.types import TensorType, Weight
from flashrt.weights.index import WeightIndex
from flashrt.weights.source import IndexSource
from tests.frontend import gguf_bytes as g

COUNT = 3


def cut() -> list[g.GgufFile]:
    """The tiny model's files."""
    whole = g.tiny_llama()
    files = [g.GgufFile(dict(whole.metadata), whole.tensors[:2]), g.GgufFile(), g.GgufFile()]
    files[1].tensors, files[2].tensors = whole.tensors[2:7], whole.tensors[7:]
    for i, file in enumerate(files):
        file.metadata |= {
            "split.no": g.u32(i), "split.count": g.u32(COUNT),
            "split.tensors.count": g.i32(len(whole.tensors)),
        }  # fmt: skip
    return files


def write(folder: Path, files: list[g.GgufFile]) -> list[Path]:
    return [f.write(folder / f"m-{i + 1:05}-of-{COUNT:05}.gguf") for i, f in enumerate(files)]


def values(index: WeightIndex, name: str) -> np.ndarray:
    tensor = index.tensors[name]
    data = np.empty(4 * int(np.prod(tensor.shape)), np.uint8)
    weight = Weight(name, TensorType("f32", tensor.shape), (name,), "f32")
    IndexSource(index).read(weight, 0, tensor.shape[0], data)
    return data.view(np.float32)


@pytest.mark.parametrize("given", range(COUNT))
def test_any_file_names_the_whole_model(tmp_path: Path, given: int) -> None:
    header = read_shards(write(tmp_path, cut())[given])
    whole = read_header(g.tiny_llama().write(tmp_path / "whole.gguf"))
    assert config_values(header) == config_values(whole)
    ours, theirs = weight_index(header), weight_index(whole)
    assert len(ours.files) == COUNT and set(ours.tensors) == set(theirs.tensors)
    for name in theirs.tensors:
        assert np.array_equal(values(ours, name), values(theirs, name)), name


def test_another_last_file_is_another_model(tmp_path: Path) -> None:
    files, before = cut(), []
    paths = write(tmp_path, files)
    before.append(Source("gguf", str(paths[0])).identity())
    files[2].tensors[0].data = bytes(len(files[2].tensors[0].data))
    write(tmp_path, files)
    assert Source("gguf", str(paths[0])).identity() not in before


BROKEN: list[tuple[Callable[[list[g.GgufFile]], object], str]] = [
    (lambda f: f[0].metadata.update({"split.count": g.u32(4)}), r"one of 4 files .* its name says 3"),
    (lambda f: f[2].metadata.update({"split.no": g.u32(1)}), r"is number 1 .* its name says 2"),
    (lambda f: f[2].tensors.append(f[1].tensors[0]), r"attn_norm\.weight is in an earlier file"),
    (lambda f: f[2].tensors.pop(), r"has 11 tensors .* its files 10"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_files_that_do_not_belong_together(
    tmp_path: Path, change: Callable[[list[g.GgufFile]], object], message: str
) -> None:
    files = cut()
    change(files)
    with pytest.raises(ModelError, match=message):
        read_shards(write(tmp_path, files)[0])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    paths = write(tmp_path, cut())
    paths[1].unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf is missing"):
        read_shards(paths[0])


def test_a_renamed_part_says_how_to_name_it(tmp_path: Path) -> None:
    path = cut()[0].write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="one of 3 files"):
        read_shards(path)
