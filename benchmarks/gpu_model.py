"""A Llama of 8B's shape with random weights on a GPU: ours, and transformers' beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.llama_shape import RandomSource, Shape, graph, imported
from flashrt.backend import WORKSPACE
from flashrt.backends.cuda import CudaBackend
from flashrt.backends.cuda.kernels import offered
from flashrt.backends.reference import ReferenceBackend
from flashrt.ir.ops import ATTENTION_BF16, ATTENTION_CACHED, LINEAR_BF16, PAGE
from flashrt.machine import Device, Machine, Measured
from flashrt.passes import pipeline
from flashrt.program import Pending, Plan, Program, Variant

CONTEXT = 1024  # pages of a sequence's table, in tokens; longer prompts have their own


def device() -> Device:
    """The GPU as plans are made for it here: one device alone, so that rates don't matter."""
    rate = Measured(1e12, "assumed")
    found = torch.cuda.get_device_properties(0)
    rates = {"f32": rate, "bf16": rate}
    return Device(
        "gpu:0", "gpu", found.name, found.total_memory, rate, rates, Measured(2.0, "assumed"),
        kernels=offered(), workspace=WORKSPACE["gpu"],
    )  # fmt: skip


def read_limit() -> float:
    """Bytes per second at which the GPU sums 4 GiB."""
    x = torch.ones(1 << 30, device="cuda")
    return float(4 * x.numel() / statistics.median(seconds(lambda: x.sum(), 10)))


def matrix_limit() -> float:
    """Operations per second of a library's bf16 product of 8192³."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return float(2 * 8192**3 / statistics.median(seconds(lambda: x @ x, 10)))


def seconds(work: Callable[[], Any], times: int) -> list[float]:
    """Seconds of each of some runs after two that warm up, until the GPU is through."""
    taken = []
    for run in range(times + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if run > 1:
            taken.append(time.perf_counter() - begin)
    return taken


class Ours:
    """A program of one variant. numerics: of its products; most: tokens of its largest step."""

    def __init__(self, layout: str, numerics: str, most: int) -> None:
        self.shape = Shape(layout=layout)
        whole = graph(self.shape)
        symbols = tuple(replace(s, hi=most) if s.name == "T" else s for s in whole.symbols)
        whole, machine = replace(whole, symbols=symbols), Machine((device(),))
        attention = ATTENTION_BF16 if numerics == LINEAR_BF16 else ATTENTION_CACHED
        options = pipeline.Options(numerics=numerics, attention=attention, plain=numerics == LINEAR_BF16)
        planned = pipeline.compile_graph(whole, machine, options)
        variant = Variant.of("all", 1, most, planned.physical, planned.stream)
        plan = Plan("llama", "", "", {}, whole, (variant,), machine, imported(self.shape).weights)
        host = ReferenceBackend().open(device())
        opened = {"gpu:0": CudaBackend().open(device())}
        pages = 64 * CONTEXT // PAGE
        self.program = Program(plan, opened, host, pages=pages, source=RandomSource())

    def step(self, inputs: dict[str, Any]) -> Any:
        """The tokens that a step chooses, on the host."""
        return self.begin(inputs).result()["tokens"]

    def begin(self, inputs: dict[str, Any], *, fed: bool = False) -> Pending:
        """Begins a step. fed: its ids are the tokens of the one before."""
        context = {"C": inputs["pages"].shape[1] * PAGE}
        return self.program.begin(inputs, context, ("tokens",), {"ids": "tokens"} if fed else {})

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt to its first token: the median of five."""
        given = inputs(tokens, 1, 0)
        return statistics.median(seconds(lambda: self.step(given), 5))

    def decode(self, sequences: int, context: int, tokens: int) -> float:
        """Tokens per second of so many sequences together, greedy, each begun while the last one runs."""
        given = inputs(sequences, sequences, context)
        for _ in range(3):
            given["ids"] = self.step(given)
        begin = time.perf_counter()
        pending = self.begin(given)
        for at in range(1, tokens):
            given["positions"] = np.full(sequences, context + at, np.int32)
            after = self.begin(given, fed=True)
            pending.result()
            pending = after
        pending.result()
        return sequences * tokens / (time.perf_counter() - begin)

    def close(self) -> None:
        self.program.close()
        torch.cuda.empty_cache()


def inputs(tokens: int, sequences: int, position: int) -> dict[str, Any]:
    """A step of `sequences` sequences that all stand at a position, the last token of each is asked for."""
    each = tokens // sequences
    many = max(CONTEXT, each) // PAGE
    rows = np.arange(1, sequences + 1) * each - 1
    parameters = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}
    whole = {"top_k": np.int32(0), "seed": np.int64(1), "draw": np.int64(1)}
    return {
        "ids": (np.arange(tokens) * 7 % 1000).astype(np.int32),
        "positions": np.tile(position + np.arange(each, dtype=np.int32), sequences),
        "rows": rows.astype(np.int32),
        "seq": np.repeat(np.arange(sequences, dtype=np.int32), each),
        "pages": np.arange(sequences * many, dtype=np.int32).reshape(sequences, many),
        **{name: np.full(sequences, value, np.float32) for name, value in parameters.items()},
        **{name: np.full(sequences, value) for name, value in whole.items()},
        "history": np.full((sequences, 1), -1, np.int32),
    }


class Transformers:
    """transformers with SDPA and a static cache, bf16. compiled: the decode step by torch.compile."""

    def __init__(self, compiled: bool, most: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

        s = Shape()
        config = LlamaConfig(
            vocab_size=s.vocab, hidden_size=s.hidden, intermediate_size=s.ffn, num_hidden_layers=s.layers,
            num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head,
            max_position_embeddings=s.context, attn_implementation="sdpa", dtype="bfloat16",
        )  # fmt: skip
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            self.model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
        self.cache = StaticCache(config=config, max_cache_len=most)
        self.forward = self.model
        self.decode(0, 1)  # the cache takes its memory outside of what is compiled
        if compiled:
            self.forward = torch.compile(self.model, mode="reduce-overhead")

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt to its first token: the median of five."""
        ids = (torch.arange(tokens, device="cuda") * 7 % 1000)[None]

        def run() -> int:
            out = self.model(ids, use_cache=True, logits_to_keep=1)
            return int(out.logits[0, -1].argmax())

        return statistics.median(seconds(run, 5))

    @torch.inference_mode()
    def decode(self, context: int, tokens: int) -> float:
        """Tokens per second of one sequence, greedy."""
        ids = torch.zeros(1, 1, dtype=torch.long, device="cuda")
        at = torch.tensor([[context]], device="cuda")

        def run() -> None:
            nonlocal ids
            torch.compiler.cudagraph_mark_step_begin()
            out = self.forward(ids, past_key_values=self.cache, position_ids=at, cache_position=at[0])
            ids = out.logits[:, -1:].argmax(-1).clone()
            ids.cpu()
            at.add_(1)

        for _ in range(5):
            run()
        begin = time.perf_counter()
        for _ in range(tokens):
            run()
        return tokens / (time.perf_counter() - begin)
