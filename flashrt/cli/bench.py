"""`flashrt bench`: how fast a language model reads prompts and generates."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
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
    Tokens,
    Without,
    obtain,
    open_model,
)
from flashrt.cli.terminal import progress, say, show, show_table, size
from flashrt.errors import RequestError

if TYPE_CHECKING:
    from flashrt.engine import Compiled
    from flashrt.machine import Device
    from flashrt.profiler.bench import Speed, Test
    from flashrt.program import Plan

PROMPT, GENERATE = "512", "128"  # llama-bench's own
BUSY = 0.15  # load of the processors from which on it is worth a word
LESS = ("params", "size", "backend", "model")  # columns to go first on a narrow terminal


def bench(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="N,…", help=f"prompts to read, in tokens (default: {PROMPT})"),
    ] = None,
    generate: Annotated[
        str | None,
        typer.Option(
            "--generate",
            "-n",
            metavar="N,…",
            help=f"tokens to generate (default: {GENERATE}). With only one of --prompt and --generate "
            "the other isn't measured",
        ),
    ] = None,
    depth: Annotated[
        str, typer.Option("--depth", "-d", metavar="N,…", help="tokens in the context before each test")
    ] = "0",
    batch: Annotated[str, typer.Option(metavar="N,…", help="sequences at once; rates are their sum")] = "1",
    threads: Annotated[
        str | None,
        typer.Option("--threads", "-t", metavar="N,…", help="threads of the CPU team (default: one a core)"),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", "-r", min=1, help="runs of each test")] = 5,
    warm_up: Annotated[int, typer.Option(min=0, help="runs of each test before those")] = 1,
    context: Context = None,
    tokens: Tokens = None,
    without: Without = None,
    numerics: Numerics = None,
    device: Devices = None,
    budget: Budgets = None,
    place: Placed = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Measures tokens per second: median, lowest and highest of several runs.

    Tests are named as in llama-bench: pp512 reads a prompt of 512 tokens, tg128
    generates 128, `@ d512` has 512 tokens in the context before.

    The column `limit` is the share of the memory's read rate, as the same threads
    reach it just before and after, that reading the weights for each step takes.
    """
    from flashrt import engine
    from flashrt.profiler import bench as measuring

    tests = _tests(prompt, generate, counts("--depth", depth, least=0), counts("--batch", batch))
    asked = _teams(threads) if threads is not None else []
    host = engine.machine_picture().devices[0]
    compiled = obtain(model, Chosen(context, tokens, without, numerics, device, budget, place), fresh=fresh)
    plan = compiled.plan
    measuring.check(plan, tests)
    teams = asked or [_team(plan)]
    before = _limits(plan, tests, teams)
    speeds = [
        speed
        for team in teams
        for speed in _measured(model, compiled, tests, team if asked else None, repeats, warm_up)
    ]
    # twice: what disturbs one of them is no property of the memory
    limits = {team: max(rate, before[team]) for team, rate in _limits(plan, tests, teams).items()}
    if as_json:
        sys.stdout.write(json.dumps(_facts(plan, host, speeds, limits), indent=1) + "\n")
    else:
        _print(plan, host, speeds, limits)


# ---- what is asked -----------------------------------------------------------------
def counts(option: str, text: str, least: int = 1) -> list[int]:
    """The numbers of a list such as "1,8", each once. Raises RequestError."""
    parts = [part.strip() for part in text.split(",")]
    try:
        numbers = [int(part) for part in parts if part.isdecimal()]
    except ValueError:  # more digits than Python reads
        numbers = []
    if len(numbers) < len(parts) or min(numbers) < least:
        raise RequestError(
            f"{option} {text[:40]!r}: expected whole numbers, {least} or more, with commas between",
            hint=f"as in {option} 1,8",
        )
    return list(dict.fromkeys(numbers))


def _tests(prompt: str | None, generate: str | None, depths: list[int], batches: list[int]) -> list[Test]:
    """Every combination, in the order of a table; the two kinds have their defaults if neither is named."""
    from flashrt.profiler.bench import Test

    if prompt is None and generate is None:
        prompt, generate = PROMPT, GENERATE
    read = counts("--prompt", prompt) if prompt is not None else []
    drawn = counts("--generate", generate) if generate is not None else []
    tests = []
    for depth in depths:
        for batch in batches:
            tests += [Test("pp", n, depth, batch) for n in read] + [
                Test("tg", n, depth, batch) for n in drawn
            ]
    kept = [t for t in tests if t.kind == "tg" or not t.depth or t.sequences == 1]
    if not kept:
        raise RequestError(
            "nothing to measure: prompts of several sequences aren't read with a depth",
            hint="--depth goes with --generate, or with --batch 1",
        )
    if len(kept) < len(tests):
        say("left out: prompts of several sequences with a depth (the scheduler reads one after another)")
    return kept


def _teams(threads: str) -> list[int]:
    """Sizes of teams. Raises RequestError for more than there are processors: no more would run."""
    teams = counts("--threads", threads)
    if max(teams) > (most := len(os.sched_getaffinity(0))):
        raise RequestError(f"--threads {max(teams)}: this process may use {most} processors")
    return teams


