"""The live loop around an open program: the same tokens wherever it moves the splits, and no step it ends."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt import engine
from flashrt.backends.cpu import CpuBackend
from flashrt.backends.reference import ReferenceBackend
from flashrt.ir import laws, micro, text
from flashrt.llm.generate import Generator
from flashrt.llm.request import Request, Sampling
from flashrt.machine import Device, Machine, Measured
from flashrt.passes import pipeline
from flashrt.passes.lower import lower
from flashrt.probes.sampler import Sampler
from flashrt.program import Plan, Program, Variant
from flashrt.runtime.executor import Executor
from flashrt.runtime.follow import Follower, Metrics
from flashrt.runtime.idle import Rests, idle_lanes
from tests.tiny import CONTEXT, tiny_graph, tiny_import, tiny_source

PAGES, PERIOD = 16, 0.2
SPLIT = Path(__file__).parents[1] / "spine" / "split.physical"
REFERENCE = ("reference:0", "reference:1")
GROUPS = ("cpu:0-0", "cpu:1-1")


def assumed(value: float) -> Measured:
    return Measured(value, "assumed")


def device(id: str, cpu: int, pool: str = "host") -> Device:
    kind = id.partition(":")[0]
    kernels = (CpuBackend() if kind == "cpu" else ReferenceBackend()).kernels()
    cpus = (cpu,) if kind == "cpu" else ()
    return Device(
        id, kind, "test", 1 << 30, assumed(1e10), {"f32": assumed(1e11)}, assumed(1.0), kernels=kernels,
        cpus=cpus, pool=pool or id,
    )  # fmt: skip


def split_plan(ids: tuple[str, str], pool: str = "host") -> Plan:
    """The tiny model with its mlps and its head split over two devices. pool: "" for two memories."""
    written = SPLIT.read_text()
    for ours, id in zip(REFERENCE, ids, strict=True):
        written = re.sub(rf"{ours}(?!\d)", id, written)
    machine = Machine(tuple(device(id, i, pool) for i, id in enumerate(ids)))
    graph = text.read_physical(written)
    stream = lower(graph, machine)
    for name in pipeline.PERFORMANCE:
        stream = pipeline.PERFORMANCE[name](stream, pipeline.Options(), pipeline.weight_room(graph.budgets))
    laws.check(stream)
    variant = Variant.of("split", 1, 64, graph, stream)
    return Plan("tiny", "", "", {}, tiny_graph(), (variant,), machine, tiny_import().weights)


@contextmanager
def opened(plan: Plan) -> Iterator[Program]:
    backends: dict[str, Any] = {"cpu": CpuBackend(), "reference": ReferenceBackend()}
    devices: dict[str, Any] = {d.id: backends[d.kind].open(d) for d in plan.machine.devices}
    host = backends["reference"].open(replace(plan.machine.devices[0], id="host", kind="reference"))
    with Program(plan, devices, host, pages=PAGES, source=tiny_source(tiny_graph()), poison=True) as program:
        yield program


def generate(call: Callable[[Any, Any, Any], Any], tokens: int = 40) -> tuple[tuple[int, ...], bytes]:
    """Tokens and logits of one prompt."""
    generator = Generator(call, context=CONTEXT, eos=(), pages=PAGES, max_tokens_per_step=32, max_sequences=2)
    generator.add(
        Request("a", (5, 17, 33), Sampling(max_tokens=tokens, temperature=0.7, seed=3), logits=True)
    )
    logits, done = [], None
    while done is None:
        for event in generator.step():
            logits.append(np.asarray(event.logits).tobytes())
            done = event.completion
    return done.tokens, b"".join(logits)


@dataclass(frozen=True)
class Seen:
    """A sample in which others have `far` of the second device's core."""

    at: float
    far: float | None

    def foreign(self, device: Device) -> float | None:
        return self.far if device.id.endswith(("reference:1", "1-1")) else 0.0


