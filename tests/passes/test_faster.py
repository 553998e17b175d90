"""prefetch, overlap, elide, pack and region: one golden text each, and their properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt.errors import PlanError
from flashrt.ir import micro
from flashrt.ir.laws import check, violations
from flashrt.ir.order import loaded_at_start
from flashrt.ir.text import read_micro, to_text
from flashrt.ir.types import evaluate
from flashrt.passes.elide import elide
from flashrt.passes.lower import lower
from flashrt.passes.overlap import overlap
from flashrt.passes.pack import pack
from flashrt.passes.prefetch import prefetch
from flashrt.passes.region import region
from flashrt.passes.ticks import synchronise
from tests.passes.examples import serial, split_mlp

Golden = Callable[[str, str], None]
ROOM = {"cpu:0": 30_000}


def loaded_bytes(stream: micro.Stream) -> int:
    """The most bytes of ring blocks loaded at once, in text order."""
    sizes = {b.name: b.bytes for b in stream.blocks}
    now = peak = 0
    for i in stream.instrs:
        if isinstance(i, micro.Prefetch):
            now += sizes[i.block]
        elif isinstance(i, micro.Evict):
            now -= sizes[i.block]
        peak = max(peak, now)
    return peak


def blocks_ahead(stream: micro.Stream) -> int:
    """How many blocks are loaded, at most, whose first use is still to come."""
    waiting: set[str] = set()
    most = 0
    for i in stream.instrs:
        if isinstance(i, micro.Prefetch):
            waiting.add(i.block)
        elif isinstance(i, micro.Dispatch):
            most = max(most, len(waiting))
            waiting -= {a.block for a in i.args if isinstance(a, micro.BlockRef)}
        elif isinstance(i, micro.Bias):
            waiting.discard(i.block.block)
    return most


# ---- prefetch ----------------------------------------------------------------------
def test_prefetch_golden(golden: Golden) -> None:
    golden("prefetch/two_layers.micro", to_text(prefetch(serial(), window=2)))


@settings(max_examples=30)
@given(st.integers(0, 12), st.integers(10_000, 60_000))
def test_prefetch_only_reorders(window: int, limit: int) -> None:
    """The same instructions; other ones keep their order; window and limit are kept."""
    before = serial()
    after = prefetch(before, window=window, limits={"cpu:0": limit})
    assert sorted(map(repr, after.instrs)) == sorted(map(repr, before.instrs))

    def rest(stream: micro.Stream) -> list[micro.Instr]:
        return [i for i in stream.instrs if not isinstance(i, micro.Prefetch)]

    assert rest(after) == rest(before)
    assert violations(after) == []
    # the blocks of the instruction at hand (a product and its bias) come on top
    assert blocks_ahead(after) <= window + 2
    assert loaded_bytes(after) <= max(limit, loaded_bytes(before))


def test_prefetch_does_not_cross_its_own_evict() -> None:
    """A block that is loaded twice in a step isn't loaded while it is loaded."""
    text = """micro twice
symbol T lo=1 hi=1 hint=1
input x f32[T,32]
weight w f32[32,32] sources=[w] layout=f32
slot %0 d f32[T,32] input=x
slot %1 d f32[T,32]
slot %2 d f32[T,32]
block w d lo=0 hi=32 bytes=4096
prefetch device=d lane=compute block=w bytes=4096
dispatch device=d lane=compute kernel=linear.f32 args=[%0,@w] dst=%1
evict device=d lane=compute block=w
prefetch device=d lane=compute block=w bytes=4096
dispatch device=d lane=compute kernel=linear.f32 args=[%1,@w] dst=%2
evict device=d lane=compute block=w
output y %2
"""
    stream = read_micro(text)
    assert prefetch(stream, window=4) == stream
    assert violations(pack(overlap(stream))) == []


def test_prefetch_as_soon_as_there_is_room() -> None:
    """Behind an eviction, not only where the next block was due."""
    instrs = prefetch(three(), window=4, limits={"d": 8192}).instrs
    moves = [i for i in instrs if isinstance(i, micro.Prefetch | micro.Evict)]
    order = " ".join(f"{'+' if isinstance(i, micro.Prefetch) else '-'}{i.block}" for i in moves)
    assert order == "+a +b -a +c -b -c"
    evicted = next(at for at, i in enumerate(instrs) if isinstance(i, micro.Evict))
    assert isinstance(instrs[evicted + 1], micro.Prefetch)
    later = prefetch(three(lent=False), window=4, limits={"d": 8192}).instrs
    assert isinstance(later[evicted + 1], micro.Dispatch) and later != instrs


