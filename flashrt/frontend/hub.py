"""A model repository of the Hugging Face hub → a local folder."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import errors, snapshot_download

from flashrt.errors import ModelError

FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "*.safetensors", "*.safetensors.index.json",
    "modules.json", "sentence_bert_config.json", "*_Pooling/config.json",
)  # fmt: skip
SECONDS = 10.0  # to wait for the hub's first answer


def fetch(repo: str) -> Path:
    """Downloads what is needed of `org/name`, or finds it in the hub's own cache.

    The cache keeps whole files only, so an interrupted download leaves nothing half-written in the folder.

    Raises:
        ModelError: no such repository, no access, or the hub can't be reached.
    """
    try:
        return Path(snapshot_download(repo, allow_patterns=list(FILES), etag_timeout=SECONDS))
    except errors.HFValidationError as error:
        raise ModelError(f"{repo!r} is neither a folder nor a repository id: {error}") from None
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo} asks for its licence to be accepted", hint="hf auth login, then retry"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"the hub has no repository {repo}, or it is private", hint="check the name, or hf auth login"
        ) from None
    except Exception as error:  # the hub's client raises those of its HTTP library, which differs by version
        raise ModelError(
            f"{repo} can't be downloaded: the Hugging Face hub can't be reached "
            f"({type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]})",
            hint=f"where there is internet: hf download {repo} --local-dir DIR; then give DIR as the model",
        ) from None
