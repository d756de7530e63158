"""How vLLM Neuron keeps two processes from compiling one graph.

Beside an entry lie `.<hash>.compilation_metadata` (`key:value` lines: pid, process_name, cmdline, rank,
timestamp) and `.<hash>.compilation_metadata.lock`, which is locked while somebody compiles. Who does not get
the lock within a millisecond waits for the entry as long as the process in the metadata lives, and takes
everything for stale where it does not.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

import psutil

from neffbuild.cache import filesystem
from neffbuild.cache.layouts.layout import PlaceLocked
from neffbuild.cache.layouts.locks import is_that_process, lock_holder
from neffbuild.cache.layouts.tree import Tree, Unsafe

LOCK_NAME = re.compile(r"\.([0-9a-f]{32})\.compilation_metadata(?:\.lock)?")
_PID = re.compile(r"[0-9]{1,10}")
_MOST_BYTES = 1 << 16
_LINES = 64


@contextmanager
def guarded(root: Path, place: str) -> Iterator[None]:
    """Hold an entry's lock as a process that compiles it does. Raises `PlaceLocked`, `Unsafe` where a link or
    folder lies in the lock's place, `OSError`."""
    locked, _ = lock_state(Tree(root), place)
    if locked is not None:
        raise PlaceLocked(locked)
    metadata = root / _metadata_name(place)
    lock = metadata.with_name(f"{metadata.name}.lock")
    for part in (metadata, lock):
        if part.is_symlink() or part.is_dir():
            raise Unsafe(f"{part} is a link or a folder where a lock belongs")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with filesystem.closing(os.open(lock, flags, 0o666)) as descriptor:
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise PlaceLocked("another process has just begun to compile it") from None
        filesystem.unlink(metadata)
        # An engine that meets the lock asks who holds it, and waits for us only where we are named.
        with filesystem.closing(filesystem.create(metadata)) as file:
            filesystem.write(file, _own_metadata().encode())
        try:
            yield
        finally:
            filesystem.unlink(metadata)


def lock_state(tree: Tree, place: str) -> tuple[str | None, str | None]:
    """(who is at work on a place, which lock of a dead process is left of it)."""
    name = _metadata_name(place)
    holder = lock_holder(tree.root / f"{name}.lock")
    text = tree.read(name, _MOST_BYTES) if tree.file(name) is not None else None
    stated = stated_lines(text or b"")
    pid = stated.get("pid", "")
    whose = f"process {pid or holder or 'unknown'}"
    if holder is not None:
        return f"{whose} holds {name}.lock", None
    if text is None:
        return None, None
    if _PID.fullmatch(pid) and is_that_process(
        int(pid), stated.get("process_name"), stated.get("cmdline")
    ):
        return f"{whose} is compiling it ({name})", None
    return None, f"stale lock {name}: {whose} is gone from this host"


def _metadata_name(place: str) -> str:
    folder, _, key = place.rpartition("/")
    return f"{folder}/.{key}.compilation_metadata".lstrip("/")


def _own_metadata() -> str:
    process = psutil.Process()
    return (
        f"pid:{process.pid}\nprocess_name:{process.name()}\ncmdline:{' '.join(process.cmdline())}\n"
        f"rank:0\ntimestamp:{time.time()}\n"
    )


def stated_lines(data: bytes) -> dict[str, str]:
    """`key:value` lines, the first of each key."""
    found: dict[str, str] = {}
    for line in data.decode(errors="replace").splitlines()[:_LINES]:
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found
