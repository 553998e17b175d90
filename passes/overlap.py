"""Loads weights beside the computing: prefetch and evict move to a lane of their own.

    prefetch lane=compute block=w              prefetch lane=copy_in signals=!0 block=w
    dispatch lane=compute args=[…,@w]     →    dispatch lane=compute waits=[!0] signals=!1 args=[…,@w]
    evict    lane=compute block=w              evict    lane=copy_in waits=[!1] block=w

The order of the copy lane stays the order of the stream, so ring memory that an evict
gives back is free for the prefetches behind it, in the next step too.
"""

from __future__ import annotations

from dataclasses import replace

from flashrt.ir import micro
from flashrt.passes.ticks import synchronise

COPY_IN = "copy_in"


def overlap(stream: micro.Stream) -> micro.Stream:
    """Moves loads and evictions to the lane "copy_in" and makes the ticks for it."""
    moved = tuple(
        replace(i, lane=COPY_IN) if isinstance(i, micro.Prefetch | micro.Evict) else i for i in stream.instrs
    )
    return synchronise(replace(stream, instrs=moved))