@pytest.mark.parametrize("limit", [4096, 8192, 12288])
def test_prefetch_across_steps(limit: int) -> None:
    """What a step needs first is loaded at the end of the one before it, in the same place of the ring."""
    within = prefetch(three(), window=4, limits={"d": limit})
    across = prefetch(three(), window=4, limits={"d": limit}, across=True)
    first = {"a"} if limit == 4096 else {"a", "b"} if limit == 8192 else {"a", "b", "c"}
    assert {name for name, _ in loaded_at_start(across)} == first and not loaded_at_start(within)
    packed = [pack(overlap(stream)) for stream in (within, across)]
    for stream in packed:
        assert violations(stream) == [] and dict(stream.rings)["d"] <= limit
    places = [{b.name: b.offset for b in stream.blocks} for stream in packed]
    assert places[0] == places[1]


def three(*, lent: bool = True) -> micro.Stream:
    """Three products, each of a weight that comes and goes, and something else behind each; weights stay
    elsewhere, too, if they are lent."""
    lines = ["micro three", "symbol T lo=1 hi=1 hint=1", "input x f32[T,32]"]
    lines += [f"weight {w} f32[32,32] sources=[{w}] layout=f32" for w in "abc"]
    lines += ["slot %0 d f32[T,32] input=x", *(f"slot %{n} d f32[T,32]" for n in range(1, 7))]
    lines += [f"block {w} d lo=0 hi=32 bytes=4096" for w in "abc"]
    lines += [f"block {w} lender lo=0 hi=32 bytes=4096 home=resident" for w in ("abc" if lent else "")]
    for n, w in enumerate("abc"):
        lines += [
            f"prefetch device=d lane=compute block={w} bytes=4096",
            f"dispatch device=d lane=compute kernel=linear.f32 args=[%{2 * n},@{w}] dst=%{2 * n + 1}",
            f"evict device=d lane=compute block={w}",
            f"dispatch device=d lane=compute kernel=scale args=[%{2 * n + 1}] dst=%{2 * n + 2} "
            "attrs={by=2.0}",
        ]
    return read_micro("\n".join([*lines, "output y %6", ""]))


# ---- overlap -------------------------------------------------------------------------
def test_overlap_golden(golden: Golden) -> None:
    golden("overlap/two_layers.micro", to_text(overlap(prefetch(serial(), window=2))))


def test_overlap_lets_loading_run_ahead() -> None:
    """Loads wait for nothing of the step but the evictions before them in their lane."""
    stream = overlap(prefetch(serial(), window=2))
    check(stream)
    assert {i.lane for i in stream.instrs if isinstance(i, micro.Prefetch | micro.Evict)} == {"copy_in"}
    assert all(not i.waits for i in stream.instrs if isinstance(i, micro.Prefetch))
    assert all(len(i.waits) == 1 for i in stream.instrs if isinstance(i, micro.Evict))


