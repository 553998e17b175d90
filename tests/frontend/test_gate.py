"""The safety gate lets through what is safe to run flat, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from flashrt.errors import UnsupportedModel
from flashrt.frontend import gate, hooks, lm
from flashrt.frontend.gate import Verdict
from flashrt.frontend.shrink import shrink

CONTEXT = 4096
VOCAB = 199


class Attention(nn.Module):
    """One head over 16 channels, through transformers' table of attention functions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.q = config, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        heads = self.q(x)[:, None]
        if self.config._attn_implementation_internal == "eager":
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
            return (heads @ heads.mT / 4 + mask).softmax(-1)[:, 0] @ x
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation_internal]
        return attend(self, heads, heads, x[:, None], None, scaling=0.25)[0].squeeze(2)  # type: ignore[no-any-return]


class Model(nn.Module):
    """A causal language model by hand. `leak` is what may link tokens outside attention."""

    def __init__(self, leak: nn.Module) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.table, self.attention, self.leak = nn.Embedding(VOCAB, 16), Attention(self.config), leak
        self.head = nn.Linear(16, VOCAB)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, use_cache: bool = False,
        logits_to_keep: Any = slice(None),
    ) -> Any:  # fmt: skip
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.table(input_ids)
        x = self.leak(x + self.attention(x), position_ids)
        return SimpleNamespace(logits=self.head(x[:, logits_to_keep]))


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x


class Convolution(nn.Module):
    """Adds a bit of the token before: causal, so the model itself is sound."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x + 0.01 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class LongRange(nn.Module):
    """Changes every token once any position is past 3000."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.where(positions.max() > 3000, x * 1.01, x)


def _reason(leak: nn.Module) -> str:
    torch.manual_seed(0)
    hooks.register()
    model = Model(leak).eval()
    hooks.use(model)
    program = lm.export(model, "cpu", CONTEXT)
    return (
        gate._sites(program, 1) or gate._rows(program, VOCAB, CONTEXT) or gate._logits(program, model, VOCAB)
    )


def test_safe_module_passes() -> None:
    assert _reason(Nothing()) == ""


@pytest.mark.parametrize("leak", [Convolution(), LongRange()], ids=["convolution", "long range"])
def test_leaks_are_found(leak: nn.Module) -> None:
    assert "influence each other outside attention in leak " in _reason(leak)


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        pytest.param("llama", {}, marks=pytest.mark.slow),
        ("gemma3_text", {"sliding_window": 512}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("gpt2", {}),
    ],
)
def test_known_models_pass(kind: str, facts: dict[str, Any]) -> None:
    config = AutoConfig.for_model(kind, **facts)
    assert gate.judge(shrink(config), CONTEXT) == Verdict("")


@pytest.mark.parametrize(("kind", "given"), [("bart", True), ("roberta", False)])
def test_models_that_count_positions_themselves(kind: str, given: bool) -> None:
    """By a range over the tokens; and from the token for padding on, unlike what they are given."""
    config = AutoConfig.for_model(kind, is_decoder=True, decoder_layers=2, num_hidden_layers=2)
    assert gate.judge(shrink(config), 100) == Verdict("", given)


def test_another_way_for_long_sequences_is_refused() -> None:
    config = shrink(AutoConfig.for_model("big_bird", is_decoder=True, max_position_embeddings=1024))
    assert "can't be traced as one graph" in gate.judge(config, 1024).reason


def test_layers_without_attention_are_refused() -> None:
    config = AutoConfig.for_model("lfm2", layer_types=["conv", "full_attention"] * 2, num_hidden_layers=4)
    small = shrink(config)
    assert small.layer_types == ["conv", "full_attention"]
    assert "1 of 2 layers have no attention" in gate.judge(small, CONTEXT).reason


@pytest.mark.parametrize(("kind", "place"), [("mistral", 2), ("gemma2", 3), ("gemma2", 2)])
def test_attention_that_is_not_conveyed_is_refused(
    kind: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = gate._attend

    def without(q: Any, k: Any, v: Any, layer: int, *facts: Any) -> torch.Tensor:
        """Attention that ignores a window (place 2 after the layer) or a soft cap (3)."""
        given = list(facts)
        given[place - 1] = 0
        return attend(q, k, v, layer, *given)

    config = shrink(AutoConfig.for_model(kind))
    assert gate.judge(config, CONTEXT).reason == ""
    monkeypatch.setattr(gate, "_attend", without)
    assert "attention isn't conveyed" in gate.judge(config, CONTEXT).reason


def test_verdict_is_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path))
    asked = []

    def judge(small: Any, context: int) -> Verdict:
        asked.append(small.vocab_size)
        return Verdict("it leaks")

    monkeypatch.setattr(gate, "judge", judge)
    small = AutoConfig.for_model("llama", hidden_size=4096, num_hidden_layers=32)
    large = AutoConfig.for_model("llama", hidden_size=8192, num_attention_heads=64, num_hidden_layers=80)
    for config in (small, small, large):
        with pytest.raises(UnsupportedModel, match="llama is refused: it leaks"):
            gate.check(config, CONTEXT)
    assert asked == [VOCAB]  # sizes don't matter
    with pytest.raises(UnsupportedModel):
        gate.check(AutoConfig.for_model("llama", attention_bias=True), CONTEXT)
    assert len(asked) == 2  # switches do


def test_shrink_keeps_what_matters() -> None:
    config = AutoConfig.for_model(
        "gemma3_text", num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        hidden_size=2560, sliding_window=1024, rms_norm_eps=3e-5,
    )  # fmt: skip
    small = shrink(config)
    assert sorted(small.layer_types) == ["full_attention", "sliding_attention"]
    assert (small.num_hidden_layers, small.sliding_window, small.rms_norm_eps) == (2, 8, 3e-5)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (4, 2, 16)
    assert small.hidden_size != 4 * 16  # as 2560 isn't 8 · 256


def test_a_configuration_without_small_form_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no small form"):
        shrink(AutoConfig.for_model("rwkv"))


def test_what_layers_have_of_their_own_follows_them() -> None:
    small = shrink(AutoConfig.for_model("gemma4_text"))
    at = small.layer_types.index("full_attention")
    assert {int(i): own for i, own in small.to_dict()["per_layer_config"].items()} == {at: {"head_dim": 32}}
