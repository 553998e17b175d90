"""Opens ONNX graphs as onnxruntime sessions, and keeps what providers compile on disk.

A provider that can't run the whole graph is an error: nothing falls back to the CPU.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import onnxruntime as ort

from flashrt import knobs
from flashrt.backends.npu.providers import Provider, version
from flashrt.errors import DeviceError

FATAL = 4  # log severity: what goes wrong is raised, so it needn't be logged as well
CPU = "CPUExecutionProvider"


def open_session(data: bytes, provider: Provider, threads: int) -> ort.InferenceSession:
    """A session that runs the graph on the provider, all of it.

    threads: of providers that run on the CPU. Raises DeviceError when the provider refuses the graph.
    """
    try:
        if provider.context:
            return _from_context(data, provider, threads)
        return _session(data, provider, threads, _folder(data, provider))
    except Exception as error:  # onnxruntime has a dozen kinds without a common one
        raise DeviceError(
            f"{provider.ep} can't run a graph: {str(error).strip().splitlines()[0]}",
            hint="place these operations on another device",
        ) from error


def compiled_path(data: bytes, provider: Provider) -> Path:
    """Where the compiled form of a graph is kept: named by graph, provider, options and versions."""
    # a library's place on disk is no part of what it compiles
    options = sorted((k, v) for k, v in provider.options().items() if k != "backend_path")
    about = repr((provider.ep, options, version(provider)))
    return knobs.cache_folder() / "npu" / hashlib.sha256(data + about.encode()).hexdigest()[:32]


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file of the cache so that nobody ever reads half of it. OSError when that can't be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _from_context(data: bytes, provider: Provider, threads: int) -> ort.InferenceSession:
    """Through the EP-context model: from the cache, or compiled now. A damaged one is compiled again."""
    path = compiled_path(data, provider).with_suffix(".onnx")
    if path.is_file():
        try:
            return _session(path.read_bytes(), provider, threads)
        except Exception:  # whatever is wrong with it, the graph is there
            path.unlink(missing_ok=True)
    compiler = ort.ModelCompiler(_options(provider, threads), data, embed_compiled_data_into_model=True)
    compiled = compiler.compile_to_bytes()
    with suppress(OSError):  # a cache that can't be written costs time only
        write_whole(path, compiled)
    return _session(compiled, provider, threads)


def _session(
    data: bytes, provider: Provider, threads: int, folder: Path | None = None
) -> ort.InferenceSession:
    options = _options(provider, threads)
    if provider.module:
        return ort.InferenceSession(data, options)
    chosen = dict(provider.options())
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        chosen[provider.folder_option] = str(folder)
    return ort.InferenceSession(data, options, providers=[(provider.ep, chosen)])


def _folder(data: bytes, provider: Provider) -> Path | None:
    return compiled_path(data, provider) if provider.folder_option else None


def _options(provider: Provider, threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    if provider.ep != CPU:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if provider.module:
        options.add_provider_for_devices(_plug_in(provider.ep, provider.module), dict(provider.options()))
    return options


@cache
def _plug_in(ep: str, module: str) -> list[ort.OrtEpDevice]:
    """Loads the plug-in, once a process, and gives its devices. Raises DeviceError when it has none."""
    if not any(d.ep_name == ep for d in ort.get_ep_devices()):  # registering twice is an error
        library = importlib.import_module(module)
        ort.register_execution_provider_library(ep, library.get_library_path())
    found = [d for d in ort.get_ep_devices() if d.ep_name == ep]
    if not found:
        raise DeviceError(f"{ep} finds no device here", hint="check the driver")
    return found
