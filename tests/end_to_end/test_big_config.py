"""A model of eight billion parameters compiles in a minute and little memory: no weight is made or read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flashrt.ir import laws, micro, text
from tests.end_to_end.child import run
from tests.end_to_end.tiny_hf import write_tokenizer

pytestmark = pytest.mark.slow

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_theta": 500000.0, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
LAYERS, PARAMETERS = 32, 8.03e9
SECONDS, MEMORY = 60.0, 4 << 30  # of processor time; bytes at its peak


def test_a_configuration_alone(tmp_path: Path) -> None:
    """Quantised to 4 bits; every operation is recognised, none is left to the reference implementation."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    program = Path(__file__).with_name("big_config.py")
    ran = run(str(program), str(tmp_path), "q4m.16x32")
    facts = json.loads(ran.output)
    print(facts, ran.seconds, ran.cpu, ran.memory)
    assert facts["weight_bytes"] == pytest.approx(PARAMETERS * 5 / 8, rel=0.01)
    assert facts["attention"] == LAYERS
    assert facts["raw_left"] == facts["host"] == []
    assert ran.cpu < SECONDS and ran.memory < MEMORY, (ran.cpu, ran.memory, facts)


def test_a_whole_folder_on_the_command_line(tmp_path: Path) -> None:
    """Sixteen gigabytes of bf16 weights, all of them holes in a file: only its header is read."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    write_tokenizer(tmp_path)
    assert write_holes(tmp_path / "model.safetensors") == pytest.approx(2 * PARAMETERS, rel=0.01)
    flashrt = ("-c", "from flashrt.cli.main import main; main()")
    ran = run(*flashrt, "compile", str(tmp_path), "--debug-graph", "micro")
    stream = text.read_micro(ran.output)
    laws.check(stream)
    kernels = [i.kernel for i in stream.instrs if isinstance(i, micro.Dispatch)]
    print(len(stream.instrs), ran.seconds, ran.cpu, ran.memory)
    assert sum(k.startswith("attention") for k in kernels) == LAYERS
    assert ran.cpu < SECONDS and ran.memory < MEMORY, (ran.cpu, ran.memory)


def write_holes(path: Path) -> int:
    """A safetensors file of the model whose data takes no room on the disk; gives the bytes of its data."""
    hidden, ffn, kv = 4096, 14336, 1024
    layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (128256, hidden), "model.norm": (hidden,), "lm_head": (128256, hidden),
        **{f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()},
    }  # fmt: skip
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    words = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        file.truncate(8 + len(words) + at)
    return at
