"""Which kernels run on a GPU, and with which numerics.

The names say in which formats values are held and multiplied, as everywhere; the order in which a sum is
taken is this backend's own. "act=f32 acc=f32" and attention without "act=bf16" give the same bits for any
number of tokens. "act=bf16 acc=f32" doesn't: few tokens meet the weights as they are stored, more of them
weights that are rounded to bf16, in tiles or in a library's matrix product.
"""

from __future__ import annotations

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
)
from flashrt.layouts import BY_ROW, LAYOUTS

KIND = "gpu"
STORED = ("f32", "f16", "bf16", "q4.16x32", "q4m.16x32", "q8.16x32")  # layouts that kernels read
ROUNDED = ("q4.16x32", "q4m.16x32", "q8.16x32", "bf16")  # layouts whose products take bf16 activations
TABLES = (*STORED, *(BY_ROW[x] for x in STORED if x in BY_ROW))  # those that rows are looked up in
PLAIN = ("f32", "f16", "bf16")  # those that products by heads read
_ATTENTIONS = (ATTENTION_EXACT, ATTENTION_CACHED, ATTENTION_BF16)
_PLAIN = (
    "rms_norm", "layer_norm", "rope_table", "rope", "rope_pairs", "gated", "activation",
    "add", "mul", "scale", "softcap", "slice", "view", "rows", "sample",
    "route", "expert_sum", "expert_join", "expert_cache", "gated_clamped",
)  # fmt: skip


def offered() -> tuple[tuple[str, str], ...]:
    """(kernel, numerics) pairs as dispatches name them, epilogues included."""
    kinds = [(layout, LINEAR_EXACT) for layout in STORED] + [(layout, LINEAR_BF16) for layout in ROUNDED]
    kinds += [(layout, LINEAR_I8) for layout in ROUNDED if LAYOUTS[layout].bits]
    return (
        *((f"linear.{layout}{e}", numerics) for layout, numerics in kinds for e in EPILOGUES),
        *((f"expert_linear.{layout}", numerics) for layout, numerics in kinds),
        *((f"embedding.{layout}", EXACT) for layout in TABLES),
        *((f"embedding.{layout}+lent", EXACT) for layout in TABLES if LAYOUTS[layout].rows == 1),
        *((name, EXACT) for name in _PLAIN),
        *((f"head_linear.{layout}", LINEAR_EXACT) for layout in PLAIN),
        *((name, n) for name in ("attention", "attention+latent") for n in _ATTENTIONS),
        ("kv_write", EXACT),
        ("kv_write", KV_WRITE_BF16),
    )
