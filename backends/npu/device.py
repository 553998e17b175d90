"""The device: pieces of loaded code become sessions, one for each bucket of the symbols they use.

Its memory is the host's. A session's shapes are fixed, so symbols are rounded up to powers of two
(never beyond their largest value): inputs are padded with zeros and the surplus rows of results dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flashrt.backend import I64, U8, Compute, Memory, Place, Rect
from flashrt.backends.npu import graph, providers
from flashrt.backends.npu.kernels import MOVES, all_kernels, kernels_of
from flashrt.backends.npu.launch import FloatLaunch, QuantisedLaunch
from flashrt.backends.npu.pieces import Piece, Row, cut, read_rows
from flashrt.backends.npu.providers import KIND, Provider
from flashrt.backends.npu.ranges import Calibration
from flashrt.backends.reference.access import Access
from flashrt.backends.reference.arrays import F32, attr_at
from flashrt.backends.reference.device import ReferenceDevice, signal, wait
from flashrt.backends.reference.evaluate import evaluate_node
from flashrt.errors import DeviceError, FlashrtError, PlanError
from flashrt.ir import micro
from flashrt.ir.text import show_instr
from flashrt.ir.types import Env, Symbol, TensorType, symbols_of
from flashrt.machine import Device

Launch = FloatLaunch | QuantisedLaunch


@dataclass(slots=True)
class Loaded:
    """A piece, the symbols its shapes depend on, and its launches by their values (None: nothing to do)."""

    piece: Piece
    symbols: tuple[str, ...]
    launches: dict[tuple[int, ...], Launch | None] = field(default_factory=dict)
    calibration: Calibration | None = None  # of the quantised form, shared by all launches


@dataclass(frozen=True, slots=True)
class Code:
    """Loaded instructions. stamps: [instructions, 3] ns: arrived, started, ended."""

    pieces: tuple[Loaded, ...]
    access: Access
    stamps: I64


class NpuDevice:
    """One execution provider in use."""

    def __init__(self, spec: Device) -> None:
        self.spec, self.provider = spec, providers.require(spec.id)
        self._memory = ReferenceDevice(spec)  # the host's memory, and how it is copied

    def describe(self) -> str:
        """One line: what computes here, and in which form."""
        return providers.describe(self.spec.id)

    def reserve(self, nbytes: int) -> U8:
        """Zeroed host memory, 64-byte aligned."""
        return self._memory.reserve(nbytes)

    def copy(self, src: Rect, dst: Rect) -> None:
        """Copies rows between two places in host memory."""
        self._memory.copy(src, dst)

    def write(self, data: U8, dst: Place) -> None:
        """Host bytes into a place."""
        self._memory.write(data, dst)

    def close(self) -> None:
        """Nothing to end: sessions go with the code they belong to."""

    def load(self, instrs: Sequence[Compute], memory: Memory) -> Code:
        """Cuts the instructions into pieces. Graphs are made when a piece first runs at a size, because
        weights that stream are read then.

        Raises PlanError for a kernel that doesn't run here, LawError for a bias without its dispatch.
        """
        access = Access(memory)
        rows = tuple(read_rows(instrs))
        for row in rows:
            _check(row, self.provider, access)
        pieces = (Loaded(p, _symbols(p, access)) for p in cut(rows, memory.stream))
        return Code(tuple(pieces), access, np.zeros((len(instrs), 3), np.int64))

    def run(self, code: Code, epoch: int) -> None:
        """Waits, computes and signals, piece by piece."""
        access, env = code.access, code.access.env()
        for loaded in code.pieces:
            arrived = time.perf_counter_ns()
            for row in loaded.piece.rows:
                for instr in row.instrs:
                    wait(instr, access.memory, epoch)
            started = time.perf_counter_ns()
            try:
                self._compute(loaded, access, env)
            except FlashrtError:
                raise
            except Exception as error:
                line = f"    {show_instr(loaded.piece.rows[0].dispatch)}"
                raise DeviceError(f"{self.spec.id}: {error}", lines=line) from error
            _stamp(code.stamps, loaded.piece, arrived, started, time.perf_counter_ns())
            for row in loaded.piece.rows:
                for instr in row.instrs:
                    signal(instr, access.memory, epoch)

    def stamps(self, code: Code) -> I64:
        """[instructions, 3] nanoseconds of the last run: a session's time stands at its first instruction."""
        return code.stamps

    def _compute(self, loaded: Loaded, access: Access, env: Env) -> None:
        if loaded.piece.moves:
            _move(loaded.piece.rows[0], access, env)
            return
        padded = {**env, **_buckets(access.memory.stream.symbols, env)}
        key = tuple(int(padded[name]) for name in loaded.symbols)
        if key not in loaded.launches:
            loaded.launches[key] = self._launch(loaded, access, env, padded)
        if (launch := loaded.launches[key]) is None:
            return
        given = {name: _padded(ref, access, env, padded) for name, ref in launch.model.inputs}
        results = launch.run(given)
        for name, ref in launch.model.outputs:
            into = access.slot(ref, env)
            into[...] = results[name][tuple(slice(0, n) for n in into.shape)]

    def _launch(self, loaded: Loaded, access: Access, env: Env, padded: Env) -> Launch | None:
        """The piece at the padded shapes; None when all that it computes is empty."""
        if graph.is_empty(loaded.piece, access, padded):
            return None

        def build(
            *, ranges: graph.Ranges | None = None, every: bool = False, at: Env = padded
        ) -> graph.Model:
            return graph.build(loaded.piece, access, env, at, ranges=ranges, every=every)

        if self.provider.form != "int8":
            return FloatLaunch(build(), self.provider, self.spec.cores)
        if loaded.calibration is None:
            # the same ranges for all sizes, so they are filed under the smallest
            smallest = {s.name: 1 for s in access.memory.stream.symbols}
            loaded.calibration = Calibration.of(build(at={**padded, **smallest}))
        return QuantisedLaunch(build, loaded.calibration, self.provider, self.spec.cores)


