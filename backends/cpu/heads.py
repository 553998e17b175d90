"""Products by heads: the kernel of a linear, called for each head's channels and rows of the weight.

So a number has the bits that a linear would give it. Threads share the work by 16 channels.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flashrt.backends.cpu import rows
from flashrt.backends.cpu.experts import fill_field
from flashrt.backends.cpu.intrinsics import copy_bytes, inner, operand, stack, word
from flashrt.backends.cpu.linear import Kernel, zero

H = rows.Heads(*range(len(rows.Heads._fields)))
L = rows.Linear(*range(len(rows.Linear._fields)))


def head_product(module: str, maker: str, *args: Any) -> Kernel:
    """The kernel that a linear's kernel `module.maker(*args)` makes."""
    product = inner(getattr(import_module(f"flashrt.backends.cpu.{module}"), maker)(*args))

    @inner
    def some_channels(row, head, unit, units, one):
        """`units` times 16 channels of a head. one: a row of a linear."""
        n, kept = word(row, H.n), word(row, H.d) - word(row, H.k)
        channel = head * (kept + n) + kept + 16 * unit
        weights = operand(row, H.w_at, H.w) + head * word(row, H.head_bytes) + unit * word(row, H.unit_bytes)
        fill_field(one, L.x, word(row, H.x) + 4 * head * word(row, H.d))
        fill_field(one, L.w, weights)
        fill_field(one, L.y, word(row, H.y) + 4 * channel)
        fill_field(one, L.n, min(n - 16 * unit, 16 * units))
        product(0, 1, one)

    @inner
    def keep(row, first, last):
        """The channels behind the first k of (token, head) pairs [first, last)."""
        heads, d, k, n = word(row, H.heads), word(row, H.d), word(row, H.k), word(row, H.n)
        for item in range(first, last):
            t, head = item // heads, item % heads
            x = word(row, H.x) + 4 * (t * word(row, H.x_stride) + head * d + k)
            copy_bytes(word(row, H.y) + 4 * (t * word(row, H.y_stride) + head * (d - k + n)), x, 4 * (d - k))

    def kernel(tid, nth, row):
        heads, units, tokens = word(row, H.heads), (word(row, H.n) + 15) >> 4, word(row, H.t)
        one = stack(8 * 16)
        zero(one, 2)
        fill_field(one, L.x_stride, word(row, H.x_stride))
        fill_field(one, L.y_stride, word(row, H.y_stride))
        fill_field(one, L.t, tokens)
        fill_field(one, L.k, word(row, H.k))
        at, end = heads * units * tid // nth, heads * units * (tid + 1) // nth
        while at < end:
            count = min(units - at % units, end - at)
            some_channels(row, at // units, at % units, count, one)
            at += count
        if word(row, H.d) > word(row, H.k):
            keep(row, tokens * heads * tid // nth, tokens * heads * (tid + 1) // nth)

    return kernel
