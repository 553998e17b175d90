"""Joins the rooms: opens devices, takes the machine picture, compiles, runs.

The only importer of backends and probes. `compile`, `load` and `LLM` are the
library's door; the command line is a client of them.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flashrt import knobs, program
from flashrt.backend import WORKSPACE, Backend, BlockSource, OpenDevice
from flashrt.compiler import CompileOptions, Stage, compile_model, keep_as_chosen, plan_key
from flashrt.errors import ModelError, PlanError, ProgramError, RequestError
from flashrt.frontend import models
from flashrt.ir import micro
from flashrt.ir.ops import EXPERT_TABLE
from flashrt.ir.types import size
from flashrt.llm.chat import Chat
from flashrt.llm.generate import Completion, Generator
from flashrt.llm.kv import pages_for
from flashrt.llm.request import Request, Sampling
from flashrt.machine import Device, Link, Machine, Measured
from flashrt.probes import groups, links, snapshot
from flashrt.probes.host import beyond_caches
from flashrt.program import Plan, Program, Variant
from flashrt.runtime import room
from flashrt.status.publisher import Publisher, publish
from flashrt.status.record import Replanning

if TYPE_CHECKING:
    from flashrt.probes.memory import Memory
    from flashrt.probes.sampler import Sampler
    from flashrt.probes.survey import Survey
    from flashrt.recompile import Recompilation
    from flashrt.runtime.follow import Follower
    from flashrt.runtime.replan import Replanner
    from flashrt.runtime.swap import Elder

ALONE = 1.0  # seconds between two samples where nothing but memory is looked at
Message = Mapping[str, str]
Progress = Callable[[str, int, int], None]


# ---- devices -----------------------------------------------------------------------
def _backend(kind: str) -> Backend:
    """The backend of a kind of device. Imported here so that a plan loads only what it uses."""
    match kind:
        case "cpu":
            from flashrt.backends.cpu import CpuBackend

            return CpuBackend()
        case "reference":
            from flashrt.backends.reference import ReferenceBackend

            return ReferenceBackend()
        case "null":
            from flashrt.backends.null import NullBackend

            return NullBackend()
        case "npu":
            from flashrt.backends.npu import NpuBackend

            return NpuBackend()
        case "gpu":
            from flashrt.backends.cuda import CudaBackend

            return CudaBackend()
    raise PlanError(f"no backend for devices of kind {kind!r}", hint="known: cpu, gpu, reference, null, npu")


def machine_picture(
    devices: Sequence[str] = ("cpu:0",), budgets: Mapping[str, int] = MappingProxyType({})
) -> Machine:
    """The machine as probed now, with the kernels of each device's backend.

    devices: ids; "cpu:0" is the host, "cpu:0-3" a group of its cores, "reference:0" and "null:0"
    pretend to be it. budgets: bytes that a plan may use, by device id.
    Raises PlanError for devices or budgets that can't be had.
    """
    host = snapshot.snapshot()
    chosen = tuple(_host_as(host, id) for id in devices)
    groups.check(chosen)
    chosen = groups.limited(chosen, budgets)
    # a device that knows its kernels has others than its kind (an NPU's depend on its provider)
    kernels = {kind: _backend(kind).kernels() for kind in {d.kind for d in chosen if not d.kernels}}
    measured = snapshot.remembered()
    ways = (*links.between(chosen, measured), *links.known(_gpu_links(chosen), measured))
    return replace(host, devices=chosen, links=ways).with_kernels(kernels, WORKSPACE)


def _host_as(host: Machine, id: str) -> Device:
    kind = id.partition(":")[0]
    base = host.devices[0]
    if id == base.id:
        return base
    if groups.processors(id):
        return snapshot.core_group(host, id)
    if kind == "npu":
        from flashrt.backends.npu import device_spec

        return device_spec(id, base)
    if kind in ("reference", "null") and id.partition(":")[2].isdecimal():
        return replace(base, id=id, kind=kind, name=f"{kind} on {base.name}")
    if kind == "gpu":
        return _gpu(id, base.id)
    raise PlanError(
        f"no device {id!r} here",
        hint=f"known: {base.id}, cpu:FIRST-LAST (cores), gpu:N, reference:N, null:N, npu:NAME",
    )


def _gpu_links(chosen: Sequence[Device]) -> Iterator[Link]:
    """The ways between those GPUs and those groups of the host's cores, as the driver reports them."""
    from flashrt.probes import nvidia

    ids, hosts = ({d.id for d in chosen if d.kind == kind} for kind in ("gpu", "cpu"))
    if ids:
        with closing(nvidia.Nvidia()) as found:
            ways = [way for gpu in found.read().gpus if gpu.id in ids for way in nvidia.links(gpu)]
        for way, host in itertools.product(ways, sorted(hosts)):
            yield replace(way, src=host) if way.dst in ids else replace(way, dst=host)


