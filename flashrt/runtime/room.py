"""How large a KV cache there is room for: by what a plan may take of its devices, and by what is free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashrt.backend import OpenDevice, Remote
from flashrt.errors import DeviceError, PlanError
from flashrt.ir import micro
from flashrt.ir.ops import PAGE
from flashrt.ir.types import size
from flashrt.llm.kv import pages_for

if TYPE_CHECKING:
    from flashrt.program import Plan, Variant

OWN = ("gpu",)  # kinds of device with memory of their own, which isn't the host's


def page_count(plan: Plan, context: int, sequences: int, free: int | None = None) -> int:
    """Pages for `sequences` whole contexts, or as many as the plan's budgets and half of `free` hold.

    free: bytes of host memory that are free now, None when not known. Of a device with memory of its own it
    says nothing: what is free there shows when the plan is opened (`fitting`).

    Raises:
        PlanError: there is no room for a single page.
    """
    pages = pages_for(context) * sequences
    for variant in plan.variants:
        for budget in variant.budgets:
            page = _page_bytes(variant, budget.device)
            left = budget.limit - budget.weights - budget.activations - budget.workspace
            if free is not None and plan.machine.device(budget.device).kind not in OWN:
                left = min(left, free // 2)
            if page and left < page:
                raise PlanError(
                    f"no room for the KV cache on {budget.device}: a page takes {page} bytes, {max(left, 0)} "
                    "are left for it",
                    hint="free some memory, or compile with fewer tokens a step",
                )
            pages = min(pages, left // page) if page else pages
    return pages


def fitting(plan: Plan, opened: Mapping[str, OpenDevice], pages: int, least: int) -> int:
    """As many pages as devices with memory of their own have room for, beside all else that the plan takes
    there: all, or half of them, and so on, down to `least`.

    Raises DeviceError where there is no room for those.
    """
    for id, device in opened.items():
        if not isinstance(device, Remote):
            continue
        page = max(_page_bytes(v, id) for v in plan.variants)
        beside = _beside_state(plan, id)
        while lacking := _lacking(device, beside + pages * page):
            if pages == least or not page:
                raise DeviceError(
                    f"{id} has no room for {plan.name}: it takes {(beside + pages * page) / 1e9:.2f} GB, "
                    f"{pages * page / 1e9:.2f} GB of it for {pages * PAGE} tokens ({lacking})",
                    hint=f"end what else uses {id}, or compile with less of it (--budget {id}=SIZE) or for "
                    "shorter sequences (--context N)",
                )
            pages = max(pages // 2, least)
    return pages


def remarks(plan: Plan, wanted: int, pages: int) -> tuple[str, ...]:
    """What is to be said of a cache with fewer pages than were wanted."""
    ids = ", ".join(d.id for d in plan.machine.devices if d.kind in OWN)
    told = f"the KV cache has room for {pages * PAGE} tokens instead of {wanted * PAGE}"
    return (f"{told}: something else uses the memory of {ids}",) if pages < wanted else ()


def _page_bytes(variant: Variant, device: str) -> int:
    """Bytes of a page of the caches that a device has."""
    held = {
        state
        for i in variant.stream.instrs
        if isinstance(i, micro.Dispatch) and i.device == device
        for state in (*i.reads, *i.writes)
    }
    return sum(size(s.type.bytes, {"P": 1}) for s in variant.stream.states if s.paged and s.name in held)


def _beside_state(plan: Plan, device: str) -> int:
    """Bytes that a plan takes of a device but for state; variants take turns."""
    budgets = [b for v in plan.variants for b in v.budgets if b.device == device]
    weights = max((b.weights for b in budgets), default=0)
    return weights + max((b.activations + b.workspace for b in budgets), default=0)


def _lacking(device: OpenDevice, nbytes: int) -> str:
    """What a device says when so much of its memory can't be had, "" where it can."""
    try:
        device.reserve(nbytes)  # and dropped at once: nothing is loaded in vain
    except MemoryError as error:
        return str(error) or "no memory left"
    return ""
