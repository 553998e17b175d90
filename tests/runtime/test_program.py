"""A plan on disk and opened: what is written is read back, and nothing outlives `close`."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt import engine, program
from flashrt.backends.cpu import CpuDevice
from flashrt.errors import LawError, ModelError, ParseError, PlanError, ProgramError, RequestError
from flashrt.program import Plan
from flashrt.weights.index import File, WeightIndex
from tests.cli.tiny_plan import make_plan, write_logical

DEVICES = ("reference:0",)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A language model for the reference device, in two variants."""
    return make_plan(tokens=32)


@pytest.fixture
def folder(plan: Plan, tmp_path: Path) -> Path:
    program.save(plan, tmp_path / "plan")
    return tmp_path / "plan"


def step(tokens: int = 3, **given: Any) -> dict[str, Any]:
    """A step of one sequence that draws one token."""
    i32, f32 = np.int32, np.float32
    return {
        "ids": np.arange(1, tokens + 1, dtype=i32), "positions": np.arange(tokens, dtype=i32),
        "seq": np.zeros(tokens, i32), "pages": np.array([[1, 0]], i32), "rows": np.array([tokens - 1], i32),
        "temperature": np.zeros(1, f32), "top_k": np.zeros(1, i32), "top_p": np.ones(1, f32),
        "min_p": np.zeros(1, f32), "penalty": np.ones(1, f32), "seed": np.zeros(1, np.int64),
        "draw": np.zeros(1, np.int64), "history": np.full((1, 1), -1, i32), **given,
    }  # fmt: skip


def logits(plan: Plan, **given: Any) -> bytes:
    with engine.open_plan(plan, pages=2) as opened:
        return opened.call(step(**given), {"C": 3})["logits"].tobytes()


# ---- on disk --------------------------------------------------------------------------
@pytest.mark.parametrize("pack", [False, True])
def test_what_is_saved_is_read_back(plan: Plan, tmp_path: Path, pack: bool) -> None:
    got = program.save(plan, tmp_path / "plan", pack=pack)
    other = {"constants", "folder", "packed", "machine", "options", "graph"}
    for name in {f.name for f in fields(Plan)} - other | {"logical"}:
        assert getattr(got, name) == getattr(plan, name), name
    assert got.machine.fingerprint() == plan.machine.fingerprint()
    assert got.constants.keys() == plan.constants.keys()
    assert all((got.constants[n] == v).all() for n, v in plan.constants.items())
    assert (got.packed is not None) == pack and got.folder == tmp_path / "plan"
    assert logits(got) == logits(plan)


