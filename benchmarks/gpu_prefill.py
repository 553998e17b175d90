"""How fast does an 8B model read a prompt on a GPU, and how near is that to the rate of its matrix units?

python -m benchmarks.gpu_prefill [--tokens 512 8192]

Random weights, made where they are used; activations and attention in bf16, as transformers has them.
"""

from __future__ import annotations

import argparse

from benchmarks.gpu_model import Ours, Transformers, matrix_limit
from benchmarks.measure import Result, report
from flashrt.ir.ops import LINEAR_BF16


def main() -> None:
    """Prints the table, and the share of a library's rate for one large product, measured in the same run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=(512, 8192))
    given = parser.parse_args()
    limit, notes = matrix_limit(), []
    table: dict[str, list[Result]] = {f"{n} tokens": [] for n in given.tokens}
    for layout, name in (("q4.16x32", "q4"), ("bf16", "bf16")):
        ours = Ours(layout, LINEAR_BF16, max(given.tokens))
        weights = ours.shape.layers * (ours.shape.hidden * (6144 + 4096 + 3 * ours.shape.ffn))
        for n in given.tokens:
            taken = [ours.prefill(n) for _ in range(3)]
            table[f"{n} tokens"].append(Result(name, tuple(n / t for t in taken)))
            share = 2 * weights * n / sorted(taken)[1] / limit
            notes.append(
                f"limit     {name}, {n} tokens: products take {share:.2f} of {limit / 1e12:.0f} TFLOP/s"
            )
        ours.close()
    theirs = Transformers(False, 64)
    for n in given.tokens:
        rates = tuple(n / theirs.prefill(n) for _ in range(3))
        table[f"{n} tokens"].append(Result("transformers", rates))
    settings = "8B shape, random weights, one prompt to its first token, warm"
    print(report("tokens per second of a prompt on a GPU", settings, table, "bf16"))
    print("\n".join(notes))


if __name__ == "__main__":
    main()
