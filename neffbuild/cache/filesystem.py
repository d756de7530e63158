"""The calls a directory store is made of, and what they have to cope with on a network file system.

- An error that passes by itself is waited out, a second or so at most.
- A request that the client repeats because the answer was lost is refused by a server that has carried
  it out: whoever asks looks whether the work is done.
- A client remembers that a name was not there. Opening the folder makes it ask the server, so nothing
  counts as absent before that was done.
- A file that is removed while a process of the same host has it open stays as `.nfs…` until it is closed.

Everything else that a store does on a disk is made of these.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

PASSING = frozenset({errno.ESTALE, errno.EBUSY, errno.ESHUTDOWN})
"""Errors of network file systems that pass by themselves: a handle that was replaced on the server, a
file in use, a server that has just come back (Lustre)."""

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_AGAIN_FLAGS = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PAUSES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
_LOOKS = (0.05, 0.1, 0.2, 0.4)
_STILL_OPEN = ".nfs"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Item:
    """One name in a folder; a link to a folder is none."""

    name: str
    is_folder: bool


def patiently(call: Callable[[], _T]) -> _T:
    """What `call` returns, tried again with short pauses while its error is one that passes.

    `call` starts over from the beginning each time. Raises the last error when it stays.
    """
    for pause in _PAUSES:
        try:
            return call()
        except OSError as error:
            if error.errno not in PASSING:
                raise
        time.sleep(random.uniform(0.5, 1.0) * pause)
    return call()


def looks() -> Iterator[None]:
    """One turn at once and a few more with pauses, three quarters of a second in all: for what ought to
    be there, and may only be late to show."""
    yield
    for pause in _LOOKS:
        time.sleep(pause)
        yield


def confirmed(path: str | Path, look: Callable[[], _T]) -> _T:
    """What `look` returns; when it raises `FileNotFoundError`, it looks once more after the folders above
    `path` were opened."""
    try:
        return look()
    except FileNotFoundError:
        _open_above(path)
        return look()


def asking(path: str | Path, look: Callable[[], _T]) -> _T:
    """`confirmed`, patiently."""
    return patiently(lambda: confirmed(path, look))


def status(path: str | Path) -> os.stat_result:
    """Of the path itself, not of what it links to. Raises `OSError`."""
    return asking(path, lambda: os.lstat(path))


def is_folder(path: str | Path) -> bool:
    """Whether there is a folder, or a link to one."""
    try:
        return stat.S_ISDIR(asking(path, lambda: os.stat(path)).st_mode)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_taken(path: str | Path) -> bool:
    """Whether something has the name, as far as is known here: false does not make it free. Opened,
    because a client may remember what is gone by now."""
    try:
        os.close(patiently(lambda: os.open(path, READ_FLAGS)))
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EACCES):
            raise
    return True


def items(folder: str | Path) -> list[Item]:
    """What is in a folder, without files that are only still open. Raises `OSError`."""

    def scan() -> list[Item]:
        with os.scandir(folder) as found:
            return [Item(one.name, one.is_dir(follow_symlinks=False)) for one in found]

    return [one for one in asking(folder, scan) if not one.name.startswith(_STILL_OPEN)]


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close a descriptor. What closing says counts: it may be the first to learn of a full disk."""
    try:
        yield descriptor
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    os.close(descriptor)


def create(path: str | Path) -> int:
    """A descriptor of a new file under a name that nobody else uses. Respects the umask."""
    try:
        return os.open(path, _CREATE_FLAGS, 0o666)
    except FileExistsError:
        # From an attempt of ours that was given up, or whose answer was lost.
        return os.open(path, _AGAIN_FLAGS)


def write(descriptor: int, data: bytes) -> None:
    """Write all of it."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def sync(path: str | Path) -> None:
    """Make a file's content, or the names in a folder, survive a power failure."""

    def open_and_sync() -> None:
        with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
            try:
                os.fsync(descriptor)
            except OSError as error:
                # Some network file systems cannot sync a folder and need not.
                if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not is_folder(path):
                    raise

    patiently(open_and_sync)


def link(source: str | Path, target: str | Path) -> bool:
    """Give a file a second name. False when somebody has it. Raises `OSError`."""
    ours = status(source)

    def attempt() -> bool:
        try:
            os.link(source, target)
        except OSError as error:
            if _is(target, ours):
                return True
            if isinstance(error, FileExistsError):
                return False
            raise
        return True

    return patiently(attempt)


def rename(source: str | Path, target: str | Path) -> None:
    """Move a file or folder, in the place of a file that has the name. Raises `OSError`."""
    ours = status(source)

    def attempt() -> None:
        try:
            os.rename(source, target)  # noqa: PTH104
        except OSError:
            if not _is(target, ours):
                raise

    patiently(attempt)


def unlink(path: str | Path) -> None:
    """Remove a file; one that is gone already is no error. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        patiently(lambda: os.unlink(path))  # noqa: PTH108


def set_mode(path: str | Path, mode: int) -> None:
    """Change permission bits. Raises `OSError`."""
    patiently(lambda: os.chmod(path, mode))  # noqa: PTH101


def make_folder(path: str | Path) -> None:
    """Create a folder where there is nothing. Respects the umask. Raises `OSError`."""
    with contextlib.suppress(FileExistsError):
        patiently(lambda: os.mkdir(path))  # noqa: PTH102


def remove_tree(path: str | Path) -> None:
    """Remove a file, or a folder and what is in it; follows no link.

    Files that are only still open stay, with the folders they are in, and go with their last user: a
    process that has mapped one would be killed without it. Raises `OSError`.
    """
    patiently(lambda: _remove(path, None))


def remove_empty_folder(path: str | Path) -> None:
    """Remove a folder if there is nothing in it. Raises `OSError`."""
    patiently(lambda: _remove_empty(path, None))


def _remove(name: str | Path, above: int | None) -> None:
    """`above` is the descriptor of the folder that `name` is in."""
    try:
        os.unlink(name, dir_fd=above)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        with contextlib.suppress(FileNotFoundError):
            flags = _FOLDER_FLAGS | os.O_NOFOLLOW
            with closing(os.open(name, flags, dir_fd=above)) as folder:
                with os.scandir(folder) as found:
                    names = [one.name for one in found]
                for one in names:
                    if not one.startswith(_STILL_OPEN):
                        _remove(one, folder)
        _remove_empty(name, above)


def _remove_empty(name: str | Path, above: int | None) -> None:
    try:
        os.rmdir(name, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY):
            raise


def _is(path: str | Path, ours: os.stat_result) -> bool:
    """Whether the path names that very file, by what the server says."""
    _open_above(path)
    try:
        return os.path.samestat(os.lstat(path), ours)
    except FileNotFoundError:
        return False


def _open_above(path: str | Path) -> None:
    """Open the folder a path is in, or else the nearest one above that can be opened."""
    for folder in Path(path).parents:
        try:
            os.close(os.open(folder, _FOLDER_FLAGS))
        except FileNotFoundError:
            continue
        except OSError:
            return
        return
