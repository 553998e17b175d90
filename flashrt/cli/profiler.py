"""`flash-profiler`: where every microsecond of a run went."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from flashrt.cli.options import (
    Budgets,
    Chosen,
    Context,
    Devices,
    Fresh,
    Model,
    Numerics,
    Placed,
    Threads,
    Tokens,
    Without,
    obtain,
    open_model,
)
from flashrt.cli.terminal import Command, micros, progress, show, show_table, size
from flashrt.errors import RequestError

if TYPE_CHECKING:
    from flashrt.engine import LLM
    from flashrt.profiler.report import Account, Phase, Row
    from flashrt.runtime.trace import StepTrace

LESS = ("waiting", "P50", "bytes", "GB/s", "P99", "count", "mean")  # columns to go first on a narrow terminal

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class By(StrEnum):
    """What one line of the table stands for."""

    instruction = "instruction"
    kernel = "kernel"
    layer = "layer"


class Form(StrEnum):
    """How the result is printed."""

    table = "table"
    csv = "csv"
    json = "json"
    perfetto = "perfetto"
    jsonl = "jsonl"


@app.command(cls=Command)
def profile(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="what to answer while measuring")],
    by: Annotated[By, typer.Option(help="what one line stands for")] = By.kernel,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="how the result is printed; perfetto: a trace for https://ui.perfetto.dev; "
            "jsonl: the raw stamps, a step a line",
        ),
    ] = Form.table,
    prefill: Annotated[bool, typer.Option("--prefill", help="only steps that read the prompt")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="only steps that generate")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="how many tokens to generate")] = 64,
    top: Annotated[int, typer.Option(min=1, help="lines of the table")] = 30,
    context: Context = None,
    tokens: Tokens = None,
    threads: Threads = None,
    without: Without = None,
    numerics: Numerics = None,
    device: Devices = None,
    budget: Budgets = None,
    place: Placed = None,
    fresh: Fresh = False,
) -> None:
    """Runs a prompt and reports the time of each instruction, kernel or layer.

    The figures come from stamps that every instruction takes while it runs. Rates are
    compared with the read bandwidth and matrix rate that were measured last (anew with
    `flashrt devices --measure`). A table, CSV or JSON has times in microseconds.
    """
    from flashrt import engine
    from flashrt.profiler import report
    from flashrt.runtime.trace import Trace

    if prefill and decode:
        raise RequestError("--prefill and --decode exclude each other", hint="leave both out for all steps")
    phase: Phase = "prefill" if prefill else "decode" if decode else "all"
    compiled = obtain(model, Chosen(context, tokens, without, numerics, device, budget, place), fresh=fresh)
    with open_model(model, compiled, threads) as llm, progress("running"):
        steps = report.of_phase(_recorded(llm, prompt, max_tokens, raw=raw), phase)
        streams = {v.name: v.stream for v in llm.plan.variants}
        kept = llm.program.experts.metrics() if llm.program.experts else None
    machine = engine.with_measured_rates(llm.plan.machine)
    if not steps:
        raise RequestError(f"no {phase} step ran", hint="a longer prompt prefills, more --max-tokens decode")
    rows = report.rows(steps, streams, machine, by.value)
    account = report.account(steps, streams)
    match form:
        case Form.table:
            _print(f"{llm.plan.name}, {phase} steps, by {by.value}", by, rows, account, top)
            if kept is not None and kept.hit_share is not None:
                show(f"{kept.slots} of {kept.experts} experts kept: {kept.hit_share:.0%} of those asked for")
        case Form.csv:
            writer = csv.DictWriter(sys.stdout, [f.name for f in fields(report.Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(r) for r in rows)
        case Form.json:
            facts = {"phase": phase, "account": asdict(account), "rows": [asdict(r) for r in rows]}
            sys.stdout.write(json.dumps(facts, indent=1) + "\n")
        case Form.jsonl:
            sys.stdout.writelines(line + "\n" for line in Trace(list(steps)).lines())
        case Form.perfetto:
            json.dump(report.perfetto(steps, streams), sys.stdout)
            sys.stdout.write("\n")


def _recorded(llm: LLM, prompt: str, max_tokens: int, *, raw: bool) -> list[StepTrace]:
    """The steps of one answer. One before isn't recorded: page tables, caches and threads are warm then."""
    from flashrt.llm.request import Sampling
    from flashrt.runtime.trace import Trace

    llm.generate(prompt, raw=raw, sampling=Sampling(max_tokens=min(max_tokens, 4), ignore_eos=True))
    llm.program.trace = Trace()
    llm.generate(prompt, raw=raw, sampling=Sampling(max_tokens=max_tokens, ignore_eos=True))
    return llm.program.trace.steps


# ---- for a person ------------------------------------------------------------------
def _print(title: str, by: By, rows: list[Row], account: Account, top: int) -> None:
    several = len({r.device for r in rows}) > 1
    cells = [
        {by.value: f"{r.name} @{r.device}" if several else r.name} | _cells(r, account) for r in rows[:top]
    ]
    average = micros(account.steps / account.count)
    title = f"{title}: {account.count} steps of {average} on average"
    show_table(title, list(cells[0]), [list(c.values()) for c in cells], less=LESS)
    if len(rows) > top:
        rest = sum(r.total for r in rows[top:])
        show(f"and {len(rows) - top} more lines, {micros(rest)} in total (--top N shows more)")
    for lane in account.lanes:
        show(
            f"{lane.name}: busy {micros(lane.busy)} + waiting {micros(lane.waiting)} + "
            f"rest {micros(lane.rest)} = {micros(account.steps)} inside steps"
        )
    show(
        f"wall {micros(account.wall)} = {micros(account.steps)} inside steps + "
        f"{micros(account.between)} between them (scheduling, text)"
    )


def _cells(row: Row, account: Account) -> dict[str, str]:
    return {
        "count": f"{row.count:,}",
        "total": micros(row.total),
        "share": f"{row.total / account.steps:.1%}",
        "mean": micros(row.mean),
        "P50": micros(row.p50),
        "P99": micros(row.p99),
        "waiting": micros(row.waiting),
        "bytes": size(row.bytes),
        "GB/s": f"{row.gb_per_s:.1f}",
        "limit": f"{row.share:.0%}",
        "estimate": micros(row.estimate),
    }


def main() -> None:
    """The entry point of `flash-profiler`."""
    app()
