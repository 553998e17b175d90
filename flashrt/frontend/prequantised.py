"""Tensors of a quantised checkpoint: a module's integers, scales and zero points → its `weight`.

Names and shapes: see flashrt/weights/grouped.py. Scales, zero points and the order of columns are looked at
here, since they decide which layout holds a matrix without loss; the integers aren't read.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend.prequantised_config import ADVICE, WHOLE, Scheme
from flashrt.layouts import BLOCK
from flashrt.weights import grouped
from flashrt.weights.index import Grouped, Tensor, WeightIndex

U8 = NDArray[np.uint8]
Shape = tuple[int, ...]

_FLOATS = ("F16", "BF16", "F32")
_INTEGERS = {"awq": "qweight", "gptq": "qweight", "compressed-tensors": "weight_packed"}
_EXPERTS = ".experts."
_WIDER = {frozenset({"INT4", "UINT4"}): "UINT4", frozenset({"INT8", "UINT8"}): "UINT8"}
_DAMAGED = "download the model again; if that fails too, its files don't fit its configuration"


def joined(index: WeightIndex, scheme: Scheme) -> WeightIndex:
    """The index with one tensor, `X.weight`, for the tensors of each quantised module X; others stay.

    Raises:
        ModelError: a tensor is missing, or has a shape or type that doesn't fit; names file and tensor.
        UnsupportedModel: numbers of bits or groups that aren't read.
    """
    tensors, used = dict(index.tensors), set[str]()
    for name, tensor in index.tensors.items():
        stem, _, last = name.rpartition(".")
        module = _Module(index, scheme, stem)
        if last == _INTEGERS[scheme.method]:
            made = module.compressed(tensor) if last == "weight_packed" else module.by_columns(tensor)
        elif last == "weight" and f"{name}_scale" in index.tensors and scheme.method == "compressed-tensors":
            made = module.int8(tensor)
        else:
            continue
        used |= {name, *module.names}
        tensors[f"{stem}.weight"] = made
    if not used:
        raise ModelError(
            f"{scheme.path} says that weights are quantised with {scheme.method}, but no tensor "
            f"X.{_INTEGERS[scheme.method]} is in the model's files",
            hint=_DAMAGED,
        )
    kept = {n: t for n, t in tensors.items() if n not in used or n.endswith(".weight")}
    return WeightIndex(index.files, _alike(kept))


def _alike(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with one format for all experts of a layer, which become one matrix: what holds them all."""
    formats: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.grouped and _EXPERTS in name:
            formats.setdefault(name.partition(_EXPERTS)[0], set()).add(tensor.format)
    mixed = {
        layer: _WIDER.get(frozenset(found), "GROUPED") for layer, found in formats.items() if len(found) > 1
    }
    return {
        name: replace(tensor, format=mixed[layer]) if tensor.grouped and layer in mixed else tensor
        for name, tensor in tensors.items()
        for layer in [name.partition(_EXPERTS)[0]]
    }