def _gpu(id: str, host: str) -> Device:
    """A GPU as its driver reports it. Raises PlanError naming those there are, and the host's processor."""
    from flashrt.probes import nvidia

    found = nvidia.Nvidia()
    seen = found.read()
    found.close()
    devices = [device for gpu in seen.gpus if (device := nvidia.device(gpu)) is not None]
    for device in devices:
        if device.id == id:
            return device
    known = ", ".join(device.id for device in devices) or f"none ({seen.reason or 'all are lost'})"
    raise PlanError(f"no device {id!r} here", hint=f"known: {host}; GPUs: {known}")


def survey(devices: Sequence[str] = ("cpu:0",), budgets: Mapping[str, int] = MappingProxyType({})) -> Survey:
    """Everything that can be told of this machine: these devices, GPUs, NPU providers, disks, limits."""
    from flashrt.probes.survey import survey  # only here: it loads onnxruntime

    return survey(machine_picture(devices, budgets))


def sampler(pid: int | None = None) -> Sampler:
    """A sampler of this machine, not yet started: loads, free memory and delivered rates as they change.

    pid: the process whose load counts as own; None for this one.
    """
    # only here, as below: a command that runs a plan starts sooner
    from flashrt.probes.sampler import Sampler

    return Sampler(pid=pid)


def memory_probe() -> Memory:
    """Tells where the memory of this machine and of a process is."""
    from flashrt.probes.memory import Memory

    return Memory()


# ---- measuring ---------------------------------------------------------------------
def measure(seconds: float = 0.5) -> Machine:
    """Measures the host's rates, remembers them, and gives the picture with them."""
    snapshot.remember(snapshot.measure(seconds))
    return machine_picture()


def measure_devices(
    devices: Sequence[str] = ("cpu:0",),
    *,
    seconds: float = 0.5,
    on_step: Callable[[str], None] = lambda what: None,
) -> tuple[str, ...]:
    """Measures these devices of the host, the links between them and the disk, and remembers the figures.

    seconds: for each figure, about. on_step: told what is measured next.
    Gives remarks: what couldn't be measured, and what had company.
    Raises PlanError as `machine_picture` does.
    """
    from flashrt.probes import measuring

    return measuring.measure(
        machine_picture(devices),
        measure_host,
        folder=knobs.cache_folder(),
        seconds=seconds,
        on_step=on_step,
    )


def measure_host(seconds: float = 0.5) -> dict[str, Measured]:
    """Read bandwidth and matrix rates of all the cores this process may use, as "cpu:0/…".

    f32 is numpy's product, the other types are this library's own kernels; so is gemv, which is what products
    of one token read.
    """
    from flashrt.runtime import rates

    measured = snapshot.measure(seconds)
    spec, backend = snapshot.snapshot(measured=measured).devices[0], _backend("cpu")
    kernels = backend.kernels()
    wanted = [dtype for dtype in rates.ROUNDED if rates.kernel_of(dtype) in kernels]
    with closing(backend.open(spec)) as device:
        for dtype in wanted:
            rate = rates.matrix_rate(device, dtype, seconds)
            measured[f"{spec.id}/{dtype}"] = Measured(rate, "measured")
        if rates.GEMV in kernels:
            gemv = rates.gemv_rate(device, seconds, beyond_caches())
            measured[f"{spec.id}/gemv"] = Measured(gemv, "measured")
    return measured


