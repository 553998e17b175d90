"""Experts that a GPU keeps of layers whose experts are the host's: as many of each as there is room for.

    %route = route(…)                       →  the same, and on the GPU
                                               %route.cache = expert_cache(%route,%experts.table)
                                               %route.near, %route.far = slices of it
                                               %up.near = expert_linear(%x,@up.cache,%route.near)
    %up = expert_linear(%x,@up,%route)         …
    %act = gated(%up)                          %down.near = expert_linear(%act.near,@down.cache,%route.near)
    %down = expert_linear(%act,@down,%route)   and on the host, as before,
                                               %up = expert_linear(%x,@up,%route.far), …, %down
    %y = expert_sum(%down,%route)              and on the GPU
                                               %y = expert_join(%down.near,%down,%route.near)

Both sides make rows for all choices, NaN where an expert isn't theirs; the join takes each choice's from the
side that has it, in the order of choices. Which experts the cache has is told to each step; no plan says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flashrt.ir import logical
from flashrt.ir.ops import EXACT, EXPERT_TABLE, EXPERTS_ASKED
from flashrt.ir.types import Attrs, Input, State, TensorType, Weight, attrs
from flashrt.layouts import LAYOUTS, aligned
from flashrt.machine import Device
from flashrt.passes.cost import block_bytes, kernel_of
from flashrt.passes.rows import rows_of
from flashrt.passes.spread import Seat, Whole
from flashrt.passes.units import users_of

SKEW = 0.7  # a share x of the experts, those asked for most, is taken to get x ** SKEW of the choices


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's experts. router: what makes the route, with it; last: the sum of their results; nodes: from
    the first products to it, in order."""

    router: tuple[logical.Node, ...]
    route: logical.Node
    nodes: tuple[logical.Node, ...]
    last: logical.Node

    @property
    def products(self) -> list[logical.Node]:
        """Those with experts."""
        return [n for n in self.nodes if n.op == "expert_linear"]

    @property
    def experts(self) -> int:
        """How many there are."""
        return _whole(self.products[0].attrs, "experts")

    @property
    def weights(self) -> list[str]:
        """Names of the weights that have rows of every expert."""
        return [i[1:] for n in self.products for i in n.inputs if i[0] == "@"]


def cache_of(weight: str) -> str:
    """The name of the weight that has the kept rows of one."""
    return f"{weight}.cache"


def hit_share(slots: int, experts: int) -> float:
    """The share of choices that a cache is expected to have."""
    return float(f"{(slots / experts) ** SKEW:.4g}")


def layers_of(graph: logical.Graph) -> list[Layer]:
    """The layers whose experts can be on two devices: of one number of experts, that of the first."""
    found = list(_layers(graph))
    return [layer for layer in found if layer.experts == found[0].experts]


def _layers(graph: logical.Graph) -> Iterator[Layer]:
    nodes, users = {n.name: n for n in graph.nodes}, users_of(graph)
    weights, outputs = {w.name: w for w in graph.weights}, {o.value for o in graph.outputs}
    for last in graph.nodes:
        if last.op != "expert_sum":
            continue
        inner, ahead = set[str](), [last.inputs[0][1:]]
        while ahead:
            node = nodes.get(ahead.pop())
            if node is None or node.name in inner:
                continue
            inner.add(node.name)
            if not (node.op == "expert_linear" and node.attr("shared")):
                ahead += [i[1:] for i in node.inputs if i[0] == "%" and i != last.inputs[1]]
        route = nodes[last.inputs[1][1:]]
        own = tuple(n for n in graph.nodes if n.name in inner)
        layer = Layer(_router(route, nodes, users), route, own, last)
        alone = all(u.name in inner or u is last for name in inner for u in users[name])
        routes = {n.inputs[2] for n in layer.products}
        if alone and not outputs & inner and routes == {last.inputs[1]} and _whole_groups(layer, weights):
            yield layer


def _router(
    route: logical.Node, nodes: Mapping[str, logical.Node], users: Mapping[str, Sequence[logical.Node]]
) -> tuple[logical.Node, ...]:
    """The route, and the product that it alone reads."""
    scores = nodes.get(route.inputs[0][1:])
    alone = scores is not None and scores.op == "linear" and list(users[scores.name]) == [route]
    return (scores, route) if scores is not None and alone else (route,)


def _whole_groups(layer: Layer, weights: Mapping[str, Weight]) -> bool:
    """Whether an expert's rows can be copied from the weights of all."""
    return all(
        not w.of
        and rows_of(w) // layer.experts % (LAYOUTS[w.layout or "f32"].rows if len(w.type.shape) == 2 else 1)
        == 0
        for w in (weights[name] for name in layer.weights)
    )


def able(layer: Layer, device: Device, weights: Mapping[str, Weight]) -> bool:
    """Whether a device has the kernels of a layer's cache."""
    own = all(device.supports(kernel_of(n, weights), n.numerics) for n in (*layer.router, *layer.nodes))
    return own and all(device.supports(op, EXACT) for op in ("expert_cache", "expert_join", "slice"))


def router_bytes(layers: Sequence[Layer], weights: Mapping[str, Weight]) -> int:
    """Bytes of what the routers of some layers read."""
    read = {i[1:] for layer in layers for n in layer.router for i in n.inputs if i[0] == "@"}
    return sum(aligned(block_bytes(weights[name])) for name in read)


