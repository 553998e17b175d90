"""What parts of nodes and copies between devices cost, and how long a row of parts takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from flashrt.ir import logical
from flashrt.ir.types import Dim, TensorType, evaluate
from flashrt.machine import Device, Machine
from flashrt.passes.cost import Cost, Costs, price
from flashrt.passes.spread import Part

MERGE = 0.1  # microseconds that a merge is said to cost: parts are made in place
FREE = ("slice", "view")  # operations that `elide` leaves nothing of


class Prices:
    """Costs of parts at typical sizes. env: values of symbols; those of split variables are added to it."""

    def __init__(self, graph: logical.Graph, costs: Costs, machine: Machine, env: Mapping[str, int]) -> None:
        self.machine, self.env = machine, dict(env)
        self._costs = costs
        self.values = {n.name: n.type for n in graph.nodes}
        self._types = {i.name: i.type for i in graph.inputs} | self.values
        self._parts: dict[object, Cost] = {}
        self._est: dict[tuple[str, str, object], float] = {}
        self._bytes: dict[TensorType, float] = {}
        self._links: dict[tuple[str, str], tuple[float, float]] = {}
        self.common: frozenset[str] = frozenset()  # values that come to a device once, for many units

    def cost(self, part: Part) -> Cost:
        """A part's price as sizes in the symbols."""
        if part.merge:
            return Cost(MERGE, 0, 0)
        device = self.machine.device(part.device)
        if part.lender:
            return self._over_the_link(part, device)
        if part.sum:
            return price(part.type.bytes * 3, part.type.elements, part.node.numerics, device)
        whole = self._costs.of(part.node.name, part.device)
        if (share := _share(part)) is None:
            return whole
        node = part.node
        fixed = self._fixed(part) if node.op == "linear" else None
        key = (whole, share, fixed, node.op, node.numerics, part.device)  # the layers of a model repeat it
        if key not in self._parts:
            least = fixed.bytes if fixed else 0
            moved = least + (whole.bytes - least) * share
            self._parts[key] = price(moved, whole.flops * share, node.numerics, device, node.op)
        return self._parts[key]

    def _over_the_link(self, part: Part, device: Device) -> Cost:
        """A part that reads its weight where another device keeps it."""
        whole, link = self._costs.of(part.node.name, part.device), self.machine.link(part.lender, part.device)
        own = part.type.bytes
        beside = price(own, whole.flops, part.node.numerics, device, part.node.op).est
        crossing = (whole.bytes - own) * float(f"{1e6 / link.rate.value:.4g}") + link.latency.value
        return Cost(beside + crossing, whole.bytes, whole.flops)

    def _fixed(self, part: Part) -> TensorType:
        """What every part of a product moves whole: input for some channels, result for some columns."""
        if part.shares and part.type == self.values[part.node.name]:
            return part.type
        return self._types[part.node.inputs[0][1:]]

    def kind(self, node: logical.Node) -> object:
        """The same for nodes that cost the same."""
        cost = self._costs.of(node.name, self.machine.devices[0].id)
        return node.numerics, cost.bytes, cost.flops

    def est(self, part: Part) -> float:
        """Microseconds of a part; nothing for what is gone when the stream is made faster."""
        if part.merge or part.node.op in FREE:
            return 0.0
        key = (part.node.name, part.device, part.sum or part.shares or (part.lo, part.hi))
        if key not in self._est:
            self._est[key] = max(0.0, float(evaluate(self.cost(part).est, self.env)))
        return self._est[key]

    def copy(self, type: TensorType, src: str, dst: str) -> float:
        """Microseconds until a value of this type has come from one device to another."""
        if (src, dst) not in self._links:
            link = self.machine.link(src, dst)
            self._links[src, dst] = (link.latency.value, 1e6 / link.rate.value)
        if type not in self._bytes:
            self._bytes[type] = float(evaluate(type.bytes, self.env))
        latency, each = self._links[src, dst]
        return latency + self._bytes[type] * each


def _share(part: Part) -> Dim | None:
    """How much of its node a part is; None for all of it."""
    if part.shares:
        lo, hi, of = part.shares
        return (hi - lo) / of
    if part.lo is None or part.hi is None:
        return None
    width = part.node.type.shape[-1]
    assert isinstance(width, int), part.node.name
    return (part.hi - part.lo) * (1 / width)


def finish(
    parts: Sequence[Part], prices: Prices, homes: Sequence[str] = (), wanted: Iterable[str] = ()
) -> float:
    """Microseconds until every part is done: each device computes one after the other and copies beside it.

    homes: the devices that have the values which the parts take and none of them makes; all of them want
    `wanted` values in the end.
    """
    made = {p.name: p for p in parts}
    done: dict[str, float] = {}
    free: dict[str, float] = defaultdict(float)
    copies: dict[str, float] = defaultdict(float)
    arrived: dict[tuple[str, str], float] = {}

    def there(name: str, device: str) -> float:
        """When a value is on a device; the first to ask for it there has it copied."""
        source = made.get(name)
        origin = source.device if source else outside(name, device)
        if origin == device:
            return done.get(name, 0.0)
        if (name, device) not in arrived:
            start = max(copies[origin], done.get(name, 0.0))
            type = source.type if source else prices.values[name]
            arrived[name, device] = copies[origin] = start + prices.copy(type, origin, device)
        return arrived[name, device]

    def outside(name: str, device: str) -> str:
        far = name in prices.values and name not in prices.common and device not in homes
        return homes[0] if far else device

    def copied(name: str, device: str) -> str:
        """What a value is called on a device that makes it, too."""
        own = f"{name}@{device}"
        return own if own in made and made[own].device == device else name

    for part in parts:
        begin = max((there(i[1:], part.device) for i in part.inputs if i[0] == "%"), default=0.0)
        done[part.name] = begin
        if cost := prices.est(part):
            free[part.device] = done[part.name] = max(begin, free[part.device]) + cost
    ends = [there(name if at == 0 else copied(name, d), d) for name in wanted for at, d in enumerate(homes)]
    return max([*free.values(), *ends], default=0.0)
