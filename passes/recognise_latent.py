"""Attention over latents (multi-head latent attention): DeepSeek-V2, section 2.1, https://arxiv.org/abs/2405.04434.

A model makes keys and values of all heads out of one small latent a token, c, and one rotated key that all
heads share: k = [c·W_Kᵀ, rotary], v = c·W_Vᵀ. Here that is found in a raw graph; `latent` makes the
operations of it, which keep c and the rotated key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashrt.ir import logical
from flashrt.ir.types import Dim, TensorType, attrs
from flashrt.passes import recognise_rotary as rotary
from flashrt.passes.recognise_patterns import Reading, is_last_axis, scalar
from flashrt.passes.recognise_recipes import Raw, Recipe
from flashrt.passes.recognise_views import Flat, View, dense_strides

OP = "flashrt.latent_attention"
EMPTY = frozenset({"aten.empty", "aten.new_empty", "aten.empty_like"})


def latent_attention(r: Reading, node: logical.Node) -> Recipe | None:
    """flashrt.attention(q, [c·W_Kᵀ, rotary], c·W_Vᵀ, …) → flashrt.latent_attention(q, c, shared key before it
    is rotated, table, @w of both W, …) keys values pairs; q before it is rotated, too. keys, values: where
    the rows of a head's W_K and W_V begin, among the head's rows of w."""
    if node.op != "flashrt.attention":
        return None
    query, key = _halves(r, node.inputs[0]), _halves(r, node.inputs[1])
    made = _made_of_latent(r, key[0], r.views[node.inputs[2]]) if key is not None else None
    if query is None or key is None or made is None:
        return None
    turned, shared = _rotated(r, query[1]), _rotated(r, key[1])
    if turned is None or shared is None or turned[1:] != shared[1:]:
        return None
    (factor, plain), (same, rotating) = _unscaled(r, query[0].view), _unscaled(r, turned[0])
    q = rotary.joined(plain, rotating) if factor == same else None
    flat_q = _heads(r, q) if q is not None else None
    flat_k = _shared_by_heads(r, shared[0])
    if flat_q is None or flat_k is None or not isinstance(scale := node.attr("scale"), float):
        return None
    _, angles, (pairs, _) = turned
    half = r.types[angles.inv_freq].shape[0]
    if half * 2 != flat_k.shape[1] or r.types[angles.positions].shape[0] != flat_k.shape[0]:
        return None
    sources = Raw(angles.positions), Raw(angles.inv_freq)
    kind = TensorType("f32", (flat_k.shape[0], half * 2))
    table = Recipe("rope_table", sources, kind, (), attrs(scale=angles.scale), angles.home)
    shape = node.type.shape
    found: tuple[Flat | Raw | Recipe, ...] = (flat_q, made.latent, flat_k, table, Raw(made.weight))
    args = (*found, *map(Raw, node.inputs[3:]))
    facts = {**dict(node.attrs), "scale": scale * factor}
    values = attrs(**facts, keys=made.keys, values=made.values, pairs=pairs)
    return Recipe(OP, args, TensorType("f32", (shape[0], shape[1] * shape[2])), dense_strides(shape), values)


# ---- what a value was put together from ------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Piece:
    """Some channels of a value [T,H,C]. view: theirs, [T,H,n]; value: the raw value that has them, in which
    the axes stand as `axes` tells: of each axis of `view`, which one it is there (-1: none, of size 1)."""

    view: View
    value: str
    axes: tuple[int, ...]


def _halves(r: Reading, value: str) -> tuple[_Piece, _Piece] | None:
    """The two pieces of a value [T,H,C] that lie behind one another in its channels."""
    view = r.views[value]
    own, spans = r.views[view.base], _spans(r, view.base)
    axes = _places(view, own)
    if spans is None or len(spans) != 2 or axes is None or view.offset != 0 or len(view.shape) != 3:
        return None
    at: Dim = 0
    found = []
    for lo, part in spans:
        if lo != at:
            return None
        at = lo + r.types[part].shape[-1]
        found.append(_Piece(_seen(r.views[part], axes), part, axes))
    return (found[0], found[1]) if at == view.shape[-1] else None


def _spans(r: Reading, value: str) -> list[tuple[Dim, str]] | None:
    """(first channel, value) of everything that was put side by side along the last axis, in order."""
    node = r.nodes.get(value)
    if node is None:
        return None
    last = len(node.type.shape) - 1
    if node.op == "aten.cat" and is_last_axis(node.attr("dim", 0), last + 1):
        sizes = [r.types[i].shape[-1] for i in node.inputs]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return list(zip(starts, node.inputs, strict=True))
    if node.op == "aten.slice_scatter" and is_last_axis(node.attr("dim", 0), last + 1):
        earlier = _spans(r, node.inputs[0])
        start, step = node.attr("start"), node.attr("step", 1)
        if earlier is None or not isinstance(start, int) or step != 1:
            return None
        if any(start < lo + r.types[part].shape[-1] for lo, part in earlier):  # type: ignore[operator]
            return None
        return [*earlier, (start, _copied(r, node.inputs[1]))]
    return [] if node.op in EMPTY else None


def _copied(r: Reading, value: str) -> str:
    """What a copy into another value took."""
    node = r.nodes.get(value)
    return node.inputs[1] if node is not None and node.op == "aten.copy" else value


def _places(view: View, own: View) -> tuple[int, ...] | None:
    """Of each axis of a view, which one it is of `own`, a view of the same value; -1 where it has size 1."""
    at = {s: i for i, (n, s) in enumerate(zip(own.shape, own.strides, strict=True)) if n != 1}
    axes = [-1 if n == 1 else at.get(s, -2) for n, s in zip(view.shape, view.strides, strict=True)]
    fits = all(i == -1 or (i >= 0 and own.shape[i] == n) for i, n in zip(axes, view.shape, strict=True))
    return tuple(axes) if fits else None


def _seen(view: View, axes: tuple[int, ...]) -> View:
    """A view with its axes in another order, those of size 1 anew."""
    shape = tuple(view.shape[i] if i >= 0 else 1 for i in axes)
    strides = tuple(view.strides[i] if i >= 0 else 0 for i in axes)
    return View(view.base, shape, strides, view.offset)


# ---- keys and values of a latent --------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Latent:
    """weight: [H*width, rank], of which a head's keys and values begin at rows `keys` and `values`."""

    latent: Flat
    weight: str
    keys: int
    values: int


