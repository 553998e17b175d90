"""How long does a whole command take to its first token on the CPU, and how much memory?

python -m benchmarks.cpu_start [--threads 2] [--repeats 5] [--engines NAME …]

Each side is a process that starts, loads the model, reads one short prompt through the model's chat
template, prints one token and ends. What an engine keeps on disk (plan and kernels) is there already,
except in the rows "first": those run once, with an empty cache folder.

peak: the most memory in use (resident), pages of mapped files included, as the system counts it for the
ended process (`wait4`). own: the most that was no mapped file (RssAnon and RssShmem), looked at every few
milliseconds during one more run that isn't timed; mapped weights are left out of it.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import machine, quiet
from flashrt.frontend.models import find

PROMPT = "Hi"
FLASHRT = "import sys; from flashrt.cli.main import main; sys.argv = ['flashrt', *sys.argv[1:]]; main()"
LLAMA_CPP = """
import sys, llama_cpp
model, threads, prompt = sys.argv[1:]
llm = llama_cpp.Llama(model, n_ctx=2048, n_threads=int(threads), n_threads_batch=int(threads), verbose=False)
asked = [{"role": "user", "content": prompt}]
out = llm.create_chat_completion(asked, max_tokens=1, temperature=0)
print(out["choices"][0]["message"]["content"])
"""
OPENVINO = """
import sys, openvino_genai
model, threads, prompt = sys.argv[1:]
pipe = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=int(threads))
print(pipe.generate(prompt, max_new_tokens=1, do_sample=False))
"""
TRANSFORMERS = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
model, threads, prompt = sys.argv[1:]
torch.set_num_threads(int(threads))
where = {"pretrained_model_name_or_path": str(Path(model).parent), "gguf_file": Path(model).name}
tokenizer = AutoTokenizer.from_pretrained(**where)
llm = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
asked = [{"role": "user", "content": prompt}]
ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = llm.generate(**ids, max_new_tokens=1, do_sample=False)
print(tokenizer.decode(out[0, ids["input_ids"].shape[1]:]))
"""
OTHERS = {"llama.cpp": LLAMA_CPP, "openvino": OPENVINO, "transformers": TRANSFORMERS}


@dataclass(slots=True)
class Start:
    """One side: what is run, and what came of it. seconds: each run. peak, own: bytes; None: not known."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    answer: str = ""
    peak: int | None = None
    own: int | None = None
    dropped: int = 0

    def run(self) -> float:
        """Seconds from start to end. Raises RuntimeError with its last words when it fails."""
        begun = time.perf_counter()
        process, out, err = self._begin()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        self._end(process.returncode, out, err)
        peak = usage.ru_maxrss * 1024
        # a process inherits its parent's peak when it starts: one that isn't above ours says nothing
        if peak > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024:
            self.peak = max(peak, self.peak or 0)
        return seconds

    def watch(self) -> None:
        """Runs it once more for `own`."""
        process, out, err = self._begin()
        while process.poll() is None:
            self.own = max(self.own or 0, _own(process.pid))
            time.sleep(0.005)
        self._end(process.returncode, out, err)

    def _begin(self) -> tuple[subprocess.Popen[bytes], Path, Path]:
        folder = Path(tempfile.mkdtemp(prefix="start-"))
        out, err = folder / "out", folder / "err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                env={**os.environ, **self.environment},
            )  # fmt: skip
        return process, out, err

    def _end(self, code: int, out: Path, err: Path) -> None:
        self.answer, wrong = out.read_text().strip().split("\n")[-1], err.read_text()
        for path in (out, err):
            path.unlink()
        out.parent.rmdir()
        if code:
            raise RuntimeError(f"{self.name} ended with {code}: {wrong.strip()[-500:]}")


def _own(pid: int) -> int:
    """Bytes in memory that belong to no file, now; 0 when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    facts = dict(line.split(":", 1) for line in lines)
    return sum(int(facts.get(name, "0 kB").split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def flashrt(threads: int, cache: str | None = None, command: str = "run") -> tuple[list[str], dict[str, str]]:
    """A command of flashrt, and its environment."""
    words = [sys.executable, "-c", FLASHRT, command, "smollm2", "--numerics", "fast"]
    if command == "run":
        words += ["--prompt", PROMPT, "--max-tokens", "1", "--threads", str(threads)]
    return words, {"FLASHRT_CACHE": cache} if cache else {}


def firsts(threads: int) -> list[Start]:
    """The first run ever, then its two parts by themselves: compiling the plan, and the kernels."""
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
        rows = [
            Start("first run ever", *flashrt(threads, whole)),
            Start("first: compile the plan", *flashrt(threads, parts, "compile")),
            Start("first: compile the kernels, run", *flashrt(threads, parts)),
        ]
        for row in rows:
            row.seconds.append(row.run())
    return rows


def interleaved(sides: Sequence[Start], repeats: int) -> list[Start]:
    """A B A B … after one run each that fills caches; one that fails is left out with its reason."""
    able = []
    for side in sides:
        try:
            side.run()
            side.peak = None  # it may have compiled
            able.append(side)
        except RuntimeError as error:
            print(f"left out  {side.name}: {str(error).splitlines()[-1]}", file=sys.stderr)
    for _ in range(2 * repeats):
        for side in able:
            if len(side.seconds) < repeats:
                seconds, clean = quiet(side.run)
                if clean:
                    side.seconds.append(seconds)
                else:
                    side.dropped += 1
    for side in able:
        side.watch()
        if not side.seconds:
            print(f"left out  {side.name}: others used the machine before each run", file=sys.stderr)
    return [side for side in able if side.seconds]


def table(rows: Sequence[Start]) -> str:
    """Seconds and megabytes; ratio: how many times as long as the first row."""
    heads = f"{'median':>8s} {'min':>7s} {'max':>7s} {'runs':>5s} {'ratio':>6s} {'peak':>8s} {'own':>8s}"
    lines = [f"{'command':32s} {heads}  answer"]
    for row in rows:
        median = statistics.median(row.seconds)
        ratio = f"{median / statistics.median(rows[0].seconds):.2f}" if row is not rows[0] else "-"
        lines.append(
            f"{row.name:32s} {median:8.2f} {min(row.seconds):7.2f} {max(row.seconds):7.2f} "
            f"{len(row.seconds):5d} {ratio:>6s} {_mega(row.peak):>8s} {_mega(row.own):>8s}  {row.answer!r}"
            + (f" ({row.dropped} thrown away)" if row.dropped else "")
        )
    return "\n".join(lines)


def _mega(nbytes: int | None) -> str:
    return f"{nbytes / 1e6:.0f} MB" if nbytes is not None else "?"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="whole command to the first token")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engines", nargs="*", default=list(OTHERS), choices=list(OTHERS))
    parser.add_argument("--no-first", action="store_true", help="leave out the runs with an empty cache")
    given = parser.parse_args()
    model = find("smollm2").place
    sides = [Start("flashrt", *flashrt(given.threads))] + [
        Start(name, [sys.executable, "-c", OTHERS[name], model, str(given.threads), PROMPT])
        for name in given.engines
    ]
    rows = interleaved(sides, given.repeats)
    once = [] if given.no_first else firsts(given.threads)
    print("question  seconds of a whole command, from start to end, and its memory")
    print(machine())
    print(f"settings  SmolLM2-135M-Instruct Q4_1, {given.threads} threads, prompt {PROMPT!r}, 1 token, fast")
    print(f"\n{table([*rows, *once])}")


if __name__ == "__main__":
    main()
