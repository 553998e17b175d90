"""What devices can make side by side: heads of an attention, channels of a feed-forward block.

A group of nodes, from products of one value to what comes of them, divides into equal shares: the heads of
the cache with the queries that use them, or 32 channels. A device that makes some shares runs a smaller
group, with its own rows of the weights and its own heads of the cache:

%qkv = linear(%x,@qkv)                 →  %qkv#1 = linear(%x,@qkv#2:8) part=[2:8] device=b
%q, %k, %v = slices of it                 %q#1, … = slices of that
%a = attention(%q,%k,%v,…) kv.3           %a#1 = attention(%q#1,%k#1,%v#1,…) kv.3#2:8 shard=[128:512]

A product that reads the whole of it can be made of the same shares of its columns, and summed up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flashrt.ir import logical
from flashrt.ir.graph_laws import GRANULE
from flashrt.ir.ops import EXACT
from flashrt.ir.types import State, TensorType, Weight, attrs
from flashrt.layouts import BLOCK
from flashrt.passes.units import users_of

_ENDS = frozenset({"attention", "gated", "activation"})
# between a product and the end of its group: the inputs that are divided like the node
_LINKS: Mapping[str, int] = {
    "attention": 3, "gated": 2, "activation": 1, "slice": 1, "rope": 1, "rms_norm": 1, "scale": 1,
}  # fmt: skip
EPILOGUES = ("bias", "residual")


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that divide alike. nodes: names, in order; products: the linears among them; last: the node of
    which others take the value; shares: how many equal ones every value divides into."""

    last: str
    nodes: tuple[str, ...]
    products: tuple[str, ...]
    shares: int


