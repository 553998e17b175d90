"""A step on a GPU that begins while the one before it runs: the same tokens, whoever is late."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashrt.backend import Ahead
from flashrt.backends.cuda import CudaDevice
from flashrt.backends.cuda.code import Code
from flashrt.backends.reference import ReferenceBackend
from flashrt.errors import DeviceError, RequestError
from flashrt.ir.ops import ATTENTION_EXACT, LINEAR_I8
from flashrt.llm.generate import Generator
from flashrt.llm.request import Request, Sampling
from flashrt.machine import Machine
from flashrt.passes import pipeline
from flashrt.program import Pending, Plan, Program, Variant
from flashrt.runtime.trace import Trace
from tests.backends.test_cuda_plans import GPU
from tests.generating import PAGES
from tests.gpus import drivers
from tests.tiny import CONTEXT, VOCAB, tiny_graph, tiny_import, tiny_source

GRAPH = tiny_graph(1)
FED = {"ids": "tokens"}


@pytest.fixture(
    params=[pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("late", marks=pytest.mark.slow)]
)
def driver(request: pytest.FixtureRequest) -> Any:
    return drivers(request.param)[0]


ALL = (("all", 1, 64),)


def opened(driver: Any, *, poison: bool = False, variants: Any = ALL, **more: Any) -> Program:
    options = pipeline.Options(numerics=LINEAR_I8, attention=ATTENTION_EXACT, **more)
    planned = pipeline.compile_graph(GRAPH, Machine((GPU,)), options)
    made = tuple(
        Variant.of(name, lo, hi, planned.physical, replace(planned.stream, name=name))
        for name, lo, hi in variants
    )
    plan = Plan("tiny", "", "", {}, GRAPH, made, Machine((GPU,)), tiny_import(1).weights)
    host = ReferenceBackend().open(GPU)
    device = {GPU.id: CudaDevice(GPU, driver)}
    return Program(plan, device, host, pages=PAGES, source=tiny_source(GRAPH), poison=poison)


class Watched:
    """A program's `begin` that counts what began ahead, and spoils what nobody may read any more: inputs that
    don't come from the host, and results that were read."""

    def __init__(self, program: Program) -> None:
        self.program, self.fed = program, 0

    def begin(self, inputs: Any, symbols: Any, outputs: Any, fed: Mapping[str, str]) -> Pending:
        before = self.program.last
        if before is not None:  # where this step's results will lie; the device may write them at once
            (code,) = before._codes
            for row in code.results(before.epoch - 1).values():
                row[:] = 0xFF
        pending = self.program.begin(inputs, symbols, outputs, fed)
        if fed:
            self.fed += 1
            executor = self.program.last
            assert executor is not None
            (code,) = executor._codes
            ids = next(s.id for s in executor.stream.slots if s.input == "ids")
            code._twins[ids].here[:] = 0xFF
        return pending


def requests(sequences: int, temperature: float) -> list[Request]:
    """They end at different steps."""
    out = []
    for n in range(sequences):
        prompt = tuple((11 * i + 7 * n) % VOCAB for i in range(1 + n))
        how = Sampling(max_tokens=6 - n, temperature=temperature, seed=n, ignore_eos=n == 0)
        out.append(Request(str(n), prompt, how))
    return out


def tokens(program: Program, asked: list[Request], eos: tuple[int, ...], begin: Any = None) -> Any:
    limits: dict[str, Any] = {"max_tokens_per_step": 32, "max_sequences": 4}
    generator = Generator(program.call, context=CONTEXT, eos=eos, pages=PAGES, begin=begin, **limits)
    for request in asked:
        generator.add(request)
    done = [c.tokens for c in generator.run()]
    assert generator.pool.free == PAGES
    return done


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("sequences", [1, 2])
def test_the_same_tokens(driver: Any, sequences: int, poison: bool) -> None:
    """Greedy; one of several sequences ends by a token that the host knows too late."""
    asked = requests(sequences, 0.0)
    with opened(driver, poison=poison) as program:
        eos = (tokens(program, asked, ())[-1][2],)
        want, watched = tokens(program, asked, eos), Watched(program)
        assert tokens(program, asked, eos, watched.begin) == want
        assert len({len(t) for t in want}) == sequences
    assert watched.fed > 1


