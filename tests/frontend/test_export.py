"""A saved torch.export program becomes a graph that computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend.export import load_export
from flashrt.ir.text import read_logical, to_text
from flashrt.ir.types import Symbol
from tests.frontend import aten


class MLP(nn.Module):
    """Has a parameter, a buffer, a buffer that isn't saved, and a tensor written in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(32, 4),
        )  # fmt: skip
        self.register_buffer("shift", torch.arange(4.0))
        self.register_buffer("unsaved", torch.arange(4.0) * 2, persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.net(x) + self.shift + self.unsaved + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return y, x.sum(-1)


class Pieces(nn.Module):
    """Split, unbind, results by number, negative dimensions, sizes computed from sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = x.split([2, 3, 3], dim=-1)
        first, second = x.chunk(2, -1)
        row = x.unflatten(1, (2, 4)).unbind(1)[1]
        best = x.topk(2, -1).values
        doubled = torch.cat([x, x]).view(2, x.shape[0] * 8)[:, -8:]
        return torch.cat([b * c, a, first - second, row, best, doubled[1].expand(x.shape[0], 8)], -1)


class InPlace(nn.Module):
    """Convolution, batch norm, and operations that write into their input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu_(self.norm(self.conv(x)))
        return y.add_(1.0).flatten(1)


def _saved(path: Path, module: nn.Module, example: torch.Tensor, dims: dict[int, Dim] | None = None) -> Path:
    with torch.no_grad():
        program = torch.export.export(module.eval(), (example,), dynamic_shapes=(dims,) if dims else None)
    torch.export.save(program, path)
    return path


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> tuple[MLP, Path]:
    torch.manual_seed(0)
    module = MLP()
    path = tmp_path_factory.mktemp("pt2") / "mlp.pt2"
    return module, _saved(path, module, torch.randn(3, 16), {0: Dim("B", min=1, max=64)})


def test_symbolic_batch(mlp: tuple[MLP, Path]) -> None:
    module, path = mlp
    imported = load_export(path)
    (symbol,) = imported.graph.symbols
    assert symbol == Symbol(symbol.name, 1, 64, 3)
    assert [o.name for o in imported.graph.outputs] == ["output.0", "output.1"]
    assert [n.name for n in imported.graph.nodes][:5] == ["net.0", "net.1", "net.2", "net.3", "net.4"]
    for batch in (1, 7):
        x = torch.randn(batch, 16)
        got = aten.run(imported, {"x": x})
        for output, wanted in zip(imported.graph.outputs, module(x), strict=True):
            torch.testing.assert_close(got[output.value], wanted)


def test_weights_lie_in_the_archive(mlp: tuple[MLP, Path]) -> None:
    module, path = mlp
    imported = load_export(path)
    assert {s for w in imported.graph.weights for s in w.sources} - set(imported.weights.tensors) == {
        "unsaved",
        "lifted_tensor_0",
    }
    for name, value in module.state_dict().items():
        torch.testing.assert_close(aten.read_weight(imported, name), value, rtol=0, atol=0)


def test_text_reads_back(mlp: tuple[MLP, Path]) -> None:
    graph = load_export(mlp[1]).graph
    assert read_logical(to_text(graph)) == graph


def test_pieces_and_sizes(tmp_path: Path) -> None:
    path = _saved(tmp_path / "pieces.pt2", Pieces(), torch.randn(3, 8), {0: Dim("B", min=2, max=64)})
    imported = load_export(path)
    ops = {n.op for n in imported.graph.nodes}
    assert "aten.slice" in ops and not ops & {"aten.split_with_sizes", "aten.chunk", "aten.unbind"}
    x = torch.randn(5, 8)
    torch.testing.assert_close(aten.run(imported, {"x": x})[imported.graph.outputs[0].value], Pieces()(x))


def test_in_place_operations_become_functions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = InPlace()
    nn.init.normal_(module.norm.running_mean)  # type: ignore[arg-type]
    imported = load_export(_saved(tmp_path / "inplace.pt2", module, torch.randn(2, 3, 8, 8)))
    assert not [n.op for n in imported.graph.nodes if n.op.endswith("_")]
    assert {"conv.weight", "norm.running_mean"} <= {w.name for w in imported.graph.weights}


def test_half_precision_means_f32(tmp_path: Path) -> None:
    module = nn.Linear(8, 4).bfloat16()
    imported = load_export(_saved(tmp_path / "half.pt2", module, torch.randn(2, 8).bfloat16()))
    (weight, bias) = imported.graph.weights
    assert (str(weight.type), weight.layout, bias.layout) == ("f32[4,8]", "bf16", "f32")
    assert imported.weights.tensors["weight"].format == "BF16"


def test_a_file_that_is_no_program(tmp_path: Path, mlp: tuple[MLP, Path]) -> None:
    text = tmp_path / "text.pt2"
    text.write_text("not a program")
    with pytest.raises(ModelError, match=r"text\.pt2 isn't a torch\.export program"):
        load_export(text)
    cut = tmp_path / "cut.pt2"
    cut.write_bytes(mlp[1].read_bytes()[:-200])
    with pytest.raises(ModelError, match=r"cut\.pt2"):
        load_export(cut)
    state = tmp_path / "state.pt2"
    torch.save(nn.Linear(2, 2).state_dict(), state)
    with pytest.raises(ModelError, match=r"state\.pt2 is a zip archive, but no torch\.export program"):
        load_export(state)
    with pytest.raises(ModelError, match="missing"):
        load_export(tmp_path / "absent.pt2")


def test_a_module_that_changes_its_buffers(tmp_path: Path) -> None:
    module = nn.BatchNorm1d(4)  # in training mode: counts batches
    with torch.no_grad():
        program = torch.export.export(module, (torch.randn(3, 4),))
    torch.export.save(program, tmp_path / "train.pt2")
    with pytest.raises(UnsupportedModel, match=r"changes .*when it runs"):
        load_export(tmp_path / "train.pt2")
