"""Writes small GGUF files, right or wrong in any part: the test's own idea of the format."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Value = tuple[int, bytes]  # the number of its type, and its bytes


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def u32(value: int) -> Value:
    return 4, struct.pack("<I", value)


def i32(value: int) -> Value:
    return 5, struct.pack("<i", value)


def f32(value: float) -> Value:
    return 6, struct.pack("<f", value)


def flag(value: bool) -> Value:
    return 7, struct.pack("<?", value)


def string(value: str | bytes) -> Value:
    return 8, text(value)


def strings(values: Sequence[str | bytes]) -> Value:
    return 9, struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))


def numbers(values: Sequence[float], kind: str = "f") -> Value:
    number = {"f": 6, "i": 5, "?": 7}[kind]
    return 9, struct.pack("<IQ", number, len(values)) + struct.pack(f"<{len(values)}{kind}", *values)


@dataclass
class Tensor:
    """shape: row-major. format: GGUF's number. data: its bytes. offset: None where it belongs."""

    name: str
    shape: tuple[int, ...]
    data: bytes
    format: int = 0
    offset: int | None = None


def plain(name: str, values: np.ndarray) -> Tensor:
    return Tensor(name, values.shape, np.ascontiguousarray(values, np.float32).tobytes())


@dataclass
class GgufFile:
    """The parts of a file; change any before `encode`."""

    metadata: dict[str, Value] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    keys: int | None = None
    count: int | None = None
    alignment: int = 32

    def encode(self) -> bytes:
        head = [self.magic, struct.pack("<I", self.version)]
        head.append(struct.pack("<Q", len(self.tensors) if self.count is None else self.count))
        head.append(struct.pack("<Q", len(self.metadata) if self.keys is None else self.keys))
        for key, (kind, data) in self.metadata.items():
            head += [text(key), struct.pack("<I", kind), data]
        body = b""
        for t in self.tensors:
            offset = len(body) if t.offset is None else t.offset
            head += [text(t.name), struct.pack("<I", len(t.shape))]
            head += [struct.pack("<Q", d) for d in t.shape[::-1]] + [struct.pack("<IQ", t.format, offset)]
            body += t.data + bytes(-len(t.data) % self.alignment)
        start = b"".join(head)
        return start + bytes(-len(start) % self.alignment) + body

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encode())
        return path


WORDS = ("<|end|>", "<s>", "a", "b", "ab", "Ġ", "Ġa")


def tiny_llama(metadata: Mapping[str, Value | None] | None = None) -> GgufFile:
    """A whole model of one layer, 4 heads of 4 over 2 key-value heads.

    metadata: changed keys; None leaves one out.
    """
    rng = np.random.default_rng(0)

    def matrix(name: str, *shape: int) -> Tensor:
        return plain(name, rng.normal(size=shape).astype(np.float32))

    keys: dict[str, Any] = {
        "general.architecture": string("llama"),
        "llama.block_count": u32(1), "llama.context_length": u32(128), "llama.embedding_length": u32(16),
        "llama.feed_forward_length": u32(24), "llama.attention.head_count": u32(4),
        "llama.attention.head_count_kv": u32(2), "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
        "tokenizer.ggml.model": string("gpt2"), "tokenizer.ggml.pre": string("smollm"),
        "tokenizer.ggml.tokens": strings(WORDS), "tokenizer.ggml.merges": strings(["a b", "Ġ a"]),
        "tokenizer.ggml.token_type": numbers([3, 3, 1, 1, 1, 1, 1], "i"),
        "tokenizer.ggml.eos_token_id": u32(0), "tokenizer.ggml.bos_token_id": u32(1),
    }  # fmt: skip
    keys.update(metadata or {})
    tensors = [
        matrix("token_embd.weight", 7, 16), matrix("output_norm.weight", 16),
        matrix("blk.0.attn_norm.weight", 16), matrix("blk.0.ffn_norm.weight", 16),
        matrix("blk.0.attn_q.weight", 16, 16), matrix("blk.0.attn_k.weight", 8, 16),
        matrix("blk.0.attn_v.weight", 8, 16), matrix("blk.0.attn_output.weight", 16, 16),
        matrix("blk.0.ffn_gate.weight", 24, 16), matrix("blk.0.ffn_up.weight", 24, 16),
        matrix("blk.0.ffn_down.weight", 16, 24),
    ]  # fmt: skip
    return GgufFile({k: v for k, v in keys.items() if v is not None}, tensors)
