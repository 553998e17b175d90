"""Where the splits should stand: decided sample by sample, from what was seen since the last one.

A step is predicted as the plan's estimates, times how much slower each device's instructions run than
estimated, over the share of time in which all devices in it really run. The last is no ordinary
slowness: a core shared with another program stops for milliseconds, and whoever waits for it stops too,
however little it was given to do. So against foreign load on its cores a device must be left altogether,
against slow instructions the cuts only move.

Pure: the time comes in with each sample, nothing is read or written elsewhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from flashrt.ir.types import Env
from flashrt.runtime.elastic import Elastic, Key, Positions, key_of

WINDOW = 15.0  # seconds in which
MOST = 5  # switches may be made,
MOST_TO_RETURN = 3  # ones back to several devices only up to so many,
MOST_TO_REFINE = 2  # and small ones only up to so many
GAIN = 1.10  # a device is left, or come back to, for a step this much faster
REFINED = 1.05  # cuts move among the same devices for this much
REVERTED = 1.015  # or back to where they stood, known to be this much faster
CONFIRMED, CONFIRMED_REFINED = 2, 5  # samples in a row that say so; one is enough
DECISIVE = 3.0  # for a step so much faster, as steps show, without a device that others are seen to use
PATIENCE = 5  # doublings at most of the samples before a device that was left often is come back to
QUIET = 0.10  # share of a core's time that others may have without being called a disturbance
GONE = 0.25  # share below which a disturbance is over, for a device that was left
LEARN, FORGET = 0.3, 5.0  # weight of a new sample; seconds in which what isn't seen any more counts half
KNOWN, BANNED = 300.0, 60.0  # seconds for which times of positions are remembered, and failed moves
BLIND = 10.0  # the same where nobody tells who else uses a device: then coming back is the only probe,
FAILURES = 4  # which is made half as often each time it fails, so many times
AT_ONCE = 5.0  # seconds within which a device is left again that it was wrong to come back to
GAP = 1.0  # seconds without a sample after which the next one says nothing: the process was stopped
FEWEST = 3  # steps in a sample for their time to count


@dataclass(frozen=True, slots=True)
class Ran:
    """Steps of one variant since the last sample, all at the positions in force.

    env: symbols of the last one; None when the first still runs. seconds: of each, on average. busy: seconds
    that each device computed in the last one; {} when it wasn't looked at. running: seconds that the step
    that isn't over yet has run.
    """

    env: Env | None
    steps: int
    seconds: float
    busy: Mapping[str, float] = field(default_factory=dict)
    running: float = 0.0


@dataclass(frozen=True, slots=True)
class Switch:
    """A change that was made. at: the sample's time. positions: of every variant, after it."""

    at: float
    positions: Mapping[str, Positions]
    because: str


@dataclass(slots=True)
class _Device:
    """What is known of a device. share: of the time, that it gets; present: that it got while it had work.

    slow: seconds of its instructions per second estimated, as last learned; usual: in the long run.
    blind: nobody tells what others have of it.
    """

    share: float = 1.0
    present: float = 1.0
    slow: float | None = None
    usual: float = 1.0
    learned: float = 0.0
    blind: bool = False

    def see(self, foreign: float | None, working: bool) -> None:
        """The share that others have of its cores, None where that can't be known."""
        self.blind = foreign is None
        if foreign is None:
            self.share = self.present = 1.0
        elif working:
            self.share = self.present = max(0.05, 1.0 - foreign)
        elif foreign < GONE:
            self.share, self.present = 1.0 - foreign, 1.0
        else:  # nobody knows how many would share the core with us: one at least
            self.share = min(max(1.0 - foreign, 0.5), self.present)

    def learn(self, slow: float, now: float) -> None:
        first = self.slow is None
        self.slow = slow if self.slow is None else self.slow + LEARN * (slow - self.slow)
        self.usual = slow if first else self.usual + 0.02 * (slow - self.usual)
        self.learned = now

    def factor(self, now: float) -> float:
        """How slow it should be now: what was learned fades into what is usual."""
        assert self.slow is not None
        faded = float(0.5 ** (max(0.0, now - self.learned) / FORGET))
        return self.usual + (self.slow - self.usual) * faded


@dataclass(slots=True)
class _Variant:
    """One stream: where it stands, what was measured where, and what the last samples asked for.

    scale: measured over predicted time, and when it was measured, by position; here: the last one.
    """

    elastic: Elastic
    at: Positions
    env: Env
    scale: dict[Key, tuple[float, float]] = field(default_factory=dict)
    here: float = 1.0
    banned: dict[Key, float] = field(default_factory=dict)  # until when
    wanted: Positions | None = None
    samples: int = 0
    gain: float = 1.0
    why: str = ""

    def want(self, at: Positions | None, gain: float, why: str) -> None:
        """Counts the samples in a row that asked for the same. gain: how much faster a step would be."""
        same = at is not None and self.wanted is not None and key_of(at) == key_of(self.wanted)
        self.samples = self.samples + 1 if same else int(at is not None)
        self.wanted, self.gain, self.why = at, gain, why