def with_measured_rates(machine: Machine) -> Machine:
    """The machine of a plan with rates as they were measured last; the host's now if they never were."""
    if snapshot.recall() is None:
        measure()
    return with_known_rates(machine)


def with_known_rates(machine: Machine) -> Machine:
    """The machine of a plan with rates and free memory as they are known here now; measures nothing.

    A machine without devices becomes the host.
    """
    host = snapshot.snapshot()

    def measured(device: Device) -> Device:
        if device.kind not in ("cpu", "reference", "null"):
            return device
        try:
            here = snapshot.core_group(host, device.id) if device.cpus else host.devices[0]
        except PlanError:  # cores that this process may not use: what the plan has is all there is
            return device
        return replace(device, read=here.read, rates=here.rates, gemv=here.gemv, free=here.free)

    return replace(machine, devices=tuple(map(measured, machine.devices or host.devices)))


def open_plan(
    plan: Plan,
    *,
    pages: int = 0,
    least: int = 0,
    threads: int | None = None,
    source: BlockSource | None = None,
    poison: bool = False,
    on_progress: Progress | None = None,
    elder: Elder | None = None,
) -> Program:
    """Opens a plan on this machine.

    Raises ProgramError when it was made for another, PlanError when its texts name a device it hasn't,
    DeviceError when a device can't be opened, or has no room.

    pages, least: size of the KV cache, and how much smaller it may be made where a device with memory of its
    own has less free than the plan takes; 0 doesn't look at that.
    threads: of the CPU team; None takes FLASHRT_THREADS, or one per core.
    source: where weights come from, in place of the plan's own.
    on_progress: (kernel, done, of), called while kernels are made ready.
    elder: what another program of the same model has in memory: what can be is shared with it.
    """
    threads = threads or knobs.THREADS.get()
    opened: dict[str, OpenDevice] = {}
    with ExitStack() as failed:
        used = {x.device for v in plan.variants for x in (*v.stream.instrs, *v.stream.blocks)}
        for id in sorted(used):
            spec = plan.machine.device(id)
            backend = _backend(spec.kind)
            _check_device(plan, spec, backend)
            device = opened[id] = backend.open(replace(spec, cores=threads) if threads else spec)
            failed.callback(device.close)
            if on_progress is not None and hasattr(device, "progress"):
                device.progress = on_progress
        host = _open_host(plan)
        poison = poison or knobs.POISON.get()
        pages = room.fitting(plan, opened, pages, least) if least else pages
        ready = Program(plan, opened, host, pages=pages, source=source, poison=poison)
        if elder is not None:
            elder.left_to(ready)
        failed.pop_all()
    return ready


def _open_host(plan: Plan) -> OpenDevice | None:
    """The reference device for host rows; None for a plan without any, which starts sooner."""
    instrs = (i for v in plan.variants for i in v.stream.instrs)
    if not any(isinstance(i, micro.Dispatch) and i.kernel.startswith("host.") for i in instrs):
        return None
    return _backend("reference").open(replace(plan.machine.devices[0], kind="reference", id="host"))


def _check_device(plan: Plan, spec: Device, backend: Backend) -> None:
    used = {
        (i.kernel, i.numerics)
        for v in plan.variants
        for i in v.stream.instrs
        if isinstance(i, micro.Dispatch) and i.device == spec.id and not i.kernel.startswith("host.")
    }
    missing = sorted(f"{kernel} ({numerics})" for kernel, numerics in used - set(backend.kernels()))
    if missing:
        raise ProgramError(
            f"the plan {plan.name} was made for {spec.name} and uses kernels that aren't here: "
            f"{', '.join(missing[:3])}{' …' * (len(missing) > 3)}",
            hint="compile it again on this machine: flashrt compile MODEL -o PLAN",
        )


