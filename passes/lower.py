"""From the physical graph to micro-instructions: right first, strictly serial, nothing reused.

Every value gets a slot of its own, every weight is loaded directly before its first use
and evicted directly after its last one, and everything of a device runs in its lane
"compute", copies to other devices in the source's lane "copy_out", or in "compute" where one of
the two can reach the other one's memory itself.

    %y = linear(%x,@w,@b) {bias=true} numerics="act=i8/32 …"  →  quantize %x → %xq
                                                                 prefetch w, prefetch b
                                                                 bias b
                                                                 dispatch linear.q4.16x32+bias(%xq,@w) → %y
                                                                 evict w, evict b
    %y = merge(%y#0,%y#1@cpu:0)   →  nothing: dispatch and transfer write %y[0:s3] and %y[s3:N]
    %y = attention(%q,%k,%v,…)    →  dispatch kv_write(%k,%v,…), dispatch attention(%q,…)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flashrt.ir import micro, physical
from flashrt.ir.bounds import Bounds
from flashrt.ir.ops import EXACT, KV_WRITE_BF16, QUANTIZED
from flashrt.ir.order import COMPUTE
from flashrt.ir.types import Dim, Output, TensorType, evaluate
from flashrt.machine import Device, Machine
from flashrt.passes.budget import HOSTS, weight_road
from flashrt.passes.cost import block_bytes, kernel_of, settings
from flashrt.passes.rows import rows_used, takes_channels
from flashrt.passes.strided import input_takes_range
from flashrt.passes.ticks import synchronise

COPY_OUT = "copy_out"
GPU = "gpu"
CARRIED = 1 << 20  # bytes in a usual step up to which a GPU's own code copies: more go by its copy engines


def lower(graph: physical.Graph, machine: Machine | None = None) -> micro.Stream:
    """The serial stream. machine: gives the estimates of loading weights; without it they are 0."""
    return synchronise(_Lowering(graph, machine).stream())


@dataclass(slots=True)
class _Group:
    """Instructions that use the same blocks; rows used of each block, by name. keeper: whose these are."""

    keeper: str
    instrs: list[micro.Instr]
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Lowering:
    """The state of one lowering: slots handed out so far and instructions emitted so far."""

    def __init__(self, graph: physical.Graph, machine: Machine | None) -> None:
        self._graph, self._machine = graph, machine
        self._bounds = Bounds.of(graph)
        self._usual = {s.name: s.hint for s in graph.symbols} | {s.name: s.start for s in graph.splits}
        self._nodes = {n.name: n for n in graph.nodes}
        self._inputs = {i.name: i.type for i in graph.inputs}
        self._weights = {w.name: w for w in graph.weights}
        self._outputs = [o.value.removeprefix("%") for o in graph.outputs]
        self._merged = _parts_in_place(graph, self._outputs)
        self._slots: list[micro.Slot] = []
        self._homes: dict[tuple[str, str], int] = {}  # (value or input, device) → slot
        self._quantised: dict[tuple[str, micro.SlotRef, str], micro.SlotRef] = {}
        self._groups: list[_Group] = []
        self._lent: set[tuple[str, str]] = set()  # (block, device) that others read: they stay

    def stream(self) -> micro.Stream:
        """Lowers all nodes; ticks are still missing."""
        for node in self._graph.nodes:
            self._node(node)
        outputs = tuple(
            Output(o.name, self._output(v)) for o, v in zip(self._graph.outputs, self._outputs, strict=True)
        )
        blocks = self._blocks()
        g = self._graph
        return micro.Stream(
            name=g.name, symbols=g.symbols, splits=g.splits, inputs=g.inputs, weights=g.weights,
            states=g.states, slots=tuple(self._slots), blocks=tuple(blocks.values()),
            instrs=tuple(self._loaded(blocks)), outputs=outputs,
        )  # fmt: skip

    # ---- slots ---------------------------------------------------------------
    def _slot(self, device: str, type: TensorType, input: str = "") -> int:
        self._slots.append(micro.Slot(len(self._slots), device, type, input=input))
        return len(self._slots) - 1

    def _home(self, value: str, device: str) -> micro.SlotRef:
        """Where a value lies on a device: its own slot, or its channels of the slot it is merged in."""
        merge = self._merged.get(value)
        if merge is not None:
            whole = self._home(merge.name, device)
            return micro.SlotRef(whole.slot, *_channels(self._nodes[value], merge))
        if (value, device) not in self._homes:
            if value in self._inputs:
                slot = self._slot(device, self._inputs[value], value)
            else:
                slot = self._slot(device, self._nodes[value].type)
            self._homes[value, device] = slot
        return micro.SlotRef(self._homes[value, device])

    def _output(self, value: str) -> str:
        node = self._nodes.get(value)
        device = node.device if node else self._graph.nodes[0].device
        ref = self._home(value, device)
        if node is not None and self._ends_in_a_copy(node):
            # a step is over when the compute lanes are, so one of them has to hand the value over
            ref = self._copied(node, ref)
        return f"%{ref.slot}"

    def _ends_in_a_copy(self, node: physical.Node) -> bool:
        """Whether a transfer writes the value, or a part of it, and nothing that computes waits for that."""
        if node.op == "transfer":
            return True
        users = (n for n in self._graph.nodes if n.device == node.device and f"%{node.name}" in n.inputs)
        copied = any(self._nodes[i[1:]].op == "transfer" for i in node.inputs if i[1:] in self._nodes)
        return node.op == "merge" and copied and all(n.op == "transfer" for n in users)

    def _copied(self, node: physical.Node, src: micro.SlotRef) -> micro.SlotRef:
        dst = micro.SlotRef(self._slot(node.device, node.type))
        self._view(node, src, dst)
        return dst

    def _view(self, node: physical.Node, src: micro.SlotRef, dst: micro.SlotRef) -> None:
        copy = micro.Dispatch(
            device=node.device, lane=COMPUTE, kernel="view", args=(src,), dst=dst, numerics=node.numerics,
            bytes=node.type.bytes * 2, node=node.name,
        )  # fmt: skip
        self._groups.append(_Group(node.device, [copy]))

    # ---- nodes ---------------------------------------------------------------
    def _node(self, node: physical.Node) -> None:
        match node.op:
            case "transfer":
                self._transfer(node)
            case "merge":
                for part in node.inputs:
                    if self._merged.get(part[1:]) is not node:
                        whole = self._home(node.name, node.device)
                        into = micro.SlotRef(whole.slot, *_channels(self._nodes[part[1:]], node))
                        self._view(self._nodes[part[1:]], self._home(part[1:], node.device), into)
            case "attention":
                self._attention(node)
            case "linear":
                self._linear(node)
            case "expert_linear":
                self._dispatch(node, self._product_args(node))
            case _:
                self._dispatch(node, [self._arg(node, i) for i in range(len(node.inputs))])

    def _transfer(self, node: physical.Node) -> None:
        source = self._nodes[node.inputs[0][1:]]
        device = self._copies_itself(source, node)
        runs = device or source.device
        copy = micro.Transfer(
            device=runs, lane=COMPUTE if device else COPY_OUT,
            src=self._home(source.name, source.device), source=source.device * (runs != source.device),
            dst=self._home(node.name, node.device), to=node.device,
            bytes=node.bytes, est=node.est, node=node.name,
        )  # fmt: skip
        self._groups.append(_Group(runs, [copy]))

    def _copies_itself(self, source: physical.Node, copy: physical.Node) -> str:
        """The device whose compiled code makes a copy: its source or where it goes; "" for none."""
        if self._machine is None or source.type.dtype != "f32":
            return ""
        here, there = self._machine.device(source.device), self._machine.device(copy.device)
        if _in_one_pool(here, there):
            return here.id
        gpu, other = (here, there) if here.kind == GPU else (there, here)
        few = evaluate(copy.type.bytes, self._usual) <= CARRIED
        return gpu.id if gpu.kind == GPU and other.kind in HOSTS and few and _scales(gpu) else ""

    def _attention(self, node: physical.Node) -> None:
        q, k, v, positions, seq, pages, *sinks = [self._arg(node, i) for i in range(len(node.inputs))]
        moved = 2 * (self._type(node.inputs[1]).bytes + self._type(node.inputs[2]).bytes)
        written = KV_WRITE_BF16 if settings(node.numerics).get("kv") == "bf16" else EXACT
        write = micro.Dispatch(
            device=node.device, lane=COMPUTE, kernel="kv_write", args=(k, v, positions, seq, pages),
            attrs=node.attrs, numerics=written, writes=node.writes, bytes=moved, node=node.name,
        )  # fmt: skip
        self._groups.append(_Group(node.device, [write]))
        self._dispatch(node, [q, positions, seq, pages, *sinks], writes=())

    def _linear(self, node: physical.Node) -> None:
        args = self._product_args(node)
        before: list[micro.Instr] = []
        if node.attr("bias"):
            bias = args.pop(2)
            assert isinstance(bias, micro.BlockRef), node.name
            before = [micro.Bias(device=node.device, lane=COMPUTE, block=bias, node=node.name)]
        self._dispatch(node, args, before)

    def _product_args(self, node: physical.Node) -> list[micro.Arg]:
        """The arguments of a product, x rounded as its numerics say."""
        args = [self._arg(node, i) for i in range(len(node.inputs))]
        scheme = settings(node.numerics).get("act", "")
        if scheme in QUANTIZED and isinstance(args[0], micro.SlotRef):
            args[0] = self._quantise(node, args[0], scheme)
        return args

    def _quantise(self, node: physical.Node, src: micro.SlotRef, scheme: str) -> micro.SlotRef:
        """The quantised form of a slot, made once for all products that take it."""
        if (node.device, src, scheme) not in self._quantised:
            type = self._type(node.inputs[0])
            small = QUANTIZED[scheme](*type.shape)
            dst = micro.SlotRef(self._slot(node.device, small))
            instr = micro.Quantize(
                device=node.device, lane=COMPUTE, src=src, dst=dst, scheme=scheme,
                bytes=type.bytes + small.bytes, node=node.name,
            )  # fmt: skip
            self._groups.append(_Group(node.device, [instr]))
            self._quantised[node.device, src, scheme] = dst
        return self._quantised[node.device, src, scheme]

    def _dispatch(
        self,
        node: physical.Node,
        args: list[micro.Arg],
        before: list[micro.Instr] | None = None,
        writes: tuple[str, ...] | None = None,
    ) -> None:
        instr = micro.Dispatch(
            device=node.device, lane=COMPUTE, kernel=kernel_of(node, self._weights), args=tuple(args),
            dst=self._home(node.name, node.device), attrs=node.attrs, numerics=node.numerics,
            reads=node.reads, writes=node.writes if writes is None else writes,
            est=node.est, bytes=node.bytes, flops=node.flops, node=node.name,
        )  # fmt: skip
        group = _Group(node.keeper, [*(before or ()), instr])
        if node.keeper != node.device:
            self._lent |= {(i[1:], node.keeper) for i in node.inputs if i[0] == "@"}
        for index, name in enumerate(node.inputs):
            if name[0] == "@":
                group.rows[name[1:]] = rows_used(node, index, self._weights[name[1:]], self._bounds)
        if node.op == "attention":
            group.rows = {n: r for n, r in group.rows.items() if micro.BlockRef(n) in args}
        self._groups.append(group)

    # ---- arguments -------------------------------------------------------------
    def _type(self, name: str) -> TensorType:
        if name[0] == "@":
            return self._weights[name[1:]].type
        node = self._nodes.get(name[1:])
        return node.type if node else self._inputs[name[1:]]

    def _arg(self, node: physical.Node, index: int) -> micro.Arg:
        """Input `index` of a node; of an input that isn't split like the node, the node's channels."""
        name = node.inputs[index]
        shard = node.shard if self._by_channel(node, index) else None
        if name[0] == "@":
            return micro.BlockRef(name[1:], *((shard.lo, shard.hi) if shard else ()))
        ref = self._home(name[1:], node.device)
        source = self._nodes.get(name[1:])
        if shard is None or (source is not None and _is_shard(source, node)):
            return ref
        base = source.shard.lo if source is not None and source.shard else 0
        base = (ref.lo or 0) - base
        return micro.SlotRef(ref.slot, base + shard.lo, base + shard.hi)

    def _by_channel(self, node: physical.Node, index: int) -> bool:
        return node.part is None and takes_channels(node.op, index, self._type(node.inputs[index]).shape)

    # ---- weights -----------------------------------------------------------------
    def _blocks(self) -> dict[tuple[str, str], micro.Block]:
        """What each device keeps of each weight: the rows that any of its uses may need."""
        rows: dict[tuple[str, str], tuple[int, int]] = {}
        for group in self._groups:
            for name, (lo, hi) in group.rows.items():
                low, high = rows.get((name, group.keeper), (lo, hi))
                rows[name, group.keeper] = min(lo, low), max(hi, high)
        return {
            key: micro.Block(
                *key, lo, hi, block_bytes(self._weights[key[0]], lo, hi),
                home="resident" if key in self._lent else "ring",
            )
            for key, (lo, hi) in rows.items()
        }  # fmt: skip

    def _loaded(self, blocks: Mapping[tuple[str, str], micro.Block]) -> Iterator[micro.Instr]:
        """All instructions, each block loaded directly before its first use and evicted after its last."""
        last = {(name, g.keeper): i for i, g in enumerate(self._groups) for name in g.rows}
        loaded: set[tuple[str, str]] = set()
        for i, group in enumerate(self._groups):
            keys = [key for name in group.rows if (key := (name, group.keeper)) not in self._lent]
            for key in keys:
                if key not in loaded:
                    loaded.add(key)
                    yield self._prefetch(blocks[key])
            yield from group.instrs
            for name, device in keys:
                if last[name, device] == i:
                    yield micro.Evict(device=device, lane=COMPUTE, block=name)

    def _prefetch(self, block: micro.Block) -> micro.Prefetch:
        est = 0.0
        if self._machine is not None:
            link = self._machine.link(*weight_road(self._machine.device(block.device), self._machine))
            est = float(f"{link.latency.value + block.bytes / link.rate.value * 1e6:.4g}")
        return micro.Prefetch(device=block.device, lane=COMPUTE, block=block.name, bytes=block.bytes, est=est)


def _in_one_pool(device: Device, other: Device) -> bool:
    """Whether a device's compiled code can write to the memory of another one: both compute in the host's.

    A lane of copies is a thread that wakes up for each; a row of the code copies kilobytes in a microsecond.
    """
    pooled = device.kind == other.kind == "cpu" and device.pool == other.pool != ""
    return pooled and _scales(device)


def _scales(device: Device) -> bool:
    """Whether its code can copy: as a product by one."""
    return device.supports("scale", EXACT)


def _is_shard(source: physical.Node, node: physical.Node) -> bool:
    """Whether a value is just the channels that a node takes, perhaps those of a part of a joint product."""
    return source.shard is not None and source.type.shape[-1] == node.type.shape[-1]


def _channels(part: physical.Node, merge: physical.Node) -> tuple[Dim, Dim]:
    """The channels of a merged value that one part makes."""
    assert part.shard is not None, f"{part.name} is merged but has no shard range"
    base = merge.shard.lo if merge.shard else 0
    return part.shard.lo - base, part.shard.hi - base


def _parts_in_place(graph: physical.Graph, outputs: list[str]) -> dict[str, physical.Node]:
    """Parts that are made where they are merged: value → merge node.

    Not those which another user needs dense, or whose maker writes dense results only.
    """
    nodes = {n.name: n for n in graph.nodes}
    users: dict[str, list[tuple[physical.Node, int]]] = {}
    for node in graph.nodes:
        for index, name in enumerate(node.inputs):
            users.setdefault(name[1:], []).append((node, index))
    found = {}
    for name, node in nodes.items():
        merges = [u for u, _ in users.get(name, ()) if u.op == "merge"]
        others = [(u, i) for u, i in users.get(name, ()) if u.op != "merge"]
        dense = node.op == "view" or node.op.startswith("host.") or name in outputs
        if len(merges) == 1 and not dense and all(input_takes_range(u, i) for u, i in others):
            found[name] = merges[0]
    return found
