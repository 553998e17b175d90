#!/usr/bin/env python3
"""Runs ONNX's own node tests (onnx.backend.test) through flashrt and counts: right, refused, wrong.

    tools/onnx_nodes.py [PATTERN] [-v]

Each test is a model of one node, or of the nodes an operator is defined by, with inputs and outputs. It is
written to a file, compiled for cpu:0 and run, as `flashrt run` does. Where an operator needs a value while
the model is read (axes, a shape), which files hold as weights and the tests give as inputs, the test is tried
once more with the small whole-number inputs as weights.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import importlib
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from flashrt import engine
from flashrt.errors import FlashrtError

ROUNDING = {"float16": 2**-9, "bfloat16": 2**-6}  # of values that were rounded more than once: 4 half steps
VERDICTS = ("right", "refused", "wrong")


def cases(pattern: str = "*") -> Iterator[Any]:
    """ONNX's node tests whose name fits the pattern."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tests divide by zero on purpose
        found = collect_testcases(None)
    return (case for case in found if fnmatch.fnmatch(case.name, pattern))


def cases_of(operators: Sequence[str]) -> list[Any]:
    """The node tests of some operators, by the names of ONNX's modules: making all takes seconds."""
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in operators:
            importlib.import_module(f"{node.__name__}.{operator}")
    return list(node._NodeTestCases)


def verdict(case: Any, folder: Path) -> tuple[str, str]:
    """(one of VERDICTS, why): a test is right only if every set of its inputs is."""
    why = ""
    for inputs, outputs in case.data_sets:
        try:
            got = _run(case.model, inputs, folder)
        except FlashrtError as error:
            return "refused", error.what
        except Exception as error:  # a defect of ours: no user should meet it
            return "wrong", f"{type(error).__name__}: {error}"
        if why := _differs(case, got, outputs):
            return "wrong", why
    return "right", why


def _run(model: Any, inputs: Sequence[Any], folder: Path) -> list[np.ndarray]:
    try:
        return _ran(model, inputs, folder)
    except FlashrtError as error:
        if "depends on data" not in error.what:
            raise
        return _ran(*_with_weights(model, inputs, error.what), folder)


def _with_weights(model: Any, inputs: Sequence[Any], why: str) -> tuple[Any, list[Any]]:
    """The model with its small inputs as weights, and that which the error names; and what is left."""
    changed, left = copy.deepcopy(model), []
    for value, array in zip(model.graph.input, inputs, strict=True):
        array = np.asarray(array)
        small = array.ndim <= 1 and array.dtype.kind in "iub"
        if small or f"({value.name})" in why or (array.ndim == 0 and array.dtype.kind == "f"):
            changed.graph.initializer.append(numpy_helper.from_array(array, value.name))
        else:
            left.append(array)
    kept = [v for v in changed.graph.input if v.name not in {t.name for t in changed.graph.initializer}]
    del changed.graph.input[:]
    changed.graph.input.extend(kept)
    return changed, left


def _ran(model: Any, inputs: Sequence[Any], folder: Path) -> list[np.ndarray]:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    compiled = engine.obtain(str(path), fresh=True)
    with engine.open_plan(compiled.plan, threads=1, poison=True) as program:
        names = [i.name for i in model.graph.input]
        outputs = program.call(dict(zip(names, inputs, strict=True)))
    return [outputs[o.name] for o in model.graph.output]


def _differs(case: Any, got: Sequence[np.ndarray], wanted: Sequence[Any]) -> str:
    """How the outputs differ; "" when they don't. Half precision comes as float32."""
    if len(got) != len(wanted):
        return f"{len(got)} outputs, {len(wanted)} wanted"
    for mine, theirs in zip(got, map(np.asarray, wanted), strict=True):
        if mine.shape != theirs.shape:
            return f"shape {mine.shape}, wanted {theirs.shape}"
        rtol = max(case.rtol, ROUNDING.get(theirs.dtype.name, 0))
        if theirs.dtype.name in ROUNDING:
            theirs = theirs.astype(np.float32)
        if mine.dtype != theirs.dtype:
            return f"dtype {mine.dtype}, wanted {theirs.dtype}"
        real = mine.dtype.kind == "f"
        if not np.allclose(mine, theirs, rtol=real and rtol, atol=real and case.atol, equal_nan=True):
            wide = np.abs(mine.astype(np.float64) - theirs.astype(np.float64))
            return f"differs by {np.nanmax(wide):.2e}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pattern", nargs="?", default="*", help="names of tests, as 'test_conv*'")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for each test")
    chosen = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(chosen.pattern):
            which, why = verdict(case, Path(folder))
            counts[which] += 1
            if chosen.verbose or which == "wrong":
                print(f"{which:8}{case.name}{': ' * bool(why)}{why}", flush=True)
    print(f"onnx {onnx.__version__}: " + ", ".join(f"{counts[v]} {v}" for v in VERDICTS))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    os.environ.setdefault("FLASHRT_LIVE", "0")
    sys.exit(main())
