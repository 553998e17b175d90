"""Modules saved by torch.export run as in torch, whatever the batch; what has no kernel still runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim
from typer.testing import CliRunner

from flashrt import engine
from flashrt.cli.main import app
from flashrt.errors import RequestError
from flashrt.program import Program

DEVICES = ("cpu:0", "reference:0")
WIDTH = 48
TOLERANCE = 1e-5


class MLP(nn.Module):
    """A gated block and a plain one; biases, a norm, a residual, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 96, bias=False), nn.Linear(WIDTH, 96, bias=False)
        self.down = nn.Linear(96, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(x)
        x = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return self.head(x), x


class Sorted(nn.Module):
    """An operation in the middle that no compiled kernel has."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.cumsum(torch.tanh(self.before(x)), dim=-1))  # type: ignore[no-any-return]


class LookedUp(nn.Module):
    """Numbers of torch's own dtype for them, i64: given, and computed from what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)

    def forward(self, i: torch.Tensor, j: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.table(i)
        return x, self.table(i + j), x[j], x[j * 2 - 1]


def save(folder: Path, module: nn.Module) -> Path:
    """The module with random weights as a program for batches of 1 to 64."""
    dims = ({0: Dim("B", min=1, max=64)},)
    path = folder / f"{type(module).__name__.lower()}.pt2"
    with torch.no_grad():
        torch.export.save(torch.export.export(module, (batch(3),), dynamic_shapes=dims), path)
    return path


def batch(size: int) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(size))


@pytest.fixture(scope="module", params=[MLP, Sorted])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    module = request.param().eval()
    return module, save(tmp_path_factory.mktemp("pt2"), module)


def opened(path: Path, device: str) -> Program:
    return engine.open_plan(engine.obtain(str(path), devices=(device,)).plan, threads=2, poison=True)


@pytest.mark.parametrize("device", DEVICES)
def test_batches(saved: tuple[nn.Module, Path], device: str) -> None:
    module, path = saved
    with opened(path, device) as program:
        for size in (1, 3, 17, 64, 2):
            x = batch(size)
            outputs = program.call({"x": x.numpy()})
            check(outputs, theirs(module, x), f"batch {size} on {device}")


def theirs(module: nn.Module, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        outputs = module(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def check(outputs: Mapping[str, Any], wanted: tuple[torch.Tensor, ...], where: str) -> None:
    assert len(outputs) == len(wanted)
    for (name, got), want in zip(outputs.items(), wanted, strict=True):
        assert got.shape == tuple(want.shape) and got.dtype == np.float32
        error = float(np.abs(got - want.numpy()).max())
        assert error < TOLERANCE, f"{name} of {where}: differs from torch by {error:.1e}"


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_look_something_up(tmp_path: Path, device: str) -> None:
    module = LookedUp().eval()
    i, j = torch.tensor([7, 48, 3]), torch.tensor([0, 1, 1])
    torch.export.save(torch.export.export(module, (i, j)), tmp_path / "lookup.pt2")
    with opened(tmp_path / "lookup.pt2", device) as program:
        kernels = [k.kernel for k in program.plan.variants[0].stream.instrs if hasattr(k, "kernel")]
        assert {"embedding.f32", "rows"} <= set(kernels)
        outputs = program.call({"i": i.numpy(), "j": j.numpy()})
        check(outputs, theirs(module, i, j), f"numbers on {device}")
        with pytest.raises(RequestError, match="token id 50 is outside"):
            program.call({"i": np.array([1, 50, 2]), "j": j.numpy()})


def test_load_is_the_door(saved: tuple[nn.Module, Path], tmp_path: Path) -> None:
    """A model or a plan folder; the plan carries the weights when it is packed."""
    module, path = saved
    x = batch(4)
    moved = tmp_path / path.name
    moved.write_bytes(path.read_bytes())
    engine.compile(str(moved), tmp_path / "plan", pack=True)
    moved.unlink()
    for place in (path, tmp_path / "plan"):
        with engine.load(place) as program:
            check(program.call({"x": x.numpy()}), theirs(module, x), str(place))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": np.zeros((65, WIDTH), np.float32)}, "=65 is outside 1…64"),
        ({"x": np.zeros((2, WIDTH + 1), np.float32)}, "input x: shape"),
        ({"y": np.zeros((2, WIDTH), np.float32)}, r"missing \['x'\], unknown \['y'\]"),
    ],
)
def test_inputs_that_do_not_fit(saved: tuple[nn.Module, Path], inputs: Any, message: str) -> None:
    with opened(saved[1], "cpu:0") as program:
        with pytest.raises(RequestError, match=message):
            program.call(inputs)
        assert program.call({"x": batch(2).numpy()})  # and the next call works


def test_explain_names_what_has_no_kernel(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = save(tmp_path, Sorted().eval())
    result = CliRunner().invoke(app, ["explain", str(path), "--json"])
    assert result.exit_code == 0, result.output
    (variant,) = json.loads(result.stdout)["variants"]
    on_host = [n for n in variant["nodes"] if n["host"]]
    assert [n["op"] for n in on_host] == ["host.aten.cumsum"]
    assert variant["host_rows"] == [on_host[0]["name"]]
    assert "reference implementation" in on_host[0]["because"]
    assert {n["op"] for n in variant["nodes"] if not n["host"]} >= {"linear"}


class Nothing(nn.Module):
    """Outputs that no operation computes: an input, an input in another shape, a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.arange(6.0).reshape(2, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, x.reshape(-1), self.weight


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_that_nothing_computes(tmp_path: Path, device: str) -> None:
    module, x = Nothing().eval(), torch.randn(3, 4)
    torch.export.save(torch.export.export(module, (x,)), tmp_path / "nothing.pt2")
    with opened(tmp_path / "nothing.pt2", device) as program:
        check(program.call({"x": x.numpy()}), theirs(module, x), device)
