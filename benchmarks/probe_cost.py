"""What does watching the machine cost? Processor time of the sampler's thread, as a share of one core.

python -m benchmarks.probe_cost [--seconds 10] [--threads 8]
"""

from __future__ import annotations

import argparse
import threading
import time

from benchmarks.measure import machine
from flashrt.probes.sampler import PERIOD, THREAD, Sampler

AIM = 0.01  # of one core


def main() -> None:
    """Prints the share, the time of one sample, and whether it is within the aim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument(
        "--threads", type=int, default=8, help="idle threads beside it, as an engine has them"
    )
    given = parser.parse_args()
    over = threading.Event()
    for _ in range(given.threads):
        threading.Thread(target=over.wait, daemon=True).start()
    with Sampler() as sampler:
        time.sleep(2 * PERIOD)  # files are opened by then
        thread = next(t for t in threading.enumerate() if t.name == THREAD)
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        first, before = sampler.latest, time.clock_gettime(clock)
        begin = time.perf_counter()
        time.sleep(given.seconds)
        spent, elapsed = time.clock_gettime(clock) - before, time.perf_counter() - begin
        last = sampler.latest
    over.set()
    assert first is not None and last is not None
    samples, share = last.number - first.number, spent / elapsed
    print(machine())
    print(f"settings  every {PERIOD * 1e3:.0f} ms, {len(last.cores)} cores, {given.threads} idle threads")
    print(f"samples   {samples} in {elapsed:.1f} s, {spent / samples * 1e6:.0f} µs of processor time each")
    print(f"cost      {share:.2%} of one core (aim: under {AIM:.0%}){'' if share < AIM else ': MISSED'}")


if __name__ == "__main__":
    main()
