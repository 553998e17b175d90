"""A Hugging Face model (folder or repository id) → graph, weight index, chat facts."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashrt.errors import ModelError, UnsupportedModel
from flashrt.frontend import hub, prequantised, prequantised_config, safetensors
from flashrt.frontend.bind import bind, select
from flashrt.frontend.chat_facts import read_chat, read_json
from flashrt.frontend.expert_weights import arrange
from flashrt.frontend.imported import Imported
from flashrt.frontend.renamed import renamed
from flashrt.ir.logical import Graph
from flashrt.weights.index import WeightIndex

if TYPE_CHECKING:
    from flashrt.frontend import lm

ADVICE = (
    "run it with transformers, or take a model of a type that docs/models.md lists as right: decoders whose "
    "tokens meet in attention alone"
)
_COUNTS = "create_position_ids_from_input_ids"
ATTENDING = {"full_attention", "sliding_attention"}


def load_hf(folder_or_repo: str, *, context: int | None = None) -> Imported:
    """Reads a model folder, or downloads a repository and reads that.

    context: the longest sequence in tokens (the model's own limit when None).

    Raises:
        ModelError: a file is missing, damaged or doesn't fit the others.
        UnsupportedModel: the model has something flashrt can't run; the message names it.
    """
    folder = Path(folder_or_repo).expanduser()
    if not folder.is_dir():
        if folder_or_repo.count("/") != 1 or folder_or_repo.startswith((".", "/", "~")):
            raise ModelError(
                f"{folder_or_repo} isn't a folder", hint="give a model folder or a repository id (org/name)"
            )
        folder = hub.fetch(folder_or_repo)
    raw = _raw_config(folder)
    index = _index(folder)
    config = read_config(folder, raw)
    length = longest(config, context)
    chat = read_chat(folder, raw, length)
    traced = trace_checked(config, name=_title(folder_or_repo), context=length)
    graph, arranged = arrange(traced.graph, index, traced.prefix)
    made = arranged.tensors.keys() - index.tensors.keys()
    index = select(
        graph, renamed(graph, arranged, traced.conversions, made), constants=traced.constants,
        prefix=traced.prefix, aliases=traced.aliases, transposed=traced.transposed,
    )  # fmt: skip
    return Imported(bind(graph, index, traced.constants), index, traced.constants, chat)


def _title(model: str) -> str:
    return Path(model).expanduser().absolute().name


def trace_checked(config: Any, *, name: str, context: int) -> lm.Traced:
    """Refuses what is known not to work, passes the safety gate, and traces."""
    from flashrt.frontend import gate, lm  # torch takes seconds to import: only when a model is traced

    refuse_known(config)
    given = gate.check(config, context)
    return lm.trace_model(config, name=name, context=context, given=given)


def trace_config(
    config: Any, *, name: str, context: int
) -> tuple[Graph, Mapping[str, NDArray[np.generic]], Mapping[str, str]]:
    """A transformers configuration → raw graph, constants, and weight name → its name in a checkpoint.

    Matrices have no layout yet: `bind` sets it from a weight index.

    Raises:
        UnsupportedModel: the model has something flashrt can't run; the message names it.
    """
    traced = trace_checked(config, name=name, context=context)
    return traced.graph, traced.constants, {w.name: w.sources[0] for w in traced.graph.weights}


# ---- configuration -----------------------------------------------------------
def _raw_config(folder: Path) -> dict[str, Any]:
    raw = read_json(folder / "config.json")
    if not raw:
        raise ModelError(f"{folder / 'config.json'} is missing or empty", hint="give a whole model folder")
    if "model_type" not in raw:
        raise ModelError(f"{folder / 'config.json'} has no model_type")
    return raw


def read_config(folder: Path, raw: Mapping[str, Any]) -> Any:
    """The folder's config.json (`raw`) as transformers' object; of a multimodal model, its text part.

    Raises:
        UnsupportedModel: transformers doesn't know the type, or has no causal language model of it.
        ModelError: config.json is missing or damaged.
    """
    from transformers import AutoConfig  # slow to import: only when a model is traced

    known_type(str(raw["model_type"]))
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever a configuration class makes of wrong values
        raise ModelError(f"{folder / 'config.json'} isn't a valid configuration: {error}") from None
    text = config.get_text_config()
    for part in (config, text):  # the model is built as it was before it was quantised
        for key in prequantised_config.KEYS:
            part.__dict__.pop(key, None)
    if text is not config:
        known_type(text.model_type)
    return text


def known_type(name: str) -> None:
    """Raises UnsupportedModel unless transformers has a causal language model of that type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    if name not in known:
        near = difflib.get_close_matches(name, list(known), n=5, cutoff=0.5)
        raise UnsupportedModel(
            f"model type {name!r} isn't a causal language model that transformers knows",
            hint=f"{len(known)} types are known" + (f"; close to it: {', '.join(near)}" if near else ""),
        )


def longest(config: Any, context: int | None) -> int:
    """The longest sequence in tokens: as asked, within the model's own limit.

    Raises:
        ModelError: it's out of range, or the model has no limit of its own and none was given.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int):
        limit = int(limit * _stretch(config)) if context is not None else limit
        limit -= _before_first(config)
    if context is None and not isinstance(limit, int):
        raise ModelError(
            f"the configuration of this {config.model_type} has no max_position_embeddings",
            hint="give a context length",
        )
    if context is None:
        return int(limit)  # type: ignore[arg-type]
    if context < 1 or (isinstance(limit, int) and context > limit):
        raise ModelError(f"a context of {context} tokens is out of range: this model takes 1 to {limit}")
    return context


def _before_first(config: Any) -> int:
    """How many entries of its table of positions a model has before that of the first token.

    Models of RoBERTa's kind count positions from the token for padding. They have a function for that.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # slow to import: only when a model is traced

    pad = getattr(config, "pad_token_id", None)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or pad is None:
        return 0
    module = vars(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__])
    own = [v for v in module.values() if getattr(v, "__module__", None) == module["__name__"]]
    counts = any(hasattr(v, _COUNTS) or getattr(v, "__name__", "") == _COUNTS for v in own)
    return int(pad) + 1 if counts else 0


