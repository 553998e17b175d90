"""Attention that a model spells out, instead of asking transformers for it, becomes `flashrt::attention`.

What stands between the product of queries and keys and the softmax is tried with numbers: a factor, and a
causal mask or one of a window, are conveyed; anything else stays as it is, and the model is refused for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashrt.frontend import rewrite, trace

_ATEN = torch.ops.aten
_SOFTMAX = {_ATEN.softmax.int, _ATEN._softmax.default}
_PRODUCTS = {_ATEN.matmul.default, _ATEN.bmm.default, _ATEN.baddbmm.default}
_UNCHANGED = {
    _ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default, _ATEN.contiguous.default,
    _ATEN.to.dtype, _ATEN.to.dtype_layout, _ATEN._to_copy.default, _ATEN.type_as.default, _ATEN.clone.default,
    _ATEN.expand.default, _ATEN.dropout.default,
}  # fmt: skip
_NOTHING = {_ATEN.zeros.default, _ATEN.zeros_like.default, _ATEN.new_zeros.default}
LENGTHS = (1, 2, 13, 40)  # tokens of a sequence for which a mask is tried, beside the longest
MOST = 1 << 27  # scores that are tried at once
TOLERANCE = 1e-6  # of weights that add up to 1


@dataclass(frozen=True, slots=True)
class _Site:
    """mixed = softmax(f(scores)) · v, where scores = factor · q · kᵀ; f is what stands between the two."""

    scores: torch.fx.Node
    softmax: torch.fx.Node
    mixed: torch.fx.Node


@dataclass(frozen=True, slots=True)
class _Mask:
    """scale times the scores, of the last `window` keys (0: all). causal: whether later keys are hidden here;

    where they aren't, transformers would have masked them: it builds no masks for us.
    """

    scale: float
    window: int
    causal: bool


def take(program: Any, buffers: Mapping[str, torch.Tensor], context: int) -> Any:
    """softmax(mask(scale·q·kᵀ))·v → flashrt::attention(q, k, v, …), causal as all decoders are.

    buffers: values of the program's buffers and constants, by their names in it. context: the longest
    sequence. Gives back the program, functional where it has such an attention.
    """
    size = rewrite.placeholder(program, "ids").meta["val"].shape[0]
    if not any(n.target in _SOFTMAX and rewrite.ends_with(n, size, size) for n in program.graph.nodes):
        return program
    program = trace.functional(program)
    size = rewrite.placeholder(program, "ids").meta["val"].shape[0]
    held = {place: buffers[name] for place, name in trace.bindings(program).items() if name in buffers}
    for node in list(program.graph.nodes):
        site = _site(node, size)
        mask = _mask(site, size, held, context) if site is not None else None
        if site is not None and mask is not None:
            _replace(program, site, mask)
    rewrite.tidy(program)
    return program


def _site(node: torch.fx.Node, size: Any) -> _Site | None:
    """The attention that ends in `node`."""
    if node.target not in _PRODUCTS or len(node.args) != 2:
        return None
    softmax = rewrite.under(node.args[0], _UNCHANGED)
    if softmax.target not in _SOFTMAX or not rewrite.ends_with(softmax, size, size):
        return None
    kind = softmax.meta["val"]
    scores = _one_product(softmax.args[0], size)
    if softmax.args[1] not in (-1, kind.dim() - 1) or scores is None:
        return None
    single = all(
        rewrite.has_shape(n, *n.meta["val"].shape[-3:]) for n in (*_sides(scores), node.args[1], node)
    )
    return _Site(scores, softmax, node) if single else None


def _one_product(value: Any, size: Any) -> torch.fx.Node | None:
    """The one product [T,T] that a value is computed from; None where there are several, or none."""
    found, todo, seen = set(), [value], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target in _PRODUCTS and rewrite.ends_with(node, size, size):
            found.add(node)
        else:
            todo += node.all_input_nodes
    return found.pop() if len(found) == 1 else None


def _sides(scores: torch.fx.Node) -> tuple[Any, Any]:
    """q and kᵀ of their product."""
    first, second = scores.args[-2:]
    return first, second


def _factor(scores: torch.fx.Node) -> float | None:
    """What a product is multiplied by; None where something is added to it."""
    if scores.target is not _ATEN.baddbmm.default:
        return 1.0
    added: Any = scores.args[0]
    nothing = scores.kwargs.get("beta", 1) == 0 or added.target in _NOTHING
    return float(scores.kwargs.get("alpha", 1)) if nothing else None  # type: ignore[arg-type]


# ---- what is done to the scores ------------------------------------------------------------
def _mask(site: _Site, size: Any, held: Mapping[str, torch.Tensor], context: int) -> _Mask | None:
    """What stands between the scores and their softmax, found by trying; None where it is something else."""
    factor, steps = _factor(site.scores), _steps(site, held)
    if factor is None or steps is None:
        return None
    longest = context if _has_mask(site, steps) else LENGTHS[-1]
    heads = site.scores.meta["val"].shape[:-2].numel()
    if heads * longest**2 > MOST:
        return None
    lengths = sorted({longest, *(n for n in LENGTHS if n < longest)}, reverse=True)
    guess: _Mask | None = None
    for length in lengths:
        scores = torch.randn(*site.scores.meta["val"].shape[:-2], length, length, generator=_generator())
        try:
            masked = _run(site, steps, size, length, held, scores)
        except Exception:  # whatever becomes of a mask that isn't one of sizes alone
            return None
        guess = guess or _guess(scores, masked)
        if guess is None or not _fits(guess, scores, masked):
            return None
    return replace(guess, scale=guess.scale * factor) if guess is not None else None


def _steps(site: _Site, held: Mapping[str, torch.Tensor]) -> list[torch.fx.Node] | None:
    """What the softmax is computed from, in order, up to the scores; None if weights or inputs are in it."""
    found, todo = set(), [site.softmax.args[0]]
    while todo:
        node: Any = todo.pop()
        if node in found or node is site.scores or isinstance(node.meta.get("val"), torch.SymInt):
            continue
        if node.op == "placeholder" and node.name not in held:
            return None
        found.add(node)
        todo += node.all_input_nodes
    return [n for n in site.softmax.graph.nodes if n in found]


def _has_mask(site: _Site, steps: Sequence[torch.fx.Node]) -> bool:
    """Whether anything but the scores takes part."""
    made = {site.scores}
    for step in steps:
        if made.isdisjoint(step.all_input_nodes):
            return True
        made.add(step)
    return False


def _run(
    site: _Site, steps: Sequence[torch.fx.Node], size: Any, length: int, held: Mapping[str, torch.Tensor],
    scores: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """What the softmax reads of the scores, in a sequence of `length` tokens."""
    values: dict[torch.fx.Node, Any] = {site.scores: scores}

    def value(node: torch.fx.Node) -> Any:
        if node not in values:
            values[node] = int(node.meta["val"].node.expr.subs({size.node.expr: length}))
        return values[node]

    for step in steps:
        if step.op == "placeholder":
            values[step] = held[step.name]
            continue
        arguments = torch.fx.node.map_arg(step.args, value)
        named = torch.fx.node.map_arg(step.kwargs, value)
        values[step] = step.target(*arguments, **named | ({"device": "cpu"} if "device" in named else {}))
    result: torch.Tensor = value(site.softmax.args[0])  # type: ignore[arg-type]
    return result.float().reshape(scores.shape)


def _guess(scores: torch.Tensor, masked: torch.Tensor) -> _Mask | None:
    """The mask, if it is one, by the first and the last query of the longest sequence."""
    length = scores.shape[-1]
    first, last = (masked.softmax(-1).reshape(-1, length, length)[0, i] > 0 for i in (0, -1))
    ours, theirs = (x.reshape(-1, length, length)[0, -1, -2:] for x in (scores, masked))
    scale = float((theirs[-1] - theirs[0]) / (ours[-1] - ours[0]))
    window, causal = int(last.sum()), int(first.sum()) == 1
    return _Mask(scale, window if window < length else 0, causal) if causal or window == length else None


def _fits(mask: _Mask, scores: torch.Tensor, masked: torch.Tensor) -> bool:
    query, key = torch.arange(scores.shape[-1])[:, None], torch.arange(scores.shape[-1])[None]
    hidden = (key > query) & mask.causal | (key <= query - mask.window) & bool(mask.window)
    wanted = (scores * mask.scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return float((masked.softmax(-1) - wanted).abs().max()) < TOLERANCE


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _replace(program: Any, site: _Site, mask: _Mask) -> None:
    """Puts the operation in the place of what was spelled out."""
    with rewrite.before(program, site.mixed) as add:
        q, turned = _sides(site.scores)
        k = add(_ATEN.transpose.int, turned, -2, -1)
        heads = []
        for value in (q, k, site.mixed.args[1]):
            flat = add(_ATEN.squeeze.dim, value, 0) if value.meta["val"].dim() == 4 else value
            heads.append(add(_ATEN.transpose.int, flat, 0, 1))
        made = add(torch.ops.flashrt.attention.default, *heads, 0, mask.scale, mask.window, 0.0, True, None)
        made = add(_ATEN.transpose.int, made, 0, 1)
        if site.mixed.meta["val"].dim() == 4:
            made = add(_ATEN.unsqueeze.default, made, 0)
    site.mixed.replace_all_uses_with(made)
