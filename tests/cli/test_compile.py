"""`flashrt compile`, `explain`, `devices`: what is shown, at any width, and where plans end up."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flashrt import engine, program
from flashrt.cli.explain import _print
from flashrt.ir import micro
from flashrt.ir.text import read_logical, read_micro, read_physical
from flashrt.passes.pipeline import PERFORMANCE
from tests.cli.calling import ON_REFERENCE, call, done, refused, start

WIDTHS = ["60", "80", "100", "200"]


def compiled(made: Path, *args: str | Path) -> tuple[str, str]:
    """(stdout, stderr) of compiling the tiny model."""
    result = done("compile", made / "tiny.logical", *ON_REFERENCE, *args)
    return result.stdout, result.stderr


# ---- compile -----------------------------------------------------------------------
def test_without_output_the_plan_stays_in_the_cache(made: Path, cache: Path) -> None:
    _, first = compiled(made)
    assert "plan kept in the cache, compiled in" in first and str(cache / "plans") in first
    _, second = compiled(made)
    assert "plan kept in the cache, from the cache" in second and "--fresh" in second
    assert "compiled in" in compiled(made, "--fresh")[1]


def test_output(made: Path, tmp_path: Path) -> None:
    out, err = compiled(made, "-o", tmp_path / "deep" / "plan")
    assert "tiny: 36 operations" in out and f"plan written to {tmp_path / 'deep' / 'plan'}" in err
    assert engine.seal(tmp_path / "deep" / "plan").name == "tiny"
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["plan"]
    compiled(made, "-o", tmp_path / "deep" / "plan", "--pack")  # replaces a plan
    assert (tmp_path / "deep" / "plan" / "weights.bin").is_file()


def test_a_packed_plan_stays_packed_when_sealed(made: Path, tmp_path: Path) -> None:
    done("compile", made / "packed", "-o", tmp_path / "again")
    assert program.load(tmp_path / "again").packed is not None


def test_json(made: Path, cache: Path) -> None:
    facts = json.loads(compiled(made, "--json")[0])
    assert Path(facts["plan"]).parent == cache / "plans" and facts["cached"] is False
    assert [v["name"] for v in facts["variants"]] == ["small", "large"]
    assert set(facts["pass_seconds"]) >= set(PERFORMANCE)
    assert facts["variants"][0]["estimate_us"] < facts["variants"][1]["estimate_us"]


def test_without_a_pass(made: Path) -> None:
    facts = json.loads(compiled(made, "--json", "--without", "region", "--without", "pack")[0])
    assert facts["variants"][0]["regions"] == 0 and not set(facts["pass_seconds"]) & {"region", "pack"}


def test_the_help_names_the_passes_that_may_be_left_out() -> None:
    text = " ".join(done("compile", "--help").stdout.split())
    assert all(name in text for name in PERFORMANCE) and "--without region" in text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["compile", "explain"])
def test_tables_fit_the_terminal(
    plan: str, command: str, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    table = [x for x in done(command, plan).stdout.splitlines() if not x.startswith("cause")]
    assert all(len(line) <= max(int(width), 80) for line in table)
    assert not any(re.search("[a-z]…", line) for line in table)  # no name or unit is cut


# ---- dumps -------------------------------------------------------------------------
def dump(plan: str, level: str, *args: str) -> str:
    return str(done("compile", plan, "--debug-graph", level, *args).stdout)


def test_a_dump_can_be_read_back(plan: str) -> None:
    known = program.load(Path(plan))
    assert read_logical(dump(plan, "logical")) == known.logical
    assert read_physical(dump(plan, "physical")) == known.variants[0].physical
    assert read_micro(dump(plan, "micro", "--variant", "large")) == known.variants[1].stream


def test_filters(plan: str) -> None:
    lines = dump(plan, "micro", "--node", "*layers.1.*", "--kernel", "linear*").splitlines()
    assert len(lines) == 4 and all("layers.1" in line and "kernel=linear" in line for line in lines)
    result = done("compile", plan, "--debug-graph", "physical", "--node", "nothing*")
    assert result.stdout == "" and "nothing matches nothing*" in result.stderr


@pytest.mark.parametrize("level", ["logical", "physical", "micro"])
def test_forms(plan: str, level: str) -> None:
    assert dump(plan, level, "--format", "dot").startswith("digraph")
    assert dump(plan, level, "--format", "html").startswith("<!doctype html>")
    assert dump(plan, level, "--format", "summary").startswith(f"{level} ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--node", "x"], ["--node", "--debug-graph"]),
        (["--format", "dot"], ["--format", "--debug-graph"]),
        (["--debug-graph", "micro", "--json"], ["--json"]),
        (["--debug-graph", "micro", "--variant", "medium"], ["medium", "small, large"]),
        (["--debug-graph", "micro", "--format", "dot", "--node", "x"], ["--node", "html"]),
        (["--pack"], ["--pack", "-o"]),
    ],
)
def test_refused(plan: str, args: list[str], words: list[str]) -> None:
    refused(call("compile", plan, *args), *words)


@pytest.mark.parametrize("args", [["--debug-graph", "macro"], ["--debug-graph", "micro", "--format", "svg"]])
def test_typos_name_what_is_known(plan: str, args: list[str]) -> None:
    result = call("compile", plan, *args)
    assert result.exit_code == 2 and result.stdout == ""
    assert args[-1] in result.stderr and ("logical" in result.stderr or "html" in result.stderr)


# ---- explain -----------------------------------------------------------------------
def test_explain_drops_columns_that_say_the_same_everywhere(plan: str) -> None:
    result = done("explain", plan)
    head = next(line for line in result.stdout.splitlines() if line.lstrip().startswith("node"))
    assert head.split() == ["node", "count", "estimate", "share", "bytes"]
    assert result.stdout.count("cause: ") == 2 and "layers.*.mlp.down_proj" in result.stdout
    assert "reference:0: weights" in result.stdout


def test_explain_names_devices_and_causes_where_they_differ() -> None:
    node = {"op": "linear", "numerics": "", "estimate_us": 1.0, "bytes": 8.0, "host": False}
    nodes = [
        {**node, "name": f"layers.{i}.{name}", "device": device, "because": because}
        for i in range(3)
        for name, device, because in (("a", "cpu:0", "near"), ("b", "gpu:0", "fast"))
    ]
    variant = {
        "name": "all", "tokens": [0, 0], "at": {}, "estimate_us": 6.0, "nodes_us": 6.0, "budgets": [],
        "host_rows": [], "nodes": nodes,
    }  # fmt: skip
    shown = typer.Typer()
    facts = {"name": "m", "devices": [], "rounded": {"Q6_K in q8.16x32": 27}, "variants": [variant]}
    shown.command()(lambda: _print(facts))
    lines = [line.split() for line in CliRunner().invoke(shown).stdout.splitlines() if line.strip()]
    assert ["layers.*.a", "cpu:0", "a", "3", "3.0", "µs", "50.0%", "24", "B"] in lines
    assert ["cause", "b:", "fast"] in lines
    assert "tensors kept with loss: 27 from Q6_K in q8.16x32" in " ".join(lines[0])


def test_explain_json_has_every_node(plan: str) -> None:
    facts = json.loads(done("explain", plan, "--json").stdout)
    for variant in facts["variants"]:
        assert sum(n["estimate_us"] for n in variant["nodes"]) == pytest.approx(variant["nodes_us"])
        assert all(n["because"] for n in variant["nodes"])
    stream = program.load(Path(plan)).variants[0].stream
    assert len(facts["variants"][0]["nodes"]) >= sum(isinstance(i, micro.Dispatch) for i in stream.instrs)


def test_devices() -> None:
    text = done("devices").stdout
    assert text.startswith("cpu:0") and "features" in text and "GB/s" in text
    assert json.loads(done("devices", "--json").stdout)["devices"][0]["id"] == "cpu:0"


# ---- several processes -------------------------------------------------------------
def test_two_processes_compile_one_model(made: Path, cache: Path, tmp_path: Path) -> None:
    args = ("compile", made / "tiny.logical", *ON_REFERENCE, "--json", "-o", tmp_path / "plan")
    both = [start(*args) for _ in range(2)]
    facts = []
    for process in both:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()
        facts.append(json.loads(out))
    assert sorted(f["cached"] for f in facts) == [False, True]  # one compiled, the other waited for it
    assert len(list((cache / "plans").glob("[!.]*"))) == 1 and not list(cache.rglob("*.tmp"))
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]
    program.load(tmp_path / "plan")


KILLED = """
import os, pathlib, signal
from flashrt import program
write = pathlib.Path.write_bytes
def dying(self, data):
    if self.name == "weights.json":
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, data)
pathlib.Path.write_bytes = dying
from flashrt.cli.main import main
main()
"""


def test_a_compile_killed_while_it_saves(made: Path, cache: Path) -> None:
    args = ["compile", str(made / "tiny.logical"), *ON_REFERENCE]
    killed = subprocess.run([sys.executable, "-c", KILLED, *args], capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not list((cache / "plans").glob("[!.]*")) and len(list(cache.rglob("*.tmp"))) == 1
    assert "compiled in" in done(*args).stderr
    assert not list(cache.rglob("*.tmp"))  # swept up
    assert "from the cache" in done(*args).stderr


# ---- speed -------------------------------------------------------------------------
def test_help_is_quick() -> None:
    code = "import sys, resource; sys.argv[1:] = ['--help']\n"
    code += "from flashrt.cli.main import app; app(standalone_mode=False)\n"
    code += "used = resource.getrusage(resource.RUSAGE_SELF); print(used.ru_utime, file=sys.stderr)\n"
    code += "print({'torch', 'numpy', 'numba', 'scipy'} & set(sys.modules), file=sys.stderr)"
    begun = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, loaded = run.stderr.splitlines()
    assert float(seconds) < 0.5 and loaded == "set()", (run.stderr, time.monotonic() - begun)