class NpuBackend:
    """Kind "npu": one device for each provider, `npu:<name>` of `PROVIDERS`."""

    kind = KIND

    def kernels(self) -> tuple[tuple[str, str], ...]:
        """What one or another of its devices runs; each device has those of its form (`device_spec`)."""
        return all_kernels()

    def open(self, spec: Device) -> NpuDevice:
        """Opens a device. PlanError, with the command that installs it, when its provider isn't here."""
        return NpuDevice(spec)


def bucket(value: int, most: int) -> int:
    """The power of two that a symbol is rounded up to, but never beyond its largest value."""
    return min(1 << max(value - 1, 0).bit_length(), most)


def _buckets(symbols: Sequence[Symbol], env: Env) -> dict[str, int]:
    return {s.name: bucket(int(env[s.name]), s.hi) for s in symbols}


def _check(row: Row, provider: Provider, access: Access) -> None:
    """Raises PlanError when the device doesn't have the kernel, or a value isn't float32."""
    d = row.dispatch
    if (d.kernel, d.numerics) not in kernels_of(provider.form):
        known = sorted({n for k, n in kernels_of(provider.form) if k == d.kernel})
        raise PlanError(
            f"{d.device} has no kernel {d.kernel} with {d.numerics!r}",
            lines=f"    {show_instr(d)}",
            hint=f"numerics it has of it: {', '.join(known) or 'none'}",
        )
    for ref in (*row.slots, row.dst):
        type = access.slots[ref.slot].type
        if type.dtype != "f32" and row.kernel.op not in MOVES:
            raise PlanError(
                f"{d.device} computes on f32, %{ref.slot} is {type}", lines=f"    {show_instr(d)}"
            )


def _symbols(piece: Piece, access: Access) -> tuple[str, ...]:
    """The symbols and splits that the piece's shapes, ranges and attributes depend on."""
    used: set[str] = set()
    for row in piece.rows:
        refs = [*row.dispatch.args, row.dst, *([row.bias.block] if row.bias else [])]
        for ref in refs:
            dims = [d for d in (ref.lo, ref.hi) if d is not None]
            if isinstance(ref, micro.SlotRef):
                dims += access.slots[ref.slot].type.shape
            used |= {name for d in dims for name in symbols_of(d)}
    return tuple(sorted(used))


def _padded(ref: micro.SlotRef, access: Access, env: Env, padded: Env) -> F32:
    """A slot, or channels of it, with zeros up to the padded shape."""
    value = access.slot(ref, env)
    shape = graph.ref_shape(ref, access.slots[ref.slot].type, padded)
    if value.shape == shape:
        return np.ascontiguousarray(value)
    full = np.zeros(shape, np.float32)
    full[tuple(slice(0, n) for n in value.shape)] = value
    return full


def _move(row: Row, access: Access, env: Env) -> None:
    """Copies bytes: exact, and in the host's memory, where the device's lies."""
    into = access.slot(row.dst, env)
    attrs = {k: attr_at(v, env) for k, v in row.dispatch.attrs}
    out = TensorType(access.slots[row.dst.slot].type.dtype, into.shape)
    if into.size:
        into[...] = evaluate_node(row.kernel.op, [access.slot(ref, env) for ref in row.slots], attrs, out)


def _stamp(stamps: I64, piece: Piece, arrived: int, started: int, ended: int) -> None:
    indices = [i for row in piece.rows for i in row.indices]
    stamps[indices] = ended
    stamps[indices[0]] = arrived, started, ended