@pytest.mark.parametrize("sequences", [1, 2])
def test_the_same_draws(driver: Any, sequences: int) -> None:
    """With a temperature, by the library: recorded in rounds in which nothing is late."""
    asked = requests(sequences, 0.7)
    with opened(driver) as program:
        watched = Watched(program)
        driver.late = False
        want = [tokens(program, asked, ()) for _ in range(2)]
        driver.late = True
        assert [tokens(program, asked, (), watched.begin) for _ in range(2)] == want
        assert tokens(program, requests(sequences, 0.0), ()) != want[0]
    assert watched.fed > 1


def decoding(position: int, token: int) -> tuple[dict[str, Any], dict[str, int], tuple[str, ...]]:
    """A step of one sequence in the first pages."""
    i32, one = np.int32, {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}
    inputs = {
        "ids": np.array([token], i32), "positions": np.array([position], i32), "seq": np.zeros(1, i32),
        "rows": np.zeros(1, i32), "pages": np.arange(2, dtype=i32)[None], "top_k": np.zeros(1, i32),
        "seed": np.zeros(1, np.int64), "draw": np.zeros(1, np.int64), "history": np.full((1, 1), -1, i32),
        **{name: np.full(1, value, np.float32) for name, value in one.items()},
    }  # fmt: skip
    return inputs, {"C": position + 1}, ("tokens",)


def one_by_one(program: Program, count: int) -> list[int]:
    found = [5]
    for at in range(count):
        found.append(int(program.call(*decoding(at, found[-1]))["tokens"][0]))
    return found[1:]


def chained(program: Program, count: int) -> list[Pending]:
    first = program.begin(*decoding(0, 5))
    return [first, *(program.begin(*decoding(at, 0), FED) for at in range(1, count))]


def token_of(pending: Pending) -> int:
    return int(pending.result()["tokens"][0])


def test_results_wait_for_whoever_asks(driver: Any) -> None:
    """However late, in any order, and all of them."""
    with opened(driver) as program:
        want, steps = one_by_one(program, 6), program.ran.steps
        pending = chained(program, 3)
        driver.wait()
        assert [token_of(p) for p in pending] == want[:3] and want[1] != want[2]
        pending = chained(program, 6)
        assert [p.ahead for p in pending] == [False] * 5 + [True]
        assert [token_of(p) for p in reversed(pending)] == want[::-1]
        assert not any(p.ahead for p in pending)
        assert program.ran.steps == steps + 3 + 6
        chained(program, 5)  # nobody asks
        assert one_by_one(program, 6) == want


def test_logits_and_another_step_between(driver: Any) -> None:
    """A step that is asked for more than small results is through at once; one that isn't fed may follow."""
    with opened(driver) as program:
        want = one_by_one(program, 4)
        inputs, symbols, _ = decoding(0, 5)
        first = program.begin(inputs, symbols)
        assert not first.ahead and first.result()["logits"].argmax() == want[0]
        second = program.begin(*decoding(1, 0), FED)
        third = program.begin(*decoding(2, want[1]))
        fourth = program.begin(*decoding(3, 0), FED)
        assert [token_of(p) for p in (fourth, third, second)] == want[:0:-1]


def test_a_traced_step(driver: Any) -> None:
    """Is through when it was begun; steps that run ahead tell their times one after the other."""
    with opened(driver) as program:
        want = one_by_one(program, 4)
        program.trace = Trace()
        assert [token_of(p) for p in chained(program, 4)] == want
        for step in program.trace.steps:
            assert (np.diff(step.stamps, axis=1) >= 0).all() and (step.stamps[:, 2] <= step.ended).all()
        assert len(program.trace.steps) == 4
        program.trace = None
        pending, ends = chained(program, 2), []
        for p in pending:
            p.result()
            assert program.last is not None
            ((ran, waited),) = program.last.spent().values()
            assert ran > 0 and waited >= 0
            ends.append(program.last.took)
        assert min(ends) > 0


def test_closing_waits_for_what_is_under_way(driver: Any) -> None:
    program = opened(driver)
    pending = chained(program, 2)
    program.close()
    with pytest.raises(DeviceError, match="given up"):
        pending[1].result()


