"""Runs the pipeline on an imported model: for each variant the passes, the laws at every door."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flashrt
from flashrt.errors import PlanError
from flashrt.frontend.imported import Imported
from flashrt.ir import logical, micro, physical
from flashrt.ir.ops import (
    ATTENTION_BF16,
    ATTENTION_CACHED,
    ATTENTION_EXACT,
    LINEAR_BF16,
    LINEAR_EXACT,
    LINEAR_I8,
)
from flashrt.ir.types import Symbol
from flashrt.llm.scheduler import history_size
from flashrt.machine import Machine
from flashrt.program import Plan, Variant
from flashrt.weights.index import EXACT_LAYOUT

if TYPE_CHECKING:
    from flashrt.passes import pipeline

Able = Callable[[Iterable[bool]], bool]  # `any` or `all` of the devices
Range = tuple[str, int, int]  # a variant, its lowest and its highest T

# mode → variant → numerics, best first; variants that aren't named are as the small one
MODES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "exact": {"small": (LINEAR_EXACT,)},
    "int8": {"small": (LINEAR_I8,)},
    "fast": {"small": (LINEAR_I8,), "large": (LINEAR_BF16, LINEAR_I8)},
}
SMALL = 16  # tokens in a step up to which the "small" variant runs (decode of some sequences)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What the user may choose.

    context: the longest sequence (None: what the model was trained for). tokens: the most tokens of one
    step; longer prompts run in chunks. sequences: the most sequences of one step. without: performance
    passes to leave out. pins: "PATTERN=DEVICE", what has to be where (see passes/pins.py). numerics: of the
    linears, as `precision` knows them, or a name of MODES:

    exact: float32 everywhere. int8: activations rounded to INT8 blocks in every step, whatever its size.
    fast: INT8 in small steps, bf16 in large ones, where a device has kernels for that: a token's result
    then depends, within rounding, on how many others share its step.

    quantize, quantize_exclude: how matrices are kept, see passes/storage.py ("": as their files suggest).
    """

    context: int | None = None
    tokens: int = 512
    sequences: int = 16
    without: tuple[str, ...] = ()
    numerics: str = "exact"
    pins: tuple[str, ...] = ()
    quantize: str = ""
    quantize_exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """One pass that ran: for progress, timing and dumps."""

    variant: str
    name: str
    seconds: float
    value: Any = field(repr=False)


def keep_as_chosen(imported: Imported, options: CompileOptions, machine: Machine) -> Imported:
    """The model with its matrices' layouts as the user wants them and all devices can read them.

    Raises PlanError (see `storage`).
    """
    from flashrt.passes import storage

    graph = imported.graph
    if options.quantize:
        exact = _exact(imported)
        graph = storage.storage(graph, options.quantize, options.quantize_exclude, exact)
    lossless = options.quantize == storage.LOSSLESS
    graph = storage.readable(graph, machine, lossless=lossless)
    return replace(imported, graph=storage.tables(graph, machine))


def _exact(imported: Imported) -> dict[str, str]:
    """The layout that holds what the file has, of each weight that a file has."""
    tensors = imported.weights.tensors
    return {
        w.name: formats[0] if len(formats) == 1 else "f32"
        for w in imported.graph.weights
        if all(s in tensors for s in w.sources)
        for formats in [list({EXACT_LAYOUT.get(tensors[s].format, "f32") for s in w.sources})]
    }


