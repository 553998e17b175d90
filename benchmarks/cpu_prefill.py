"""How fast is a prompt of 512 tokens read on the CPU, against the engines a user would pick instead?

python -m benchmarks.cpu_prefill [--threads 2] [--repeats 5] [--plot FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.measure import agreement, interleaved, peers, plot, report
from flashrt.frontend.models import find

ENGINES = (
    "flashrt", "flashrt-int8", "flashrt-exact", "llama.cpp", "llama.cpp-q4_0", "openvino", "transformers",
)  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    model = find("smollm2").place
    asked = peers(given.engines, model, given.threads)
    results = {"512 tokens": interleaved(asked, given.repeats, task="prefill", tokens=512)}
    settings = f"SmolLM2-135M-Instruct Q4_1, {given.threads} threads, 512 prompt tokens, warm"
    print(report("prompt tokens per second", settings, results, given.engines[0]))
    print("versions  " + "; ".join(p.version for p in asked))
    print(agreement(asked, model, given.threads, piece=2, pieces=16))
    for peer in asked:
        peer.close()
    if given.plot:
        plot(given.plot, settings, results)


if __name__ == "__main__":
    main()
