"""Does a split that follows the machine beat one that stands still, while other processes take a core?

python -m benchmarks.live_replan [--model smollm2] [--devices cpu:0-0,cpu:1-1] [--repeats 3] [--phase 5]
                                 [--plot benchmarks/live_replan.png]

One program on two core groups generates without pause. An episode is: quiet, one process on a core of the
second group, two of them, quiet again. The live loop and every fixed position, from nothing to everything
on the first group, go through episodes of their own, in turn, in one process with one set of weights.
Processes of others during an episode are counted and shown.

  reaction  from the end of the sample that first saw the load to the first step elsewhere
  switch    what the first step after a switch takes longer than those behind it
  back      from the end of the load to the first step with both groups again
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from flashrt import engine
from flashrt.compiler import CompileOptions
from flashrt.llm.request import Request, Sampling
from flashrt.probes.sampler import PERIOD, Live, Sampler
from flashrt.program import Mover
from flashrt.runtime.control import QUIET, Switch
from flashrt.runtime.elastic import Positions, key_of
from flashrt.runtime.executor import Executor
from flashrt.runtime.follow import Follower

HOG = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the products on the first group
TOKENS = 128  # of one request; then another begins
PROMPT = (504, 3426, 314)  # few enough for the variant of small steps


@dataclass(frozen=True, slots=True)
class Step:
    """One step. at: its end, seconds of time.monotonic; took: seconds; key: where the splits stood."""

    at: float
    took: float
    key: tuple[tuple[str, int], ...]


class Fixed:
    """Splits that stand still."""

    def __init__(self, positions: Mapping[str, Positions]) -> None:
        self._positions = positions

    def at(self, variant: str) -> Positions:
        """The same always."""
        return self._positions[variant]

    def stepped(self, variant: str, executor: Executor) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class Watched:
    """A mover and what its steps took."""

    mover: Mover
    steps: list[Step] = field(default_factory=list)

    def at(self, variant: str) -> Positions:
        """As the mover says."""
        return self.mover.at(variant)

    def stepped(self, variant: str, executor: Executor) -> None:
        """Notes the step."""
        self.mover.stepped(variant, executor)
        at = {s.name: executor.env[s.name] for s in executor.stream.splits}
        self.steps.append(Step(time.monotonic(), executor.took * 1e-9, key_of(at)))


@dataclass(slots=True)
class Episode:
    """What one side did. marks: when its phases began and the last ended, seconds of time.monotonic."""

    side: str
    marks: list[float]
    steps: list[Step]
    samples: list[Live]
    switches: list[Switch] = field(default_factory=list)

    def rate(self, first: int, last: int) -> float:
        """Steps a second in phases first … last-1."""
        lo, hi = self.marks[first], self.marks[last]
        return sum(lo <= s.at < hi for s in self.steps) / (hi - lo)


# ---- the load ----------------------------------------------------------------------
@contextmanager
def hogs(count: int, cpu: int) -> Iterator[None]:
    """Processes that compute on one core as long as the block lasts."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", HOG, str(cpu)]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


# ---- the sides ---------------------------------------------------------------------
class Bench:
    """The open model and the sides that take turns with it."""

    def __init__(self, model: str, devices: Sequence[str], numerics: str) -> None:
        options = CompileOptions(context=1024, tokens=128, numerics=numerics)
        self.llm = engine.LLM(model, options=options, devices=devices, live=False)
        self.program = self.llm.program
        self.sampler = Sampler()
        self.follower = Follower(self.program, PERIOD)
        if not self.follower.needed:
            raise SystemExit(f"the plan for {', '.join(devices)} has no split that could move")
        small = self.program.plan.variants[0].name
        self.elastic = self.follower.variants[small]
        near = self.elastic.ends[0]
        (home, *others) = sorted(self.elastic.live(near))
        if others:
            raise SystemExit("no group can be left: its shards aren't all there is on it")
        self.far = next(d for d in self.elastic.devices if d != home)
        self.cpu = self.program.plan.machine.device(self.far).cpus[0]
        self.samples: list[Live] = []
        self.sampler.listen(self._sampled)
        self._number = 0
        self._following = False

    def _sampled(self, live: Live) -> None:
        self.samples.append(live)
        if self._following:
            self.follower.sampled(live, self.sampler.observe)

    def positions(self, share: float) -> dict[str, Positions]:
        """Every split where the first group has about that share; the plan's own start at one half."""
        out = {}
        for name, e in self.follower.variants.items():
            if share == 0.5:
                out[name] = e.start
            else:
                out[name] = {
                    s.name: min(s.positions, key=lambda p, s=s: abs(p - share * s.positions[-1]))
                    for s in e.splits
                }
        return out

    def share(self, key: tuple[tuple[str, int], ...]) -> float:
        """The share of the second group, by the mean of the splits."""
        last = {s.name: s.positions[-1] for s in self.elastic.splits}
        return 1 - statistics.mean(at / last[name] for name, at in key if name in last)

    def sides(self) -> dict[str, Callable[[], Mover]]:
        """By name: the loop, and what stands still."""
        fixed = {f"fixed {share:.0%}": lambda share=share: Fixed(self.positions(share)) for share in SHARES}
        return {"live": lambda: self.follower, **fixed}

    def run(self, side: str, phases: Sequence[tuple[float, int]]) -> Episode:
        """One episode. phases: (seconds, processes on the second group's core)."""
        self.follower = Follower(self.program, PERIOD)  # each begins where the plan does, and knows nothing
        watched = Watched(self.sides()[side]())
        self.program.mover, self._following = watched, side == "live"
        first = len(self.samples)
        marks = [time.monotonic()]
        for seconds, count in phases:
            with hogs(count, self.cpu):
                self._generate_until(time.monotonic() + seconds)
            marks.append(time.monotonic())
        self._following = False
        switches = list(self.follower.controller.switches)
        return Episode(side, marks, watched.steps, self.samples[first:], switches)

    def _generate_until(self, end: float) -> None:
        generator = self.llm.generator
        while time.monotonic() < end:
            if generator.idle:
                self._number += 1
                asked = Sampling(max_tokens=TOKENS, ignore_eos=True)
                generator.add(Request(f"b{self._number}", PROMPT, asked))
            generator.step()

    def close(self) -> None:
        """Ends everything."""
        self.sampler.stop()
        self.llm.close()


