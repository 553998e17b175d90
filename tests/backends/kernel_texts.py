"""Streams of one kernel, for the tests of several backends."""

from __future__ import annotations

from flashrt.ir.ops import ATTENTION_EXACT

AT = "device=cpu:0 lane=compute"


def linear_text(layout: str, n: int, k: int, epilogue: str, numerics: str) -> str:
    """x %0 [T, k] → %1 [T, n], with blocks w and b; the residual is %2."""
    bias = f"bias {AT} block=@b\n" if "bias" in epilogue else ""
    residual = ",%2" if "residual" in epilogue else ""
    return f"""weight w f32[{n},{k}] sources=[w] layout={layout}
weight b f32[{n}] sources=[b] layout=f32
slot %0 cpu:0 f32[T,{k}]
slot %1 cpu:0 f32[T,{n}]
slot %2 cpu:0 f32[T,{n}]
block w cpu:0 lo=0 hi={n} bytes=0
block b cpu:0 lo=0 hi={n} bytes=0
{bias}dispatch {AT} kernel=linear.{layout}{epilogue} args=[%0,@w{residual}] dst=%1 {numerics}
"""


def attention_text(
    heads: int,
    kv_heads: int,
    d: int,
    dv: int,
    attrs: str,
    *,
    sinks: bool = False,
    numerics: str = ATTENTION_EXACT,
    scale: float = 0.2,
    pages: str = "2,4",
) -> str:
    """kv_write of %1 and %2, then attention of %0 → %6, with block sinks. pages: shape of the page table."""
    dim, kept = max(d, dv), "bf16" if "kv=bf16" in numerics else "f32"
    written = "acc=f32" + " kv=bf16" * (kept == "bf16")
    every = f"heads={heads},kv_heads={kv_heads},head_dim={d},value_dim={dv},scale={scale}{attrs}"
    given = "%0,%3,%4,%5,@sinks" if sinks else "%0,%3,%4,%5"
    return f"""weight sinks f32[{heads}] sources=[s] layout=f32
state kv {kept}[P,2,{kv_heads},16,{dim}]
slot %0 cpu:0 f32[T,{heads * d}]
slot %1 cpu:0 f32[T,{kv_heads * d}]
slot %2 cpu:0 f32[T,{kv_heads * dv}]
slot %3 cpu:0 i32[T]
slot %4 cpu:0 i32[T]
slot %5 cpu:0 i32[{pages}]
slot %6 cpu:0 f32[T,{heads * dv}]
block sinks cpu:0 lo=0 hi={heads} bytes=0
dispatch {AT} kernel=kv_write args=[%1,%2,%3,%4,%5] attrs={{{every}}} writes=[kv] numerics="{written}"
dispatch {AT} kernel=attention args=[{given}] dst=%6 attrs={{{every}}} reads=[kv] numerics="{numerics}"
"""


def sample_text(vocabulary: int, history: int | str) -> str:
    """Logits %0 [T, vocabulary], the parameters in their order, history [T, history] → tokens %9."""
    return f"""slot %0 cpu:0 f32[T,{vocabulary}]
slot %1 cpu:0 f32[T]
slot %2 cpu:0 i32[T]
slot %3 cpu:0 f32[T]
slot %4 cpu:0 f32[T]
slot %5 cpu:0 f32[T]
slot %6 cpu:0 i64[T]
slot %7 cpu:0 i64[T]
slot %8 cpu:0 i32[T,{history}]
slot %9 cpu:0 i32[T]
dispatch {AT} kernel=sample args=[%0,%1,%2,%3,%4,%5,%6,%7,%8] dst=%9 numerics="acc=f32"
"""
