"""A diagnosis as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from flashrt.profiler.diagnose import Check

_STYLE = """
:root { --ink: #1c2330; --dim: #5b6577; --line: #dfe3ea; --paper: #fff; --ground: #f4f6f9;
  --PASS: #1a7f4b; --WARN: #a86200; --FAIL: #c0262d; --SKIP: #6b7280 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --dim: #9aa4b5; --line: #2e3644;
  --paper: #171c24; --ground: #0f1319; --PASS: #4cc38a; --WARN: #e0a33e; --FAIL: #ff6369; --SKIP: #9aa4b5 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 0 }
main { max-width: 1000px; margin: 0 auto; padding: 32px 20px }
h1 { font-size: 24px; margin: 0 }
h2 { font-size: 16px; margin: 28px 0 8px; text-transform: capitalize }
.when { color: var(--dim); margin: 4px 0 20px }
.counts span { display: inline-block; margin-right: 20px; font-size: 18px; font-weight: 600 }
.counts small { font-weight: 400; color: var(--dim) }
table { width: 100%; border-collapse: collapse; background: var(--paper); border: 1px solid var(--line) }
td { padding: 9px 12px; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere }
tr:first-child td { border-top: 0 }
td.verdict { width: 58px; font-weight: 700; font-size: 13px }
td.name { width: 120px; color: var(--dim) }
.PASS { color: var(--PASS) } .WARN { color: var(--WARN) }
.FAIL { color: var(--FAIL) } .SKIP { color: var(--SKIP) }
.repair { margin-top: 4px; padding-left: 10px; border-left: 3px solid var(--line) }
"""
_MEANING = {
    "FAIL": "must be repaired",
    "WARN": "slower than it could be",
    "PASS": "as it should be",
    "SKIP": "not known here",
}


def page(checks: Sequence[Check], *, title: str, when: str) -> str:
    """The page. title: the machine; when: moment and version, as text."""
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>flash-diagnose: {escape(title)}</title><style>{_STYLE}</style></head><body><main>",
            f'<h1>{escape(title)}</h1><p class="when">{escape(when)}</p>',
            *_counts(checks),
            *_tables(checks),
            "</main></body></html>\n",
        ]
    )


def _counts(checks: Sequence[Check]) -> Iterator[str]:
    yield '<p class="counts">'
    for verdict, meaning in _MEANING.items():
        count = sum(c.verdict == verdict for c in checks)
        yield f'<span class="{verdict}">{count} {verdict} <small>{meaning}</small></span>'
    yield "</p>"


def _tables(checks: Sequence[Check]) -> Iterator[str]:
    for area, rows in groupby(checks, key=lambda c: c.area):
        yield f"<h2>{escape(area)}</h2><table>"
        for check in rows:
            repair = f'<div class="repair">{escape(check.repair)}</div>' if check.repair else ""
            yield (
                f'<tr><td class="verdict {check.verdict}">{check.verdict}</td>'
                f'<td class="name">{escape(check.name)}</td><td>{escape(check.found)}{repair}</td></tr>'
            )
        yield "</table>\n"