class _Module:
    """One quantised module. names: the tensors it has beside its integers that were looked up."""

    def __init__(self, index: WeightIndex, scheme: Scheme, stem: str) -> None:
        self._index, self._scheme, self._stem = index, scheme, stem
        self.names: list[str] = []

    def by_columns(self, quants: Tensor) -> Tensor:
        """AWQ and GPTQ: X.qweight, X.scales, X.qzeros, X.g_idx."""
        self._type(quants, "I32")
        rows, _ = self._matrix(quants)
        scales, order = self._tensor("scales", *_FLOATS), None
        count, n = self._matrix(scales)
        if self._scheme.method == "awq":
            bits, k = 4, rows
            self._shape(quants, (k, n * bits / 32), "by its scales")
        else:
            order = self._optional("g_idx", "I32", "I64")
            self._shape(quants, (rows, n), "by its scales")
            bits, k = self._bits_of(quants, rows, order)
        group = self._group(scales, bits, k, count)
        self._shape(scales, (-(-k // group), n), f"groups of {group}")
        zeros = self._optional("qzeros", "I32") if self._scheme.symmetric else self._tensor("qzeros", "I32")
        if zeros:
            self._shape(zeros, (count, n * bits / 32), "by its scales")
        found = Grouped(self._scheme.method, bits, group, scales, zeros, self._scheme.less, order)
        return self._made(quants, (n, k), found)

    def compressed(self, quants: Tensor) -> Tensor:
        """X.weight_packed, X.weight_scale, X.weight_shape, X.weight_zero_point, X.weight_g_idx."""
        self._type(quants, "I32")
        rows, columns = self._matrix(quants)
        n, k = (int(x) for x in self._values(self._tensor("weight_shape", "I64", "I32")))
        fits = [bits for bits in (4, 8) if columns == -(-k * bits // 32) and rows == n]
        if not fits:
            self._wrong(quants, f"X.weight_shape says [{n}, {k}] in 4 or 8 bits")
        order = self._optional("weight_g_idx", "I32", "I64")
        return self._by_rows(quants, "packed", fits[0], n, k, order)

    def int8(self, quants: Tensor) -> Tensor:
        """X.weight, X.weight_scale, X.weight_zero_point: integers in a byte each, whatever their bits."""
        self._type(quants, "I8")
        return self._by_rows(quants, "int8", 8, *self._matrix(quants), None)

    def _by_rows(
        self, quants: Tensor, packing: str, bits: int, n: int, k: int, order: Tensor | None
    ) -> Tensor:
        scales = self._tensor("weight_scale", *_FLOATS)
        if len(scales.shape) < 2:  # one for all, or one a channel
            scales = replace(scales, shape=(math.prod(scales.shape), 1))
        count = scales.shape[1]
        group = self._group(scales, bits if packing == "packed" else 0, k, count)
        if scales.shape != (1, 1):
            self._shape(scales, (n, -(-k // group)), f"groups of {group}")
        zeros = self._optional("weight_zero_point", "I8", *(["I32"] if packing == "packed" else []))
        if zeros and zeros.format == "I8":
            zeros = replace(zeros, shape=scales.shape)
        elif zeros:
            self._shape(zeros, (-(-n * bits // 32), count), "by its scales")
        if scales.shape == (1, 1):
            scales, zeros = replace(scales, shape=(1,)), zeros and replace(zeros, shape=(1,))
        return self._made(quants, (n, k), Grouped(packing, bits, group, scales, zeros, 0, order))

    # ---- bits and groups ---------------------------------------------------------------
    def _bits_of(self, quants: Tensor, rows: int, order: Tensor | None) -> tuple[int, int]:
        """(bits, K) of GPTQ's integers: as the configuration says, or as long as its list of columns."""
        kinds = self._scheme.kinds
        if kinds:
            bits = next(iter(kinds))[0]
            k = rows * 32 // bits
            if order and order.shape != (k,):
                self._wrong(order, f"[{k}], by {quants.name} in {bits} bits")
            return bits, k
        if order is None:
            raise ModelError(
                f"{self._at(quants)}: X.g_idx is missing, and bits differ by module", hint=_DAMAGED
            )
        (k,) = order.shape
        bits = rows * 32 // k if k else 0
        if bits not in (4, 8) or bits * k != 32 * rows:
            raise UnsupportedModel(
                f"{self._at(quants)} has {32 * rows / max(k, 1):g} bits a weight; read: 4 and 8", hint=ADVICE
            )
        return bits, k

    def _group(self, scales: Tensor, bits: int, k: int, count: int) -> int:
        """Weights that share a scale, of rows with `count` groups. bits: 0 where they don't matter."""
        kinds = self._scheme.kinds
        sizes = [g for b, g in sorted(kinds) if bits in (0, b)]
        if kinds and not sizes:
            known = ", ".join(str(b) for b, _ in sorted(kinds))
            self._wrong(scales, f"weights of {known} bits, by {self._scheme.path}; it has {bits}")
        for size in sizes or [WHOLE, k // count if count and k % count == 0 else 0]:
            size = k if size == WHOLE or size > k else size
            if size and -(-k // size) == count and (size == k or size % BLOCK == 0):
                return size
        said = " or ".join("whole rows" if g == WHOLE else f"groups of {g}" for g in sizes)
        self._wrong(scales, f"{said or f'groups of a multiple of {BLOCK}'} in rows of {k}")

    def _made(self, quants: Tensor, shape: Shape, found: Grouped) -> Tensor:
        """The weight; zero points in the middle and columns in order are left out."""
        if found.order:
            groups = grouped.group_of_columns(found.order, self._read)
            if groups.min(initial=0) < 0 or groups.max(initial=0) * found.group >= shape[1]:
                self._wrong(found.order, "numbers of groups")
            if np.array_equal(groups, np.arange(shape[1]) // found.group):
                found = replace(found, order=None)
        if found.zeros and self._even(found, shape[0]):
            found = replace(found, zeros=None)
        return replace(quants, shape=shape, format=self._format(found, shape[0]), grouped=found)

    def _format(self, found: Grouped, n: int) -> str:
        """What EXACT_LAYOUT and NATIVE_LAYOUT call it, by what a scale and a minimum can hold."""
        if found.order:
            return "GROUPED"
        scales = grouped.scales(found, 0, n, self._read)
        with np.errstate(over="ignore"):
            narrow = found.scales.format == "F16" or bool((scales.astype(np.float16) == scales).all())
        if found.zeros is None and narrow:
            return f"INT{found.bits}"
        # with 16 bits, as f16 and bf16 have at most, f32 holds the product with a zero point
        short = not (scales.view(np.uint32) & 0xFF).any()
        if short and (found.zeros or found.bits == 4):
            return f"UINT{found.bits}"
        return "INT8_F32" if found.zeros is None or found.bits == 4 else "GROUPED"

    def _even(self, found: Grouped, n: int) -> bool:
        """Whether all zero points are in the middle.

        "sym" with one zero point, stored one too large for "gptq", is that, too: some writers say the one and
        store as "gptq_v2" does (https://github.com/vllm-project/vllm/pull/38966).
        """
        zeros, middle = grouped.zero_points(found, 0, n, self._read), grouped.middle(found)
        ends = {int(zeros.min(initial=middle)), int(zeros.max(initial=middle))}
        late = self._scheme.symmetric and bool((zeros == middle + found.less).all())
        return late or ends == {middle}

    # ---- tensors -----------------------------------------------------------------------
    def _optional(self, name: str, *types: str) -> Tensor | None:
        full = f"{self._stem}.{name}"
        self.names.append(full)
        tensor = self._index.tensors.get(full)
        if tensor:
            self._type(tensor, *types)
        return tensor

    def _tensor(self, name: str, *types: str) -> Tensor:
        tensor = self._optional(name, *types)
        if tensor is None:
            raise ModelError(
                f"tensor {self._stem}.{name} is in none of the model's files, "
                f"but {self._scheme.path} says that weights are quantised with {self._scheme.method}",
                hint=_DAMAGED,
            )
        return tensor

    def _read(self, tensor: Tensor, at: int, count: int) -> U8:
        path = self._index.files[tensor.file].path
        return np.fromfile(path, np.uint8, count, offset=tensor.offset + at)

    def _values(self, tensor: Tensor) -> list[int]:
        if math.prod(tensor.shape) != 2:
            self._wrong(tensor, "two numbers")
        return grouped.group_of_columns(replace(tensor, shape=(2,)), self._read).tolist()

    def _matrix(self, tensor: Tensor) -> tuple[int, int]:
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            self._wrong(tensor, "a matrix")
        return tensor.shape[0], tensor.shape[1]

    def _shape(self, tensor: Tensor, wanted: tuple[float, ...], why: str) -> None:
        if tensor.shape != wanted:
            self._wrong(tensor, f"[{', '.join(f'{x:g}' for x in wanted)}], {why}")

    def _type(self, tensor: Tensor, *types: str) -> None:
        if tensor.format not in types:
            raise ModelError(
                f"{self._at(tensor)} is {tensor.format}; in {self._scheme.method} it is {' or '.join(types)}",
                hint=_DAMAGED,
            )

    def _wrong(self, tensor: Tensor, wanted: str) -> NoReturn:
        raise ModelError(f"{self._at(tensor)} has shape {list(tensor.shape)}, not {wanted}", hint=_DAMAGED)

    def _at(self, tensor: Tensor) -> str:
        return f"{self._index.files[tensor.file].path}: tensor {tensor.name}"
