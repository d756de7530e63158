"""Whether an engine is at work, found out without being noticed.

An engine that cannot get a lock at once believes that another one is compiling and acts on it, up to ending
its process. So locks are looked up, and taken only where something is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from neffbuild.cache import files

_FILE_SYSTEMS_WITH_TWO_DEVICES = frozenset({"btrfs", "overlay", "bcachefs"})


def lock_holder(path: Path) -> int | None:
    """The process that holds a `flock` or a POSIX lock on a file, 0 where the kernel does not name it;
    None where nobody does, or there is no such file. Holders on other hosts are not seen."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for pid, held_device, inode in _held():
        if inode == status.st_ino and (
            held_device == device or files.file_system(path) in _FILE_SYSTEMS_WITH_TWO_DEVICES
        ):
            return max(pid, 0)
    return None


def _held() -> Iterator[tuple[int, str, int]]:
    """(process, device, inode) of every lock that is held on this host."""
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split()
        if len(words) < 8 or words[1] not in ("FLOCK", "POSIX", "OFDLCK"):
            continue  # also a waiter, whose line has an arrow
        device, _, inode = words[5].rpartition(":")
        yield int(words[4]), device, int(inode)


def is_that_process(pid: int, name: str | None, command: str | None) -> bool:
    """Whether the process with this number is still the one that wrote its name and command line."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE or name not in (None, process.name()):
            return False
        return command is None or _words(command) == _words(" ".join(process.cmdline()))
    except psutil.AccessDenied:
        return True  # it is there, and its command line is not for us to read
    except (psutil.Error, ValueError, OverflowError):
        return False


def _words(command: str) -> str:
    """A command line in one spelling, whether it was written as words or as a list of them."""
    return " ".join(command.translate(str.maketrans("[]'\",\0", " " * 6)).split())
