"""Judges from the picture of the machine when a plan has to be made anew: a device went or came back, or
memory is short.

Pure: pictures in, changes out. Small changes are `runtime.control`'s.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from flashrt.machine import Device, Machine

GONE_FOR = 3  # samples in a row that miss a device
SHORT_FOR = 10  # samples in a row in which memory is short
BACK_FOR = 25  # samples in a row in which a device is there again, or memory is ample
FLOOR = 128 << 20  # bytes of a memory that are left to others
AMPLE = 1.25  # of what the first plan takes has to be there before it is gone back to
WORTH = 0.95  # a plan for less memory takes at most this share of what the one before takes
APART = 60.0  # seconds between two changes, doubled for each of the last hour
MOST_APART, HOUR = 1800.0, 3600.0


@dataclass(frozen=True, slots=True)
class Picture:
    """One sample. at: seconds, never going back. gone: device → why. free: memory → bytes to be had.

    A memory is a pool of devices or a device's own, by its id; those of which nothing is known aren't in
    it.
    """

    at: float
    gone: Mapping[str, str]
    free: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes of a memory that the program has, and that its plan may yet take."""

    held: int
    due: int


@dataclass(frozen=True, slots=True)
class Change:
    """What a new plan is to be made for.

    without: devices that are left out, and why. lost: those of them that the plan in force computes on.
    caps: bytes that plans may take of a memory, where it is short. short: whether memory has become
    short, so that two plans can't be open at once.
    """

    because: str
    without: Mapping[str, str]
    lost: frozenset[str]
    caps: Mapping[str, int]
    short: bool

    def machine(self, first: Machine) -> Machine:
        """The machine that is left of the one which the first plan was made for.

        What a device was allowed of a memory that it shared passes to those that stay there.
        """
        pools: dict[str, list[Device]] = defaultdict(list)
        for device in first.devices:
            pools[memory_of(device)].append(device)
        there: dict[str, Device] = {}
        for pool, members in pools.items():
            stay = [d for d in members if d.id not in self.without]
            allowed = sum(d.budget for d in members)
            total = min(allowed, self.caps.get(pool, allowed))
            alike = len(stay) == len(members) and total == allowed
            own = sum(d.budget for d in stay)
            there |= {d.id: d if alike else replace(d, limit=total * d.budget // own) for d in stay}
        links = tuple(x for x in first.links if x.src not in self.without and x.dst not in self.without)
        return replace(first, devices=tuple(there[d.id] for d in first.devices if d.id in there), links=links)


def memory_of(device: Device) -> str:
    """The memory of a device: its pool's, or its own."""
    return device.pool or device.id


class Judge:
    """Says when a plan has to be made anew. machine: what the first plan was made for.

    used: the devices that the plan in force computes on. whole: bytes that the first plan takes of each
    memory. holding: why no plan is made although one is wanted; "" otherwise.
    """

    def __init__(self, machine: Machine, used: Iterable[str], whole: Mapping[str, int]) -> None:
        self._machine, self._used, self._whole = machine, frozenset(used), dict(whole)
        self._without: dict[str, str] = {}
        self._caps: dict[str, int] = {}
        self._in_force: tuple[dict[str, str], dict[str, int]] = {}, {}
        self._missed: dict[str, int] = defaultdict(int)
        self._present: dict[str, int] = defaultdict(int)
        self._why: dict[str, str] = {}
        self._broken: set[str] = set()  # failed, though nobody said they were gone
        self._spare: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=SHORT_FOR))
        self._short: dict[str, int] = defaultdict(int)
        self._ample: dict[str, int] = defaultdict(int)
        self._begun: deque[float] = deque()
        self._now = 0.0
        self.holding = ""

    # ---- asked
    def look(self, picture: Picture, taken: Mapping[str, Taken], *, busy: bool = False) -> Change | None:
        """One sample; gives the change to be made now, if there is one.

        taken: by memory. busy: a plan is being made; the sample is only counted.
        """
        self._now = picture.at
        self._count_devices(picture)
        self._count_memory(picture, taken)
        if busy:
            return None
        self.holding = ""
        gone = {d: self._why[d] for d in self._used if self._missed[d] >= GONE_FOR}
        gone |= {d: why for d, why in self._without.items() if d in self._used}
        if gone and (not self._without.keys() >= gone.keys() or self._room()):
            return self._change(gone, "; ".join(f"{d} is gone: {why}" for d, why in sorted(gone.items())))
        if gone:
            self.holding = "a device is gone, and the last plan without it couldn't be made"
        if gone or not self._room():
            return None
        return self._returned() or self._shrunk(taken) or self._grown()

    def failed(self, device: str, why: str) -> Change | None:
        """A device fails in every step; None when no plan can do without it."""
        again = device in self._without and device in self._used
        if again and not self._room():
            self.holding = f"{device} fails, and the last plan without it couldn't be made"
            return None
        if not self._missed[device]:
            self._broken.add(device)
        return self._change({device: why}, f"{device} fails: {why}")

    def settled(self, used: Iterable[str]) -> None:
        """The plan for the last change is in force. used: the devices that it computes on."""
        self._used, self._in_force = frozenset(used), (dict(self._without), dict(self._caps))

    def given_up(self) -> None:
        """The last change came to nothing: the plan in force stays."""
        without, caps = self._in_force
        self._without, self._caps = {**without, **self._without}, dict(caps)

    # ---- counted
    def _count_devices(self, picture: Picture) -> None:
        for device in (d.id for d in self._machine.devices):
            if device not in picture.gone:
                self._missed[device], self._present[device] = 0, self._present[device] + 1
                continue
            if self._present[device] or self._missed[device]:  # not one that was never listed
                self._missed[device] += 1
            self._present[device], self._why[device] = 0, picture.gone[device]
            self._broken.discard(device)

    def _count_memory(self, picture: Picture, taken: Mapping[str, Taken]) -> None:
        for memory, there in taken.items():
            free = picture.free.get(memory)
            spare = None if free is None else free - there.due - FLOOR
            self._short[memory] = self._short[memory] + 1 if spare is not None and spare < 0 else 0
            wanted = self._whole.get(memory, 0) * AMPLE
            ample = free is not None and there.held + free - FLOOR >= wanted
            self._ample[memory] = self._ample[memory] + 1 if ample else 0
            if free is not None:
                self._spare[memory].append(free - FLOOR)

    def _room(self) -> bool:
        """Whether enough time has passed since the last change, which grows with how many there were."""
        while self._begun and self._now - self._begun[0] >= HOUR:
            self._begun.popleft()
        if not self._begun:
            return True
        apart = min(APART * 2 ** (len(self._begun) - 1), MOST_APART)
        return self._now - self._begun[-1] >= apart

    # ---- decided
    def _returned(self) -> Change | None:
        back = [d for d in self._without if d not in self._broken and self._present[d] >= BACK_FOR]
        if not back:
            return None
        for device in back:
            del self._without[device]
        return self._change({}, f"{', '.join(sorted(back))} {'is' if len(back) == 1 else 'are'} back")

    def _shrunk(self, taken: Mapping[str, Taken]) -> Change | None:
        """Less of a memory, where what is left of it doesn't do for the plan."""
        for memory, there in taken.items():
            if self._short[memory] < SHORT_FOR:
                continue
            cap, all_ = there.held + min(self._spare[memory]), there.held + there.due
            if not 0 < cap <= all_ * WORTH:
                self.holding = f"{memory} is short of memory, and no plan takes {_size(all_ - cap)} less"
                continue
            self._caps[memory] = cap
            because = f"{memory} has {_size(cap)} left for the plan, which takes {_size(all_)}"
            return self._change({}, because, short=True)
        return None

    def _grown(self) -> Change | None:
        """All of a memory again, where there is enough of it."""
        ample = [m for m in self._caps if self._ample[m] >= BACK_FOR]
        if not ample:
            return None
        for memory in ample:
            del self._caps[memory]
        return self._change({}, f"{', '.join(ample)} has memory for the first plan again")

    def _change(self, gone: Mapping[str, str], because: str, *, short: bool = False) -> Change | None:
        self._without |= gone
        if all(d.id in self._without for d in self._machine.devices):
            self.holding = f"no device is left: {because}"
            return None
        self._begun.append(self._now)
        self._short.clear()
        lost = frozenset(self._without) & self._used
        return Change(because, dict(self._without), lost, dict(self._caps), short)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.3g} MB" if nbytes < 1e9 else f"{nbytes / 1e9:,.3g} GB"
