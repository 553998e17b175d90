"""`flashrt`: compile, run, explain, devices."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flashrt import __version__
from flashrt.cli.terminal import err, micros, out, peak_memory, progress, run, size

if TYPE_CHECKING:
    from flashrt.compiler import CompileOptions, Stage
    from flashrt.engine import LLM, Compiled
    from flashrt.llm.request import Sampling
    from flashrt.program import Plan

app = typer.Typer(
    help="Compiles a model into an execution plan for this machine and runs it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Level(StrEnum):
    """Which graph to dump."""

    logical = "logical"
    physical = "physical"
    micro = "micro"


class Form(StrEnum):
    """How to dump it."""

    text = "text"
    dot = "dot"
    html = "html"


Model = Annotated[
    str,
    typer.Argument(
        help="a .gguf file, Hugging Face folder or repo id, .pt2, .logical, plan folder, or alias (smollm2)"
    ),
]
Context = Annotated[int | None, typer.Option(min=1, help="longest sequence, in tokens")]
Tokens = Annotated[int, typer.Option(min=1, help="most tokens of one step; longer prompts run in chunks")]
Without = Annotated[
    list[str] | None, typer.Option("--without", help="leave a performance pass out (repeatable)")
]
Devices = Annotated[
    list[str] | None, typer.Option("--device", help="cpu:0, reference:0, null:0 (repeatable)")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="compile even if the cache has the plan")]
Threads = Annotated[int | None, typer.Option(min=1, help="threads of the CPU team")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def _options(context: int | None, tokens: int, without: list[str] | None) -> CompileOptions:
    from flashrt.compiler import CompileOptions
    from flashrt.passes.pipeline import check_names

    names = tuple(sorted(set(without or ())))
    check_names(names)
    return CompileOptions(context=context, tokens=tokens, without=names)


def _obtain(
    model: str, options: CompileOptions, devices: list[str] | None, *, fresh: bool = False, stages: Any = None
) -> Compiled:
    from flashrt import engine

    with progress(f"compiling {model}") as say:

        def on_stage(stage: Stage) -> None:
            say(f"{stage.variant} {stage.name}")
            if stages is not None:
                stages.append(stage)

        return engine.obtain(model, options, devices=devices or ("cpu:0",), on_stage=on_stage, fresh=fresh)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


@app.command("compile")
def compile_(
    model: Model,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="plan folder to write")] = None,
    pack: Annotated[bool, typer.Option("--pack", help="copy the weights into the plan")] = False,
    context: Context = None,
    tokens: Tokens = 512,
    without: Without = None,
    device: Devices = None,
    fresh: Fresh = False,
    debug_graph: Annotated[Level | None, typer.Option(help="print this level instead of the summary")] = None,
    form: Annotated[Form, typer.Option("--format", help="of the dump")] = Form.text,
    variant: Annotated[str, typer.Option(help="which variant to dump")] = "small",
    node: Annotated[str, typer.Option(help="dump only nodes that match, e.g. 'layers.3.*'")] = "*",
    kernel: Annotated[str, typer.Option(help="dump only kernels that match, e.g. 'linear*'")] = "*",
    as_json: Json = False,
) -> None:
    """Compiles a model into a plan folder: three graphs as text, machine, weights index, tokenizer."""
    from flashrt import engine, program
    from flashrt.frontend import models

    if pack and output is None:
        raise typer.BadParameter("--pack needs -o FOLDER")
    stages: list[Stage] = []
    source = models.find(model)
    if source.kind == "plan" and output is not None:
        compiled = engine.Compiled(engine.seal(Path(source.place)), cached=True)
    else:
        compiled = _obtain(model, _options(context, tokens, without), device, fresh=fresh, stages=stages)
    plan = compiled.plan
    if output is not None:
        plan = program.save(plan, output, pack=pack)
    if debug_graph is not None:
        _dump(plan, debug_graph, form, variant, node, kernel)
        return
    facts = _summary(plan, output, compiled.cached, stages)
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=1) + "\n")
    else:
        _print_summary(facts)


def _dump(plan: Plan, level: Level, form: Form, variant: str, node: str, kernel: str) -> None:
    from flashrt.errors import RequestError
    from flashrt.ir import show

    chosen = next((v for v in plan.variants if v.name == variant), plan.variants[0])
    if chosen.name != variant and variant != "small":
        raise RequestError(
            f"no variant {variant!r}", hint=f"variants: {', '.join(v.name for v in plan.variants)}"
        )
    graph = {"logical": plan.logical, "physical": chosen.physical, "micro": chosen.stream}[level.value]
    match form:
        case Form.text:
            for line in show.filtered(graph, node=node, kernel=kernel):
                sys.stdout.write(line + "\n")
        case Form.dot:
            sys.stdout.write(show.to_dot(graph))
        case Form.html:
            sys.stdout.write(show.to_html(graph))


def _summary(plan: Plan, output: Path | None, cached: bool, stages: list[Stage]) -> dict[str, Any]:
    from flashrt.ir.types import evaluate

    def variant(v: Any) -> dict[str, Any]:
        env = {s.name: s.hint for s in v.physical.symbols}
        return {
            "name": v.name,
            "tokens": [v.lo, v.hi],
            "nodes": len(v.physical.nodes),
            "instructions": len(v.stream.instrs),
            "estimate_us": float(sum(evaluate(i.est, env) for i in v.stream.instrs)),
            "activation_bytes": sum(b for _, b in v.stream.arenas),
            "regions": len({i.region for i in v.stream.instrs if i.region is not None}),
        }

    seconds: dict[str, float] = {}
    for stage in stages:
        seconds[stage.name] = seconds.get(stage.name, 0.0) + stage.seconds
    return {
        "plan": str(output) if output else None,
        "name": plan.name,
        "cached": cached,
        "key": plan.key,
        "logical_nodes": len(plan.logical.nodes),
        "weight_bytes": sum(b.bytes for b in plan.variants[0].stream.blocks),
        "variants": [variant(v) for v in plan.variants],
        "pass_seconds": seconds,
    }


def _print_summary(facts: dict[str, Any]) -> None:
    table = Table(title=f"{facts['name']}: {facts['logical_nodes']} operations", title_justify="left")
    for name in ("variant", "tokens a step", "shards", "instructions", "regions", "activations", "estimate"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for v in facts["variants"]:
        lo, hi = v["tokens"]
        table.add_row(
            v["name"],
            f"{lo}…{hi}" if hi else "any",
            str(v["nodes"]),
            str(v["instructions"]),
            str(v["regions"]),
            size(v["activation_bytes"]),
            micros(v["estimate_us"]),
        )
    out.print(table)
    out.print(f"weights {size(facts['weight_bytes'])}", end="")
    out.print(
        ", from the cache" if facts["cached"] else f", passes {sum(facts['pass_seconds'].values()):.1f} s"
    )
    if facts["plan"]:
        out.print(f"plan written to {facts['plan']}", soft_wrap=True)


@app.command("run")
def run_(
    model: Model,
    source: Annotated[str | None, typer.Argument(help="'-' reads the prompt from stdin")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="what to answer")] = None,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="a conversation")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="continue the prompt as it stands: no template")] = False,
    system: Annotated[str, typer.Option(help="system message")] = "",
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.0,
    top_p: Annotated[float, typer.Option(help="smallest set of tokens with this much probability")] = 1.0,
    top_k: Annotated[int, typer.Option(help="only the k likeliest; 0 for all")] = 0,
    min_p: Annotated[float, typer.Option(help="only tokens with this share of the best one's chance")] = 0.0,
    penalty: Annotated[float, typer.Option("--repetition-penalty", help="1 for none")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="text that ends the answer (repeatable)")] = None,
    seed: Annotated[int | None, typer.Option(help="repeats a random choice")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on to --max-tokens")] = False,
    context: Context = None,
    tokens: Tokens = 512,
    threads: Threads = None,
    without: Without = None,
    device: Devices = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Runs a language model: streams the answer, ends with its speed and memory."""
    from flashrt.llm.request import Sampling

    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, penalty=penalty,
        max_tokens=max_tokens, stop=tuple(stop or ()), seed=seed, ignore_eos=ignore_eos,
    )  # fmt: skip
    given = [prompt is not None, interactive, source is not None]
    if sum(given) != 1 or (source is not None and source != "-"):
        raise typer.BadParameter("give one of: --prompt TEXT, --interactive, or - for stdin")
    if interactive and (raw or as_json):
        raise typer.BadParameter("--interactive goes with neither --raw nor --json")
    compiled = _obtain(model, _options(context, tokens, without), device, fresh=fresh)
    with _open(model, compiled, threads) as llm:
        if interactive:
            _converse(llm, system, sampling)
            return
        text = sys.stdin.read() if source == "-" else prompt
        assert text is not None
        _answer(llm, text if raw else _messages(system, text), sampling, raw=raw, as_json=as_json)


