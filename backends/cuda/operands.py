"""Where operands lie in device memory and how large they are, for one bucket of the symbols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flashrt.backend import I64, U8, Memory, Place
from flashrt.errors import PlanError
from flashrt.ir import micro
from flashrt.ir.order import root_of
from flashrt.ir.types import DTYPES, Dim, Env, product, size
from flashrt.layouts import LAYOUTS, Layout


def address_of(place: Place) -> int:
    """Where a place begins, in device memory or in memory of the host's that the device sees."""
    buffer = place.buffer
    start = buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data_ptr()
    return int(start) + place.offset


@dataclass(frozen=True, slots=True)
class Tensor:
    """A slot, or channels of it: rows × width elements, `stride` elements from row to row."""

    address: int
    rows: Dim
    width: int
    stride: int
    item: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of a weight block: n rows of k elements."""

    address: int
    n: int
    k: int
    layout: Layout


@dataclass(slots=True)
class Sizes:
    """Sizes that kernels read from device memory, since they change from step to step.

    here: pinned; address: of the same in device memory. written: at which symbols, and how many.
    """

    here: I64
    address: int
    index: dict[Dim, int] = field(default_factory=dict)
    written: tuple[Env, int] | None = None

    def at(self, dim: Dim) -> int:
        """Device address of a size."""
        place = self.index.setdefault(dim, len(self.index) + 1)
        assert place < len(self.here), "more sizes than there is room for"
        return self.address + 8 * place

    @property
    def epoch(self) -> int:
        """Device address of the step's number, in front of the sizes."""
        return self.address

    @property
    def bytes(self) -> int:
        """Of those there are so far."""
        return 8 * (len(self.index) + 1)

    def write(self, env: Env, epoch: int) -> None:
        """The sizes at these symbols, and the step's number."""
        if self.written != (env, len(self.index)):
            self.written = None  # first: Ctrl-C may strike while they change
            for dim, place in self.index.items():
                self.here[place] = size(dim, env)
            self.written = dict(env), len(self.index)
        self.here[0] = epoch


@dataclass(frozen=True, slots=True)
class Twin:
    """An input: pinned memory that the host writes, and where the step has it on the device."""

    here: U8
    there: Place
    bytes: Dim


