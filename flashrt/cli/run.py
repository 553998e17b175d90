"""`flashrt run`: a language model answers a prompt, or talks; any other model turns arrays into arrays."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashrt.cli.arrays import run_arrays
from flashrt.cli.options import (
    Budgets,
    Chosen,
    Context,
    Devices,
    Fresh,
    Json,
    Live,
    Model,
    Numerics,
    Placed,
    Quantize,
    QuantizeExclude,
    Threads,
    Tokens,
    Without,
    obtain,
    open_model,
)
from flashrt.cli.terminal import complain, interrupts, peak_memory, say, size
from flashrt.cli.texts import run_text
from flashrt.errors import RequestError

if TYPE_CHECKING:
    from flashrt.engine import LLM
    from flashrt.llm.generate import Completion
    from flashrt.llm.request import Sampling

Prompt = str | Sequence[Mapping[str, str]]


def run_(
    model: Model,
    source: Annotated[str | None, typer.Argument(metavar="-", help="reads the prompt from stdin")] = None,
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
    input: Annotated[
        Path | None, typer.Option(metavar="NPZ", help="of any other model: its inputs, by their names")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="NPZ", help="where its outputs are written to")
    ] = None,
    context: Context = None,
    tokens: Tokens = None,
    threads: Threads = None,
    without: Without = None,
    numerics: Numerics = None,
    device: Devices = None,
    budget: Budgets = None,
    place: Placed = None,
    quantize: Quantize = None,
    quantize_exclude: QuantizeExclude = None,
    live: Live = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Runs a language model: streams the answer, ends with its speed and memory.

    Ctrl-C ends the answer within a step. The figures go to stderr, the answer to stdout.
    Any other model runs once on the arrays of --input; a text encoder takes --prompt, too, and prints the
    text's embedding.
    """
    from flashrt.llm.request import Sampling

    chosen = Chosen(context, tokens, without, numerics, device, budget, place)
    if input is not None or (output is not None and prompt is None and source is None):
        if source or interactive or raw or system or prompt is not None:
            raise RequestError("--input takes the place of a prompt: give one of them")
        run_arrays(model, chosen, input, output, threads=threads, fresh=fresh, as_json=as_json)
        return

    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, penalty=penalty,
        max_tokens=max_tokens, stop=tuple(stop or ()), seed=seed, ignore_eos=ignore_eos,
    )  # fmt: skip
    _check_choices(source, prompt, interactive, raw, system, as_json)
    compiled = obtain(
        model,
        Chosen(context, tokens, without, numerics, device, budget, place, quantize, quantize_exclude),
        fresh=fresh,
    )
    text = _stdin() if source else prompt
    if compiled.plan.text is not None:
        if interactive or raw or system or text is None:
            raise RequestError(
                f"{compiled.plan.name} is a text encoder: it answers nothing",
                hint="--prompt TEXT gives a text's embedding",
            )
        run_text(compiled.plan, text, output, threads=threads, as_json=as_json)
        return
    if output is not None:
        raise RequestError(f"{compiled.plan.name} answers with text: --output is for models that give arrays")
    with open_model(model, compiled, threads, live=live) as llm:
        if interactive:
            _converse(llm, system, sampling)
            return
        assert text is not None
        whole: Prompt = text if raw else _messages(system, text)
        if _answer(llm, whole, sampling, raw=raw, as_json=as_json).finish_reason == "cancelled":
            raise typer.Exit(130)


def _check_choices(
    source: str | None, prompt: str | None, interactive: bool, raw: bool, system: str, as_json: bool
) -> None:
    if source not in (None, "-"):
        raise RequestError(
            f"unexpected argument {source!r}", hint="a prompt is given as --prompt TEXT, or - for stdin"
        )
    if [prompt is not None, interactive, source is not None].count(True) != 1:
        raise RequestError(
            "what shall the model answer?", hint="give one of --prompt TEXT, --interactive, or - for stdin"
        )
    if interactive and (raw or as_json):
        raise RequestError("--interactive goes with neither --raw nor --json")
    if raw and system:
        raise RequestError("--system goes through the chat template, which --raw leaves out")


def _stdin() -> str:
    """The whole of stdin. Raises RequestError when it isn't UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt on stdin isn't UTF-8 text: byte {error.start} is wrong") from None


def _messages(system: str, text: str) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def _answer(
    llm: LLM, prompt: Prompt, sampling: Sampling, *, raw: bool = False, as_json: bool = False
) -> Completion:
    """Streams one answer and shows its figures. Ctrl-C ends it after the step that runs.

    Raises RequestError when the prompt is empty or doesn't fit.
    """
    request = llm.request(prompt, sampling, raw=raw)
    completion = None
    with interrupts() as interrupted:
        llm.generator.add(request)
        while completion is None:
            for event in llm.generator.step():
                completion = event.completion
                if event.text and not as_json:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
            if completion is None and interrupted():
                completion = llm.generator.cancel(request.id)
    if as_json:
        facts = {**asdict(completion), "peak_memory_bytes": peak_memory()}
        sys.stdout.write(json.dumps(facts, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        say(_figures(completion, llm.generator.context), "dim")
    return completion


def _figures(completion: Completion, context: int) -> str:
    stats = completion.stats
    first = f"first token {stats.first_token * 1e3:,.0f} ms" if stats.first_token is not None else ""
    read = f", {stats.prompt_rate:,.0f} tokens/s" if stats.prompt_rate else ""
    rate = f", {stats.rate:,.1f} tokens/s" if stats.rate else ""
    full = stats.prompt_tokens + stats.generated_tokens >= context
    ended = {"cancelled": "interrupted", "stop": "ended by stop", "length": "ended by length"}
    parts = [
        first,
        f"prompt {stats.prompt_tokens} tokens{read}",
        f"generated {stats.generated_tokens} tokens{rate}",
        ended[completion.finish_reason] + (f": the context of {context} tokens is full" if full else ""),
        f"peak memory {size(peak_memory())}",
    ]
    return " · ".join(filter(None, parts))


# ---- conversation ------------------------------------------------------------------
def _converse(llm: LLM, system: str, sampling: Sampling) -> None:
    """Reads a line, answers, remembers, until an empty line or Ctrl-D. Ctrl-C ends only the answer."""
    messages = [{"role": "system", "content": system}] if system else []
    with suppress(ImportError):
        import readline  # noqa: F401 (gives `input` the arrow keys)
    say("an empty line or Ctrl-D ends the conversation, Ctrl-C an answer", "dim")
    while line := _line():
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(llm, messages, sampling)
        except RequestError as error:
            messages.pop()
            complain(error)
            if messages[bool(system) :]:
                say("the conversation so far counts, too: ask less, or end it and begin a new one")
            continue
        if answer.text or answer.finish_reason != "cancelled":
            messages.append({"role": "assistant", "content": answer.text})
        else:
            messages.pop()


def _line() -> str:
    """The next line a person enters; "" at the end. The prompt shows on a terminal only."""
    terminal = sys.stdin.isatty()
    try:
        if terminal and sys.stdout.isatty():
            return input("> ").strip()
        if terminal:
            say("> ")
        return sys.stdin.readline().strip()
    except (EOFError, KeyboardInterrupt) as end:
        say("")
        if isinstance(end, KeyboardInterrupt):
            raise
        return ""
    except UnicodeDecodeError as error:
        raise RequestError(f"this line isn't text: {error.reason}") from None
