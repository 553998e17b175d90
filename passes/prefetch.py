"""Loads weights earlier: a prefetch moves up to `window` blocks ahead.

    prefetch a                       prefetch a
    dispatch … a                     prefetch b      (window 1)
    evict a                     →    dispatch … a
    prefetch b                       evict a
    dispatch … b                     dispatch … b
    evict b                          evict b

Nothing but the order changes. Blocks are still loaded in the order of their first use,
and evicted as soon as before, so at most `window` blocks more than needed are loaded.

Where steps follow each other, those that are loaded before the first is evicted are loaded behind the last
one of the step before, and the first step finds them loaded.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from flashrt.ir import micro
from flashrt.layouts import aligned
from flashrt.passes.pack import FirstFit, ring_layout, staying_bytes


def prefetch(
    stream: micro.Stream, *, window: int = 4, limits: Mapping[str, int] | None = None, across: bool = False
) -> micro.Stream:
    """Hoists prefetches. across: also into the step before.

    limits: bytes that each device has for weights. No block is loaded early beyond what those that stay
    leave, and the window shrinks until the ring, gaps between blocks included, fits (or nothing is left to
    shrink).
    """
    kept = staying_bytes(stream)
    limits = {device: limit - kept[device] for device, limit in (limits or {}).items()}
    hoisted = _hoisted(stream, window, limits)
    while window and any((n := _ring(hoisted, d)) and n > limit for d, limit in limits.items()):
        window //= 2
        hoisted = _hoisted(stream, window, limits)
    return _across(hoisted) if across else hoisted


def _across(stream: micro.Stream) -> micro.Stream:
    """What each device loads before it evicts anything, at the end of the step."""
    early: list[micro.Instr] = []
    evicting: set[str] = set()
    for instr in stream.instrs:
        if isinstance(instr, micro.Evict):
            evicting.add(instr.device)
        elif isinstance(instr, micro.Prefetch) and instr.device not in evicting:
            early.append(instr)
    moved = set(map(id, early))
    return replace(stream, instrs=(*(i for i in stream.instrs if id(i) not in moved), *early))


def _ring(stream: micro.Stream, device: str) -> int:
    ring = frozenset(b.name for b in stream.blocks if b.device == device and b.home == "ring")
    return ring_layout(stream, device, ring)[1]


def _hoisted(stream: micro.Stream, window: int, limits: Mapping[str, int]) -> micro.Stream:
    queues: dict[str, deque[micro.Prefetch]] = defaultdict(deque)
    for instr in stream.instrs:
        if isinstance(instr, micro.Prefetch):
            queues[instr.device].append(instr)
    lent = {b.name for b in stream.blocks if b.home == "resident"}
    lent |= {w.name for w in stream.weights if w.of in lent and w.in_whole(0, 0)}
    lanes = {
        d: _Lane(queue, window, limits.get(d), all(i.block in lent for i in queue))
        for d, queue in queues.items()
    }
    instrs: list[micro.Instr] = []
    for instr in stream.instrs:
        match instr:
            case micro.Prefetch():
                instrs += lanes[instr.device].reach(instr)
            case micro.Evict():
                instrs.append(instr)
                if instr.device in lanes:
                    instrs += lanes[instr.device].free(instr.block)
            case _:
                instrs.append(instr)
    return replace(stream, instrs=tuple(instrs))


class _Lane:
    """The prefetches of one device: which are issued, and what is loaded.

    lent: whether all come from blocks of the same stream that stay elsewhere. Then they are loaded as soon as
    another is evicted; else the ring would grow by that, and less could stay.
    """

    def __init__(self, queue: deque[micro.Prefetch], window: int, limit: int | None, lent: bool) -> None:
        self._left, self._window, self._limit, self._lent = queue, window, limit, lent
        self._ahead: deque[micro.Prefetch] = deque()  # issued, and their old place isn't reached
        self._loaded: set[str] = set()
        self._ring = FirstFit()  # as `pack` will lay it out

    def reach(self, due: micro.Prefetch) -> Iterable[micro.Prefetch]:
        """What to issue at the old place of `due`: `due` if it hasn't been, and those to come."""
        issued = []
        if self._ahead:
            assert self._ahead.popleft() is due
        else:
            issued.append(self._issue())
        return [*issued, *self._early()]

    def free(self, block: str) -> Iterable[micro.Prefetch]:
        """The block is evicted: what to issue now."""
        self._loaded.discard(block)
        self._ring.give_back(block)
        return self._early() if self._lent else ()

    def _early(self) -> Iterable[micro.Prefetch]:
        issued = []
        while self._left and len(self._ahead) < self._window and self._may_load(self._left[0]):
            issued.append(self._issue())
            self._ahead.append(issued[-1])
        return issued

    def _issue(self) -> micro.Prefetch:
        first = self._left.popleft()
        self._loaded.add(first.block)
        self._ring.take(_bytes(first), first.block)
        return first

    def _may_load(self, block: micro.Prefetch) -> bool:
        """Not while it is loaded, while it waits for something, or beyond the limit."""
        if block.block in self._loaded or block.waits:
            return False
        nbytes = _bytes(block)
        return self._limit is None or self._ring.place(nbytes) + nbytes <= self._limit


def _bytes(block: micro.Prefetch) -> int:
    """What a block takes in the ring; nothing where a size isn't fixed."""
    return aligned(int(block.bytes)) if isinstance(block.bytes, int | float) else 0
