"""A GPU too small for the model: small steps compute the rest on the processor, large ones bring it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from benchmarks.llama_shape import Shape, imported
from flashrt.compiler import CompileOptions, compile_model
from flashrt.errors import PlanError
from flashrt.frontend.imported import Imported
from flashrt.ir import laws, micro, physical
from flashrt.ir.clock import simulate
from flashrt.ir.order import loaded_at_start
from flashrt.ir.text import read_micro, read_physical, to_text
from flashrt.machine import Link, Machine
from flashrt.passes import variants
from flashrt.passes.lending import SMALL
from flashrt.passes.pieces import PIECES
from flashrt.passes.pipeline import step_time
from flashrt.passes.spread import Shared, Whole
from flashrt.passes.task import seats_of
from flashrt.passes.variants import ANSWER, PROMPT
from flashrt.program import Plan, Variant
from flashrt.weights.index import WeightIndex
from tests.passes.examples import device, known
from tests.passes.models import model

GIB = 1 << 30
GPU, CPU = "gpu:0", "cpu:0"
QUARTER = Shape(layers=8, vocab=32064, context=1024)  # of an 8B model: its layers, fewer of them
WHOLE = Shape(context=2304)
FEW, MORE = 580 << 20, 850 << 20  # bytes of a GPU for a quarter and a half of it, results and ring included


def h200(limit: int, link: float = 55e9, gemv: float = 0.0) -> Machine:
    """The GPU with that limit, and sixteen cores, 26 microseconds there and back. gemv: the share of what the
    memory gives, that products get; 0 where it wasn't measured."""
    gpu = device(
        GPU, memory=139 * GIB, read=known(4.36e12), launch=known(2.0), limit=limit,
        rates={"f32": known(5e13), "i8": known(4e14), "bf16": known(6e14)},
    )  # fmt: skip
    rates = {"f32": known(2e12), "i8": known(4e12), "bf16": known(8e12)}
    cpu = device(CPU, memory=128 * GIB, read=known(74.6e9), launch=known(0.5), rates=rates, cores=16)
    cpu = replace(cpu, gemv=known(gemv * cpu.read.value) if gemv else None)
    ways = [Link(a, b, known(link), known(13.0)) for a, b in ((CPU, GPU), (GPU, CPU))]
    return Machine((cpu, gpu), (*ways, Link("disk", CPU, known(2e9), known(50.0))))


def compiled(shape: Shape, limit: int, numerics: str = "fast", link: float = 55e9, gemv: float = 0.0) -> Plan:
    return _compiled(shape, limit, numerics, link, gemv)  # one key, however the defaults are given


@cache
def _compiled(shape: Shape, limit: int, numerics: str, link: float, gemv: float) -> Plan:
    options = CompileOptions(shape.context, 512, 4, numerics=numerics)
    return compile_model(imported(shape), h200(limit, link, gemv), options)


CASES = [pytest.param(QUARTER, FEW, id="few"), pytest.param(QUARTER, MORE, id="more")]
CASES += [pytest.param(WHOLE, n * GIB, id=f"{n} GiB", marks=pytest.mark.slow) for n in (2, 3, 4)]
hybrid = pytest.mark.parametrize(("shape", "limit"), CASES)


def where(variant: Variant, op: str) -> Counter[str]:
    """How many nodes of an operation each device has."""
    return Counter(n.device for n in variant.physical.nodes if n.op == op)


def blocks(variant: Variant, device: str, home: str) -> dict[str, int]:
    """Bytes by weight."""
    return {
        b.name: b.bytes
        for b in variant.stream.blocks
        if (b.device, b.home) == (device, home) and b.bytes > SMALL
    }


def passing(variant: Variant) -> dict[str, int]:
    """Bytes of weights that pass through the GPU, by the weight that the host's memory keeps."""
    whole, found = {w.name: w.of or w.name for w in variant.stream.weights}, Counter[str]()
    for name, nbytes in blocks(variant, GPU, "ring").items():
        found[whole[name]] += nbytes
    return dict(found)


def taken(plan: Plan, device: str) -> int:
    """Bytes that all variants together take of a device: they share weights and state, else take turns."""
    kept = {
        b.name: b.bytes
        for v in plan.variants
        for b in v.stream.blocks
        if (b.device, b.home) == (device, "resident")
    }
    turns = (
        max(dict(getattr(v.stream, kind)).get(device, 0) for v in plan.variants)
        for kind in ("arenas", "rings")
    )
    state = max(b.state for v in plan.variants for b in v.budgets if b.device == device)
    return sum(kept.values()) + sum(turns) + state


