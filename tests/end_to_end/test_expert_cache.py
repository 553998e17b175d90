"""Experts that a GPU keeps beside a processor's: whichever they are, and whenever they are exchanged, tokens
are those of one device. Devices that pretend to be the two compute alike, so that bits can be compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt.backend import U8, OpenDevice, Place
from flashrt.backends.cpu import CpuBackend
from flashrt.backends.cuda import CudaDevice
from flashrt.backends.cuda.driver import Driver
from flashrt.backends.cuda.kernels import offered
from flashrt.backends.reference import ReferenceBackend
from flashrt.backends.reference.kernels import kernels
from flashrt.compiler import CompileOptions, compile_model
from flashrt.engine import follow, seal
from flashrt.errors import DeviceError, RequestError
from flashrt.frontend.imported import Imported
from flashrt.ir.ops import EXPERT_TABLE
from flashrt.ir.types import Weight
from flashrt.program import Plan, Program, save
from flashrt.runtime.arena import host_view
from flashrt.runtime.executor import Begun
from flashrt.runtime.experts import ExpertCache, Metrics
from flashrt.weights.index import WeightIndex
from tests.end_to_end.test_gpu_hybrid import Pretend, Steady
from tests.passes.models import model

EXPERTS, TOP_K, PAGES = 16, 2, 6
GRAPH = model(2, hidden=256, ffn=256, vocab=512, tokens=32, context=96, experts=EXPERTS, top_k=TOP_K)
SMALL, LARGE = 1_600_000, 1 << 30  # bytes of a GPU: for some experts of each layer, and for all
FAVOURITES = (3, 7, 11)  # experts that tokens like
PROMPT, ANSWER = 9, 18


class Skewed(Steady):
    """Routers give a few experts much larger scores, either way: each is chosen in every other step."""

    def read(self, weight: Weight, lo: int, hi: int, out: U8) -> None:
        super().read(weight, lo, hi, out)
        if weight.name.endswith("router"):
            rows = out.view(np.float32).reshape(-1, 256)
            rows[[e - lo for e in FAVOURITES if lo <= e < hi]] *= 30


@cache
def planned(limit: int, numerics: str = "exact") -> Plan:
    machine = Pretend(computes=True).machine()
    gpu, host = machine.devices
    where = replace(machine, devices=(replace(gpu, limit=limit), host))
    options = CompileOptions(96, 32, 1, numerics=numerics)
    return compile_model(Imported(GRAPH, WeightIndex((), {})), where, options)


@contextmanager
def opened(plan: Plan) -> Iterator[Program]:
    devices = {d.id: ReferenceBackend().open(d) for d in plan.machine.devices}
    with Program(plan, devices, None, pages=PAGES, source=Skewed(), poison=True) as program:
        yield program


def nothing(program: Program, step: int) -> None:
    """Leaves everything as it is."""


def generated(
    program: Program, between: Callable[[Program, int], None] = nothing, answer: int = ANSWER
) -> list[bytes]:
    """The logits of an answer's tokens, each the likeliest. between: called behind each of its steps."""
    ids, at, out = np.arange(PROMPT, dtype=np.int32) * 7, 0, list[bytes]()
    for step in range(answer):
        logits = call(program, ids, at)
        out.append(logits.tobytes())
        at, ids = at + len(ids), np.array([logits[0].argmax()], np.int32)
        between(program, step)
    return out


def call(program: Program, ids: Any, at: int) -> Any:
    t = len(ids)
    given = {
        "ids": ids, "positions": at + np.arange(t, dtype=np.int32), "seq": np.zeros(t, np.int32),
        "pages": np.arange(PAGES, dtype=np.int32)[None], "rows": np.array([t - 1], np.int32),
    }  # fmt: skip
    return program.call(given, {"C": at + t})["logits"]


@cache
def right(numerics: str = "exact") -> list[bytes]:
    plan = planned(LARGE, numerics)
    assert {i.device for v in plan.variants for i in v.stream.instrs} == {"gpu:0"}
    with opened(plan) as program:
        assert program.experts is None
        return generated(program)