@pytest.mark.parametrize("error", [DeviceError("lost"), KeyboardInterrupt()])
def test_a_failure_takes_along_what_is_under_way(
    driver: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two steps, when the first one is waited for; the next one is right."""
    with opened(driver) as program:
        want = one_by_one(program, 3)
        pending = chained(program, 2)
        with monkeypatch.context() as patched:
            end = type(driver.mark())

            def failing(*_: Any) -> None:
                raise error

            patched.setattr(end, "wait", failing)
            patched.setattr(driver, "wait", lambda real=driver.wait: None)
            with pytest.raises(type(error)):
                pending[0].result()
        driver.wait()
        assert program.last is not None
        assert program.last.failed_on == ("gpu:0" if isinstance(error, DeviceError) else "")
        with pytest.raises(DeviceError, match="given up"):
            pending[1].result()
        with pytest.raises(DeviceError, match="given up"):
            program.begin(*decoding(2, 0), FED)
        assert one_by_one(program, 3) == want


def test_no_room_for_the_step_ahead(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails, and the one that is under way is forgotten; later ones are right."""
    with opened(driver) as program:
        want = one_by_one(program, 3)
        pending = program.begin(*decoding(0, 5))
        with monkeypatch.context() as full:

            def bucket(*_: Any) -> Any:
                raise MemoryError("none left")

            full.setattr(Code, "_bucket", bucket)
            inputs, symbols, outputs = decoding(1, 0)
            with pytest.raises(DeviceError, match="no room for a step"):
                program.begin({**inputs, "temperature": np.ones(1, np.float32)}, symbols, outputs, FED)
        with pytest.raises(DeviceError, match="given up"):
            pending.result()
        assert one_by_one(program, 3) == want


def test_what_is_given_has_to_fit(driver: Any) -> None:
    with opened(driver) as program:
        want = one_by_one(program, 3)
        first = program.begin(*decoding(0, 5))
        inputs, symbols, outputs = decoding(1, 0)
        with pytest.raises(RequestError, match="no output logit"):
            program.begin(inputs, symbols, outputs, {"ids": "logit"})
        with pytest.raises(RequestError, match="position 5000 is outside"):
            program.begin({**inputs, "positions": np.array([5000], np.int32)}, symbols, outputs, FED)
        assert [token_of(first), token_of(program.begin(*decoding(1, 0), FED))] == want[:2]
        two = {name: np.repeat(a, 2, 0) for name, a in inputs.items() if name not in ("pages", "seq")}
        two |= {"pages": inputs["pages"], "seq": np.zeros(2, np.int32)}
        with pytest.raises(RequestError, match="isn't there"):
            program.begin(two, symbols, outputs, FED)


def test_a_refused_step_of_another_variant_feeds_nobody(driver: Any) -> None:
    """Tokens of an older step of that variant aren't taken for those of the last step."""
    with opened(driver, variants=(("one", 1, 1), ("more", 2, 64))) as program:
        inputs, symbols, outputs = decoding(0, 5)
        two = {name: np.repeat(a, 2, 0) for name, a in inputs.items()}
        two |= {"pages": np.arange(4, dtype=np.int32).reshape(2, 2), "seq": np.arange(2, dtype=np.int32)}
        program.call(two, symbols, outputs)
        want = one_by_one(program, 2)
        last = program.begin(*decoding(0, 5))
        with pytest.raises(RequestError, match="position 5000 is outside"):
            program.begin({**two, "positions": np.array([0, 5000], np.int32)}, symbols, outputs)
        with pytest.raises(RequestError, match="expected i32"):
            program.begin(two, symbols, outputs, FED)
        assert [token_of(last), token_of(program.begin(*decoding(1, 0), FED))] == want


def test_code_in_pieces_isnt_ahead(driver: Any) -> None:
    """Without regions each instruction is loaded alone: the host hands tokens over, and nothing is ahead."""
    with opened(driver, disabled=frozenset({"region"})) as program:
        want = one_by_one(program, 2)
        first = program.begin(*decoding(0, 5))
        assert not first.ahead
        second = program.begin(*decoding(1, 0), FED)
        assert [token_of(p) for p in (first, second)] == want
        assert program.last is not None and all(isinstance(c, Ahead) for c in program.last._codes)