@hybrid
def test_small_steps_compute_where_weights_lie(shape: Shape, limit: int) -> None:
    """State and attention on the GPU, weights that don't fit it with the processor, where most of their
    products are, and the others pass; little crosses."""
    small, _ = compiled(shape, limit).variants
    assert where(small, "attention") == {GPU: shape.layers}
    assert {b.device: b.state for b in small.budgets}[CPU] == 0
    passing, kept = blocks(small, GPU, "ring"), blocks(small, CPU, "resident")
    assert passing.items() <= kept.items()
    assert 2 * sum(passing.values()) < sum(n for name, n in kept.items() if name != "embed_tokens.weight")
    products = where(small, "linear")
    assert products[CPU] > 0 and products.total() == 4 * shape.layers + 1
    assert where(small, "transfer").total() <= products[CPU] + 8
    assert not small.physical.splits and not any(n.shard or n.part for n in small.physical.nodes)


@hybrid
def test_large_steps_bring_them(shape: Shape, limit: int) -> None:
    """All that the processor keeps of the layers passes through the GPU, and at most a part of the head, of
    which a prompt needs one row."""
    small, large = compiled(shape, limit).variants
    assert where(large, "attention") == {GPU: shape.layers}
    assert where(large, "linear")[GPU] >= 4 * shape.layers
    kept, passed = blocks(small, CPU, "resident"), passing(large)
    assert {k: n for k, n in passed.items() if "layers" in k} == {
        k: n for k, n in kept.items() if "layers" in k
    }
    assert passed.get("lm_head.weight", 0) < 0.9 * kept.get("lm_head.weight", 1)
    assert blocks(small, GPU, "resident") == blocks(large, GPU, "resident")
    assert large.stream.rings[0][0] == GPU and len(large.stream.rings) == 1
    assert "from the host's memory" in next(n.because for n in large.physical.nodes if n.op == "linear")


def test_large_matrices_pass_in_pieces() -> None:
    """Each a block of its own; together they are all rows of the weight. Of a head that is larger than the
    ring the processor computes the channels that the link does not bring, and says so; texts keep it all."""
    small, large = compiled(replace(QUARTER, vocab=128256), FEW).variants
    weights = {w.name: w for w in large.stream.weights}
    ends = defaultdict[str, list[tuple[int, ...]]](list)
    for name in blocks(large, GPU, "ring"):
        if (whole := weights[name].of) and blocks(small, CPU, "resident")[whole]:
            ends[whole].append(weights[name].rows)
    head = ends.pop("lm_head.weight")
    assert len(ends) >= 4 and all("gate_up" in name for name in ends)
    for name, rows in ends.items():
        assert len(rows) > 1 and [a for a, _ in rows[1:]] == [b for _, b in rows[:-1]]
        assert (rows[0][0], rows[-1][1]) == (0, weights[name].type.shape[0])
    ring = dict(large.stream.rings)[GPU]
    assert max(blocks(large, GPU, "ring").values()) <= 1.2 * ring / PIECES
    mine = [n for n in large.physical.nodes if n.of == "lm_head" and n.device == CPU and n.op == "linear"]
    assert [n.shard for n in mine] == [physical.Range(head[-1][1], 128256)] and head[0][0] == 0
    assert "while the link brings the weights of others" in mine[0].because
    seats = seats_of(large.physical)
    assert seats["lm_head"] == Shared((GPU, CPU), (0, head[-1][1], 128256))
    assert all(seats[name.removesuffix(".weight")] == Whole(GPU) for name in ends)
    assert read_physical(to_text(large.physical)) == large.physical
    assert read_micro(to_text(large.stream)) == large.stream
    assert not laws.violations(large.physical) and not laws.violations(large.stream)


@hybrid
def test_loading_is_hidden(shape: Shape, limit: int) -> None:
    """While weights pass, either the link is busy nearly always, or the GPU is."""
    large = compiled(shape, limit).variants[1]
    line = simulate(large.stream, {}, 1)
    loads = [s for s in line.spans if isinstance(large.stream.instrs[s.index], micro.Prefetch)]
    spent = sum(s.end - s.start for s in loads)
    computed = line.busy()[GPU, "compute"] * line.step_time
    assert spent > 0.9 * (loads[-1].end - loads[0].start) or computed > 0.75 * line.step_time


