"""Engines under test, each in a process of its own that answers one request a line.

    python -m benchmarks.peers ENGINE MODEL THREADS      reads and writes JSON lines

`Peer` is the other end. A process of its own keeps threads, memory and crashes
apart; the parent decides whose turn it is, so that runs interleave.

Requests: {"task": "prefill", "tokens": 512}; {"task": "decode", "context": 16, "tokens": 64};
{"task": "batch", "sequences": 8, "context": 16, "tokens": 64}. Answers: {"rate": tokens per second}.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

PROMPT = [(7 * i * i + 13 * i) % 40000 + 100 for i in range(4096)]  # token ids: any text will do


class Engine(Protocol):
    """What a peer can do. Rates in tokens per second."""

    version: str

    def prefill(self, tokens: int) -> float: ...

    def decode(self, context: int, tokens: int) -> float: ...

    def batch(self, sequences: int, context: int, tokens: int) -> float: ...


class Flashrt:
    """flashrt itself; the mode is one of compiler.MODES."""

    def __init__(self, model: str, threads: int, mode: str = "fast") -> None:
        import flashrt
        from flashrt.compiler import CompileOptions

        self.version = f"flashrt {flashrt.__version__} {mode}"
        self.llm = flashrt.LLM(
            model, threads=threads, sequences=8, options=CompileOptions(context=2048, numerics=mode)
        )
        self.llm.program.open()

    def _run(self, sequences: int, context: int, tokens: int) -> list[Any]:
        from flashrt import Sampling
        from flashrt.llm.request import Request

        for i in range(sequences):
            prompt = tuple(PROMPT[i : i + context])
            self.llm.generator.add(Request(f"b{i}", prompt, Sampling(max_tokens=tokens, ignore_eos=True)))
        return [c.stats for c in self.llm.generator.run()]

    def prefill(self, tokens: int) -> float:
        return float(self._run(1, tokens, 1)[0].prompt_rate)

    def decode(self, context: int, tokens: int) -> float:
        return float(self._run(1, context, tokens)[0].rate)

    def batch(self, sequences: int, context: int, tokens: int) -> float:
        return float(sum(s.rate for s in self._run(sequences, context, tokens)))


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
            import numpy as np

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
    """OpenVINO GenAI, which reads the GGUF file."""

    def __init__(self, model: str, threads: int) -> None:
        import openvino_genai

        self.api = openvino_genai
        self.version = f"openvino-genai {importlib.metadata.version('openvino-genai')}"
        self.turn = 0
        self.pipe = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)

    def _run(self, context: int, tokens: int) -> Any:
        import numpy as np
        import openvino

        config = self.api.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        config.apply_chat_template = False
        self.turn += 1  # another prompt each time: a repeated one comes from its prefix cache
        ids = openvino.Tensor(np.array([PROMPT[self.turn : self.turn + context]], np.int64))
        mask = openvino.Tensor(np.ones((1, context), np.int64))
        return self.pipe.generate(self.api.TokenizedInputs(ids, mask), config).perf_metrics

    def prefill(self, tokens: int) -> float:
        return tokens / (float(self._run(tokens, 1).get_ttft().mean) / 1e3)

    def decode(self, context: int, tokens: int) -> float:
        return 1e3 / float(self._run(context, tokens).get_tpot().mean)

    def batch(self, sequences: int, context: int, tokens: int) -> float:
        raise NotImplementedError("its batch takes padded prompts of one length through another class")


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    "flashrt": Flashrt,
    "flashrt-int8": lambda model, threads: Flashrt(model, threads, "int8"),
    "flashrt-exact": lambda model, threads: Flashrt(model, threads, "exact"),
    "llama.cpp": LlamaCpp,
    "llama.cpp-q4_0": lambda model, threads: LlamaCpp(requantised(model), threads),
    "openvino": OpenVino,
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

    def ask(self, **request: Any) -> float:
        """One measurement, in tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(self._read()["rate"])

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
        print(json.dumps({"rate": task(**request)}), flush=True)


if __name__ == "__main__":
    serve(ENGINES[sys.argv[1]](sys.argv[2], int(sys.argv[3])))