def _made_of_latent(r: Reading, key: _Piece, value: View) -> _Latent | None:
    """What keys and values are made of, where both are channels of one product of every head."""
    k, base = key.view, key.view.base
    node = r.nodes.get(base)
    if node is None or node.op != "aten.linear" or len(node.inputs) != 2 or node.inputs[1][0] != "@":
        return None
    x, (rows, rank) = r.views[node.inputs[0]], r.types[node.inputs[1]].shape
    tokens, heads = k.shape[:2]
    if not isinstance(heads, int) or not isinstance(rows, int) or not isinstance(rank, int) or rows % heads:
        return None
    width = rows // heads
    for one in (k, value):
        size = one.shape[-1]
        dense = View(base, (tokens, heads, size), (rows, width, 1), one.offset)
        if one != dense or not isinstance(one.offset, int) or not isinstance(size, int):
            return None
        if one.offset + size > width:
            return None
    latent = r.flat(x)
    if latent is None or latent.shape != (tokens, rank) or x.strides[-1] != 1:
        return None
    assert isinstance(k.offset, int) and isinstance(value.offset, int)
    return _Latent(latent, r.views[node.inputs[1]].base, k.offset, value.offset)


# ---- rotary channels ----------------------------------------------------------------------------
def _rotated(r: Reading, piece: _Piece) -> tuple[View, rotary.Angles, tuple[bool, bool]] | None:
    """(what is rotated [T,H,D], by which angles, (channels turn in pairs, and are put apart)) of a piece."""
    view = r.views[piece.value]
    for found, apart in _ways(r, view.base):
        axes = _through(view, r.views[view.base])
        if axes is None or found.x.shape[-1] != view.shape[-1]:
            return None
        raw = View(
            found.x.base,
            view.shape,
            tuple(found.x.strides[i] if i >= 0 else 0 for i in axes),
            found.x.offset,
        )
        return _seen(raw, piece.axes), found.angles, (found.pairs, apart)
    return None


def _ways(r: Reading, value: str) -> Iterator[tuple[rotary.Rotated, bool]]:
    for find, apart in (
        (rotary.rotated, False),
        (rotary.rotated_halves, False),
        (rotary.rotated_apart, True),
    ):
        found = find(r, value)
        if found is not None:
            yield found, apart


def _through(view: View, own: View) -> tuple[int, ...] | None:
    """As `_places`, of a view that may repeat its value along axes: -1 there, too."""
    once = [0 if s == 0 else n for n, s in zip(view.shape, view.strides, strict=True)]
    kept = View(view.base, tuple(n or 1 for n in once), view.strides, view.offset)
    return _places(kept, own) if view.offset == 0 else None


def _unscaled(r: Reading, view: View) -> tuple[float, View]:
    """(factor, x) where a view is factor·x."""
    node = r.nodes.get(view.base)
    if node is None or node.op != "aten.mul" or (factor := scalar(node)) is None:
        return 1.0, view
    axes = _places(view, r.views[view.base])
    return (1.0, view) if axes is None else (factor, _seen(r.views[node.inputs[0]], axes))


def _heads(r: Reading, view: View) -> Flat | None:
    """[T,H,D] as [T,H*D], where it lies so."""
    tokens, heads, dim = view.shape
    flat = r.flat(view)
    lies = heads == 1 or view.strides[1] == dim
    return flat if flat is not None and flat.shape == (tokens, heads * dim) and lies else None


def _shared_by_heads(r: Reading, view: View) -> Flat | None:
    """[T,H,D] as [T,D], where it is the same for all heads."""
    tokens, _, dim = view.shape
    if view.strides[1] != 0 or view.strides[2] != 1:
        return None
    flat = r.flat(replace(view, shape=(tokens, dim), strides=(view.strides[0], 1)))
    return flat if flat is not None and flat.shape == (tokens, dim) else None
