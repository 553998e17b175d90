"""Engines under test, each in a process of its own that answers one request a line.

    python -m benchmarks.peers ENGINE MODEL THREADS      reads and writes JSON lines

`Peer` is the other end. A process of its own keeps threads, memory and crashes
apart; the parent decides whose turn it is, so that runs interleave.

Requests: {"task": "prefill", "tokens": 512}; {"task": "decode", "context": 16, "tokens": 64};
{"task": "batch", "sequences": 8, "context": 16, "tokens": 64}. Answers: {"answer": tokens per second}.
{"task": "likeliest", "ids": […], "piece": 2, "pieces": 16} answers with token ids: see `Engine`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from flashrt.compiler import CompileOptions

TEXT = """Every spring the river rises and the people of the valley carry their boats up to the old mill.
They check the ropes, paint the hulls, and wait for the water to fall again. An engineer once asked why
nobody had built a dam. The miller laughed and pointed at the fields: the flood, he said, brings the soil
that feeds us, and a dam would keep it for itself. The engineer wrote this down, stayed for the harvest,
and later became the best boat builder of the valley. His granddaughter still measures the height of the
water each year, on a wall where the marks of two hundred springs can be read like the rings of a tree."""
PROMPT = [(7 * i * i + 13 * i) % 40000 + 100 for i in range(4096)]  # token ids: any text will do


class Engine(Protocol):
    """What a peer can do. Rates in tokens per second.

    likeliest: the arg-max token after each `piece` of the ids, with the ids before it read; an engine that
    can takes `pieces` of them in one step, so that the kernels are those of a measurement.
    """

    version: str

    def prefill(self, tokens: int) -> float: ...

    def decode(self, context: int, tokens: int) -> float: ...

    def batch(self, sequences: int, context: int, tokens: int) -> float: ...

    def likeliest(self, ids: list[int], piece: int, pieces: int) -> list[int]: ...


def plan_options(mode: str) -> CompileOptions:
    """What Flashrt's plans are compiled with."""
    from flashrt.compiler import CompileOptions

    return CompileOptions(context=2048, numerics=mode)