# ---- what came of it ---------------------------------------------------------------
def reaction(bench: Bench, episode: Episode) -> tuple[float, float] | None:
    """Seconds from the sample that saw the load, and from its beginning, to the first step elsewhere."""
    begun, before = episode.marks[1], [s for s in episode.steps if s.at < episode.marks[1]]
    device = bench.program.plan.machine.device(bench.far)
    seen = [s.at for s in episode.samples if s.at > begun and (s.foreign(device) or 0.0) > QUIET]
    moved = [s.at - s.took for s in episode.steps if s.at > begun and before and s.key != before[-1].key]
    if not seen or not moved:
        return None
    return moved[0] - seen[0], moved[0] - begun


def back(bench: Bench, episode: Episode) -> float | None:
    """Seconds from the end of the load to the first step with both groups."""
    over = episode.marks[-2]
    both = [s.at for s in episode.steps if s.at > over and bench.share(s.key) > 0]
    return both[0] - over if both else None


def switch_costs(episode: Episode) -> list[float]:
    """What each first step after a switch took longer than those behind it at the same place, in seconds."""
    out, steps = [], episode.steps
    for i in range(1, len(steps)):
        after = [s.took for s in steps[i + 1 : i + 21] if s.key == steps[i].key]
        if steps[i].key != steps[i - 1].key and len(after) == 20:
            out.append(steps[i].took - statistics.median(after))
    return out


def others(bench: Bench, episode: Episode) -> float:
    """The largest share of the first group's core that others had, on average over the episode."""
    home = [d for d in bench.elastic.devices if d != bench.far]
    seen = [s.foreign(bench.program.plan.machine.device(d)) for s in episode.samples for d in home]
    known = [x for x in seen if x is not None]
    return statistics.mean(known) if known else 0.0


def table(
    bench: Bench, episodes: Mapping[str, Sequence[Episode]], phases: Sequence[tuple[float, int]]
) -> str:
    """Median rates by side and phase, and the loop's ratios to the best and to the undisturbed optimum."""
    names = ["quiet", *(f"{n} hog{'s' * (n > 1)}" for _, n in phases[1:-1]), "after"]
    rates = {
        side: [statistics.median(e.rate(i, i + 1) for e in runs) for i in range(len(phases))]
        for side, runs in episodes.items()
    }
    fixed = {side: r for side, r in rates.items() if side != "live"}
    optimum = max(fixed, key=lambda side: fixed[side][0])
    lines = [f"{'tokens/s':12s} " + " ".join(f"{n:>9s}" for n in names) + f" {'others':>7s}"]
    for side, row in rates.items():
        foreign = statistics.mean(others(bench, e) for e in episodes[side])
        lines.append(f"{side:12s} " + " ".join(f"{r:9.1f}" for r in row) + f" {foreign:7.0%}")
    for i, name in enumerate(names):
        best = max(fixed, key=lambda side, i=i: fixed[side][i])
        of_best, of_held = rates["live"][i] / fixed[best][i], rates["live"][i] / fixed[optimum][i]
        lines.append(f"{name:12s} live is {of_best:.2f} of {best}, {of_held:.2f} of {optimum} held")
    return "\n".join(lines)


