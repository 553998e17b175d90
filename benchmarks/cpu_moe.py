"""How fast does a mixture of experts generate on the CPU, against llama.cpp on the same file?

python -m benchmarks.cpu_moe [--threads 2] [--repeats 5] [--tokens 64] [--layers 16] [--keep FILE]

The model is Qwen3-MoE's shape in small, 128 experts of which a token uses 8, with random weights: 1 GB in
Q4_0. The tokenizer is SmolLM2's. Speeds mean as much as with real weights; texts mean nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import agreement, interleaved, peers, report
from benchmarks.peers import plan_options
from flashrt.engine import obtain
from flashrt.frontend.models import find
from flashrt.profiler.bench import read_rate, token_bytes

ENGINES = ("flashrt", "flashrt-exact", "llama.cpp")
Q4_0, Q8_0 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
BLOCK = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen3-MoE."""

    layers: int = 16
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head: int = 64
    experts: int = 128
    used: int = 8
    ffn: int = 256
    vocab: int = 49152


class Random:
    """Blocks of random quants, scaled so that a product of K terms keeps its input's size."""

    def __init__(self, writer: Any, seed: int = 0) -> None:
        self._writer, self._rng = writer, np.random.default_rng(seed)

    def matrix(self, name: str, *shape: int, kind: Any = Q4_0) -> None:
        """A tensor of rows of K = shape[-1] quantised numbers."""
        payload, spread = (BLOCK // 2, 4.6) if kind == Q4_0 else (BLOCK, 74.0)
        rows = int(np.prod(shape[:-1])) * (shape[-1] // BLOCK)
        blocks = self._rng.integers(0, 256, (rows, 2 + payload), np.uint8)
        scales = self._rng.uniform(0.5, 1.5, rows) / (spread * shape[-1] ** 0.5)
        blocks[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(rows, 2)
        row_bytes = shape[-1] // BLOCK * (2 + payload)
        self._writer.add_tensor(name, blocks.reshape(*shape[:-1], row_bytes), raw_dtype=kind)

    def plain(self, name: str, values: NDArray[np.float64]) -> None:
        self._writer.add_tensor(name, values.astype(np.float32))

    def normal(self, *shape: int) -> NDArray[np.float64]:
        return self._rng.standard_normal(shape) / shape[-1] ** 0.5


def write(path: Path, shape: Shape) -> None:
    """Writes the model as a GGUF file."""
    writer = gguf.GGUFWriter(path, "qwen3moe", use_temp_file=True)
    _describe(writer, shape)
    random, q, kv = Random(writer), shape.heads * shape.head, shape.kv_heads * shape.head
    random.matrix("token_embd.weight", shape.vocab, shape.hidden, kind=Q8_0)
    random.matrix("output.weight", shape.vocab, shape.hidden, kind=Q8_0)
    random.plain("output_norm.weight", np.ones(shape.hidden))
    for i in range(shape.layers):
        at = f"blk.{i}"
        for norm, width in (
            ("attn", shape.hidden),
            ("ffn", shape.hidden),
            ("attn_q", shape.head),
            ("attn_k", shape.head),
        ):
            random.plain(f"{at}.{norm}_norm.weight", np.ones(width))
        for name, n, k in (
            ("q", q, shape.hidden),
            ("k", kv, shape.hidden),
            ("v", kv, shape.hidden),
            ("output", shape.hidden, q),
        ):
            random.matrix(f"{at}.attn_{name}.weight", n, k)
        random.plain(f"{at}.ffn_gate_inp.weight", random.normal(shape.experts, shape.hidden))
        for name in ("gate", "up"):
            random.matrix(f"{at}.ffn_{name}_exps.weight", shape.experts, shape.ffn, shape.hidden)
        random.matrix(f"{at}.ffn_down_exps.weight", shape.experts, shape.hidden, shape.ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, shape: Shape) -> None:
    writer.add_name("random Qwen3-MoE")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(4 * shape.hidden)
    writer.add_expert_feed_forward_length(shape.ffn)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.used)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    for field in gguf.GGUFReader(find("smollm2").place).fields.values():
        if field.name.startswith("tokenizer."):
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)


def main() -> None:
    """Prints the table, and the distance to the memory limit measured in the same run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=Shape().layers)
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--keep", type=Path, help="where the model is written, or lies already")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.keep or Path(folder) / "moe.gguf"
        if not path.exists():
            write(path, Shape(layers=given.layers))
        _measure(path, given)


def _measure(path: Path, given: argparse.Namespace) -> None:
    asked = peers(given.engines, str(path), given.threads)
    results = {
        f"context {c}": interleaved(asked, given.repeats, task="decode", context=c, tokens=given.tokens)
        for c in (16, 512)
    }
    size = path.stat().st_size / 1e9
    settings = (
        f"random Qwen3-MoE of {size:.2f} GB, Q4_0, {given.threads} threads, {given.tokens} tokens, greedy"
    )
    print(report("tokens per second of one sequence", settings, results, given.engines[0]))
    print("versions  " + "; ".join(p.version for p in asked))
    print(agreement(asked, str(path), given.threads, piece=1, pieces=1))
    nbytes = token_bytes(obtain(str(path), plan_options("fast")).plan)
    limit = read_rate(nbytes, given.threads)
    for case, rows in ((c, r) for c, r in results.items() if r):
        share = rows[0].median * nbytes / limit
        print(f"limit     {case}: {share:.2f} of {limit / 1e9:.1f} GB/s, read from {nbytes / 1e6:.1f} MB")
    for peer in asked:
        peer.close()


if __name__ == "__main__":
    main()