def _stretch(config: Any) -> float:
    """How many times its trained length a model may be given: "dynamic" RoPE is made for more than that."""
    facts = getattr(config, "rope_parameters", None) or {}
    dynamic = isinstance(facts, dict) and facts.get("rope_type") == "dynamic"
    return max(1.0, float(facts.get("factor") or 1.0)) if dynamic else 1.0


def refuse_known(config: Any) -> None:
    """Raises UnsupportedModel, with the reason, for what is known not to work before anything is built."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind} is an encoder and decoder", hint=ADVICE)
    kinds = list(getattr(config, "layer_types", None) or ())
    other = [f"{k} (layer {kinds.index(k)})" for k in sorted(set(kinds) - ATTENDING)]
    if other:
        raise UnsupportedModel(
            f"{kind} has layers of kind {', '.join(other)}; supported: {', '.join(sorted(ATTENDING))}",
            hint=ADVICE,
        )


# ---- weights -----------------------------------------------------------------
def _index(folder: Path) -> WeightIndex:
    scheme = prequantised_config.read(read_json(folder / "config.json"), folder / "config.json")
    index = safetensors.read_index(_files(folder))
    return prequantised.joined(index, scheme) if scheme else index


def _files(folder: Path) -> list[Path]:
    shards = folder / "model.safetensors.index.json"
    if shards.is_file():
        names = read_json(shards).get("weight_map")
        if not isinstance(names, dict):
            raise ModelError(f"{shards} has no weight_map")
        return [folder / n for n in sorted({str(v) for v in names.values()})]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    if any(folder.glob("*.bin")):
        raise UnsupportedModel(
            f"{folder} has its weights in PyTorch's pickle format only",
            hint="convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)",
        )
    raise ModelError(f"{folder} has no *.safetensors", hint="download the whole model")