class Scratch:
    """Device memory that kernels set aside for what nobody reads after them.

    All code of a device has the same, since it runs one after the other. alloc: gives zeroed memory.
    """

    def __init__(self, alloc: Callable[[int], Any]) -> None:
        self._alloc = alloc
        self._made: dict[str, Any] = {}

    def __call__(self, what: str, nbytes: int) -> Any:
        """Memory under a name; a larger one takes the place of a smaller, which the launches that have it
        keep."""
        if what not in self._made or len(self._made[what]) < nbytes:
            self._made[what] = self._alloc(max(nbytes, 16))
        return self._made[what]

    def all(self) -> list[Any]:
        """All there is now."""
        return list(self._made.values())

    def has(self, memory: Any) -> bool:
        """Whether that is memory of its own."""
        return any(memory is own for own in self.all())

    def clear(self) -> None:
        """Forgets all."""
        self._made.clear()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a GPU has. shared: bytes of shared memory that one block may have; shared_all: of a processor;
    together: whether blocks may wait for each other, as many as there are processors, since no kernels of
    others run beside ours; groups: whether four warps can multiply together, as on 9.0."""

    processors: int
    shared: int
    shared_all: int
    together: bool = True
    groups: bool = False


@dataclass(frozen=True, slots=True)
class Operands:
    """Finds operands. env: the bucket's symbols, which bound those of the step; greedy: how it samples.

    twins: by slot. scratch: (what, bytes) → zeroed device memory that rows with the same `what` share.
    moved: slots that lie elsewhere than planned: at a place, or (None) in scratch memory.
    tiled: slots that are written in tiles, for weights of a format.
    """

    memory: Memory
    device: str
    limits: Limits
    env: Env
    greedy: bool
    sizes: Sizes
    twins: Mapping[int, Twin]
    scratch: Callable[[str, int], Any]
    slots: dict[int, micro.Slot]
    blocks: Mapping[tuple[str, str], micro.Block]
    moved: Mapping[int, Place | None] = field(default_factory=dict)
    tiled: Mapping[int, int] = field(default_factory=dict)

    def number(self, dim: Dim) -> int:
        """A size at the bucket's symbols: the largest it can be in a step."""
        return size(dim, self.env)

    def most(self, dim: Dim) -> int:
        """A size at the largest symbols: what no bucket exceeds."""
        return size(dim, {**self.env, **{s.name: s.hi for s in self.memory.stream.symbols}})

    def place(self, slot: int) -> Place:
        """Where a slot lies on the device."""
        root = root_of(slot, self.slots)
        if root in self.moved:
            if (there := self.moved[root]) is not None:
                return there
            memory = self.scratch(f"moved %{root}", self.number(self.slots[root].type.bytes))
            return Place(memory, 0, len(memory))
        return self.twins[root].there if root in self.twins else self.memory.slot(slot)

    def outside(self, slot: int) -> bool:
        """Whether a slot lies in memory of another device, the host's."""
        return self.slots[root_of(slot, self.slots)].device != self.device

    def twin(self, slot: int) -> Twin | None:
        """The input that a slot is, if it is one."""
        return self.twins.get(root_of(slot, self.slots))

    def tensor(self, arg: micro.Arg | None) -> Tensor:
        assert isinstance(arg, micro.SlotRef), arg
        type = self.slots[arg.slot].type
        *outer, last = type.shape or (1,)
        stride, item = self.number(last), DTYPES[type.dtype]
        lo = 0 if arg.lo is None else self.number(arg.lo)
        hi = stride if arg.hi is None else self.number(arg.hi)
        address = address_of(self.place(arg.slot)) + lo * item
        return Tensor(address, product(outer), hi - lo, stride, item, type.dtype)

    def tiles(self, arg: micro.Arg | None) -> int:
        """The format of weights for which a slot is in tiles; 0 if it isn't."""
        assert isinstance(arg, micro.SlotRef)
        return self.tiled.get(root_of(arg.slot, self.slots), 0)

    def result(self, arg: micro.Arg | None, *, rounded: bool) -> tuple[Tensor, int]:
        """Where a result goes, and how it is written, as `put_some` in source/common.cuh takes both: the
        stride of tiles is the number of tokens."""
        tensor = self.tensor(arg)
        if format := self.tiles(arg):
            return replace(tensor, stride=self.number(tensor.rows)), format
        return tensor, int(rounded)

    def floats(self, arg: micro.Arg | None) -> Tensor:
        """A tensor of f32. Raises PlanError for another dtype."""
        tensor = self.tensor(arg)
        if tensor.dtype != "f32":
            raise PlanError(f"{self.device}: %{arg.slot} is {tensor.dtype}, this kernel takes f32")  # type: ignore[union-attr]
        return tensor

    def index(self, arg: micro.Arg | None) -> Tensor:
        """Row numbers, positions or ids, as many as `rows`."""
        tensor = self.tensor(arg)
        if tensor.dtype not in ("i32", "i64"):
            raise PlanError(f"{self.device}: kernels look things up by i32 or i64, not by {tensor.dtype}")
        assert isinstance(arg, micro.SlotRef)
        return Tensor(tensor.address, self.slots[arg.slot].type.elements, 1, 1, tensor.item, tensor.dtype)

    def view(self, arg: micro.Arg | None, rows: int) -> Any:
        """The first `rows` rows of a slot as a tensor of torch."""
        import torch

        assert isinstance(arg, micro.SlotRef), arg
        tensor, place = self.tensor(arg), self.place(arg.slot)
        start = tensor.address - address_of(place) + place.offset
        last = (rows - 1) * tensor.stride + tensor.width
        kinds = {"f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32, "i64": torch.int64}
        flat = place.buffer[start : start + last * tensor.item].view(kinds[tensor.dtype])
        return flat.as_strided((rows, tensor.width), (tensor.stride, 1))

    def column(self, arg: micro.Arg | None, rows: int) -> Any:
        """The first `rows` values of a slot as a tensor [rows, 1] of torch."""
        import torch

        assert isinstance(arg, micro.SlotRef), arg
        tensor, place = self.tensor(arg), self.place(arg.slot)
        kinds = {"f32": torch.float32, "i32": torch.int32, "i64": torch.int64}
        flat = place.buffer[place.offset : place.offset + rows * tensor.item]
        return flat.view(kinds[tensor.dtype]).view(rows, 1)

    def weights(self, arg: micro.Arg) -> Any:
        """Rows of a bf16 matrix as a tensor of torch."""
        import torch

        matrix, (_, place) = self.matrix(arg), self._kept(arg.block, self.device)  # type: ignore[union-attr]
        start = matrix.address - int(place.buffer.data_ptr())
        flat = place.buffer[start : start + 2 * matrix.n * matrix.k]
        return flat.view(torch.bfloat16).view(matrix.n, matrix.k)

    def matrix(self, arg: micro.Arg, keeper: str = "") -> Matrix:
        """Rows of a weight. keeper: the device that has it, where that is another."""
        assert isinstance(arg, micro.BlockRef), arg
        weight = next(w for w in self.memory.stream.weights if w.name == arg.block)
        block, place = self._kept(arg.block, keeper or self.device)
        shape = [size(d, {}) for d in weight.type.shape] or [1]
        layout = LAYOUTS[weight.layout or "f32"]
        k = shape[1] if len(shape) == 2 else int(np.prod(shape[1:], dtype=np.int64))
        lo = block.lo if arg.lo is None else self.number(arg.lo)
        hi = block.hi if arg.hi is None else self.number(arg.hi)
        assert lo % layout.rows == 0, (arg, layout.name)
        per_row = layout.group_bytes(k) // layout.rows
        return Matrix(address_of(place) + (lo - block.lo) * per_row, hi - lo, k, layout)

    def _kept(self, name: str, device: str) -> tuple[micro.Block, Place]:
        """A block of a device and where it lies; one that comes and goes may not be there yet."""
        block = self.blocks[name, device]
        if block.home == "ring":
            return block, self.memory.ring(name, device)
        place = self.memory.block(name, device)
        assert place is not None, f"{name} isn't loaded"
        return block, place

    def vector(self, arg: micro.Arg | None) -> int:
        """Address of f32 values in a slot or a block; 0 for none."""
        if arg is None:
            return 0
        if isinstance(arg, micro.SlotRef):
            return self.floats(arg).address
        matrix = self.matrix(arg)
        assert matrix.layout.name == "f32", f"{arg.block} is {matrix.layout.name}: only products read that"
        return matrix.address

    def elements(self, arg: micro.Arg) -> int:
        """How many values a slot or a block has."""
        if isinstance(arg, micro.SlotRef):
            return self.number(self.slots[arg.slot].type.elements)
        matrix = self.matrix(arg)
        return matrix.n * matrix.k

    def state(self, instr: micro.Dispatch) -> tuple[int, int, int, bool]:
        """(address, heads, dim, whether bf16) of the state kv[P,2,heads,16,dim] of an instruction."""
        (name,) = instr.writes or instr.reads
        type = next(s.type for s in self.memory.stream.states if s.name == name)
        heads, dim = size(type.shape[2], {}), size(type.shape[4], {})
        return address_of(self.memory.state(name, self.device)), heads, dim, type.dtype == "bf16"

    def cache(self, instr: micro.Dispatch) -> Any:
        """The bf16 state of an instruction as a tensor [P, 2, heads, 16, dim] of torch."""
        import torch

        (name,) = instr.writes or instr.reads
        place = self.memory.state(name, self.device)
        type = next(s.type for s in self.memory.stream.states if s.name == name)
        flat = place.buffer[place.offset : place.offset + place.bytes].view(torch.bfloat16)
        _, *page = (size(d, {"P": 1}) for d in type.shape)
        return flat[: flat.numel() // int(np.prod(page)) * int(np.prod(page))].view(-1, *page)

    def rows(self, dim: Dim) -> int:
        """Device address of a size."""
        return self.sizes.at(dim)
