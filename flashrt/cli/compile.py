"""`flashrt compile`: a model becomes a plan folder, or one of its graphs is shown."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashrt.cli.options import (
    Budgets,
    Chosen,
    Context,
    Devices,
    Fresh,
    Json,
    Model,
    Numerics,
    Placed,
    Quantize,
    QuantizeExclude,
    Tokens,
    Without,
    obtain,
)
from flashrt.cli.terminal import micros, progress, say, show, show_table, size
from flashrt.errors import RequestError

if TYPE_CHECKING:
    from flashrt.compiler import Stage
    from flashrt.program import Plan, Variant


class Level(StrEnum):
    """Which graph to dump."""

    logical = "logical"
    physical = "physical"
    micro = "micro"


class Form(StrEnum):
    """How to dump it."""

    text = "text"
    summary = "summary"
    dot = "dot"
    html = "html"


def compile_(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="plan folder to write (default: keep it in the cache)"),
    ] = None,
    pack: Annotated[bool, typer.Option("--pack", help="copy the weights into the plan")] = False,
    context: Context = None,
    tokens: Tokens = None,
    without: Without = None,
    numerics: Numerics = None,
    device: Devices = None,
    budget: Budgets = None,
    place: Placed = None,
    quantize: Quantize = None,
    quantize_exclude: QuantizeExclude = None,
    quality: Annotated[
        bool,
        typer.Option(
            "--quality", help="measure what rounded weights cost: runs a short text with and without rounding"
        ),
    ] = False,
    fresh: Fresh = False,
    debug_graph: Annotated[Level | None, typer.Option(help="print this level instead of the summary")] = None,
    form: Annotated[Form | None, typer.Option("--format", help="of the dump (default: text)")] = None,
    variant: Annotated[str | None, typer.Option(help="which variant to dump (default: the first)")] = None,
    node: Annotated[str | None, typer.Option(help="dump only nodes that match, as 'layers.3.*'")] = None,
    kernel: Annotated[
        str | None, typer.Option(help="dump only operations or kernels that match, as 'linear*'")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compiles a model into a plan: three graphs as text, machine, weights index, tokenizer.

    Given a plan folder whose texts were edited and -o, checks them and writes a sealed plan.
    """
    from flashrt import engine, program
    from flashrt.frontend import models

    dumped = {"--format": form, "--variant": variant, "--node": node, "--kernel": kernel}
    _check_choices(output, pack, debug_graph, as_json, [name for name, v in dumped.items() if v is not None])
    if output is not None:
        program.check_output(output)
    begun = time.perf_counter()
    stages: list[Stage] = []
    source = models.find(model)
    chosen = Chosen(context, tokens, without, numerics, device, budget, place, quantize, quantize_exclude)
    if source.kind == "plan" and output is not None:
        chosen.refuse_for_plan(model)
        compiled = engine.Compiled(engine.seal(Path(source.place)), cached=False)
    else:
        compiled = obtain(model, chosen, fresh=fresh, on_stage=stages.append)
    plan = compiled.plan
    if output is not None:
        with progress(f"writing {output}"):
            plan = program.save(plan, output, pack=pack)
    if debug_graph is not None:
        _dump(_graph(plan, debug_graph, variant), form or Form.text, node or "", kernel or "")
        return
    facts = _summary(plan, compiled.cached, stages) | {"seconds": time.perf_counter() - begun}
    if quality:
        facts["quality"] = _quality(model, plan, chosen)
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=1) + "\n")
    else:
        _print_summary(facts)
        if quality:
            say(_told_quality(facts["quality"]))
        say(_told(facts, output, source.kind == "plan"))


def _check_choices(
    output: Path | None, pack: bool, level: Level | None, as_json: bool, dumped: list[str]
) -> None:
    if pack and output is None:
        raise RequestError("--pack copies the weights into a plan folder: which one?", hint="add -o FOLDER")
    if dumped and level is None:
        raise RequestError(
            f"{', '.join(dumped)}: only for a dump", hint="add --debug-graph logical, physical or micro"
        )
    if level is not None and as_json:
        raise RequestError(
            "--json goes without --debug-graph", hint="a dump is text: --format text, summary, dot or html"
        )


# ---- dumps -------------------------------------------------------------------------
def _graph(plan: Plan, level: Level, variant: str | None) -> Any:
    names = [v.name for v in plan.variants]
    if variant not in (None, *names):
        raise RequestError(f"{plan.name} has no variant {variant!r}", hint=f"variants: {', '.join(names)}")
    chosen = plan.variants[names.index(variant) if variant else 0]
    return {"logical": plan.logical, "physical": chosen.physical, "micro": chosen.stream}[level.value]