def _team(plan: Plan) -> int:
    """Threads where none are asked for: FLASHRT_THREADS, or the cores the plan was made for."""
    from flashrt import knobs

    cores = [plan.machine.device(id).cores for id in _devices(plan)]
    return min(knobs.THREADS.get() or sum(cores), len(os.sched_getaffinity(0)))


def _turn(turn: int, repeats: int) -> str:
    return f"run {turn + 1} of {repeats}" if turn >= 0 else "warm-up"


# ---- what came out -----------------------------------------------------------------
def _devices(plan: Plan) -> list[str]:
    """Devices that the plan uses."""
    return sorted({i.device for v in plan.variants for i in v.stream.instrs})


def _kinds(plan: Plan) -> list[str]:
    return sorted({plan.machine.device(id).kind for id in _devices(plan)})


def _measured(
    model: str, compiled: Compiled, tests: list[Test], team: int | None, repeats: int, warm_up: int
) -> list[Speed]:
    from flashrt.profiler import bench as measuring

    sequences = measuring.whole_contexts(compiled.plan, tests)
    with open_model(model, compiled, team, sequences) as llm, progress("measuring") as told:
        return measuring.measure(
            llm,
            tests,
            threads=team or _team(compiled.plan),
            repeats=repeats,
            warm_up=warm_up,
            on_run=lambda test, turn: told(f"{test.name}, {_turn(turn, repeats)}"),
        )


def _limits(plan: Plan, tests: list[Test], teams: list[int]) -> dict[int, float]:
    """Bytes per second that each team reads from a set as large as the weights of a token.

    Empty where nothing is generated, or a device reads another memory than the host's.
    """
    from flashrt.profiler import bench as measuring

    if not any(t.kind == "tg" for t in tests) or not set(_kinds(plan)) <= {"cpu", "reference"}:
        return {}
    with progress("measuring how fast memory is read"):
        nbytes = measuring.token_bytes(plan)
        return {team: measuring.read_rate(nbytes, team, seconds=0.5) for team in teams}


def _facts(plan: Plan, host: Device, speeds: list[Speed], limits: dict[int, float]) -> dict[str, Any]:
    from flashrt.profiler import bench as measuring

    weights = measuring.token_bytes(plan)
    return {
        "model": plan.name,
        "key": plan.key,
        "numerics": plan.options["numerics"],
        "backend": "+".join(_kinds(plan)),
        "weight_bytes": _weight_bytes(plan),
        "parameters": measuring.parameters(plan),
        "token_bytes": weights,
        "machine": {
            "name": host.name,
            "cores": host.cores,
            "memory": host.memory,
            "features": host.features,
            "load": host.load,
        },
        "versions": _versions(),
        "read_bytes_per_second": {str(n): rate for n, rate in limits.items()},
        "results": [
            {"name": s.test.name, **asdict(s.test), "threads": s.threads, "unit": "tokens/s"}
            | {"median": s.median, "min": min(s.rates), "max": max(s.rates), "rates": s.rates}
            | {"limit": _share(s, weights, limits)}
            for s in speeds
        ],
    }


def _share(speed: Speed, weights: int, limits: dict[int, float]) -> float | None:
    limit = limits.get(speed.threads)
    return None if limit is None else speed.share(weights, limit)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    from flashrt import __version__

    others = {name: version(name) for name in ("numpy", "numba")}
    return {"flashrt": __version__, "Python": platform.python_version(), **others}


def _weight_bytes(plan: Plan) -> int:
    return sum(b.bytes for b in plan.variants[0].stream.blocks)


def _print(plan: Plan, host: Device, speeds: list[Speed], limits: dict[int, float]) -> None:
    from flashrt.profiler import bench as measuring

    weights = measuring.token_bytes(plan)
    show(f"{host.name}, {host.cores} cores, {size(host.memory)}")
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    facts = {
        "model": plan.name,
        "size": size(_weight_bytes(plan)),
        "params": f"{measuring.parameters(plan) / 1e6:,.2f} M",
        "backend": f"{'+'.join(_kinds(plan))} {plan.options['numerics']}",
    }
    rows = [facts | _cells(s, _share(s, weights, limits)) for s in speeds]
    unused = {"batch"} if all(s.test.sequences == 1 for s in speeds) else set()
    columns = [name for name in rows[0] if name not in unused]
    show_table(
        f"{plan.name}: {versions}", columns, [[row[name] for name in columns] for row in rows], less=LESS
    )
    for threads, rate in limits.items():
        show(
            f"a token reads {size(weights)} of weights; {threads} thread{'s' * (threads > 1)} read as much "
            f"{rate / weights:,.0f} times a second, {rate / 1e9:.1f} GB/s"
        )
    if (host.load or 0) > BUSY:
        say(f"the processors were {host.load:.0%} busy in the minute before: speeds may be higher at rest")


def _cells(speed: Speed, share: float | None) -> dict[str, str]:
    return {
        "threads": str(speed.threads),
        "batch": str(speed.test.sequences),
        "test": speed.test.name,
        "t/s": f"{_rate(speed.median)} ({_rate(min(speed.rates))}–{_rate(max(speed.rates))})",
        "limit": "" if share is None else f"{share:.0%}",
    }


def _rate(value: float) -> str:
    """Three digits or more; no comma between thousands, for the programs that read the table."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
