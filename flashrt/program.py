"""A compiled plan: a folder on disk (`Plan`), and the same opened on devices (`Program`).

    PLAN/plan.json            what this is: versions, options, context, checksums of the other files
    PLAN/model.logical        the recognised, fused, tagged graph
    PLAN/<variant>.physical   one pair per range of T
    PLAN/<variant>.micro
    PLAN/machine.json         the machine it was planned for
    PLAN/weights.json         where the weight bytes lie, by reference; or weights.bin, packed
    PLAN/constants.npz        tensors that are in no file (RoPE frequencies)
    PLAN/tokenizer.json, chat.json   for a language model
    PLAN/text.json            for a text encoder

A plan is written under a temporary name and renamed, so a killed compile leaves
no broken plan; what it leaves is swept up by the next one. Processes that write
the same plan take turns. Running a plan needs neither torch nor transformers.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import io
import json
import os
import secrets
import shutil
import weakref
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from flashrt import knobs
from flashrt.backend import BlockSource, OpenDevice
from flashrt.errors import ProgramError, RequestError
from flashrt.frontend.imported import ChatFacts, TextFacts
from flashrt.ir import logical, micro, physical, text
from flashrt.ir.ops import EXPERT_TABLE, PAGE
from flashrt.ir.types import TensorType
from flashrt.machine import Machine, from_json, to_json
from flashrt.runtime.arena import Residents
from flashrt.runtime.executor import NOT_FED, Begun, Executor
from flashrt.runtime.experts import ExpertCache, takes_table
from flashrt.runtime.idle import Rests
from flashrt.runtime.step import Arrays, Binding, as_arrays
from flashrt.runtime.trace import Trace
from flashrt.weights.index import WeightIndex
from flashrt.weights.packed import PackedSource, index_from_json, index_to_json, write_packed
from flashrt.weights.parts import PartSource
from flashrt.weights.source import IndexSource

V = TypeVar("V")
FORMAT = 2
MANIFEST = "plan.json"
EDITABLE = (".logical", ".physical", ".micro")


@dataclass(frozen=True)
class Variant:
    """The plan for one range of T: lo ≤ T ≤ hi (a graph without T has one variant, 0…0).

    read: gives the physical graph, which running a plan doesn't need: it has the budgets.
    """

    name: str
    lo: int
    hi: int
    budgets: tuple[physical.Budget, ...]
    stream: micro.Stream
    read: Callable[[], physical.Graph] = field(compare=False, repr=False)

    @staticmethod
    def of(name: str, lo: int, hi: int, graph: physical.Graph, stream: micro.Stream) -> Variant:
        """A variant with its graph at hand."""
        return Variant(name, lo, hi, graph.budgets, stream, lambda: graph)

    @cached_property
    def physical(self) -> physical.Graph:
        """The graph. Raises ParseError when its text, where it was read from, doesn't parse."""
        return self.read()


@dataclass(frozen=True)
class Plan:
    """Everything a run needs besides the weight bytes.

    graph: the logical graph or what reads it: running a plan doesn't need it.
    key: identifies model, options, machine and code; two equal keys are the same plan.
    options: what the user asked for, as text, for `explain`.
    folder: where it lies on disk; None while it is in memory only.
    """

    name: str
    key: str
    version: str
    options: Mapping[str, Any]
    graph: logical.Graph | Callable[[], logical.Graph] = field(compare=False, repr=False)
    variants: tuple[Variant, ...]
    machine: Machine
    weights: WeightIndex
    constants: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    chat: ChatFacts | None = None
    text: TextFacts | None = None
    packed: Path | None = None
    folder: Path | None = field(default=None, compare=False)

    @cached_property
    def logical(self) -> logical.Graph:
        """The logical graph. Raises ParseError when its text, where it was read from, doesn't parse."""
        return self.graph() if callable(self.graph) else self.graph

    @property
    def inputs(self) -> dict[str, TensorType]:
        """What a step is given. Which experts a device keeps is the program's to know."""
        return {i.name: i.type for i in self.variants[0].stream.inputs if i.name != EXPERT_TABLE}

    def source(self) -> PackedSource | IndexSource:
        """Opens the weight bytes. Raises ModelError when a file is missing or has changed."""
        if self.packed is not None:
            return PackedSource(self.packed)
        return IndexSource(self.weights, self.constants)


