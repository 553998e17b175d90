"""The cache moves between open programs; what lies in one memory isn't there twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashrt.backend import U8, Place
from flashrt.backends.reference import ReferenceBackend
from flashrt.backends.reference.device import ReferenceDevice
from flashrt.compiler import CompileOptions, compile_model
from flashrt.errors import DeviceError
from flashrt.ir import micro
from flashrt.ir.types import DTYPES
from flashrt.machine import Device, Machine, Measured
from flashrt.program import Plan, Program
from flashrt.runtime import swap
from flashrt.runtime.swap import Elder
from tests.tiny import ArraySource, tiny_graph, tiny_import, tiny_source

BACKEND = ReferenceBackend()
PAGES = 6


def plan(device: str = "reference:0", pool: str = "host") -> Plan:
    some = Measured(1e10, "assumed")
    spec = Device(
        device, "reference", "numpy", 1 << 30, some, {"f32": some}, some, kernels=BACKEND.kernels(), pool=pool
    )
    return compile_model(tiny_import(), Machine((spec,)), CompileOptions(tokens=16))


class Opaque:
    """A buffer that the host doesn't see."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Far(ReferenceDevice):
    """A device with memory that only its own `read` and `write` reach."""

    lost = False
    held = 0

    def pinned(self, nbytes: int) -> U8:
        return self.reserve(nbytes)

    def lock(self, memory: U8) -> bool:
        return False

    def gather(self, pieces: Sequence[Place], dst: Place) -> None:
        raise NotImplementedError

    def read(self, src: Place, out: U8) -> None:
        if self.lost:
            raise DeviceError("lost")
        out[:] = src.buffer.inside[src.offset : src.offset + len(out)]

    def write(self, data: Any, dst: Place) -> None:
        super().write(data, replace(dst, buffer=dst.buffer.inside))


def opened(made: Plan, *, remote: bool = False, pages: int = PAGES, elder: Program | None = None) -> Program:
    (spec,) = made.machine.devices
    device = Far(spec) if remote else BACKEND.open(spec)
    program = Program(
        made,
        {spec.id: device},
        BACKEND.open(replace(spec, id="host")),
        pages=pages,
        source=tiny_source(tiny_graph()),
    )
    if elder is not None:
        Elder.of(elder).left_to(program)
    program.open()
    for key, place in list(program.residents.states.items()) if remote else ():
        program.residents._states[key] = replace(place, buffer=Opaque(place.buffer))
    return program


def reads(program: Program) -> list[Any]:
    source = program.residents.source
    inner = getattr(source, "_source", source)
    assert isinstance(inner, ArraySource)
    return inner.reads


def fill(program: Program, seed: int = 0) -> swap.Contents:
    """Random pages everywhere."""
    rng, pages = np.random.default_rng(seed), list(range(program.pages))
    contents = {
        name: rng.integers(0, 256, (len(pages), swap.page_bytes(s)), np.uint8)
        for name, s in swap.states_of(program).items()
    }
    assert swap.write(program, pages, contents, swap.states_of(program).values())
    return contents


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("here", [False, True])
def test_pages_arrive_where_they_are_sent(here: bool, there: bool) -> None:
    """From and to memory that the host sees, and that it doesn't."""
    old, new = opened(plan(), remote=here), opened(plan("reference:1", ""), remote=there, pages=9)
    want = fill(old)
    moved = {5: 0, 1: 8, 2: 2}
    contents = swap.read(old, list(moved))
    assert contents is not None
    assert swap.write(new, list(moved.values()), contents, swap.states_of(old).values())
    found = swap.read(new, range(9))
    assert found is not None and len(found) == 2
    for name, data in want.items():
        for a, b in moved.items():
            assert (found[name][b] == data[a]).all()
        untouched = sorted(set(range(9)) - set(moved.values()))
        assert not found[name][untouched].any()


def test_of_a_device_that_is_lost_only_the_host_s_memory_is_read() -> None:
    assert swap.read(opened(plan()), [0], {"reference:0"}) is not None
    assert swap.read(opened(plan(pool="")), [0], {"reference:0"}) is None
    remote = opened(plan(), remote=True)
    remote.devices["reference:0"].lost = True  # type: ignore[attr-defined]
    assert swap.read(remote, [0]) is None


def test_a_cache_of_another_form_is_not_written() -> None:
    old, new = opened(plan()), opened(plan("reference:1"))
    fill(old)
    contents = swap.read(old, [0, 1])
    assert contents is not None
    wider = [replace(s, type=replace(s.type, dtype="f64")) for s in swap.states_of(old).values()]
    assert "f64" in DTYPES and not swap.write(new, [0, 1], contents, wider)
    assert not swap.write(new, [0, 1], {"kv.0": contents["kv.0"]}, swap.states_of(old).values())
    left = swap.read(new, range(PAGES))
    assert left is not None and not any(data.any() for data in left.values())


# ---- shared ----------------------------------------------------------------------------
def test_one_memory_has_one_copy() -> None:
    """Another device of the pool has the weights and the cache of the first, which may close."""
    old = opened(plan())
    want = fill(old)
    new = opened(plan("reference:1"), elder=old)
    assert Elder.of(old).same(new) and reads(new) == []
    held = {owner: n for (_, owner), n in old.residents.held.items()}
    assert {owner: n for (_, owner), n in new.residents.held.items()}["cache"] == held["cache"]
    old.close()
    found = swap.read(new, range(PAGES))
    assert found is not None and all((found[name] == data).all() for name, data in want.items())


def test_other_memories_are_filled() -> None:
    old = opened(plan())
    new = opened(plan("reference:1", pool=""), elder=old)
    assert not Elder.of(old).same(new) and len(reads(new)) == len(reads(old))


def test_what_the_host_does_not_see_is_not_taken_over() -> None:
    old = opened(plan(), remote=True)
    new = opened(plan("reference:1"), elder=old)
    assert not Elder.of(old).same(new) and reads(new) == []


def test_a_cache_of_another_size_is_its_own() -> None:
    old = opened(plan())
    new = opened(plan("reference:1"), elder=old, pages=PAGES - 1)
    assert not Elder.of(old).same(new) and reads(new) == []


def test_little_of_what_there_is_isn_t_taken_over() -> None:
    """The rest would stay in memory with it."""
    old = opened(plan())
    made = plan("reference:1")

    def streamed(stream: micro.Stream) -> micro.Stream:
        some = ("layers.0", "embed")
        blocks = (
            replace(b, home="ring", offset=None) if any(x in b.name for x in some) else b
            for b in stream.blocks
        )
        return replace(stream, blocks=tuple(blocks))

    few = tuple(replace(v, stream=streamed(v.stream)) for v in made.variants)
    new = opened(replace(made, variants=few), elder=old)
    assert reads(new)
