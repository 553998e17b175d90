"""The joints: what is refused before work or memory is spent, and what an opened plan is given."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from flashrt import engine, program
from flashrt.compiler import CompileOptions, compile_model
from flashrt.engine import obtain, open_plan
from flashrt.errors import LawError, PlanError, ProgramError
from flashrt.ir import micro
from flashrt.ir.types import size
from flashrt.llm.kv import pages_for
from flashrt.program import Plan
from flashrt.runtime.room import page_count
from tests.tiny import CONTEXT, tiny_import

MODEL = """\
logical small
symbol T lo=1 hi=8 hint=1
input x f32[T,64]
%a = aten.mul(%x,%x) f32[T,64]
%b = {op}(%a) f32[T,64]
output b b
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, text: str) -> str:
    path = folder / "small.logical"
    path.write_text(text)
    return str(path)


def plan(**changes: int) -> Plan:
    """The tiny language model for the reference device, perhaps with less memory."""
    machine = engine.machine_picture(["reference:0"])
    device = replace(machine.devices[0], **changes)  # type: ignore[arg-type]
    return compile_model(tiny_import(), replace(machine, devices=(device,)), CompileOptions(tokens=32))


# ---- refused when it is compiled ------------------------------------------------------
def test_a_graph_is_checked_before_any_pass(tmp_path: Path) -> None:
    """A text written by hand breaks a law: that is said, and no pass stumbles over it."""
    model = write(tmp_path, MODEL.format(op="aten.abs").replace("(%x,%x)", "(%x,%nope)"))
    with pytest.raises(LawError, match="as it was read: %a uses %nope, which is bound nowhere"):
        obtain(model, devices=("reference:0",))


def test_an_operation_that_nobody_has(tmp_path: Path, cache: Path) -> None:
    """The error names the node, says what is close, and no plan is left that can't run."""
    model = write(tmp_path, MODEL.format(op="aten.frobnicate"))
    with pytest.raises(PlanError, match=r"%b is aten\.frobnicate, which no device can run") as caught:
        obtain(model, devices=("reference:0",))
    assert caught.value.hint
    assert not list(cache.glob("plans/*/plan.json"))


# ---- room for the cache ---------------------------------------------------------------
def test_pages_for_whole_contexts() -> None:
    assert page_count(plan(), CONTEXT, 3) == 3 * pages_for(CONTEXT)


def test_fewer_pages_where_memory_is_short() -> None:
    """By what is free now and by the plan's own budget, whatever else was free when it was made."""
    made = plan()
    page = sum(size(s.type.bytes, {"P": 1}) for s in made.logical.states)
    assert page_count(made, CONTEXT, 3, free=10 * page) == 5
    (budget,) = made.variants[0].physical.budgets
    tight = replace(budget, limit=budget.weights + budget.activations + 4 * page)
    variants = tuple(replace(v, budgets=(tight,)) for v in made.variants)
    assert page_count(replace(made, variants=variants), CONTEXT, 3) <= 4


def test_no_room_for_a_page() -> None:
    with pytest.raises(PlanError, match=r"no room for the KV cache on reference:0: a page takes \d+ bytes"):
        page_count(plan(), CONTEXT, 1, free=100)


# ---- opening a plan -------------------------------------------------------------------
def test_only_kernels_that_are_used_must_be_here(tmp_path: Path) -> None:
    """A plan from a machine with more kernels opens; one that uses such a kernel is refused by its name."""
    made = obtain(write(tmp_path, MODEL.format(op="aten.abs")), devices=("reference:0",)).plan
    richer = replace(made.machine.devices[0], kernels=(*made.machine.devices[0].kernels, ("warp", "acc=f8")))
    elsewhere = replace(made, machine=replace(made.machine, devices=(richer,)))
    open_plan(elsewhere).close()
    (variant, *_) = made.variants
    instrs = tuple(
        replace(i, kernel="warp", numerics="acc=f8")
        for i in variant.stream.instrs
        if isinstance(i, micro.Dispatch)
    )
    using = replace(variant, stream=replace(variant.stream, instrs=instrs))
    with pytest.raises(ProgramError, match=r"uses kernels that aren't here: warp \(acc=f8\)"):
        open_plan(replace(elsewhere, variants=(using,)))


def test_a_number_of_threads_given_is_stronger_than_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = len(os.sched_getaffinity(0))
    monkeypatch.setenv("FLASHRT_THREADS", "1")
    made = obtain(write(tmp_path, MODEL.format(op="aten.abs"))).plan
    for threads, want in ((None, 1), (2, min(2, allowed))):
        with open_plan(made, threads=threads) as opened:
            assert opened.devices["cpu:0"].threads == want  # type: ignore[attr-defined]


def test_edited_variants_must_agree(tmp_path: Path) -> None:
    """Sealing a plan looks across its variants, too."""
    folder = tmp_path / "plan"
    program.save(plan(), folder)
    lines = (folder / "small.micro").read_text().replace("state kv.0 f32[P,2,", "state kv.0 bf16[P,2,")
    (folder / "small.micro").write_text(
        "".join(
            re.sub(r'numerics="(.*?)"', r'numerics="\1 kv=bf16"', line) if "[kv.0]" in line else line
            for line in lines.splitlines(keepends=True)
        )
    )
    with pytest.raises(LawError, match=r"state 'kv\.0' is f32.* in 'large', bf16.* in 'small'"):
        engine.seal(folder)