# ---- compiling ---------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan and whether it came from the cache."""

    plan: Plan
    cached: bool


def obtain(
    model: str,
    options: CompileOptions = CompileOptions(),  # noqa: B008 (frozen)
    *,
    devices: Sequence[str] = ("cpu:0",),
    budgets: Mapping[str, int] = MappingProxyType({}),
    on_stage: Callable[[Stage], None] | None = None,
    fresh: bool = False,
) -> Compiled:
    """The plan for a model: from a plan folder, from the cache, or compiled now.

    devices, budgets: as for `machine_picture`.
    fresh: compile even if the cache has it. Raises FlashrtError's kinds as `compile` does.
    """
    source = models.find(model)
    if source.kind == "plan":
        return Compiled(program.load(Path(source.place)), cached=True)
    fresh = fresh or source.kind == "callable"  # what code returns can't be told beforehand
    machine = machine_picture(devices, budgets)
    key = plan_key(source.identity(), options, machine)
    folder = knobs.cache_folder() / "plans" / key
    if not fresh and (kept := _kept(folder)):
        return kept
    program.check_output(folder)
    with _turn(folder):
        # another process may have made it while this one waited
        if not fresh and (kept := _kept(folder)):
            return kept
        imported = keep_as_chosen(models.read_model(source, context=options.context), options, machine)
        plan = compile_model(imported, machine, options, key=key, on_stage=on_stage)
        _check_host_rows(plan)
        return Compiled(program.save(plan, folder), cached=False)


def _check_host_rows(plan: Plan) -> None:
    """Raises PlanError for an operation that not even the reference implementation has."""
    from flashrt.backends.reference.kernels import read_kernel

    for node in plan.variants[0].physical.nodes:
        if node.op.startswith("host."):
            try:
                read_kernel(node.op)
            except PlanError as error:
                raise PlanError(
                    f"%{node.name} is {node.op.removeprefix('host.')}, which no device can run "
                    "and the reference implementation lacks",
                    hint=error.hint,
                ) from None


