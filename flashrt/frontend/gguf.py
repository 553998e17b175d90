"""GGUF files: header → transformers configuration → traced graph, with weights left where they lie.

Each matrix is kept in the packed layout that `flashrt.weights.index.NATIVE_LAYOUT` names for its format;
which of them lose something, and how much, stands there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend import gguf_config
from flashrt.frontend.bind import bind
from flashrt.frontend.expert_weights import arrange
from flashrt.frontend.gguf_header import Header, TensorInfo
from flashrt.frontend.gguf_shards import read_shards
from flashrt.frontend.gguf_tokenizer import chat_facts
from flashrt.frontend.imported import Imported
from flashrt.ir.logical import Graph
from flashrt.ir.types import Weight
from flashrt.weights.index import Tensor, WeightIndex
from flashrt.weights.source import file_entry

_HEAD = "lm_head.weight"
_EXPERTS_BIASES = ("gate_proj.bias", "up_proj.bias")  # of which a model has one, gate_up_proj_bias


def load_gguf(path: str | Path, *, context: int | None = None) -> Imported:
    """A GGUF language model as data: graph, weight index, constants, chat facts. Reads no weights.

    Args:
        path: the .gguf file, of a model in several (`-00001-of-00003.gguf`) any of them.
        context: the longest sequence, in tokens; the model's own length by default.

    Raises:
        ModelError: the file is damaged or incomplete; names file and key or tensor.
        UnsupportedModel: an architecture, tokenizer or setting that isn't supported.
    """
    header = read_shards(path)
    longest = int(gguf_config.config_values(header)["max_position_embeddings"])
    index = weight_index(header)
    chat = chat_facts(header, longest, header.tensor("token_embd.weight").shape[0])
    from flashrt.frontend import hf  # torch: only to trace, when the file is known to be sound

    config = make_config(header)
    context = hf.longest(config, context)
    graph, constants, _ = hf.trace_config(config, name=_name(header), context=context)
    graph, index = _joined_biases(*arrange(graph, index))
    graph = bind(graph, index, constants)
    _refuse_unused(header, graph.weights, index)
    return Imported(graph, index, constants, replace(chat, context=context))


def make_config(header: Header) -> Any:
    """The transformers configuration of the model. Raises ModelError, UnsupportedModel."""
    from transformers import AutoConfig  # slow to import: only when a model is traced

    values, kind = gguf_config.config_values(header), gguf_config.architecture(header).model_type
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:
        raise ModelError(f"{header.path}: transformers refuses the configuration: {error}") from error


def weight_index(header: Header) -> WeightIndex:
    """Where each tensor of a Hugging Face checkpoint lies in the file."""
    arch = gguf_config.architecture(header)
    heads = header.positive(f"{header.get('general.architecture', str)}.attention.head_count")
    kv_heads = header.positive(f"{header.get('general.architecture', str)}.attention.head_count_kv", heads)
    tensors: dict[str, Tensor] = {}
    for name, fqn in gguf_config.tensor_names(header).items():
        rotated = {"q_proj": heads, "k_proj": kv_heads}.get(fqn.split(".")[-2], 0) if arch.pairwise else 0
        shift = arch.norm_shift if fqn.endswith("norm.weight") else 0.0
        tensors[fqn] = _tensor(header, header.tensors[name], rotated, shift)
    embedding = f"{arch.whole['token_embd']}.weight"
    if _HEAD not in tensors and embedding in tensors:
        tensors[_HEAD] = tensors[embedding]  # a tied head isn't stored
    return WeightIndex(tuple(map(file_entry, header.paths)), tensors)


def _joined_biases(graph: Graph, index: WeightIndex) -> tuple[Graph, WeightIndex]:
    """Biases of experts' gates and ups, [E,N] each, as rows of one weight: an expert's gate, then its up."""
    tensors, weights = dict(index.tensors), []
    for weight in graph.weights:
        module, _, name = weight.sources[0].rpartition(".")
        pair = [f"{module}.{part}" for part in _EXPERTS_BIASES]
        if name == "gate_up_proj_bias" and all(p in tensors for p in pair):
            whole = {p: tensors.pop(p) for p in pair}
            experts = whole[pair[0]].shape[0]
            pieces = {f"{p}.{e}": _row(t, e) for e in range(experts) for p, t in whole.items()}
            tensors.update(pieces)
            weight = replace(weight, sources=tuple(pieces))
        weights.append(weight)
    return replace(graph, weights=tuple(weights)), WeightIndex(index.files, tensors)


def _row(tensor: Tensor, row: int) -> Tensor:
    """One row of a matrix as a vector."""
    size = tensor.bytes // tensor.shape[0]
    return replace(tensor, offset=tensor.offset + row * size, bytes=size, shape=tensor.shape[1:])


def _tensor(header: Header, info: TensorInfo, heads: int, shift: float) -> Tensor:
    if heads and info.shape[0] % (2 * heads):
        raise ModelError(
            f"{header.path}: tensor {info.name} of {info.shape[0]} rows doesn't fit {heads} heads"
        )
    return Tensor(
        info.name, info.file, info.offset, info.bytes, info.format, info.shape, rope_heads=heads, shift=shift
    )


def _name(header: Header) -> str:
    return header.path.name.removesuffix(".gguf")


def _refuse_unused(header: Header, weights: tuple[Weight, ...], index: WeightIndex) -> None:
    """A tensor that the graph leaves out (a bias, say) would make every token wrong."""
    used = {index.tensors[s].name for w in weights for s in w.sources if s in index.tensors}
    unused = [t.name for t in index.tensors.values() if t.name not in used]
    if unused:
        raise UnsupportedModel(
            f"{header.path}: tensor {unused[0]} isn't used by the model that transformers builds",
            hint="use the model's Hugging Face folder",
        )
