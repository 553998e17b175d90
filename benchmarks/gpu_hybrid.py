"""How fast is an 8B model on a GPU that is too small for it, and how near to what memory and link give?

python -m benchmarks.gpu_hybrid [--budgets 2 3 4 6] [--prompts 512 2048] [--answer 64] [--tokens 512]
                                [--numerics fast] [--cache 2560]

Random weights in 4 bits, made where they are used. The GPU may use --budgets GiB, the processor computes with
the weights that this leaves in the host's memory, or they pass through the GPU, as the planner decides by
rates that are measured first. One sequence; prompts are read in steps of --tokens.

  limit  what the bytes of a step take at these rates: decode reads the processor's and then the GPU's, and no
         faster than link and host's memory give what passes; a step of a prompt ends no sooner than its
         copies, its reads on the host and its arithmetic on the GPU
  share  of the limit's speed that was reached; in turns: of that at which a step of decode reads what the
         host's memory keeps, at the processor's rate, whoever reads it, and then what the GPU keeps
  plan   what the plan predicted, as a share of what was reached
  idle   share of a prompt's time in which the GPU has nothing to do: it waits for weights, or the processor
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from benchmarks.llama_shape import RandomSource, Shape, imported
from benchmarks.measure import machine as described
from flashrt.backend import BlockSource, OpenDevice
from flashrt.backends.reference import ReferenceBackend
from flashrt.compiler import CompileOptions, compile_model, keep_as_chosen
from flashrt.ir import micro
from flashrt.ir.clock import typical
from flashrt.ir.ops import PAGE
from flashrt.ir.types import Env, evaluate
from flashrt.machine import Device, Link, Machine, Measured
from flashrt.passes.budget import HOSTS
from flashrt.passes.pipeline import step_time
from flashrt.profiler.report import account
from flashrt.program import Plan, Program, Variant
from flashrt.runtime.rates import gemv_rate
from flashrt.runtime.trace import Trace

GPU, HOST, PASSING = "gpu:0", "cpu:0", "passing"
WARM = 3  # steps before the clock runs
TIMES = 5  # prompts that are read, of which the median counts
COPIED = 1 << 28  # bytes of a measured copy
OTHERS = 8  # times as fast as in float32 does a GPU multiply in bf16, where only that is measured


class Computer(Protocol):
    """Where the benchmark runs."""

    def machine(self) -> Machine:
        """The GPU and the processor, with rates measured now."""

    def open(self, spec: Device) -> OpenDevice:
        """Opens a device."""

    def peak(self) -> int:
        """The most bytes of the GPU's memory in use since it was asked last."""


class Here:
    """The machine that this runs on."""

    def machine(self) -> Machine:
        """As `Computer` says; the arithmetic of the processor is what `flashrt` knows of it."""
        from benchmarks.gpu_model import device, matrix_limit, read_limit
        from flashrt.backends.cpu import CpuBackend
        from flashrt.engine import machine_picture
        from flashrt.probes.host import beyond_caches, measure_host

        read, f32 = measure_host(2.0)
        host = machine_picture().devices[0]
        with closing(CpuBackend().open(host)) as opened:
            gemv = measured(gemv_rate(opened, 0.5, beyond_caches()))
        bf16 = measured(matrix_limit())
        rates = {"bf16": bf16, "i8": bf16, "f32": measured(bf16.value / OTHERS)}
        gpu = replace(device(), read=measured(read_limit()), rates=rates)
        host = replace(host, read=read, gemv=gemv, rates={**host.rates, "f32": f32})
        return Machine((gpu, host), tuple(self._links()))

    def _links(self) -> Iterator[Link]:
        import torch

        from benchmarks.gpu_model import seconds

        near = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
        far = torch.empty(COPIED, dtype=torch.uint8, device="cuda")

        def took(to: Any, from_: Any, times: int) -> float:
            return statistics.median(seconds(lambda: to.copy_(from_, non_blocking=True), times))

        for src, dst, from_, to in ((HOST, GPU, near, far), (GPU, HOST, far, near)):
            latency = took(to[:PAGE], from_[:PAGE], 50)
            yield Link(src, dst, measured(COPIED / took(to, from_, 5)), measured(latency * 1e6))

    def open(self, spec: Device) -> OpenDevice:
        """Opens a device."""
        from flashrt.backends.cpu import CpuBackend
        from flashrt.backends.cuda import CudaBackend

        opened: OpenDevice = (CudaBackend() if spec.kind == "gpu" else CpuBackend()).open(spec)
        return opened

    def peak(self) -> int:
        """As `Computer` says."""
        import torch

        most = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return int(most)


