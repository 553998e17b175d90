"""A thread that keeps a live picture of the machine: loads, frequencies, free memory, delivered rates.

Every sample is an immutable `Live`. One probe that fails becomes a reason in it; the loop goes on.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from flashrt.machine import Device
from flashrt.probes import host
from flashrt.probes.delivered import HALF_LIFE, Delivered, Learner
from flashrt.probes.live import DROPPED, UNLISTED, Core, Cores, FreeMemory
from flashrt.probes.nvidia import Gpu, Gpus, Nvidia

PERIOD = 0.2  # seconds
RETRY = 10.0  # seconds until a driver that wasn't there is asked again
THREAD = "flashrt-sampler"

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Live:
    """The machine over one period. number: 1 for the first sample; at: seconds of time.monotonic.

    cores: those this process may use. free: bytes of host memory to be had. gpus: as the driver tells,
    lost ones included. delivered: rates by device id. reasons: what isn't known → why; "cores" and
    "free" of the host, "gpus", "gpu:0", "listener".
    """

    number: int
    at: float
    cores: tuple[Core, ...]
    free: int | None
    gpus: tuple[Gpu, ...]
    delivered: Mapping[str, Delivered]
    reasons: Mapping[str, str]

    def foreign(self, device: Device) -> float | None:
        """The largest share that others have of any of the device's cores.

        The largest, since a team is as slow as its slowest member. None when it isn't known, and for
        a device that isn't the host's: its driver doesn't tell whose load it is.
        """
        if device.pool != host.POOL:
            return None
        known = [c.foreign for c in self.cores if not device.cpus or c.cpu in device.cpus]
        shares = [share for share in known if share is not None]
        return max(shares) if shares and len(shares) == len(known) else None

    def lost(self, device: Device) -> str:
        """Why a device is gone; "" while it is there, or where nobody tells."""
        if device.kind == "gpu":
            listed = {gpu.id: gpu.lost for gpu in self.gpus}
            return listed.get(device.id, self.reasons.get("gpus") or "the driver no longer lists it")
        gone = (c for c in self.cores if c.cpu in device.cpus and c.reason in (UNLISTED, DROPPED))
        return next((f"core {c.cpu}: {DROPPED}" for c in gone), "")

    def room(self, device: Device) -> int | None:
        """Bytes that are to be had of the memory a device uses; None when not known."""
        if device.pool == host.POOL:
            return self.free
        return next((gpu.free for gpu in self.gpus if gpu.id == device.id), None)


Listener = Callable[[Live], None]


class Sampler:
    """Samples every `period` seconds between `start` and `stop`. Its methods may be called from any thread.

    root: where /proc and /sys are found. nvidia: as `Nvidia()`. clock: seconds, never going back.
    pid: the process whose load is a core's `own`; None for this one.
    """

    def __init__(
        self,
        *,
        period: float = PERIOD,
        half_life: float = HALF_LIFE,
        root: Path = host.ROOT,
        nvidia: Nvidia | None = None,
        clock: Callable[[], float] = time.monotonic,
        pid: int | None = None,
    ) -> None:
        self.period = period
        self._root, self._clock = root, clock
        self._cores, self._memory = Cores(root, pid=pid), FreeMemory(root)
        self._nvidia, self._ask_again = nvidia or Nvidia(), -math.inf
        self._no_gpus = Gpus()
        self._learner = Learner(half_life, clock)
        self._listeners: tuple[Listener, ...] = ()
        self._deaf = ""  # why the last listener failed
        self._latest: Live | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()  # of start, stop and listeners
        self._sampling = threading.Lock()

    # ---- what there is to see ------------------------------------------------------
    @property
    def latest(self) -> Live | None:
        """The newest sample; None before the first."""
        return self._latest

    @property
    def age(self) -> float:
        """Seconds since the newest sample, infinite before the first: for a watchdog."""
        latest = self._latest
        return math.inf if latest is None else max(0.0, self._clock() - latest.at)

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def observe(self, device: str, bytes: float, flop: float, seconds: float) -> bool:
        """As `Learner.observe`: what an instruction moved and computed, and how long it ran."""
        return self._learner.observe(device, bytes, flop, seconds)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with every sample, on the sampler's thread; gives a function that ends that.

        An exception in it becomes the next sample's reason "listener".
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with self._lock:
                self._listeners = tuple(x for x in self._listeners if x is not listener)

        return end

    # ---- the loop ------------------------------------------------------------------
    def start(self) -> None:
        """Begins, unless it has begun."""
        with self._lock:
            if self.running:
                return
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name=THREAD, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread, unless it has ended, and closes the files; `start` opens them again."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._sampling:
            self._cores.close()
            self._memory.close()
            self._nvidia.close()

    def _run(self, stop: threading.Event) -> None:
        due = self._clock()
        while not stop.is_set():
            self.sample()
            # from the moment it was due, so that the period doesn't drift; never in a burst after a pause
            due = max(due + self.period, self._clock())
            stop.wait(due - self._clock())

    def sample(self) -> Live:
        """One sample now, for the listeners too. The loop calls it; a test may."""
        with self._sampling:
            now = self._clock()
            failed: dict[str, str] = {}
            cores = _tried("cores", failed, lambda: self._cores.read(now)) or ()
            free, why = _tried("free", failed, self._memory.read) or (None, "")
            gpus = _tried("gpus", failed, lambda: self._gpus(now)) or Gpus()
            delivered = self._learner.rates()
            stated = {"free": why, "gpus": gpus.reason, "listener": self._deaf}
            stated |= {gpu.id: gpu.lost for gpu in gpus.gpus}
            stated |= {"cores": next((c.reason for c in cores if c.reason), "")}
            reasons = {name: why for name, why in stated.items() if why} | failed
            number = self._latest.number + 1 if self._latest else 1
            live = Live(number, now, cores, free, gpus.gpus, delivered, MappingProxyType(reasons))
            self._latest = live
        self._tell(live)
        return live

    def _gpus(self, now: float) -> Gpus:
        """What the driver says; where there is none it is asked only now and then."""
        if now < self._ask_again:
            return self._no_gpus
        found = self._nvidia.read(whole=False)
        if found.reason:
            self._no_gpus, self._ask_again = found, now + RETRY
        return found

    def _tell(self, live: Live) -> None:
        self._deaf = ""
        for listener in self._listeners:
            try:
                listener(live)
            except Exception as error:  # one listener's defect is no reason to stop watching the machine
                self._deaf = f"{type(error).__name__}: {error}"

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _tried(name: str, failed: dict[str, str], read: Callable[[], R]) -> R | None:
    """What the probe gives, or None, with the reason written down."""
    try:
        return read()
    except Exception as error:  # a probe reads strange systems: whatever it meets, the loop goes on
        failed[name] = f"{type(error).__name__}: {error}"
        return None
