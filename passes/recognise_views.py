"""Where the elements of a raw value lie in the memory of the value it is a view of.

Raw graphs carry heads and batch dimensions as axes ([1,H,T,D]); the named
operations are flat ([T,H*D]). Views, transposes and slices in between compute
nothing, so `recognise` reads them as strides and forgets them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flashrt.ir.types import Dim, Expr, evaluate, product

Shape = tuple[Dim, ...]


class _Large(dict[str, int]):
    """Any symbol is a large prime: orders strides, of which symbolic ones are the larger."""

    def __missing__(self, key: str) -> int:
        return 1_000_003


_LARGE = _Large()


@dataclass(frozen=True, slots=True)
class View:
    """Element (i, j, …) is element `offset + i·strides[0] + j·strides[1] + …` of `base`.

    base: a value or weight with its sigil; strides and offset in elements. An axis
    of size 1 has stride 0, so that views of the same elements compare equal.
    """

    base: str
    shape: Shape
    strides: Shape
    offset: Dim = 0

    def __post_init__(self) -> None:
        strides = tuple(0 if n == 1 else s for n, s in zip(self.shape, self.strides, strict=True))
        object.__setattr__(self, "strides", strides)

    @property
    def axes(self) -> tuple[tuple[Dim, Dim], ...]:
        """(size, stride) of the axes that are longer than 1."""
        return tuple((n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1)


@dataclass(frozen=True, slots=True)
class Flat:
    """`base` seen as `table`, of which the channels [lo, hi), in the shape `shape`."""

    base: str
    table: Shape
    lo: int
    hi: int
    shape: Shape

    @property
    def whole(self) -> bool:
        """Every channel of the table is meant."""
        return self.lo == 0 and (not self.table or self.hi == self.table[-1] or len(self.table) == 1)


def dense(base: str, shape: Shape) -> View:
    """All of a row-major value."""
    return View(base, shape, dense_strides(shape))


def dense_strides(shape: Shape) -> Shape:
    """Row-major strides."""
    out: list[Dim] = []
    step: Dim = 1
    for size in reversed(shape):
        out.append(step)
        step = step * size
    return tuple(reversed(out))


def _by_stride(axes: Iterable[tuple[Dim, Dim]]) -> list[tuple[Dim, Dim]]:
    return sorted(axes, key=lambda axis: -evaluate(axis[1], _LARGE))


def compact_strides(view: View, shape: Shape | None = None) -> Shape:
    """Strides of a dense value with the axis order of `view` in memory, and `shape` (default: its own)."""
    sizes = view.shape if shape is None else shape
    order = sorted(range(len(sizes)), key=lambda i: (-evaluate(view.strides[i], _LARGE), i))
    steps = dense_strides(tuple(sizes[i] for i in order))
    out: list[Dim] = [0] * len(sizes)
    for i, step in zip(order, steps, strict=True):
        out[i] = step if sizes[i] != 1 else 0
    return tuple(out)


def reshape(view: View, shape: Shape) -> View | None:
    """The same elements, in order, in another shape; None when that takes a copy."""
    runs: list[tuple[Dim, Dim]] = []  # axes that lie behind one another, merged
    for size, stride in view.axes:
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    strides: list[Dim] = []
    todo = list(shape)
    for size, stride in runs:
        taken: list[Dim] = []
        while product(taken) != size:
            if not todo:
                return None
            taken.append(todo.pop(0))
        strides += [step * stride for step in dense_strides(tuple(taken))]
    if product(todo) != 1:
        return None
    return View(view.base, shape, (*strides, *(1 for _ in todo)), view.offset)


def permute(view: View, order: Iterable[int]) -> View:
    """Axis i of the result is axis order[i]."""
    order = tuple(order)
    return replace(
        view, shape=tuple(view.shape[i] for i in order), strides=tuple(view.strides[i] for i in order)
    )


def narrow(view: View, axis: int, start: int, size: Dim, step: int = 1) -> View:
    """`size` elements from `start` along an axis."""
    shape, strides = list(view.shape), list(view.strides)
    offset = view.offset + strides[axis] * start
    shape[axis], strides[axis] = size, strides[axis] * step
    return View(view.base, tuple(shape), tuple(strides), offset)


def drop(view: View, axis: int) -> View:
    """Without an axis of size 1."""
    keep = [i for i in range(len(view.shape)) if i != axis]
    return permute(view, keep)


def expand(view: View, shape: Shape) -> View:
    """Axes of size 1, and new ones in front, repeated to `shape`."""
    new = len(shape) - len(view.shape)
    old_shape = (1,) * new + view.shape
    old_strides = (0,) * new + view.strides
    strides = tuple(s if n == m else 0 for n, m, s in zip(old_shape, shape, old_strides, strict=True))
    return View(view.base, shape, strides, view.offset)


def flat(view: View, base_shape: Shape) -> Flat | None:
    """The view as rows × channels of its base, whatever the order of its axes.

    Rows are the axes down to the innermost symbolic one (all but the innermost
    where none is symbolic). None when the elements aren't whole rows' channels
    [lo, hi), in memory order.
    """
    axes = _by_stride(view.axes)
    cut = max((i + 1 for i, (n, _) in enumerate(axes) if isinstance(n, Expr)), default=max(len(axes) - 1, 0))
    rows, channels = axes[:cut], axes[cut:]
    width = product(n for n, _ in channels)
    if not _behind_each_other(channels, 1) or not isinstance(width, int) or not isinstance(view.offset, int):
        return None
    pitch = rows[-1][1] if rows else width
    count = product(n for n, _ in rows)
    if not isinstance(pitch, int) or not _behind_each_other(rows, pitch):
        return None
    if pitch * count != product(base_shape):  # not every row
        return None
    table: Shape = (pitch,) if not rows else (count,) if pitch == 1 else (count, pitch)
    shape = (*table[:-1], width) if pitch != 1 else table
    if not axes:
        table = shape = tuple(n for n in view.shape if n == 1)[:1] if base_shape else ()
    return Flat(view.base, table, view.offset, view.offset + width, shape)


def _behind_each_other(axes: list[tuple[Dim, Dim]], step: Dim) -> bool:
    for size, stride in reversed(axes):
        if stride != step:
            return False
        step = step * size
    return True


def memory_order(view: View) -> tuple[int, ...]:
    """The axes, outermost in memory first; those of size 1 stay before the axis they stand before."""
    long = sorted(
        (i for i, n in enumerate(view.shape) if n != 1), key=lambda i: (-evaluate(view.strides[i], _LARGE), i)
    )
    if long == sorted(long):
        return tuple(range(len(view.shape)))
    return (*(i for i, n in enumerate(view.shape) if n == 1), *long)


def same_order(a: View, b: View) -> bool:
    """Whether two views of one shape (axes of size 1 in front don't count) have one order in memory."""
    a, b = _stripped(a), _stripped(b)
    return a.shape == b.shape and compact_strides(a) == compact_strides(b)


def _stripped(view: View) -> View:
    first = next((i for i, n in enumerate(view.shape) if n != 1), len(view.shape))
    return permute(view, range(first, len(view.shape)))