def cache_bytes(layers: Sequence[Layer], weights: Mapping[str, Weight], slots: int) -> int:
    """Bytes of the caches of some layers."""
    return sum(
        aligned(block_bytes(w, 0, rows_of(w) // layer.experts * slots))
        for layer in layers
        for w in (weights[name] for name in layer.weights)
    )


def cached(
    graph: logical.Graph, layers: Sequence[Layer], slots: int, device: str, seats: Mapping[str, Seat]
) -> tuple[logical.Graph, dict[str, Seat]]:
    """The graph with a cache of `slots` experts of each layer on a device, and where its nodes sit.

    seats: where those of the graph do. Routers come to the device: both sides wait for what they say.
    """
    experts, share = layers[0].experts, hit_share(slots, layers[0].experts)
    told = f"{slots} of the layer's {experts} experts are kept here, for about {share:.0%} of the choices"
    table = TensorType("i32", (len(layers) * experts,))
    parts = [_part(name, graph, slots, experts) for layer in layers for name in layer.weights]
    nodes = {n.name: [n] for n in graph.nodes}
    for number, layer in enumerate(layers):
        split, near, far = _routes(layer, number, slots)
        nodes[layer.route.name] += [split, near, far]
        nodes |= {n.name: [_past(n, far, share)] for n in layer.nodes}
        # what crosses to the host is on its way before the cache's products begin
        first = layer.nodes[0].name
        nodes[first] = [*(_near(n, layer, number, slots, share) for n in layer.nodes), *nodes[first]]
        rows = layer.last.inputs[0]
        join = replace(layer.last, op="expert_join", inputs=(f"{rows}.near", rows, f"%{near.name}"))
        nodes[layer.last.name] = [join]
    flat = tuple(n for some in nodes.values() for n in some)
    here = {n.name: Whole(device, False, told) for n in flat if n.op == "expert_join" or n.name not in seats}
    here |= {n.name: Whole(device) for layer in layers for n in layer.router}
    return (
        replace(
            graph,
            inputs=(*graph.inputs, Input(EXPERT_TABLE, table)),
            states=(*graph.states, State(EXPERTS_ASKED, table)),
            weights=(*graph.weights, *parts),
            nodes=flat,
        ),
        {**seats, **here},
    )


def _part(name: str, graph: logical.Graph, slots: int, experts: int) -> Weight:
    """The cache of one weight, which has the first experts when it is loaded."""
    whole = next(w for w in graph.weights if w.name == name)
    rows = rows_of(whole) // experts * slots
    shape = whole.type.with_shape(rows, *whole.type.shape[1:])
    return replace(whole, name=cache_of(name), type=shape, of=name, rows=(0, rows))


def _routes(layer: Layer, number: int, slots: int) -> tuple[logical.Node, logical.Node, logical.Node]:
    """What parts a route, and the two that come of it."""
    route, wide = layer.route, 2 * _whole(layer.last.attrs, "top_k")
    facts = attrs(experts=layer.experts, layer=number, slots=slots, top_k=wide // 2)
    split = replace(
        route, name=f"{route.name}.cache", op="expert_cache", inputs=(f"%{route.name}", f"%{EXPERT_TABLE}"),
        type=route.type.with_shape(route.type.shape[0], 2 * wide), attrs=facts,
        reads=(EXPERTS_ASKED,), writes=(EXPERTS_ASKED,), affinity=("gpu",), why="beside the cache",
        numerics=EXACT,
    )  # fmt: skip
    near, far = (
        replace(
            split, name=f"{route.name}.{side}", op="slice", inputs=(f"%{split.name}",), type=route.type,
            attrs=attrs(lo=lo, hi=lo + wide), reads=(), writes=(),
        )
        for side, lo in (("near", 0), ("far", wide))
    )  # fmt: skip
    return split, near, far


def _near(node: logical.Node, layer: Layer, number: int, slots: int, share: float) -> logical.Node:
    """The node as it is for experts of the cache."""
    inner, route = {f"%{n.name}" for n in layer.nodes}, f"%{layer.route.name}"
    product = node.op == "expert_linear"

    def ours(name: str) -> str:
        if name in inner or name == route:
            return f"{name}.near"
        return cache_of(name) if name[0] == "@" and product else name

    own = _with(node.attrs, experts=slots, layer=number, share=share) if product else node.attrs
    return replace(node, name=f"{node.name}.near", inputs=tuple(map(ours, node.inputs)), attrs=own)


def _past(node: logical.Node, far: logical.Node, share: float) -> logical.Node:
    """The node as it is for the other experts."""
    if node.op != "expert_linear":
        return node
    inputs = (*node.inputs[:2], f"%{far.name}", *node.inputs[3:])
    return replace(node, inputs=inputs, attrs=_with(node.attrs, share=round(1 - share, 4)))


def _with(given: Attrs, **more: object) -> Attrs:
    return attrs(**{**dict(given), **more})  # type: ignore[arg-type]


def _whole(given: Attrs, key: str) -> int:
    value = dict(given)[key]
    assert isinstance(value, int), key
    return value