def kept(program: Program) -> ExpertCache:
    assert program.experts is not None
    return program.experts


def held(program: Program) -> list[set[int]]:
    """The experts in the table, by layer."""
    rows = kept(program).table.reshape(-1, EXPERTS)
    return [set(np.flatnonzero(row).tolist()) for row in rows]


def sampled(program: Program, step: int) -> None:
    kept(program).sampled(0.2 * step)


def metrics(program: Program) -> Metrics:
    found = kept(program).metrics()
    assert found.holding == ""
    return found


def spoil(place: Place) -> None:
    place.buffer[place.offset : place.offset + place.bytes] = 0xFF


def spoil_free_slots(program: Program) -> None:
    """NaN where no expert of the table is."""
    found = kept(program)
    for part in found._parts:
        row = found.table.reshape(-1, EXPERTS)[part.layer]
        for slot in set(range(found.slots)) - {s - 1 for s in row.tolist()}:
            spoil(found._slot(part, slot))


@pytest.mark.parametrize("numerics", ["exact", "int8"])
def test_tokens_are_those_of_one_device(numerics: str) -> None:
    with opened(planned(SMALL, numerics)) as program:
        assert generated(program) == right(numerics)
        assert held(program) == [set(range(kept(program).slots))] * 2  # nobody has taken a sample
        assert metrics(program).hit_share is None


def test_a_plan_on_disk(tmp_path: Path) -> None:
    """Written, sealed and read, it runs as before."""
    save(planned(SMALL), tmp_path / "plan")
    with opened(seal(tmp_path / "plan")) as program:
        assert generated(program) == right()


@pytest.mark.parametrize("numerics", ["exact", "int8"])
def test_favourites_move_in_while_tokens_are_made(numerics: str) -> None:
    """Slots that nobody should read hold NaN, and the tokens are the same; what is asked for most is kept."""

    def exchanged(program: Program, step: int) -> None:
        sampled(program, step)
        spoil_free_slots(program)

    with opened(planned(SMALL, numerics)) as program:
        first = held(program)
        assert generated(program, exchanged) == right(numerics)
        most = kept(program)._asked.argmax(axis=1).tolist()
        assert all(e in experts for e, experts in zip(most, held(program), strict=True))
        assert held(program) != first and metrics(program).exchanged > 0
        before = metrics(program).hit_share
        generated(program, exchanged)
        after = metrics(program).hit_share
        assert before is not None and after is not None and after > before


def test_any_table_in_any_step() -> None:
    """Other experts in each step, in any slots, some of them empty."""
    rng = np.random.default_rng(5)

    def shuffled(program: Program, step: int) -> None:
        found = kept(program)
        table = np.zeros((2, EXPERTS), np.int32)
        for row in table:
            chosen = rng.permutation(EXPERTS)[: rng.integers(0, found.slots + 1)]
            row[chosen] = 1 + rng.permutation(found.slots)[: len(chosen)]
        for part in found._parts:
            for expert in np.flatnonzero(table[part.layer]).tolist():
                first = expert * part.rows
                slot = found._slot(part, int(table[part.layer, expert]) - 1)
                program.residents.fill("gpu:0", part.whole, first, first + part.rows, slot)
        flat = table.reshape(-1).copy()
        flat.setflags(write=False)
        found.table = flat
        spoil_free_slots(program)

    with opened(planned(SMALL)) as program:
        assert generated(program, shuffled) == right()


