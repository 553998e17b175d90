"""Keeps a language model running while its machine changes much: a new plan is made in the background and
takes over between two steps.

`change.Judge` says when, a `Compilation` makes the plan, `swap` moves the cache, the generator's scheduler
says what of it is wanted. The plan in force stays until the next one stands ready; where that comes to
nothing, it goes on, and `Metrics` says why.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from flashrt.errors import DeviceError, FlashrtError, PlanError
from flashrt.ir import micro
from flashrt.ir.ops import PAGE
from flashrt.ir.types import size
from flashrt.llm.generate import Generator
from flashrt.llm.kv import pages_for
from flashrt.machine import Device, Machine
from flashrt.program import Plan, Program
from flashrt.runtime import swap
from flashrt.runtime.change import Change, Judge, Picture, Taken, memory_of
from flashrt.runtime.swap import Elder

THREAD = "flashrt-replan"
HEAR = 0.2  # seconds between two looks for Ctrl-C while a step waits for a plan


class Sample(Protocol):
    """The machine over one period (`probes.sampler.Live`)."""

    @property
    def at(self) -> float:
        """Seconds of a clock that never goes back."""

    def lost(self, device: Device) -> str:
        """Why a device is gone; "" while it is there."""

    def room(self, device: Device) -> int | None:
        """Bytes to be had of the memory that a device uses; None when not known."""


class Compilation(Protocol):
    """A plan in the making (`recompile.Recompilation`)."""

    def run(self) -> Plan:
        """Waits for it. Raises FlashrtError, also when it is closed meanwhile."""

    def close(self) -> None:
        """Ends it and leaves nothing behind. From any thread. Idempotent."""


class Rooms(Protocol):
    """What the engine does for a replanner."""

    def compile(self, plan: Plan, machine: Machine, least: int, *, urgent: bool) -> Compilation:
        """A plan for another machine. least: tokens of context that it has to have room for. urgent: steps
        wait for it."""

    def open(self, plan: Plan, pages: int, elder: Elder | None) -> Program:
        """Opens a plan. elder: what is in memory already. Raises FlashrtError."""

    def pages(self, plan: Plan, spare: int | None) -> int:
        """Pages there is room for in the plan's budgets, and, unless `spare` is None, in the memory that is
        free now and so many bytes more. Raises PlanError."""

    def exchanged(self, program: Program) -> None:
        """Called when another program has taken over."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """What became of big changes. last: why the plan in force was made, and what its requests paid for it.

    failed: why the last attempt came to nothing; "" after one that did not. holding: why none is made
    although one is wanted. making, ready: whether a plan is being made, or takes over at the next step.
    """

    recompiles: int
    last: str
    failed: str
    holding: str
    making: bool
    ready: bool


@dataclass(frozen=True, slots=True)
class _Ready:
    """A plan that may take over. program: open already, unless memory is short."""

    change: Change
    plan: Plan
    program: Program | None


class Replanner:
    """Exchanges the program of a generator when the machine changes much (`generate.Keeper`).

    program, generator: as opened. A program is closed when another takes over; the one in force, `program`,
    is the caller's to close.
    """

    def __init__(self, program: Program, generator: Generator, rooms: Rooms) -> None:
        self.program, self._generator, self._rooms = program, generator, rooms
        self._first, self._pages = program.plan, program.pages
        self._takes = planned(program.plan, program.pages)
        self._judge = Judge(program.plan.machine, computing(program.plan), self._takes)
        self._judging = threading.Lock()
        self._beginning = threading.Lock()
        self._lock = threading.Lock()  # of what is being made, and what stands ready
        self._making: Compilation | None = None
        self._maker: threading.Thread | None = None
        self._ready: _Ready | None = None
        self._closed = False
        self._most_pages, self._context = 0, generator.context
        self._failed_at: tuple[str, int] | None = None
        self._count, self._last, self._failure = 0, "", ""

    # ---- for the sampler
    def sampled(self, sample: Sample) -> None:
        """Looks at a sample, and begins a plan where one is needed."""
        if self._closed:
            return
        devices = self._first.machine.devices
        gone = {d.id: why for d in devices if (why := sample.lost(d))}
        free = {memory_of(d): room for d in devices if (room := sample.room(d)) is not None}
        with self._judging:
            change = self._judge.look(Picture(sample.at, gone, free), self._taken(), busy=self._busy)
        if change is not None:
            self._begin(change, urgent=False)

    @property
    def _busy(self) -> bool:
        return self._making is not None or self._ready is not None

    def _taken(self) -> dict[str, Taken]:
        program, pool = self.program, self._generator.pool
        self._most_pages = min(max(self._most_pages, pool.used), program.pages)
        touched = self._most_pages / program.pages
        held: dict[str, int] = {}
        for (id, owner), nbytes in dict(program.residents.held).items():
            device = program.plan.machine.device(id)
            # the host's memory is taken page by page, as it is written to
            share = touched if owner == "cache" and device.pool else 1.0
            held[memory_of(device)] = held.get(memory_of(device), 0) + round(nbytes * share)
        return {m: Taken(held.get(m, 0), max(0, all_ - held.get(m, 0))) for m, all_ in self._takes.items()}

    # ---- a plan in the making
    def _begin(self, change: Change, *, urgent: bool) -> None:
        """Has a plan made on a thread of its own. urgent: in place of another one that is being made."""
        with self._beginning:
            if self._busy and not urgent:
                return
            self._drop()
            least = self._generator.scheduler.least_pages * PAGE
            machine = change.machine(self._first.machine)
            try:
                making = self._rooms.compile(self._first, machine, least, urgent=urgent)
            except FlashrtError as error:
                self._came_to_nothing(change, error)
                return
            with self._lock:
                if self._closed:
                    return
                self._making = making
                self._maker = threading.Thread(
                    target=self._make, args=(change, making), name=THREAD, daemon=True
                )
                self._maker.start()

    def _make(self, change: Change, making: Compilation) -> None:
        ready = None
        try:
            plan = making.run()
            program = None if change.short else self._opened(plan)
            ready = _Ready(change, plan, program)
        except Exception as error:  # whatever it is: the plan in force goes on
            if self._making is making:
                self._came_to_nothing(change, error)
        finally:
            making.close()
        with self._lock:
            if self._making is making:
                self._ready, self._making, ready = ready, None, None
        if ready is not None and ready.program is not None:
            ready.program.close()

    def _opened(self, plan: Plan) -> Program:
        """Beside the program in force, and ready to step."""
        pages = min(self._pages, self._rooms.pages(plan, None))
        return self._loaded(plan, pages, Elder.of(self.program))

    def _loaded(self, plan: Plan, pages: int, elder: Elder | None) -> Program:
        program = self._rooms.open(plan, pages, elder)
        try:
            program.open()
            program.residents.let_go()
        except BaseException:
            program.close()
            raise
        return program

    def _came_to_nothing(self, change: Change, error: Exception) -> None:
        what = str(error) if isinstance(error, FlashrtError) else f"{type(error).__name__}: {error}"
        self._failure = f"{change.because}; no plan for that: {' '.join(what.split())}"
        with self._judging:
            self._judge.given_up()

    def _drop(self) -> None:
        """Ends what is being made and closes what stands ready, and waits for that."""
        with self._lock:
            making, self._making = self._making, None
            ready, self._ready = self._ready, None
        if making is not None:
            making.close()
        if self._maker is not None and self._maker is not threading.current_thread():
            self._maker.join()
        if ready is not None and ready.program is not None:
            ready.program.close()

    # ---- between steps
    def turn(self) -> None:
        """Lets a plan that stands ready take over."""
        if self._ready is None:
            if self.program.closed and not self._closed:
                self._open_again()
            return
        if self.program.trace is not None:
            return  # a recording is of one plan
        with self._lock:
            ready, self._ready = self._ready, None
        if ready is None:
            return
        try:
            self._exchange(ready)
        except BaseException as error:  # Ctrl-C, too
            if ready.program is not None and ready.program is not self.program:
                ready.program.close()
            if not isinstance(error, FlashrtError | MemoryError):
                raise
            self._came_to_nothing(ready.change, error)
            if self.program.closed:
                raise

    def _open_again(self) -> None:
        """After an exchange of which only the first half was done, as Ctrl-C may leave it."""
        self._generator.scheduler.restart()
        self._settle(self._loaded(self.program.plan, self.program.pages, None))
        self._resettle(self.program)

    def failed(self, error: DeviceError) -> bool:
        """After a step that failed: once it is tried again; then a plan without the device is made now."""
        executor, steps = self.program.last, self.program.ran.steps
        device = executor.failed_on if executor is not None else ""
        if not device or self._closed:
            return False
        if self._failed_at != (device, steps):
            self._failed_at = device, steps
            return True
        with self._judging:
            change = self._judge.failed(device, error.what)
        if change is None:
            return False
        before = self.program
        self._begin(change, urgent=True)
        maker = self._maker
        while maker is not None and maker.is_alive():
            maker.join(HEAR)
        self.turn()
        return self.program is not before

    # ---- the exchange
    def _exchange(self, ready: _Ready) -> None:
        old, new = self.program, ready.program
        self._check(ready.plan, new.pages if new is not None else None)
        with suppress(DeviceError):  # of a device that is lost nothing is expected
            old.drain()
        before = {s.id for s in self._generator.scheduler.running}
        refused = None
        if new is None:
            new, refused = self._one_after_the_other(old, ready.plan)
        else:
            self._side_by_side(old, new, ready.change)
        restarted = len(before - {s.id for s in self._generator.scheduler.running})
        self._settle(new, planned_anew=refused is None)
        if refused is not None:
            raise refused
        with suppress(DeviceError):
            old.close()
        self._count, self._failure = self._count + 1, ""
        lost = f"; {restarted} requests are computed again" if restarted else ""
        context = self._generator.context
        less = f"; the context is {context} tokens now" if context < self._context else ""
        self._last = f"{ready.change.because}{lost}{less}"

    def _check(self, plan: Plan, pages: int | None) -> None:
        """Raises PlanError where the requests in work, which may be others by now, don't fit a plan.

        pages: of its cache; None while they can still be as many as are needed.
        """
        least = self._generator.scheduler.least_pages
        context = context_of(plan)
        most = min(x for x in (pages, pages_for(context) if context else None, least) if x is not None)
        if most < least:
            raise PlanError(f"the new plan has room for {most} pages, the requests in work need {least}")

    def _resettle(self, program: Program) -> dict[int, int]:
        context = context_of(program.plan)
        assert context is not None, "a language model has a context"
        return self._generator.resettle(program.pages, context)

    def _side_by_side(self, old: Program, new: Program, change: Change) -> None:
        """Moves the cache between open programs."""
        scheduler = self._generator.scheduler
        try:
            moved = self._resettle(new)
            if not (Elder.of(old).same(new) and all(a == b for a, b in moved.items())):
                self._copy(old, new, moved, change)
        except BaseException:  # Ctrl-C, too: the pages are no longer where the old program has them
            scheduler.restart()
            self._resettle(old)
            raise

    def _copy(self, old: Program, new: Program, moved: Mapping[int, int], change: Change) -> None:
        contents = swap.read(old, list(moved), change.lost)
        types = swap.states_of(old).values()
        if contents is None or not swap.write(new, list(moved.values()), contents, types):
            self._generator.scheduler.restart()

    def _one_after_the_other(self, old: Program, plan: Plan) -> tuple[Program, Exception | None]:
        """The old program closes before the new one opens; what is in the cache waits in host memory. The
        old plan again, where the new one can't be opened: then also why."""
        scheduler, refused = self._generator.scheduler, None
        used = [page for s in scheduler.running for page in s.table.pages]
        contents, types = swap.read(old, used), list(swap.states_of(old).values())
        elder: Elder | None = Elder.of(old, weights=False)
        cache = sum(held for (_, owner), held in old.residents.held.items() if owner == "cache")
        spare = cache * self._most_pages // old.pages
        old.close()
        try:
            pages = max(min(self._pages, self._rooms.pages(plan, spare)), scheduler.least_pages)
            elder = elder if pages == old.pages else None  # no two caches at once
            new = self._loaded(plan, pages, elder)
        except (FlashrtError, MemoryError) as error:
            refused = error
            new = self._loaded(old.plan, old.pages, elder)
        moved = self._resettle(new)
        if elder is not None and elder.same(new) and all(a == b for a, b in moved.items()):
            return new, refused
        if contents is not None:
            at = {page: index for index, page in enumerate(used)}
            rows = [at[page] for page in moved]
            contents = {name: data[rows] for name, data in contents.items()}
        if contents is None or not swap.write(new, list(moved.values()), contents, types):
            scheduler.restart()
        return new, refused

    def _settle(self, program: Program, *, planned_anew: bool = False) -> None:
        program.ran = self.program.ran  # onlookers go on counting
        self.program, self._failed_at, self._most_pages = program, None, 0
        self._takes = planned(program.plan, program.pages)
        if planned_anew:
            with self._judging:
                self._judge.settled(computing(program.plan))
        self._rooms.exchanged(program)

    # ---- for those who look on
    def metrics(self) -> Metrics:
        """What has become of big changes so far."""
        making, ready = self._making is not None, self._ready is not None
        return Metrics(self._count, self._last, self._failure, self._judge.holding, making, ready)

    def told(self) -> tuple[int, str]:
        """How often another plan took over, and why the last one did or came to nothing."""
        return self._count, self._failure or self._last

    def close(self) -> None:
        """Ends what is being made; the program in force stays open. Idempotent."""
        self._closed = True
        self._drop()


