"""How fast does one sequence generate on the CPU, against the engines a user would pick instead?

python -m benchmarks.cpu_decode [--threads 2] [--repeats 5] [--tokens 64] [--plot FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.measure import interleaved, peers, plot, read_rate, report
from flashrt.frontend.models import find

ENGINES = ("flashrt", "flashrt-exact", "llama.cpp", "llama.cpp-q4_0", "openvino")
TOKEN_BYTES = 96_400_000  # weights of SmolLM2-135M Q4_1 that one token reads: 66.4 MB layers + 30.1 MB head


def main() -> None:
    """Prints the table, and the distance to the memory limit measured in the same run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    asked = peers(given.engines, find("smollm2").place, given.threads)
    results = {
        f"context {c}": interleaved(asked, given.repeats, task="decode", context=c, tokens=given.tokens)
        for c in (16, 512)
    }
    settings = f"SmolLM2-135M-Instruct Q4_1, {given.threads} threads, {given.tokens} tokens, greedy, warm"
    print(report("tokens per second of one sequence", settings, results, given.engines[0]))
    print("versions  " + "; ".join(p.version for p in asked))
    limit = read_rate(TOKEN_BYTES, given.threads)
    for case, rows in results.items():
        share = rows[0].median * TOKEN_BYTES / limit
        print(f"limit     {case}: {share:.2f} of {limit / 1e9:.1f} GB/s read from a set of the same size")
    for peer in asked:
        peer.close()
    if given.plot:
        plot(given.plot, settings, results)


if __name__ == "__main__":
    main()
