"""The laws of the micro-instruction stream.

Each takes the stream with its memory map, which all of them share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from flashrt.ir import micro
from flashrt.ir.bounds import Bounds, Span
from flashrt.ir.contents import alive_apart, loaded_before_use, residency_returns, written_before_read
from flashrt.ir.law import Law, Violation
from flashrt.ir.memory import Hazard, MemoryMap, hazards, memory_name, named, output_slots, owner_of
from flashrt.ir.operands import blocks_fit, operands_fit
from flashrt.ir.order import COMPUTE, Access
from flashrt.ir.types import Dim, show, symbols_of

Lane = tuple[str, str]  # device, lane


# ---- declarations ----------------------------------------------------------------
def declared(memory: MemoryMap) -> Iterator[Violation]:
    """Slots, blocks, weights, states, inputs and symbols are declared, once each."""
    yield from _declared_twice(memory.stream)
    yield from _parts_declared(memory.stream)
    states = {s.name for s in memory.stream.states}
    owners = {("block", b.device, b.name) for b in memory.stream.blocks}
    for at, (reads, writes) in enumerate(memory.accesses):
        for access in (*reads, *writes):
            match access.kind:
                case "slot":
                    known = access.name in memory.slots
                case "block":
                    known = owner_of(access) in owners
                case _:
                    known = access.name in states
            if not known:
                what = f"uses {memory_name(owner_of(access))}, which isn't declared"
                yield Violation(f"{named(memory.stream, at)} {what}", at)


def _declared_twice(stream: micro.Stream) -> Iterator[Violation]:
    names = {
        "slot": [f"%{s.id}" for s in stream.slots],
        "block": [f"{b.name} on {b.device}" for b in stream.blocks],
        "symbol": [s.name for s in stream.symbols] + [s.name for s in stream.splits],
        "weight": [w.name for w in stream.weights],
        "state": [s.name for s in stream.states],
        "input": [i.name for i in stream.inputs],
        "output": [o.name for o in stream.outputs],
    }
    for kind, found in names.items():
        for name, count in Counter(found).items():
            if count > 1:
                yield Violation(f"{kind} {name} is declared {count} times")


def _parts_declared(stream: micro.Stream) -> Iterator[Violation]:
    weights, inputs = {w.name for w in stream.weights}, {i.name for i in stream.inputs}
    symbols = {s.name for s in stream.symbols} | {s.name for s in stream.splits}
    for block in stream.blocks:
        if block.name not in weights:
            yield Violation(f"block {block.name} on {block.device} is of no declared weight")
    for slot in stream.slots:
        unknown = frozenset[str]().union(*map(symbols_of, slot.type.shape)) - symbols
        if unknown:
            yield Violation(f"the type of %{slot.id} has undeclared symbols: {', '.join(sorted(unknown))}")
        if slot.input and slot.input not in inputs:
            yield Violation(f"%{slot.id} holds input {slot.input!r}, which isn't declared")


def aliases(memory: MemoryMap) -> Iterator[Violation]:
    """An alias is of a slot of the same device, is no larger than it, and has no place of its own."""
    for slot in memory.stream.slots:
        target = memory.slots.get(-1 if slot.alias is None else slot.alias)
        if slot.alias is None:
            continue
        if target is None:
            yield Violation(f"%{slot.id} is an alias of %{slot.alias}, which isn't declared")
        elif memory.slots[memory.roots[slot.id]].alias is not None:
            yield Violation(f"%{slot.id} is an alias that owns no memory in the end")
        elif target.device != slot.device:
            yield Violation(f"%{slot.id} on {slot.device} is an alias of %{target.id} on {target.device}")
        elif slot.offset is not None or slot.input:
            yield Violation(f"%{slot.id} is an alias and has an offset or input of its own")
        elif not memory.bounds.at_most(slot.type.bytes, target.type.bytes):
            yield Violation(f"%{slot.id} {slot.type} is larger than the %{target.id} {target.type} it shares")


def fits(memory: MemoryMap) -> Iterator[Violation]:
    """What `pack` has placed lies within the device's arena or ring; resident blocks don't overlap."""
    arenas, rings = dict(memory.stream.arenas), dict(memory.stream.rings)
    for slot in memory.stream.slots:
        if slot.offset is not None and slot.device in arenas:
            end, limit = slot.offset + memory.extent(slot), arenas[slot.device]
            if end > limit:
                yield Violation(f"%{slot.id} ends at byte {end}, the arena of {slot.device} has {limit}")
    for block in memory.stream.blocks:
        if block.offset is not None and block.home == "ring" and block.device in rings:
            end, limit = block.offset + block.bytes, rings[block.device]
            if end > limit:
                yield Violation(f"@{block.name} ends at byte {end}, the ring of {block.device} has {limit}")
    yield from _resident_overlaps(memory)


def _resident_overlaps(memory: MemoryMap) -> Iterator[Violation]:
    taken: dict[int, str] = {}
    for block in memory.stream.blocks:
        if block.home != "resident" or block.offset is None:
            continue
        pieces = memory.pieces(("block", block.device, block.name))
        others = [taken[p] for p in pieces if p in taken]
        if others:
            yield Violation(f"resident blocks @{others[0]} and @{block.name} overlap on {block.device}")
        taken |= dict.fromkeys(pieces, block.name)


def planes_known(memory: MemoryMap) -> Iterator[Violation]:
    """A prefetch loads the whole block: no packed layout has planes that could be loaded one by one."""
    for at, instr in enumerate(memory.stream.instrs):
        if isinstance(instr, micro.Prefetch) and instr.plane:
            what = f"loads plane {instr.plane!r} of @{instr.block}, whose layout has no planes"
            yield Violation(f"{named(memory.stream, at)} {what}", at)


# ---- ticks -----------------------------------------------------------------------
def ticks_unique(memory: MemoryMap) -> Iterator[Violation]:
    """A tick is signalled by one instruction."""
    seen: dict[int, int] = {}
    for at, instr in enumerate(memory.stream.instrs):
        if instr.signals is not None:
            first = seen.setdefault(instr.signals, at)
            if first != at:
                what = f"signals !{instr.signals}, as {named(memory.stream, first)} does"
                yield Violation(f"{named(memory.stream, at)} {what}", at)


def waits_known(memory: MemoryMap) -> Iterator[Violation]:
    """A wait names a tick signalled earlier in the text, or any tick of the step before (`!3@-1`):
    lane order and ticks have no cycle, since the text is an order in which all can run."""
    stream = memory.stream
    every = {i.signals for i in stream.instrs}
    earlier: set[int | None] = set()
    for at, instr in enumerate(stream.instrs):
        for wait in instr.waits:
            if wait.step not in (0, -1):
                yield Violation(f"{named(stream, at)} waits for step {wait.step}; known: 0 and -1", at)
            elif wait.tick not in every:
                yield Violation(f"{named(stream, at)} waits for !{wait.tick}, which nothing signals", at)
            elif wait.step == 0 and wait.tick not in earlier:
                yield Violation(f"{named(stream, at)} waits for !{wait.tick}, signalled only later", at)
        earlier.add(instr.signals)


# ---- operands --------------------------------------------------------------------
def on_device(memory: MemoryMap) -> Iterator[Violation]:
    """An instruction's slots are on its device, a transfer's destination on the device it goes `to`."""
    for at, (reads, writes) in enumerate(memory.accesses):
        for access in (*reads, *writes):
            slot = memory.slots.get(int(access.name)) if access.kind == "slot" else None
            if slot is not None and slot.device != access.device:
                what = f"uses %{access.name} on {access.device}; it is on {slot.device}"
                yield Violation(f"{named(memory.stream, at)} {what}", at)


def lent_stays(memory: MemoryMap) -> Iterator[Violation]:
    """A block that is read where another device keeps it is resident there; the kernel says `+lent`."""
    resident = {(b.name, b.device) for b in memory.stream.blocks if b.home == "resident"}
    for at, instr in enumerate(memory.stream.instrs):
        if not isinstance(instr, micro.Dispatch):
            continue
        lent = instr.keeper != instr.device
        if lent != ("lent" in instr.kernel.split("+")[1:]):
            yield Violation(f"{named(memory.stream, at)} runs {instr.kernel} on blocks of {instr.keeper}", at)
        for arg in instr.args if lent else ():
            if isinstance(arg, micro.BlockRef) and (arg.block, instr.keeper) not in resident:
                what = f"reads @{arg.block} on {instr.keeper}, where it isn't resident"
                yield Violation(f"{named(memory.stream, at)} {what}", at)


def copies_floats(memory: MemoryMap) -> Iterator[Violation]:
    """A transfer in the lane "compute" copies f32: its device's kernels do it."""
    for at, instr in enumerate(memory.stream.instrs):
        if isinstance(instr, micro.Transfer) and instr.lane == COMPUTE:
            slot = memory.slots.get(instr.src.slot)
            if slot is not None and slot.type.dtype != "f32":
                yield Violation(f"{named(memory.stream, at)} copies {slot.type} in the lane compute", at)


