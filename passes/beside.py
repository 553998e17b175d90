"""Nodes that are moved to where their value is, or to what takes theirs: less crosses between devices."""

from __future__ import annotations

from collections.abc import Mapping

from flashrt.backend import LOCKED
from flashrt.ir import logical
from flashrt.passes.budget import HOSTS
from flashrt.passes.cost import LENT, PRODUCTS, block_bytes
from flashrt.passes.lending import SMALL
from flashrt.passes.spread import Seat, Whole
from flashrt.passes.task import Task
from flashrt.passes.units import users_of

LOOKUPS = ("embedding",)  # operations that read some rows of a weight: it may stay in the host's memory


def beside_their_values(seats: Mapping[str, Seat], task: Task) -> Mapping[str, Seat]:
    """Some rows of a value are taken where it is: only they cross between devices then."""
    out = dict(seats)
    for node in task.graph.nodes:
        if node.op != "rows" or node.name in task.fixed:
            continue
        here, value = seats.get(node.name), seats.get(node.inputs[0].removeprefix("%"))
        if not isinstance(here, Whole) or not isinstance(value, Whole) or here.device == value.device:
            continue
        if not task.obstacle(node, value.device):
            out[node.name] = Whole(value.device, False, "beside the value whose rows it takes")
    return out


def beside_their_takers(seats: Mapping[str, Seat], task: Task) -> Mapping[str, Seat]:
    """What a host makes of inputs alone is made on another device that takes it: it waits for nobody.

    All of it, or nothing: else the host would begin the step anyway.
    """
    found: dict[str, Seat] = {}
    users, inputs = users_of(task.graph), {f"%{i.name}" for i in task.graph.inputs}
    for node in task.graph.nodes:
        seat = seats.get(node.name)
        if not isinstance(seat, Whole) or task.kind(seat.device) not in HOSTS:
            continue
        if not {i for i in node.inputs if i[0] == "%"} <= inputs:
            continue
        takers = [seats[u.name] for u in users[node.name]]
        devices = {t.device if isinstance(t, Whole) else "" for t in takers}
        device = devices.pop() if len(devices) == 1 and node.name not in task.fixed else ""
        moved = _made_of_inputs(node, device, seat.device, task) if device else None
        if moved is None:
            return seats
        found[node.name] = moved
    return {**seats, **found}


def _made_of_inputs(node: logical.Node, device: str, host: str, task: Task) -> Whole | None:
    """Where a node sits that is on a device, not on a host; None if it can't be, or shouldn't.

    Rows of a large table are read where the host keeps it.
    """
    if task.kind(device) in HOSTS or node.op in PRODUCTS:
        return None
    nbytes = sum(block_bytes(task.weights[i[1:]]) for i in node.inputs if i[0] == "@")
    if nbytes <= SMALL and not task.obstacle(node, device):
        return Whole(device, False, "beside what takes it")
    lends = node.op in LOOKUPS and nbytes >= LOCKED
    if lends and not task.obstacle(node, device, task.kernels[node.name] + LENT):
        return Whole(device, False, f"beside what takes it; {host} keeps the table", host)
    return None