class Parts:
    """The groups of a graph, and the smaller nodes, weights and states of some of their shares.

    weights, states: by name, those of the graph and all that `small` and `addend` have made.
    """

    def __init__(self, graph: logical.Graph, weights: Iterable[Weight] = ()) -> None:
        self.weights: dict[str, Weight] = {w.name: w for w in (*weights, *graph.weights)}
        self.states: dict[str, State] = {s.name: s for s in graph.states}
        self._small: dict[tuple[str, int, int], logical.Node] = {}
        self._nodes = {n.name: n for n in graph.nodes}
        self._users = users_of(graph)
        self._outputs = {o.value.removeprefix("%") for o in graph.outputs}
        groups = [self._group(n) for n in graph.nodes if n.op in _ENDS]
        self.groups: Mapping[str, Group] = {name: g for g in groups if g is not None for name in g.nodes}

    # ---- groups ----------------------------------------------------------------------
    def _group(self, last: logical.Node) -> Group | None:
        """What divides together with a node, up to the products it comes from."""
        shares = _shares(last)
        found = self._above(last)
        if shares < 2 or found is None or not all(self._divides(n, shares, found) for n in found.values()):
            return None
        inner = {u.name for name in found if name != last.name for u in self._users.get(name, ())}
        outputs = self._outputs & found.keys() - {last.name}
        if not inner <= found.keys() or outputs:
            return None
        nodes = tuple(name for name in self._nodes if name in found)
        return Group(last.name, nodes, tuple(n for n in nodes if found[n].op == "linear"), shares)

    def _above(self, last: logical.Node) -> dict[str, logical.Node] | None:
        found, ahead = {last.name: last}, [last]
        while ahead:
            node = ahead.pop()
            for name in node.inputs[: _LINKS[node.op]]:
                source = self._nodes.get(name[1:]) if name[0] == "%" else None
                if source is None or (source.op != "linear" and source.op not in _LINKS):
                    return None
                if source.name not in found:
                    found[source.name] = source
                    if source.op != "linear":
                        ahead.append(source)
        return found

    def _divides(self, node: logical.Node, shares: int, found: Mapping[str, logical.Node]) -> bool:
        """Whether equal shares of a node make sense: whole heads, norms and row groups."""
        width = _width(node)
        each, rest = divmod(width, shares)
        match node.op:
            case "linear":
                return not node.attr("residual") and self._rows_divide(node, shares, found)
            case "slice":
                lo = node.attr("lo")
                return (
                    rest == 0 and _whole(lo) % shares == 0 and self._nodes[node.inputs[0][1:]].op == "linear"
                )
            case "rms_norm" | "rope":
                unit = node.attr("width" if node.op == "rms_norm" else "head_dim")
                return rest == 0 and isinstance(unit, int) and each % unit == 0
        return rest == 0

    def _rows_divide(self, node: logical.Node, shares: int, found: Mapping[str, logical.Node]) -> bool:
        """Whether each share is whole row groups, of each slice where it is a joint product."""
        users = self._users.get(node.name, [])
        slices = [u for u in users if u.op == "slice"]
        if slices and (len(slices) < len(users) or not _tile(node, slices)):
            return False
        return all(_width(n) % (shares * GRANULE) == 0 for n in slices or [node])

    # ---- shares of them ------------------------------------------------------------------
    def small(self, name: str, lo: int, hi: int) -> logical.Node:
        """Shares [lo, hi) of a group's node as a node, its inputs still named as in the graph."""
        if (name, lo, hi) not in self._small:
            self._small[name, lo, hi] = self._make(name, lo, hi)
        return self._small[name, lo, hi]

    def _make(self, name: str, lo: int, hi: int) -> logical.Node:
        node, group = self._nodes[name], self.groups[name]
        made = replace(node, type=_narrow(node, _scaled(_width(node), lo, hi, group.shares)))
        match node.op:
            case "linear":
                return replace(made, inputs=self._own(node, self._rows(node, lo, hi, group.shares), lo, hi))
            case "slice":
                start = _scaled(_whole(node.attr("lo")), lo, hi, group.shares)
                ends = {"lo": start, "hi": start + _width(made)}
                return replace(made, attrs=attrs(**{**dict(node.attrs), **ends}))
            case "attention":
                return self._heads(node, made, lo, hi)
        return made

    def channels(self, name: str, lo: int, hi: int) -> tuple[int, int] | None:
        """The channels of a node's value that shares [lo, hi) are; None for joint products, where they are
        apart."""
        node, shares = self._nodes[name], self.groups[name].shares
        if node.op == "linear" and any(u.op == "slice" for u in self._users[name]):
            return None
        return _width(node) * lo // shares, _width(node) * hi // shares

    def addend(self, node: logical.Node, lo: int, hi: int) -> logical.Node:
        """A product with shares [lo, hi) of its columns; bias and residual join the first."""
        shares = self.groups[node.inputs[0][1:]].shares
        weight = self.weights[node.inputs[1][1:]]
        k = _whole(weight.type.shape[1])
        ends = k * lo // shares, k * hi // shares
        part = replace(
            weight, name=f"{weight.name}/{lo}:{hi}", of=weight.name, columns=ends,
            type=weight.type.with_shape(weight.type.shape[0], ends[1] - ends[0]),
        )  # fmt: skip
        self.weights[part.name] = part
        made = node if lo == 0 else plain(node)
        return replace(made, inputs=(made.inputs[0], f"@{part.name}", *made.inputs[2:]))

    def some_rows(self, node: logical.Node, lo: int, hi: int) -> logical.Node:
        """A product, without bias and residual, with rows [lo, hi) of its weight, whole row groups."""
        whole = self.weights[node.inputs[1][1:]]
        part = replace(
            whole, name=f"{whole.name}.{lo}:{hi}", of=whole.name, rows=(lo, hi),
            type=whole.type.with_shape(hi - lo, *whole.type.shape[1:]),
        )  # fmt: skip
        self.weights[part.name] = part
        return replace(node, type=_narrow(node, hi - lo), inputs=(node.inputs[0], f"@{part.name}"))

    def adds_up(self, node: logical.Node) -> bool:
        """Whether a product could be the sum of its parts: whole blocks of its columns."""
        group = self.groups.get(node.inputs[0][1:])
        if node.op != "linear" or group is None or group.last != node.inputs[0][1:]:
            return False
        return _width(self._nodes[group.last]) % (group.shares * BLOCK) == 0

    def _heads(self, node: logical.Node, made: logical.Node, lo: int, hi: int) -> logical.Node:
        shares = self.groups[node.name].shares
        own = {k: _scaled(_whole(node.attr(k)), lo, hi, shares) for k in ("heads", "kv_heads")}
        states = {s: self._state(s, lo, hi, shares) for s in (*node.reads, *node.writes)}
        sinks = [(_whole(node.attr("heads")) * lo // shares, _whole(node.attr("heads")) * hi // shares)]
        return replace(
            made, attrs=attrs(**{**dict(node.attrs), **own}), inputs=self._own(node, sinks, lo, hi),
            reads=tuple(states[s] for s in node.reads), writes=tuple(states[s] for s in node.writes),
        )  # fmt: skip

    def _state(self, name: str, lo: int, hi: int, shares: int) -> str:
        """The heads of a cache that shares [lo, hi) use."""
        whole = self.states[name]
        pages, two, heads, *rest = whole.type.shape
        mine = f"{name}#{lo}:{hi}"
        self.states[mine] = State(
            mine, whole.type.with_shape(pages, two, _whole(heads) * (hi - lo) // shares, *rest)
        )
        return mine

    def _rows(self, node: logical.Node, lo: int, hi: int, shares: int) -> list[tuple[int, int]]:
        """Where the shares' rows of a product's weight are."""
        slices = [u for u in self._users[node.name] if u.op == "slice"]
        spans = [(_whole(s.attr("lo")), _whole(s.attr("hi"))) for s in slices] or [(0, _width(node))]
        return [(a + (b - a) * lo // shares, a + (b - a) * hi // shares) for a, b in sorted(spans)]

    def _own(self, node: logical.Node, rows: Sequence[tuple[int, int]], lo: int, hi: int) -> tuple[str, ...]:
        """A node's inputs, with those rows of its weights instead of all."""
        return tuple(self._part(i[1:], rows, lo, hi) if i[0] == "@" else i for i in node.inputs)

    def _part(self, name: str, rows: Sequence[tuple[int, int]], lo: int, hi: int) -> str:
        whole = self.weights[name]
        count = sum(b - a for a, b in rows)
        part = replace(
            whole, name=f"{name}#{lo}:{hi}", of=name, rows=tuple(end for span in rows for end in span),
            type=whole.type.with_shape(count, *whole.type.shape[1:]),
        )  # fmt: skip
        self.weights[part.name] = part
        return f"@{part.name}"


def plain(node: logical.Node) -> logical.Node:
    """A product without bias and residual."""
    kept = {k: v for k, v in node.attrs if k not in EPILOGUES}
    return replace(node, inputs=node.inputs[:2], attrs=attrs(**kept))


def total(node: logical.Node, name: str, a: str, b: str) -> logical.Node:
    """The sum of two parts of a product."""
    return logical.Node(name, "add", (f"%{a}", f"%{b}"), node.type, numerics=EXACT, origin=node.origin)


def _shares(last: logical.Node) -> int:
    """Equal shares that a group divides into, by its last node; 0 or 1 where it doesn't divide."""
    if last.op == "attention":
        return _whole(last.attr("kv_heads"))
    width = last.type.shape[-1]
    return width // BLOCK if isinstance(width, int) and width % BLOCK == 0 else 0


def _tile(node: logical.Node, slices: Sequence[logical.Node]) -> bool:
    """Whether the slices, one behind the other, are all of the node."""
    at = 0
    for each in sorted(slices, key=lambda s: _whole(s.attr("lo"))):
        if each.attr("lo") != at:
            return False
        at = _whole(each.attr("hi"))
    return at == _width(node)


def _narrow(node: logical.Node, width: int) -> TensorType:
    return node.type.with_shape(*node.type.shape[:-1], width)


def _scaled(value: int, lo: int, hi: int, shares: int) -> int:
    return value * (hi - lo) // shares


def _width(node: logical.Node) -> int:
    return _whole(node.type.shape[-1])


def _whole(value: object) -> int:
    assert isinstance(value, int), value
    return value
