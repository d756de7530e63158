"""Locks between the processes of one host.

A lock is a `flock` on a file in a private runtime folder, never beside a store (which may be on NFS).
The kernel releases it when the holder dies, however it dies. Hosts do not exclude each other: across
them duplicates are allowed and the first commit wins.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from neffbuild.cache.canonical import digest_bytes
from neffbuild.config.errors import LockTimeout, StoreError

_FIRST_DELAY = 0.005
_LONGEST_DELAY = 0.25
_HOLDER_BYTES = 512
_open_descriptors: set[int] = set()


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock: process id, host name, and since when in epoch seconds."""

    pid: int
    host: str
    since: float

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """What a holder wrote, or None where nothing whole was written."""
        try:
            document = json.loads(data)
            return cls(int(document["pid"]), str(document["host"]), float(document["since"]))
        except (ValueError, KeyError, TypeError):
            return None

    def __str__(self) -> str:
        age = max(0.0, time.time() - self.since)
        return f"process {self.pid} on {self.host}, since {age:.0f} s"


@contextlib.contextmanager
def host_lock(name: str, *, wait: float) -> Iterator[None]:
    """Hold the lock called `name`, waiting at most `wait` seconds for it.

    Raises `LockTimeout` naming the holder when it stays taken (a stopped holder keeps its lock), and
    `StoreError` when the runtime folder cannot be used. Not re-entrant. A child forked while the lock
    is held does not hold it.
    """
    path = runtime_directory() / f"{digest_bytes(name.encode())[:32]}.lock"
    descriptor = _acquire(path, name, wait)
    try:
        _sign(descriptor)
        yield
    finally:
        # Closing releases. The file stays: unlinking it would let a waiter lock the old inode while
        # a newcomer locks a new one.
        _close(descriptor)


def runtime_directory() -> Path:
    """The folder of this user's locks: `$XDG_RUNTIME_DIR/neffbuild` where that is a folder of ours,
    else `/tmp/neffbuild-<uid>`.

    Not under TMPDIR, which differs between processes that must meet here. Raises `StoreError` when
    the folder is not ours alone: somebody else could hold or swap every lock in it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(f"/tmp/neffbuild-{os.getuid()}")
    try:
        # sudo and container images leave the variable pointing to somebody else's folder, or nowhere.
        if base and Path(base).is_dir() and Path(base).stat().st_uid == os.getuid():
            folder = Path(base, "neffbuild")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise StoreError(
            f"cannot use {folder} for locks: {error.strerror}",
            hint="set XDG_RUNTIME_DIR to a folder of your own on a local disk",
        ) from error
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not ours or stat.S_IMODE(status.st_mode) & 0o077:
        raise StoreError(
            f"{folder} must be a folder that only you (uid {os.getuid()}) can enter; it is "
            f"{stat.filemode(status.st_mode)} of uid {status.st_uid}",
            hint="remove it, or set XDG_RUNTIME_DIR to a folder of your own",
        )
    return folder


def _acquire(path: Path, name: str, wait: float) -> int:
    deadline = time.monotonic() + wait
    delay = _FIRST_DELAY
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = Holder.parse(os.pread(descriptor, _HOLDER_BYTES, 0))
            _close(descriptor)
        except OSError as error:
            _close(descriptor)
            raise StoreError(f"cannot lock {path}: {error.strerror}") from error
        else:
            if _is_still_named(descriptor, path):
                return descriptor
            _close(descriptor)
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            raise LockTimeout(
                f"{name} is locked by {holder or 'a process that has not named itself yet'}; "
                f"gave up after {wait:g} s",
                hint=f"end process {holder.pid} if it is stuck, or wait longer" if holder else None,
            )
        time.sleep(min(delay, left))
        delay = min(delay * 2, _LONGEST_DELAY)


def _open(path: Path) -> int:
    try:
        # Without truncation: a loser must not erase what the holder wrote about itself. Python opens
        # descriptors that exec does not pass on.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StoreError(f"cannot open the lock file {path}: {error.strerror}") from error
    _open_descriptors.add(descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    # In a forked child the set is empty, and the number may by now be another file's.
    if descriptor in _open_descriptors:
        _open_descriptors.discard(descriptor)
        os.close(descriptor)


def _is_still_named(descriptor: int, path: Path) -> bool:
    """Whether the locked inode is the one a newcomer would open: a cleaner of old temporary files may
    have removed it between our opening and our locking."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    document = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    # One write of a fixed length: no truncation, so no moment at which a waiter reads half of it.
    os.pwrite(descriptor, json.dumps(document).encode().ljust(_HOLDER_BYTES), 0)


def _close_in_child() -> None:
    # A flock belongs to the open file, which a fork shares: left open here, the lock would outlive
    # the parent for as long as this child runs.
    for descriptor in _open_descriptors:
        os.close(descriptor)
    _open_descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)