def facts(bench: Bench, runs: Sequence[Episode]) -> str:
    """Reaction, cost of switches, the way back, and how many switches."""
    reactions = [r for r in (reaction(bench, e) for e in runs) if r is not None]
    returns = [b for b in (back(bench, e) for e in runs) if b is not None]
    costs = [c for e in runs for c in switch_costs(e)]
    lines = [f"          {s.at - e.marks[0]:5.2f} s: {s.because}" for e in runs[-1:] for s in e.switches]
    lines.insert(0, "the last episode's")
    lines += [f"switches  {', '.join(str(len(e.switches)) for e in runs)} in an episode (aim: 5 at most)"]
    if reactions:
        seen, begun = max(r[0] for r in reactions), max(r[1] for r in reactions)
        lines.append(
            f"reaction  {seen * 1e3:.0f} ms after a sample saw it (aim: 400), "
            f"{begun * 1e3:.0f} ms after it began"
        )
    else:
        lines.append("reaction  none: the splits didn't move")
    lines.append(f"back      {max(returns) * 1e3:.0f} ms (aim: 1000)" if returns else "back      never")
    if costs:
        lines.append(
            f"switch    costs {max(costs) * 1e3:.1f} ms at most, "
            f"{statistics.median(costs) * 1e3:.1f} typically (aim: 10)"
        )
    return "\n".join(lines)


def undisturbed(bench: Bench, repeats: int, seconds: float) -> str:
    """The loop against the plan's own position with nobody else there, in turn."""
    rates: dict[str, list[float]] = {"live": [], "fixed 50%": []}
    for _ in range(repeats):
        for side in rates:
            rates[side].append(bench.run(side, [(seconds, 0)]).rate(0, 1))
    pairs = [a / b for a, b in zip(*rates.values(), strict=True)]
    spread = f"{min(pairs):.2f} … {max(pairs):.2f} over {repeats} pairs"
    return (
        f"no load   live is {statistics.median(pairs):.3f} of the plan's own position (aim: 0.98; {spread})"
    )


def plot(path: Path, bench: Bench, shown: Mapping[str, Episode]) -> None:
    """Rates and the loop's split over time, for the last episode of some sides."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, below) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=(2, 1))
    for side, episode in shown.items():
        zero = episode.marks[0]
        times, rates = _rates(episode, zero)
        top.plot(times, rates, label=side, linewidth=2 if side == "live" else 1)
    live = shown["live"]
    zero = live.marks[0]
    below.step(
        [s.at - zero for s in live.steps], [100 * bench.share(s.key) for s in live.steps], where="post",
        label="share of the second group",
    )  # fmt: skip
    device = bench.program.plan.machine.device(bench.far)
    seen = [(s.at - zero, s.foreign(device)) for s in live.samples]
    below.plot(
        [t for t, x in seen if x is not None],
        [100 * x for _, x in seen if x is not None],
        ".",
        label="its core, used by others",
    )
    for axes in (top, below):
        for i, mark in enumerate(live.marks[1:-1]):
            axes.axvline(mark - zero, color="grey", linewidth=0.8, linestyle=":" if i else "--")
        axes.legend(loc="lower left")
    top.set_ylabel("tokens per second")
    below.set_ylabel("%")
    below.set_xlabel("seconds; a line where the load changes")
    top.set_title("Decode split over two core groups while others use a core of the second")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _rates(episode: Episode, zero: float, width: float = 0.25) -> tuple[list[float], list[float]]:
    bins: dict[int, int] = {}
    for s in episode.steps:
        bins[int((s.at - zero) / width)] = bins.get(int((s.at - zero) / width), 0) + 1
    last = max(bins, default=0)
    return [(i + 0.5) * width for i in range(last)], [bins.get(i, 0) / width for i in range(last)]


def main() -> None:
    """Runs the episodes and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--devices", default="cpu:0-0,cpu:1-1")
    parser.add_argument("--numerics", default="fast")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--phase", type=float, default=5.0, help="seconds of each load")
    parser.add_argument("--sides", nargs="*", default=[], help="only these, such as live 'fixed 50%%'")
    parser.add_argument("--plot", type=Path, default=None)
    given = parser.parse_args()
    phases = [(given.phase / 2, 0), (given.phase, 1), (given.phase, 2), (given.phase, 0)]
    bench = Bench(given.model, given.devices.split(","), given.numerics)
    try:
        with bench.sampler:
            report(bench, phases, given)
    finally:
        bench.close()


def report(bench: Bench, phases: Sequence[tuple[float, int]], given: Any) -> None:
    """All episodes, and everything that is printed."""
    episodes: dict[str, list[Episode]] = {side: [] for side in given.sides or bench.sides()}
    for side in episodes:
        bench.run(side, [(0.5, 0)])  # warm
    for _ in range(given.repeats):
        for side, runs in episodes.items():
            runs.append(bench.run(side, phases))
    print("question  a split that follows the machine against splits that stand still, under foreign load")
    print(machine())
    print(
        f"settings  {given.model}, {given.numerics}, {given.devices}, load on processor {bench.cpu}, "
        f"{given.repeats} episodes a side\n"
    )
    print(table(bench, episodes, phases))
    print(facts(bench, episodes["live"]))
    print(undisturbed(bench, 3 * given.repeats, given.phase / 2))
    if given.plot is not None:
        plot(
            given.plot,
            bench,
            {
                side: runs[-1]
                for side, runs in episodes.items()
                if side in ("live", "fixed 50%", "fixed 100%")
            },
        )


if __name__ == "__main__":
    main()
