"""Does a GPU that is too small for a mixture of experts generate sooner when it keeps those asked for most?

python -m benchmarks.gpu_experts [--layers 24] [--budget 3] [--spread 0.5] [--skew 0.25] [--request 512 512]
                                 [--settle 10] [--answer 64] [--numerics fast]

Layers of Qwen3-30B-A3B's shape (128 experts of 768 channels, of which a token uses 8) with random weights in
4 bits, made where they are used. Rows of the routers differ in size, by a factor of about e^spread, so that
some experts are asked for more often; each step has another token. The GPU may use --budget GiB. The planner
is told that a share x of the experts has x^skew of the choices, and what prompt and answer a request has.

  without  layers whose experts don't fit the GPU are computed by the processor, as a whole
  with     the GPU keeps some experts of them: the first ones when it starts, and after --settle seconds of
           steps those that were asked for most
  plan     what the plan predicted, as a share of what was reached
  same     share of steps in which the likeliest token is that of the other program
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_hybrid import Asked, Computer, Here, Hybrid, inputs, rates
from benchmarks.llama_shape import RandomSource, Shape
from benchmarks.measure import machine as described
from flashrt.backend import U8
from flashrt.engine import follow
from flashrt.ir.types import Weight, size
from flashrt.layouts import LAYOUTS
from flashrt.machine import Machine
from flashrt.passes import experts, variants

GPU = "gpu:0"
QWEN = Shape(
    layers=24, hidden=2048, ffn=768, heads=32, kv_heads=4, vocab=151936, experts=128, top_k=8, context=1024
)
POSITION = 512  # at which steps are measured


class Routed(RandomSource):
    """Matrices as a `RandomSource` has them, from any row on, and routers that prefer some experts."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self._spread = spread
        self._routers: dict[str, NDArray[np.float32]] = {}

    def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
        shape = [size(d, {}) for d in weight.type.shape]
        if weight.name.endswith("gate.weight"):
            out[:] = self._router(weight.name, *shape)[lo:hi].reshape(-1).view(np.uint8)
        elif len(shape) == 2:
            layout = LAYOUTS[weight.layout]
            piece = self._piece(weight.layout, shape[1])
            at, first = 0, layout.bytes(lo % (self.GROUPS * layout.rows), shape[1])
            while at < len(out):
                some = piece[first : first + len(out) - at]
                out[at : at + len(some)] = some
                at, first = at + len(some), 0
        else:
            super().read(weight, lo, hi, out)

    def _piece(self, name: str, k: int) -> U8:
        """The same in every program, whatever is read first."""
        if (name, k) not in self._pieces:
            self._pieces[name, k] = RandomSource(crc32(f"{name} {k}".encode()))._piece(name, k)
        return self._pieces[name, k]

    def _router(self, name: str, experts: int, hidden: int) -> NDArray[np.float32]:
        if name not in self._routers:
            rng = np.random.default_rng(crc32(name.encode()))
            rows = rng.standard_normal((experts, hidden), np.float32)
            liked = np.exp(self._spread * rng.standard_normal((experts, 1))).astype(np.float32)
            self._routers[name] = rows * liked / np.float32(hidden**0.5)
        return self._routers[name]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is measured. budget: bytes of the GPU; request: tokens of a prompt and its answer; settle: seconds
    of steps; answer: steps that are timed."""

    shape: Shape = QWEN
    budget: int = 3 << 30
    spread: float = 0.5
    skew: float = 0.25
    request: tuple[int, int] = (512, 512)
    settle: float = 10.0
    answer: int = 64
    numerics: str = "fast"


class Mixture(Hybrid):
    """A program whose steps have a random token each, the same ones in every program."""

    def __init__(self, computer: Computer, machine: Machine, chosen: Chosen) -> None:
        asked = Asked(
            chosen.shape, (POSITION,), chosen.answer, min(512, chosen.shape.context // 2), chosen.numerics,
            chosen.shape.context,
        )  # fmt: skip
        super().__init__(computer, machine, asked, chosen.budget, Routed(chosen.spread))
        self._rng = np.random.default_rng(1)
        self.tokens: list[int] = []

    def step(self, tokens: int, position: int) -> Any:
        """A step of one sequence that stands at a position; gives the token it chooses."""
        given = inputs(tokens, position, self.asked.cache)
        given["ids"] = self._rng.integers(0, self.asked.shape.vocab, tokens, np.int32)
        found = self.program.call(given, {"C": position + tokens}, outputs=("tokens",))["tokens"]
        self.tokens.append(int(found[0]))
        return found

    def settle(self, position: int, seconds: float) -> None:
        """Generates for some time."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.step(1, position)

    def kept(self) -> str:
        """What the GPU has of the experts, by the plan."""
        nodes = self.plan.variants[0].physical.nodes
        products = [n for n in nodes if n.op == "expert_linear" and n.device == GPU]
        slots = next((n.attr("slots") for n in nodes if n.op == "expert_cache"), 0)
        count = sum(n.op == "expert_cache" for n in nodes)
        whole = sum(n.attr("layer") is None for n in products) // 2
        return f"{whole} layers' experts on {GPU}, and {slots} experts of each of {count} more"


