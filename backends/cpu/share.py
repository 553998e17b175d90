"""How threads share the work of a row: which tokens, which channels.

A step of many tokens gives each thread tokens of its own, the same ones in every row: what a thread
wrote is then in its own core's cache when it reads it, and only keys and values change cores. (A line
that another core wrote costs some 50 ns on a large server.) Tokens are dealt in runs of RUN, in turn,
since late tokens of a prompt see more keys than early ones.

A step of few tokens shares channels: there weights, which are read once, are all that counts. Each thread
begins with some of its own, one behind the other, as memory likes it; the rest they take in turns, since
cores aren't equally fast: others use them, or the memory behind them.
"""

from __future__ import annotations

from typing import Any

from flashrt.backends.cpu.intrinsics import atomic_add, inner, word
from flashrt.backends.cpu.rows import RUN, Header
from flashrt.ir.types import Dim

TURNS = 32  # a turn is this part of an even share of a large product
LEAST = 1 << 16  # bytes of weights of a turn at least, about, if so much is left for each
BACK = 8 * (len(Header._fields) - Header._fields.index("taken"))  # bytes from a kernel's fields to `taken`
RUNS = 4  # runs a thread has at least when tokens are dealt: fewer would deal them too unevenly


@inner
def dealt(tokens, nth):
    """Whether threads have tokens of their own."""
    return nth > 1 and tokens >= RUN * RUNS * nth


@inner
def runs_of(tokens, nth):
    """How many runs of tokens a thread has; some may be empty."""
    return (tokens + RUN * nth - 1) // (RUN * nth) if dealt(tokens, nth) else 1


@inner
def run_at(i, tokens, tid, nth):
    """[first, last) of a thread's i-th run."""
    if dealt(tokens, nth):
        first = min(RUN * (i * nth + tid), tokens)
        return first, min(first + RUN, tokens)
    return tokens * tid // nth, tokens * (tid + 1) // nth


@inner
def channels_of(groups, tokens, tid, nth):
    """[first, last) of the groups of channels that a thread computes, for the tokens of `product_run`."""
    if dealt(tokens, nth):
        return 0, groups
    return groups * tid // nth, groups * (tid + 1) // nth


@inner
def next_channels(row, groups, nbytes, tokens, tid, nth, last):
    """[first, last) of the groups of channels that a thread computes next, for the tokens of `product_run`;
    empty when there are no more. nbytes: of a group's weights; last: of those before, -1 at first."""
    if nth == 1 or tokens > RUN:
        return channels_of(groups, tokens, tid, nth) if last < 0 else (groups, groups)
    own = 3 * groups // (4 * nth)  # the rest is for those whose cores are faster, or not used by others
    if last < 0 and own > 0:
        return own * tid, own * (tid + 1)
    size = max(groups // (TURNS * nth), min(1 + LEAST // nbytes, (groups - own * nth) // nth), 1)
    first = min(own * nth + atomic_add(row - BACK, size), groups)
    return first, min(first + size, groups)


@inner
def product_runs(tokens, nth):
    """How many runs of at most RUN tokens a thread's channels are computed for."""
    return (tokens + RUN * nth - 1) // (RUN * nth) if dealt(tokens, nth) else (tokens + RUN - 1) // RUN


@inner
def product_run(i, tokens, tid, nth):
    """[first, last) of the i-th of them."""
    first = min(RUN * (i * nth + tid if dealt(tokens, nth) else i), tokens)
    return first, min(first + RUN, tokens)


def over_tokens(field: Dim, body: Any) -> Any:
    """The kernel that calls body(row, first, last) for each run of its thread; `field` holds the tokens."""

    def kernel(tid, nth, row):
        tokens = word(row, field)
        for i in range(runs_of(tokens, nth)):
            first, last = run_at(i, tokens, tid, nth)
            body(row, first, last)

    return kernel
