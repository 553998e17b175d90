"""How tensor elements stand in model files: the formats of GGUF and safetensors, by name.

A block format keeps `block` consecutive weights of a row in `bytes` bytes. The
meaning of the quantised formats is that of the `gguf` package, which also
de-quantises those that no packed layout holds without loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flashrt.errors import UnsupportedModel
from flashrt.weights.index import NATIVE_LAYOUT

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Format:
    """One format. element: numpy dtype of plain elements, None for blocks of quantised weights.

    gguf: its number in a GGUF file, -1 where GGUF has none. block: weights, bytes: bytes of a block.
    """

    name: str
    gguf: int
    block: int
    bytes: int
    element: np.dtype[np.generic] | None = None

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k weights; k is a multiple of `block`."""
        assert k % self.block == 0, (self.name, k)
        return k // self.block * self.bytes


def _plain(name: str, gguf: int, dtype: type[np.generic]) -> Format:
    element = np.dtype(dtype)
    return Format(name, gguf, 1, element.itemsize, element)


_ALL = (
    _plain("F32", 0, np.float32), _plain("F16", 1, np.float16), _plain("BF16", 30, ml_dtypes.bfloat16),
    _plain("F64", 28, np.float64), _plain("I8", 24, np.int8), _plain("I16", 25, np.int16),
    _plain("I32", 26, np.int32), _plain("I64", 27, np.int64), _plain("U8", -1, np.uint8),
    _plain("BOOL", -1, np.bool_),
    Format("Q4_0", 2, 32, 18), Format("Q4_1", 3, 32, 20), Format("Q5_0", 6, 32, 22),
    Format("Q5_1", 7, 32, 24), Format("Q8_0", 8, 32, 34), Format("Q2_K", 10, 256, 84),
    Format("Q3_K", 11, 256, 110), Format("Q4_K", 12, 256, 144), Format("Q5_K", 13, 256, 176),
    Format("Q6_K", 14, 256, 210), Format("IQ2_XXS", 16, 256, 66), Format("IQ2_XS", 17, 256, 74),
    Format("IQ3_XXS", 18, 256, 98), Format("IQ1_S", 19, 256, 50), Format("IQ4_NL", 20, 32, 18),
    Format("IQ3_S", 21, 256, 110), Format("IQ2_S", 22, 256, 82), Format("IQ4_XS", 23, 256, 136),
    Format("IQ1_M", 29, 256, 56), Format("TQ1_0", 34, 256, 54), Format("TQ2_0", 35, 256, 66),
    Format("MXFP4", 39, 32, 17),
)  # fmt: skip
FORMATS: Mapping[str, Format] = {f.name: f for f in _ALL}
GGUF_FORMATS: Mapping[int, Format] = {f.gguf: f for f in _ALL if f.gguf >= 0}


def native_layout(name: str) -> str:
    """The packed layout that a matrix of this format is kept in; `NATIVE_LAYOUT` says with which loss."""
    return NATIVE_LAYOUT.get(name, "f32")


def find(name: str) -> Format:
    """The format of that name. Raises UnsupportedModel naming the known ones."""
    if name not in FORMATS:
        raise UnsupportedModel(f"unknown tensor format {name}", hint=f"known formats: {', '.join(FORMATS)}")
    return FORMATS[name]


def to_f32(form: Format, rows: U8) -> F32:
    """Bytes of rows, u8 [n, row_bytes] → f32 [n, k]."""
    if form.element is not None:
        return rows.view(form.element).astype(np.float32)
    # imported here: it takes longer than a whole header, and files of native formats never need it
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return np.asarray(dequantize(rows, GGMLQuantizationType[form.name]), dtype=np.float32)