def _kept(folder: Path) -> Compiled | None:
    """The plan in the cache; None when there is none, or it is damaged: then it is compiled anew."""
    if not (folder / program.MANIFEST).is_file():
        shutil.rmtree(folder, ignore_errors=True)  # `save` refuses to write over what isn't a plan
        return None
    try:
        return Compiled(program.load(folder), cached=True)
    except ProgramError:
        return None


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One process at a time compiles for a folder of the cache; the others wait for what it makes."""
    lock = folder.with_name(f".{folder.name}.lock")
    with ExitStack() as held:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock.touch()
            held.enter_context(program.locked(lock))
        except OSError as error:
            raise ProgramError(
                f"the cache {folder.parent} can't be written: {error.strerror}",
                hint=f"{knobs.CACHE.name}: {knobs.CACHE.meaning}",
            ) from None
        yield


def seal(folder: Path) -> Plan:
    """Reads a plan whose texts were edited, and checks every law of every level.

    Raises ParseError or LawError naming file or place, ProgramError when it isn't a plan.
    """
    from flashrt.ir import laws  # only here: running a plan doesn't need them

    plan = program.load(folder, edited=True)
    laws.check(plan.logical, stage="model.logical")
    for variant in plan.variants:
        laws.check(variant.physical, stage=f"{variant.name}.physical")
        laws.check(variant.stream, stage=f"{variant.name}.micro")
        _check_doors(plan, variant)
    laws.check_variants([v.stream for v in plan.variants])
    return plan


def _check_doors(plan: Plan, variant: Variant) -> None:
    """Raises ProgramError when a variant's inputs or outputs aren't those of the logical graph."""
    stream, graph = variant.stream, plan.logical
    for what, have, want in (
        (
            "inputs",
            {(i.name, i.type) for i in stream.inputs if i.name != EXPERT_TABLE},
            {(i.name, i.type) for i in graph.inputs},
        ),
        ("outputs", {(o.name, "") for o in stream.outputs}, {(o.name, "") for o in graph.outputs}),
    ):
        if have != want:
            odd = ", ".join(sorted({name for name, _ in have ^ want}))
            raise ProgramError(
                f"{variant.name}.micro and model.logical disagree about the {what}: {odd}",
                hint="declare the same in both",
            )


def compile(
    model: str,
    output: str | Path | None = None,
    *,
    options: CompileOptions | None = None,
    pack: bool = False,
    devices: Sequence[str] = ("cpu:0",),
    budgets: Mapping[str, int] = MappingProxyType({}),
) -> Plan:
    """Compiles a model and, with `output`, writes the plan folder.

    Args:
        model: a .gguf file, Hugging Face folder or repo id, .pt2, .logical, or alias; or a plan folder,
            whose edited texts are then checked and sealed into `output`.
        output: folder to write; None keeps the plan in the cache only.
        pack: copy the weights into the plan instead of referring to the model's files.
        devices, budgets: as for `machine_picture`.

    Raises:
        ModelError, UnsupportedModel: the model can't be read.
        PlanError: it doesn't fit the machine.
        ProgramError: the output can't be written.
    """
    source = models.find(model)
    if source.kind == "plan" and output is not None:
        plan = seal(Path(source.place))
    else:
        plan = obtain(model, options or CompileOptions(), devices=devices, budgets=budgets).plan
    return plan if output is None else program.save(plan, Path(output), pack=pack)


def load(
    plan: str | Path, *, threads: int | None = None, pages: int = 0, live: bool | None = None
) -> Program:
    """Opens a plan folder (or a model, through the cache) as a `Program`; close it after use.

    live: as for `LLM`.
    """
    opened = open_plan(obtain(str(plan)).plan, threads=threads, pages=pages)
    follower = follow(opened, live)
    publish(opened, replanning=_replanning(lambda: opened, lambda: follower))
    return opened


# ---- live --------------------------------------------------------------------------
def follow(program: Program, live: bool | None = None, watching: Sampler | None = None) -> Follower | None:
    """Lets the splits of a program move as the machine changes, and has a device keep those experts of
    another's that are asked for most, until it is closed. None if no split can move.

    live: False leaves all as the plan has it, None takes FLASHRT_LIVE.
    watching: a sampler that somebody else starts and stops; None for one of its own.
    """
    moving, experts = any(v.stream.splits for v in program.plan.variants), program.experts
    if not _live(live) or not (moving or experts):
        return None
    own = watching is None
    watching = watching or sampler()
    follower = _followed(program, watching) if moving else None
    if experts is not None:
        program.when_closed(watching.listen(lambda sample: experts.sampled(sample.at)))
    if own and (follower or experts):
        program.when_closed(watching.stop)
        watching.start()
    return follower


def _followed(program: Program, watching: Sampler) -> Follower | None:
    from flashrt.runtime.follow import Follower

    follower, observe = Follower(program, watching.period), watching.observe
    if not follower.needed:
        return None
    program.when_closed(watching.listen(lambda sample: follower.sampled(sample, observe)))
    program.mover = follower
    program.when_closed(follower.close)
    return follower


def _follower_of(program: Program) -> Follower | None:
    """What moves a program's splits, if it is `follow`'s."""
    from flashrt.runtime.follow import Follower

    return program.mover if isinstance(program.mover, Follower) else None


def _live(live: bool | None) -> bool:
    return knobs.LIVE.get() if live is None else live


def _replanning(
    program: Callable[[], Program],
    follower: Callable[[], Follower | None],
    replanner: Replanner | None = None,
) -> Callable[[], Replanning | None]:
    """What is published of the live loop and of plans that were made anew."""

    def now() -> Replanning | None:
        loop, cache = follower(), program().experts
        small = loop.metrics() if loop else None
        kept = cache.metrics() if cache else None
        age = small.age_of_last_plan if small else None
        recompiles, because = replanner.told() if replanner else (0, "")
        if age is None and not because and kept is None:
            return None
        planned_at = None if age is None else time.time() - age
        shares = (kept.hit_share, kept.exchanged, kept.holding) if kept else (None, 0, "")
        return Replanning(planned_at, small.plan_switches if small else 0, recompiles, because, *shares)

    return now


class _Rooms:
    """What a language model's replanner needs of the engine (`runtime.replan.Rooms`)."""

    def __init__(self, llm: LLM, sequences: int, threads: int | None, watching: Sampler | None) -> None:
        self._llm, self._sequences, self._threads, self._watching = llm, sequences, threads, watching

    def compile(self, plan: Plan, machine: Machine, least: int, *, urgent: bool) -> Recompilation:
        from flashrt.recompile import Recompilation

        return Recompilation(plan, with_known_rates(machine), least, urgent=urgent)

    def open(self, plan: Plan, pages: int, elder: Elder | None) -> Program:
        program = open_plan(plan, pages=pages, threads=self._threads, elder=elder)
        if self._watching is not None:
            follow(program, True, self._watching)
        return program

    def pages(self, plan: Plan, spare: int | None) -> int:
        free = snapshot.snapshot().devices[0].free if spare is not None else None
        free = None if free is None or spare is None else free + spare
        return room.page_count(plan, self._llm.context, self._sequences, free)

    def exchanged(self, program: Program) -> None:
        self._llm._taken_over(program)


