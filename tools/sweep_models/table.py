"""docs/models.md: the page, and reading the verdicts back from it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

MEANINGS = {
    "right": "logits agree with transformers' (prefill of ragged sequences, prefill beside decode, decode)",
    "refused": "`flashrt` says why and exits with code 2",
    "wrong": "compiled, and the logits differ: a fault",
    "failed": "flashrt broke: a fault",
    "untried": "transformers makes no tiny model of this type from its defaults: no evidence either way",
}
_COUNT = "| {} | {} | {} |"
_HEADS = {
    "right": ("type", "attention", "error", "slow operators"),
    **dict.fromkeys(("refused", "wrong", "failed", "untried"), ("type", "reason")),
}
_VERSION = re.compile(r"^transformers (\S+), torch (\S+)$", re.MULTILINE)

HEAD = """\
# Models

Written by `python -m tools.sweep_models`. Every causal-LM type of the installed transformers is tried with a
tiny random model of its default configuration, small sizes in place of large ones (windows of 8 tokens, so
that they bite): saved as a Hugging Face folder, compiled for the reference device, and run beside
transformers' eager attention. A right row says no more than that: other switches of the same type may be
refused, by the check that every model passes when it is compiled.

transformers {transformers}, torch {torch}
"""


@dataclass(frozen=True, slots=True)
class Result:
    """A verdict on one type.

    note: attention of a right type, else the reason. error: largest difference of logits, over the largest
    logit. slow: operators that no kernel is for, which the reference implementation runs.
    """

    type: str
    verdict: str
    note: str
    error: float = 0.0
    slow: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """All verdicts, and the versions they hold for."""

    transformers: str
    torch: str
    results: tuple[Result, ...]


def write(page: Page) -> str:
    """The page's text."""
    counts = Counter(r.verdict for r in page.results)
    table = ["| verdict | types | meaning |", "|---|---:|---|"]
    table += [_COUNT.format(verdict, counts[verdict], meaning) for verdict, meaning in MEANINGS.items()]
    parts = [HEAD.format(transformers=page.transformers, torch=page.torch), "\n".join(table)]
    for verdict in MEANINGS:
        if counts[verdict]:
            parts.append(_section(verdict, [r for r in page.results if r.verdict == verdict]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _section(verdict: str, results: Iterable[Result]) -> str:
    heads = _HEADS[verdict]
    lines = [f"## {verdict.capitalize()}", "", _row(heads), _row(["---"] * len(heads))]
    for r in sorted(results, key=lambda r: r.type):
        right = (f"`{r.type}`", r.note, f"{r.error:.0e}", ", ".join(r.slow))
        lines.append(_row(right if verdict == "right" else right[:2]))
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def read(text: str) -> Page:
    """The page that a text holds. Raises ValueError when it isn't one."""
    versions = _VERSION.search(text)
    if versions is None:
        raise ValueError("no versions of transformers and torch")
    results = []
    for section in text.split("\n## ")[1:]:
        title, *lines = section.splitlines()
        for line in lines[3:]:
            results.append(_result(title.lower(), [cell.strip() for cell in line.split("|")[1:-1]]))
    return Page(versions[1], versions[2], tuple(results))


def _result(verdict: str, cells: list[str]) -> Result:
    if len(cells) != len(_HEADS[verdict]):
        raise ValueError(f"a row of {len(cells)} cells under {verdict!r}: {cells}")
    name = cells[0].strip("`")
    if verdict != "right":
        return Result(name, verdict, cells[1])
    return Result(name, verdict, cells[1], float(cells[2]), tuple(s for s in cells[3].split(", ") if s))
