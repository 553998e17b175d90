"""interleave: units that compute and units whose weights pass, in the order in which a step ends soonest."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flashrt.passes.interleave import Load, interleave, step_times

EACH = 0.01  # microseconds a byte
COMPUTES, PASSES = Load(100.0), Load(10.0, 15_000)


def took(loads: list[Load], ring: int = 20_000) -> float:
    return float(step_times(loads, np.arange(len(loads))[None], EACH, ring)[0])


def test_copies_take_place_while_others_compute() -> None:
    """A copy takes 150 us, two others compute for 200: in turns nobody waits."""
    bunched = [PASSES, PASSES, *[COMPUTES] * 4]
    order = interleave(["layer"] * 6, bunched, EACH, 20_000)
    assert took([bunched[at] for at in order]) == 4 * 100 + 2 * 10
    assert took(bunched) > 4 * 100 + 2 * 10


def test_a_step_without_copies() -> None:
    assert took([COMPUTES, COMPUTES]) == 200


def test_weights_that_are_there_when_a_step_begins() -> None:
    """They arrived while the last unit of the step before computed."""
    assert took([PASSES, Load(150.0)]) == 160


def test_room_for_one_only() -> None:
    """The next weights come when the ones before have been used; with room beside them, earlier."""
    loads = [PASSES, PASSES, Load(400.0)]
    assert took(loads, ring=15_000) > took(loads, ring=30_000)
    assert took(loads, ring=15_000) == 10 + 150 + 10 + 400


loads = st.lists(
    st.builds(Load, st.floats(1, 1000), st.sampled_from([0, 0, 1_000, 20_000])), min_size=1, max_size=12
)


@given(loads, st.integers(1, 3), st.integers(20_000, 60_000))
def test_whatever_the_loads(loads: list[Load], kinds: int, ring: int) -> None:
    """Each place gets a load of its own kind, and the step is never slower; nor faster than its parts."""
    kind = [at % kinds for at in range(len(loads))]
    order = interleave(kind, loads, EACH, ring)
    assert sorted(order) == list(range(len(loads)))
    assert all(kind[at] == kind[place] for place, at in enumerate(order))
    least = max(sum(load.cost for load in loads), EACH * sum(load.nbytes for load in loads))
    assert least * (1 - 1e-9) <= took([loads[at] for at in order], ring) <= took(loads, ring) * (1 + 1e-9)
