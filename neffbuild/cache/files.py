"""Files that are either whole or not there: durable writes, and reads that trust nothing.

Everything here works on local and network file systems alike; what may differ between them is named
at the line that copes with it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from neffbuild.cache.problem import ProblemKind
from neffbuild.config.errors import StoreError

_CHUNK = 1 << 20
_LARGEST_DOCUMENT = 1 << 28
_MOST_DOCUMENTS = 1 << 16  # one small read: thousands of entries are read for a plan
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HINTS = {
    errno.ENOSPC: "free space there, or name another directory",
    errno.EDQUOT: "free some of the quota, or name another directory",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EACCES: "check who owns the path and its permissions",
    errno.EPERM: "check who owns the path and its permissions",
    errno.ENOTDIR: "a part of that path is a file: name a directory",
    errno.EROFS: "the file system is read-only: name a writable directory for new artifacts",
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
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir()
    except FileExistsError as error:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make names created in or moved into a folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder and need not.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make a file's content survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet, through to the disk. Respects the umask."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def link_new(source: Path, path: Path) -> bool:
    """Give a finished file its name if nobody has it. False when somebody has.

    Raises `OSError` with an errno of `NO_LINKS` where the file system has no hard links.
    """
    try:
        os.link(source, path)
    except FileExistsError:
        # NFS may repeat a request whose answer was lost, and then refuses what it has just done.
        return os.path.samestat(source.lstat(), path.lstat())
    return True


def read_document(path: str) -> bytes | None:
    """The file's bytes, or None when there is none.

    A symbolic link, folder, pipe or device in a document's place reads as empty: damaged, never
    followed, never waited for. So does the rest of a file beyond any sensible size.
    """
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return b""
        raise
    try:
        data = os.read(descriptor, _MOST_DOCUMENTS)
        if len(data) == _MOST_DOCUMENTS:
            parts, size = [data], len(data)
            while size < _LARGEST_DOCUMENT and (part := os.read(descriptor, _CHUNK)):
                parts.append(part)
                size += len(part)
            data = b"".join(parts)
    except (IsADirectoryError, BlockingIOError):
        return b""
    finally:
        os.close(descriptor)
    return data


def open_regular(path: Path) -> IO[bytes] | None:
    """A regular file opened for reading, or None when there is none under that very name."""
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")


def file_fault(
    path: Path, digest: str, size: int, copy: IO[bytes] | None = None
) -> ProblemKind | None:
    """Read a file to its end and say what is wrong with it; what is read is written to `copy`."""
    file = open_regular(path)
    if file is None:
        return ProblemKind.MISSING_BLOB
    with file:
        if os.fstat(file.fileno()).st_size != size:
            return ProblemKind.BAD_SIZE
        content = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            content.update(chunk)
            if copy is not None:
                copy.write(chunk)
    return None if content.hexdigest() == digest else ProblemKind.BAD_DIGEST


def copy_executable_bits(path: Path, mode: int) -> None:
    """Let whoever may read the file execute it, where `mode` says it is a program."""
    if mode & 0o111:
        current = stat.S_IMODE(path.stat().st_mode)
        path.chmod(current | (current & 0o444) >> 2)


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
            status = path.lstat()
        except FileNotFoundError:
            return ProblemKind.MISSING_BLOB
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if self._digests.get(identity) == digest and status.st_size == size:
            return None
        fault = file_fault(path, digest, size)
        if fault is None:
            self._digests[identity] = digest
        return fault