def without_cache(machine: Machine) -> Machine:
    """The machine, as if its GPU had no kernel for a cache of experts."""
    gpu, host = machine.devices
    kernels = tuple(k for k in gpu.kernels if k[0] != "expert_cache")
    return replace(machine, devices=(replace(gpu, kernels=kernels), host))


def run(computer: Computer, chosen: Chosen) -> Iterator[str]:
    """What there is to tell, as it comes."""
    machine = computer.machine()
    yield rates(machine)
    answers: list[Sequence[int]] = []
    for name, where in (("without", without_cache(machine)), ("with", machine)):
        with (
            patch.object(experts, "SKEW", chosen.skew),
            patch.multiple(variants, PROMPT=chosen.request[0], ANSWER=chosen.request[1]),
        ):
            mixture = Mixture(computer, where, chosen)
        yield f"{name}: {mixture.kept()}"
        yield from measured(mixture, chosen, answers)
        mixture.close()
    yield f"same {np.mean([a == b for a, b in zip(*answers, strict=True)]):.2f}"


def measured(mixture: Mixture, chosen: Chosen, answers: list[Sequence[int]]) -> Iterator[str]:
    """One program's figures. answers: gets its tokens."""
    position, tokens = min(POSITION, chosen.shape.context // 2), mixture.asked.tokens
    predicted, cache = mixture.predicted(1, position), mixture.program.experts
    seconds = mixture.decode(position)
    answers.append(mixture.tokens[-chosen.answer :])
    yield f"  decode {1 / seconds:8.1f} tok/s  plan {seconds / predicted:.2f}"
    if cache is not None:
        follow(mixture.program, live=True)
        mixture.settle(position, chosen.settle)
        seconds, found = mixture.decode(position), cache.metrics()
        told = f"{found.hit_share or 0:.0%} of choices kept, {found.exchanged} exchanged {found.holding}"
        yield f"  decode {1 / seconds:8.1f} tok/s  plan {seconds / predicted:.2f}  {told}".rstrip()
    seconds = min(mixture.prefill(tokens) for _ in range(3))
    plan = seconds / mixture.predicted(tokens, 0)
    yield f"  prefill {tokens} {tokens / seconds:8.1f} tok/s  plan {plan:.2f}"


def main() -> None:
    """Prints the rates, and the figures with and without a cache."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=QWEN.layers)
    parser.add_argument("--budget", type=float, default=3)
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--skew", type=float, default=0.25)
    parser.add_argument("--request", type=int, nargs=2, default=(512, 512))
    parser.add_argument("--settle", type=float, default=10.0)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--numerics", choices=("exact", "int8", "fast"), default="fast")
    given = parser.parse_args()
    chosen = Chosen(
        replace(QWEN, layers=given.layers), int(given.budget * 2**30), given.spread, given.skew,
        tuple(given.request), given.settle, given.answer, given.numerics,
    )  # fmt: skip
    print(f"question  experts that are asked for most, on a GPU that is too small for all\n{described()}")
    print(f"settings  q4, {given.numerics}, {given.layers} layers, {given.budget:g} GiB, one sequence")
    for told in run(Here(), chosen):
        print(told, flush=True)


if __name__ == "__main__":
    main()
