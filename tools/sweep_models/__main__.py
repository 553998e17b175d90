"""python -m tools.sweep_models [TYPE …]: tries types (all when none is named) and updates docs/models.md."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection

import torch
from transformers.utils.logging import disable_progress_bar

from flashrt.frontend import gate, hooks  # noqa: F401 (gate: loaded once for all trials)
from tools.sweep_models import table, trial
from tools.sweep_models.table import Page, Result

WAIT = 10  # seconds by the clock for each second of processor time: others may use the machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Exits with 1 when a type is wrong or failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.sweep_models", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--seconds", type=int, default=90, help="limit of a type's processor time")
    parser.add_argument("--gib", type=float, default=8.0, help="memory limit of a type (address space)")
    asked = parser.parse_args(arguments)
    known = trial.types()
    if unknown := sorted(set(asked.types) - set(known)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    os.nice(19)
    disable_progress_bar()
    results = {r.type: r for r in _kept() if r.type in known}
    bad = 0
    _warm()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FLASHRT_CACHE"] = cache
        for name in asked.types or known:
            result = _apart(name, asked.seconds, int(asked.gib * 2**30))
            results[name] = result
            bad += result.verdict in ("wrong", "failed")
            print(
                f"{name:24} {result.verdict:8} {result.error:.0e} {result.note} {' '.join(result.slow)}",
                flush=True,
            )
            table.FILE.write_text(table.write(_page(results.values())), encoding="utf-8")
    return 1 if bad else 0


def _warm() -> None:
    """Loads what the first export loads, once for all trials."""
    torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    hooks.register()


def _page(results: Sequence[Result] | object) -> Page:
    return Page(version("transformers"), version("torch").partition("+")[0], tuple(results))  # type: ignore[arg-type]


def _kept() -> tuple[Result, ...]:
    """The verdicts that stand in the page for the same transformers."""
    if not table.FILE.is_file():
        return ()
    page = table.read(table.FILE.read_text(encoding="utf-8"))
    return page.results if page.transformers == version("transformers") else ()


def _apart(name: str, seconds: int, most: int) -> Result:
    """One trial in a process of its own, which time and memory limits may end."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    # a fork has torch and transformers loaded; this process never started a thread
    child = multiprocessing.get_context("fork").Process(target=_limited, args=(name, seconds, most, theirs))
    child.start()
    theirs.close()
    for _ in range(WAIT * seconds):  # slices: time in which this process was stopped doesn't count
        child.join(1)
        if not child.is_alive():
            break
    else:
        child.kill()
        child.join()
        return Result(name, "failed", f"stands still: not through after {WAIT * seconds} s")
    if ours.poll():
        try:
            return ours.recv()  # type: ignore[no-any-return]
        except EOFError:
            pass
    if child.exitcode == -signal.SIGXCPU:
        return Result(name, "failed", f"not through after {seconds} s of processor time")
    return Result(name, "failed", f"the process ended with code {child.exitcode}")


def _limited(name: str, seconds: int, most: int, out: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    out.send(trial.attempt(name))


if __name__ == "__main__":
    raise SystemExit(main())
