"""The house keeps its shape: light front door, one name for each file, imports only downwards."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("passes", "backends", "probes")
HEAVY = {"torch", "numba", "llvmlite", "transformers", "scipy", "onnxruntime"}


def python(code: str) -> str:
    """What a fresh interpreter, started in the tree, prints for `code`."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def heavy_after(statement: str) -> set[str]:
    """The heavy libraries that are loaded once `statement` has run."""
    loaded = python(f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))")
    return set(json.loads(loaded)) & HEAVY


def test_front_door_is_light() -> None:
    """`import flashrt` takes under 0.3 s and loads no heavy library."""
    timed = "import time; t = time.perf_counter(); import flashrt; print(time.perf_counter() - t)"
    assert statistics.median(float(python(timed)) for _ in range(3)) < 0.3
    assert heavy_after("import flashrt") == set()


@pytest.mark.parametrize("room", ["ir", "passes"])
def test_floor_without_torch(room: str) -> None:
    """Every module of the room imports without a heavy library; scipy is the placer's."""
    walk = (
        f"import importlib, pkgutil, flashrt.{room} as room\n"
        "for found in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    importlib.import_module(found.name)"
    )
    assert heavy_after(walk) <= {"scipy"}


def test_links_point_to_the_rooms() -> None:
    for name in LINKED:
        assert (ROOT / "flashrt" / name).resolve() == ROOT / name


# Imports everything, then prints file → module names; absent third-party libraries are no fault here.
IMPORT_ALL = """
import importlib, json, os, pkgutil, sys
import flashrt

def broken(name):
    error = sys.exc_info()[1]
    if not isinstance(error, ImportError) or (error.name or "flashrt").partition(".")[0] == "flashrt":
        raise error

for found in pkgutil.walk_packages(flashrt.__path__, "flashrt.", onerror=broken):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except ImportError:
        broken(found.name)

names = {}
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None)
    # (torch.ops claims a relative file that isn't there)
    real = os.path.realpath(file) if file and os.path.isfile(file) else ""
    if real.startswith(os.getcwd() + os.sep) and name != "__main__":
        names.setdefault(real, []).append(name)
print(json.dumps(names))
"""


def test_one_name_for_each_file() -> None:
    """With every module imported, no source file was loaded twice, and none under a bare name."""
    names = {Path(file): loaded for file, loaded in json.loads(python(IMPORT_ALL)).items()}
    ours = {file: loaded for file, loaded in names.items() if ".venv" not in file.relative_to(ROOT).parts}
    assert ROOT / "flashrt/__init__.py" in ours
    for file, loaded in ours.items():
        assert len(loaded) == 1 and loaded[0].partition(".")[0] == "flashrt", f"{file}: {loaded}"


def imports(path: Path) -> set[str]:
    """First components of all absolute imports of a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_no_bare_imports() -> None:
    """Nothing imports `passes`, `backends` or `probes` without `flashrt.` before it."""
    folders = ("flashrt", *LINKED, "tests", "benchmarks", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    bare = {str(path.relative_to(ROOT)): wrong for path in files if (wrong := imports(path) & set(LINKED))}
    assert not bare


def test_import_contracts() -> None:
    """The floors and rooms of .importlinter are kept."""
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
