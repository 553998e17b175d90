"""How fast does an 8B model generate on a GPU, and how near is that to the limit of its memory?

python -m benchmarks.gpu_decode [--tokens 100] [--repeats 5] [--context 500] [--compiled]

Random weights, made where they are used. --compiled: transformers through torch.compile, too (a minute).
"""

from __future__ import annotations

import argparse

from benchmarks.gpu_model import Ours, Transformers, read_limit
from benchmarks.measure import Result, report
from flashrt.ir.ops import LINEAR_BF16, LINEAR_EXACT, LINEAR_I8

CASES = (
    ("q4 exact", "q4.16x32", LINEAR_EXACT),
    ("q4 int8", "q4.16x32", LINEAR_I8),
    ("q4 fast", "q4.16x32", LINEAR_BF16),
    ("bf16 exact", "bf16", LINEAR_EXACT),
)


def main() -> None:
    """Prints the table, and the share of the memory's read rate, measured in the same run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    limit, rows, notes, many = read_limit(), [], [], []
    for name, layout, numerics in CASES:
        ours = Ours(layout, numerics, 64)
        rates = [ours.decode(1, given.context, given.tokens) for _ in range(given.repeats)]
        rows.append(Result(name, tuple(rates)))
        share = rows[-1].median * ours.shape.matrix_bytes / limit
        notes.append(f"limit     {name}: {share:.2f} of {limit / 1e12:.2f} TB/s")
        if layout != "bf16":
            batch = [ours.decode(64, given.context, given.tokens // 5) for _ in range(given.repeats)]
            many.append(Result(name, tuple(batch)))
        ours.close()
    for compiled in (False, True)[: 2 if given.compiled else 1]:
        theirs = Transformers(compiled, 1024)
        rates = [theirs.decode(given.context, given.tokens // 2) for _ in range(given.repeats)]
        rows.append(Result("transformers" + " compiled" * compiled, tuple(rates)))
        del theirs
    settings = f"8B shape, random weights, context {given.context}, {given.tokens} tokens, greedy, warm"
    table = {"1 sequence": rows, "64 sequences": many}
    print(report("tokens per second on a GPU", settings, table, CASES[0][0]))
    print("\n".join(notes))


if __name__ == "__main__":
    main()
