"""The ways between devices: what is known of them without trying, and a short measurement.

Devices of one memory pool pass data by copying within it, and tell each other by a word of memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from flashrt.machine import Device, Link, Measured
from flashrt.probes import host

DISK = "disk"  # the pretend device that weights come from
LATENCY = 2.0  # microseconds assumed from one core's store until another core has seen it and begun
COPIED = 64 << 20  # bytes of one measured copy


def between(devices: Sequence[Device], measured: Mapping[str, Measured]) -> tuple[Link, ...]:
    """Links between devices of the same memory, and from the disk where its rate was measured.

    measured: `cpu:0-3>cpu:4-7/rate` in bytes per second, `…/latency` in microseconds.
    """
    pairs = [(a, b) for a in devices for b in devices if a is not b and a.pool and a.pool == b.pool]
    within = [_link(a.id, b.id, measured, Measured(a.read.value / 2, "assumed")) for a, b in pairs]
    disk = measured.get(key(DISK, host.ID, "rate"))
    from_disk = [
        Link(DISK, d.id, disk, Measured(50.0, "assumed")) for d in devices if disk and d.pool == host.POOL
    ]
    return (*within, *from_disk)


def known(reported: Iterable[Link], measured: Mapping[str, Measured]) -> Iterator[Link]:
    """Links with the figures that were measured in place of those reported."""
    for link in reported:
        of = [measured.get(key(link.src, link.dst, what)) for what in ("rate", "latency")]
        yield replace(link, rate=of[0] or link.rate, latency=of[1] or link.latency)


def _link(src: str, dst: str, measured: Mapping[str, Measured], copy: Measured) -> Link:
    """copy: a copy reads and writes, so it is taken to run at half the read rate."""
    latency = measured.get(key(src, dst, "latency"), Measured(LATENCY, "assumed"))
    return Link(src, dst, measured.get(key(src, dst, "rate"), copy), latency)


def key(src: str, dst: str, what: str) -> str:
    """What a measured figure of a link is kept under."""
    return f"{src}>{dst}/{what}"


# ---- measuring ---------------------------------------------------------------------
def measure(src: Device, dst: Device, seconds: float = 0.2) -> dict[str, Measured]:
    """Rate and latency from one core group to another, in about that many seconds.

    rate: one core of `dst` copies within memory. latency: half the round trip of a word between a
    core of each, as two processes that do nothing but look at it; {} where a word never came back.
    """
    rate = _copy_rate(_team(dst)[0], seconds / 2)
    trip = _round_trip(_team(src)[-1], _team(dst)[0], seconds / 2)
    found = {key(src.id, dst.id, "rate"): Measured(rate, "measured")}
    if trip is not None:
        found[key(src.id, dst.id, "latency")] = Measured(trip / 2 * 1e6, "measured")
    return found


def _team(device: Device) -> tuple[int, ...]:
    return device.cpus or tuple(sorted(host.usable_cpus()))


def _copy_rate(cpu: int, seconds: float) -> float:
    """Bytes per second that one core copies from memory to memory."""
    from_, to = np.ones(COPIED, np.uint8), np.zeros(COPIED, np.uint8)
    with _pinned(cpu):
        np.copyto(to, from_)
        begin, copied = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < seconds or not copied:
            np.copyto(to, from_)
            copied += COPIED
    return copied / elapsed


@contextmanager
def _pinned(cpu: int) -> Iterator[None]:
    """This thread on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# The other end, as a process of its own: two threads of one interpreter would take turns.
_ECHO = """
import os, sys, json
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None  # the first process owns the memory
name, cpu = json.loads(sys.argv[1])
os.sched_setaffinity(0, {cpu})
memory = shared_memory.SharedMemory(name)
asked, answer = memory.buf[:1], memory.buf[64:65]
last = 0
print("ready", flush=True)
while last != 255:
    now = asked[0]
    if now != last:
        last = answer[0] = now
del asked, answer
memory.close()
"""


def _round_trip(cpu: int, other: int, seconds: float) -> float | None:
    """The median seconds until a word that one core writes has come back from another core."""
    from multiprocessing import shared_memory  # only here: a command that runs a plan starts sooner

    try:
        memory = shared_memory.SharedMemory(create=True, size=128)
    except OSError:  # no /dev/shm, or it is full
        return None
    buffer = memory.buf
    assert buffer is not None
    buffer[:] = bytes(128)
    command = [sys.executable, "-c", _ECHO, json.dumps([memory.name, other])]
    echo = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert echo.stdout is not None
        if not echo.stdout.readline():
            return None
        with _pinned(cpu):
            trips = sorted(_trips(buffer, time.perf_counter() + seconds))
        buffer[0] = 255
        return trips[len(trips) // 2] if trips else None
    finally:
        echo.kill()
        echo.wait()
        if echo.stdout is not None:
            echo.stdout.close()
        memory.close()
        memory.unlink()


def _trips(buffer: memoryview, end: float) -> Iterator[float]:
    """Seconds of one round trip after the other, until `end`: byte 0 asks, byte 64 answers."""
    word = 0
    while (begin := time.perf_counter()) < end:
        word = word % 250 + 1
        buffer[0] = word
        while buffer[64] != word:
            if time.perf_counter() > end:
                return
        yield time.perf_counter() - begin
