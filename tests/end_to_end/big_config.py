"""Compiles the configuration in a folder, without weights, to its three texts; prints figures as JSON.

    python big_config.py FOLDER LAYOUT

It is a program of its own so that its peak memory is the compiler's.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

from flashrt import engine
from flashrt.compiler import CompileOptions, compile_model
from flashrt.frontend import hf
from flashrt.frontend.imported import Imported
from flashrt.ir import text
from flashrt.ir.logical import Graph
from flashrt.machine import Machine
from flashrt.weights.index import WeightIndex

MEMORY = 128 << 30  # of the pretended machine, in bytes: the model fits whatever this one has


def with_layout(graph: Graph, layout: str) -> Graph:
    """Every matrix stored in that layout."""
    return replace(
        graph,
        weights=tuple(replace(w, layout=layout if len(w.type.shape) == 2 else "f32") for w in graph.weights),
    )


def machine() -> Machine:
    picture = engine.machine_picture()
    return replace(picture, devices=(replace(picture.devices[0], memory=MEMORY),))


def main(folder: Path, layout: str) -> None:
    start = time.perf_counter()
    config = hf.read_config(folder, json.loads((folder / "config.json").read_text()))
    graph, constants, _ = hf.trace_config(config, name=folder.name, context=hf.longest(config, None))
    traced = time.perf_counter()
    imported = Imported(with_layout(graph, layout), WeightIndex((), {}), constants)
    plan = compile_model(imported, machine(), CompileOptions())
    compiled = time.perf_counter()
    texts = [text.to_text(plan.logical)]
    texts += [text.to_text(level) for v in plan.variants for level in (v.physical, v.stream)]
    done = time.perf_counter()
    facts = {
        "trace_seconds": traced - start,
        "compile_seconds": compiled - traced,
        "print_seconds": done - compiled,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "raw_nodes": len(graph.nodes),
        "weight_bytes": sum(b.bytes for b in plan.variants[0].stream.blocks),
        "attention": sum(n.op == "attention" for n in plan.logical.nodes),
        "raw_left": sorted({n.op for n in plan.logical.nodes if "." in n.op}),
        "host": sorted({n.op for n in plan.variants[0].physical.nodes if n.op.startswith("host.")}),
        "lines": [t.count("\n") for t in texts],
    }
    json.dump(facts, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
