"""Writes docs/instructions.md from the instruction dataclasses, their docstrings and the laws.

python tools/instructions.py           writes the file
python tools/instructions.py --check   exits with 1 when the file isn't up to date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from inspect import cleandoc
from pathlib import Path

from flashrt.ir import micro
from flashrt.ir.law import Law
from flashrt.ir.memory import MemoryMap
from flashrt.ir.stream_laws import MICRO
from flashrt.ir.text import show_instr
from flashrt.ir.types import attrs, sym

FILE = Path(__file__).resolve().parents[1] / "docs" / "instructions.md"

# field annotation → how its value is written
WRITTEN: Mapping[str, str] = {
    "str": "name",
    "int | None": "number",
    "Dim": "size, an expression in the symbols",
    "Attrs": "`{key=value,…}`",
    "tuple[str, ...]": "`[name,…]`",
    "tuple[Wait, ...]": "`[!3,!2@-1]`",
    "tuple[Arg, ...]": "`[%7,@layers.3.mlp.up[0:s3]]`",
    "SlotRef": "slot `%9` or channels of it `%9[0:s3]`",
    "SlotRef | None": "slot `%9` or channels of it `%9[0:s3]`",
    "BlockRef": "block `@name` or rows of it `@name[0:s3]`",
}
SPECIAL: Mapping[str, str] = {"est": "`82us`, `(2*T+1)us`", "signals": "`!3`"}

_S3, _MLP = sym("s3"), "layers.3.mlp"
EXAMPLES: tuple[micro.Instr, ...] = (
    micro.Prefetch(
        device="gpu:0", lane="copy_in", waits=(micro.Wait(9, -1),), signals=1, block=f"{_MLP}.gate_up",
        bytes=8192 * _S3, est=82,
    ),
    micro.Quantize(
        device="cpu:0", lane="compute", waits=(micro.Wait(0),), signals=2, src=micro.SlotRef(0),
        dst=micro.SlotRef(2), scheme="i8/32", est=40,
    ),
    micro.Bias(device="gpu:0", lane="compute", block=micro.BlockRef(f"{_MLP}.up.bias", 0, _S3), region=4),
    micro.Dispatch(
        device="gpu:0", lane="compute", waits=(micro.Wait(1),), signals=3, kernel="linear.q4.16x32+bias",
        args=(micro.SlotRef(7), micro.BlockRef(f"{_MLP}.up", 0, _S3)), dst=micro.SlotRef(9, 0, _S3),
        attrs=attrs(act="silu"), numerics="act=f32 acc=f32", est=31, node=f"{_MLP}.up#0", region=4,
    ),
    micro.Transfer(
        device="gpu:0", lane="copy_out", waits=(micro.Wait(3),), signals=4, src=micro.SlotRef(9, 0, _S3),
        dst=micro.SlotRef(10, 0, _S3), to="cpu:0", bytes=4 * sym("T") * _S3, est=13,
    ),
    micro.Evict(device="gpu:0", lane="copy_in", waits=(micro.Wait(3),), block="layers.2.mlp.gate_up"),
)  # fmt: skip

HEAD = """\
# Micro-instructions

Written by `tools/instructions.py` from `flashrt/ir/micro.py` and `flashrt/ir/stream_laws.py`.
Edit those, then run it again.
"""


def page() -> str:
    """The whole manual."""
    module = cleandoc(micro.__doc__ or "").partition("\n\n")[2]
    parts = [HEAD, module, _shared()]
    parts += [_entry(kind, example) for kind, example in zip(micro.INSTRUCTIONS, EXAMPLES, strict=True)]
    parts.append(_laws())
    return "\n\n".join(part.strip() for part in parts) + "\n"


def split_doc(kind: type[micro.Instr]) -> tuple[str, dict[str, str]]:
    """An instruction's docstring as its text and the meaning of each of its own fields."""
    names = "|".join(f.name for f in fields(kind))
    pieces = re.split(rf"^({names}): ", cleandoc(kind.__doc__ or ""), flags=re.MULTILINE)
    meanings = {k: " ".join(v.split()).rstrip(".") for k, v in zip(pieces[1::2], pieces[2::2], strict=True)}
    return pieces[0].strip(), meanings


def _entry(kind: type[micro.Instr], example: micro.Instr) -> str:
    assert type(example) is kind
    text, meanings = split_doc(kind)
    own = [f for f in fields(kind) if f.name not in micro.SHARED_FIELDS]
    laws = ", ".join(f"[{law.name}](#{law.name})" for law in MICRO if kind in law.about)
    return "\n\n".join(
        [
            f"## {kind.__name__.lower()}",
            text,
            f"```\n{show_instr(example)}\n```",
            _table([(f, meanings[f.name]) for f in own]),
            f"Laws that speak of it: {laws}.",
        ]
    )


def _shared() -> str:
    known = {f.name: f for f in fields(micro.Bias)}
    rows = [(known[name], meaning) for name, meaning in micro.SHARED_FIELDS.items()]
    return "## Fields that every instruction has\n\n" + _table(rows)


def _table(rows: list[tuple[Field[object], str]]) -> str:
    lines = ["| field | written as | meaning |", "|---|---|---|"]
    for field, meaning in rows:
        written = SPECIAL.get(field.name) or WRITTEN[str(field.type)]
        optional = "" if field.default is MISSING else " (optional)"
        lines.append(f"| `{field.name}`{optional} | {written} | {meaning} |")
    return "\n".join(lines)


def _laws() -> str:
    return "## Laws\n\n" + "\n\n".join(map(_law, MICRO))


def _law(law: Law[MemoryMap]) -> str:
    about = ", ".join(kind.__name__.lower() for kind in law.about) or "all of them"
    return f"### {law.name}\n\n{law.statement}\n\nSpeaks of: {about}. When broken: {law.repair}."


def main(arguments: list[str]) -> int:
    """Writes or checks the file; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when stale")
    if parser.parse_args(arguments).check:
        stale = not FILE.exists() or FILE.read_text(encoding="utf-8") != page()
        if stale:
            print(f"{FILE} is stale: run python tools/instructions.py", file=sys.stderr)
        return int(stale)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
