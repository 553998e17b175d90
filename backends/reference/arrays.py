"""How values are held: numpy arrays of the declared dtype, computed on in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flashrt.ir.types import Env, Expr, TensorType, Value, evaluate, size

Array = NDArray[Any]
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
AttrMap = Mapping[str, Any]
Op = Callable[[Sequence[Array], AttrMap, TensorType], Array]

DTYPE: Mapping[str, np.dtype[Any]] = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
_HALF = (DTYPE["f16"], DTYPE["bf16"])


def widen(x: Array) -> Array:
    """Half floats as float32, in which all arithmetic happens; anything else as it is."""
    return x.astype(np.float32) if x.dtype in _HALF else x


def real(x: Any) -> F32:
    """x as float32, whatever it was."""
    return np.asarray(x).astype(np.float32, copy=False)


def shape_at(type: TensorType, env: Env) -> tuple[int, ...]:
    """The shape when the symbols are `env`."""
    return tuple(size(d, env) for d in type.shape)


def attr_at(value: Value, env: Env) -> Any:
    """An attribute with its sizes as numbers."""
    if isinstance(value, Expr):
        return evaluate(value, env)
    if isinstance(value, tuple):
        return tuple(attr_at(v, env) for v in value)
    return value
