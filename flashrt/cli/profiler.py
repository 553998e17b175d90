"""`flash-profiler`: where every microsecond of a run went."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flashrt.cli.main import Context, Devices, Model, Threads, Tokens, Without, _obtain, _open, _options
from flashrt.cli.terminal import micros, out, progress, run, size

if TYPE_CHECKING:
    from flashrt.profiler.report import Account, Row
    from flashrt.runtime.trace import StepTrace

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


@app.command()
def profile(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="what to answer while measuring")],
    by: Annotated[By, typer.Option(help="what one line stands for")] = By.kernel,
    form: Annotated[Form, typer.Option("--format", help="how the result is printed")] = Form.table,
    prefill: Annotated[bool, typer.Option("--prefill", help="only steps that read the prompt")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="only steps that generate")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 64,
    top: Annotated[int, typer.Option(min=1, help="lines of the table")] = 30,
    context: Context = None,
    tokens: Tokens = 512,
    threads: Threads = None,
    without: Without = None,
    device: Devices = None,
) -> None:
    """Runs a prompt and reports the time of each instruction, kernel or layer.

    The figures come from stamps that every instruction takes while it runs. Rates are
    compared with the device's read bandwidth and f32 rate (measure them with
    `flashrt devices --measure`).
    """
    from flashrt.errors import RequestError
    from flashrt.llm.request import Sampling
    from flashrt.profiler import report
    from flashrt.runtime.trace import Trace

    if prefill and decode:
        raise typer.BadParameter("--prefill and --decode exclude each other; leave both out for all steps")
    compiled = _obtain(model, _options(context, tokens, without), device)
    with _open(model, compiled, threads) as llm, progress("running"):
        # once unmeasured: page tables, caches and threads are warm afterwards
        llm.generate(prompt, raw=raw, sampling=Sampling(max_tokens=min(max_tokens, 4), ignore_eos=True))
        llm.program.trace = Trace()
        llm.generate(prompt, raw=raw, sampling=Sampling(max_tokens=max_tokens, ignore_eos=True))
        steps = llm.program.trace.steps
        machine = llm.plan.machine
        streams = {v.name: v.stream for v in llm.plan.variants}
    phase: Any = "prefill" if prefill else "decode" if decode else "all"
    chosen = report.of_phase(steps, phase)
    if not chosen:
        raise RequestError(f"no {phase} step ran", hint="a longer prompt prefills, more --max-tokens decode")
    table = report.rows(chosen, streams, machine, by.value)
    account = report.account(chosen, streams)
    match form:
        case Form.table:
            _print_table(table, account, by, top, phase)
        case Form.csv:
            _write_csv(table)
        case Form.json:
            facts = {"phase": phase, "account": asdict(account), "rows": [asdict(r) for r in table]}
            sys.stdout.write(json.dumps(facts, indent=1) + "\n")
        case Form.perfetto:
            _write_perfetto(chosen, streams)


def _write_perfetto(steps: list[StepTrace], streams: Any) -> None:
    from flashrt.profiler import report

    json.dump(report.perfetto(steps, streams), sys.stdout)
    sys.stdout.write("\n")


def _write_csv(table: list[Row]) -> None:
    if table:
        writer = csv.DictWriter(sys.stdout, fieldnames=list(asdict(table[0])))
        writer.writeheader()
        writer.writerows(asdict(r) for r in table)


def _print_table(rows: list[Row], account: Account, by: By, top: int, phase: str) -> None:
    title = f"{account.count} steps ({phase}), by {by.value}; times over all of them"
    table = Table(title=title, title_justify="left")
    for name in (by.value, "count", "total", "%", "mean", "P50", "P99", "waiting", "moved", "GB/s",
                 "of limit", "estimate"):  # fmt: skip
        table.add_column(name, justify="left" if name == by.value else "right")
    for r in rows[:top]:
        table.add_row(
            r.name, str(r.count), micros(r.total), f"{r.total / account.steps:.1%}", micros(r.mean),
            micros(r.p50), micros(r.p99), micros(r.waiting), size(r.bytes), f"{r.gb_per_s:.1f}",
            f"{r.share:.0%}", micros(r.estimate),
        )  # fmt: skip
    out.print(table)
    if len(rows) > top:
        rest = sum(r.total for r in rows[top:])
        out.print(f"and {len(rows) - top} more lines, {micros(rest)} in total (--top N shows more)")
    for lane in account.lanes:
        out.print(
            f"{lane.name}: busy {micros(lane.busy)} + waiting {micros(lane.waiting)} + "
            f"rest {micros(lane.rest)} = {micros(account.steps)} inside steps",
            soft_wrap=True,
        )
    out.print(
        f"wall {micros(account.wall)} = {micros(account.steps)} inside steps + "
        f"{micros(account.between)} between them (scheduling, text)",
        soft_wrap=True,
    )


def main() -> None:
    """The entry point of `flash-profiler`."""
    run(app)
