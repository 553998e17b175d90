"""Hands weights and the content of the KV cache from one open program to another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flashrt.backend import U8, OpenDevice, Place, Remote
from flashrt.ir.types import State, size
from flashrt.program import Program
from flashrt.runtime.arena import Estate, host_view

Contents = Mapping[str, U8]  # state → its pages, [page, byte]


def states_of(program: Program) -> dict[str, State]:
    """The states of a program's plan that are its cache."""
    return {s.name: s for v in program.plan.variants for s in v.stream.states if s.paged}


def places_of(program: Program) -> dict[tuple[str, str], Place]:
    """(state, device) → where a program has it, of those there are."""
    types = states_of(program)
    return {key: place for key, place in program.residents.states.items() if key[0] in types}


def page_bytes(state: State) -> int:
    """Bytes of one page of a state."""
    return size(state.type.bytes, {"P": 1})


@dataclass(frozen=True, slots=True)
class Elder:
    """What a program leaves to the next one in the host's memory. It may be closed by then.

    pages, states: of its cache, which is of use only to one of the same form and size.
    """

    estate: Estate
    pages: int
    states: Mapping[str, State]

    @staticmethod
    def of(program: Program, *, weights: bool = True) -> Elder:
        """What it has now. weights: those, too, besides the cache."""
        estate, own = program.residents.estate(), states_of(program)
        estate = estate._replace(states={k: place for k, place in estate.states.items() if k[0] in own})
        return Elder(estate if weights else estate._replace(weights={}), program.pages, own)

    def left_to(self, program: Program) -> None:
        """Lets a program that has nothing loaded yet take over what it needs."""
        alike = program.pages == self.pages and states_of(program) == self.states
        program.residents.adopt(self.estate if alike else self.estate._replace(states={}))

    def same(self, program: Program) -> bool:
        """Whether the program's cache is this one: nothing needs to move."""
        mine = {id(place) for place in self.estate.states.values()}
        return all(id(place) in mine for place in places_of(program).values())


def read(program: Program, pages: Sequence[int], lost: Collection[str] = ()) -> Contents | None:
    """What these pages hold, in host memory; None where it can't be had.

    lost: devices that aren't asked any more, unless the host sees their memory. A state that no page is
    wanted of, or that isn't there yet, is empty.
    """
    found: dict[str, U8] = {}
    types = states_of(program)
    try:
        for (name, device), place in places_of(program).items():
            if name in found:
                return None  # in two places: neither has all of it
            if device in lost and not program.devices[device].spec.pool:
                return None
            found[name] = _read(program.devices[device], place, pages, page_bytes(types[name]))
    except Exception:  # whatever a driver says of a device in trouble: what it held is lost
        return None
    return found


def _read(device: OpenDevice, place: Place, pages: Sequence[int], nbytes: int) -> U8:
    if isinstance(place.buffer, np.ndarray):
        return host_view(place).reshape(-1, nbytes)[list(pages)]
    assert isinstance(device, Remote), device
    out = np.empty((len(pages), nbytes), np.uint8)
    for row, page in zip(out, pages, strict=True):
        device.read(Place(place.buffer, place.offset + page * nbytes, nbytes), row)
    return out


def write(program: Program, pages: Sequence[int], contents: Contents, types: Iterable[State]) -> bool:
    """Fills these pages; False, and nothing is written, where the program keeps its states in another form.

    types: of the states in `contents`.
    """
    mine, places = states_of(program), places_of(program)
    if any(mine.get(s.name) != s for s in types) or {name for name, _ in places} != contents.keys():
        return False
    for (name, device), place in places.items():
        nbytes = page_bytes(mine[name])
        if isinstance(place.buffer, np.ndarray):
            host_view(place).reshape(-1, nbytes)[list(pages)] = contents[name]
            continue
        for row, page in zip(contents[name], pages, strict=True):
            program.devices[device].write(row, Place(place.buffer, place.offset + page * nbytes, nbytes))
    return True