# ---- ticks ---------------------------------------------------------------------------
@pytest.mark.parametrize("drop", range(24))
def test_every_minimal_wait_is_needed(drop: int) -> None:
    """Leaving any one wait of a minimal stream out breaks the order."""
    stream = synchronise(overlap(lower(split_mlp())), minimal=True)
    check(stream)
    waits = [(n, w) for n, i in enumerate(stream.instrs) for w in i.waits]
    at, wait = waits[drop * len(waits) // 24]
    instrs = list(stream.instrs)
    instrs[at] = replace(instrs[at], waits=tuple(w for w in instrs[at].waits if w != wait))
    assert {v.law for v in violations(replace(stream, instrs=tuple(instrs)))} == {"ordered"}


def test_ticks_of_the_step_before() -> None:
    """A lane that overwrites what a copy of the previous step may still read waits for it."""
    text = """micro carried
symbol T lo=1 hi=4 hint=1
input x f32[T,8]
slot %0 a f32[T,8] input=x
slot %1 a f32[T,8]
slot %2 b f32[T,8]
slot %3 b f32[T,8]
dispatch device=a lane=compute kernel=scale args=[%0] dst=%1 attrs={by=2.0}
transfer device=a lane=copy_out src=%1 dst=%2 to=b
dispatch device=b lane=compute kernel=scale args=[%2] dst=%3 attrs={by=2.0}
output y %3
"""
    scale, copy, use = synchronise(read_micro(text)).instrs
    assert scale.waits == (micro.Wait(1, -1),)
    assert copy.waits == (micro.Wait(0), micro.Wait(2, -1))
    assert use.waits == (micro.Wait(1),)


def test_split_ranges_of_different_steps_may_meet() -> None:
    """[0:s] of one step and [s:8] of the next overlap when s moved, though not within a step."""
    text = """micro moved
symbol T lo=1 hi=4 hint=1
split s positions=[2,4,6] start=4
input x f32[T,8]
slot %0 a f32[T,8] input=x
slot %1 b f32[T,8] input=x
slot %2 a f32[T,8]
slot %3 b f32[T,8]
dispatch device=a lane=compute kernel=scale args=[%0[0:s]] dst=%2[0:s] attrs={by=2.0}
dispatch device=b lane=compute kernel=scale args=[%1[s:8]] dst=%3[s:8] attrs={by=2.0}
transfer device=b lane=copy_out src=%3[s:8] dst=%2[s:8] to=a
output y %2
"""
    first, _, copy = synchronise(read_micro(text)).instrs
    assert first.waits == (micro.Wait(copy.signals or 0, -1),)
    assert all(w.step == -1 or w.tick != first.signals for w in copy.waits)


# ---- elide ---------------------------------------------------------------------------
def test_elide_golden(golden: Golden) -> None:
    golden(
        "elide/two_layers.micro", to_text(elide(overlap(prefetch(serial(), window=2)), resident_bytes=ROOM))
    )


def test_elide_keeps_everything_that_fits() -> None:
    stream = elide(overlap(serial()), resident_bytes={"cpu:0": 1 << 20})
    check(stream)
    assert all(b.home == "resident" for b in stream.blocks)
    assert not any(i.waits or i.signals is not None for i in stream.instrs)
    kernels = {i.kernel for i in stream.instrs if isinstance(i, micro.Dispatch)}
    assert not kernels & {"view", "slice"}


@settings(max_examples=30)
@given(st.integers(16_000, 60_000), st.integers(0, 6), st.booleans(), st.booleans())
def test_elide_stays_within_its_room(room: int, window: int, beside: bool, packed: bool) -> None:
    """Resident and ring bytes together never exceed the room, whether packed before or after."""
    stream = prefetch(serial(), window=window, limits={"cpu:0": room})
    stream = overlap(stream) if beside else stream
    stream = elide(pack(stream) if packed else stream, resident_bytes={"cpu:0": room})
    stream = stream if packed else pack(stream)
    assert violations(stream) == []
    resident = sum(b.bytes for b in stream.blocks if b.home == "resident")
    assert resident + dict(stream.rings).get("cpu:0", 0) <= room


def test_elide_keeps_slices_for_those_who_need_them_dense() -> None:
    """A host row, a view and the caller get a dense copy; a named operation a channel range."""
    text = """micro dense
symbol T lo=1 hi=4 hint=1
input x f32[T,8]
slot %0 d f32[T,8] input=x
slot %1 d f32[T,8]
slot %2 d f32[T,4]
slot %3 d f32[T,4]
slot %4 d f32[T,2]
slot %5 d f32[T,2]
slot %6 d f32[T,4]
slot %7 d f32[T,2]
dispatch device=d lane=compute kernel=scale args=[%0] dst=%1 attrs={by=2.0}
dispatch device=d lane=compute kernel=slice args=[%1] dst=%2 attrs={hi=4,lo=0}
dispatch device=d lane=compute kernel=slice args=[%1] dst=%3 attrs={hi=8,lo=4}
dispatch device=d lane=compute kernel=slice args=[%3] dst=%4 attrs={hi=4,lo=2}
dispatch device=d lane=compute kernel=scale args=[%4] dst=%5 attrs={by=2.0}
dispatch device=d lane=compute kernel=host.aten.erf args=[%2] dst=%6
dispatch device=d lane=compute kernel=slice args=[%1] dst=%7 attrs={hi=2,lo=0}
output y %5
output z %6
output w %7
"""
    stream = elide(read_micro(text), resident_bytes={})
    check(stream)
    got = [(i.kernel, i.args) for i in stream.instrs if isinstance(i, micro.Dispatch)]
    assert got == [
        ("scale", (micro.SlotRef(0),)),
        ("slice", (micro.SlotRef(1),)),
        ("scale", (micro.SlotRef(1, 6, 8),)),
        ("host.aten.erf", (micro.SlotRef(2),)),
        ("slice", (micro.SlotRef(1),)),
    ]


def test_elide_is_idempotent() -> None:
    once = elide(overlap(prefetch(serial())), resident_bytes=ROOM)
    assert elide(once, resident_bytes=ROOM) == once


# ---- pack ----------------------------------------------------------------------------
def test_pack_golden(golden: Golden) -> None:
    stream = pack(elide(overlap(prefetch(serial(), window=2)), resident_bytes=ROOM))
    golden("pack/two_layers.micro", to_text(stream))


def test_pack_reuses_memory() -> None:
    stream = elide(serial(), resident_bytes={"cpu:0": 1 << 20})
    slots = pack(stream)
    apart = sum(int(evaluate(s.type.bytes, {"T": 8, "N": 4})) for s in slots.slots if s.offset is not None)
    assert dict(slots.arenas)["cpu:0"] * 2 < apart
    assert all(s.offset is None for s in slots.slots if s.input or s.alias is not None)
    assert all(s.offset % 64 == 0 for s in slots.slots if s.offset is not None)


@st.composite
def chains(draw: st.DrawFn) -> micro.Stream:
    """Random programs over two devices: each instruction reads earlier values, some values travel."""
    count = draw(st.integers(2, 14))
    lines, slots = [], ["slot %0 d0 f32[T,8] input=x", "slot %1 d1 f32[T,8] input=x"]
    where: dict[int, str] = {0: "d0", 1: "d1"}
    for _ in range(count):
        new = len(where)
        device = draw(st.sampled_from(["d0", "d1"]))
        own = [s for s, d in where.items() if d == device]
        made = [s for s in own if s > 1]
        travels: bool = draw(st.booleans())
        if made and travels:
            src, other = draw(st.sampled_from(made)), "d1" if device == "d0" else "d0"
            lines.append(f"transfer device={device} lane=copy_out src=%{src} dst=%{new} to={other}")
            where[new] = other
        else:
            args = draw(st.lists(st.sampled_from(own), min_size=1, max_size=2))
            refs = ",".join(f"%{a}" for a in args)
            kernel = "scale" if len(args) == 1 else "add"
            more = " attrs={by=2.0}" if kernel == "scale" else ""
            lines.append(
                f"dispatch device={device} lane=compute kernel={kernel} args=[{refs}] dst=%{new}{more}"
            )
            where[new] = device
        slots.append(f"slot %{new} {where[new]} f32[T,8]")
    last = len(where)
    # every device ends with an output of what it was sent, so that a compute lane waits for the copies
    ends = []
    for device in ("d0", "d1"):
        refs = ",".join(f"%{s}" for s, d in where.items() if d == device)
        lines.append(f"dispatch device={device} lane=compute kernel=host.sum args=[{refs}] dst=%{last}")
        slots.append(f"slot %{last} {device} f32[T,8]")
        ends.append(f"output {device} %{last}")
        last += 1
    head = ["micro chain", "symbol T lo=1 hi=7 hint=1", "input x f32[T,8]"]
    return synchronise(
        read_micro("\n".join([*head, *slots, *lines, *ends]) + "\n"), minimal=draw(st.booleans())
    )


@settings(max_examples=60)
@given(chains())
def test_pack_shares_only_what_is_over(stream: micro.Stream) -> None:
    """Whatever the program: no slot is overwritten while it is alive, in any order the ticks allow."""
    assert violations(stream) == []
    got = pack(stream)
    assert violations(got) == []
    assert [replace(s, offset=None) for s in got.slots] == list(stream.slots)
    assert got.instrs == stream.instrs


@settings(max_examples=60)
@given(chains())
def test_pack_needs_no_more_than_separate_slots(stream: micro.Stream) -> None:
    got = pack(stream)
    for device, size in got.arenas:
        assert size <= 256 * sum(s.device == device and not s.input for s in stream.slots)


def test_pack_wants_bounded_sizes() -> None:
    text = """micro unbounded
symbol T lo=1 hi=4 hint=1
input x f32[T,8]
slot %0 d f32[T,8] input=x
slot %1 d f32[Q,8]
dispatch device=d lane=compute kernel=scale args=[%0] dst=%1 attrs={by=2.0}
output y %1
"""
    with pytest.raises(PlanError, match=r"slot %1 has no largest size: f32\[Q,8\]"):
        pack(read_micro(text))


# ---- region --------------------------------------------------------------------------
def test_region_golden(golden: Golden) -> None:
    """Two devices: a host row ends the cpu's region, waits and copies in other lanes don't."""
    stream = region(pack(elide(overlap(lower(split_mlp())), resident_bytes={"gpu:0": 4_000, "cpu:0": 9_000})))
    check(stream)
    golden("region/split_mlp.micro", to_text(stream))


def regions(stream: micro.Stream) -> Mapping[int, set[tuple[str, str]]]:
    found: dict[int, set[tuple[str, str]]] = {}
    for i in stream.instrs:
        if i.region is not None:
            found.setdefault(i.region, set()).add((i.device, i.lane))
    return found


def test_region_splits_at_loads_of_the_lane() -> None:
    """Without overlap every load cuts the compute lane; with it the step is one region."""
    assert len(regions(region(serial()))) > 10
    assert len(regions(region(overlap(serial())))) == 1