def _watch_memory(replanner: weakref.ref[Replanner], stop: threading.Event) -> None:
    """Has a replanner look at the machine, until `stop` or nobody has it any more."""
    if stop.wait(ALONE):
        return
    watching = sampler()
    try:
        while not stop.wait(ALONE) and (looking := replanner()) is not None:
            looking.sampled(watching.sample())
            del looking
    finally:
        watching.stop()


# ---- language models ---------------------------------------------------------------
class LLM:
    """A language model, ready to generate. Close it, or use it in a `with`.

    Args:
        model: as for `compile`.
        sequences: how many sequences may be in the cache at once, each up to the context length.
        threads: of the CPU team; None takes one per core.
        options, devices, budgets: as for `compile`.
        plan: a plan of the model that is there already.
        on_progress: as for `open_plan`.
        live: whether splits between devices move, and the plan is made anew, as the machine changes; None
            takes FLASHRT_LIVE.

    remarks: what isn't as it was asked for.
    """

    def __init__(
        self,
        model: str,
        *,
        sequences: int = 1,
        threads: int | None = None,
        options: CompileOptions | None = None,
        devices: Sequence[str] = ("cpu:0",),
        budgets: Mapping[str, int] = MappingProxyType({}),
        plan: Plan | None = None,
        on_progress: Progress | None = None,
        live: bool | None = None,
    ) -> None:
        self.plan = plan or obtain(model, options or CompileOptions(), devices=devices, budgets=budgets).plan
        if self.plan.chat is None:
            raise ModelError(
                f"{self.plan.name} isn't a language model with a tokenizer",
                hint="run it with flashrt.load(...).call(inputs), or flashrt run MODEL --input IN.npz "
                "--output OUT.npz",
            )
        self.chat = Chat(self.plan.chat)
        self.chat.prepare()
        self.context = self.plan.chat.context
        free = snapshot.snapshot().devices[0].free
        pages = room.page_count(self.plan, self.context, sequences, free)
        least = min(pages, pages_for(self.context))
        self.program = open_plan(
            self.plan, pages=pages, least=least, threads=threads, on_progress=on_progress
        )
        self.remarks = room.remarks(self.plan, pages, self.program.pages)
        pages = self.program.pages
        most = max(s.hi for v in self.plan.variants for s in v.stream.symbols if s.name == "S")
        self.generator = Generator(
            lambda *given: self.program.call(*given),  # whichever it is by then
            context=self.context,
            eos=self.plan.chat.eos,
            pages=pages,
            max_tokens_per_step=self.program.max_tokens,
            max_sequences=most,
            text=self.chat.stream,
            vocabulary=vocabulary(self.plan),
            begin=lambda *given: self.program.begin(*given),
        )
        self._ids = itertools.count(1)
        self.live: Follower | None = None
        self.replanner: Replanner | None = None
        self._ended = ExitStack()
        if _live(live):
            self._follow(sequences, threads)
        loop = _replanning(lambda: self.program, lambda: self.live, self.replanner)
        self._told = Publisher(self.program, self.generator, loop)
        self._told.start()

    def _follow(self, sequences: int, threads: int | None) -> None:
        """Lets splits move, and plans be made anew, as the machine changes."""
        from flashrt.runtime.replan import Replanner

        several = len(self.plan.machine.devices) > 1
        watching = sampler() if several else None
        self.live = follow(self.program, True, watching) if several else None
        rooms = _Rooms(self, sequences, threads, watching)
        replanner = self.replanner = Replanner(self.program, self.generator, rooms)
        self.generator.keeper = replanner
        self._tell_of_plans()
        self._ended.callback(replanner.close)
        if watching is not None:
            weakref.finalize(self, watching.stop)  # where nobody closes it
            self._ended.callback(watching.stop)
            sampled = weakref.WeakMethod(replanner.sampled)
            watching.listen(lambda sample: (found := sampled()) and found(sample))
            watching.start()
        else:
            stop = threading.Event()
            args = (weakref.ref(replanner), stop)
            threading.Thread(target=_watch_memory, args=args, name="flashrt-memory", daemon=True).start()
            self._ended.callback(stop.set)

    def _taken_over(self, program: Program) -> None:
        """Another program runs from now on."""
        self.program, self.plan, self.live = program, program.plan, _follower_of(program)
        self._tell_of_plans()
        self._told.turn_to(program)

    def _tell_of_plans(self) -> None:
        """Has the live loop's metrics tell of plans that were made anew, too."""
        if self.live is not None and self.replanner is not None:
            self.live.recompiled = self.replanner.told

    def tokens(self, prompt: str | Sequence[Message], *, raw: bool = False) -> list[int]:
        """Token ids of a prompt: through the chat template, or as it stands with `raw`.

        Raises RequestError for an empty prompt where the tokenizer adds no BOS.
        """
        if raw:
            if not isinstance(prompt, str):
                raise RequestError("a raw prompt is one text, not messages")
            return self.chat.prompt(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return self.chat.conversation(messages)

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        raw: bool = False,
        sampling: Sampling | None = None,
        **choices: Any,
    ) -> Completion:
        """Generates the whole answer. `choices` are the fields of `Sampling`."""
        return self.generate_many([prompt], raw=raw, sampling=sampling, **choices)[0]

    def generate_many(
        self,
        prompts: Sequence[str | Sequence[Message]],
        *,
        raw: bool = False,
        sampling: Sampling | None = None,
        **choices: Any,
    ) -> list[Completion]:
        """Generates answers to several prompts together, in flat steps; in the order of the prompts."""
        how = sampling or Sampling(**choices)
        requests = [self.request(p, how, raw=raw) for p in prompts]
        for request in requests:
            self.generator.add(request)
        return self.generator.run()

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        raw: bool = False,
        sampling: Sampling | None = None,
        **choices: Any,
    ) -> Iterator[str]:
        """Gives the answer in pieces of whole characters, as they come."""
        return self.generator.stream(self.request(prompt, sampling or Sampling(**choices), raw=raw))

    def request(self, prompt: str | Sequence[Message], sampling: Sampling, *, raw: bool = False) -> Request:
        """A request for the generator."""
        return Request(f"r{next(self._ids)}", tuple(self.tokens(prompt, raw=raw)), sampling)

    def close(self) -> None:
        """Ends threads and drops memory. Idempotent."""
        self._ended.close()
        self._told.close()
        self.program.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def vocabulary(plan: Plan) -> int:
    """How many token ids the model knows: the columns of its logits."""
    stream = plan.variants[0].stream
    logits = next(o.value.removeprefix("%") for o in stream.outputs if o.name == "logits")
    return size(next(s for s in stream.slots if str(s.id) == logits).type.shape[-1], {})