def compile_model(
    imported: Imported,
    machine: Machine,
    options: CompileOptions,
    *,
    key: str = "",
    on_stage: Callable[[Stage], None] | None = None,
) -> Plan:
    """A model → a plan for the machine.

    Raises:
        PlanError: it can't be placed on the machine.
        LawError: the model's graph breaks a law, as a `.logical` written by hand may, or a pass broke one
            (a defect of ours); the message says which.
    """
    # passes and laws are imported when something is compiled: a plan from the cache starts without them
    from flashrt.ir import laws

    graph = imported.graph
    laws.check(graph, stage="as it was read")
    ranges, planned = _planned(graph, machine, options, on_stage)
    variants = [
        Variant.of(name, lo, hi, planned[name].physical, replace(planned[name].stream, name=name))
        for name, lo, hi in ranges
    ]
    laws.check_variants([v.stream for v in variants])
    return Plan(
        name=graph.name,
        key=key,
        version=flashrt.__version__,
        options=asdict(options),
        graph=planned[variants[0].name].logical,
        variants=tuple(variants),
        machine=machine,
        weights=imported.weights,
        constants=imported.constants,
        chat=imported.chat,
        text=imported.text,
    )


def _ranges(graph: logical.Graph, options: CompileOptions, small: int = SMALL) -> list[Range]:
    """The variants; only a language model has more than one, 0…0 where there is no T."""
    if not graph.states:
        return [next((("all", s.lo, s.hi) for s in graph.symbols if s.name == "T"), ("all", 0, 0))]
    if options.tokens <= small:
        return [("small", 1, options.tokens)]
    return [("small", 1, small), ("large", small + 1, options.tokens)]


def _narrowed(graph: logical.Graph, lo: int, hi: int, options: CompileOptions) -> logical.Graph:
    """A language model's graph with the symbols' ranges of one variant: no step has more rows or sequences
    than tokens. In other graphs the same names may mean anything."""
    if not graph.states:
        return graph

    # the cache is planned for one sequence of the whole context
    pages = next((s.hi for s in graph.symbols if s.name == "M"), 1)

    def narrow(symbol: Symbol) -> Symbol:
        if symbol.name == "T":
            return replace(symbol, lo=lo, hi=hi, hint=lo if lo == 1 else hi)
        if symbol.name in ("N", "S"):
            return replace(symbol, hi=min(symbol.hi, options.sequences, hi), hint=1)
        if symbol.name == "P":
            return replace(symbol, hint=pages)
        if symbol.name == "H":
            return replace(symbol, hi=history_size(symbol.hi))
        return symbol

    return replace(graph, symbols=tuple(map(narrow, graph.symbols)))


def _planned(
    graph: logical.Graph,
    machine: Machine,
    options: CompileOptions,
    on_stage: Callable[[Stage], None] | None,
) -> tuple[list[Range], dict[str, pipeline.Planned]]:
    """Every variant, by name, so that they can take turns: state and weights lie where all look for them.

    What only some devices can compute isn't asked for where there is no plan then.
    """
    names = [name for name, _, _ in _ranges(graph, options)]
    chosen, common = ({n: _options(n, machine, options, how) for n in names} for how in (any, all))
    try:
        return _planned_with(graph, machine, options, chosen, on_stage)
    except PlanError:
        if common == chosen:
            raise
        return _planned_with(graph, machine, options, common, on_stage)


def _planned_with(
    graph: logical.Graph,
    machine: Machine,
    options: CompileOptions,
    chosen: Mapping[str, pipeline.Options],
    on_stage: Callable[[Stage], None] | None,
) -> tuple[list[Range], dict[str, pipeline.Planned]]:
    """The same with each variant's options. Raises PlanError."""
    from flashrt.passes import pipeline, variants

    ranges = _ranges(graph, options)
    doors = {name: _door(name, on_stage) for name, _, _ in ranges}
    ready = {
        name: pipeline.prepare(_narrowed(graph, lo, hi, options), chosen[name], check=doors[name])
        for name, lo, hi in reversed(ranges)
    }
    planned: dict[str, pipeline.Planned] = {}
    if len(machine.devices) == 1:
        room: Mapping[str, int] = {}
        for name, prepared in ready.items():
            own = replace(chosen[name], weight_bytes=room)
            planned[name] = pipeline.plan(prepared, machine, own, check=doors[name])
            # the widest variant leaves the least room; with the same room all keep the same weights resident
            room = room or pipeline.weight_room(planned[name].physical.budgets)
        return ranges, planned

    def wanted(ranges: list[Range]) -> list[variants.Variant]:
        out = []
        for name, lo, hi in ranges:
            symbols = {s.name: s for s in _narrowed(graph, lo, hi, options).symbols}
            own = replace(ready[name], symbols=tuple(symbols.get(s.name, s) for s in ready[name].symbols))
            out.append(variants.Variant(name, own, chosen[name], doors[name]))
        return out

    # small steps are by far the most, so they decide where the state lies
    manner, small = variants.choose(wanted(ranges), machine)
    moved = ranges if small is None else _ranges(graph, options, small)
    try:
        return moved, variants.plan_all(wanted(moved), machine, manner)
    except PlanError:
        if moved == ranges:
            raise
        return ranges, variants.plan_all(wanted(ranges), machine, manner)  # which has been possible