# ---- on disk ---------------------------------------------------------------------
def save(plan: Plan, folder: Path, *, pack: bool = False) -> Plan:
    """Writes a plan folder, replacing a plan that is there. Returns the plan as it is on disk.

    pack: copy the weights into it; a packed plan stays packed.

    Raises:
        ProgramError: the place holds something that isn't a plan, can't be written, or is full.
    """
    folder, pack = folder.expanduser().absolute(), pack or plan.packed is not None
    check_output(folder)
    with _renamed_when_done(folder) as temporary:
        files = dict(_files(plan))
        for name, data in files.items():
            (temporary / name).write_bytes(data)
        if pack:
            write_packed(temporary / "weights.bin", _blocks(plan), plan.source())
        manifest = _manifest(plan, files, packed=pack)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return load(folder)


def check_output(folder: Path) -> None:
    """Looks whether a plan can be written there, before work is spent on one. Raises ProgramError."""
    folder = folder.expanduser().absolute()
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise ProgramError(
            f"{folder} exists and isn't a plan", hint="choose another output folder or remove this one"
        )
    above = next(p for p in folder.parents if p.exists())
    if not above.is_dir():
        raise _unwritable(folder, f"{above} isn't a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise _unwritable(folder, f"{above} is read-only")


def _unwritable(folder: Path, why: str) -> ProgramError:
    return ProgramError(
        f"can't write {folder}: {why}",
        hint=f"choose a writable folder with enough space: -o FOLDER, or {knobs.CACHE.name} for the cache",
    )


@contextmanager
def _renamed_when_done(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place at the end, or goes when anything fails.

    It is locked while it is written: one that isn't was left by a process that was killed.
    """
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    held = -1
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent):
            _sweep(folder)
            temporary.mkdir()
            held = os.open(temporary, os.O_RDONLY)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield temporary
        with locked(folder.parent):
            _swap(temporary, folder)
    except OSError as error:
        raise _unwritable(folder, error.strerror or str(error)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if held >= 0:
            os.close(held)


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Keeps other processes (and threads) that ask for the same file or folder waiting.

    shared: with others who share it. The kernel gives it free when the process dies.
    Raises OSError when the path can't be opened or locked.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Removes what killed processes left of the plan at `folder`."""
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(descriptor)


def _swap(temporary: Path, folder: Path) -> None:
    old = temporary.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _files(plan: Plan) -> Iterator[tuple[str, bytes]]:
    yield "model.logical", text.to_text(plan.logical).encode()
    for v in plan.variants:
        yield f"{v.name}.physical", text.to_text(v.physical).encode()
        yield f"{v.name}.micro", text.to_text(v.stream).encode()
    yield "machine.json", to_json(plan.machine).encode()
    yield "weights.json", index_to_json(plan.weights).encode()
    archive = io.BytesIO()
    np.savez(archive, **{k: np.asarray(v) for k, v in plan.constants.items()})  # type: ignore[arg-type]
    yield "constants.npz", archive.getvalue()
    if plan.chat is not None:
        facts = asdict(plan.chat)
        yield "tokenizer.json", facts.pop("tokenizer").encode()
        yield "chat.json", json.dumps(facts, indent=1, ensure_ascii=False).encode()
    if plan.text is not None:
        yield "text.json", json.dumps(asdict(plan.text), ensure_ascii=False).encode()


def _manifest(plan: Plan, files: Mapping[str, bytes], *, packed: bool) -> dict[str, Any]:
    facts = {
        "format": FORMAT,
        "flashrt": plan.version,
        "name": plan.name,
        "key": plan.key,
        "machine": plan.machine.fingerprint(),
        "options": dict(plan.options),
        "packed": packed,
        "variants": [
            {"name": v.name, "lo": v.lo, "hi": v.hi, "budgets": [asdict(b) for b in v.budgets]}
            for v in plan.variants
        ],
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    return {**facts, "sha256": _digest(facts)}


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _blocks(plan: Plan) -> dict[str, Any]:
    """Every weight some variant keeps on a device, by name: of parts, what they are parts of."""
    return {w.name: w for v in plan.variants for w in v.stream.weights if not w.of}


def load(folder: Path, *, edited: bool = False) -> Plan:
    """Reads a plan folder.

    edited: accept texts that differ from their checksums, for sealing a plan again
    after its texts were edited; the caller checks their laws.

    Raises:
        ProgramError: not a plan, corrupt (names the file), or written by another format.
        ParseError: an edited text doesn't parse.
    """
    folder = folder.absolute()
    with ExitStack() as held:
        with suppress(OSError):  # where locks don't work a plan can be read all the same
            held.enter_context(locked(folder.parent, shared=True))  # `save` mustn't swap it meanwhile
        return _read(folder, edited)


def _read(folder: Path, edited: bool) -> Plan:
    manifest = read_manifest(folder)
    try:
        read = _Reader(folder, manifest["files"], edited)
        graph = read.later(text.read_logical, "model.logical")
        variants = tuple(_variant(v, read, edited) for v in manifest["variants"])
        chat = None
        if "chat.json" in manifest["files"]:
            facts = json.loads(read.text("chat.json"))
            chat = ChatFacts(**{**facts, "eos": tuple(facts["eos"])}, tokenizer=read.text("tokenizer.json"))
        encoder = None
        if "text.json" in manifest["files"]:
            encoder = TextFacts(**json.loads(read.text("text.json")))
        return Plan(
            name=manifest["name"],
            key=manifest["key"],
            version=manifest["flashrt"],
            options=manifest["options"],
            graph=graph() if edited else graph,
            variants=variants,
            machine=read.level(from_json, "machine.json"),
            weights=index_from_json(read.text("weights.json")),
            constants=read.arrays("constants.npz"),
            chat=chat,
            text=encoder,
            packed=folder / "weights.bin" if manifest["packed"] else None,
            folder=folder,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(folder, MANIFEST, repr(error)) from None


def _variant(facts: Mapping[str, Any], read: _Reader, edited: bool) -> Variant:
    name, stream = facts["name"], read.level(text.read_micro, f"{facts['name']}.micro")
    graph = read.later(text.read_physical, f"{name}.physical")
    if edited:
        return Variant.of(name, facts["lo"], facts["hi"], graph(), stream)
    budgets = tuple(physical.Budget(**b) for b in facts["budgets"])
    return Variant(name, facts["lo"], facts["hi"], budgets, stream, graph)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checked content of plan.json."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ProgramError(
            f"{folder} isn't a plan: no {MANIFEST} in it", hint="flashrt compile MODEL -o PLAN"
        )
    try:
        manifest = json.loads(path.read_text("utf-8"))
        found = manifest["format"]
    except OSError as error:
        raise ProgramError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise _corrupt(folder, MANIFEST, "it doesn't parse") from None
    if found != FORMAT:
        raise ProgramError(
            f"{folder} has plan format {found}, this flashrt reads {FORMAT}",
            hint="compile it again: flashrt compile MODEL -o PLAN",
        )
    assert isinstance(manifest, dict)
    if manifest.pop("sha256", None) != _digest(manifest):
        raise _corrupt(folder, MANIFEST, "its content isn't what was written")
    return manifest


class _Reader:
    """Reads files of a plan and checks them against the manifest."""

    def __init__(self, folder: Path, digests: Mapping[str, str], edited: bool) -> None:
        self._folder, self._digests, self._edited = folder, digests, edited

    def bytes(self, name: str) -> bytes:
        try:
            data = (self._folder / name).read_bytes()
        except OSError as error:
            raise _corrupt(self._folder, name, error.strerror or str(error)) from None
        editable = self._edited and name.endswith(EDITABLE)
        if not editable and hashlib.sha256(data).hexdigest() != self._digests[name]:
            raise _corrupt(self._folder, name, "its content isn't what was written")
        return data

    def text(self, name: str) -> str:
        return self.bytes(name).decode()

    def level(self, parse: Callable[..., V], name: str) -> V:
        """Parses a text; errors name the file."""
        return self.later(parse, name)()

    def later(self, parse: Callable[..., V], name: str) -> Callable[[], V]:
        """Reads and checks a text now, and parses it when called."""
        content = self.text(name)
        return lambda: parse(content, path=str(self._folder / name))

    def arrays(self, name: str) -> dict[str, NDArray[np.generic]]:
        try:
            with np.load(io.BytesIO(self.bytes(name)), allow_pickle=False) as archive:
                return dict(archive)
        except (ValueError, zipfile.BadZipFile) as error:
            raise _corrupt(self._folder, name, str(error)) from None


def _corrupt(folder: Path, name: str, why: str) -> ProgramError:
    hint = "compile the plan again: flashrt compile MODEL -o PLAN"
    if name.endswith(EDITABLE):
        hint += f"; if you edited it on purpose, seal it: flashrt compile {folder} -o NEW_PLAN"
    return ProgramError(f"{folder / name} is corrupt: {why}", hint=hint)


# ---- opened ----------------------------------------------------------------------
@dataclass(slots=True)
class Ran:
    """What a program has run since it was opened. tokens, rows: sums of T and N, where its graph has them."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0


class Mover(Protocol):
    """Says where the splits stand (`runtime.follow.Follower`). Neither method raises or takes long."""

    def at(self, variant: str) -> Mapping[str, int]:
        """Called before each step: the positions of a variant's splits."""

    def stepped(self, variant: str, executor: Executor) -> None:
        """Called after each step."""


class Pending:
    """A step that a program has begun. When nobody asks for its result, it is lost with the next but one."""

    def __init__(self, step: Begun, ended: Callable[[], None]) -> None:
        self._step, self._ended = step, ended
        self._found: dict[str, NDArray[Any]] | None = None

    @property
    def ahead(self) -> bool:
        """Whether it is under way and the last that was begun, so that something is gained by beginning the
        next step, fed with its outputs, before asking for its result."""
        return self._step.ahead

    def result(self) -> dict[str, NDArray[Any]]:
        """The outputs that were asked for, by name, once the step is through. Raises DeviceError."""
        if self._found is None:
            self._found, _ = self._step.result()
            self._ended()
        return self._found


class Program:
    """A plan opened on devices. `call`, or `begin` and its result, is the one entry; the language-model
    engine is a client of it.

    devices: open devices by id; the program closes them. host: the reference device for host rows, if any.
    pages: size of the paged KV cache, in pages (0 for a model without one).
    source: where weights come from, in place of the plan's own; the caller closes it.

    Raises:
        ProgramError: a model with a KV cache and no pages for it.
        ModelError: a file of weights is missing or has changed.
    """

    def __init__(
        self,
        plan: Plan,
        devices: Mapping[str, OpenDevice],
        host: OpenDevice | None,
        *,
        pages: int = 0,
        source: BlockSource | None = None,
        poison: bool = False,
    ) -> None:
        if pages < 1 and any(v.stream.states for v in plan.variants):
            raise ProgramError(
                f"{plan.name} keeps a KV cache and was opened with {pages} pages",
                hint=f"pages=N: room for N times {PAGE} tokens",
            )
        self.plan, self.pages = plan, pages
        self.devices, self._host, self._poison = devices, host, poison
        streams = [v.stream for v in plan.variants]
        self._known = {s.name for x in streams for s in x.symbols} | {
            s.name for x in streams for s in x.splits
        }
        self._bind = Binding(plan.inputs)
        self._outputs = {o.name for x in streams for o in x.outputs}
        self._closed, self._held, self._onlookers = False, ExitStack(), ExitStack()
        if source is None:
            own = source = plan.source()
            self._held.callback(own.close)
        for device in (*devices.values(), host):
            if device is not None:
                self._held.callback(device.close)
        self.residents = Residents(
            devices, PartSource(source, _blocks(plan)), {"P": pages} if pages else {}, streams
        )
        self._executors: dict[str, Executor] = {}
        self._last: Executor | None = None  # what has the memory; its step may have been refused
        self._began: Executor | None = None  # whose step was the last to begin
        self._latest: weakref.ref[Pending] | None = None
        self.trace: Trace | None = None
        self.ran = Ran()
        self.rests = {v.name: Rests(v.stream) for v in plan.variants}
        self.mover: Mover | None = None
        self.experts = next((ExpertCache(x, self.residents) for x in streams if takes_table(x)), None)

    @property
    def last(self) -> Executor | None:
        """What ran the last step."""
        return self._last

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def drain(self) -> None:
        """Waits until all that the last step began is done. Raises DeviceError when that failed."""
        if self._last is not None:
            self._last.drain()

    def when_closed(self, end: Callable[[], None]) -> None:
        """Has `close` call `end` before it does anything else."""
        self._onlookers.callback(end)

    def open(self) -> None:
        """Loads every variant now instead of at its first use."""
        for variant in self.plan.variants:
            self._executor(variant)

    def call(
        self,
        inputs: Mapping[str, Any],
        symbols: Mapping[str, int] | None = None,
        outputs: Collection[str] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Runs one step.

        Args:
            inputs: an array for each input of the graph; dtypes are converted, shapes must fit.
            symbols: symbols in no input's shape (such as C), and split variables.
            outputs: names of those to be given; None for all. A language model's logits are large, and
                copying them takes longer than drawing a token from them.

        Returns:
            The outputs by name. State (the KV cache) stays inside.

        Raises:
            RequestError: names, shapes, values or indices don't fit, or it is closed; nothing ran.
            DeviceError: a device failed.
        """
        return self.begin(inputs, symbols, outputs).result()

    def begin(
        self,
        inputs: Mapping[str, Any],
        symbols: Mapping[str, int] | None = None,
        outputs: Collection[str] | None = None,
        fed: Mapping[str, str] = NOT_FED,
    ) -> Pending:
        """Begins a step; arguments, and what is raised, as for `call`. Steps run in the order they begin.

        fed: names of inputs → names of outputs. These inputs are what the step begun last has as its outputs,
            which nobody needs to know yet: of what is given for them only dtype and shape count, and values
            aren't checked.
        """
        if self._closed:
            raise RequestError(f"the program {self.plan.name} is closed")
        if unknown := (symbols or {}).keys() - self._known:
            raise RequestError(
                f"{self.plan.name} has no {', '.join(sorted(unknown))}",
                hint=f"symbols and splits: {', '.join(sorted(self._known))}",
            )
        if missing := {*(outputs or ()), *fed.values()} - self._outputs:
            raise RequestError(
                f"{self.plan.name} has no output {', '.join(sorted(missing))}",
                hint=f"outputs: {', '.join(sorted(self._outputs))}",
            )
        arrays = as_arrays(self.plan.inputs, inputs)
        env = self._bind(arrays, symbols or {})
        variant = self._variant(env.get("T", 0))
        executor = self._executor(variant)
        if fed and not (executor is self._last is self._began and executor.feeds(fed, arrays)):
            arrays, fed = as_arrays(self.plan.inputs, {**arrays, **self._handed(fed)}), NOT_FED
            env = self._bind(arrays, symbols or {})
        if self.mover is not None:
            env = {**self.mover.at(variant.name), **env}
        if self._last is not None and self._last is not executor:
            self._last.leave()
        self._last = executor
        step = self._step(executor, arrays, env, outputs, fed)
        self._began = executor
        pending = Pending(step, lambda: self._ran(variant.name, step, env))
        self._latest = weakref.ref(pending)  # its outputs may be large: they are the caller's to keep
        return pending

    def _step(
        self,
        executor: Executor,
        arrays: Arrays,
        env: Mapping[str, int],
        outputs: Collection[str] | None,
        fed: Mapping[str, str],
    ) -> Begun:
        """Begins a step of an executor, with the experts that are there now where it asks for them."""
        traced = self.trace is not None
        if self.experts is None or not takes_table(executor.stream):
            return executor.begin(arrays, env, wanted=outputs, trace=traced, fed=fed)
        number, table = self.experts.enter()
        step: Begun | None = None
        try:
            given = {**arrays, EXPERT_TABLE: table}
            step = executor.begin(given, env, wanted=outputs, trace=traced, fed=fed)
        finally:
            self.experts.entered(number, step)
        return step

    def _handed(self, fed: Mapping[str, str]) -> dict[str, NDArray[Any]]:
        """Inputs from outputs by way of the host."""
        pending = self._latest() if self._latest is not None else None
        found = pending.result() if pending is not None else {}
        if lacking := set(fed.values()) - found.keys():
            raise RequestError(
                f"this step is fed with {', '.join(sorted(lacking))} of the one before, which isn't there",
                hint="name it among that step's outputs, and keep what `begin` gave until this one begins",
            )
        return {name: found[output] for name, output in fed.items()}

    def _ran(self, variant: str, step: Begun, env: Mapping[str, int]) -> None:
        self.ran.steps += 1
        self.ran.tokens += env.get("T", 0)
        self.ran.rows += env.get("N", 0)
        if self.trace is not None and step.record is not None:
            self.trace.steps.append(step.record)
        if self.mover is not None:
            self.mover.stepped(variant, step.executor)

    def _variant(self, tokens: int) -> Variant:
        for variant in self.plan.variants:
            if variant.lo <= tokens <= variant.hi:
                return variant
        raise RequestError(f"no variant of {self.plan.name} takes T={tokens}; largest: {self.max_tokens}")

    def _executor(self, variant: Variant) -> Executor:
        if variant.name not in self._executors:
            self._executors[variant.name] = Executor(
                variant.stream,
                self.residents,
                self._host,
                poison=self._poison,
                rests=self.rests[variant.name],
            )
        return self._executors[variant.name]

    @property
    def max_tokens(self) -> int:
        """The largest T of one step."""
        return max(v.hi for v in self.plan.variants)

    def close(self) -> None:
        """Ends lanes, closes devices, drops memory. Idempotent."""
        self._onlookers.close()
        self._closed = True
        if self.experts is not None:
            self.experts.close()
        for executor in self._executors.values():
            executor.close()
        self._executors, self._last, self._began = {}, None, None
        self.residents.clear()
        self._held.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
