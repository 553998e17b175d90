"""The safety gate: a model whose tokens influence each other outside attention is refused, never run.

flashrt runs several sequences flat in one batch, so everything but attention
must act on each token alone. Some models export cleanly and break this (a
convolution over tokens, frequencies taken from the longest position). So a
small model of the same class, with random parameters, is traced and tried:

- with attention replaced by a function of one token, `f(x[rows]) == f(x)[rows]`, and each token alone. In
  float64, where rounding stays under 1e-9 and a leak doesn't; at positions spread over the whole context,
  since some leaks begin late; the replacement sees rotations, so wrong RoPE shows too;
- with attention as flashrt defines it, the logits equal transformers' own for a sequence longer than the
  window;
- every layer has an attention site.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashrt import knobs
from flashrt.errors import UnsupportedModel
from flashrt.frontend import (
    complex_rope,
    experts,
    hooks,
    lm,
    names,
    positions,
    rewrite,
    rope,
    shrink,
    spelled,
    trace,
)
from flashrt.frontend.hf import ADVICE

ROW_TOLERANCE = 1e-6  # of the largest logit, in float64
LOGIT_TOLERANCE = 1e-3  # of the largest logit; transformers computes in float32
TOKENS = 13
SEQUENCE = 20

Attention = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Verdict:
    """reason: why a model can't be run, or "". given: whether positions are given to it, as others take them,

    or it counts them itself, from a number of its own (`lm.export`).
    """

    reason: str
    given: bool = True


def check(config: Any, context: int) -> bool:
    """Whether the model is to be given positions. The verdict is kept on disk.

    Raises:
        UnsupportedModel: the model can't be run, with the reason.
    """
    small = shrink.shrink(config)
    path = _verdicts() / f"{_key(small, context)}.json"
    verdict = _known(path)
    if verdict is None:
        verdict = judge(small, context)
        _remember(path, small.model_type, verdict)
    pads = [getattr(c, "pad_token_id", None) for c in (small, config)]  # not all configurations have one
    if not verdict.given and pads[0] != pads[1]:
        verdict = Verdict(f"it counts positions from its token for padding, {pads[1]}")
    if verdict.reason:
        raise UnsupportedModel(
            f"{config.model_type} is refused: {verdict.reason}",
            hint=ADVICE,
        )
    return verdict.given


def judge(config: Any, context: int) -> Verdict:
    """What is to be said of models of this (small) configuration."""
    given, vocab = True, int(config.vocab_size)
    longest = min(context, getattr(config, "max_position_embeddings", None) or context)
    try:
        model = lm.build(config, "cpu", context)
        _randomise(model)
        given = _takes_positions(copy.deepcopy(model), vocab)  # some change when they run
        # a model that computes long sequences in another way must say so, though no step is that large
        program = lm.export(model, "cpu", longest, max(longest, lm.TOKENS), given=given)
    except UnsupportedModel as error:
        return Verdict(error.what, given)
    try:
        reason = (
            _sites(program, int(config.num_hidden_layers))
            or _rows(program, vocab, longest)
            or _logits(program, model, vocab)
        )
    except Exception as error:  # whatever a model's code makes of the check's inputs
        reason = f"it fails when it is tried for safety: {lm.told(error)}"
    return Verdict(reason, given)


def _takes_positions(model: torch.nn.Module, vocab: int) -> bool:
    """Whether positions 0, 1, 2, … are what the model counts when it is given none. Some begin elsewhere."""
    ids = _sequence(vocab)
    hooks.use(model, "eager")
    try:
        with torch.no_grad():
            theirs = model(input_ids=ids[None], use_cache=False).logits
            given = torch.arange(SEQUENCE)[None]
            ours = model(input_ids=ids[None], position_ids=given, use_cache=False).logits
        return bool(torch.allclose(ours, theirs, rtol=LOGIT_TOLERANCE, atol=LOGIT_TOLERANCE))
    except Exception:  # a model that fails here is told so by the export
        return True


def _sequence(vocab: int) -> torch.Tensor:
    return torch.randint(3, vocab, (SEQUENCE,), generator=torch.Generator().manual_seed(2))


def _randomise(model: torch.nn.Module) -> None:
    """Fresh models hold zeros and ones, which hide leaks: biases, norms and gates included."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * (1.4 / parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(noise * 0.1)


# ---- the three checks: each returns a reason, or "" --------------------------
def _sites(program: Any, layers: int) -> str:
    sites = [n for n in program.graph.nodes if n.target is torch.ops.flashrt.attention.default]
    if len(sites) < layers:
        places = " ".join(names.module_path(n.meta.get("nn_module_stack")) for n in sites)
        without = sorted(set(range(layers)) - {int(i) for i in re.findall(r"\.(\d+)\b", places)})
        told = f" (of the small model: {', '.join(map(str, without))})" if without and sites else ""
        return f"{layers - len(sites)} of {layers} layers have no attention that could be hooked{told}"
    return ""


