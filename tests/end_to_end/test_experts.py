"""Mixtures of experts give transformers' logits: prefill, prefill beside decode, decode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from flashrt.frontend import rope
from flashrt.ir import micro
from tests.end_to_end.test_transformers import CONTEXT, LENGTHS, TOLERANCE, Case, open_on, theirs
from tests.end_to_end.tiny_hf import write_model

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 16,
}
DEEPSEEK: dict[str, Any] = {
    **LATENT, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {**QWEN, "norm_topk_prob": True}),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8},
    ),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe-weights-as-they-are": ("qwen3_moe", {**QWEN, "norm_topk_prob": False}),
    "qwen2_moe-shared-expert": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 48}),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
}
ALL = [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
DEVICES = ("cpu:0",)


@pytest.fixture(scope="module", params=ALL)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    kind, facts = (MODELS | MORE)[request.param]
    folder = tmp_path_factory.mktemp(kind)
    model = write_model(folder, kind, **facts)
    rope.freeze(model, CONTEXT)
    rng = np.random.default_rng(1)
    tokens = {n: rng.integers(3, model.config.vocab_size, length).tolist() for n, length in LENGTHS.items()}
    wanted = {n: theirs(model, ids) for n, ids in tokens.items()}
    with ExitStack() as opened:
        programs = {d: opened.enter_context(open_on(d, folder)) for d in DEVICES}
        yield Case(request.param, model, programs, tokens, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_logits(case: Case, device: str) -> None:
    errors = case.errors(device)
    told = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
    print(f"{case.name} on {device}: {told}")
    assert max(errors.values()) < TOLERANCE, f"{case.name} on {device}: {told}"


def test_routers_are_recognised(case: Case) -> None:
    """Else they run on the host, operator by operator."""
    (program,) = case.programs.values()
    instrs = [i for v in program.plan.variants for i in v.stream.instrs if isinstance(i, micro.Dispatch)]
    kernels = {i.kernel for i in instrs}
    assert {"route", "expert_sum", "expert_linear.f32"} <= kernels
    assert not [k for k in kernels if "topk" in k or "gather" in k], kernels
