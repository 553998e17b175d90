"""Makes a plan anew for another machine, in a process of its own: `python -m flashrt.recompile FOLDER`.

The plan's own logical graph is placed again; the model isn't read. A process, so that Python's lock doesn't
hold up the steps that run meanwhile; it is nice to them, too, unless they wait for it.

    FOLDER/job.json      {"plan": folder, "key": its key, "engine": pid, "least": tokens, "urgent": bool}
    FOLDER/machine.json  the machine to plan for
    FOLDER/plan          the plan that comes of it, or
    FOLDER/error.txt     why none does
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from flashrt import program
from flashrt.compiler import CompileOptions, Stage, compile_model
from flashrt.errors import FlashrtError, PlanError
from flashrt.frontend.imported import Imported
from flashrt.ir import logical
from flashrt.llm.kv import pages_for
from flashrt.machine import Machine, from_json, to_json
from flashrt.program import Plan
from flashrt.runtime.replan import context_of

NICE = 19  # as `nice` counts: a hundredth of a core that others want, too
PREFIX = "flashrt-recompile-"
LAST = 2000  # characters of what a process that broke has said


# ---- in the engine -------------------------------------------------------------------
class Recompilation:
    """One run of the process. Use it in a `with`, or `close` it: then neither process nor files are left.

    plan: with its folder, or else it is written for the process. machine: what to plan for.
    least: as for `remake`. urgent: steps wait for it.
    """

    def __init__(self, plan: Plan, machine: Machine, least: int, *, urgent: bool) -> None:
        self._plan, self._machine, self._least, self._urgent = plan, machine, least, urgent
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def run(self) -> Plan:
        """Waits for the plan; it is in memory then. Raises PlanError, also when it is closed meanwhile,
        and ProgramError."""
        self._begin()
        assert self._process is not None and self._folder is not None
        _, said = self._process.communicate()
        if self._closed:
            raise PlanError("the plan isn't wanted any more")
        error = self._folder / "error.txt"
        if error.is_file():
            raise PlanError(error.read_text("utf-8"))
        if self._process.returncode:
            last = said.decode(errors="replace").strip()[-LAST:]
            raise PlanError(f"the compiler's process ended with {self._process.returncode}", lines=last)
        made = program.load(self._folder / "plan")  # all of it: its files go
        return replace(made, packed=self._plan.packed, folder=None)

    def _begin(self) -> None:
        with self._lock:
            if self._closed:
                raise PlanError("the plan isn't wanted any more")
            try:
                folder = self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))
                plan = self._plan.folder
                if plan is None:
                    plan = program.save(replace(self._plan, packed=None), folder / "from").folder
                job = {"plan": str(plan), "key": self._plan.key, "engine": os.getpid()}
                job |= {"least": self._least, "urgent": self._urgent}
                (folder / "job.json").write_text(json.dumps(job))
                (folder / "machine.json").write_text(to_json(self._machine))
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "flashrt.recompile", str(folder)],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                    start_new_session=True,  # Ctrl-C is the engine's to hear
                )  # fmt: skip
            except OSError as error:
                raise PlanError(f"the compiler's process can't be started: {error}") from None

    def close(self) -> None:
        """Ends the process, if it runs, and removes its files. From any thread. Idempotent."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Recompilation:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self.close()


# ---- in the process ------------------------------------------------------------------
def remake(plan: Plan, machine: Machine, least: int, on_stage: Callable[[Stage], None] | None = None) -> Plan:
    """The plan for another machine, from its own logical graph; with the same options.

    Pins to devices that the machine lacks are left out. A language model for whose context there is no
    room gets half of it, and so on down to `least` tokens. Raises PlanError when nothing fits.
    """
    context = context_of(plan)
    while True:
        try:
            return _placed(plan, machine, context, on_stage)
        except PlanError:
            if context is None or context <= least:
                raise
            context = max(context // 2, least)


def _placed(
    plan: Plan, machine: Machine, context: int | None, on_stage: Callable[[Stage], None] | None
) -> Plan:
    chosen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plan.options.items()}
    options = CompileOptions(**chosen)
    known = {d.id for d in machine.devices}
    options = replace(options, pins=tuple(p for p in options.pins if p.rpartition("=")[2] in known))
    key = hashlib.sha256(f"{plan.key} {machine.fingerprint()} {context}".encode()).hexdigest()[:24]
    model = Imported(whole(plan, context), plan.weights, plan.constants, plan.chat, plan.text)
    made = compile_model(model, machine, options, key=key, on_stage=on_stage)
    return replace(made, options=plan.options)


def whole(plan: Plan, context: int | None = None) -> logical.Graph:
    """The graph with the ranges that its symbols have in all variants together: it is kept as the first
    one has it. context: tokens of the longest sequence; None for as many as before."""
    ranges: dict[str, tuple[int, int]] = {}
    for symbol in (s for v in plan.variants for s in v.stream.symbols):
        lo, hi = ranges.get(symbol.name, (symbol.lo, symbol.hi))
        ranges[symbol.name] = min(lo, symbol.lo), max(hi, symbol.hi)
    if context is not None:
        limits = {"C": context, "H": context, "M": pages_for(context)}
        ranges |= {n: (ranges[n][0], min(ranges[n][1], most)) for n, most in limits.items() if n in ranges}
    symbols = tuple(
        replace(s, lo=ranges[s.name][0], hi=ranges[s.name][1]) if s.name in ranges else s
        for s in plan.logical.symbols
    )
    return replace(plan.logical, symbols=symbols)


def main(folder: Path) -> int:
    """Does the job of a folder; 0, also where it says why there is no plan."""
    job = json.loads((folder / "job.json").read_text("utf-8"))
    os.nice(0 if job["urgent"] else NICE)
    try:
        _work(folder, job)
    finally:
        _look(folder, job)
    return 0


def _look(folder: Path, job: Mapping[str, Any]) -> None:
    """Goes when the engine has gone: nobody else would clean up."""
    if os.getppid() != job["engine"]:
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(1)


def _work(folder: Path, job: Mapping[str, Any]) -> None:
    try:
        plan = program.load(Path(job["plan"]))
        if plan.key != job["key"]:
            raise PlanError(f"{job['plan']} holds another plan by now")
        machine = from_json((folder / "machine.json").read_text("utf-8"))
        program.save(remake(plan, machine, job["least"], lambda stage: _look(folder, job)), folder / "plan")
    except FlashrtError as error:
        unfinished = folder / "error.part"
        with suppress(OSError):
            unfinished.write_text(str(error), encoding="utf-8")
            unfinished.rename(folder / "error.txt")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
