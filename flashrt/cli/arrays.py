"""`flashrt run MODEL --input x.npz --output y.npz`: one step of a model that isn't a language model."""

from __future__ import annotations

import json
import os
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrt.cli.options import Chosen, obtain
from flashrt.cli.terminal import peak_memory, progress, say, size
from flashrt.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

    from flashrt.program import Plan

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
OPEN = 512  # sizes up to which a model is compiled where it leaves them open, unless an input is larger


def run_arrays(
    model: str, chosen: Chosen, source: Path | None, target: Path | None, *, threads: int | None, fresh: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Reads the inputs, runs the model once, and writes its outputs by name, whole or not at all.

    Raises:
        RequestError: a file can't be read or written, or names, dtypes or shapes don't fit.
    """
    from flashrt.frontend import models

    if source is None or target is None:
        raise RequestError("--input and --output go together", hint="add --input IN.npz --output OUT.npz")
    check_target(target)
    given = read_arrays(source)
    if chosen.context is None and models.find(model).kind in ("onnx", "callable", "export"):
        chosen = replace(chosen, context=_bound(given))
    compiled = obtain(model, chosen, fresh=fresh)
    _check(compiled.plan, given)
    outputs, seconds = call(compiled.plan, given, threads)
    write_arrays(target, outputs)
    shapes = {n: f"{a.dtype}{list(a.shape)}" for n, a in outputs.items()}
    if as_json:
        facts = {"outputs": shapes, "seconds": seconds, "peak_memory_bytes": peak_memory()}
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        told = ", ".join(f"{n} {t}" for n, t in shapes.items())
        say(f"{told} → {target} · {seconds * 1e3:,.1f} ms · peak memory {size(peak_memory())}", "dim")


def call(plan: Plan, given: Arrays, threads: int | None) -> tuple[Arrays, float]:
    """The model's outputs, and the seconds they took without loading."""
    from flashrt import engine
    from flashrt.cli.texts import encode

    with progress("loading"), engine.open_plan(plan, threads=threads) as program:
        program.open()
        begun = time.perf_counter()
        outputs = program.call(given) if plan.text is None else encode(program, given)
        return outputs, time.perf_counter() - begun


def read_arrays(path: Path) -> Arrays:
    """The arrays of an `.npz` file by name. Raises RequestError when it isn't one."""
    import numpy as np

    try:
        arrays = np.load(path, allow_pickle=False)
        if isinstance(arrays, np.ndarray):
            raise RequestError(f"{path} holds one array without a name", hint="write it with numpy.savez")
        with arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise RequestError(f"{path} is missing") from None
    except OSError as error:
        raise RequestError(f"{path} can't be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile):  # whose texts advise to allow pickles
        raise RequestError(
            f"{path} isn't an .npz file of plain arrays", hint="write it with numpy.savez"
        ) from None


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Writes an `.npz` file under a temporary name and renames it."""
    import numpy as np

    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        draft.replace(path)
    except OSError as error:
        raise RequestError(f"{path} can't be written: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)


def check_target(path: Path) -> None:
    """Refuses early what `write_arrays` couldn't write."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        why = "is a folder" if path.is_dir() else "lies in a folder that isn't there"
        raise RequestError(f"--output {path} {why}")


def _bound(given: Arrays) -> int | None:
    """The next power of two where an input is larger than what models are compiled for; else None."""
    largest = max((n for a in given.values() for n in a.shape), default=1)
    return None if largest <= OPEN else 1 << (largest - 1).bit_length()


def _check(plan: Plan, given: Arrays) -> None:
    """Language models and dtypes; the program itself checks names and shapes."""
    if plan.chat is not None or plan.logical.states:
        raise RequestError(
            f"{plan.name} is a language model: it takes text", hint="give --prompt TEXT in place of --input"
        )
    for name, array in given.items():
        wanted = plan.inputs.get(name)
        if array.dtype.kind not in "biuf" or (
            wanted is not None and wanted.dtype == "bool" and array.dtype.kind != "b"
        ):
            raise RequestError(f"input {name}: values of dtype {array.dtype}, expected {wanted or 'numbers'}")