class Flashrt:
    """flashrt itself; the mode is one of compiler.MODES."""

    def __init__(self, model: str, threads: int, mode: str = "fast") -> None:
        import flashrt

        self.version, self.threads = f"flashrt {flashrt.__version__} {mode}", threads
        self.llm = flashrt.LLM(model, threads=threads, sequences=8, options=plan_options(mode))
        self.llm.program.open()

    def _run(self, context: int, tokens: int) -> Any:
        from flashrt import Sampling
        from flashrt.llm.request import Request

        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        self.llm.generator.add(Request("one", tuple(PROMPT[:context]), sampling))
        (completion,) = self.llm.generator.run()
        return completion.stats

    def prefill(self, tokens: int) -> float:
        return float(self._run(tokens, 1).prompt_rate)

    def decode(self, context: int, tokens: int) -> float:
        return float(self._run(context, tokens).rate)

    def batch(self, sequences: int, context: int, tokens: int) -> float:
        """Steps that all sequences share, as the others are timed: none in which one is still read."""
        from flashrt.profiler.bench import Test, measure

        test = Test("tg", tokens, context, sequences)
        (speed,) = measure(self.llm, [test], threads=self.threads, repeats=1, warm_up=0)
        return speed.median

    def text(self, tokens: int) -> list[int]:
        """Token ids of a text, to be predicted."""
        return self.llm.tokens(TEXT.replace("\n", " "), raw=True)[:tokens]

    def likeliest(self, ids: list[int], piece: int, pieces: int) -> list[int]:
        """The pieces are sequences of one page table: a step takes one row of logits from each sequence."""
        from flashrt.llm.kv import EMPTY, Table
        from flashrt.llm.scheduler import GREEDY, NO_HISTORY, Part, Step

        pool = self.llm.generator.pool
        table = pool.grow(EMPTY, len(ids))
        assert isinstance(table, Table)
        found: list[int] = []
        for start in range(0, len(ids), piece * pieces):
            firsts = range(start, min(start + piece * pieces, len(ids)), piece)
            tokens = (np.array(ids[at : at + piece], np.int32) for at in firsts)
            step = Step(
                tuple(
                    Part("text", t, at, at + len(t), table, GREEDY, 0, True, NO_HISTORY)
                    for at, t in zip(firsts, tokens, strict=True)
                )
            )
            found += self.llm.program.call(step.inputs(), step.symbols(), ("tokens",))["tokens"].tolist()
        pool.give_back(table.pages)
        return found


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level interface."""

    def __init__(self, model: str, threads: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self.llm = llama_cpp.Llama(
            model, n_ctx=8 * 1024, n_threads=threads, n_threads_batch=threads, n_batch=512, n_ubatch=512,
            verbose=False, logits_all=False,
        )  # fmt: skip

    def prefill(self, tokens: int) -> float:
        self.llm.reset()
        begun = time.perf_counter()
        self.llm.eval(PROMPT[:tokens])
        self.llm.sample(temp=0)
        return tokens / (time.perf_counter() - begun)

    def decode(self, context: int, tokens: int) -> float:
        self.llm.reset()
        self.llm.eval(PROMPT[:context])
        token = self.llm.sample(temp=0)
        begun = time.perf_counter()
        for _ in range(tokens - 1):
            self.llm.eval([token])
            token = self.llm.sample(temp=0)
        return (tokens - 1) / (time.perf_counter() - begun)

    def likeliest(self, ids: list[int], piece: int, pieces: int) -> list[int]:
        """A piece a step: this interface gives the logits of a step's last token."""
        self.llm.reset()
        found = []
        for at in range(0, len(ids), piece):
            self.llm.eval(ids[at : at + piece])
            found.append(self.llm.sample(temp=0))
        return found

    def batch(self, sequences: int, context: int, tokens: int) -> float:
        api = self.api
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = 1024 * sequences, sequences, 512
        params.n_threads = params.n_threads_batch = self.llm.n_threads
        ctx = api.llama_init_from_model(self.llm.model, params)
        vocabulary = self.llm.n_vocab()
        batch = api.llama_batch_init(context * sequences, 0, 1)
        now = [PROMPT[i + context - 1] for i in range(sequences)]

        def step(rows: list[tuple[int, int, int, bool]]) -> None:
            batch.n_tokens = len(rows)
            for i, (token, position, sequence, wanted) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, wanted
            assert api.llama_decode(ctx, batch) == 0

        def best(row: int) -> int:
            logits = api.llama_get_logits_ith(ctx, row)
            return int(np.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax())

        for s in range(sequences):
            step([(PROMPT[s + p], p, s, False) for p in range(context - 1)])
        begun = time.perf_counter()
        for t in range(tokens):
            step([(now[s], context - 1 + t, s, True) for s in range(sequences)])
            now = [best(s) for s in range(sequences)]
        rate = sequences * tokens / (time.perf_counter() - begun)
        api.llama_batch_free(batch)
        api.llama_free(ctx)
        return rate


class OpenVino:
    """OpenVINO GenAI, which reads the GGUF file.

    Its pipelines keep what they have read and skip it the next time, so no measurement repeats a prompt.
    Several sequences go through `LLMPipeline`, too, as rows of one tensor of token ids, which need one
    length: here that is faster than `ContinuousBatchingPipeline` (8 sequences: about 3 times).
    """

    def __init__(self, model: str, threads: int) -> None:
        import openvino_genai

        self.api = openvino_genai
        self.version = f"openvino-genai {importlib.metadata.version('openvino-genai')}"
        self.turn = 0
        self.pipe = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)

    def _generate(self, rows: list[list[int]], tokens: int) -> Any:
        import openvino

        config = self.api.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        config.apply_chat_template = False
        ids, mask = np.array(rows, np.int64), np.ones((len(rows), len(rows[0])), np.int64)
        return self.pipe.generate(
            self.api.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask)), config
        )

    def _run(self, sequences: int, context: int, tokens: int) -> Any:
        first, self.turn = self.turn, self.turn + sequences
        starts = range(first, self.turn)
        return self._generate([PROMPT[s : s + context] for s in starts], tokens).perf_metrics

    def prefill(self, tokens: int) -> float:
        return tokens / (float(self._run(1, tokens, 1).get_ttft().mean) / 1e3)

    def decode(self, context: int, tokens: int) -> float:
        return 1e3 / float(self._run(1, context, tokens).get_tpot().mean)

    def batch(self, sequences: int, context: int, tokens: int) -> float:
        # its time per token counts the tokens of all sequences
        return 1e3 / float(self._run(sequences, context, tokens).get_tpot().mean)

    def likeliest(self, ids: list[int], piece: int, pieces: int) -> list[int]:
        """A prompt for each piece: the logits can't be had."""
        ends = range(piece, len(ids) + piece, piece)
        return [int(self._generate([ids[:end]], 1).tokens[0][0]) for end in ends]