def disturbed(program: Program, follower: Follower) -> Callable[[Any, Any, Any], Any]:
    """The program with a sample after each step; the far device is busy in every other eight of them.

    Steps are said to take what the plan estimates, and ten times that where they wait for a busy device, so
    that nothing hangs on this machine's pace.
    """
    steps, stepped = iter(range(1 << 30)), follower.stepped
    busy = False

    def told(name: str, executor: Executor) -> None:
        e, env = follower.variants[name], executor.env
        at = {s: env[s] for s in follower.controller.positions[name]}
        slow = 10 if busy and len(e.live(at)) > 1 else 1
        executor.took = round(slow * 1e9 * e.step(env, at, dict.fromkeys(e.devices, 1.0)))
        executor.spent = lambda: {(d, "compute"): (round(s * 1e9), 0) for d, s in e.busy(env, at).items()}  # type: ignore[method-assign]
        stepped(name, executor)

    def call(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
        nonlocal busy
        n = next(steps)
        busy = bool(n // 8 % 2)
        outputs = program.call(inputs, symbols, outputs)
        follower.sampled(Seen(n * 0.9, 0.9 if busy else 0.0))
        return outputs

    follower.stepped = told  # type: ignore[method-assign, assignment]

    return call


@pytest.mark.parametrize(
    ("ids", "pool"),
    [(REFERENCE, "host"), (GROUPS, ""), (GROUPS, "host")],
    ids=["reference", "cpu, two memories", "cpu, one memory"],
)
def test_the_same_bits_wherever_the_loop_moves_the_splits(ids: tuple[str, str], pool: str) -> None:
    if ids == GROUPS and not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("needs processors 0 and 1")
    plan = split_plan(ids, pool)
    with opened(split_plan(ids, "")) as program:
        plain = generate(program.call)
    with opened(plan) as program:
        program.mover = follower = Follower(program, PERIOD, clock=lambda: 0.0)
        seen: set[Any] = set()

        def call(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
            outputs = inner(inputs, symbols, outputs)
            seen.add(tuple(program.last.env[s.name] for s in plan.variants[0].stream.splits))  # type: ignore[union-attr]
            return outputs

        inner = disturbed(program, follower)
        assert generate(call) == plain
        assert follower.metrics().plan_switches >= 3 and len(seen) >= 2
        assert (128, 64, 96) in seen, "the far device was never left"


def test_lanes_that_rest_do_not_run_and_are_not_waited_for() -> None:
    plan = split_plan(REFERENCE)
    (variant,) = plan.variants
    splits = variant.stream.splits
    near = {s.name: s.positions[-1] for s in splits}
    with opened(plan) as program:
        program.devices["reference:1"].run = None  # type: ignore[method-assign, assignment]
        tokens, _ = generate(lambda inputs, symbols, _: program.call(inputs, {**symbols, **near}), 5)
        assert len(tokens) == 5
        assert program.last is not None
        assert {d for (d, _), (ran, _) in program.last.spent().items() if ran} == {"reference:0"}
        with pytest.raises(TypeError):  # now it is asked
            generate(program.call, 2)


def test_what_rests_is_found_by_what_is_used() -> None:
    stream = split_plan(REFERENCE).variants[0].stream
    hints = {s.name: s.hint for s in stream.symbols}
    ends = [{s.name: s.positions[i] for s in stream.splits} for i in (0, -1)]
    lanes = {(i.device, i.lane) for i in stream.instrs}
    assert idle_lanes(stream, {**hints, **{s.name: s.start for s in stream.splits}}) == frozenset()
    assert idle_lanes(stream, {**hints, **ends[0]}) == frozenset()
    assert {d for d, _ in lanes - idle_lanes(stream, {**hints, **ends[1]})} == {"reference:0"}
    rests = Rests(stream)
    assert rests.at({**hints, **ends[1]}) == idle_lanes(stream, {**hints, **ends[1]})
    assert rests.at({**hints, **{s.name: s.start for s in stream.splits}}) == frozenset()
    some = {**ends[1], "v": 48}  # the head still has a share there
    assert ("reference:1", "compute") not in rests.at(some)


def test_what_is_used_later_is_no_rest() -> None:
    """A value of full width counts, and so does a state."""
    stream = text.read_micro(
        """micro t
symbol T lo=1 hi=4 hint=1
split s positions=[0,4] start=0
input x f32[T,4]
weight w f32[4,4] sources=[w] layout=f32
slot %0 a f32[T,4] input=x
slot %1 a f32[T,4]
slot %2 b f32[T,4]
slot %3 b f32[T,4] input=x
slot %4 a f32[T,4]
block w a lo=0 hi=4 bytes=64 home=resident
block w b lo=0 hi=4 bytes=64 home=resident
output y %4
dispatch device=b lane=compute signals=!0 kernel=linear.f32 args=[%3,@w] dst=%2[0:s]
transfer device=b lane=copy_out waits=[!0] signals=!1 src=%2[0:s] dst=%1[0:s] to=a
dispatch device=a lane=compute kernel=linear.f32 args=[%0,@w[s:4]] dst=%1[s:4]
dispatch device=a lane=compute waits=[!1] kernel=add args=[%1,%0] dst=%4
"""
    )
    assert idle_lanes(stream, {"T": 1, "s": 0}) == {("b", "compute"), ("b", "copy_out")}
    assert idle_lanes(stream, {"T": 1, "s": 4}) == frozenset()
    assert isinstance(stream.instrs[1], micro.Transfer)


def test_only_cpus_with_one_memory_copy_in_their_rows() -> None:
    """There every instruction is in the compute lanes, and each device's in one region."""
    joined = split_plan(GROUPS).variants[0].stream
    assert {i.lane for i in joined.instrs} == {"compute"}
    assert len({(i.device, i.region) for i in joined.instrs}) == len(GROUPS)
    assert sum(isinstance(i, micro.Transfer) for i in joined.instrs) > 4
    for ids, pool in ((GROUPS, ""), (REFERENCE, "host")):
        stream = split_plan(ids, pool).variants[0].stream
        assert {i.lane for i in stream.instrs if isinstance(i, micro.Transfer)} == {"copy_out"}
        assert len(stream.instrs) == len(joined.instrs)


# ---- the loop itself ---------------------------------------------------------------
def test_a_defect_of_the_loop_ends_no_step() -> None:
    class Broken(Seen):
        def foreign(self, device: Device) -> float | None:
            raise ZeroDivisionError("a probe")

    with opened(split_plan(REFERENCE)) as program:
        program.mover = follower = Follower(program, PERIOD, clock=lambda: 1.0)
        follower.sampled(Broken(1.0, 0.0))
        assert follower.metrics().holding == "ZeroDivisionError: a probe"
        assert len(generate(program.call, 3)[0]) == 3
        follower.sampled(Seen(1.0, 0.0))
        assert follower.metrics().holding == ""


def test_the_watchdog_says_that_no_samples_come() -> None:
    now = 0.0
    with opened(split_plan(REFERENCE)) as program:
        follower = Follower(program, PERIOD, clock=lambda: now)
        assert follower.metrics() == Metrics(None, 0, follower.controller.positions, None, "")
        now = 5.0
        assert "no sample of the machine for 5.0 s" in follower.metrics().holding
        follower.sampled(Seen(5.0, 0.0))
        now = 5.1
        metrics = follower.metrics()
        assert metrics.holding == "" and metrics.age_of_last_plan == pytest.approx(0.1)
        follower.close()
        follower.sampled(Seen(6.0, 1.0))
        assert follower.metrics().holding == "the loop has ended"


def test_steps_at_other_positions_count_for_nothing() -> None:
    """The caller's own choice of a position wins, and teaches the loop nothing."""
    with opened(split_plan(REFERENCE)) as program:
        program.mover = follower = Follower(program, PERIOD, clock=lambda: 0.0)
        told: list[str] = []
        generate(lambda inputs, symbols, _: program.call(inputs, {**symbols, "s": 128}), 3)
        follower.sampled(Seen(1.0, 0.0), lambda *seen: told.append(seen[0]))
        assert told == []
        generate(program.call, 3)
        follower.sampled(Seen(2.0, 0.0), lambda *seen: told.append(seen[0]))
        assert set(told) == set(REFERENCE)


def test_memory_of_a_neighbour_that_jumps_moves_nothing(tmp_path: Path) -> None:
    """A probe storm: 256 MiB more and less in every sample, while steps run."""
    now, storm = 0.0, [8 << 30, (8 << 30) - (256 << 20)]
    for name in ("proc/self/task", "sys"):
        (tmp_path / name).mkdir(parents=True)
    sampler = Sampler(root=tmp_path, clock=lambda: now)
    with opened(split_plan(REFERENCE)) as program:
        program.mover = follower = Follower(program, PERIOD, clock=lambda: now)
        sampler.listen(lambda live: follower.sampled(live, sampler.observe))

        def call(inputs: Any, symbols: Any, outputs: Any = None) -> Any:
            nonlocal now
            outputs = program.call(inputs, symbols, outputs)
            now += 0.15
            free = storm[round(now / 0.15) % 2]
            (tmp_path / "proc/meminfo").write_text(f"MemTotal: 16000000 kB\nMemAvailable: {free >> 10} kB\n")
            assert sampler.sample().free == free
            return outputs

        assert len(generate(call, 40)[0]) == 40
        assert follower.metrics().plan_switches == 0 and follower.metrics().holding == ""


def test_a_plan_without_splits_has_no_loop() -> None:
    plan = split_plan(REFERENCE)
    (variant,) = plan.variants
    whole = replace(plan, variants=(replace(variant, stream=replace(variant.stream, splits=())),))
    with opened(plan) as program:
        assert engine.follow(program, live=False) is None and program.mover is None
        program.plan = whole
        assert engine.follow(program) is None


def test_the_engine_s_loop_ends_with_the_program() -> None:
    with opened(split_plan(REFERENCE)) as program:
        follower = engine.follow(program)
        assert follower is not None and program.mover is follower
        generate(program.call, 3)
    assert follower.metrics().holding == "the loop has ended"
