"""What config.json says of a checkpoint's quantised weights → a `Scheme`, or why it isn't read.

Keys and their meaning: `AwqConfig` and `GPTQConfig` of transformers
(https://huggingface.co/docs/transformers/main_classes/quantization), the README of GPTQModel for
`checkpoint_format` and `dynamic`, and compressed-tensors' `QuantizationConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flashrt.errors import UnsupportedModel
from flashrt.layouts import BLOCK

KEYS = ("quantization_config", "compression_config")  # the second is what compressed-tensors wrote at first
WHOLE = -1  # a group: all weights of a row
ADVICE = "use the original checkpoint, a GGUF file, or a format that docs/checkpoints.md lists"
_PACKED = ("pack-quantized", "int-quantized", "naive-quantized")
_STRATEGIES = ("group", "channel", "tensor")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's weights are quantised.

    method: "awq", "gptq" or "compressed-tensors". kinds: (bits, group) of its weights; empty where each
    module may have its own. less: what stored zero points are too small by. symmetric: whether zero points
    lie in the middle. path: of the configuration.
    """

    method: str
    kinds: frozenset[tuple[int, int]]
    path: Path
    less: int = 0
    symmetric: bool = False


def read(raw: Mapping[str, Any], path: Path) -> Scheme | None:
    """The scheme in a configuration (`raw`, read from `path`); None where weights aren't quantised.

    Raises:
        UnsupportedModel: another method, or a setting that isn't read; names file and key.
    """
    text = raw.get("text_config")
    for where, facts in (("", raw), ("text_config.", text if isinstance(text, dict) else {})):
        for key in KEYS:
            if facts.get(key):
                return _scheme(_Facts(path, where + key, facts[key]))
    return None


@dataclass(frozen=True, slots=True)
class _Facts:
    """A table of the configuration. where: its key, with dots."""

    path: Path
    where: str
    values: Any

    def get(self, *keys: str, default: Any = None) -> tuple[str, Any]:
        """The first of the keys that is there, and its value."""
        for key in keys:
            if self.values.get(key) is not None:
                return key, self.values[key]
        return keys[0], default

    def inner(self, key: str) -> _Facts:
        return _Facts(self.path, f"{self.where}.{key}", self.values.get(key))

    def refuse(self, key: str, value: object, wanted: str) -> NoReturn:
        found = "is missing" if value is None else f"is {value!r}, which isn't read"
        raise UnsupportedModel(f"{self.path}: {self.where}.{key} {found} ({wanted})", hint=ADVICE)

    def among(self, *keys: str, known: tuple[Any, ...], default: Any = None) -> Any:
        """A value, which must be one of the known ones."""
        key, value = self.get(*keys, default=default)
        plain = value.lower() if isinstance(value, str) else value
        if plain not in known or isinstance(plain, bool):
            self.refuse(key, value, "read: " + ", ".join(map(str, known)))
        return plain

    def absent(self, key: str, what: str) -> None:
        """Refuses a setting that is there."""
        if self.values.get(key):
            self.refuse(key, self.values[key], what)

    def group(self, *keys: str, default: int | None) -> int:
        """A number of weights that share a scale, or WHOLE."""
        key, value = self.get(*keys, default=default)
        if not isinstance(value, int) or (value != WHOLE and (value < BLOCK or value % BLOCK)):
            self.refuse(key, value, f"read: multiples of {BLOCK}, and {WHOLE} for whole rows")
        return value


def _scheme(facts: _Facts) -> Scheme:
    if not isinstance(facts.values, dict):
        raise UnsupportedModel(f"{facts.path}: {facts.where} isn't a table", hint=ADVICE)
    return _METHODS[facts.among("quant_method", known=tuple(_METHODS))](facts)


def _awq(facts: _Facts) -> Scheme:
    facts.among("version", "format", known=("gemm",), default="gemm")
    if facts.values.get("backend") == "llm-awq":
        facts.refuse("backend", "llm-awq", "its weights are laid out for other kernels")
    bits = facts.among("bits", "w_bit", known=(4,))
    group = facts.group("group_size", "q_group_size", default=128)
    return Scheme("awq", frozenset({(bits, group)}), facts.path)


def _gptq(facts: _Facts) -> Scheme:
    form = facts.among("checkpoint_format", "format", known=("gptq", "gptq_v2"), default="gptq")
    facts.absent("is_marlin_format", "its weights are laid out for one kernel")
    facts.among("pack_dtype", known=("int32",), default="int32")
    bits = facts.among("bits", known=(4, 8))
    kinds = frozenset({(bits, facts.group("group_size", default=128))})
    return Scheme(
        "gptq",
        frozenset() if facts.values.get("dynamic") else kinds,
        facts.path,
        less=int(form == "gptq"),
        symmetric=facts.values.get("sym") is True,
    )


def _compressed(facts: _Facts) -> Scheme:
    facts.among("format", known=_PACKED)
    facts.among("quantization_status", known=("compressed",), default="compressed")
    facts.absent("kv_cache_scheme", "keys and values are kept as they are computed")
    facts.absent("transform_config", "inputs are turned before they are multiplied")
    if isinstance(facts.values.get("sparsity_config"), dict):
        facts.inner("sparsity_config").among("format", known=("dense",), default="dense")
    groups = facts.inner("config_groups")
    if not isinstance(groups.values, dict) or not groups.values:
        facts.refuse("config_groups", groups.values, "no group of quantised weights")
    kinds = frozenset(kind for name in groups.values for kind in _kinds(groups.inner(name)))
    return Scheme("compressed-tensors", kinds, facts.path)


def _kinds(facts: _Facts) -> Iterator[tuple[int, int]]:
    """(bits, group) of the weights of a config group."""
    if not isinstance(facts.values, dict):
        raise UnsupportedModel(f"{facts.path}: {facts.where} isn't a table", hint=ADVICE)
    for key in ("input_activations", "output_activations"):
        facts.absent(key, "activations aren't quantised as the checkpoint wants them")
    facts.among("format", known=_PACKED, default=_PACKED[0])
    weights = facts.inner("weights")
    if not isinstance(weights.values, dict):
        facts.refuse("weights", weights.values, "how weights are quantised")
    weights.among("type", known=("int",), default="int")
    weights.absent("dynamic", "scales that aren't stored")
    bits = weights.among("num_bits", known=(4, 8), default=8)
    grouped = weights.get("group_size")[1] not in (None, WHOLE)
    strategy = weights.among("strategy", known=_STRATEGIES, default="group" if grouped else "tensor")
    yield bits, weights.group("group_size", default=None) if strategy == "group" else WHOLE


_METHODS = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
