"""The weight index: where each tensor's bytes lie, without reading them.

A frontend makes it, a plan folder keeps it, `flashrt.weights.source` reads
through it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashrt.ir.types import Weight
from flashrt.layouts import LAYOUTS

# what a tensor's elements are in its file → the packed layout that holds them without loss
EXACT_LAYOUT: Mapping[str, str] = {
    "F32": "f32", "F16": "f16", "BF16": "bf16",
    "Q4_0": "q4.16x32", "Q4_1": "q4m.16x32", "Q8_0": "q8.16x32",
    "INT4": "q4.16x32", "UINT4": "q4mf.16x32", "INT8": "q8.16x32", "UINT8": "q8mf.16x32",
    "INT8_F32": "q8f.16x16",
    "Q5_0": "q8.16x32", "IQ4_NL": "q8.16x32", "MXFP4": "q8.16x32", "Q3_K": "q8.16x32",
    "TQ1_0": "q8.16x32", "TQ2_0": "q8.16x32", "Q6_K": "q8f.16x16", "IQ4_XS": "q8f.16x16",
    "Q4_K": "q4mf.16x32", "Q2_K": "q4mf.16x16", "Q5_K": "q8mf.16x32", "Q5_1": "q8mf.16x32",
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), "q8f.16x16"),
}  # fmt: skip
# … and what else it is kept in unless the user wants no loss. Anything else is de-quantised to f32 rows.
NATIVE_LAYOUT: Mapping[str, str] = {**EXACT_LAYOUT, "GROUPED": "q8.16x32"}


def exact(form: str, layout: str) -> bool:
    """Whether a layout holds what a tensor's elements mean, without loss."""
    return LAYOUTS[layout].grouped in ("f32", EXACT_LAYOUT.get(form, "f32"))


@dataclass(frozen=True, slots=True)
class File:
    """A file weights come from. digest: sha256 of size and first MiB (the headers are in it)."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor in a file.

    file: index into `WeightIndex.files`. offset, bytes: in that file. format: "F32", "BF16", "Q4_1", ….
    shape: row-major, output channels first. rope_heads: not 0 when the rows of each of so many heads are
    stored interleaved for pairwise RoPE (GGUF llama q and k) and must be put back into halves.
    transposed: stored [in, out].
    shift: added to each element when it is read (GGUF keeps Gemma's norm weights plus one).
    grouped: where the scales of integers lie that a checkpoint keeps in tensors of their own.
    """

    name: str
    file: int
    offset: int
    bytes: int
    format: str
    shape: tuple[int, ...]
    rope_heads: int = 0
    transposed: bool = False
    shift: float = 0.0
    grouped: Grouped | None = None


@dataclass(frozen=True, slots=True)
class Grouped:
    """How a tensor's integers q become weights: scale·(q - zero), both shared by a group of a row.

    packing: how q, scales and zero points lie, see flashrt/weights/grouped.py. bits: of q, 4 or 8, counted
    from 0. group: consecutive weights of a row that share a scale. zeros: None where each is 2^(bits-1).
    less: what stored zero points are too small by. order: the group of each column, where a group isn't a run
    of consecutive ones.
    """

    packing: str
    bits: int
    group: int
    scales: Tensor
    zeros: Tensor | None = None
    less: int = 0
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """Files and tensors by the name the logical graph's weights use as sources."""

    files: tuple[File, ...]
    tensors: Mapping[str, Tensor]


def rounded(weights: Iterable[Weight], index: WeightIndex) -> dict[str, int]:
    """How many tensors are kept with loss, by "format in layout"."""
    found = Counter[str]()
    for weight in weights:
        for tensor in (index.tensors[s] for s in weight.sources if s in index.tensors):
            if not weight.of and not exact(tensor.format, weight.layout or "f32"):
                found[f"{tensor.format} in {weight.layout}"] += 1
    return dict(found)