def ranges_within(memory: MemoryMap) -> Iterator[Violation]:
    """Channel ranges lie within their slot, row ranges within what the device keeps of the block;
    a transfer's two ranges have the same width."""
    blocks = {(b.name, b.device): b for b in memory.stream.blocks}
    for at, (reads, writes) in enumerate(memory.accesses):
        for access in (*reads, *writes):
            if access.lo is None and access.hi is None:
                continue
            fault = _range_fault(access, _limits(access, memory.slots, blocks), memory.bounds)
            if fault:
                yield Violation(f"{named(memory.stream, at)}: {fault}", at)
        instr = memory.stream.instrs[at]
        if isinstance(instr, micro.Transfer) and _width(instr.src, memory) != _width(instr.dst, memory):
            yield Violation(f"{named(memory.stream, at)} copies between ranges of different widths", at)


def _limits(
    access: Access, slots: Mapping[int, micro.Slot], blocks: Mapping[tuple[str, str], micro.Block]
) -> Span | None:
    if access.kind == "slot":
        slot = slots.get(int(access.name))
        return None if slot is None else (0, slot.type.shape[-1] if slot.type.shape else 1)
    block = blocks.get((str(access.name), access.device))
    return None if block is None else (block.lo, block.hi)


def _range_fault(access: Access, limits: Span | None, known: Bounds) -> str:
    if access.lo is None or access.hi is None:
        return "a range has only one end"
    text = f"{'%' if access.kind == 'slot' else '@'}{access.name}[{show(access.lo)}:{show(access.hi)}]"
    if not known.at_most(access.lo, access.hi):
        return f"{text} may end before it starts"
    if limits is not None and not known.within((access.lo, access.hi), limits):
        return f"{text} isn't within [{show(limits[0])}:{show(limits[1])}]"
    return ""