def _rows(program: Any, vocab: int, longest: int) -> str:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab, (TOKENS,), generator=generator)
    order = torch.randperm(TOKENS, generator=generator)
    positions = torch.linspace(0, longest - 1, TOKENS).long()[order]

    def run(rows: torch.Tensor) -> torch.Tensor:
        return _run(program, _one_token, ids[rows], positions[rows])

    whole = run(torch.arange(TOKENS))
    some = torch.randperm(TOKENS, generator=generator)[: TOKENS // 2 + 1]
    tries = [some, *torch.arange(TOKENS).split(1)]
    errors = [float((run(rows) - whole[rows]).abs().max()) for rows in tries]
    leak = max(errors) / max(float(whole.abs().max()), 1e-6)
    if not leak < ROW_TOLERANCE:
        rows = tries[int(np.argmax(errors))]
        return (
            f"its tokens influence each other outside attention{_where(program, ids, positions, rows)} "
            f"(logits differ by {leak:.0e} of the largest)"
        )
    return ""


def _where(program: Any, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> str:
    """The module in which the rows' values first differ from those in the whole batch."""
    whole: dict[str, torch.Tensor] = {}
    some: dict[str, torch.Tensor] = {}
    _run(program, _one_token, ids, positions, whole)
    _run(program, _one_token, ids[rows], positions[rows], some)
    for node in program.graph.nodes:
        a, b = whole.get(node.name), some.get(node.name)
        if a is None or b is None or not a.is_floating_point() or a.dim() != b.dim():
            continue
        for axis in [i for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m][:1]:
            a = a.index_select(axis, rows) if a.shape[axis] == TOKENS else a
        if a.shape != b.shape or not float((a - b).abs().max()) <= ROW_TOLERANCE * float(1 + a.abs().max()):
            return f" in {names.strip(names.module_path(node.meta.get('nn_module_stack')), [lm.WRAPPER])}"
    return ""


def _logits(program: Any, model: torch.nn.Module, vocab: int) -> str:
    ids = _sequence(vocab)
    ours = _run(program, _attend, ids, torch.arange(SEQUENCE))
    hooks.use(model, "eager")
    with torch.no_grad():
        theirs = model(input_ids=ids[None], use_cache=False).logits[0].double()
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if not error < LOGIT_TOLERANCE:
        return f"its attention isn't conveyed: logits differ from transformers' by {error:.0e} of the largest"
    return ""


# ---- running a program in float64 --------------------------------------------
def _one_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Stands in for attention and sees one token. Not invariant to rotation, else wrong RoPE would cancel."""
    group = q.shape[1] // k.shape[1]
    slope = torch.linspace(-1, 1.5, q.shape[-1], dtype=q.dtype)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    a, b = (q * slope).mean(-1, keepdim=True), (k * slope.flip(0)).mean(-1, keepdim=True)
    return v * (1 + torch.tanh(a) + torch.tanh(b)) + 0.1


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_idx: int, scale: float, window: int,
    softcap: float, causal: bool, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """What `flashrt::attention` means, for one sequence from its first token."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    query, key = torch.arange(q.shape[0])[:, None], torch.arange(q.shape[0])[None]
    if causal:
        scores = scores.masked_fill(key > query, -torch.inf)
    if window:
        scores = scores.masked_fill(key <= query - window, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[0], 1)], -1)
    weights = scores.softmax(-1)[..., : q.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v).contiguous()  # models go on with `view`


class _Double(torch.fx.Interpreter):
    """Runs a graph with every float as float64 and attention as given. kept: takes every node's value."""

    def __init__(
        self, module: torch.fx.GraphModule, attention: Attention, kept: dict[str, torch.Tensor] | None = None
    ) -> None:
        super().__init__(module)
        self.attention, self.kept = attention, kept

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if self.kept is not None and isinstance(value, torch.Tensor) and n.op == "call_function":
            self.kept[n.name] = value.clone()
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.flashrt.attention.default:
            return self.attention(*args)
        if "_assert" in str(target):
            return None
        widened = {key: _widen(value) for key, value in kwargs.items()}
        return super().call_function(target, tuple(_widen(a) for a in args), widened)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def _run(
    program: Any,
    attention: Attention,
    ids: torch.Tensor,
    positions: torch.Tensor,
    kept: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Logits of every token."""
    held = {**program.state_dict, **program.constants}
    names = trace.bindings(program)
    given = iter((ids.int(), positions.int(), torch.arange(len(ids)).int()))
    places = [n.name for n in program.graph.nodes if n.op == "placeholder"]
    values = [_widen(held[names[p]].detach()) if p in names else next(given) for p in places]
    with torch.no_grad():
        logits: torch.Tensor = _Double(program.graph_module, attention, kept).run(*values)[0]
    return logits


# ---- verdicts on disk --------------------------------------------------------
def _verdicts() -> Path:
    return knobs.cache_folder() / "gate"


def _key(small: Any, context: int) -> str:
    """What a verdict depends on: the small configuration, the libraries, and this code."""
    incidental = ("_name_or_path", "transformers_version", "dtype")
    facts = {k: v for k, v in small.to_dict().items() if k not in incidental}
    versions = [version("torch"), version("transformers")]
    text = json.dumps([type(small).__name__, facts, context, versions], sort_keys=True, default=str)
    parts = (lm, complex_rope, hooks, experts, positions, rewrite, rope, shrink, spelled, trace)
    code = [Path(str(module.__file__)).read_bytes() for module in parts]
    return hashlib.sha256(b"\0".join([text.encode(), Path(__file__).read_bytes(), *code])).hexdigest()[:32]


def _known(path: Path) -> Verdict | None:
    """The verdict on disk; None when there is none that can be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
        return Verdict(str(found["reason"]), bool(found["given"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(path: Path, model_type: str, verdict: Verdict) -> None:
    """Writes the verdict whole or not at all; a cache that can't be written is no fault."""
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"model_type": model_type, **asdict(verdict)}), "utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
