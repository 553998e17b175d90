"""Trace records as text: what is written reads back the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flashrt.runtime.trace import StepTrace, Trace, read_trace

times = st.integers(0, 2**62)


@st.composite
def steps(draw: st.DrawFn) -> StepTrace:
    count = draw(st.integers(0, 4))
    stamps = draw(st.lists(st.tuples(times, times, times), min_size=count, max_size=count))
    return StepTrace(
        draw(st.sampled_from(["small", "large"])), draw(st.integers(1, 10**6)), draw(times), draw(times),
        draw(st.dictionaries(st.sampled_from("TNS"), st.integers(0, 512))),
        np.array(stamps, np.int64).reshape(-1, 3),
    )  # fmt: skip


@given(st.lists(steps(), max_size=3))
def test_round_trip(made: list[StepTrace]) -> None:
    lines = list(Trace(made).lines())
    assert not any("\n" in line for line in lines)
    back = read_trace(iter(lines))
    assert [_facts(s) for s in back.steps] == [_facts(s) for s in made]
    assert all(s.stamps.dtype == np.int64 and s.stamps.shape[1:] == (3,) for s in back.steps)


def _facts(step: StepTrace) -> tuple[object, ...]:
    return step.variant, step.epoch, step.begun, step.ended, dict(step.env), step.stamps.tolist()
