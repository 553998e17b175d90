"""What every benchmark shares: the machine, quietness, interleaved runs, a table, a plot."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import Peer

FOREIGN = 0.15  # share of the processor that others may use during a run before it is thrown away


@dataclass(frozen=True, slots=True)
class Result:
    """Rates of one side in tokens per second. dropped: runs thrown away for foreign load."""

    name: str
    rates: tuple[float, ...]
    dropped: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


def machine() -> str:
    """Processor, cores, features, versions and commit, one line each."""
    from flashrt.engine import machine_picture

    cpu = machine_picture().devices[0]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True).stdout
    return "\n".join(
        [
            f"machine   {cpu.name}, {cpu.cores} cores, {cpu.memory / 2**30:.0f} GiB",
            f"features  {' '.join(cpu.features)}",
            f"versions  Python {platform.python_version()}, numpy {np.__version__}",
            f"commit    {commit.strip()}{' with uncommitted changes' if dirty else ''}",
        ]
    )


def busy() -> tuple[float, float]:
    """Seconds of processor time that ran (all processes, all cores) and that passed, since boot."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return float(sum(fields) - idle), float(sum(fields))


def peers(names: Sequence[str], model: str, threads: int) -> list[Peer]:
    """Those that start; the others are named with the reason."""
    found = []
    for name in names:
        try:
            found.append(Peer(name, model, threads))
        except RuntimeError as error:
            print(f"left out  {name}: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
    return found


def agreement(asked: Sequence[Peer], model: str, threads: int, *, piece: int, pieces: int) -> str:
    """How often each side's likeliest next token is that of flashrt-exact: a line of the report.

    The text is given, 64 tokens of it are predicted: one after each `piece`, `pieces` of them in a step.
    """
    reference = next((p for p in asked if p.name == "flashrt-exact"), None)
    started = reference or Peer("flashrt-exact", model, threads)
    ids = started.ask(task="text", tokens=64 * piece)
    request = {"task": "likeliest", "ids": ids, "piece": piece, "pieces": pieces}
    want = started.ask(**request)
    assert len(want) == 64, f"the text is too short: {len(ids)} tokens"
    if started is not reference:
        started.close()
    found = []
    for peer in asked:
        if peer is not reference:
            try:
                same = sum(a == b for a, b in zip(peer.ask(**request), want, strict=True))
                found.append(f"{peer.name} {same}")
            except (RuntimeError, OSError):  # it has ended
                found.append(f"{peer.name} can't say")
    told = ", ".join(found) or "only itself was asked"
    return f"agree     with flashrt-exact, of {len(want)} likeliest next tokens: {told}"


def interleaved(asked: Sequence[Peer], repeats: int, *, company: int = 0, **request: Any) -> list[Result]:
    """A B A B …: one warm-up each, then `repeats` rounds.

    company: processes that use a core each while a run is timed.
    A peer that can't do the task is left out. Runs during which other processes used the machine are
    thrown away, and repeated up to twice as many rounds.
    """
    rates: dict[str, list[float]] = {}
    dropped: dict[str, int] = {}
    for peer in asked:
        try:
            peer.ask(**request)
            rates[peer.name] = []
        except RuntimeError as error:
            print(f"left out  {peer.name}: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
    for _ in range(2 * repeats):
        for peer in asked:
            if peer.name in rates and len(rates[peer.name]) < repeats:
                rate, clean = quiet(partial(beside, company, partial(peer.ask, **request)))
                if clean:
                    rates[peer.name].append(rate)
                else:
                    dropped[peer.name] = dropped.get(peer.name, 0) + 1
    for name in (name for name, measured in rates.items() if not measured):
        print(f"left out  {name}: others used the machine before each run", file=sys.stderr)
    return [Result(n, tuple(r), dropped.get(n, 0)) for n, r in rates.items() if r]


def quiet(run: Callable[[], float]) -> tuple[float, bool]:
    """Runs it; whether nobody else used the processor just before (half a second is looked at)."""
    before = busy()
    time.sleep(0.3)
    after = busy()
    load = (after[0] - before[0]) / max(after[1] - before[1], 1)
    return run(), load < FOREIGN


def beside(company: int, run: Callable[[], float]) -> float:
    """Runs it while so many other processes use a core each; the system says which."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(company)]
    try:
        if others:
            time.sleep(0.2)
        return run()
    finally:
        for other in others:
            other.kill()
            other.wait()


def report(question: str, settings: str, results: Mapping[str, list[Result]], first: str) -> str:
    """A table: median, spread and the ratio of `first` to each, by case."""
    lines = [f"question  {question}", machine(), f"settings  {settings}", ""]
    lines.append(
        f"{'case':14s} {'engine':18s} {'median':>9s} {'min':>9s} {'max':>9s} {'runs':>5s} {'ratio':>6s}"
    )
    for case, rows in results.items():
        ours = next((r.median for r in rows if r.name == first), None)
        for r in rows:
            ratio = f"{ours / r.median:6.2f}" if ours and r.name != first else "     -"
            dropped = f" ({r.dropped} thrown away)" if r.dropped else ""
            lines.append(
                f"{case:14s} {r.name:18s} {r.median:9.1f} {min(r.rates):9.1f} {max(r.rates):9.1f} "
                f"{len(r.rates):5d} {ratio}{dropped}"
            )
    return "\n".join(lines)


def plot(path: Path, title: str, results: Mapping[str, list[Result]]) -> None:
    """Bars with their spread, one group a case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(r.name for rows in results.values() for r in rows))
    figure, axes = plt.subplots(figsize=(8, 4.5))
    width = 0.8 / max(len(names), 1)
    for k, name in enumerate(names):
        rows = [next((r for r in rows if r.name == name), None) for rows in results.values()]
        at = [i + k * width for i, r in enumerate(rows) if r]
        medians = [r.median for r in rows if r]
        spread = [
            [r.median - min(r.rates) for r in rows if r],
            [max(r.rates) - r.median for r in rows if r],
        ]
        axes.bar(at, medians, width, yerr=spread, label=name, capsize=2)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(results))], list(results))
    axes.set_ylabel("tokens per second")
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