def _dump(graph: Any, form: Form, node: str, kernel: str) -> None:
    """Writes the dump to stdout; a text without filters can be edited and read back."""
    from flashrt.ir import show as dumps
    from flashrt.ir.text import to_text

    if (node or kernel) and form in (Form.dot, Form.summary):
        raise RequestError(
            f"--format {form.value} shows the whole graph", hint="--node and --kernel go with text and html"
        )
    if (node or kernel) and next(dumps.matching(graph, node, kernel), None) is None:
        say(f"nothing matches {' '.join(filter(None, (node, kernel)))}")
    match form:
        case Form.text if node or kernel:
            sys.stdout.writelines(line + "\n" for line in dumps.filtered(graph, node, kernel))
        case Form.text:
            sys.stdout.write(to_text(graph))
        case Form.summary:
            sys.stdout.write(dumps.summary(graph))
        case Form.dot:
            sys.stdout.write(dumps.to_dot(graph))
        case Form.html:
            sys.stdout.write(dumps.to_html(graph, node=node, kernel=kernel))


# ---- summary -----------------------------------------------------------------------
def estimate(variant: Variant) -> float:
    """Microseconds that the plan predicts for a step of the typical size."""
    from flashrt.ir.clock import simulate
    from flashrt.ir.show import typical
    from flashrt.ir.types import evaluate

    env = typical(variant.stream)
    if len({i.device for i in variant.stream.instrs}) > 1:
        return simulate(variant.stream, env).step_time  # they work at the same time
    return float(sum(evaluate(i.est, env) for i in variant.stream.instrs))


def _summary(plan: Plan, cached: bool, stages: list[Stage]) -> dict[str, Any]:
    from flashrt.weights.index import rounded

    seconds: dict[str, float] = {}
    for stage in stages:
        seconds[stage.name] = seconds.get(stage.name, 0.0) + stage.seconds
    return {
        "plan": str(plan.folder),
        "name": plan.name,
        "cached": cached,
        "key": plan.key,
        "logical_nodes": len(plan.logical.nodes),
        "weight_bytes": sum(b.bytes for b in plan.variants[0].stream.blocks),
        "rounded": rounded(plan.logical.weights, plan.weights),
        "variants": [_variant(v) for v in plan.variants],
        "pass_seconds": seconds,
    }


def _variant(variant: Variant) -> dict[str, Any]:
    from flashrt.ir.show import typical

    stream = variant.stream
    return {
        "name": variant.name,
        "tokens": [variant.lo, variant.hi],
        "at": dict(typical(stream)),
        "nodes": len(variant.physical.nodes),
        "instructions": len(stream.instrs),
        "regions": len({i.region for i in stream.instrs if i.region is not None}),
        "activation_bytes": sum(nbytes for _, nbytes in stream.arenas),
        "estimate_us": estimate(variant),
    }


def _quality(model: str, plan: Plan, chosen: Chosen) -> dict[str, Any]:
    """Figures of `flashrt.profiler.quality`, against the same model compiled without loss."""
    from flashrt.profiler.quality import measure

    lossless = obtain(model, replace(chosen, quantize="lossless", quantize_exclude=None)).plan
    with progress("measuring quality"):
        return asdict(measure(plan, lossless))


def _told_quality(found: dict[str, Any]) -> str:
    return (
        f"perplexity {found['perplexity']:.2f}, without rounding {found['lossless_perplexity']:.2f}; "
        f"the same likeliest token after {found['agreement']:.1%} of {found['tokens']} tokens"
    )


def _print_summary(facts: dict[str, Any]) -> None:
    columns = ("variant", "tokens", "nodes", "instructions", "regions", "activations", "estimate")
    rows = [
        (
            v["name"],
            "{}…{}".format(*v["tokens"]) if v["tokens"][1] else "any",
            f"{v['nodes']:,}",
            f"{v['instructions']:,}",
            str(v["regions"]),
            size(v["activation_bytes"]),
            micros(v["estimate_us"]),
        )
        for v in facts["variants"]
    ]
    weights = f"{facts['logical_nodes']:,} operations, {size(facts['weight_bytes'])} of weights"
    show_table(f"{facts['name']}: {weights}", columns, rows, less=("regions", "nodes", "activations"))
    if facts["rounded"]:
        show(told_rounded(facts["rounded"]))


def told_rounded(found: Mapping[str, int]) -> str:
    """Which tensors a plan keeps with loss."""
    kinds = ", ".join(f"{count} from {kind}" for kind, count in found.items())
    return f"tensors kept with loss: {kinds} (--quantize lossless keeps them as they are)"


def _told(facts: dict[str, Any], output: Path | None, sealed: bool) -> str:
    """Where the plan is, and where it came from."""
    made = "from the cache" if facts["cached"] else f"compiled in {facts['seconds']:.1f} s"
    if output is not None:
        return f"plan written to {output} ({'sealed' if sealed else made})"
    if sealed:
        return f"{facts['plan']} is a plan already"
    again = " (--fresh compiles it again)" if facts["cached"] else ""
    return f"plan kept in the cache, {made}: {facts['plan']}{again}"
