"""The compiled loop of the thread team: waits, kernels, barriers, stamps and signals of a table.

Every thread walks the same rows. A `solo` row is run by thread 0 alone, and no
barrier stands between two of those; any other row is shared by all, and ends
with one. Thread 0 takes the stamps and signals the ticks.

A thread that sees the abort word gives up and says so in FAULT, which every
other wait looks at too; the next run starts from fresh counters.
"""

from __future__ import annotations

from typing import Any

from numba import types

from flashrt.backends.cpu.intrinsics import (
    atomic_add,
    call_kernel,
    clock_ns,
    futex_wait,
    futex_wake,
    inner,
    load_acquire,
    load_i64,
    pause,
    sleep_us,
    store_i64,
    store_release,
    yield_core,
)
from flashrt.backends.cpu.rows import (
    ARRIVED,
    CODE,
    DONE,
    EPOCH,
    FAULT,
    GO,
    QUIT,
    RECALL,
    RELEASED,
    ROLE,
    ROW,
    SLEEPERS,
    TEAM,
    WANTED,
    CodeWords,
    Header,
)

H = Header(*range(len(Header._fields)))
C = CodeWords(*range(len(CodeWords._fields)))
ARGS = 8 * len(Header._fields)
SPINS = 256  # pauses (some tens of microseconds) before a wait gives its core away
YIELDS = 20_000  # then this many yields (some milliseconds) before it sleeps between looks
NAP_US = 50
IDLE_NS = 2_000_000  # how long a helper spins for the next step before it sleeps for good
ABORTED, BROKEN = 1, 2


@inner
def rest(turns):
    """One turn of a wait: the longer it lasts, the more it leaves to others."""
    if turns < SPINS:
        pause()
    elif turns < SPINS + YIELDS:
        yield_core()
    else:
        sleep_us(NAP_US)


@inner
def wait_for(address, value, code, control):
    """Waits until the word is at least `value`; False when the run is aborted."""
    turns = 0
    while load_acquire(address) < value:
        if load_acquire(load_i64(code + 8 * C.abort)) != 0 or load_acquire(control + FAULT) != 0:
            return False
        rest(turns)
        turns += 1
    return True


@inner
def barrier(nth, count, code, control):
    """Waits for the whole team, for the count-th time in this run; False when it is aborted."""
    if atomic_add(control + ARRIVED, 1) + 1 == count * nth:
        store_release(control + RELEASED, count)
        return True
    return wait_for(control + RELEASED, count, code, control)


@inner
def wait_ticks(row, epoch, code, control):
    """All waits of a row."""
    at, end = load_i64(row + 8 * H.waits), load_i64(row + 8 * H.waits_end)
    for i in range(at, end):
        pair = load_i64(code + 8 * C.waits) + 16 * i
        if not wait_for(load_i64(pair), epoch + load_i64(pair + 8), code, control):
            return False
    return True


@inner
def signal_ticks(row, epoch, code):
    """All signals of a row."""
    for i in range(load_i64(row + 8 * H.signals), load_i64(row + 8 * H.signals_end)):
        store_release(load_i64(load_i64(code + 8 * C.signals) + 8 * i), epoch)


@inner
def run_row(tid, nth, i, row, epoch, code, control):
    """Waits and computes; 0, or why not."""
    stamps = load_i64(code + 8 * C.stamps) + 24 * i
    if tid == 0:
        store_i64(stamps, clock_ns())
    if not wait_ticks(row, epoch, code, control):
        return ABORTED
    if tid == 0:
        waited = load_i64(row + 8 * H.waits) < load_i64(row + 8 * H.waits_end)
        store_i64(stamps + 8, clock_ns() if waited else load_i64(stamps))
    if call_kernel(load_i64(row + 8 * H.kernel), tid, nth, row + ARGS) != 0:
        return BROKEN
    return 0


@inner
def end_row(i, row, epoch, code):
    """Thread 0, when everyone is through: nothing is taken any more; the last stamp, then the signals."""
    store_i64(row + 8 * H.taken, 0)
    store_i64(load_i64(code + 8 * C.stamps) + 24 * i + 16, clock_ns())
    signal_ticks(row, epoch, code)


