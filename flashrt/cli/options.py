"""Options that several commands take, and the two steps they share: get the plan, open it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from flashrt.cli.terminal import progress
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
        help="a .gguf file, Hugging Face folder or repo id, .pt2, .logical, plan folder, or alias (smollm2)"
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
        metavar="ID",
        help="where to run (repeatable): cpu:0; reference:0 is slow and defines the meaning; "
        "null:0 only pretends (default: cpu:0)",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="compile even if the cache has the plan")]
Threads = Annotated[int | None, typer.Option(min=1, help="threads of the CPU team (default: one a core)")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the user chose about compiling; None where nothing was said."""

    context: int | None
    tokens: int | None
    without: list[str] | None
    numerics: Mode | None
    device: list[str] | None

    def options(self) -> CompileOptions:
        """The same for the compiler. Raises PlanError for a pass that can't be left out."""
        from flashrt.compiler import CompileOptions

        names = tuple(sorted(set(self.without or ())))
        if names:
            from flashrt.passes.pipeline import check_names

            check_names(names)
        mode = (self.numerics or Mode.exact).value
        return CompileOptions(
            context=self.context, tokens=self.tokens or TOKENS, without=names, numerics=mode
        )

    def refuse_for_plan(self, model: str, fresh: bool = False) -> None:
        """Raises RequestError for choices that a plan has made already."""
        given = {f"--{f.name}": getattr(self, f.name) for f in fields(self)} | {"--fresh": fresh}
        if names := [name for name, value in given.items() if value]:
            raise RequestError(
                f"{model} is a plan: {', '.join(names)} can't change it any more",
                hint="compile the model itself again with that option",
            )


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

        devices = chosen.device or ("cpu:0",)
        return engine.obtain(model, options, devices=devices, on_stage=passed, fresh=fresh)


def open_model(model: str, compiled: Compiled, threads: int | None) -> LLM:
    """The model with weights loaded and kernels ready."""
    from flashrt import engine

    with progress("loading") as say:
        llm = engine.LLM(
            model,
            plan=compiled.plan,
            threads=threads,
            on_progress=lambda kernel, done, of: say(f"kernel {done} of {of}, {kernel}"),
        )
        try:
            say("weights")
            llm.program.open()
        except BaseException:
            llm.close()
            raise
    return llm
