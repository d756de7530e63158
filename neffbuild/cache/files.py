"""Files that are either whole or not there: durable writes, and reads that trust nothing.

Everything here works on local and network file systems alike: it is made of the calls in
`neffbuild.cache.filesystem`, which cope with what differs between them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from neffbuild.cache import filesystem
from neffbuild.cache.problem import ProblemKind
from neffbuild.config.errors import StoreError

LARGEST_DOCUMENT = 1 << 28
"""Bytes of a document that are read; no document of ours comes near."""

_CHUNK = 1 << 20
_MOST_DOCUMENTS = 1 << 16  # one small read: thousands of entries are read for a plan
_HINTS = {
    errno.ENOSPC: "free space there, or name another directory",
    errno.EDQUOT: "free some of the quota, or name another directory",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EACCES: "check who owns the path and its permissions",
    errno.EPERM: "check who owns the path and its permissions",
    errno.ENOTDIR: "a part of that path is a file: name a directory",
    errno.EROFS: "the file system is read-only: name a writable directory for new artifacts",
    errno.EIO: "the disk or the file server failed (see `dmesg`); run it again once that works",
    errno.ESTALE: "the file server no longer knows the path: run it again; if it stays, mount it anew",
    errno.EBUSY: "a process has it in use (see `fuser -v`); run it again when that has ended",
    errno.ESHUTDOWN: "the file server cut this host off; run it again when the mount works",
    errno.ETIMEDOUT: "the file server does not answer; run it again when it does",
}
_NO_WRITES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS})
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
"""What a file system answers that has no hard link for us."""


@contextlib.contextmanager
def refusals(action: str, path: Path | str) -> Iterator[None]:
    """Turn an `OSError` into a `StoreError` that names the path and the cause."""
    try:
        yield
    except OSError as error:
        other = error.filename if error.filename and str(error.filename) != str(path) else None
        raise StoreError(
            f"cannot {action} {path}: {error.strerror or error}" + (f" ({other})" if other else ""),
            value=str(path),
            hint=_HINTS.get(error.errno or 0),
        ) from error


@contextlib.contextmanager
def copy_refusals(source: Path, target: Path) -> Iterator[None]:
    """`refusals` for `copy_checked`: the path is that of the file which failed."""
    try:
        yield
    except OSError as error:
        wrote = error.filename is not None and str(error.filename) == str(target)
        with refusals("write", target) if wrote else refusals("copy", source):
            raise


def says_unwritable(error: StoreError) -> bool:
    """Whether an error of `refusals` means that the place can be read and not written (or is full)."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _NO_WRITES


def file_system(path: Path) -> str | None:
    """The kind of file system that a path is on (`ext4`, `nfs4`, `lustre`), where the kernel tells."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
        real = path.resolve()
    except OSError:
        return None
    kinds: dict[str, str] = {}
    for line in mounts.splitlines():
        _, place, kind, *_ = line.split(" ")
        kinds[place.replace("\\040", " ")] = kind  # of several on one place the last is on top
    return next((kinds[str(one)] for one in (real, *real.parents) if str(one) in kinds), None)


def make_folder(path: Path) -> None:
    """Create a folder and those above it, so that they survive a power failure. Respects the umask."""
    if filesystem.is_folder(path):
        return
    make_folder(path.parent)
    filesystem.make_folder(path)
    if not filesystem.is_folder(path):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    filesystem.sync(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file under a name that nobody else uses, through to the disk. Respects the umask."""

    def write() -> None:
        with filesystem.closing(filesystem.create(path)) as descriptor:
            filesystem.write(descriptor, data)
            os.fsync(descriptor)

    filesystem.patiently(write)


def read_document(path: str) -> bytes | None:
    """The file's bytes, or None when there is none.

    A symbolic link, folder, pipe or device in a document's place reads as empty: damaged, never
    followed, never waited for. So does the rest of a file beyond any sensible size.
    """
    try:
        return filesystem.asking(path, lambda: _read_whole(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EAGAIN):
            return b""
        raise


def _read_whole(path: str) -> bytes:
    with filesystem.closing(os.open(path, filesystem.READ_FLAGS)) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        # Almost always all of it; but a file server may hand out less than there is.
        parts = [os.read(descriptor, _MOST_DOCUMENTS)]
        size = len(parts[0])
        while parts[-1] and size < LARGEST_DOCUMENT:
            parts.append(os.read(descriptor, _CHUNK))
            size += len(parts[-1])
    return b"".join(parts)


def file_fault(path: Path, digest: str, size: int) -> ProblemKind | None:
    """Read a file to its end and say what is wrong with it."""
    return filesystem.patiently(lambda: _examine(path, digest, size, lambda _: None))


def copy_checked(source: Path, digest: str, size: int, target: Path) -> ProblemKind | None:
    """Copy a file to a name that nobody else uses and say what is wrong with the source, where the copy
    is of no use then. Respects the umask. An `OSError` says by its `filename` which of the two failed."""

    def write(descriptor: int, data: bytes) -> None:
        with _naming(target):
            filesystem.write(descriptor, data)

    def copy() -> ProblemKind | None:
        with _naming(target), filesystem.closing(filesystem.create(target)) as descriptor:
            return _examine(source, digest, size, partial(write, descriptor))

    return filesystem.patiently(copy)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an error say which file it is of, where it does not: calls on a descriptor know no name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _examine(
    path: Path, digest: str, size: int, write: Callable[[bytes], None]
) -> ProblemKind | None:
    try:
        opened = filesystem.confirmed(path, lambda: os.open(path, filesystem.READ_FLAGS))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return ProblemKind.MISSING_BLOB
        raise
    with _naming(path), filesystem.closing(opened) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return ProblemKind.MISSING_BLOB
        if status.st_size != size:
            return ProblemKind.BAD_SIZE
        content = hashlib.sha256()
        while chunk := os.read(descriptor, _CHUNK):
            content.update(chunk)
            write(chunk)
    return None if content.hexdigest() == digest else ProblemKind.BAD_DIGEST


def copy_executable_bits(path: Path, mode: int) -> None:
    """Let whoever may read the file execute it, where `mode` says it is a program."""
    if mode & 0o111:
        current = stat.S_IMODE(filesystem.status(path).st_mode)
        filesystem.set_mode(path, current | (current & 0o444) >> 2)


class CheckedFiles:
    """Files whose content this process has read and found right.

    A file is read once per process before its first use, and again when its inode, size or times
    have changed. Nothing is remembered on disk: a mark there would have to be trusted itself.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[int, int, int, int], str] = {}

    def fault(self, path: Path, digest: str, size: int) -> ProblemKind | None:
        """What is wrong with the file, reading it only if it is not known already."""
        try:
            status = filesystem.status(path)
        except FileNotFoundError:
            return ProblemKind.MISSING_BLOB
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if self._digests.get(identity) == digest and status.st_size == size:
            return None
        fault = file_fault(path, digest, size)
        if fault is None:
            self._digests[identity] = digest
        return fault
