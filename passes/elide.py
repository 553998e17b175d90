"""Removes what isn't needed: loads of weights that can stay, copies, waits.

- blocks that fit become resident: their prefetches and evictions vanish;
- `%2 = view(%1)` → slot %2 is an alias of %1;
- `%2 = slice(%1) {lo=64,hi=96}` → users read %1[64:96], where they all take channel ranges;
- ticks are made anew, without waits that lane order and the other waits imply.

A stream that is packed already is packed again, because copies kept memory apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flashrt.ir import micro
from flashrt.ir.order import COMPUTE, accesses, root_of
from flashrt.ir.types import Dim
from flashrt.layouts import aligned
from flashrt.passes.pack import pack, ring_layout
from flashrt.passes.strided import argument_takes_range
from flashrt.passes.ticks import synchronise


def keep(stream: micro.Stream, stays: Callable[[micro.Block], bool]) -> micro.Stream:
    """The stream with those blocks resident that stay, because other variants keep them."""
    stay = {(b.name, b.device) for b in stream.blocks if b.home == "ring" and stays(b)}
    return _with(stream, stay) if stay else stream


def elide(stream: micro.Stream, *, resident_bytes: Mapping[str, int]) -> micro.Stream:
    """resident_bytes: what the weights of each device may take, ring included."""
    packed = bool(stream.arenas or stream.rings)
    stream = _without_copies(_with_residents(stream, resident_bytes))
    stream = synchronise(stream, minimal=True)
    return pack(stream) if packed else stream


# ---- weights that stay -------------------------------------------------------------
def _with_residents(stream: micro.Stream, resident_bytes: Mapping[str, int]) -> micro.Stream:
    stay = {
        (name, device)
        for device in dict.fromkeys(b.device for b in stream.blocks)
        for name in _residents(stream, device, resident_bytes.get(device, 0))
    }
    return _with(stream, stay)


def _with(stream: micro.Stream, stay: Collection[tuple[str, str]]) -> micro.Stream:
    """The stream with these (block, device) resident."""
    instrs = tuple(
        i
        for i in stream.instrs
        if not (isinstance(i, micro.Prefetch | micro.Evict) and (i.block, i.device) in stay)
    )
    blocks = tuple(replace(b, home="resident") if (b.name, b.device) in stay else b for b in stream.blocks)
    return replace(stream, instrs=instrs, blocks=blocks)


def _residents(stream: micro.Stream, device: str, limit: int) -> list[str]:
    """The blocks to keep: the largest first, as many as leave room for the others' ring; where some have been
    chosen, those."""
    sizes = {b.name: aligned(b.bytes) for b in stream.blocks if b.device == device}
    settled = [b.name for b in stream.blocks if b.device == device and b.home == "resident"]
    by_size = _by_benefit(sizes)
    if sum(sizes.values()) <= limit:
        return list(sizes)
    if settled:
        return settled

    moves = tuple(i for i in stream.instrs if isinstance(i, micro.Prefetch | micro.Evict))
    loading = replace(stream, instrs=moves)

    def total(stay: Iterable[str]) -> int:
        kept = set(stay)
        ring = frozenset(sizes.keys() - kept)
        return sum(sizes[name] for name in kept) + ring_layout(loading, device, ring)[1]

    low, high = 0, len(by_size)  # `low` blocks fit (or none does), more than `high` don't
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(by_size[:middle]) <= limit else (low, middle - 1)
    few = by_size[:low]
    left = limit - total(few)
    more = list(few)
    for name in by_size[low:]:
        if sizes[name] <= left:
            more.append(name)
            left -= sizes[name]
    return more if total(more) <= limit else few


def _by_benefit(sizes: Mapping[str, int]) -> list[str]:
    """Largest first; equal ones spread over the step, so that the rest streams evenly."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, size in sizes.items():
        groups[size].append(name)
    ordered = []
    for size in sorted(groups, reverse=True):
        names = groups[size]
        bits = max(1, (len(names) - 1).bit_length())
        ranks = sorted(range(len(names)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
        ordered += [names[i] for i in ranks]
    return ordered


# ---- copies --------------------------------------------------------------------------
@dataclass(slots=True)
class _Users:
    """Where a slot occurs, as instruction indices."""

    writers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A view or slice that may go. base: first channel of the source it takes; None for a view."""

    src: int
    dst: int
    base: Dim | None
    width: Dim


def _without_copies(stream: micro.Stream) -> micro.Stream:
    slots = {s.id: s for s in stream.slots}
    users = _users(stream)
    outputs = {int(o.value.removeprefix("%")) for o in stream.outputs}
    gone: set[int] = set()
    ranges: dict[int, _Copy] = {}
    for i, instr in enumerate(stream.instrs):
        copy = _copy(instr, slots)
        if copy is None or not _still(i, copy, slots, users, stream.instrs):
            continue
        if copy.dst in outputs and any(
            isinstance(stream.instrs[w], micro.Transfer) for w in users[copy.src].writers
        ):
            continue  # the step is over for the caller when this is
        if copy.base is None:
            slots[copy.dst] = replace(slots[copy.dst], alias=copy.src, offset=None)
        elif copy.dst not in outputs and _all_take_ranges(copy.dst, users, stream.instrs):
            ranges[copy.dst] = copy
        else:
            continue
        gone.add(i)
    instrs = [_renamed(instr, ranges) for i, instr in enumerate(stream.instrs) if i not in gone]
    used = _mentioned(instrs, slots, outputs)
    return replace(
        stream, instrs=tuple(instrs), slots=tuple(slots[s.id] for s in stream.slots if s.id in used)
    )


def _users(stream: micro.Stream) -> dict[int, _Users]:
    found: dict[int, _Users] = defaultdict(_Users)
    for i, instr in enumerate(stream.instrs):
        reads, writes = accesses(instr)
        for access in reads:
            if access.kind == "slot":
                found[int(access.name)].readers.append(i)
        for access in writes:
            if access.kind == "slot":
                found[int(access.name)].writers.append(i)
    return found


def _copy(instr: micro.Instr, slots: Mapping[int, micro.Slot]) -> _Copy | None:
    """The copy that an instruction is, if its source and result allow to go without it."""
    if not isinstance(instr, micro.Dispatch) or instr.kernel not in ("view", "slice") or instr.dst is None:
        return None
    src, dst = instr.args[0], instr.dst
    if not isinstance(src, micro.SlotRef) or dst.lo is not None:
        return None
    source, result = slots[src.slot].type, slots[dst.slot].type
    if source.dtype != result.dtype:
        return None
    if instr.kernel == "view":
        return _Copy(src.slot, dst.slot, None, 0) if src.lo is None else None
    lo, hi = instr.attr("lo"), instr.attr("hi")
    if not isinstance(lo, int) or not isinstance(hi, int) or len(source.shape) != 2:
        return None
    return _Copy(src.slot, dst.slot, (src.lo or 0) + lo, hi - lo)


def _still(
    i: int,
    copy: _Copy,
    slots: dict[int, micro.Slot],
    users: Mapping[int, _Users],
    instrs: Sequence[micro.Instr],
) -> bool:
    """Whether source and result hold the same from instruction i on, wherever they are read."""
    into = users[copy.dst]
    same = into.writers == [i] and all(r > i for r in into.readers)
    same = same and all(w < i for w in users[copy.src].writers)
    root = slots[root_of(copy.src, slots)]
    if root.input:
        # the host writes inputs as soon as the compute lanes are through
        return same and copy.base is None and all(instrs[r].lane == COMPUTE for r in into.readers)
    return same


def _all_take_ranges(slot: int, users: Mapping[int, _Users], instrs: Sequence[micro.Instr]) -> bool:
    return all(
        argument_takes_range(instrs[r], index)
        for r in set(users[slot].readers)
        for index, arg in enumerate(_arguments(instrs[r]))
        if isinstance(arg, micro.SlotRef) and arg.slot == slot
    )


def _arguments(instr: micro.Instr) -> tuple[micro.Arg, ...]:
    match instr:
        case micro.Dispatch():
            return instr.args
        case micro.Quantize() | micro.Transfer():
            return (instr.src,)
        case _:
            return ()


def _renamed(instr: micro.Instr, ranges: Mapping[int, _Copy]) -> micro.Instr:
    """The instruction with slices read where they were cut from."""
    match instr:
        case micro.Dispatch(args=args):
            new = tuple(_ranged(a, ranges) if isinstance(a, micro.SlotRef) else a for a in args)
            return instr if new == args else replace(instr, args=new)
        case micro.Quantize(src=src) | micro.Transfer(src=src):
            return instr if _ranged(src, ranges) == src else replace(instr, src=_ranged(src, ranges))
        case _:
            return instr


def _ranged(ref: micro.SlotRef, ranges: Mapping[int, _Copy]) -> micro.SlotRef:
    while (copy := ranges.get(ref.slot)) is not None:
        assert copy.base is not None
        lo, hi = (0, copy.width) if ref.lo is None or ref.hi is None else (ref.lo, ref.hi)
        ref = micro.SlotRef(copy.src, copy.base + lo, copy.base + hi)
    return ref


def _mentioned(
    instrs: Iterable[micro.Instr], slots: Mapping[int, micro.Slot], outputs: Iterable[int]
) -> set[int]:
    """Slots that instructions, outputs or aliases still speak of."""
    named = set(outputs)
    for instr in instrs:
        for access in (a for side in accesses(instr) for a in side):
            if access.kind == "slot":
                named.add(int(access.name))
    used = set()
    for slot in named:
        at: int | None = slot
        while at is not None and at not in used:
            used.add(at)
            at = slots[at].alias
    return used