# ---- what a plan takes ---------------------------------------------------------------
def computing(plan: Plan) -> frozenset[str]:
    """The devices that a plan computes on."""
    return frozenset(i.device for v in plan.variants for i in v.stream.instrs)


def context_of(plan: Plan) -> int | None:
    """Tokens that a sequence may have, in whole pages; None for what isn't a language model."""
    pages = [s.hi for v in plan.variants for s in v.stream.symbols if s.name == "M" and v.stream.states]
    return max(pages) * PAGE if pages else None


def planned(plan: Plan, pages: int) -> dict[str, int]:
    """Bytes that a plan takes of each memory with a cache of so many pages."""
    memory = {d.id: memory_of(d) for d in plan.machine.devices}
    taken: dict[str, int] = {}
    weights: dict[tuple[str, str], int] = {}  # what devices of one memory share is there once
    states: set[tuple[str, str]] = set()
    in_turns: dict[tuple[str, str], int] = {}  # what variants use one after the other
    for stream in (v.stream for v in plan.variants):
        for kind, sizes in (("arena", stream.arenas), ("ring", stream.rings)):
            for id, nbytes in sizes:
                in_turns[kind, id] = max(in_turns.get((kind, id), 0), nbytes)
        for block in (b for b in stream.blocks if b.home == "resident"):
            key = block.name, memory[block.device]
            weights[key] = max(weights.get(key, 0), block.bytes)
        for i in (i for i in stream.instrs if isinstance(i, micro.Dispatch)):
            states |= {(state, memory[i.device]) for state in (*i.reads, *i.writes)}
    types = {s.name: s.type for v in plan.variants for s in v.stream.states}
    for (_, id), nbytes in in_turns.items():
        taken[memory[id]] = taken.get(memory[id], 0) + nbytes
    for (_, at), nbytes in weights.items():
        taken[at] = taken.get(at, 0) + nbytes
    for state, at in states:
        taken[at] = taken.get(at, 0) + size(types[state].bytes, {"P": pages})
    return taken
