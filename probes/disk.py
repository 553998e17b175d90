"""Disks: what is mounted where, whether it spins, how full it is, and how fast it reads."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flashrt.machine import Measured
from flashrt.probes.host import ROOT

REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "fuse.sshfs", "virtiofs"}
PIECE = 4 << 20  # bytes of one read: enough to keep any disk's queue full
SAMPLE = 256 << 20  # bytes written and read to measure


@dataclass(frozen=True, slots=True)
class Disk:
    """One file system on a device of its own. size, free: bytes.

    rotational: whether it spins; None when no block device stands behind it, and `reason` says so.
    remote: whether its bytes come over a network.
    """

    mount: str
    device: str
    filesystem: str
    size: int | None
    free: int | None
    rotational: bool | None
    remote: bool
    reason: str = ""


def disks(root: Path = ROOT) -> tuple[Disk, ...]:
    """Every disk once, at the mount nearest to the root; () where the system doesn't tell.

    root: where /proc and /sys are found.
    """
    found: dict[str, Disk] = {}
    for number, mount, filesystem, device in sorted(_mounts(root), key=lambda m: len(m[1])):
        real = device.startswith("/dev/") or filesystem in REMOTE or mount == "/"
        if real and number not in found:
            found[number] = _disk(root, number, mount, filesystem, device)
    return tuple(sorted(found.values(), key=lambda d: d.mount))


def holding(path: Path, known: tuple[Disk, ...]) -> Disk | None:
    """The disk that a path lies on; None when it isn't among the known ones."""
    here = str(path.absolute())
    over = [d for d in known if here == d.mount or here.startswith(d.mount.rstrip("/") + "/")]
    return max(over, key=lambda d: len(d.mount), default=None)


def _mounts(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """(major:minor, mount, file system, device); format: man 5 proc_pid_mountinfo."""
    try:
        lines = (root / "proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        mounted, dash, source = line.partition(" - ")
        left, right = mounted.split(), source.split()
        if dash and len(left) >= 5 and len(right) >= 2 and not right[1].startswith("/dev/loop"):
            yield left[2], left[4].replace("\\040", " "), right[0], right[1]


def _disk(root: Path, number: str, mount: str, filesystem: str, device: str) -> Disk:
    size = free = None
    with suppress(OSError):
        room = os.statvfs(root / mount.lstrip("/"))
        size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    rotational = _rotational(root, number)
    reason = "" if rotational is not None else f"no block device that the system tells of ({filesystem})"
    return Disk(mount, device, filesystem, size, free, rotational, filesystem in REMOTE, reason)


def _rotational(root: Path, number: str) -> bool | None:
    """From the device's queue, or that of the disk it is a part of."""
    block = (root / "sys/dev/block" / number).resolve()
    for folder in (block, block.parent):
        with suppress(OSError):
            return (folder / "queue/rotational").read_text().strip() == "1"
    return None


# ---- measuring ---------------------------------------------------------------------
def measure(folder: Path, seconds: float = 1.0, size: int = SAMPLE) -> tuple[Measured | None, str]:
    """Bytes per second read from the disk under a folder, or None and why not.

    Writes a file of `size` bytes there, has the system forget it, reads it past the page cache for at
    most `seconds`, and removes it.
    """
    path = folder / f".flashrt-read-rate-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < 4 * size:
            return None, f"too little room in {folder}"
        _write(path, size)
        return Measured(_read(path, size, seconds), "measured"), ""
    except OSError as error:
        return None, f"{folder}: {error.strerror or error}"
    finally:
        with suppress(OSError):
            path.unlink()


def _write(path: Path, size: int) -> None:
    noise = os.urandom(PIECE)  # so that a disk that compresses gains nothing
    with path.open("wb") as file:
        for _ in range(max(1, size // PIECE)):
            file.write(noise)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, size: int, seconds: float) -> float:
    into = mmap.mmap(-1, PIECE)  # page-aligned, as direct reads want it
    file = _direct(path)
    try:
        begin, got, at = time.perf_counter(), 0, 0
        while ((elapsed := time.perf_counter() - begin) < seconds and at < size) or not got:
            read = os.preadv(file, [into], at)
            if not read:
                raise OSError(0, "the file ended early")
            got, at = got + read, at + read
        return got / (elapsed or 1e-9)
    finally:
        os.close(file)
        into.close()


def _direct(path: Path) -> int:
    """The file opened past the page cache, or, where the file system can't, dropped from it first."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (OSError, AttributeError):
        file = os.open(path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return file