def measured(value: float) -> Measured:
    """A figure of this run."""
    return Measured(value, "measured")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured. cache: tokens that the cache has room for; tokens: of a step at most."""

    shape: Shape
    prompts: Sequence[int] = (512, 2048)
    answer: int = 64
    tokens: int = 512
    numerics: str = "fast"
    cache: int = 2560
    times: int = TIMES


class Hybrid:
    """A program for one budget of the GPU, in bytes. source: of the weights."""

    def __init__(
        self,
        computer: Computer,
        machine: Machine,
        asked: Asked,
        budget: int,
        source: BlockSource | None = None,
    ) -> None:
        gpu, host = machine.devices
        self.asked, self.machine = asked, replace(machine, devices=(replace(gpu, limit=budget), host))
        model = imported(replace(asked.shape, context=asked.cache))
        options = CompileOptions(asked.cache, asked.tokens, 1, numerics=asked.numerics)
        model = keep_as_chosen(model, options, self.machine)
        self.plan: Plan = compile_model(model, self.machine, options)
        devices = {d.id: computer.open(d) for d in self.machine.devices}
        rows = ReferenceBackend().open(replace(host, id="host", kind="reference"))
        pages = -(-asked.cache // PAGE)
        self.program = Program(self.plan, devices, rows, pages=pages, source=source or RandomSource())
        self.program.open()

    def step(self, tokens: int, position: int) -> Any:
        """A step of one sequence that stands at a position; gives the token it chooses."""
        given = inputs(tokens, position, self.asked.cache)
        return self.program.call(given, {"C": position + tokens}, outputs=("tokens",))["tokens"]

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt to its first token."""
        begin = time.perf_counter()
        for at in range(0, tokens, self.asked.tokens):
            self.step(min(self.asked.tokens, tokens - at), at)
        return time.perf_counter() - begin

    def decode(self, position: int) -> float:
        """Seconds of a token, one step after the other."""
        for _ in range(WARM):
            self.step(1, position)
        begin = time.perf_counter()
        for at in range(self.asked.answer):
            self.step(1, position + at)
        return (time.perf_counter() - begin) / self.asked.answer

    def idle(self, tokens: int) -> float:
        """The share of a prompt's time in which the GPU's lane of kernels doesn't work."""
        self.program.trace = trace = Trace()
        self.prefill(tokens)
        self.program.trace = None
        found = account(trace.steps, {v.name: v.stream for v in self.plan.variants})
        lane = next(lane for lane in found.lanes if lane.name == f"{GPU} compute")
        return 1 - lane.busy / found.steps

    def variant(self, tokens: int) -> Variant:
        """The one that runs a step of so many tokens."""
        return next(v for v in self.plan.variants if v.lo <= tokens <= v.hi)

    def limit(self, tokens: int, position: int) -> float:
        """Seconds that a step takes at least, as the head of this file says."""
        env = {"T": tokens, "C": position + tokens}
        return limit(self.variant(tokens).stream, self.machine, env, decode=tokens == 1)

    def in_turns(self, position: int) -> float:
        """Seconds of a step of one token that reads what the host keeps, and then what the GPU keeps."""
        env = {"T": 1, "C": position + 1}
        read = bytes_read(self.variant(1).stream, typical(self.variant(1).stream, env))
        gpu, host = self.machine.device(GPU), self.machine.device(HOST)
        kept = read[GPU] - read[PASSING]  # the GPU reads what has passed, too
        return (read[HOST] + read[PASSING]) / host.read.value + kept / gpu.read.value

    def predicted(self, tokens: int, position: int) -> float:
        """Seconds of a step by the plan."""
        env = {"T": tokens, "C": position + tokens}
        return step_time(self.variant(tokens).stream, self.machine, env) / 1e6

    def close(self) -> None:
        """Gives everything back."""
        self.program.close()


