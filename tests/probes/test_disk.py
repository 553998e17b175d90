"""Disks from pretend /proc and /sys trees, and a real read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashrt.probes import disk
from tests.probes.test_host import tree

MOUNTS = """22 27 0:21 / /proc rw - proc proc rw
27 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,discard
30 27 8:1 /sub /again rw - ext4 /dev/sda1 rw
31 27 259:0 / /fast\\040one rw - xfs /dev/nvme0n1 rw
32 27 0:50 / /far rw - nfs4 server:/x rw
33 27 0:51 / /tmp rw - tmpfs tmpfs rw
34 27 7:0 / /snap rw - squashfs /dev/loop0 rw
torn line
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """sda1 is a part of a disk that spins; nvme0n1 a whole one that doesn't."""
    tree(tmp_path, {
        "proc/self/mountinfo": MOUNTS,
        "sys/devices/sda/queue/rotational": "1\n",
        "sys/devices/sda/sda1/partition": "1\n",
        "sys/devices/nvme0n1/queue/rotational": "0\n",
    })  # fmt: skip
    numbers = tmp_path / "sys/dev/block"
    numbers.mkdir(parents=True)
    (numbers / "8:1").symlink_to("../../devices/sda/sda1")
    (numbers / "259:0").symlink_to("../../devices/nvme0n1")
    (tmp_path / "fast one").mkdir()
    return tmp_path


def test_each_disk_once(root: Path) -> None:
    found = disk.disks(root)
    assert [(d.mount, d.device, d.rotational, d.remote) for d in found] == [
        ("/", "/dev/sda1", True, False),
        ("/far", "server:/x", None, True),
        ("/fast one", "/dev/nvme0n1", False, False),
    ]
    assert found[0].size and found[0].free is not None and found[0].free <= found[0].size
    assert (found[1].size, found[1].free) == (None, None)  # the server doesn't answer
    assert "nfs4" in found[1].reason and not found[0].reason


def test_a_container(tmp_path: Path) -> None:
    """The root of a container has no device that /sys knows."""
    mounts = "40 1 0:99 / / rw - overlay overlay rw,lowerdir=x\n"
    (only,) = disk.disks(tree(tmp_path, {"proc/self/mountinfo": mounts}))
    assert (only.mount, only.rotational) == ("/", None) and "overlay" in only.reason


def test_no_proc(tmp_path: Path) -> None:
    assert disk.disks(tmp_path) == ()


def test_where_a_path_lies(root: Path) -> None:
    found = disk.disks(root)
    for path, mount in (("/fast one/x", "/fast one"), ("/fast", "/"), ("/far", "/far"), ("/", "/")):
        held = disk.holding(Path(path), found)
        assert held is not None and held.mount == mount
    assert disk.holding(Path("/x"), ()) is None


def test_measure_leaves_nothing_behind(tmp_path: Path) -> None:
    rate, why = disk.measure(tmp_path / "new", 0.05, size=8 << 20)
    assert why == "" and rate is not None
    assert rate.how == "measured" and rate.value > 1e5
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_system_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    rate, _ = disk.measure(tmp_path, 0.05, size=8 << 20)
    assert rate is not None


def test_where_nothing_can_be_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    rate, why = disk.measure(tmp_path / "file", 0.05)
    assert rate is None and str(tmp_path / "file") in why
    rate, why = disk.measure(tmp_path, 0.05, size=1 << 60)
    assert rate is None and "too little room" in why
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
