"""Rows that run as one kernel although the result was to lie where something is still read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from flashrt.backend import Memory, Place
from flashrt.backends.cuda.fuse import Fuser, Taking, rows_of
from flashrt.ir.micro import Transfer
from flashrt.ir.text import read_micro
from tests.backends import cpu_streams
from tests.backends.kernel_texts import AT

ROWS = 64
BUFFER = np.zeros(1, np.uint8)
WIDTH = 4 * 32 * ROWS  # bytes of a slot of f32
GATED = f"""weight w f32[32,32] sources=[w] layout=f32
slot %0 cpu:0 f32[T,64]
slot %1 cpu:0 f32[T,32]
slot %2 cpu:0 bf16[T,32]
slot %3 cpu:0 f32[T,32]
slot %4 cpu:0 f32[T,32]
block w cpu:0 lo=0 hi=32 bytes=0
dispatch {AT} kernel=gated args=[%0[0:32],%0[32:64]] dst=%1 attrs={{act="silu"}} numerics="acc=f32"
quantize {AT} src=%1 dst=%2 scheme=bf16
MORE
dispatch {AT} kernel=linear.f32 args=[%2,@w] dst=%3 numerics="act=bf16 acc=f32"
"""


def fuser(more: str, at: dict[int, int]) -> tuple[Fuser, list[Any]]:
    """The fuser of the stream, with so many more rows behind the rounding, and its rows. at: where slots
    begin."""
    stream = read_micro(cpu_streams.HEAD + GATED.replace("MORE\n", more))
    widths = {0: 2 * WIDTH, 2: WIDTH // 2}
    places = {slot: Place(BUFFER, begin, widths.get(slot, WIDTH)) for slot, begin in at.items()}
    memory = SimpleNamespace(stream=stream, slot=lambda slot: places[slot])
    made = Fuser(
        cast(Memory, memory), lambda linear: False, lambda linear: Taking.NOT, lambda attention: False
    )
    return made, rows_of([i for i in cpu_streams.compute(stream) if not isinstance(i, Transfer)])


ADDED = f'dispatch {AT} kernel=add args=[%0[0:32],%0[32:64]] dst=%4 numerics="acc=f32"\n'
FAR = 100 * WIDTH


@pytest.mark.parametrize(
    "more,at,moved",
    [
        pytest.param("", {1: FAR, 2: 3 * WIDTH}, None, id="it lies apart"),
        pytest.param("", {1: FAR, 2: WIDTH}, FAR, id="it takes the place of what isn't rounded"),
        pytest.param(
            "", {1: FAR, 2: 0, 3: FAR - WIDTH // 2}, FAR + WIDTH // 2, id="its end, of which none is written"
        ),
        pytest.param(ADDED, {1: FAR, 2: 0, 4: FAR - WIDTH // 2}, FAR + WIDTH // 2, id="as one writes there"),
    ],
)
def test_a_rounded_result_finds_a_place(more: str, at: dict[int, int], moved: int | None) -> None:
    made, rows = fuser(more, {0: 0, 3: 10 * WIDTH, 4: 20 * WIDTH} | at)
    joints = made.join(rows)
    assert joints[0].rounded is not None and len(joints) == len(rows) - 1
    place = made.moved.get(2)
    assert (place.offset if place else None) == moved
    assert place is None or place.bytes == WIDTH // 2


@pytest.mark.parametrize(
    "more,at",
    [
        pytest.param(ADDED, {1: FAR, 2: 0, 4: FAR}, id="all of its place is written before it is read"),
        pytest.param("", {1: WIDTH, 2: 0}, id="its place is still read, too"),
        pytest.param(ADDED.replace("%0[0:32]", "%1"), {1: FAR, 2: 0}, id="somebody wants it unrounded"),
        pytest.param(
            "transfer device=cpu:0 lane=copy src=%3 dst=%4 to=cpu:0\n", {1: FAR, 2: 0, 4: FAR},
            id="another lane writes there, whenever that is",
        ),
    ],
)  # fmt: skip
def test_without_a_place_it_is_rounded_by_a_kernel_of_its_own(more: str, at: dict[int, int]) -> None:
    made, rows = fuser(more, {0: 0, 3: 10 * WIDTH, 4: 20 * WIDTH} | at)
    assert made.join(rows)[0].rounded is None and not made.moved
