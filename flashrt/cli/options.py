"""Options that several commands take, and the two steps they share: get the plan, open it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from flashrt.cli import terminal
from flashrt.cli.terminal import keep_for_results, progress
from flashrt.errors import RequestError

if TYPE_CHECKING:
    from flashrt.compiler import CompileOptions, Stage
    from flashrt.engine import LLM, Compiled

TOKENS = 512  # of one step at most, unless --tokens says otherwise


class Mode(StrEnum):
    """How linears are computed: the names of compiler.MODES."""

    exact = "exact"
    int8 = "int8"
    fast = "fast"


Model = Annotated[
    str,
    typer.Argument(
        help="a .gguf file, Hugging Face folder or repo id, .pt2, .onnx, .logical, module:function, plan "
        "folder, or alias (smollm2)"
    ),
]
Context = Annotated[
    int | None, typer.Option(min=1, help="longest sequence, in tokens (default: what the model was made for)")
]
Tokens = Annotated[
    int | None,
    typer.Option(min=1, help=f"most tokens of one step; longer prompts run in chunks (default: {TOKENS})"),
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without",
        metavar="PASS",
        help="leave a performance pass out: prefetch, overlap, elide, pack or region (repeatable); "
        "`--without region` runs every instruction by itself. Results stay the same",
    ),
]
Numerics = Annotated[
    Mode | None,
    typer.Option(
        help="exact: float32 everywhere; int8: activations rounded to INT8 blocks, the same tokens for any "
        f"batch; fast: int8 for few tokens, bf16 for many (default: {Mode.exact.value})"
    ),
]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        "--devices",
        metavar="ID[,ID…]",
        help="where to run (repeatable): cpu:0 is the whole processor, cpu:0-3 its cores 0 to 3, cpu:4-4 one "
        "core; cuda:0 is an NVIDIA GPU, npu:NAME a neural processor (docs/npu.md has the names); reference:0 "
        "is slow and defines the meaning; null:0 only pretends (default: cpu:0)",
    ),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        metavar="ID=SIZE[,…]",
        help="the most memory a plan may use on a device, such as cpu:0=6GiB (repeatable; default: nine "
        "tenths of what there is, divided between core groups)",
    ),
]
Placed = Annotated[
    list[str] | None,
    typer.Option(
        "--place",
        metavar="PATTERN=ID",
        help="put what the pattern names on a device (repeatable): 'layers.*.mlp=cpu:0'; patterns fit names "
        "of operations, modules and weights",
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="round matrices that take more bits: q4, q8 or bf16; or lossless: what would be rounded for a "
        "device stays as the file has it, in float32",
    ),
]
QuantizeExclude = Annotated[
    str | None,
    typer.Option(
        "--quantize-exclude",
        metavar="NAME[,NAME…]",
        help="what --quantize leaves alone: embedding, lm_head, or other parts of operations' names",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="compile even if the cache has the plan")]
Threads = Annotated[int | None, typer.Option(min=1, help="threads of the CPU team (default: one a core)")]
Live = Annotated[
    bool | None,
    typer.Option(
        "--live/--no-live",
        help="whether the split between several devices follows the machine's load, and the plan is made "
        "again when a device or memory goes (default: it does)",
    ),
]


def _alone(value: bool) -> bool:
    """JSON is for programs: nothing else may stand on stdout."""
    if value:
        keep_for_results()
    return value


Json = Annotated[bool, typer.Option("--json", help="print JSON", callback=_alone)]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the user chose about compiling; None where nothing was said."""

    context: int | None
    tokens: int | None
    without: list[str] | None
    numerics: Mode | None
    device: list[str] | None
    budget: list[str] | None = None
    place: list[str] | None = None
    quantize: str | None = None
    quantize_exclude: str | None = None

    def options(self) -> CompileOptions:
        """The same for the compiler. Raises PlanError for a pass that can't be left out."""
        from flashrt.compiler import CompileOptions

        names = tuple(sorted(set(self.without or ())))
        if names:
            from flashrt.passes.pipeline import check_names

            check_names(names)
        mode = (self.numerics or Mode.exact).value
        if self.quantize:
            from flashrt.passes.storage import check_name

            check_name(self.quantize)
        elif self.quantize_exclude:
            raise RequestError(
                "--quantize-exclude goes with --quantize", hint="add --quantize q8, for instance"
            )
        return CompileOptions(
            context=self.context, tokens=self.tokens or TOKENS, without=names, numerics=mode,
            pins=pins_of(self.place), quantize=self.quantize or "",
            quantize_exclude=tuple(p.strip() for p in (self.quantize_exclude or "").split(",") if p.strip()),
        )  # fmt: skip

    def refuse_for_plan(self, model: str, fresh: bool = False) -> None:
        """Raises RequestError for choices that a plan has made already."""
        given = {f"--{f.name.replace('_', '-')}": getattr(self, f.name) for f in fields(self)} | {
            "--fresh": fresh
        }
        if names := [name for name, value in given.items() if value]:
            raise RequestError(
                f"{model} is a plan: {', '.join(names)} can't change it any more",
                hint="compile the model itself again with that option",
            )