def test_running_a_plan_parses_no_graph(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program.save(plan, tmp_path / "plan")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a graph was parsed")

    monkeypatch.setattr("flashrt.ir.text.read_logical", refuse)
    monkeypatch.setattr("flashrt.ir.text.read_physical", refuse)
    assert logits(program.load(tmp_path / "plan")) == logits(plan)


def test_a_relative_path_survives_a_change_of_folder(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.save(plan, tmp_path / "plan", pack=True)
    monkeypatch.chdir(tmp_path)
    loaded = program.load(Path("plan"))
    monkeypatch.chdir("/")
    assert logits(loaded) == logits(plan)


def test_a_plan_that_is_moved_still_runs(plan: Plan, folder: Path, tmp_path: Path) -> None:
    assert logits(program.load(folder.rename(tmp_path / "moved"))) == logits(plan)


def test_saving_over_a_plan_leaves_nothing_else(plan: Plan, folder: Path) -> None:
    program.save(replace(plan, name="other"), folder)
    assert program.load(folder).name == "other"
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_plan_that_is_replaced_is_read_whole(plan: Plan, folder: Path) -> None:
    """Readers see the old plan or the new one, never a mixture and never nothing."""
    named = {name: replace(plan, name=name) for name in ("old", "new")}
    program.save(named["old"], folder)
    found: list[str] = []

    def read() -> None:
        try:
            found.extend(program.load(folder).name for _ in range(8))
        except ProgramError as error:
            found.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive():
        for each in named.values():
            program.save(each, folder)
    assert len(found) == 8 and set(found) <= set(named), found


def test_what_is_no_plan_is_not_written_over(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ProgramError, match="isn't a plan"):
        program.save(plan, tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("damage", ["missing", "cut", "edited", "empty"])
def test_every_file_is_checked(plan: Plan, folder: Path, damage: str) -> None:
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            changed = {"cut": data[:-1], "edited": data.replace(b"a", b"b", 1), "empty": b""}[damage]
            path.write_bytes(changed if changed != data else data + b" ")
        with pytest.raises(ProgramError, match="plan"):
            program.load(folder)
        path.write_bytes(data)
    assert program.load(folder).name == plan.name


def test_a_manifest_that_lacks_a_part(folder: Path) -> None:
    manifest = json.loads((folder / "plan.json").read_text())
    for part in set(manifest) - {"machine"}:
        left = {k: v for k, v in manifest.items() if k not in (part, "sha256")}
        (folder / "plan.json").write_text(json.dumps({**left, "sha256": program._digest(left)}))
        with pytest.raises(ProgramError):
            if part == "sha256":
                (folder / "plan.json").write_text(json.dumps(left))
            program.load(folder)


def test_a_cached_plan_whose_manifest_is_gone_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path / "cache"))
    model = str(write_logical(tmp_path))
    made = engine.obtain(model, devices=DEVICES).plan.folder
    assert made is not None
    (made / program.MANIFEST).unlink()
    again = engine.obtain(model, devices=DEVICES)
    assert not again.cached and again.plan.folder == made
    assert engine.obtain(model, devices=DEVICES).cached


# ---- sealed ---------------------------------------------------------------------------
def edit(folder: Path, old: str, new: str, name: str = "small.micro") -> None:
    text = (folder / name).read_text()
    assert old in text, old
    (folder / name).write_text(text.replace(old, new))


def test_an_edited_plan_is_sealed(plan: Plan, folder: Path, tmp_path: Path) -> None:
    edit(folder, "dispatch", "# first of all\ndispatch")
    edit(folder, "symbol T lo=1 hi=16", "symbol T lo=1 hi=8")
    with pytest.raises(ProgramError, match=r"small\.micro is corrupt.*\n.*seal it"):
        program.load(folder)
    sealed = program.save(engine.seal(folder), tmp_path / "sealed")
    assert logits(sealed) == logits(plan)
    with engine.open_plan(sealed, pages=2) as opened, pytest.raises(RequestError, match="T=9"):
        opened.call(step(9), {"C": 9})


@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        ("kernel=gated", "kernle=gated", ParseError, "kernle"),
        ("input ids", "input idz", LawError, "idz|ids"),
        ("output logits", "output logitz", ProgramError, "outputs: logits, logitz"),
        ("layout=f32", "layout=f33", LawError, "known: f32"),
        ("block norm.weight reference:0 lo=0 hi=64", "block norm.weight reference:0 lo=0 hi=65", LawError,
         "rows 0…65"),
        ("f32[N,96]", "f32[N,80]", LawError, r"expected f32\[N,96\]"),
    ],
)  # fmt: skip
def test_an_edit_that_cannot_run(folder: Path, old: str, new: str, error: type, says: str) -> None:
    edit(folder, old, new)
    with pytest.raises(error, match=says):
        engine.seal(folder)


def test_an_edit_that_names_another_device(folder: Path) -> None:
    for name in ("small.micro", "large.micro"):
        edit(folder, "reference:0", "reference:7", name)
    with pytest.raises(PlanError, match="no device 'reference:7'"):
        engine.open_plan(engine.seal(folder), pages=2)


