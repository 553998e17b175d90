"""How many tokens per second do 8 sequences generate together on the CPU?

python -m benchmarks.cpu_batch [--threads 2] [--repeats 5] [--sequences 8]
"""

from __future__ import annotations

import argparse

from benchmarks.measure import agreement, interleaved, peers, report
from flashrt.frontend.models import find

ENGINES = ("flashrt", "flashrt-exact", "llama.cpp", "llama.cpp-q4_0", "openvino", "transformers")


def main() -> None:
    """Prints the table: rates are the sum over the sequences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    given = parser.parse_args()
    model = find("smollm2").place
    asked = peers(given.engines, model, given.threads)
    case = f"{given.sequences} sequences"
    request = {"task": "batch", "sequences": given.sequences, "context": 16, "tokens": 32}
    results = {case: interleaved(asked, given.repeats, **request)}
    settings = f"SmolLM2-135M-Instruct Q4_1, {given.threads} threads, context 16, 32 tokens each, warm"
    print(report("tokens per second in total", settings, results, given.engines[0]))
    print("versions  " + "; ".join(p.version for p in asked))
    print(agreement(asked, model, given.threads, piece=1, pieces=given.sequences))
    for peer in asked:
        peer.close()


if __name__ == "__main__":
    main()