def _options(variant: str, machine: Machine, options: CompileOptions, able: Able = any) -> pipeline.Options:
    from flashrt.passes import pipeline
    from flashrt.passes.pins import read_pin

    numerics = numerics_of(options.numerics, variant, machine, able)
    return pipeline.Options(
        numerics=numerics,
        few=numerics_of(options.numerics, "small", machine, able),
        attention=attention_of(options.numerics, numerics, machine, able),
        disabled=frozenset(options.without),
        pins=tuple(map(read_pin, options.pins)),
        sums=options.numerics == "fast",
        plain=all(d.supports("linear.bf16", LINEAR_BF16) for d in machine.devices),
    )


def _door(variant: str, on_stage: Callable[[Stage], None] | None) -> Callable[[str, object], None]:
    """What checks and reports each pass of a variant."""
    from flashrt.ir import laws

    last = time.perf_counter()

    def door(name: str, value: object) -> None:
        nonlocal last
        now = time.perf_counter()
        # costs and cuts are tables, not levels; what `place` makes has its laws once `transfer` is through
        if isinstance(value, logical.Graph | physical.Graph | micro.Stream) and name != "place":
            laws.check(value, stage=f"after {name}")
        if on_stage is not None:
            on_stage(Stage(variant, name, now - last, value))
        last = time.perf_counter()

    return door


def numerics_of(mode: str, variant: str, machine: Machine, able: Able = any) -> str:
    """Numerics of one variant's linears: the first of the mode's that a device has kernels for.

    able: `all` where every device must have them.
    """
    if mode not in MODES:
        return mode
    wanted = MODES[mode].get(variant, MODES[mode]["small"])
    kernel = "linear.q4.16x32"
    return next((n for n in wanted if able(d.supports(kernel, n) for d in machine.devices)), LINEAR_EXACT)


def attention_of(mode: str, numerics: str, machine: Machine, able: Able = any) -> str:
    """Numerics of a variant's attention: in the fast mode the cache is bf16 for all variants, and attention
    beside products in bf16 is so, too, where a device has kernels for that."""
    if mode != "fast":
        return ATTENTION_EXACT
    wanted = (ATTENTION_BF16, ATTENTION_CACHED) if numerics == LINEAR_BF16 else (ATTENTION_CACHED,)
    known = (n for n in wanted if able(d.supports("attention", n) for d in machine.devices))
    return next(known, ATTENTION_EXACT)


@cache
def code_digest() -> str:
    """Identifies the code that makes plans: a plan made by other code isn't reused."""
    root = Path(flashrt.__file__).parent
    digest = hashlib.sha256()
    files = ("layouts.py", "machine.py", "compiler.py", "program.py")
    for room in ("ir", "passes", "frontend", "weights", *files):
        place = root / room
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def plan_key(model: str, options: CompileOptions, machine: Machine) -> str:
    """The cache key of a plan. model: identifies the model's bytes."""
    facts: Mapping[str, Any] = {
        "model": model,
        "options": asdict(options),
        "machine": machine.fingerprint(),
        "version": flashrt.__version__,
        "code": code_digest(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
