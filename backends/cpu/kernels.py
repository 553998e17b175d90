"""The table of compiled functions, and of what the backend offers. Compiles nothing by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flashrt.ir.ops import (
    ATTENTION_BF16,
    ATTENTION_CACHED,
    ATTENTION_EXACT,
    EPILOGUES,
    EXACT,
    KV_WRITE_BF16,
    LINEAR_BF16,
    LINEAR_EXACT,
    LINEAR_I8,
    PRODUCTS,
)
from flashrt.layouts import LAYOUTS, MATRICES, Layout


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """How one function is compiled: `module.maker(*args)` gives Python code of `arguments` int64.

    requires: features of an x86 processor without which it must not be compiled or called.
    """

    module: str
    maker: str
    args: tuple[str | int | bool, ...] = ()
    arguments: int = 3
    requires: frozenset[str] = frozenset()


TILES = frozenset({"avx512f", "avx512bw", "avx512bf16", "amx-tile", "amx-bf16"})
_ACTS = ("silu", "gelu", "gelu_tanh", "relu", "tanh", "sigmoid")


def _exact(layout: Layout) -> dict[str, KernelEntry]:
    maker = "plain" if layout.bits == 0 else "quantised"
    return {f"linear.{layout.name}": KernelEntry("linear", maker, (layout.name,), requires=_widening(layout))}


def _table(layout: Layout) -> dict[str, KernelEntry]:
    maker = "plain_embedding" if layout.bits == 0 else "quantised_embedding"
    entry = KernelEntry("linear", maker, (layout.name,), requires=_widening(layout))
    return {f"embedding.{layout.name}": entry}


def _widening(layout: Layout) -> frozenset[str]:
    """What a processor needs to widen a layout's scales or elements: f16 ones aren't for every one."""
    number = layout.number if layout.element is None else layout.element
    return frozenset({"f16c"} if number == np.float16 else ())


def _i8(layout: Layout) -> dict[str, KernelEntry]:
    """The product with INT8 activations, with AMX tiles, with the dot product, and without either."""
    name, requires = layout.name, _widening(layout)
    vnni = requires | {"avx512f", "avx512bw", "avx512vnni"}
    tiles = vnni | TILES | {"amx-int8"}
    return {
        f"linear_i8_tiles.{name}": KernelEntry("vnni", "quantised_i8", (name, True, True), requires=tiles),
        f"linear_vnni.{name}": KernelEntry("vnni", "quantised_i8", (name, True), requires=vnni),
        f"linear_i8.{name}": KernelEntry("vnni", "quantised_i8", (name, False), requires=requires),
    }


def _bf16(layout: Layout) -> dict[str, KernelEntry]:
    """The product with bf16 activations, in tiles."""
    entry = KernelEntry("amx", "quantised_bf16", (layout.name,), requires=TILES | _widening(layout))
    return {f"linear_amx.{layout.name}": entry}


def _experts(products: Mapping[str, KernelEntry]) -> dict[str, KernelEntry]:
    """For each product the one with experts: `linear_vnni.q8.16x32` → `expert_linear_vnni.q8.16x32`."""
    return {
        f"expert_{name}": KernelEntry(
            "experts", "expert_product", (entry.module, entry.maker, *entry.args), requires=entry.requires
        )
        for name, entry in products.items()
        if name.startswith("linear")
    }


def _heads(products: Mapping[str, KernelEntry]) -> dict[str, KernelEntry]:
    """For each exact product the one by heads: `linear.f16` → `head_linear.f16`."""
    return {
        f"head_{name}": KernelEntry(
            "heads", "head_product", (entry.module, entry.maker, *entry.args), requires=entry.requires
        )
        for name, entry in products.items()
        if name.startswith("linear.")
    }


PACKED = tuple(LAYOUTS[x] for x in MATRICES if LAYOUTS[x].bits)
_PRODUCTS: Mapping[str, KernelEntry] = {
    **{name: entry for layout in PACKED for name, entry in _i8(layout).items()},
    **{name: entry for layout in PACKED for name, entry in _bf16(layout).items()},
    **{name: entry for x in MATRICES for name, entry in _exact(LAYOUTS[x]).items()},
}
KERNELS: Mapping[str, KernelEntry] = {
    **_PRODUCTS,
    **_experts(_PRODUCTS),
    **_heads(_PRODUCTS),
    **{name: entry for layout in LAYOUTS.values() for name, entry in _table(layout).items()},
    "rms_norm": KernelEntry("norm", "rms_norm"),
    "layer_norm": KernelEntry("norm", "layer_norm"),
    "rope_table": KernelEntry("rope", "rope_table"),
    "rope": KernelEntry("rope", "rope"),
    "rope_pairs": KernelEntry("rope", "rope_pairs"),
    "kv_write": KernelEntry("attention", "kv_write"),
    "attention": KernelEntry("attention", "attention"),
    "attention_tiles": KernelEntry("attention_tiles", "attention", requires=TILES),
    "add": KernelEntry("elementwise", "add"),
    "mul": KernelEntry("elementwise", "mul"),
    "scale": KernelEntry("elementwise", "scale"),
    "softcap": KernelEntry("elementwise", "softcap"),
    **{f"gated.{act}": KernelEntry("elementwise", "gated", (act,)) for act in _ACTS},
    **{f"activation.{act}": KernelEntry("elementwise", "activation", (act,)) for act in _ACTS},
    "gated_clamped": KernelEntry("experts", "gated_clamped"),
    "route": KernelEntry("experts", "route"),
    "expert_sum": KernelEntry("experts", "expert_sum"),
    "copy": KernelEntry("elementwise", "copy"),
    "quantize": KernelEntry("elementwise", "quantize"),
    "quantize.bf16": KernelEntry("elementwise", "round_bf16"),
    "sample": KernelEntry("sample", "sample"),
    "team_run": KernelEntry("walk", "team_run", arguments=4),
    "team_help": KernelEntry("walk", "team_help"),
    "team_quit": KernelEntry("walk", "team_quit", arguments=2),
    "team_recall": KernelEntry("walk", "team_recall", arguments=2),
}

# by numerics: functions that compute a product, the fastest first; the layout follows the name
_LINEARS: Mapping[str, tuple[str, ...]] = {
    LINEAR_EXACT: ("linear",),
    LINEAR_I8: ("linear_i8_tiles", "linear_vnni", "linear_i8"),
    LINEAR_BF16: ("linear_amx",),
}
_ATTENTIONS: Mapping[str, str] = {
    ATTENTION_EXACT: "attention",
    ATTENTION_CACHED: "attention",
    ATTENTION_BF16: "attention_tiles",
}


def candidates(kernel: str, numerics: str) -> tuple[str, ...]:
    """Names in KERNELS that compute what a dispatch names, the fastest first."""
    op, _, layout = kernel.partition("+")[0].partition(".")
    if op == "attention":
        return tuple(name for n, name in _ATTENTIONS.items() if n == numerics)
    if op not in PRODUCTS:
        return (kernel.partition("+")[0],)
    prefix = op.removesuffix("linear")
    return tuple(
        n for n in (f"{prefix}{name}.{layout}" for name in _LINEARS.get(numerics, ())) if n in KERNELS
    )


_PLAIN = (
    "rms_norm", "layer_norm", "rope_table", "rope", "rope_pairs", "gated", "activation",
    "add", "mul", "scale", "softcap", "slice", "view", "rows", "sample",
    "route", "expert_sum", "gated_clamped",
)  # fmt: skip


def offered() -> tuple[tuple[str, str], ...]:
    """(kernel, numerics) pairs as dispatches name them, epilogues included."""
    kinds = [(x, n) for n in _LINEARS for x in MATRICES if candidates(f"linear.{x}", n)]
    linears = [(f"linear.{x}{e}", n) for x, n in kinds for e in EPILOGUES]
    experts = [(f"expert_linear.{x}", n) for x, n in kinds]
    tables = [(f"embedding.{x}", EXACT) for x in LAYOUTS]
    heads = [(f"head_linear.{x}", LINEAR_EXACT) for x in MATRICES]
    attentions = [(name, n) for name in ("attention", "attention+latent") for n in _ATTENTIONS]
    plain = [(name, EXACT) for name in _PLAIN]
    return (
        *linears,
        *experts,
        *heads,
        *tables,
        *plain,
        *attentions,
        ("kv_write", EXACT),
        ("kv_write", KV_WRITE_BF16),
    )
