"""Tells onlookers what a program does, a few times a second, from a thread of its own.

Steps pay nothing for it: everything is read from counters and stamps that are there anyway. A program
that stands still is told of once.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from flashrt.machine import to_json
from flashrt.runtime.arena import Owner
from flashrt.status.channel import Outlet, began, space
from flashrt.status.record import Held, Lane, Queue, Replanning, Splits, Status
from flashrt.status.work import Sums, work_of

if TYPE_CHECKING:
    from flashrt.llm.generate import Generator
    from flashrt.program import Plan, Program
    from flashrt.runtime.executor import Executor

PERIOD = 0.2  # seconds: five times a second at most
THREAD = "flashrt-status"
OWNERS: tuple[Owner, ...] = get_args(Owner)
Loop = Callable[[], Replanning | None]
_numbers = itertools.count(1)


def publish(
    program: Program, generator: Generator | None = None, replanning: Loop = lambda: None
) -> Publisher:
    """Tells about a program until it is closed.

    generator: the language model's, for its queue. replanning: asked for what the live loop does.
    """
    publisher = Publisher(program, generator, replanning)
    publisher.start()
    program.when_closed(publisher.close)
    return publisher


class Publisher:
    """Writes a program's status where onlookers find it; `publish` makes one that runs by itself.

    reason: why the last one couldn't be written, "" when it was: no program stops for that.
    """

    def __init__(
        self, program: Program, generator: Generator | None = None, replanning: Loop = lambda: None
    ) -> None:
        number = next(_numbers)
        self.program, self.generator, self.reason = program, generator, ""
        self._replanning = replanning
        self._still = _still(program, number)
        self._lanes: dict[str, Mapping[tuple[str, str], tuple[Sums, ...]]] = {}
        self._told: object = None
        self._telling = threading.Lock()  # one writes the file at a time: it is put together beside it
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        outlet = self._outlet = Outlet(number)
        self._gone = weakref.finalize(self, outlet.remove)  # when it is forgotten and at exit, too

    def start(self) -> None:
        """Begins to tell."""
        args = (weakref.ref(self), self._stop)  # weak: a program that nobody closes can still be freed
        self._thread = threading.Thread(target=_run, args=args, name=THREAD, daemon=True)
        self._thread.start()

    def turn_to(self, program: Program) -> None:
        """Tells about another program of the same engine from now on."""
        still = replace(_still(program, self._still.number), opened=self._still.opened)
        with self._telling:
            self._lanes, self._still, self.program = {}, still, program

    def close(self) -> None:
        """Ends the thread and takes the file away. Idempotent."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._gone()

    def tell(self) -> None:
        """Writes the status now, unless nothing has happened since it was written last. From any thread."""
        with self._telling:
            try:
                queue, loop = self._queue(), self._replanning()
                news = (self.program.ran.steps, queue, loop, dict(self.program.residents.held))
                if news != self._told:
                    self._outlet.write(self.status(queue, loop))
                    self._told, self.reason = news, ""
            except Exception as error:  # an onlooker's trouble is no reason to disturb the program
                self.reason = f"{type(error).__name__}: {error}"

    def status(self, queue: Queue | None = None, replanning: Replanning | None = None) -> Status:
        """The program as it is now."""
        program, executor = self.program, self.program.last
        tokens, rows = program.ran.tokens, program.ran.rows
        cached = any(v.stream.states for v in program.plan.variants)
        return replace(
            self._still,
            at=time.time(),
            held=tuple(_held(program.plan, dict(program.residents.held))),
            steps=program.ran.steps,
            tokens=tokens if cached else None,
            rows=rows if cached else None,
            queue=queue,
            replanning=replanning,
            **(self._of_last(executor) if executor is not None and executor.took else {}),
        )

    def _queue(self) -> Queue | None:
        if self.generator is None:
            return None
        scheduler, pool = self.generator.scheduler, self.generator.pool
        return Queue(len(scheduler.running), len(scheduler.waiting), pool.used, pool.total)

    def _of_last(self, executor: Executor) -> dict[str, Any]:
        """The fields about the last step."""
        stream, env = executor.stream, dict(executor.env)
        if stream.name not in self._lanes:
            self._lanes[stream.name] = work_of(stream)
        return {
            "variant": stream.name,
            "symbols": {s.name: env[s.name] for s in stream.symbols if s.name in env},
            "step": executor.took / 1e9,
            "lanes": tuple(_lanes(executor, self._lanes[stream.name], env)),
            "splits": tuple(_splits(executor)),
        }


def _run(ref: weakref.ref[Publisher], stop: threading.Event) -> None:
    while not stop.is_set() and (publisher := ref()) is not None:
        publisher.tell()
        del publisher
        stop.wait(PERIOD)


def _still(program: Program, number: int) -> Status:
    """What stays the same, with nothing run yet."""
    plan, now = program.plan, time.time()
    bare = tuple(replace(d, kernels=()) for d in plan.machine.devices)  # kernels would be most of the text
    machine = to_json(replace(plan.machine, devices=bare))
    files = (str(plan.packed),) if plan.packed else tuple(f.path for f in plan.weights.files)
    return Status(
        pid=os.getpid(), number=number, began=began(os.getpid()) or 0, space=space(), opened=now, at=now,
        model=plan.name, machine=machine, files=files, held=(), steps=0, tokens=None, rows=None,
        variant=None, symbols={}, step=None, lanes=(), splits=(), queue=None, replanning=None,
    )  # fmt: skip


def _held(plan: Plan, held: Mapping[tuple[str, Owner], int]) -> Iterator[Held]:
    limits = {b.device: b.limit for v in plan.variants for b in v.budgets}
    for device in dict.fromkeys(device for device, _ in held):
        limit = limits.get(device, plan.machine.device(device).budget)
        yield Held(device, limit, *(held.get((device, owner), 0) for owner in OWNERS))


def _lanes(
    executor: Executor, work: Mapping[tuple[str, str], tuple[Sums, ...]], env: Mapping[str, int]
) -> Iterator[Lane]:
    for lane, (busy, waiting) in executor.spent().items():
        yield Lane(*lane, busy / 1e9, waiting / 1e9, tuple(s.at(env) for s in work.get(lane, ())))


def _splits(executor: Executor) -> Iterator[Splits]:
    memory = executor.memory
    for split in executor.stream.splits:
        at = int(memory.words[memory.word_of(split.name)])
        yield Splits(split.name, at, split.positions[0], split.positions[-1])
