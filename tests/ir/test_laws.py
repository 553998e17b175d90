"""Each law of each level: a level that keeps it passes, one that breaks exactly it is caught by name."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrt.errors import LawError
from flashrt.ir import micro
from flashrt.ir.laws import LOGICAL, MICRO, PHYSICAL, check, check_variants, violations
from flashrt.ir.order import COMPUTE, HappensBefore, accesses
from flashrt.ir.text import from_text, read_micro
from flashrt.ir.types import TensorType
from tests.ir.streams import streamed

GRAPH = """\
logical tiny
symbol T lo=1 hi=64 hint=4
input x f32[T,32]
input ids i32[T]
weight w f32[32,32] sources=[w]
weight table f32[100,32] sources=[t]
state kv f32[P,32]
%emb = embedding(%ids,@table) f32[T,32]
%sum = add(%emb,%x) f32[T,32]
%lin = linear(%sum,@w) f32[T,32]
%odd = aten.roll(%lin) f32[T,32] reads=[kv] writes=[kv]
output y odd
"""

PLACED = """\
physical tiny
symbol T lo=1 hi=64 hint=4
split s0 positions=[0,16,32,48,64] start=32
input x f32[T,32]
weight w f32[64,32] sources=[w]
state kv f32[P,32]
budget cpu:0 limit=1000 weights=400 state=100 activations=500
budget gpu:0 limit=1000
%up#0 = linear(%x,@w) f32[T,s0] device=gpu:0 of=up shard=[0:s0] est=3us because="fast"
%up#1 = linear(%x,@w) f32[T,64-s0] device=cpu:0 of=up shard=[s0:64] est=4us because="free"
%up#0@cpu:0 = transfer(%up#0) f32[T,s0] device=cpu:0 of=up shard=[0:s0] est=1us because="to the merge"
%up = merge(%up#0@cpu:0,%up#1) f32[T,64] device=cpu:0 of=up est=1us because="joined"
%out = aten.roll(%up) f32[T,64] device=cpu:0 of=out est=1us because="host" reads=[kv]
%more = aten.roll(%out) f32[T,64] device=cpu:0 of=more est=1us because="host" writes=[kv]
output y more
"""

# cpu:0 computes %1, gpu:0 its share of the linear with a block from the ring, cpu:0 the rest.
STREAM = """\
micro tiny
symbol T lo=1 hi=64 hint=4
split s0 positions=[0,16,32,48,64] start=32
input x f32[T,32]
weight w f32[64,32] sources=[w] layout=f32
weight v f32[64,32] sources=[v] layout=f32
weight b f32[64] sources=[b] layout=f32
state kv f32[P,32]
slot %0 cpu:0 f32[T,32] input=x
slot %1 cpu:0 f32[T,32] offset=0
slot %2 gpu:0 f32[T,32] offset=0
slot %3 gpu:0 f32[T,64] offset=8192
slot %4 cpu:0 f32[T,64] offset=8192
slot %5 cpu:0 f32[1,T,64] alias=%4
slot %6 cpu:0 f32[T,64] offset=24576
slot %7 cpu:0 u8[T,72] offset=0
block w gpu:0 lo=0 hi=64 bytes=8192 offset=0
block v gpu:0 lo=0 hi=64 bytes=8192 offset=4096
block w cpu:0 lo=0 hi=64 bytes=8192 home=resident offset=0
block b cpu:0 lo=0 hi=64 bytes=256 home=resident offset=8192
arena cpu:0 bytes=40960
arena gpu:0 bytes=24576
ring gpu:0 bytes=16384
dispatch device=cpu:0 lane=compute signals=!0 kernel=scale args=[%0] dst=%1 attrs={by=2} region=0
prefetch device=gpu:0 lane=copy_in signals=!1 block=w
transfer device=cpu:0 lane=copy_out waits=[!0] signals=!2 src=%1 dst=%2 to=gpu:0
dispatch device=gpu:0 lane=compute waits=[!1,!2] signals=!3 kernel=linear.f32 args=[%2,@w[0:s0]] dst=%3[0:s0]
evict device=gpu:0 lane=copy_in waits=[!3] block=w
prefetch device=gpu:0 lane=copy_in signals=!4 block=v
dispatch device=gpu:0 lane=compute waits=[!4] signals=!5 kernel=linear.f32 args=[%2,@v] dst=%3
evict device=gpu:0 lane=copy_in waits=[!5] block=v
bias device=cpu:0 lane=compute block=@b[s0:64] region=1
dispatch device=cpu:0 lane=compute kernel=linear.f32+bias args=[%1,@w[s0:64]] dst=%4[s0:64] region=1
transfer device=gpu:0 lane=copy_out waits=[!5] signals=!6 src=%3[0:s0] dst=%4[0:s0] to=cpu:0
dispatch device=cpu:0 lane=compute waits=[!6] kernel=silu args=[%5] dst=%6 writes=[kv]
quantize device=cpu:0 lane=compute src=%6 dst=%7 scheme=i8/32
dispatch device=cpu:0 lane=compute signals=!7 kernel=host.attention args=[%6] reads=[kv]
output y %6
"""


def broken(text: str) -> set[str]:
    """The names of the laws that a text breaks."""
    return {v.law for v in violations(from_text(text))}


def edited(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times"
    return text.replace(old, new)


PART = """@b[s0:64] region=1
dispatch device=cpu:0 lane=compute kernel=linear.f32+bias args=[%1,@w[s0:64]] dst=%4[s0:64]"""

LOGICAL_FAULTS = [
    ("bound-once", "%odd = aten", "%lin = aten.abs(%lin) f32[T,32]\n%odd = aten"),
    ("bound-once", "state kv f32[P,32]", "state kv f32[P,32]\nstate kv f32[P,32]"),
    ("bound-once", "output y odd", "output y odd\noutput y lin"),
    ("bound-before-use", "(%emb,%x)", "(%odd,%x)"),
    ("bound-before-use", "(%emb,%x)", "(%gone,%x)"),
    ("declared", "roll(%lin)", "roll(%lin,@gone)"),
    ("declared", "reads=[kv]", "reads=[kv.1]"),
    ("symbols-declared", "%odd = aten.roll(%lin) f32[T,32]", "%odd = aten.roll(%lin) f32[U,32]"),
    ("symbols-declared", "state kv f32[P,32]", "state kv f32[P,Q]"),
    ("symbols-declared", "input ids i32[T]", "input ids i32[T]\ninput more i32[U]"),
    ("outputs-bound", "output y odd", "output y gone"),
    ("ops-known", "aten.roll(%lin)", "roll(%lin)"),
    ("types-follow", "linear(%sum,@w) f32[T,32]", "linear(%sum,@w) f32[T,31]"),
    ("types-follow", "linear(%sum,@w)", "linear(%sum,@table,@w,@w)"),
    ("types-follow", "linear(%sum,@w)", "linear(%sum)"),
    ("types-follow", "add(%emb,%x) f32[T,32]", "slice(%x) f32[T,32]"),
    ("types-follow", "add(%emb,%x) f32[T,32]", "scale(%x) f32[T,32]"),
]
PHYSICAL_FAULTS = [
    ("bound-once", "split s0", "symbol s0 lo=1 hi=2 hint=1\nsplit s0"),
    ("bound-before-use", "roll(%up)", "roll(%more)"),
    ("declared", "writes=[kv]", "writes=[kv.1]"),
    ("symbols-declared", "%more = aten.roll(%out) f32[T,64]", "%more = aten.roll(%out) f32[T,s1]"),
    ("outputs-bound", "output y more", "output y gone"),
    ("decided", "est=4us ", ""),
    ("decided", "of=out ", "of=\"\" "),
    ("decided", 'because="joined"', ""),
    ("transfers-between", "merge(%up#0@cpu:0,", "merge(%up#0,"),
    ("shards-tile", "of=up shard=[s0:64]", "of=up shard=[s0+16:64]"),
    ("shards-tile", "of=up shard=[s0:64]", "of=down shard=[s0:64]"),
    ("shards-tile", "cpu:0,%up#1)", "cpu:0)"),
    ("shards-tile", "of=up shard=[s0:64]", "of=up"),
    ("splits-move", "[0,16,32,48,64]", "[0,32,16,48,64]"),
    ("splits-move", "[0,16,32,48,64]", "[0,16,32,40,64]"),
    ("splits-move", "[0,16,32,48,64]", "[0,16,48,64]"),
    ("within-budget", "activations=500", "activations=501"),
    ("within-budget", "budget gpu:0 limit=1000\n", ""),
    ("states-stay", "state kv f32[P,32]\n", "state kv f32[P,32]\n"
     "%old = aten.zeros() f32[T] device=gpu:0 of=old est=1us because=\"there\" reads=[kv]\n"),
]  # fmt: skip
MICRO_FAULTS = [
    ("declared", "weight b f32[64] sources=[b] layout=f32\n", ""),
    ("declared", "reads=[kv]", "reads=[kv.1]"),
    ("declared", "slot %7 cpu:0 u8[T,72] offset=0\n", ""),
    ("declared", "block b cpu:0 lo=0 hi=64 bytes=256 home=resident offset=8192\n", ""),
    ("declared", "state kv f32[P,32]", "state kv f32[P,32]\nslot %9 cpu:0 u8[U,36]"),
    ("declared", "state kv f32[P,32]", "state kv f32[P,32]\nstate kv f32[P,32]"),
    ("aliases", "slot %7 cpu:0", "slot %8 cpu:0 f32[T,64] alias=%5 offset=0\nslot %7 cpu:0"),
    ("aliases", "slot %7 cpu:0", "slot %8 cpu:0 f32[T,64] alias=%8\nslot %7 cpu:0"),
    ("aliases", "slot %7 cpu:0", "slot %8 cpu:0 f32[T,65] alias=%4\nslot %7 cpu:0"),
    ("aliases", "slot %7 cpu:0", "slot %8 gpu:0 f32[T,64] alias=%4\nslot %7 cpu:0"),
    ("fits", "arena cpu:0 bytes=40960", "arena cpu:0 bytes=40959"),
    ("fits", "ring gpu:0 bytes=16384", "ring gpu:0 bytes=8191"),
    ("fits", "home=resident offset=8192", "home=resident offset=8191"),
    ("planes-known", "signals=!4 block=v", "signals=!4 block=v plane=q4"),
    ("ticks-unique", "signals=!7", "signals=!0"),
    ("waits-known", "src=%6", "waits=[!9] src=%6"),
    ("waits-known", "src=%6", "waits=[!2@-2] src=%6"),
    ("waits-known", "prefetch device=gpu:0 lane=copy_in signals=!1",
     "prefetch device=gpu:0 lane=copy_in waits=[!6] signals=!1"),
    ("on-device", "kernel=host.attention args=[%6]", "kernel=host.attention args=[%6,%3]"),
    ("on-device", "dst=%4[0:s0] to=cpu:0", "dst=%4[0:s0] to=npu:0"),
    ("lent-stays", "args=[%2,@w[0:s0]] dst=%3[0:s0]",
     "args=[%2,@w[0:s0]] dst=%3[0:s0] attrs={lender=\"cpu:0\"}"),
    ("lent-stays", "kernel=linear.f32 args=[%2,@v]", "kernel=linear.f32+lent args=[%2,@v]"),
    ("ranges-within", "kernel=host.attention args=[%6]", "kernel=host.attention args=[%6[0:65]]"),
    ("ranges-within", "kernel=host.attention args=[%6]", "kernel=host.attention args=[%6[s0:16]]"),
    ("ranges-within", "block=@b[s0:64]", "block=@b[s0-16:48]"),
    ("ranges-within", "src=%3[0:s0] dst=%4[0:s0]", "src=%3 dst=%4[0:s0]"),
    ("blocks-fit", "block w cpu:0 lo=0 hi=64", "block w cpu:0 lo=0 hi=65"),
    ("blocks-fit", "bytes=256 home", "bytes=252 home"),
    ("blocks-fit", "sources=[b] layout=f32", "sources=[b] layout=f33"),
    ("blocks-fit", "sources=[b] layout=f32", "sources=[b] layout=q8.16x32"),
    ("operands-fit", "slot %6 cpu:0 f32[T,64]", "slot %6 cpu:0 f32[T,32]"),
    ("operands-fit", "weight v f32[64,32]", "weight v f32[128,16]"),
    ("operands-fit", "block=@b[s0:64]", "block=@b[64:64]"),
    ("operands-fit", "dst=%1 attrs={by=2}", "dst=%1"),
    ("operands-fit", "slot %7 cpu:0 u8[T,72]", "slot %7 cpu:0 u8[T,71]"),
    ("inputs-kept", "kernel=host.attention args=[%6]", "kernel=host.attention args=[%6] dst=%0"),
    ("outputs-written", "output y %6", "output y %9"),
    ("outputs-written", "output y %6", "output y six"),
    ("bias-joins", "bias device=cpu:0 lane=compute block=@b[s0:64] region=1\n", ""),
    ("bias-joins", "kernel=linear.f32+bias", "kernel=linear.f32"),
    ("regions-whole", "kernel=host.attention args=[%6] reads=[kv]",
     "kernel=host.attention args=[%6] reads=[kv] region=2"),
    ("regions-whole", "dst=%6 writes=[kv]", "dst=%6 writes=[kv] region=0"),
    ("regions-whole", "signals=!1 block=w", "signals=!1 block=w region=3"),
    ("written-before-read", PART, PART.replace("s0:64", "64:64")),
    ("alive-apart", "slot %6 cpu:0 f32[T,64] offset=24576", "slot %6 cpu:0 f32[T,64] offset=24000"),
    ("loaded-before-use", "args=[%2,@v] dst=%3", "args=[%2,@w] dst=%3"),
    ("residency-returns", "evict device=gpu:0 lane=copy_in waits=[!5]",
     "prefetch device=gpu:0 lane=copy_in waits=[!5]"),
    ("ordered", "lane=copy_out waits=[!0]", "lane=copy_out"),  # read %1 before it is written
    ("ordered", "waits=[!1,!2]", "waits=[!2]"),  # use w before it is loaded
    ("ordered", "waits=[!1,!2]", "waits=[!1]"),  # use %2 before it arrives
    ("ordered", "lane=copy_in waits=[!3] block=w", "lane=copy_in block=w"),  # evict w while it is used
    ("ordered", "lane=copy_out waits=[!5] signals=!6", "lane=copy_out signals=!6"),
    ("ordered", "waits=[!6] kernel=silu", "kernel=silu"),  # half of %4 hasn't arrived
]  # fmt: skip


def identify(fault: tuple[str, str, str]) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{fault[0]}: {fault[2] or fault[1]}".lower())[:60]


@pytest.mark.parametrize("text", [GRAPH, PLACED, STREAM], ids=["logical", "physical", "micro"])
def test_lawful(text: str) -> None:
    assert violations(from_text(text)) == []
    check(from_text(text))


def test_a_block_that_is_lent_stays() -> None:
    here = "kernel=linear.f32 args=[%2,@w[0:s0]] dst=%3[0:s0]"
    text = edited(STREAM, here, f'{here.replace("f32", "f32+lent")} attrs={{lender="cpu:0"}}')
    assert violations(from_text(text)) == []
    block = "block w cpu:0 lo=0 hi=64 bytes=8192 home="
    assert broken(edited(text, f"{block}resident", f"{block}ring")) >= {"lent-stays", "loaded-before-use"}


@pytest.mark.parametrize("fault", LOGICAL_FAULTS, ids=identify)
def test_logical_fault(fault: tuple[str, str, str]) -> None:
    law, old, new = fault
    assert broken(edited(GRAPH, old, new)) == {law}


@pytest.mark.parametrize("fault", PHYSICAL_FAULTS, ids=identify)
def test_physical_fault(fault: tuple[str, str, str]) -> None:
    law, old, new = fault
    assert broken(edited(PLACED, old, new)) == {law}


@pytest.mark.parametrize("fault", MICRO_FAULTS, ids=identify)
def test_micro_fault(fault: tuple[str, str, str]) -> None:
    law, old, new = fault
    assert broken(edited(STREAM, old, new)) == {law}


def test_error_names_law_place_and_repair() -> None:
    """The message: stage, instruction, law; two lines around the place; the next step."""
    stream = read_micro(edited(STREAM, "waits=[!6] kernel=silu", 'kernel=silu node="layers.0 act"'))
    with pytest.raises(LawError) as caught:
        check(stream, stage="after elide")
    error = caught.value
    assert error.what.startswith("micro stream 'tiny' after elide: dispatch 11 (layers.0 act) reads %4 ")
    assert "transfer 10" in error.what and error.what.endswith("(law ordered)")
    marked = error.lines.splitlines()
    assert len(marked) == 5 and marked[2].startswith("  >   11  dispatch device=cpu:0")
    assert "wait for it" in error.hint


def test_variants_keep_a_state_in_one_place() -> None:
    """Programs that take turns look for the cache on the same device and in the same form."""
    here = read_micro(STREAM)
    check_variants([here, replace(here, name="other")])
    wider = edited(STREAM, "state kv f32[P,32]", "state kv f32[P,64]")
    with pytest.raises(LawError, match=r"state 'kv' is f32\[P,64\] on cpu:0 in 'tiny', f32\[P,32\] on cpu:0"):
        check_variants([here, read_micro(wider)])
    there = replace(here, instrs=tuple(replace(i, device="gpu:0") for i in here.instrs), name="there")
    with pytest.raises(LawError, match=r"on gpu:0 in 'there', .* on cpu:0 in 'tiny'") as caught:
        check_variants([here, there])
    assert "writes=[kv]" in caught.value.lines


ACROSS = """\
micro across
symbol T lo=1 hi=64 hint=4
input x f32[T,32]
weight w f32[32,32] sources=[w] layout=f32
slot %0 cpu:0 f32[T,32] input=x
slot %1 gpu:0 f32[T,32]
slot %2 gpu:0 f32[T,32]
slot %3 cpu:0 f32[T,32]
block w gpu:0 lo=0 hi=32 bytes=4096
transfer device=cpu:0 lane=copy_out waits=[!1@-1] signals=!0 src=%0 dst=%1 to=gpu:0
dispatch device=gpu:0 lane=compute waits=[!0,!3@-1,!4@-1] signals=!1 kernel=linear.f32 args=[%1,@w] dst=%2
evict device=gpu:0 lane=copy_in waits=[!1] block=w
prefetch device=gpu:0 lane=copy_in signals=!3 block=w
transfer device=gpu:0 lane=copy_out waits=[!1] signals=!4 src=%2 dst=%3 to=cpu:0
dispatch device=cpu:0 lane=compute waits=[!4] kernel=relu args=[%3] dst=%4
slot %4 cpu:0 f32[T,32]
output y %4
"""


def test_lawful_across_steps() -> None:
    """The weight is prefetched for the next step; every wait for the step before is needed or harmless."""
    assert violations(read_micro(ACROSS)) == []


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("waits=[!0,!3@-1,!4@-1]", "waits=[!0,!4@-1]", "dispatch 1 reads @w on gpu:0 without waiting"),
        ("waits=[!1] signals=!4", "signals=!4", "reads %2 without waiting for the write by dispatch 1"),
        ("waits=[!1] block=w", "block=w", "evict 2 writes @w on gpu:0 without waiting for the read"),
        ("waits=[!4] kernel=relu", "kernel=relu", "dispatch 5 reads %3 without waiting"),
        ("output y %4", "output y %3", ""),
        ("dispatch device=cpu:0 lane=compute waits=[!4] kernel=relu args=[%3] dst=%4\n", "",
         "transfer 4 writes output %3, and no compute lane waits"),
    ],
)  # fmt: skip
def test_fault_across_steps(old: str, new: str, what: str) -> None:
    text = edited(ACROSS, old, new)
    if "relu" not in text:
        text = text.replace("output y %4", "output y %3")
    found = violations(read_micro(text))
    assert bool(found) == bool(what)
    assert not what or any(what in v.what for v in found if v.law == "ordered")


def test_next_step_overwrites_too_early() -> None:
    """Without an end of step in between, only `!4@-1` keeps %2 until it is copied away."""
    text = ACROSS.replace("src=%0 dst=%1", "src=%1 dst=%5").replace("input=x", "")
    text = re.sub(r"transfer device=cpu:0.*\n", "", text)
    text = text.replace("kernel=linear.f32 args=[%1,@w]", "kernel=fill args=[@w]")
    text = text.replace("waits=[!0,", "waits=[")
    text = text.replace("kernel=relu", "signals=!5 kernel=relu")
    text = text.replace("lane=copy_out waits=[!1]", "lane=copy_out waits=[!1,!5@-1]")
    lawful = text.replace("slot %0 cpu:0 f32[T,32] \n", "")
    assert violations(read_micro(lawful)) == []
    late = violations(read_micro(lawful.replace(",!4@-1", "")))
    assert [v.law for v in late] == ["ordered"]
    assert "by transfer 3 in the step before (write-after-read)" in late[0].what


def test_resident_stays() -> None:
    """A resident block is neither prefetched nor evicted."""
    text = STREAM + "evict device=cpu:0 lane=copy_in block=b\n"
    assert "residency-returns" in broken(text)


def test_input_read_on_copy_lane() -> None:
    """The host rewrites the inputs when the compute lanes are through, whatever copy lanes still do."""
    text = ACROSS + "transfer device=cpu:0 lane=copy_out src=%0 dst=%5 to=gpu:0\nslot %5 gpu:0 f32[T,32]\n"
    found = violations(read_micro(text))
    assert [v.law for v in found] == ["ordered"]
    assert "transfer 6 reads input %0, and no compute lane waits for that" in found[0].what


# ---- happens-before against its definition -----------------------------------------
@st.composite
def tick_streams(draw: st.DrawFn) -> micro.Stream:
    """Streams of dispatches on a few lanes with random waits; some read the one input slot."""
    count = draw(st.integers(1, 12))
    instrs = []
    for i in range(count):
        device, lane = draw(st.sampled_from([("c", COMPUTE), ("c", "copy"), ("g", COMPUTE), ("g", "copy")]))
        step = st.builds(micro.Wait, st.integers(0, i - 1)) if i else st.nothing()
        before = st.builds(micro.Wait, st.integers(0, count - 1), st.just(-1))
        instrs.append(
            micro.Dispatch(
                device=device, lane=lane, signals=i, kernel="k",
                waits=tuple(draw(st.lists(step | before, max_size=2))),
                args=(micro.SlotRef(0),) if draw(st.integers(0, 3)) == 0 else (),
            )
        )  # fmt: skip
    slot = micro.Slot(0, "c", TensorType("f32", (1,)), input="x")
    return micro.Stream("s", (), (), (), (), (), (slot,), (), tuple(instrs), ())


def unrolled(stream: micro.Stream, steps: int) -> nx.DiGraph:
    """The definition: nodes (step, index), index -1 for the host, an edge for everything that orders."""
    graph: nx.DiGraph = nx.DiGraph()
    lanes: dict[tuple[str, str], list[int]] = {}
    for i, instr in enumerate(stream.instrs):
        lanes.setdefault((instr.device, instr.lane), []).append(i)
    for k in range(steps):
        graph.add_edge((k, -1), (k + 1, -1))
        for (_, lane), members in lanes.items():
            nx.add_path(graph, [(k, i) for i in members] + [(k + 1, members[0])])
            if lane == COMPUTE:
                graph.add_edge((k, members[-1]), (k + 1, -1))
        for i, instr in enumerate(stream.instrs):
            graph.add_edges_from(((k + w.step, w.tick), (k, i)) for w in instr.waits)
            if isinstance(instr, micro.Dispatch) and instr.args:
                graph.add_edge((k, -1), (k, i))
    return graph


@given(tick_streams())
def test_before_is_reachability(stream: micro.Stream) -> None:
    """`before` says what paths through the unrolled graph say, for steps 0, 1 and 2 apart."""
    order, graph, start = HappensBefore(stream), unrolled(stream, 5), 2
    for i in range(len(stream.instrs)):
        reached = nx.descendants(graph, (start, i))
        for j in range(len(stream.instrs)):
            for apart in (0, 1, 2):
                assert order.before(i, j, apart) == ((start + apart, j) in reached), (i, j, apart)


# ---- mutations -----------------------------------------------------------------------
@st.composite
def exchanges(draw: st.DrawFn) -> micro.Stream:
    """A valid stream: values travel between two devices, every instruction waits for whoever used its
    slots last (this step or the one before). Slots are few, so they are used again and again."""
    per_device = 2
    slots = tuple(micro.Slot(i, "cg"[i % 2], TensorType("f32", (4,))) for i in range(2 * per_device))
    plan: list[tuple[str, int, int]] = [("start", i, i) for i in range(2 * per_device)]
    for _ in range(draw(st.integers(1, 8))):
        src = draw(st.integers(0, 2 * per_device - 1))
        dst = draw(st.integers(0, 2 * per_device - 1))
        plan.append(("compute" if src % 2 == dst % 2 else "copy", src, dst))
    instrs = [_exchange(i, kind, src, dst, "cg") for i, (kind, src, dst) in enumerate(plan)]
    return micro.Stream("s", (), (), (), (), (), slots, (), tuple(_with_waits(instrs)), ())


def _exchange(i: int, kind: str, src: int, dst: int, devices: str) -> micro.Instr:
    device = devices[src % 2]
    if kind == "copy":
        return micro.Transfer(
            device=device, lane="copy", signals=i, src=micro.SlotRef(src), dst=micro.SlotRef(dst),
            to=devices[dst % 2],
        )  # fmt: skip
    args = () if kind == "start" else (micro.SlotRef(src),)
    return micro.Dispatch(
        device=device, lane=COMPUTE, signals=i, kernel=kind, args=args, dst=micro.SlotRef(dst)
    )


def _with_waits(instrs: list[micro.Instr]) -> list[micro.Instr]:
    """Each instruction waits for every other one whose accesses conflict with its own."""
    touched = [tuple({a.name for a in part} for part in accesses(i)) for i in instrs]
    out = []
    for j, instr in enumerate(instrs):
        waits = []
        for i in range(len(instrs)):
            (r1, w1), (r2, w2) = touched[i], touched[j]
            if (w1 & (r2 | w2)) | (r1 & w2):
                waits.append(micro.Wait(i, 0 if i < j else -1))
        out.append(replace(instr, waits=tuple(w for w in waits if w.tick != j)))
    return out


def _without(stream: micro.Stream, at: int, wait: micro.Wait) -> micro.Stream:
    instr = stream.instrs[at]
    less = replace(instr, waits=tuple(w for w in instr.waits if w != wait))
    return replace(stream, instrs=(*stream.instrs[:at], less, *stream.instrs[at + 1 :]))


@given(exchanges())
@settings(max_examples=60)
def test_every_needed_wait_is_missed(stream: micro.Stream) -> None:
    """A removed wait is caught exactly when nothing else orders the two instructions."""
    assert violations(stream) == []
    for at, instr in enumerate(stream.instrs):
        for wait in instr.waits:
            less = _without(stream, at, wait)
            redundant = HappensBefore(less).before(wait.tick, at, -wait.step)
            found = violations(less)
            assert (found == []) == redundant
            assert {v.law for v in found} <= {"ordered"}


@st.composite
def packed_streams(draw: st.DrawFn) -> micro.Stream:
    """Random dispatches on three lanes that read and write ranges of slots lying across each other."""
    slots = tuple(
        micro.Slot(
            i, "c", TensorType("f32", (1, 4)), offset=draw(st.none() | st.integers(0, 6).map(lambda x: 4 * x))
        )
        for i in range(draw(st.integers(1, 4)))
    )
    cuts = st.sampled_from([(None, None), (0, 2), (2, 4), (1, 3), (0, 4)])
    refs = st.builds(lambda i, cut: micro.SlotRef(i, *cut), st.integers(0, len(slots) - 1), cuts)
    count = draw(st.integers(1, 8))
    ticks = st.integers(0, count - 1)
    instrs = []
    for i in range(count):
        waits = draw(st.lists(st.tuples(ticks, st.sampled_from([0, -1])), max_size=4))
        instrs.append(
            micro.Dispatch(
                device="c", lane=draw(st.sampled_from([COMPUTE, COMPUTE, "copy_in", "copy_out"])), signals=i,
                waits=tuple(micro.Wait(t, s) for t, s in waits if s or t < i), kernel="k",
                args=tuple(draw(st.lists(refs, max_size=2))), dst=draw(st.none() | refs),
            )
        )  # fmt: skip
    return micro.Stream("s", (), (), (), (), (), slots, (), tuple(instrs), ())


def touch(stream: micro.Stream, a: micro.SlotRef, b: micro.SlotRef) -> bool:
    """Whether two references share bytes: channels of one slot, or any bytes of two."""
    one, other = stream.slots[a.slot], stream.slots[b.slot]
    if one is other:
        return max(a.lo or 0, b.lo or 0) < min(a.hi or 4, b.hi or 4)  # type: ignore[type-var, operator]
    return one.offset is not None and other.offset is not None and abs(one.offset - other.offset) < 16


def unordered_pair(stream: micro.Stream) -> bool:
    """The law by its words: some conflicting pair, within a step or one step apart, isn't ordered."""
    order = HappensBefore(stream)
    uses = [
        (i, ref, writes)
        for i, instr in enumerate(stream.instrs)
        if isinstance(instr, micro.Dispatch)
        for ref, writes in [*((a, False) for a in instr.args), (instr.dst, True)]
        if isinstance(ref, micro.SlotRef)
    ]
    return any(
        (w1 or w2) and touch(stream, r1, r2) and not order.before(i, j, steps)
        for i, r1, w1 in uses
        for j, r2, w2 in uses
        for steps in (0, 1)
        if steps or i < j
    )


@given(packed_streams())
@settings(max_examples=300)
def test_ordered_is_every_pair(stream: micro.Stream) -> None:
    """The law's quick scan, which forgets superseded accesses, misses no pair and invents none."""
    found = [v for v in violations(stream) if v.law == "ordered"]
    assert bool(found) == unordered_pair(stream)


def test_empty_levels_are_lawful() -> None:
    for head in ("logical", "physical", "micro"):
        assert violations(from_text(f"{head} nothing")) == []


def test_laws_are_documented() -> None:
    """Names are unique in a level; each law has a statement and a repair."""
    for table in (LOGICAL, PHYSICAL, MICRO):
        names = [law.name for law in table]
        assert len(set(names)) == len(names)
        assert all(law.statement and law.repair for law in table)


# ---- speed ---------------------------------------------------------------------------
def seconds(layers: int) -> float:
    stream = streamed(layers)
    start = time.process_time()
    check(stream)
    return time.process_time() - start


def counting() -> float:
    """Seconds that this machine takes, at this minute, to count: some 0.07."""
    start = time.process_time()
    for _ in range(1_000_000):
        pass
    sum(i * i for i in range(1_000_000))
    return time.process_time() - start


def test_check_is_quick() -> None:
    """1,000 instructions in 0.1 s where counting takes 0.07: the machine's pace doubles at times."""
    assert min(seconds(125) / counting() for _ in range(5)) < 1.5


@pytest.mark.slow
def test_check_of_a_long_stream() -> None:
    """400,000 instructions in a minute."""
    assert seconds(50_000) < 60