def test_a_copy_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on with what is there; a slot is NaN until its copy is over, and taken only then."""
    go_on, copying, threads = threading.Event(), threading.Event(), list[threading.Thread]()
    tables = set[int]()

    with opened(planned(SMALL)) as program:
        fill = program.residents.fill

        def slow(device: str, weight: Weight, lo: int, hi: int, place: Place) -> None:
            spoil(place)
            copying.set()
            assert go_on.wait(60)
            fill(device, weight, lo, hi, place)

        def between(program: Program, step: int) -> None:
            if not kept(program)._moves:
                sampled(program, step)
            elif not threads:
                monkeypatch.setattr(program.residents, "fill", slow)
                threads.append(threading.Thread(target=sampled, args=(program, step)))
                threads[0].start()
                assert copying.wait(60)
            elif step < ANSWER - 4:
                tables.add(id(kept(program).table))
            elif not go_on.is_set():
                go_on.set()
                threads[0].join()
                assert metrics(program).exchanged > 0 and id(kept(program).table) not in tables

        assert generated(program, between) == right()
    assert len(tables) == 1


def test_a_step_that_is_given_up() -> None:
    """Its choices may count; the next one is right, and experts go on being exchanged."""
    with opened(planned(SMALL)) as program:
        host = program.devices["cpu:0"]
        run = host.run

        def failing(code: Any, epoch: int) -> None:
            raise DeviceError("cpu:0 is lost")

        def between(program: Program, step: int) -> None:
            sampled(program, step)
            if step % 3 == 0:
                host.run = failing  # type: ignore[method-assign]
                with pytest.raises(DeviceError, match="cpu:0 is lost"):
                    call(program, np.array([1], np.int32), PROMPT + step)
                host.run = run  # type: ignore[method-assign]
                sampled(program, step)

        assert generated(program, between) == right()
        assert metrics(program).exchanged > 0
        kept(program)._sweep()
        assert not kept(program)._steps


class Under(Begun):
    """A step that goes on for as long as the test wants."""

    under_way = True  # type: ignore[assignment]

    def __init__(self) -> None:
        """Of nothing."""


def test_a_slot_waits_for_steps_that_may_read_it() -> None:
    """Such as run beside the host: those that began before its expert was taken out of the table."""
    with opened(planned(SMALL)) as program:
        generated(program)
        found, early = kept(program), Under()
        number, table = found.enter()
        found.entered(number, early)
        sampled(program, 1)
        assert found._moves and found.table is not table
        late, (later, _) = Under(), found.enter()
        found.entered(later, late)
        for at in (2, 3):
            sampled(program, at)
            assert metrics(program).exchanged == 0
        early.under_way = False  # type: ignore[misc]
        sampled(program, 4)
        assert metrics(program).exchanged > 0


def test_what_fails_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(planned(SMALL)) as program:
        generated(program)

        def broken(*_: object) -> None:
            raise DeviceError("the link is down")

        with monkeypatch.context() as patch:
            sampled(program, 1)
            patch.setattr(program.residents, "fill", broken)
            sampled(program, 2)
            assert "the link is down" in kept(program).metrics().holding
            assert generated(program) == right()
        sampled(program, 3)
        sampled(program, 4)
        assert metrics(program).exchanged > 0
        program.close()
        assert "ended" in kept(program).metrics().holding


def test_an_expert_that_cannot_be_loaded_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(planned(SMALL)) as program:
        generated(program)
        sampled(program, 1)
        fill, (bad, *others) = program.residents.fill, list(kept(program)._moves)
        assert others

        def some(device: str, weight: Weight, lo: int, hi: int, place: Place) -> None:
            part = next(p for p in kept(program)._parts if p.whole == weight)
            if (part.layer, lo) == (bad.layer, bad.expert * part.rows):
                raise DeviceError("a bad page")
            fill(device, weight, lo, hi, place)

        monkeypatch.setattr(program.residents, "fill", some)
        sampled(program, 2)
        found, table = kept(program).metrics(), kept(program).table.reshape(-1, EXPERTS)
        assert found.exchanged == len(others) and "a bad page" in found.holding
        assert [table[m.layer, m.expert] for m in others] == [m.slot + 1 for m in others]
        assert table[bad.layer, bad.expert] == 0 and generated(program) == right()


def test_what_passes_is_made_up_of_both() -> None:
    """Experts that the device keeps lie there, the others with the host, in runs."""
    with opened(planned(SMALL)) as program:
        generated(program, sampled)
        found = kept(program)
        assert metrics(program).exchanged > 0
        for part in found._parts:
            (whole,) = program.residents.pieces("gpu:0", part.whole, 0, part.rows * EXPERTS)
            pieces = found.nearby("gpu:0", part.whole, 0, part.rows * EXPERTS)
            near = [p for p in pieces if p.buffer is not whole.buffer]
            assert len(near) == len(held(program)[part.layer]) and len(pieces) < EXPERTS
            assert np.concatenate([*map(host_view, pieces)]).tobytes() == host_view(whole).tobytes()
            assert not found.nearby("cpu:0", part.whole, 0, part.rows * EXPERTS)
            assert not found.nearby("gpu:0", part.whole, 0, part.rows)


def test_the_live_loop_exchanges_and_may_be_switched_off() -> None:
    with opened(planned(SMALL)) as program:
        assert follow(program, live=False) is None
        generated(program)
        assert metrics(program).hit_share is None
        follow(program, live=True)
        for _ in range(200):
            assert generated(program) == right()
            if metrics(program).exchanged:
                break
        assert metrics(program).exchanged and metrics(program).hit_share


def test_a_table_that_names_no_slot_is_refused() -> None:
    """As an index that a kernel relies on."""
    with opened(planned(SMALL)) as program:
        found = kept(program)
        wrong = np.full(2 * EXPERTS, found.slots + 1, np.int32)
        wrong.setflags(write=False)
        found.table = wrong
        with pytest.raises(RequestError, match="slot"):
            generated(program)


# ---- on a GPU, real or emulated, beside the CPU
FEW = 6  # tokens of an answer
OTHER = model(3, hidden=256, ffn=128, vocab=512, tokens=32, context=96, experts=EXPERTS, top_k=TOP_K)


def beside_a_cpu() -> Plan:
    """A plan of small steps that keep experts, and large ones that bring the others."""
    machine = Pretend(computes=True).machine()
    gpu, host = machine.devices
    gpu = replace(gpu, limit=2_500_000, kernels=offered())
    host = replace(host, kernels=CpuBackend().kernels(), cores=1)
    where = replace(machine, devices=(gpu, host))
    return compile_model(Imported(OTHER, WeightIndex((), {})), where, CompileOptions(96, 32, 1))


def test_on_a_gpu(driver: Driver) -> None:
    """Experts are exchanged behind each step, free slots are NaN, and prompts bring only what isn't kept."""
    plan = beside_a_cpu()
    small, large = plan.variants
    assert any(i.name == EXPERT_TABLE for i in small.stream.inputs) and large.stream.rings
    gpu, host = plan.machine.devices
    alone = replace(plan.machine, devices=(replace(gpu, limit=LARGE, kernels=kernels()),))
    right = compile_model(Imported(OTHER, WeightIndex((), {})), alone, CompileOptions(96, 32, 1))
    with opened(right) as program:
        want = [np.frombuffer(x, np.float32) for x in generated(program, answer=FEW)]

    def exchanged(program: Program, step: int) -> None:
        sampled(program, step)
        for part in kept(program)._parts:
            row = kept(program).table.reshape(-1, EXPERTS)[part.layer]
            for slot in set(range(kept(program).slots)) - {s - 1 for s in row.tolist()}:
                free = kept(program)._slot(part, slot)
                program.devices["gpu:0"].write(np.full(free.bytes, 0xFF, np.uint8), free)

    devices: dict[str, OpenDevice] = {"gpu:0": CudaDevice(gpu, driver), "cpu:0": CpuBackend().open(host)}
    with Program(plan, devices, None, pages=PAGES, source=Skewed(), poison=True) as program:
        program.open()
        for _ in range(2):
            across = list(getattr(driver, "copies", {}).get("across", ()))
            got = generated(program, exchanged, FEW)
            for mine, theirs in zip(got, want, strict=True):
                logits = np.frombuffer(mine, np.float32)
                np.testing.assert_allclose(logits, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())
                assert logits.argmax() == theirs.argmax()
            if hasattr(driver, "copies"):
                assert len(driver.copies["across"]) > len(across)
        assert metrics(program).exchanged > 0
