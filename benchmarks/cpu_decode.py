"""How fast does one sequence generate on the CPU, against the engines a user would pick instead?

python -m benchmarks.cpu_decode [--threads 2] [--repeats 5] [--tokens 64] [--company 0] [--plot FILE]

--company N: beside N other processes that use a core each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.measure import agreement, interleaved, peers, plot, report
from benchmarks.peers import plan_options
from flashrt.engine import obtain
from flashrt.frontend.models import find
from flashrt.profiler.bench import read_rate, token_bytes

ENGINES = ("flashrt", "flashrt-exact", "llama.cpp", "llama.cpp-q4_0", "openvino", "transformers")


def main() -> None:
    """Prints the table, and the distance to the memory limit measured in the same run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--company", type=int, default=0)
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    model = find("smollm2").place
    asked = peers(given.engines, model, given.threads)
    results = {
        f"context {c}": interleaved(
            asked, given.repeats, company=given.company, task="decode", context=c, tokens=given.tokens
        )
        for c in (16, 512)
    }
    settings = f"SmolLM2-135M-Instruct Q4_1, {given.threads} threads, {given.tokens} tokens, greedy, warm"
    if given.company:
        settings += f", beside {given.company} busy process{'es' * (given.company > 1)}"
    print(report("tokens per second of one sequence", settings, results, given.engines[0]))
    print("versions  " + "; ".join(p.version for p in asked))
    print(agreement(asked, model, given.threads, piece=1, pieces=1))
    nbytes = token_bytes(obtain(model, plan_options("fast")).plan)
    limit = read_rate(nbytes, given.threads)
    for case, rows in results.items():
        share = rows[0].median * nbytes / limit
        print(f"limit     {case}: {share:.2f} of {limit / 1e9:.1f} GB/s, read from {nbytes / 1e6:.1f} MB")
    for peer in asked:
        peer.close()
    if given.plot:
        plot(given.plot, settings, results)


if __name__ == "__main__":
    main()