def _open(model: str, compiled: Compiled, threads: int | None) -> LLM:
    from flashrt import engine

    with progress("loading weights and kernels"):
        llm = engine.LLM(model, plan=compiled.plan, threads=threads)
        llm.program.open()
    return llm


def _messages(system: str, text: str) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def _answer(llm: LLM, prompt: Any, sampling: Sampling, *, raw: bool, as_json: bool) -> str:
    """Streams one answer; Ctrl-C ends it early and still shows the figures."""
    from flashrt.errors import RequestError

    request = llm.request(prompt, sampling, raw=raw)
    completion = None
    events = llm.generator.events(request)
    try:
        for event in events:
            completion = event.completion or completion
            if event.text and not as_json:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        completion = llm.generator.cancel(request.id)
    finally:
        events.close()  # type: ignore[attr-defined]
    if completion is None:
        raise RequestError("the answer was interrupted before it began")
    if as_json:
        sys.stdout.write(json.dumps(_facts(completion), ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        _figures(completion)
    if completion.finish_reason == "cancelled":
        raise KeyboardInterrupt
    return str(completion.text)


def _facts(completion: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(completion), "peak_memory_bytes": peak_memory()}


def _figures(completion: Any) -> None:
    s = completion.stats
    first = f"{s.first_token * 1e3:.0f} ms" if s.first_token is not None else "-"
    prompt = f"{s.prompt_rate:.0f} tokens/s" if s.prompt_rate else "-"
    rate = f"{s.rate:.1f} tokens/s" if s.rate else "-"
    err.print(
        f"[dim]first token {first} · prompt {s.prompt_tokens} tokens, {prompt} · "
        f"generated {s.generated_tokens} tokens, {rate} · ended by {completion.finish_reason} · "
        f"peak memory {size(peak_memory())}[/]",
        soft_wrap=True,
    )


def _converse(llm: LLM, system: str, sampling: Sampling) -> None:
    """Reads a line, answers, remembers; ends at an empty line, Ctrl-D or Ctrl-C."""
    messages = [{"role": "system", "content": system}] if system else []
    err.print("[dim]an empty line or Ctrl-D ends the conversation[/]")
    while True:
        try:
            err.print("[bold]>[/] ", end="")
            line = input()
        except EOFError:
            break
        if not line.strip():
            break
        messages.append({"role": "user", "content": line})
        text = _answer(llm, messages, sampling, raw=False, as_json=False)
        messages.append({"role": "assistant", "content": text})


@app.command()
def explain(
    model: Model,
    context: Context = None,
    tokens: Tokens = 512,
    without: Without = None,
    device: Devices = None,
    as_json: Json = False,
) -> None:
    """Shows the plan with the cost and the cause of every placement; loads no weights."""
    from flashrt.cli.explain import explanation, print_explanation

    compiled = _obtain(model, _options(context, tokens, without), device)
    facts = explanation(compiled.plan)
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    else:
        print_explanation(facts)


@app.command()
def devices(
    measure: Annotated[bool, typer.Option("--measure", help="measure rates now and remember them")] = False,
    as_json: Json = False,
) -> None:
    """Shows the devices of this machine, and how each figure is known."""
    from flashrt import engine
    from flashrt.machine import to_json

    if measure:
        with progress("measuring"):
            machine = engine.measure()
    else:
        machine = engine.machine_picture()
    if as_json:
        sys.stdout.write(to_json(machine) + "\n")
        return
    table = Table()
    for name in ("device", "name", "cores", "memory", "free", "reads", "f32", "load", "features"):
        table.add_column(name, overflow="fold")
    for d in machine.devices:
        rate = d.rates.get("f32")
        table.add_row(
            d.id,
            d.name,
            str(d.cores),
            size(d.memory),
            size(d.free) if d.free is not None else "unknown",
            f"{d.read.value / 1e9:.1f} GB/s ({d.read.how})",
            f"{rate.value / 1e9:.0f} GFLOP/s ({rate.how})" if rate else "unknown",
            f"{d.load:.0%}" if d.load is not None else "unknown",
            " ".join(d.features),
        )
    out.print(table)


def main() -> None:
    """The entry point of `flashrt`."""
    run(app)