def device_ids(given: list[str] | None) -> tuple[str, ...]:
    """The ids of --device, which may be given several times and hold several, in order."""
    return tuple(id.strip() for text in given or ("cpu:0",) for id in text.split(","))


def pins_of(given: list[str] | None) -> tuple[str, ...]:
    """The pins of --place, in order. Raises PlanError for what isn't PATTERN=DEVICE."""
    if not given:
        return ()
    from flashrt.passes.pins import read_pin

    return tuple(str(read_pin(text.strip())) for text in given)


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def budgets_of(given: list[str] | None) -> dict[str, int]:
    """Bytes by device of --budget. Raises RequestError for what isn't ID=SIZE, and for two of one device."""
    budgets: dict[str, int] = {}
    for text in (part for several in given or () for part in several.split(",")):
        id, _, size = text.strip().rpartition("=")
        found = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip())
        if not id or found is None or found[2].upper() not in UNITS:
            raise RequestError(
                f"--budget {text!r} isn't DEVICE=SIZE",
                hint="for instance cpu:0=6GiB, gpu:0=8GB or cpu:0-3=500MB",
            )
        if id in budgets:
            raise RequestError(f"--budget gives {id} two budgets", hint="give it one")
        budgets[id] = int(float(found[1]) * UNITS[found[2].upper()])
    return budgets


def obtain(
    model: str, chosen: Chosen, *, fresh: bool = False, on_stage: Callable[[Stage], None] = lambda stage: None
) -> Compiled:
    """The plan: read from its folder or the cache, or compiled now behind a spinner."""
    from flashrt import engine
    from flashrt.frontend import models

    options = chosen.options()
    if models.find(model).kind == "plan":
        chosen.refuse_for_plan(model, fresh)
    with progress(f"preparing {model}") as say:

        def passed(stage: Stage) -> None:
            say(f"{stage.variant} {stage.name}")
            on_stage(stage)

        devices, budgets = device_ids(chosen.device), budgets_of(chosen.budget)
        return engine.obtain(model, options, devices=devices, budgets=budgets, on_stage=passed, fresh=fresh)


def open_model(
    model: str, compiled: Compiled, threads: int | None, sequences: int = 1, live: bool | None = None
) -> LLM:
    """The model with weights loaded and kernels ready; sequences, live: as for `LLM`."""
    from flashrt import engine

    with progress("loading") as say:
        llm = engine.LLM(
            model,
            plan=compiled.plan,
            sequences=sequences,
            threads=threads,
            live=live,
            on_progress=lambda kernel, done, of: say(f"kernel {done} of {of}, {kernel}"),
        )
        try:
            say("weights")
            llm.program.open()
        except BaseException:
            llm.close()
            raise
    for remark in llm.remarks:
        terminal.say(remark)
    return llm