@inner
def walk(tid, nth, code, epoch, control):
    """All rows, for one thread; 0, or why it stopped early."""
    rows, count = load_i64(code + 8 * C.rows), load_i64(code + 8 * C.row_count)
    barriers, after_solo = 0, False
    for i in range(count):
        row = rows + 8 * ROW * i
        if load_i64(row + 8 * H.solo) or nth == 1:
            if tid == 0:
                status = run_row(0, 1, i, row, epoch, code, control)
                if status != 0:
                    return status
                end_row(i, row, epoch, code)
            after_solo = True
            continue
        if after_solo:
            barriers += 1
            if not barrier(nth, barriers, code, control):
                return ABORTED
        status = run_row(tid, nth, i, row, epoch, code, control)
        if status != 0:
            return status
        barriers += 1
        if not barrier(nth, barriers, code, control):
            return ABORTED
        if tid == 0:
            end_row(i, row, epoch, code)
        after_solo = False
    return 0


@inner
def walk_or_fault(tid, nth, code, epoch, control):
    """`walk`; a failure is said to the others."""
    status = walk(tid, nth, code, epoch, control)
    if status != 0:
        store_release(control + FAULT, status)


@inner
def give_roles(threads, control, run):
    """Numbers the threads that are wanted in this run; how many they are.

    A role names its run, so that a helper which comes late, after it sat out, takes no old or new role
    for the one of the run it was woken for.
    """
    nth = types.int64(1)
    for tid in range(1, threads):
        if load_i64(control + WANTED + 8 * tid) != 0:
            store_release(control + ROLE + 8 * tid, (run << 16) | nth)
            nth += 1
    store_i64(control + TEAM, nth)
    return nth


def team_run() -> Any:
    """Thread 0's part of one run: (threads, control, code, epoch) → 0, ABORTED or BROKEN."""

    def kernel(threads, control, code, epoch):
        nth = give_roles(threads, control, load_i64(control + GO) + 1)
        store_i64(control + CODE, code)
        store_i64(control + EPOCH, epoch)
        for word in (ARRIVED, RELEASED, FAULT, DONE):
            store_i64(control + word, 0)
        if nth > 1:
            atomic_add(control + GO, 1)
            # an add, not a load: it can't be seen before GO's, so either the helper or we notice the other
            if atomic_add(control + SLEEPERS, 0) > 0:
                futex_wake(control + GO, threads)
        walk_or_fault(types.int64(0), nth, code, epoch, control)
        turns = 0
        while load_acquire(control + DONE) < nth - 1:
            rest(turns)
            turns += 1
        return load_acquire(control + FAULT)

    return kernel


@inner
def idle(control, seen):
    """Waits for GO to move on from `seen`: spins, yields, then sleeps until woken."""
    start, turns = clock_ns(), 0
    while load_acquire(control + GO) == seen:
        if turns < SPINS:
            pause()
        elif clock_ns() - start < IDLE_NS:
            yield_core()
        else:
            atomic_add(control + SLEEPERS, 1)
            # the system looks at the word again before it sleeps, so no wake-up is lost
            futex_wait(control + GO, seen & 0xFFFFFFFF)
            atomic_add(control + SLEEPERS, -1)
        turns += 1


@inner
def sit_out(control, tid):
    """Sleeps until this thread is wanted again or sent home."""
    while load_acquire(control + WANTED + 8 * tid) == 0 and load_acquire(control + QUIT) == 0:
        call = load_acquire(control + RECALL)
        if load_acquire(control + WANTED + 8 * tid) == 0:
            futex_wait(control + RECALL, call & 0xFFFFFFFF)


def team_help() -> Any:
    """A helper's whole life: (tid, threads, control); returns when QUIT is set."""

    def kernel(tid, threads, control):
        seen = types.int64(0)
        while True:
            idle(control, seen)
            seen = load_acquire(control + GO)
            if load_acquire(control + QUIT) != 0:
                return 0
            role = load_acquire(control + ROLE + 8 * tid)
            if role >> 16 == seen:
                code, epoch = load_i64(control + CODE), load_i64(control + EPOCH)
                walk_or_fault(role & 0xFFFF, load_i64(control + TEAM), code, epoch, control)
                atomic_add(control + DONE, 1)
            else:
                sit_out(control, tid)

    return kernel


def team_quit() -> Any:
    """Sends the helpers home: (threads, control)."""

    def kernel(threads, control):
        store_release(control + QUIT, 1)
        for word in (GO, RECALL):
            atomic_add(control + word, 1)
            futex_wake(control + word, threads)
        return 0

    return kernel


def team_recall() -> Any:
    """Wakes the helpers that sit out, to see whether they are wanted: (threads, control)."""

    def kernel(threads, control):
        atomic_add(control + RECALL, 1)
        futex_wake(control + RECALL, threads)
        return 0

    return kernel