@pytest.mark.parametrize("gemv", [0.9, 0.7], ids=str)
def test_weights_pass_while_the_processor_computes(gemv: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small steps, where its products leave the memory something to give: the step is sooner through, and
    the first blocks are there when it begins."""
    plan = compiled(QUARTER, FEW, gemv=gemv)
    monkeypatch.setattr(variants, "_passing", lambda v, made, *_: made)
    small, without = plan.variants[0], _compiled.__wrapped__(QUARTER, FEW, "fast", 55e9, gemv).variants[0]
    assert small.stream.rings and not without.stream.rings
    assert step_time(small.stream, plan.machine) < 0.97 * step_time(without.stream, plan.machine)
    assert loaded_at_start(small.stream)
    for variant in plan.variants:
        assert not laws.violations(variant.physical) and not laws.violations(variant.stream)
        assert passing(variant).items() <= blocks(variant, CPU, "resident").items()
    assert blocks(small, GPU, "resident") == blocks(plan.variants[1], GPU, "resident")
    assert taken(plan, GPU) <= FEW


@hybrid
def test_budgets(shape: Shape, limit: int) -> None:
    """Of all variants together, though each keeps its own laws, too."""
    plan = compiled(shape, limit)
    for variant in plan.variants:
        assert not laws.violations(variant.physical) and not laws.violations(variant.stream)
    assert 0.8 * limit < taken(plan, GPU) <= limit


@hybrid
@pytest.mark.parametrize("numerics", [pytest.param("exact", marks=pytest.mark.slow), "fast"])
def test_the_estimate_of_small_steps_is_honest(shape: Shape, limit: int, numerics: str) -> None:
    """It is no less than the bytes of all weights take at the rates of their memories, and little more."""
    plan = compiled(shape, limit, numerics)
    small = plan.variants[0]
    read = Counter[str]()
    for block in small.stream.blocks:
        read[block.device] += block.bytes if block.name != "embed_tokens.weight" else 0
    each = {d: 1e6 * n / plan.machine.device(d).read.value for d, n in read.items()}
    took = step_time(small.stream, plan.machine)
    # while weights pass, the GPU computes beside the processor
    assert max(each.values()) <= took and 0.85 <= sum(each.values()) / took <= 1.05


def test_the_border_follows_from_the_costs() -> None:
    """Steps go to the variant that is sooner through; a slower link moves the border up."""
    borders = []
    for link in (55e9, 30e9):
        plan = compiled(QUARTER, FEW, link=link)
        small, large = plan.variants
        took = {
            (v.name, t): step_time(v.stream, plan.machine, {"T": t})
            for v in plan.variants
            for t in (small.hi, small.hi + 1)
        }
        assert took["small", small.hi] <= took["large", small.hi] * 1.1
        assert took["large", large.lo] <= took["small", large.lo] * 1.1
        borders.append(small.hi)
    assert 1 <= borders[0] < borders[1] < 511


def test_a_gpu_with_room_for_everything() -> None:
    """Nothing else is used where all fits."""
    plan = compiled(QUARTER, 2 * GIB)
    for variant in plan.variants:
        assert {n.device for n in variant.physical.nodes} == {GPU} and not variant.stream.rings


def test_the_cache_overflows_only_where_it_must() -> None:
    """A cache that doesn't fit the GPU whole: it is in the host's memory, and there is still a plan."""
    plan = compiled(replace(QUARTER, context=16384), GIB // 2, "exact")
    state = {b.device: b.state for b in plan.variants[0].budgets}
    assert state[CPU] > 0 and sum(state.values()) == GIB
    assert 0 < taken(plan, GPU) <= GIB // 2


def test_experts_are_on_the_processor() -> None:
    """Of a mixture of experts a token reads few, so they are what the GPU can spare best; attention stays,
    and each layer's work crosses once there and once back."""
    graph = model(
        4, hidden=1024, ffn=512, vocab=8192, tied=False, tokens=512, context=512, experts=32, top_k=2
    )
    options = CompileOptions(context=512, tokens=512, sequences=1)
    plan = compile_model(Imported(graph, WeightIndex((), {})), h200(90 << 20), options)
    small, large = plan.variants
    experts = where(small, "expert_linear")
    assert where(small, "attention") == {GPU: 4} and experts[CPU] >= 2 * experts[GPU]
    on_gpu = {n.name for n in small.physical.nodes if n.op == "linear" and n.device == GPU}
    assert {f"layers.{i}.qkv" for i in range(4)} <= on_gpu and {f"layers.{i}.o" for i in range(4)} <= on_gpu
    assert where(small, "transfer").total() <= 2 * 4 + 3
    assert where(large, "expert_linear") == {GPU: 8} and large.stream.rings


def test_a_host_with_no_room_to_spare() -> None:
    """What it lends counts once: blocks are loaded as far ahead as where the host's memory is large."""
    cpu, gpu = h200(FEW, gemv=0.7).devices
    wide = compiled(QUARTER, FEW, gemv=0.7)
    held = sum(b.bytes for b in wide.variants[0].stream.blocks if b.device == CPU)
    on = replace(wide.machine, devices=(replace(cpu, limit=held * 8 // 5), gpu))
    tight = compile_model(imported(QUARTER), on, CompileOptions(QUARTER.context, 512, 4, numerics="fast"))
    for one, other in zip(tight.variants, wide.variants, strict=True):
        assert dict(one.stream.rings)[GPU] > 0.9 * dict(other.stream.rings)[GPU]
        assert step_time(one.stream, on) <= step_time(other.stream, wide.machine) * 1.02


def test_link_and_processor_share_a_memory() -> None:
    """Each gets less; groups of cores get together what the whole processor gets, and links that are only
    assumed are slowed, too. Other devices stay as they are."""
    machine = h200(FEW, gemv=0.8)
    cpu, gpu = machine.devices
    shared = variants._memory_shared(machine)
    assert (
        shared.link(CPU, GPU).rate.value == variants.BESIDE * 55e9
        and shared.link(GPU, CPU).rate.value == 55e9
    )
    own = shared.device(CPU)
    assert own.gemv is not None and 0.3 * cpu.read.value < own.gemv.value < 0.8 * cpu.read.value
    assert shared.device(GPU) == gpu and own.read == cpu.read
    half = replace(cpu, read=known(cpu.read.value / 2), gemv=known(0.4 * cpu.read.value), pool="host")
    groups = tuple(replace(half, id=id) for id in ("cpu:0-7", "cpu:8-15"))
    links = tuple(Link(g.id, GPU, known(55e9), known(13.0)) for g in groups)
    apart = variants._memory_shared(Machine((*groups, gpu), links))
    gemv = [d.gemv.value for d in apart.devices if d.gemv is not None]
    assert len(gemv) == 2 and sum(gemv) == pytest.approx(own.gemv.value)
    alone = variants._memory_shared(Machine((cpu, gpu)))
    assert alone.link(CPU, GPU).rate.value < Machine((cpu, gpu)).link(CPU, GPU).rate.value
    assert variants._memory_shared(Machine((cpu,))) == Machine((cpu,))


TINY = Imported(model(3, hidden=512, ffn=1536, vocab=4096, tied=False, tokens=64), WeightIndex((), {}))
TINY_OPTIONS = CompileOptions(context=256, tokens=64, sequences=1)


def request(plan: Plan) -> float:
    """Microseconds of a prompt and its answer."""
    small, large = (step_time(v.stream, plan.machine) for v in plan.variants)
    return max(1.0, PROMPT / plan.variants[1].hi) * large + ANSWER * small


@settings(max_examples=3, deadline=None)
@example(7344816, 1e10, 1.5e10, 7.7e10, 0.5, 1.4e12)  # the head stays for small steps, and large ones pass
@example(7344816, 1.4e12, 7.7e10, 1.5e10, 19.0, 3.2e11)  # small steps stream, too
@given(
    st.integers(3 << 20, 10 << 20), st.floats(1e10, 4e12), st.floats(1e9, 1e11), st.floats(1e9, 1e11),
    st.floats(0.5, 50.0), st.floats(1e11, 1e13),
)  # fmt: skip
def test_whatever_the_machine(
    limit: int, read: float, link: float, host: float, latency: float, rate: float
) -> None:
    """Within the budget, and a request takes no longer than on the one device that is best alone."""
    cpu, gpu = h200(limit).devices
    gpu = replace(gpu, read=known(read), rates={"f32": known(rate * 4)})
    cpu = replace(cpu, read=known(host), rates={"f32": known(rate / 4)})
    ways = [Link(a, b, known(link), known(latency)) for a, b in ((CPU, GPU), (GPU, CPU))]
    on = Machine((cpu, gpu), tuple(ways))
    try:
        plan = compile_model(TINY, on, TINY_OPTIONS)
    except PlanError:
        assume(False)
    for variant in plan.variants:
        assert not laws.violations(variant.stream)
    for d in {b.device for v in plan.variants for b in v.budgets}:
        assert taken(plan, d) <= on.device(d).budget
    for alone in on.devices:
        try:
            one = compile_model(TINY, replace(on, devices=(alone,)), TINY_OPTIONS)
        except PlanError:
            continue
        assert request(plan) <= request(one) * 1.02, alone.id
