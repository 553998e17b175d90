"""The weight index: where each tensor's bytes lie, without reading them.

A frontend makes it, a plan folder keeps it, `flashrt.weights.source` reads
through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# what a tensor's elements are in its file → the packed layout that holds them without loss
EXACT_LAYOUT: Mapping[str, str] = {
    "F32": "f32", "F16": "f16", "BF16": "bf16",
    "Q4_0": "q4.16x32", "Q4_1": "q4m.16x32", "Q8_0": "q8.16x32",
    "Q5_0": "q8.16x32", "IQ4_NL": "q8.16x32", "MXFP4": "q8.16x32", "Q3_K": "q8.16x32",
}  # fmt: skip
# … and what else it is kept in unless the user wants no loss. Q4_K and IQ4_XS: the quants stay, products of
# two scales are rounded to f16 (2^-11). The others are rounded to i8: off by at most 1/254 of the largest
# of 32 weights. Anything else is de-quantised to f32 rows.
NATIVE_LAYOUT: Mapping[str, str] = {
    **EXACT_LAYOUT, "Q4_K": "q4m.16x32", "IQ4_XS": "q8.16x32",
    **dict.fromkeys(
        ("Q5_1", "Q2_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
         "TQ1_0", "TQ2_0"), "q8.16x32"),
}  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """Files and tensors by the name the logical graph's weights use as sources."""

    files: tuple[File, ...]
    tensors: Mapping[str, Tensor]
