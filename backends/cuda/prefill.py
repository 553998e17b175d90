"""Attention of many tokens by a library: what its kernels do with tiles on tensor cores.

Keys and values of a sequence are gathered from their pages, as many heads as there is room for; the library
then attends to them at once: as many heads, and of a very long prompt tokens, as the plan counts memory for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashrt.backend import I64, ROOM, TRANSIENT, WORKSPACE
from flashrt.backends.cuda.kernels import KIND
from flashrt.backends.cuda.operands import Operands
from flashrt.ir import micro
from flashrt.ir.ops import ATTENTION_BF16, PAGE
from flashrt.ir.types import size

MANY = 64  # tokens of a bucket above which the library runs


def possible(instr: micro.Dispatch, ops: Operands) -> bool:
    """Whether the library knows this attention, and the host the step's positions."""
    plain = instr.attr("causal", True) is not False and not instr.attr("window", 0)
    plain = plain and not instr.attr("softcap", 0.0) and len(instr.args) == 4
    many = ops.number(ops.tensor(instr.args[0]).rows) > MANY
    return instr.numerics == ATTENTION_BF16 and plain and many and all(_root(a, ops) for a in instr.args[1:4])


def _root(arg: micro.Arg, ops: Operands) -> bool:
    return isinstance(arg, micro.SlotRef) and ops.twin(arg.slot) is not None


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens [lo, hi) of a step that are one sequence's, up to its key `keys`."""

    lo: int
    hi: int
    seq: int
    keys: int


def spans(seq: Any, positions: Any, most: int) -> Iterator[Span]:
    """The sequences of a step, cut behind every `most` tokens. seq, positions: i32[T], a sequence's tokens
    side by side and in order."""
    if not len(seq):
        return
    cuts = np.flatnonzero((np.diff(seq) != 0) | (np.diff(positions) != 1)) + 1
    for begin, end in zip([0, *cuts], [*cuts, len(seq)], strict=True):
        for lo in range(int(begin), int(end), most):
            hi = min(lo + most, int(end))
            yield Span(lo, hi, int(seq[lo]), int(positions[hi - 1]) + 1)


class LibraryAttention:
    """One attention of a bucket. Called in every step: what it does depends on the step's inputs."""

    def __init__(self, instr: micro.Dispatch, out: micro.SlotRef, ops: Operands) -> None:
        rows = ops.number(ops.tensor(instr.args[0]).rows)
        self._q, self._y = ops.view(instr.args[0], rows), ops.view(out, rows)
        self._heads, self._d, self._dv = (int(instr.attr(k)) for k in ("heads", "head_dim", "value_dim"))  # type: ignore[arg-type]
        self._scale = float(instr.attr("scale"))  # type: ignore[arg-type]
        self._kv = ops.cache(instr).permute(1, 2, 0, 3, 4)  # [2, heads, pages, PAGE, dim]
        self._room = ops.scratch("room", ROOM).view(self._kv.dtype)
        self._group = self._heads // self._kv.shape[1]
        width = max(self._d, self._dv) * self._group  # of a token, for a head of keys
        self._most = max(1, TRANSIENT // (width * WORKSPACE[KIND][f"attention {instr.numerics}"].transient))
        self._here = [ops.twin(a.slot).here.view(np.int32) for a in instr.args[1:4]]  # type: ignore[union-attr]
        self._sizes = [ops.slots[a.slot].type.shape for a in instr.args[2:4]]  # type: ignore[union-attr]
        self._words: I64 = ops.memory.words
        self._symbols = {s.name: ops.memory.word_of(s.name) for s in ops.memory.stream.symbols}

    def __call__(self) -> None:
        env = {name: int(self._words[at]) for name, at in self._symbols.items()}
        (tokens,), (_, pages) = ([size(d, env) for d in shape] for shape in self._sizes)
        positions, seq, table = self._here
        for span in spans(seq[:tokens], positions[:tokens], self._most):
            many = -(-span.keys // PAGE)
            self._attend(span, table[span.seq * pages : span.seq * pages + many])

    def _attend(self, span: Span, pages: Any) -> None:
        import torch

        index = torch.from_numpy(pages.astype(np.int64)).to(self._kv.device, non_blocking=True)
        heads, dim = self._kv.shape[1], self._kv.shape[4]
        at_once = self._room.numel() // (2 * len(pages) * PAGE * dim)
        at_once = min(at_once, self._most // (span.hi - span.lo))
        if not at_once:  # more keys of one head than there is room for: some of a long context's whole cache
            for head in range(heads):
                self._of_heads(span, head, self._kv[:, head : head + 1].index_select(2, index))
            return
        for head in range(0, heads, at_once):
            some = self._kv[:, head : head + at_once]
            shape = (2, some.shape[1], len(pages), PAGE, dim)
            kv = self._room[: math.prod(shape)].view(shape)
            self._of_heads(span, head, torch.index_select(some, 2, index, out=kv))

    def _of_heads(self, span: Span, head: int, kv: Any) -> None:
        """Of some heads, from the keys' head `head` on. kv: of those, [2, heads, pages, PAGE, dim]."""
        import torch
        from torch.nn.attention.bias import causal_lower_right

        tokens = span.hi - span.lo
        first, many = head * self._group, kv.shape[1] * self._group
        kv = kv.view(2, kv.shape[1], -1, kv.shape[4])[:, :, : span.keys]
        q = self._q[span.lo : span.hi, first * self._d : (first + many) * self._d].to(torch.bfloat16)
        q = q.view(1, -1, many, self._d).transpose(1, 2)
        whole = span.keys == tokens
        y = torch.nn.functional.scaled_dot_product_attention(
            q, kv[None, 0, ..., : self._d], kv[None, 1, ..., : self._dv],
            attn_mask=None if whole else causal_lower_right(tokens, span.keys),
            is_causal=whole, scale=self._scale, enable_gqa=True,
        )  # fmt: skip
        flat = y[0].transpose(0, 1).reshape(tokens, -1)
        self._y[span.lo : span.hi, first * self._dv : (first + many) * self._dv].copy_(flat)