# ---- opened ---------------------------------------------------------------------------
def test_closed_twice_and_never_again(plan: Plan) -> None:
    """Weights and cache are freed although the program is still there."""
    opened = engine.open_plan(plan, pages=2)
    opened.call(step(), {"C": 3})
    place = next(iter(opened.residents._kept.values()))[0][1]
    held = weakref.ref(place.buffer)
    del place
    opened.close()
    opened.close()
    gc.collect()
    assert held() is None
    with pytest.raises(RequestError, match="closed"):
        opened.call(step(), {"C": 3})


def test_a_misspelt_symbol_names_the_known_ones(plan: Plan) -> None:
    with engine.open_plan(plan, pages=2) as opened, pytest.raises(RequestError, match=r"no s3\n.*C, H, M, N"):
        opened.call(step(), {"C": 3, "s3": 16})


@pytest.mark.parametrize("pages", [0, -1])
def test_a_cache_needs_pages(plan: Plan, pages: int) -> None:
    with pytest.raises(ProgramError, match=f"opened with {pages} pages"):
        engine.open_plan(plan, pages=pages)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def missing_weights(plan: Plan) -> Plan:
    return replace(plan, weights=WeightIndex((File("/nowhere/w.gguf", 1, ""),), {}))


def unknown_device(plan: Plan) -> Plan:
    variant, *others = plan.variants
    first, *rest = variant.stream.instrs
    stream = replace(variant.stream, instrs=(replace(first, device="zzz:9"), *rest))
    return replace(plan, variants=(replace(variant, stream=stream), *others))


@pytest.mark.parametrize("spoil", [missing_weights, unknown_device])
def test_a_plan_that_cannot_be_opened_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Plan], Plan]
) -> None:
    closed = []
    cpu = make_plan(device="cpu:0", tokens=8)
    real = CpuDevice.close

    def close(device: CpuDevice) -> None:
        closed.append(device)
        real(device)

    monkeypatch.setattr(CpuDevice, "close", close)
    threads, files = threading.active_count(), descriptors()
    with pytest.raises((ModelError, PlanError)) as error:
        engine.open_plan(spoil(cpu), pages=2, threads=2)
    assert error.value.__traceback__ is not None  # which keeps the frames, and so the device, alive
    assert (len(closed), threading.active_count(), descriptors()) == (1, threads, files)


def test_variants_take_turns(plan: Plan) -> None:
    """A long step, then a short one on the same cache: as one step of both."""
    with engine.open_plan(plan, pages=2) as opened:
        whole = opened.call(step(21), {"C": 21})["logits"]
    with engine.open_plan(plan, pages=2) as opened:
        opened.call(step(20), {"C": 20})
        last = step(21)
        last = {n: v[20:] if n in ("ids", "positions", "seq") else v for n, v in last.items()}
        got = opened.call({**last, "rows": [0]}, {"C": 21})["logits"]
        assert len(opened._executors) == 2
    assert np.allclose(got, whole, atol=1e-5)


def test_a_step_that_is_fed_by_the_one_before(plan: Plan) -> None:
    """Where nothing runs ahead, outputs go by way of the host, to another variant, too."""
    fed, alone = {"ids": "tokens"}, step(1, positions=np.array([20], np.int32))
    with engine.open_plan(plan, pages=2) as opened:
        first = opened.begin(step(20), {"C": 20}, ("tokens",))
        assert not first.ahead
        token = first.result()["tokens"]
        want = opened.call({**alone, "ids": token}, {"C": 21})["logits"]
        assert token != alone["ids"]
        kept = opened.begin(step(20), {"C": 20}, ("tokens",))
        got = opened.begin(alone, {"C": 21}, ("logits",), fed).result()["logits"]
        assert (got == want).all() and (kept.result()["tokens"] == token).all()
        with pytest.raises(RequestError, match="fed with tokens of the one before, which isn't there"):
            opened.begin(alone, {"C": 21}, None, fed)
        assert opened.ran.steps == 4