class Transformers:
    """transformers in its eager mode with a KV cache; the GGUF file is de-quantised when it is read.

    In bfloat16: on processors with such tiles several times as fast as float32 for prompts, else as fast.
    Reading GGUF files needs the package accelerate.
    """

    def __init__(self, model: str, threads: int) -> None:
        import torch
        import transformers

        self.torch = torch
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__} bfloat16"
        torch.set_num_threads(threads)
        path = Path(model)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.bfloat16
        ).eval()

    def _step(self, rows: list[list[int]], before: Any = None, kept: int = 1) -> tuple[list[list[int]], Any]:
        """Likeliest tokens after the last `kept` of each row, and the cache."""
        with self.torch.inference_mode():
            out = self.model(
                self.torch.tensor(rows), past_key_values=before, use_cache=True, logits_to_keep=kept
            )
            return out.logits.argmax(-1).tolist(), out.past_key_values

    def prefill(self, tokens: int) -> float:
        begun = time.perf_counter()
        self._step([PROMPT[:tokens]])
        return tokens / (time.perf_counter() - begun)

    def decode(self, context: int, tokens: int) -> float:
        return self.batch(1, context, tokens)

    def batch(self, sequences: int, context: int, tokens: int) -> float:
        now, cache = self._step([PROMPT[i : i + context] for i in range(sequences)])
        begun = time.perf_counter()
        for _ in range(tokens - 1):
            now, cache = self._step(now, cache)
        return sequences * (tokens - 1) / (time.perf_counter() - begun)

    def likeliest(self, ids: list[int], piece: int, pieces: int) -> list[int]:
        found: list[int] = []
        cache = None
        for start in range(0, len(ids), piece * pieces):
            tokens = ids[start : start + piece * pieces]
            (after,), cache = self._step([tokens], cache, len(tokens))
            found += after[piece - 1 :: piece]
        return found


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    "flashrt": Flashrt,
    "flashrt-int8": lambda model, threads: Flashrt(model, threads, "int8"),
    "flashrt-exact": lambda model, threads: Flashrt(model, threads, "exact"),
    "llama.cpp": LlamaCpp,
    "llama.cpp-q4_0": lambda model, threads: LlamaCpp(requantised(model), threads),
    "openvino": OpenVino,
    "transformers": Transformers,
}


def requantised(model: str) -> str:
    """The file re-quantised to Q4_0, llama.cpp's fastest format; made once beside the cache."""
    import llama_cpp

    from flashrt.knobs import cache_folder

    target = cache_folder() / "bench" / "q4_0.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
        done = llama_cpp.llama_model_quantize(model.encode(), str(target).encode(), ctypes.byref(params))
        assert done == 0, "re-quantising failed"
    return str(target)


class Peer:
    """An engine in its own process. Raises RuntimeError with its last words when it dies."""

    def __init__(self, name: str, model: str, threads: int) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers", name, model, str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.version = self._read()["version"]

    def ask(self, **request: Any) -> Any:
        """The answer: of a measurement, tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()["answer"]

    def _read(self) -> Any:
        assert self._process.stdout is not None and self._process.stderr is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.name} ended: {self._process.stderr.read()[-500:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(engine: Engine) -> None:
    """Answers requests until the input ends."""
    print(json.dumps({"version": engine.version}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        task = getattr(engine, request.pop("task"))
        print(json.dumps({"answer": task(**request)}), flush=True)


if __name__ == "__main__":
    serve(ENGINES[sys.argv[1]](sys.argv[2], int(sys.argv[3])))
