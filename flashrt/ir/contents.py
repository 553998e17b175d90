"""What slots and blocks hold while a stream is run in its text order, and the laws about it."""

from __future__ import annotations

from collections.abc import Iterator

from flashrt.ir import micro
from flashrt.ir.bounds import Span
from flashrt.ir.law import Violation
from flashrt.ir.memory import MemoryMap, Owner, Use, memory_name, named
from flashrt.ir.order import Ring, loaded_at_start
from flashrt.ir.types import Dim, show


class _Contents:
    """Whose value each piece of memory holds, and which channels of each slot are written."""

    def __init__(self, memory: MemoryMap) -> None:
        self._known = memory.bounds
        self._holder: dict[int, tuple[Owner, int]] = {}  # piece → owner, instruction that wrote it
        self._written: dict[Owner, dict[tuple[Dim, Span | None], None]] = {}

    def write(self, use: Use, at: int) -> None:
        """Instruction `at` writes."""
        if any(p not in self._holder or self._holder[p][0] != use.owner for p in use.pieces):
            self._written[use.owner] = {}
        for piece in use.pieces:
            self._holder[piece] = (use.owner, at)
        self._written[use.owner][use.axis, use.span] = None

    def overwritten(self, use: Use) -> int | None:
        """The instruction that wrote something else where the value was, or None."""
        if use.owner not in self._written:
            return None
        return next((self._holder[p][1] for p in use.pieces if self._holder[p][0] != use.owner), None)

    def defined(self, use: Use) -> bool:
        """Whether everything that is read has been written."""
        written = self._written.get(use.owner, {})
        if (use.axis, use.span) in written or (0, None) in written:
            return True
        axes = {axis for axis, _ in written} if use.span is None else {use.axis}
        return any(
            self._known.covered(use.span or (0, axis), [s for a, s in written if a == axis and s])
            for axis in axes
        )


def _slot_uses(memory: MemoryMap) -> Iterator[tuple[int, list[Use], list[Use]]]:
    """Reads (inputs left out) and writes of slots by each instruction."""
    inputs = {("slot", slot) for slot in memory.inputs}
    for at, (reads, writes) in enumerate(memory.uses):
        yield (
            at,
            [u for u in reads if u.owner[0] == "slot" and u.owner not in inputs],
            [u for u in writes if u.owner[0] == "slot"],
        )


def written_before_read(memory: MemoryMap) -> Iterator[Violation]:
    """What an instruction reads of a slot has been written in the same step."""
    contents = _Contents(memory)
    for at, reads, writes in _slot_uses(memory):
        for use in reads:
            if not contents.defined(use) and contents.overwritten(use) is None:
                part = "" if use.span is None else f"[{show(use.span[0])}:{show(use.span[1])}]"
                what = f"reads {memory_name(use.owner)}{part}, which isn't (wholly) written before"
                yield Violation(f"{named(memory.stream, at)} {what}", at)
        for use in writes:
            contents.write(use, at)


def alive_apart(memory: MemoryMap) -> Iterator[Violation]:
    """Slots alive together don't overlap, nor do ring blocks loaded together."""
    contents = _Contents(memory)
    for at, reads, writes in _slot_uses(memory):
        for use in reads:
            by = contents.overwritten(use)
            if by is not None:
                what = f"whose memory {named(memory.stream, by)} has overwritten"
                yield Violation(f"{named(memory.stream, at)} reads {memory_name(use.owner)}, {what}", at)
            elif any(use.owner != w.owner and not set(use.pieces).isdisjoint(w.pieces) for w in writes):
                what = f"reads {memory_name(use.owner)} and writes a slot that overlaps it"
                yield Violation(f"{named(memory.stream, at)} {what}", at)
        for use in writes:
            contents.write(use, at)
    yield from _ring_overlaps(memory)


def _ring_overlaps(memory: MemoryMap) -> Iterator[Violation]:
    holder: dict[int, str] = {}
    for name, device in sorted(loaded_at_start(memory.stream)):
        for piece in memory.pieces(("block", device, name)):
            holder[piece] = name
    for at, instr in enumerate(memory.stream.instrs):
        if not isinstance(instr, micro.Prefetch | micro.Evict):
            continue
        pieces = memory.pieces(("block", instr.device, instr.block))
        other = next((holder[p] for p in pieces if holder.get(p, instr.block) != instr.block), None)
        if isinstance(instr, micro.Prefetch) and other is not None:
            what = f"loads @{instr.block} over @{other}, which isn't evicted"
            yield Violation(f"{named(memory.stream, at)} {what}", at)
        for piece in pieces:
            if isinstance(instr, micro.Prefetch):
                holder[piece] = instr.block
            elif holder.get(piece) == instr.block:
                del holder[piece]


def _ring_uses(memory: MemoryMap) -> Iterator[tuple[int, micro.Instr, Ring]]:
    """(index, instruction, block) of everything that concerns a ring block."""
    ring = {(b.name, b.device) for b in memory.stream.blocks if b.home == "ring"}
    for at, (reads, writes) in enumerate(memory.accesses):
        for access in (*reads, *writes):
            key = (str(access.name), access.device)
            if access.kind == "block" and key in ring:
                yield at, memory.stream.instrs[at], key


def loaded_before_use(memory: MemoryMap) -> Iterator[Violation]:
    """A block is resident, or loaded (prefetched and not yet evicted), when it is used."""
    loaded = loaded_at_start(memory.stream)
    for at, instr, key in _ring_uses(memory):
        if isinstance(instr, micro.Prefetch):
            loaded.add(key)
        elif key not in loaded:
            what = f"uses @{key[0]}, which isn't loaded on {key[1]}"
            yield Violation(f"{named(memory.stream, at)} {what}", at)
        elif isinstance(instr, micro.Evict):
            loaded.remove(key)


def residency_returns(memory: MemoryMap) -> Iterator[Violation]:
    """The blocks loaded at the end of a step are those loaded at its start; resident ones stay."""
    start = loaded_at_start(memory.stream)
    loaded = dict.fromkeys(start, -1)
    for at, instr, key in _ring_uses(memory):
        if isinstance(instr, micro.Prefetch):
            loaded[key] = at
        elif isinstance(instr, micro.Evict):
            loaded.pop(key, None)
    for (name, device), at in loaded.items():
        if (name, device) not in start:
            yield Violation(f"@{name} is still loaded on {device} at the end of the step", at)
    for name, device in sorted(start - set(loaded)):
        yield Violation(f"@{name} is loaded on {device} at the start of the step, but not at its end")
    resident = {(b.name, b.device) for b in memory.stream.blocks if b.home == "resident"}
    for at, instr in enumerate(memory.stream.instrs):
        if isinstance(instr, micro.Prefetch | micro.Evict) and (instr.block, instr.device) in resident:
            yield Violation(f"{named(memory.stream, at)} concerns @{instr.block}, which is resident", at)
