"""A GGUF model in several files, `NAME-00001-of-00003.gguf` and so on: their headers as one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from flashrt.errors import ModelError
from flashrt.frontend.gguf_header import Header, read_header

_NUMBERED = re.compile(r"(.+-)(\d{5})-of-(\d{5})\.gguf")


def shards(path: Path) -> tuple[Path, ...]:
    """All files of the model that a file belongs to, in order, whether they are there or not."""
    found = _NUMBERED.fullmatch(path.name)
    if found is None:
        return (path,)
    stem, _, count = found.groups()
    return tuple(path.with_name(f"{stem}{i + 1:05}-of-{count}.gguf") for i in range(int(count)))


def read_shards(path: str | Path) -> Header:
    """The header of a model in one file or several; the first holds the metadata.

    Raises ModelError naming the file that is missing, that belongs to another model, or that holds a tensor
    once more.
    """
    paths = shards(Path(path))
    if missing := [p.name for p in paths if not p.is_file()]:
        raise ModelError(
            f"{path} is one of {len(paths)} files of a model; {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} missing",
            hint="fetch all of them into one folder",
        )
    first = read_header(paths[0])
    count = first.get("split.count", int, 1)
    if count not in (0, len(paths)):
        raise ModelError(
            f"{first.path} is one of {count} files of a model (split.count), its name says {len(paths)}",
            hint=f"name them …-00001-of-{count:05}.gguf and so on, or join them: llama-gguf-split --merge",
        )
    tensors = dict(first.tensors)
    for number, other in enumerate(paths[1:], 1):
        header = read_header(other)
        if header.get("split.no", int, number) != number:
            raise ModelError(
                f"{other} is number {header.get('split.no', int)} of its model (split.no), its name says "
                f"{number}",
                hint="the files were renamed: fetch them again",
            )
        for name, info in header.tensors.items():
            if name in tensors:
                raise ModelError(
                    f"{other}: tensor {name} is in an earlier file, too", hint="fetch them again"
                )
            tensors[name] = replace(info, file=number)
    wanted = first.get("split.tensors.count", int, len(tensors))
    if len(tensors) != wanted:
        raise ModelError(
            f"{first.path}: the model has {wanted} tensors (split.tensors.count), its files {len(tensors)}",
            hint="the files belong to different models: fetch them again",
        )
    return replace(first, tensors=tensors, others=paths[1:])