def _width(ref: micro.SlotRef, memory: MemoryMap) -> Dim | None:
    if ref.lo is not None and ref.hi is not None:
        return ref.hi - ref.lo
    slot = memory.slots.get(ref.slot)
    return slot.type.shape[-1] if slot and slot.type.shape else None


def inputs_kept(memory: MemoryMap) -> Iterator[Violation]:
    """An input slot is never written: it lies in the step block, which the host fills."""
    for at, (_, writes) in enumerate(memory.accesses):
        for access in writes:
            if access.kind == "slot" and access.name in memory.inputs:
                yield Violation(f"{named(memory.stream, at)} writes input slot %{access.name}", at)


def outputs_written(memory: MemoryMap) -> Iterator[Violation]:
    """Every output is a slot that is written, or an input."""
    written = {memory.roots.get(int(a.name)) for _, ws in memory.accesses for a in ws if a.kind == "slot"}
    found = set(output_slots(memory.stream)) & set(memory.slots)
    for output in memory.stream.outputs:
        slot = next((s for s in found if output.value == f"%{s}"), None)
        if slot is None:
            yield Violation(f"output {output.name!r} is {output.value!r}, which is no slot")
        elif memory.roots[slot] not in written and slot not in memory.inputs:
            yield Violation(f"output {output.name!r} is %{slot}, which nothing writes")


# ---- lanes -----------------------------------------------------------------------
def bias_joins(memory: MemoryMap) -> Iterator[Violation]:
    """A `bias` stands directly before the dispatch of its lane whose kernel has the epilogue `+bias`,
    and every such dispatch has one."""
    stream = memory.stream
    pending: dict[Lane, int] = {}
    alone: list[int] = []
    for at, instr in enumerate(stream.instrs):
        bias = pending.pop((instr.device, instr.lane), None)
        takes = isinstance(instr, micro.Dispatch) and "bias" in instr.kernel.split("+")[1:]
        if bias is not None and not takes:
            alone.append(bias)
        if bias is None and takes:
            yield Violation(f"{named(stream, at)} has the epilogue +bias and no bias before it", at)
        if isinstance(instr, micro.Bias):
            pending[instr.device, instr.lane] = at
    for at in (*alone, *pending.values()):
        yield Violation(f"{named(stream, at)} doesn't stand before a dispatch with +bias", at)


def regions_whole(memory: MemoryMap) -> Iterator[Violation]:
    """A region is consecutive in its lane and holds only dispatch, quantize, bias and, in the lane "compute",
    transfers; no `host.` kernel."""
    current: dict[Lane, int | None] = {}
    ended: set[tuple[Lane, int | None]] = set()
    for at, instr in enumerate(memory.stream.instrs):
        lane, region = (instr.device, instr.lane), instr.region
        last = current.get(lane)
        if last != region:
            ended.add((lane, last))
        current[lane] = region
        if region is not None:
            for fault in _region_faults(instr, region, (lane, region) in ended):
                yield Violation(f"{named(memory.stream, at)} {fault}", at)


