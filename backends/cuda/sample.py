"""Sampling on the device: greedy by a kernel of its own, anything else with a library's sort.

What each step means is written in flashrt/backends/reference/sample.py. Sums over the vocabulary are
float64 as there, but taken in another order: where a draw falls within a rounding of two tokens' border
the other one may come out.
"""

from __future__ import annotations

import math
from typing import Any

from flashrt.backend import TRANSIENT, WORKSPACE
from flashrt.backends.cuda import args
from flashrt.backends.cuda.args import Step, launch
from flashrt.backends.cuda.kernels import KIND
from flashrt.backends.cuda.operands import Operands, Tensor
from flashrt.ir import micro

GREEDY = 1e-5  # temperatures below this are greedy
BLOCKS = 64  # blocks that look for the largest logit of a row


def greedy_only(temperature: Any, penalty: Any) -> bool:
    """Whether every row's token is simply its largest logit. Arrays of the step, in host memory."""
    return bool((temperature < GREEDY).all() and (penalty == 1).all())


def sample(instr: micro.Dispatch, ops: Operands) -> list[Step]:
    """The launches of a `sample`, for the way of sampling that the bucket is for."""
    logits, out = ops.floats(instr.args[0]), ops.tensor(instr.dst)
    if ops.greedy:
        return [_argmax(logits, out, ops)]
    rows = ops.number(logits.rows)
    most = ops.most(logits.rows)
    likely = ops.scratch("likely", 4 * most * logits.width)
    uniform = ops.scratch("uniform", 8 * most)
    penalised = _penalised(instr, logits, likely.data_ptr(), uniform.data_ptr(), ops)
    return [*penalised, _drawn(instr, rows, logits.width, likely, uniform, ops)]


def _argmax(logits: Tensor, out: Tensor, ops: Operands) -> Step:
    rows, most = ops.number(logits.rows), ops.most(logits.rows)
    best, index = (int(ops.scratch(what, 4 * most * BLOCKS).data_ptr()) for what in ("best", "best index"))
    through = int(ops.scratch("argmax through", 4 * most).data_ptr())
    fields = args.Argmax(
        logits.address, logits.stride, logits.width, out.address, best, index, through, ops.rows(logits.rows)
    )
    return launch("argmax", (min(BLOCKS, -(-logits.width // 512)), rows), 512, fields)


def _penalised(instr: micro.Dispatch, logits: Tensor, likely: int, uniform: int, ops: Operands) -> list[Step]:
    penalty, seed, draw, history = (ops.tensor(a) for a in instr.args[5:9])
    stride = ops.slots[instr.args[8].slot].type.shape[-1]  # type: ignore[union-attr]
    fields = args.Penalise(
        logits.address, logits.stride, logits.width, penalty.address, history.address, ops.rows(stride),
        likely, uniform, seed.address, draw.address, ops.rows(logits.rows),
    )  # fmt: skip
    rows, seen = ops.number(logits.rows), ops.number(stride)
    return [
        launch("drawable", (-(-logits.width // 256), rows), 256, fields),
        launch("penalise", (-(-max(seen, 1) // 256), rows), 256, fields),
    ]


def _drawn(instr: micro.Dispatch, rows: int, width: int, likely: Any, uniform: Any, ops: Operands) -> Step:
    import torch

    x = likely[: 4 * rows * width].view(torch.float32).view(rows, width)
    u = uniform[: 8 * rows].view(torch.float64).view(rows, 1)
    parameters = [ops.column(a, rows) for a in instr.args[1:5]]
    out = ops.column(instr.dst, rows).view(rows)
    some = max(1, TRANSIENT // (width * WORKSPACE[KIND]["sample"].transient))

    def work() -> None:
        for at in range(0, rows, some):
            part = slice(at, at + some)
            out[part].copy_(draw(x[part], u[part], *(p[part] for p in parameters)))

    return work


def draw(x: Any, u: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """Tensors of torch: x [N, V], the others [N, 1] → tokens [N]. Without reading anything back."""
    import torch

    values, order = torch.sort(x, dim=1, descending=True, stable=True)
    top = values[:, :1]
    greedy = (temperature < GREEDY) | (top == -math.inf)
    heat = torch.where(greedy, torch.ones_like(temperature), temperature).double()
    scaled = (values.double() - torch.where(greedy, torch.zeros_like(top), top).double()) / heat
    places = torch.arange(x.shape[1], device=x.device).view(1, -1)
    p = torch.exp(scaled).masked_fill((top_k > 0) & (places >= top_k), 0.0)
    p = p / p.sum(dim=1, keepdim=True)
    kept = p >= min_p.double() * p[:, :1]
    sums = torch.cumsum(torch.where(kept, p, torch.zeros_like(p)), dim=1)
    most = _count(kept)
    enough = torch.minimum(_count(kept & (sums < top_p.double() * sums[:, -1:])) + 1, most).clamp(min=1)
    total = sums.gather(1, enough - 1)
    chosen = torch.minimum(_count((places < enough) & (sums <= u * total)), enough - 1)
    chosen = torch.where(greedy, torch.zeros_like(chosen), chosen)
    tokens = order.gather(1, chosen)
    return torch.where(top == -math.inf, torch.zeros_like(tokens), tokens).view(-1).int()


def _count(flags: Any) -> Any:
    return flags.sum(dim=1, keepdim=True)
