"""Compiled kernels on disk: reuse without numba, edits, damage, concurrent processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashrt.backends.cpu import cache
from flashrt.backends.cpu.cache import Library, read, write
from flashrt.errors import DeviceError

USE = """
import sys
from flashrt.backends.cpu.cache import library
before = 'numba' in sys.modules
library().address('team_quit')
print('numba' in sys.modules)
"""


def use(folder: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "FLASHRT_CACHE": str(folder)}
    return subprocess.Popen([sys.executable, "-c", USE], env=env, stdout=subprocess.PIPE, text=True)


def test_a_second_process_needs_no_numba_and_two_at_once_share(tmp_path: Path) -> None:
    both = [use(tmp_path), use(tmp_path)]
    assert [p.communicate()[0].strip() for p in both] == ["True", "True"]
    assert use(tmp_path).communicate()[0].strip() == "False"
    (folder,) = (tmp_path / "cpu").iterdir()
    assert [p.name for p in folder.iterdir()] == ["team_quit.o"]  # nothing half-written is left


def test_a_damaged_file_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "k" / "f.o"
    assert read(path) is None
    write(path, "symbol", b"code\nmore")
    assert read(path) == ("symbol", b"code\nmore")
    data = path.read_bytes()
    for damaged in (b"", data[:20], data[:-1], data[:40] + b"?" + data[41:]):
        path.write_bytes(damaged)
        assert read(path) is None


def test_damaged_code_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHRT_CACHE", str(tmp_path))
    done: list[tuple[str, int, int]] = []
    library = Library()
    for _ in range(2):
        addresses = library.addresses(["team_quit", "team_quit"], lambda *args: done.append(args))
    assert done == [("team_quit", 1, 1)] and addresses == {"team_quit": library.address("team_quit")}
    path = cache.folder() / "team_quit.o"
    good = path.read_bytes()
    path.write_bytes(good[:-9])
    assert Library().address("team_quit")
    assert len(path.read_bytes()) == len(good)


def test_an_edit_anywhere_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "cache.py"
    (tmp_path / "tiles.py").write_text("a = 1")
    monkeypatch.setattr(cache, "__file__", str(copy))
    first = cache.key.__wrapped__()
    (tmp_path / "tiles.py").write_text("a = 2")
    second = cache.key.__wrapped__()
    monkeypatch.setattr(cache, "processor", lambda: ("other", "+amx"))
    assert len({first, second, cache.key.__wrapped__()}) == 3


def test_a_folder_that_cant_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match=r"file(.|\n)*FLASHRT_CACHE"):
        write(tmp_path / "file" / "f.o", "symbol", b"")
