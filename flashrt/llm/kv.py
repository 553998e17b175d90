"""Page tables as values: which pages of the KV cache hold a sequence's tokens.

Token t of a sequence lies in entry t mod PAGE of page `table.pages[t // PAGE]`.
The memory itself belongs to the runtime; here are only numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flashrt.errors import KnobError
from flashrt.ir.ops import PAGE


def pages_for(tokens: int) -> int:
    """How many pages hold that many tokens."""
    return -(-tokens // PAGE)


@dataclass(frozen=True, slots=True)
class Table:
    """The pages of one sequence in order. row: the same as i32[M], made once a table, not once a step."""

    pages: tuple[int, ...] = ()
    row: NDArray[np.int32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row", np.array(self.pages, np.int32))

    @property
    def room(self) -> int:
        """Tokens it can hold."""
        return len(self.pages) * PAGE


EMPTY = Table()


@dataclass(frozen=True, slots=True)
class OutOfPages:
    """There are fewer free pages than wanted; nothing was taken."""

    wanted: int
    free: int


class PagePool:
    """The numbers 0 … total-1 of the cache's pages, each free or in one table.

    At rest: `free + used == total`. Raises KnobError for a pool without pages.
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise KnobError(f"pages={pages}: the KV cache needs one page of {PAGE} tokens or more")
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def take(self, count: int) -> tuple[int, ...] | OutOfPages:
        """That many pages, or none at all. The page given back last is taken first: its memory is warm."""
        if count > len(self._free):
            return OutOfPages(count, len(self._free))
        taken = tuple(self._free.pop() for _ in range(count))
        self._used.update(taken)
        return taken

    def give_back(self, pages: Iterable[int]) -> None:
        """Pages taken before; giving one back twice is our mistake."""
        for page in pages:
            assert page in self._used, f"page {page} isn't taken"
            self._used.remove(page)
            self._free.append(page)

    def resize(self, total: int, used: Iterable[int]) -> None:
        """From now on there are `total` pages, and of them `used` are taken."""
        self.total, self._used = total, set(used)
        assert all(page < total for page in self._used), (total, self._used)
        self._free = [page for page in range(total - 1, -1, -1) if page not in self._used]

    def grow(self, table: Table, tokens: int) -> Table | OutOfPages:
        """The table with room for `tokens` tokens: itself when it has it already."""
        missing = pages_for(tokens) - len(table.pages)
        if missing <= 0:
            return table
        taken = self.take(missing)
        return taken if isinstance(taken, OutOfPages) else Table(table.pages + taken)