def inputs(tokens: int, position: int, cache: int) -> dict[str, Any]:
    """A step of one sequence, whose last row of logits is asked for."""
    one = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}
    whole = {"top_k": np.int32(0), "seed": np.int64(1), "draw": np.int64(1)}
    return {
        "ids": (np.arange(tokens) * 7 % 1000).astype(np.int32),
        "positions": position + np.arange(tokens, dtype=np.int32),
        "rows": np.array([tokens - 1], np.int32),
        "seq": np.zeros(tokens, np.int32),
        "pages": np.arange(-(-cache // PAGE), dtype=np.int32)[None],
        **{name: np.full(1, value, np.float32) for name, value in one.items()},
        **{name: np.full(1, value) for name, value in whole.items()},
        "history": np.full((1, 1), -1, np.int32),
    }


def bytes_read(stream: micro.Stream, env: Env) -> Counter[str]:
    """Bytes that a step reads and writes on the processor and on the GPU, and those that pass to it."""
    read: Counter[str] = Counter()
    for instr in stream.instrs:
        if isinstance(instr, micro.Prefetch):
            read[PASSING] += int(evaluate(instr.bytes, env))
        elif isinstance(instr, micro.Dispatch):
            read[HOST if instr.device.partition(":")[0] in HOSTS else GPU] += int(evaluate(instr.bytes, env))
    return read


def limit(stream: micro.Stream, machine: Machine, env: Env, *, decode: bool) -> float:
    """Seconds that a step of a stream takes at least."""
    full = typical(stream, env)
    read, computed = bytes_read(stream, full), 0.0
    gpu, host = machine.device(GPU), machine.device(HOST)
    copied = read[PASSING] / machine.link(HOST, GPU).rate.value
    for instr in stream.instrs:
        if isinstance(instr, micro.Dispatch) and instr.device == GPU and (rate := gpu.rate(instr.numerics)):
            computed += float(evaluate(instr.flops, full)) / rate
    on_host, on_gpu = read[HOST] / host.read.value, read[GPU] / gpu.read.value
    if decode:  # one device computes at a time; what passes is read from the host's memory, too
        return max(on_host + on_gpu, on_host + read[PASSING] / host.read.value, copied)
    return max(copied, on_host, computed, on_gpu)


# ---- what is told ------------------------------------------------------------------------
def seats(hybrid: Hybrid) -> str:
    """Where products and attention are, and what passes through the GPU."""
    lines = []
    for v in hybrid.plan.variants:
        where = Counter((n.op, n.device) for n in v.physical.nodes if n.op in ("linear", "attention"))
        passing = sum(b.bytes for b in v.stream.blocks if b.home == "ring")
        kept = Counter[str]()
        for block in v.stream.blocks:
            kept[block.device] += block.bytes if block.home == "resident" else 0
        told = [f"{count} {op} on {device}" for (op, device), count in sorted(where.items())]
        told += [f"{nbytes / 1e9:.2f} GB kept on {device}" for device, nbytes in sorted(kept.items())]
        told += [f"{passing / 1e9:.2f} GB pass"] if passing else []
        lines.append(f"  {v.name:6s} T={v.lo}…{v.hi}: {', '.join(told)}")
    return "\n".join(lines)


def one_budget(computer: Computer, machine: Machine, asked: Asked, budget: int) -> str:
    """Measures one budget, and tells."""
    computer.peak()
    hybrid = Hybrid(computer, machine, asked, budget)
    start = min(asked.prompts)
    took = {
        f"decode at {start}": (1, hybrid.decode(start), hybrid.limit(1, start), hybrid.predicted(1, start))
    }
    for tokens in asked.prompts:
        each = [hybrid.prefill(tokens) for _ in range(asked.times + 1)][1:]
        steps = [(min(asked.tokens, tokens - at), at) for at in range(0, tokens, asked.tokens)]
        bound = sum(hybrid.limit(*step) for step in steps)
        plan = sum(hybrid.predicted(*step) for step in steps)
        took[f"prefill {tokens}"] = tokens, statistics.median(each), bound, plan
    lines = [f"budget {budget / 2**30:.3g} GiB", seats(hybrid)]
    for name, (tokens, seconds, bound, plan) in took.items():
        turns = f"  in turns {hybrid.in_turns(start) / seconds:5.2f}" if tokens == 1 else ""
        lines.append(
            f"  {name:14s} {tokens / seconds:9.1f} tok/s  limit {tokens / bound:9.1f}  share "
            f"{bound / seconds:5.2f}  plan {seconds / plan:5.2f}{turns}"
        )
    idle = hybrid.idle(max(asked.prompts))
    lines.append(f"  prompt of {max(asked.prompts)} tokens: the GPU is idle for {idle:.2f} of it")
    held = sum(n for (device, _), n in hybrid.program.residents.held.items() if device == GPU)
    hybrid.close()
    most = f"{computer.peak() / 1e6:.1f} MB at most, {held / 1e6:.1f} MB by our count"
    lines.append(f"  memory {most}, {budget / 1e6:.1f} MB allowed")
    return "\n".join(lines)


def rates(machine: Machine) -> str:
    """The figures that everything is compared with."""
    gpu, host = machine.devices
    there, back = machine.link(HOST, GPU), machine.link(GPU, HOST)
    products = f", products read {host.gemv.value / 1e9:.1f} GB/s" if host.gemv else ""
    return (
        f"rates     {gpu.id} reads {gpu.read.value / 1e12:.2f} TB/s, "
        f"{gpu.rates['bf16'].value / 1e12:.0f} TFLOP/s in bf16; "
        f"{host.id} reads {host.read.value / 1e9:.1f} GB/s with {host.cores} cores{products}; link "
        f"{there.rate.value / 1e9:.1f} and {back.rate.value / 1e9:.1f} GB/s, "
        f"{there.latency.value + back.latency.value:.0f} us there and back"
    )


def run(computer: Computer, asked: Asked, budgets: Sequence[int]) -> Iterator[str]:
    """What there is to tell, as it comes: rates, and each budget."""
    machine = computer.machine()
    yield rates(machine)
    for budget in budgets:
        yield one_budget(computer, machine, asked, budget)


def main() -> None:
    """Prints the rates, and for each budget speeds, limits, memory and where the layers sit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budgets", type=float, nargs="+", default=(2, 3, 4, 6))
    parser.add_argument("--prompts", type=int, nargs="+", default=(512, 2048))
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--numerics", choices=("exact", "int8", "fast"), default="fast")
    parser.add_argument("--cache", type=int, default=2560)
    given = parser.parse_args()
    asked = Asked(Shape(), given.prompts, given.answer, given.tokens, given.numerics, given.cache)
    print(f"question  an 8B model on a GPU that is too small for it\n{described()}")
    print(f"settings  q4, {given.numerics}, one sequence, greedy, warm, steps of {given.tokens}", flush=True)
    for told in run(Here(), asked, [int(b * 2**30) for b in given.budgets]):
        print(told, flush=True)


if __name__ == "__main__":
    main()
