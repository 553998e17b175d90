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
    """What a host makes of inputs alone, up to the first product, is made on another device that takes it: it
    waits for nobody.

    All of it, and for one device, or nothing: else the host would begin the step anyway. Nothing that is
    pinned, or has more weights than both sides may keep, but for lookups.
    """
    values, own = {f"%{i.name}" for i in task.graph.inputs}, dict[str, Whole]()
    for node in task.graph.nodes:
        seat, of_inputs = seats.get(node.name), {i for i in node.inputs if i[0] == "%"} <= values
        if not of_inputs or node.op in PRODUCTS:
            continue
        if isinstance(seat, Whole) and task.kind(seat.device) in HOSTS:
            values.add(f"%{node.name}")
            own[node.name] = seat
    users = users_of(task.graph)
    takers = {u.name for name in own for u in users[name]} - own.keys()
    devices = {seat.device if isinstance(seat := seats[name], Whole) else "" for name in takers}
    if len(devices) != 1 or (device := devices.pop()) == "" or task.kind(device) in HOSTS:
        return seats
    moved: dict[str, Seat] = {}
    for node in (n for n in task.graph.nodes if n.name in own):
        there = _made_of_inputs(node, device, own[node.name].device, task)
        if there is None:
            return seats
        moved[node.name] = there
    return {**seats, **moved}


def _made_of_inputs(node: logical.Node, device: str, host: str, task: Task) -> Whole | None:
    """Where a node sits that is on a device, not on a host; None if it can't be, or shouldn't.

    Rows of a large table are read where the host keeps it, the one that does in other plans.
    """
    names = [i[1:] for i in node.inputs if i[0] == "@"]
    nbytes = sum(block_bytes(task.weights[name]) for name in names)
    if node.name in task.fixed:
        return None
    if nbytes <= SMALL and not task.obstacle(node, device):
        return Whole(device, False, "beside what takes it")
    if node.op in LOOKUPS and nbytes >= LOCKED:
        kept = (d for name, d in task.earlier.held() if name in names and task.kind(d) in HOSTS)
        host = next(kept, host)
        if not task.obstacle(node, device, task.kernels[node.name] + LENT):
            return Whole(device, False, f"beside what takes it; {host} keeps the table", host)
    return None