def _region_faults(instr: micro.Instr, region: int, ended: bool) -> Iterator[str]:
    if ended:
        yield f"goes on with region {region}, which had ended"
    elif isinstance(instr, micro.Transfer) and instr.lane == COMPUTE:
        return
    if not isinstance(instr, micro.Dispatch | micro.Quantize | micro.Bias):
        yield f"can't be part of region {region}"
    elif isinstance(instr, micro.Dispatch) and instr.kernel.startswith("host."):
        yield f"runs {instr.kernel}, so it can't be part of region {region}"


# ---- order -----------------------------------------------------------------------
def ordered(memory: MemoryMap) -> Iterator[Violation]:
    """Lane order and ticks order every read after the write it needs, and every write after the reads
    and writes it replaces: on slots (by bytes), states and blocks, within a step and from one step to
    the next. Steps follow each other without a join; only the host writes the inputs when all
    compute lanes have ended the step before, and reads the outputs when they have ended this one."""
    host = len(memory.stream.instrs)
    for hazard in hazards(memory):
        at = hazard.first if hazard.second == host else hazard.second
        yield Violation(_sentence(memory.stream, hazard, host), at)


_VERBS = {
    "read-after-write": ("reads", "write"),
    "write-after-read": ("writes", "read"),
    "write-after-write": ("writes", "write"),
}


def _sentence(stream: micro.Stream, hazard: Hazard, host: int) -> str:
    what = memory_name(hazard.owner)
    if hazard.second == host:
        verb = "reads input" if hazard.kind == "write-after-read" else "writes output"
        first = named(stream, hazard.first)
        return f"{first} {verb} {what}, and no compute lane waits for that ({hazard.kind})"
    verb, before = _VERBS[hazard.kind]
    first = "the host" if hazard.first == host else named(stream, hazard.first)
    step = " in the step before" if hazard.steps else ""
    second = named(stream, hazard.second)
    return f"{second} {verb} {what} without waiting for the {before} by {first}{step} ({hazard.kind})"


_COMPUTE = (micro.Dispatch, micro.Quantize, micro.Bias)
_MOVES = (micro.Prefetch, micro.Evict)
_SLOTS = (micro.Dispatch, micro.Quantize, micro.Transfer)

MICRO: tuple[Law[MemoryMap], ...] = (
    Law("declared", declared, "declare it once, or correct the name"),
    Law("aliases", aliases, "point the alias at a slot that owns its memory"),
    Law("fits", fits, "run `pack` again: offsets and sizes belong together"),
    Law("planes-known", planes_known, "leave the plane out", (micro.Prefetch,)),
    Law("ticks-unique", ticks_unique, "number the ticks anew"),
    Law("waits-known", waits_known, "signal it earlier in the text, or wait with @-1 for the step before"),
    Law("on-device", on_device, "transfer the slot to the device first", _SLOTS),
    Law("lent-stays", lent_stays, "keep the block on its lender, or give the device one of its own",
        (micro.Dispatch,)),
    Law("copies-floats", copies_floats, "copy it in a lane of its own", (micro.Transfer,)),
    Law("ranges-within", ranges_within, "correct the range", (*_SLOTS, micro.Bias)),
    Law("blocks-fit", blocks_fit, "correct rows, bytes or layout"),
    Law("operands-fit", operands_fit, "correct the slot's type, the range or the attributes",
        (micro.Dispatch, micro.Quantize)),
    Law("inputs-kept", inputs_kept, "write a slot of its own", _SLOTS),
    Law("outputs-written", outputs_written, "name the slot (%12) that holds the value", _SLOTS),
    Law("bias-joins", bias_joins, "put the bias directly before its +bias dispatch in the same lane",
        (micro.Bias, micro.Dispatch)),
    Law("regions-whole", regions_whole, "end the region before the instruction",
        (*_COMPUTE, micro.Transfer)),
    Law("written-before-read", written_before_read, "put the instruction that writes it first", _SLOTS),
    Law("alive-apart", alive_apart, "run `pack` again, or move the later write behind the last read",
        (*_SLOTS, *_MOVES)),
    Law("loaded-before-use", loaded_before_use, "put a prefetch before it and the evict after its last use",
        (*_MOVES, micro.Bias, micro.Dispatch)),
    Law("residency-returns", residency_returns, "evict what was prefetched, prefetch again what was evicted",
        _MOVES),
    Law("ordered", ordered, "signal a tick at the earlier access and wait for it at the later one "
        "(`!3`, or `!3@-1` across the step)"),
)  # fmt: skip