class Controller:
    """Decides where the splits of a plan's variants stand. variants: those that have any."""

    def __init__(self, variants: Mapping[str, Elastic]) -> None:
        self._variants = {
            name: _Variant(e, e.start, {s.name: s.hint for s in e.stream.symbols})
            for name, e in variants.items()
        }
        self._devices = {d: _Device() for e in variants.values() for d in e.devices}
        self._left: deque[float] = deque()  # when a device was left
        self._returned, self._failures = -AT_ONCE, 0
        self._last: float | None = None  # the sample before
        self._switched: deque[float] = deque()
        self.switches: deque[Switch] = deque(maxlen=256)
        self.count = 0

    @property
    def positions(self) -> dict[str, Positions]:
        """Variant → where its splits stand."""
        return {name: v.at for name, v in self._variants.items()}

    def decide(
        self, now: float, foreign: Mapping[str, float | None], ran: Mapping[str, Ran]
    ) -> Switch | None:
        """One sample; gives the switch to be made at the next step, if there is one.

        now: seconds, never going back. foreign: by device, the largest share that others have of any of its
        cores. ran: by variant, for those of which a step ran or is running; without any nothing is switched.
        """
        before, self._last = self._last, now
        if before is not None and now - before > GAP:
            for variant in self._variants.values():
                variant.want(None, 1.0, "")
            return None
        working = {d for name in ran for d in self._variants[name].elastic.live(self._variants[name].at)}
        for id, device in self._devices.items():
            device.see(foreign.get(id), id in working)
        for name, steps in ran.items():
            self._learn(self._variants[name], steps, foreign, now)
        for name, variant in self._variants.items():
            self._consider(variant, ran.get(name), now)
        if not any(self._due(self._variants[name], now) for name in ran):
            return None
        return self._switch(now)

    # ---- what is learned
    def _learn(self, v: _Variant, ran: Ran, foreign: Mapping[str, float | None], now: float) -> None:
        v.env = ran.env or v.env
        live = v.elastic.live(v.at)
        expected = v.elastic.busy(v.env, v.at)
        for id, seconds in ran.busy.items():
            device = self._devices[id]
            if id in live and seconds > 0 and expected[id] > 0 and device.share >= 1 - QUIET:
                device.learn(seconds / expected[id], now)
        self._suffer(v, ran, live, now)
        if ran.steps < FEWEST:
            return
        v.here = ran.seconds * self._share(live) / self._predicted(v, v.at, now)
        if self._share(live) >= 1 - QUIET:
            old, when = v.scale.get(key_of(v.at), (v.here, now))
            old = old if now - when < self._memory(live) else v.here
            v.scale[key_of(v.at)] = (old + LEARN * (v.here - old), now)

    def _suffer(self, v: _Variant, ran: Ran, live: frozenset[str], now: float) -> None:
        """What a device that others use really costs: its share of the time tells the least of it."""
        worst = min((self._devices[d] for d in live), key=lambda d: d.share)
        seconds = max(ran.running, ran.seconds if ran.steps else 0.0)
        if worst.share < 1 - QUIET and seconds > 0 and v.scale:
            undisturbed = self._expected(v, v.at, now) * self._share(live)
            worst.present = min(worst.present, undisturbed / seconds)

    def _predicted(self, v: _Variant, at: Positions, now: float) -> float:
        return max(v.elastic.step(v.env, at, self._factors(now)), 1e-9)

    def _factors(self, now: float) -> dict[str, float]:
        """How slow each device is; one that wasn't timed yet as the others are."""
        timed = [d.factor(now) for d in self._devices.values() if d.slow is not None]
        usual = sum(timed) / len(timed) if timed else 1.0
        return {id: d.factor(now) if d.slow is not None else usual for id, d in self._devices.items()}

    def _expected(self, v: _Variant, at: Positions, now: float) -> float:
        """Seconds of a step at other positions: as predicted, corrected by what was measured there, or else
        where the same devices worked."""
        live = v.elastic.live(at)
        alike = {
            k: s
            for k, (s, when) in v.scale.items()
            if v.elastic.live(dict(k)) == live and now - when < self._memory(live)
        }
        timed = all(self._devices[d].slow is not None for d in live)
        other = 1.0 if timed else v.here
        scale = alike.get(key_of(at), next(reversed(alike.values()), other))
        return scale * self._predicted(v, at, now) / self._share(live)

    def _memory(self, live: frozenset[str]) -> float:
        """Seconds for which the time of these devices is remembered."""
        if any(self._devices[d].blind for d in live) and len(live) > 1:
            return BLIND * float(2**self._failures)
        return KNOWN

    def _share(self, live: frozenset[str]) -> float:
        """The share of the time in which steps of these devices get on: when all of them do."""
        return math.prod(self._devices[d].share for d in live)

    # ---- what is wanted
    def _consider(self, v: _Variant, ran: Ran | None, now: float) -> None:
        """What this sample asks for: another set of devices if that is clearly faster, or better cuts."""
        measured = ran is not None and ran.steps >= FEWEST
        current = self._current(v, ran, now)
        live = v.elastic.live(v.at)
        best, least = None, current
        for at in self._others(v, now):
            if not measured and v.elastic.live(at) == live:
                continue  # cuts don't move by a guess
            time = self._expected(v, at, now)
            if time * self._threshold(v, at, live) < current and time < least:
                best, least = at, time
        if best is None:
            v.want(None, 1.0, "")
            return
        there = v.elastic.live(best)
        shares = ", ".join(f"{d} gets {self._devices[d].share:.0%}" for d in sorted(live | there))
        v.want(
            best,
            current / least,
            f"{least * 1e3:.3g} ms a step instead of {current * 1e3:.3g} ({shares} of its time)",
        )

    def _current(self, v: _Variant, ran: Ran | None, now: float) -> float:
        """Seconds of a step as it is. Of few steps only a time that is far off counts, or one that others
        are seen to cause."""
        current = self._expected(v, v.at, now)
        if ran is None:
            return current
        seconds = ran.seconds if ran.steps else 0.0
        slowest = max(seconds, ran.running)
        if slowest > DECISIVE * current or self._share(v.elastic.live(v.at)) < 1 - GONE:
            return max(current, slowest)
        return seconds if ran.steps >= FEWEST else current

    def _others(self, v: _Variant, now: float) -> list[Positions]:
        """The positions worth a thought: both ends, the plan's own, and the best cuts for these devices."""
        found = [v.elastic.start, *v.elastic.ends]
        found += [dict(k) for k in v.scale]
        if all(d.slow is not None for d in self._devices.values()):
            found.append(v.elastic.best(v.env, self._factors(now)))
        distinct = {key_of(at): at for at in found}
        distinct.pop(key_of(v.at), None)
        return [at for k, at in distinct.items() if v.banned.get(k, now) <= now]

    def _threshold(self, v: _Variant, at: Positions, live: frozenset[str]) -> float:
        if v.elastic.live(at) != live:
            return GAIN
        return REVERTED if key_of(at) in v.scale else REFINED

    # ---- what is done
    def _due(self, v: _Variant, now: float) -> bool:
        """Whether what a variant wants has been confirmed, and there is room for another switch."""
        if v.wanted is None:
            return False
        used = sum(now - at < WINDOW for at in self._switched)
        now_live, then_live = v.elastic.live(v.at), v.elastic.live(v.wanted)
        if now_live == then_live:
            return used < MOST_TO_REFINE and v.samples >= CONFIRMED_REFINED
        if now_live <= then_live:
            return used < MOST_TO_RETURN and v.samples >= self._patience(now)
        left = now_live - then_live
        seen = any(self._devices[d].share < 1 - QUIET for d in left)
        enough = 1 if seen and v.gain >= DECISIVE else CONFIRMED
        return used < MOST and v.samples >= enough

    def _patience(self, now: float) -> int:
        """Samples before coming back: more, the oftener a device was left lately."""
        often = sum(now - at < WINDOW for at in self._left)
        return CONFIRMED << min(max(often - 1, 0), PATIENCE)

    def _switch(self, now: float) -> Switch:
        """Every variant goes where it wants to, all at once."""
        causes = []
        while self._left and now - self._left[0] >= WINDOW:
            self._left.popleft()
        left = False
        for v in self._variants.values():
            if v.wanted is None:
                continue
            before, after = v.elastic.live(v.at), v.elastic.live(v.wanted)
            left |= not before <= after
            if before == after and key_of(v.wanted) in v.scale:
                v.banned[key_of(v.at)] = now + BANNED
            causes.append(v.why)
            v.at = v.wanted
            v.want(None, 1.0, "")
        if left:
            self._left.append(now)
            again = now - self._returned < AT_ONCE
            self._failures = min(self._failures + 1, FAILURES) if again else 0
        else:
            self._returned = now
        while self._switched and now - self._switched[0] >= WINDOW:
            self._switched.popleft()
        self._switched.append(now)
        self.count += 1
        switch = Switch(now, self.positions, causes[0])
        self.switches.append(switch)
        return switch
