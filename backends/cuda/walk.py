"""Launches that one kernel does together: see source/walk.cu."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flashrt.backends.cuda import args
from flashrt.backends.cuda.args import Launch, Step, launch
from flashrt.backends.cuda.linear import NAMES, SLOT, THREADS, ring_bytes, ring_depth, slot_bytes, span_of
from flashrt.backends.cuda.operands import Limits

PRODUCTS = {f"linear_{name}_1": layout for layout, name in NAMES.items()}
KINDS = {**dict.fromkeys(PRODUCTS, 0), "rope": 1, "normalise": 2, "elementwise": 3, "move_rows": 4}
ATTENTION = {f"attention_{g}_{pairs}": 5 for g in (1, 2, 4) for pairs in (1, 2)}  # up to 128 channels
KINDS |= ATTENTION
ROUNDS = 2  # of blocks over the processors: an attention with more has a kernel of its own
WORDS = 26  # of the largest arguments, as `WalkOp` has them
OP_BYTES = 8 * (4 + WORDS)
ALIGNED = -(-2 * OP_BYTES // 128) * 128  # two operations in shared memory


def walked(
    steps: Sequence[Step], limits: Limits, upload: Callable[[bytes], Any], zeros: Callable[[int], Any]
) -> Iterator[Step]:
    """The steps, with walks for neighbouring launches that can be one.

    upload: bytes → a tensor on the device, to be kept as long as the steps; zeros: so many zeroed bytes.
    """
    for group in _groups(steps, limits):
        products = {s.kernel for s in group if isinstance(s, Launch) and s.kernel in PRODUCTS}
        if len(group) > 1 and products:
            yield _walk(products.pop(), [s for s in group if isinstance(s, Launch)], limits, upload, zeros)
        else:
            yield from group


def _joins(step: Step, limits: Limits) -> bool:
    """Whether a walk may do a step."""
    if not isinstance(step, Launch) or step.kernel not in KINDS:
        return False
    if step.kernel in ATTENTION:
        return step.threads == 128 and math.prod(_shared_keys(step)) <= ROUNDS * limits.processors
    return step.kernel not in PRODUCTS or step.grid[1] == 1


def _shared_keys(step: Launch) -> tuple[int, int, int]:
    """An attention's blocks where up to four heads that have the same keys are one block's."""
    fields = args.Attention(*step.fields)  # type: ignore[arg-type]
    together = next(g for g in (4, 2, 1) if fields.heads // fields.kv_heads % g == 0)
    return step.grid[0], fields.heads // together, step.grid[2]


def _groups(steps: Sequence[Step], limits: Limits) -> Iterator[list[Step]]:
    """Neighbours that may walk together: their products are of one layout."""
    group: list[Step] = []
    product = ""
    for step in steps:
        joins = _joins(step, limits)
        own = step.kernel if isinstance(step, Launch) and joins and step.kernel in PRODUCTS else ""
        if group and (not joins or (own and product and own != product)):
            yield group
            group, product = [], ""
        if not joins:
            yield [step]
            continue
        group.append(step)
        product = own or product
    if group:
        yield group


def _walk(
    product: str,
    group: Sequence[Launch],
    limits: Limits,
    upload: Callable[[bytes], Any],
    zeros: Callable[[int], Any],
) -> Launch:
    room = max(_room(step) for step in group)
    free = limits.shared - ALIGNED - room
    slot = slot_bytes(PRODUCTS[product], span_of(PRODUCTS[product], 1 << 20, SLOT))
    while not ring_depth(slot, free):
        slot //= 2
    depth = ring_depth(slot, free)
    ops = b"".join(_op(step, slot) for step in group)
    fields = args.Walk(upload(ops).data_ptr(), len(group), zeros(64).data_ptr(), slot, depth)
    shared = ring_bytes(slot, depth) + ALIGNED + room
    first = next(args.Linear(*s.fields) for s in group if s.kernel == product)  # type: ignore[arg-type]
    name = product.removeprefix("linear_").removesuffix("_1") + "_bytes" * (first.x_kind == 2)
    return launch(f"walk_{name}", (limits.processors,), THREADS, fields, shared)


def _room(step: Launch) -> int:
    """Bytes of shared memory beside rings that an operation needs."""
    if step.kernel in ATTENTION:
        return _attention_room(args.Attention(*step.fields), _shared_keys(step)[1])  # type: ignore[arg-type]
    if step.kernel not in PRODUCTS:
        return 128
    fields = args.Linear(*step.fields)  # type: ignore[arg-type]
    return step.shared - ring_bytes(fields.slot_bytes, fields.depth)


def _attention_room(fields: args.Attention, blocks: int) -> int:
    """Bytes of four pages of keys and values, and of what each head has, as `attend` in source/walk.cu."""
    pitch = -(-fields.dim * (2 if fields.bf16 else 4) // 128) * 128 + 32
    return 128 * pitch + fields.heads // blocks * (4 * (128 + 4 * (fields.dim + 18)) + 16)


def _op(step: Launch, slot: int) -> bytes:
    fields = step.fields
    if step.kernel in PRODUCTS:
        linear = args.Linear(*fields)  # type: ignore[arg-type]
        fields = linear._replace(span=span_of(PRODUCTS[step.kernel], linear.k, slot), slot_bytes=slot)
    grid = _shared_keys(step) if step.kernel in ATTENTION else step.grid
    head = (KINDS[step.kernel], *grid)
    packed = args.packed((*head, *fields))
    return packed + bytes(OP_BYTES - len(packed))
