"""A text encoder (BERT and its kin) in a Hugging Face folder → graph, weight index, tokenizer.

What is run is the class that `architectures` in config.json names, of sentence-transformers' folders the bare
model with its pooling. Outputs are called as transformers calls them: `last_hidden_state` and what the class
returns (`pooler_output`, `logits`, …); and `sentence_embedding`, as sentence-transformers calls it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend import hf, trace
from flashrt.frontend.bind import bind
from flashrt.frontend.export import LARGEST, quiet, values_of, with_symbols
from flashrt.frontend.imported import Imported
from flashrt.frontend.lm import told
from flashrt.frontend.sentence import Sentence, read_sentence, read_text
from flashrt.ir.logical import Graph
from flashrt.weights.formats import FORMATS
from flashrt.weights.index import Tensor, WeightIndex

TEXTS = 16  # most texts of one step
EXAMPLE = (3, 11)  # texts and tokens to trace with: unequal and above 1, else export takes them for constants
WRAPPER = "model"
_FROM_PADDING = (  # models whose first token has the position behind that of padding
    "camembert", "data2vec-text", "esm", "ibert", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
)  # fmt: skip
_OLD = ((".gamma", ".weight"), (".beta", ".bias"))  # what early checkpoints call a norm's weights


def load_encoder(folder: str | Path, *, context: int | None = None) -> Imported:
    """Reads a folder that `sentence.is_encoder` knows.

    context: the longest text in tokens (the model's own limit when None).

    Raises:
        ModelError: a file is missing, damaged or doesn't fit the others.
        UnsupportedModel: the model has something flashrt can't run; the message names it.
    """
    folder = Path(folder).expanduser()
    place, sentence = read_sentence(folder)
    index = hf._index(place)
    model = _model(place, bare=sentence is not None)
    longest = _longest(model.config, context)
    encoder = Encoder(model, sentence)
    program, outputs = _exported(encoder, longest)
    sizes = _sizes(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about itself, where it copies a program
        graph = trace.import_program(
            program, folder.absolute().name, symbols=(), torch_names=sizes,
            prefixes=[WRAPPER, model.base_model_prefix], outputs=outputs,
        )  # fmt: skip
    graph = with_symbols(graph, program, TEXTS, sizes)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    graph, found = _placed(graph, index, model.base_model_prefix, tied)
    held = program.state_dict.keys() | program.constants.keys()
    constants = {
        s: values_of(program, f"{WRAPPER}.{s}" if f"{WRAPPER}.{s}" in held else s)
        for w in graph.weights for s in w.sources if s not in found
    }  # fmt: skip
    index = WeightIndex(index.files, found)
    return Imported(bind(graph, index, constants), index, constants, text=read_text(place, longest))


# ---- model -----------------------------------------------------------------------------
class Encoder(torch.nn.Module):
    """(input_ids i64[B,T], attention_mask i64[B,T], token_type_ids i64[B,T]) → the model's tensors by name.

    token_type_ids: only of models that have kinds of tokens.
    """

    def __init__(self, model: torch.nn.Module, sentence: Sentence | None) -> None:
        super().__init__()
        self.model, self.sentence = model, sentence

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        inner: list[torch.Tensor] = []
        watched = self.model.base_model.register_forward_hook(lambda *call: inner.append(call[2][0]))
        made = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **more)
        watched.remove()
        found = {"last_hidden_state": inner[0]}
        found |= {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
        if self.sentence is not None:
            found["sentence_embedding"] = _embedding(inner[0], attention_mask, self.sentence)
        return found


def _embedding(states: torch.Tensor, mask: torch.Tensor, sentence: Sentence) -> torch.Tensor:
    """States [B,T,H] of a text's tokens → [B,H·poolings]; the mask is 0 where there is padding."""
    joined = torch.cat([_pooled(states, mask, name) for name in sentence.poolings], dim=-1)
    return torch.nn.functional.normalize(joined, dim=-1) if sentence.unit else joined


def _pooled(states: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    there = mask.unsqueeze(-1).to(states.dtype)
    if pooling == "cls":  # the first token that isn't padding
        first = (there.cumsum(1) == 1).to(states.dtype) * there
        return (states * first).sum(1)
    if pooling == "max":
        return states.masked_fill(there == 0, float("-inf")).amax(1)
    count = there.sum(1).clamp(min=1e-9)
    return (states * there).sum(1) / (count if pooling == "mean" else count.sqrt())


def _model(folder: Path, *, bare: bool) -> Any:
    """transformers' model with its weights, in float32. bare: without a head, whatever config.json says.

    Raises ModelError, UnsupportedModel.
    """
    import transformers  # slow to import: only when a model is traced

    config = _config(folder)
    name = next(iter(config.architectures or ()), "")
    kind = transformers.AutoModel if bare or not name else getattr(transformers, name, None)
    if kind is None:
        raise UnsupportedModel(
            f"{folder}: transformers has no class {name}", hint=f"type {config.model_type}"
        )
    with _silent():
        try:
            model, loading = kind.from_pretrained(
                folder, config=config, dtype=torch.float32, attn_implementation="eager",
                local_files_only=True, trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
        except Exception as error:  # whatever a model's code makes of wrong values
            first = (str(error).strip().splitlines() or [""])[0]
            raise ModelError(f"{folder} can't be loaded: {type(error).__name__}: {first[:300]}") from None
    missing = sorted(loading["missing_keys"])
    if missing and model.base_model is model and all(m.startswith("pooler.") for m in missing):
        model.pooler, missing = None, []  # the checkpoint is of a model with a head, which had none
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of the model's tensors, such as {missing[0]}",
            hint="download the whole model",
        )
    return model.eval()


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a configuration class makes of wrong values
        first = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(f"{folder / 'config.json'} isn't a valid configuration: {first[:300]}") from None


@contextmanager
def _silent() -> Iterator[None]:
    """transformers reports missing tensors at length, and its progress; ours is one message."""
    from transformers.utils import logging

    before, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()


def _longest(config: Any, context: int | None) -> int:
    """The longest text in tokens: as asked, within the model's own limit."""
    limit = int(getattr(config, "max_position_embeddings", None) or LARGEST)
    if config.model_type in _FROM_PADDING:
        limit -= int(config.pad_token_id or 0) + 1
    if context is not None and not 1 <= context <= limit:
        raise ModelError(f"a context of {context} tokens is out of range: this model takes 1 to {limit}")
    return context or min(limit, LARGEST)


# ---- tracing -----------------------------------------------------------------------------
def _exported(encoder: Encoder, longest: int) -> tuple[Any, list[str]]:
    """The traced program and the names of its outputs."""
    config = encoder.model.config
    names = ["input_ids", "attention_mask"]
    if getattr(config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    inputs = {name: torch.ones(EXAMPLE, dtype=torch.int64) for name in names}
    texts, tokens = torch.export.Dim("B", min=1, max=TEXTS), torch.export.Dim("T", min=1, max=longest)
    try:
        with torch.no_grad(), quiet():
            outputs = list(encoder(**inputs))
            program = torch.export.export(
                encoder, (), inputs, dynamic_shapes={n: {0: texts, 1: tokens} for n in names}, strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )  # fmt: skip
    except Exception as error:  # torch raises anything
        raise UnsupportedModel(f"{config.model_type} can't be traced as one graph: {told(error)}") from error
    return program, outputs


def _sizes(program: Any) -> dict[str, str]:
    """torch's own symbols → B and T."""
    given = next(n for n in program.graph.nodes if n.op == "placeholder" and n.name == "input_ids")
    return {str(s.node.expr): name for s, name in zip(given.meta["val"].shape, "BT", strict=True)}


# ---- weights -------------------------------------------------------------------------------
def _placed(
    graph: Graph, index: WeightIndex, prefix: str, tied: Mapping[str, str]
) -> tuple[Graph, dict[str, Tensor]]:
    """The graph with sources named as transformers does, and where those lie that the files have as they are.

    tied: source → the one that holds its values.
    """
    weights = tuple(
        replace(w, sources=tuple(s.removeprefix(f"{WRAPPER}.") for s in w.sources)) for w in graph.weights
    )
    tensors = {_today(name): tensor for name, tensor in index.tensors.items()}
    found = {}
    for weight in weights:
        (source,) = weight.sources
        held = tied.get(source, source)
        spellings = (held, held.removeprefix(f"{prefix}."), f"{prefix}.{held}")
        tensor = next((tensors[s] for s in spellings if s in tensors), None)
        if tensor is not None and tensor.shape == weight.type.shape and tensor.format in FORMATS:
            found[source] = tensor
    return replace(graph, weights=weights), found


def _today(name: str) -> str:
    for old, new in _OLD:
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
