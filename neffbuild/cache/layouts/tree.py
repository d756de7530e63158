"""A folder that somebody else filled, read without believing or following anything in it.

Every part of every path is opened by itself, below the folder it was seen in, and links are not followed:
what is swapped between looking and opening is refused or not there, never somewhere else on the machine.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from neffbuild.cache import files, filesystem
from neffbuild.cache.entry import FileRecord
from neffbuild.config.errors import ConfigError, IntegrityError

MOST_FILE_BYTES = 1 << 34
MOST_UNIT_BYTES = 1 << 36
MOST_UNIT_FILES = 4096
MOST_NAMES = 250_000
"""Names in one folder."""
MOST_DEPTH = 8
"""Folders below the one of a unit."""
LONGEST_NAME = 180
"""Bytes of a file's path below its root: entries hold it behind a prefix, and 255 in all."""

NO_FOLDER = "is a link, file, device, pipe or socket where a folder belongs"

MODE = 0o644
"""Permission bits that files of a foreign tree are recorded with. Its own say nothing about them."""

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SAFE_PART = re.compile(r"(?!\.{1,2}\Z)[^/\\\x00-\x1f\x7f]+")
_CHUNK = 1 << 20


class Unsafe(Exception):
    """Something that no engine leaves in its cache, and that is not touched. The message says what."""


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A regular file. `name` is its path below the root of the tree, `size` in bytes; `stamp` changes when
    somebody writes to it."""

    name: str
    size: int
    stamp: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Names:
    """What is in one folder: names of regular files, of folders, and of everything else."""

    files: tuple[str, ...]
    folders: tuple[str, ...]
    others: tuple[str, ...]


class Tree:
    """A foreign tree below `root`, which itself may be a link: it is what the user named."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def require(self) -> None:
        """Raise `ConfigError` unless there is a folder, `StoreError` where it cannot be read."""
        with files.refusals("read", self.root):
            if filesystem.is_folder(self.root):
                return
            there = filesystem.is_taken(self.root)
        raise ConfigError(
            f"{self.root} is {'no folder' if there else 'not there'}",
            value=str(self.root),
            hint="name the folder that holds the engine's cache",
        )

    def names(self, folder: str = "") -> Names:
        """What is in a folder, sorted; nothing where there is none. Raises `OSError`, and `Unsafe` where
        there is more than any cache has."""
        sorts: dict[str, list[str]] = {"files": [], "folders": [], "others": []}
        try:
            with self._folder(folder) as descriptor, os.scandir(descriptor) as found:
                for count, one in enumerate(found):
                    if count >= MOST_NAMES:
                        raise Unsafe(f"{folder or '.'} holds more than {MOST_NAMES:,} names")
                    if one.is_dir(follow_symlinks=False):
                        sorts["folders"].append(one.name)
                    elif one.is_file(follow_symlinks=False):
                        sorts["files"].append(one.name)
                    else:
                        sorts["others"].append(one.name)
        except (FileNotFoundError, NotADirectoryError):
            pass
        return Names(*(tuple(sorted(one)) for one in sorts.values()))

    def file(self, name: str) -> TreeFile | None:
        """A file, or None where there is none (a link is none). Raises `OSError`."""
        try:
            with self.opened(name) as descriptor:
                return _tree_file(name, os.fstat(descriptor))
        except (FileNotFoundError, NotADirectoryError, Unsafe):
            return None

    def is_no_folder(self, name: str) -> bool:
        """Whether a name is taken by something else than a folder. Raises `OSError`."""
        try:
            return not stat.S_ISDIR((self.root / name).lstat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def below(self, folder: str) -> dict[str, TreeFile]:
        """name → file, of everything at and below a folder.

        Raises `Unsafe` for links, devices, pipes, sockets, names that no path may hold, and more or larger
        files than a unit has; `OSError`.
        """
        found: dict[str, TreeFile] = {}
        self._collect(folder, 0, found)
        return found

    def read(self, name: str, most: int) -> bytes | None:
        """The content of a small file; None where there is none. Raises `Unsafe` above `most` bytes,
        `OSError`."""
        try:
            with self.opened(name) as descriptor:
                data = b"".join(_chunks(descriptor, most))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if len(data) > most:
            raise Unsafe(f"{name} has more than {most:,} bytes")
        return data

    def record(self, file: TreeFile) -> FileRecord:
        """Read a file to its end. Raises `Unsafe` when it is not what was seen any more."""
        content = hashlib.sha256()
        for chunk in self.content(file):
            content.update(chunk)
        return FileRecord(content.hexdigest(), file.size, MODE)

    def source(self, file: TreeFile) -> TreeSource:
        """The file as what `DirectoryStore.receive_blob` copies from."""
        return TreeSource(self, file)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """A descriptor of a regular file. Raises `Unsafe` for anything else, `OSError`."""
        folder, _, leaf = name.rpartition("/")
        with self._folder(folder) as above:
            try:
                descriptor = os.open(_safe(leaf), filesystem.READ_FLAGS, dir_fd=above)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise Unsafe(f"{name} is no regular file") from error
                raise
            with filesystem.closing(descriptor):
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise Unsafe(f"{name} is no regular file")
                yield descriptor

    def content(self, file: TreeFile) -> Iterator[bytes]:
        """A file's content to its end. Raises `Unsafe` when it is not what was seen any more, also for what
        the system says of it then: whoever copies must not take that for an error of the copy."""
        try:
            with self.opened(file.name) as descriptor:
                size = 0
                for chunk in _chunks(descriptor, file.size):
                    size += len(chunk)
                    yield chunk
                if size != file.size or _tree_file(file.name, os.fstat(descriptor)) != file:
                    raise Unsafe(f"{file.name} changed while it was read")
        except OSError as error:
            raise Unsafe(f"{file.name} cannot be read any more: {error.strerror}") from error

    @contextlib.contextmanager
    def _folder(self, folder: str) -> Iterator[int]:
        descriptor = filesystem.patiently(lambda: os.open(self.root, _FOLDER_FLAGS))
        try:
            for part in folder.split("/") if folder else ():
                below = os.open(_safe(part), _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)

    def _collect(self, folder: str, depth: int, found: dict[str, TreeFile]) -> None:
        if depth > MOST_DEPTH:
            raise Unsafe(f"{folder} is more than {MOST_DEPTH} folders deep")
        names = self.names(folder)
        if names.others:
            raise Unsafe(f"{folder}/{names.others[0]!r} is a link, device, pipe or socket")
        for leaf in names.files:
            name = f"{folder}/{_safe(leaf)}"
            file = self.file(name)
            if file is None:
                continue  # gone in the meantime, as temporary files are
            if len(name.encode()) > LONGEST_NAME:
                raise Unsafe(f"{name!r} is longer than {LONGEST_NAME} bytes")
            if file.size > MOST_FILE_BYTES:
                raise Unsafe(f"{name} has {file.size:,} bytes, more than {MOST_FILE_BYTES:,}")
            found[name] = file
        if len(found) > MOST_UNIT_FILES:
            raise Unsafe(f"{folder} holds more than {MOST_UNIT_FILES:,} files")
        if sum(one.size for one in found.values()) > MOST_UNIT_BYTES:
            raise Unsafe(f"{folder} holds more than {MOST_UNIT_BYTES:,} bytes")
        for leaf in names.folders:
            self._collect(f"{folder}/{_safe(leaf)}", depth + 1, found)


@dataclass(frozen=True, slots=True)
class TreeSource:
    """One file of a tree, to be copied under the digest it was read with."""

    tree: Tree
    file: TreeFile

    def fetch_blob(self, digest: str, size: int, destination: Path) -> None:
        """Raises `IntegrityError` when the file is not that any more."""
        content = hashlib.sha256()
        try:
            with filesystem.closing(filesystem.create(destination)) as target:
                for chunk in self.tree.content(self.file):
                    content.update(chunk)
                    filesystem.write(target, chunk)
            if content.hexdigest() != digest:
                raise Unsafe(f"{self.file.name} changed while it was read")
        except Unsafe as error:
            filesystem.unlink(destination)
            raise IntegrityError(str(error), value=self.file.name) from error


def _tree_file(name: str, status: os.stat_result) -> TreeFile:
    return TreeFile(name, status.st_size, (status.st_ino, status.st_mtime_ns, status.st_ctime_ns))


def _chunks(descriptor: int, most: int) -> Iterator[bytes]:
    """A file's content, ending soon after `most` bytes whatever is appended meanwhile."""
    left = most
    while left >= 0 and (chunk := os.read(descriptor, _CHUNK)):
        left -= len(chunk)
        yield chunk


def _safe(part: str) -> str:
    if _SAFE_PART.fullmatch(part) is None or not _is_utf8(part):
        raise Unsafe(f"{part!r} is not a name that an engine gives")
    return part


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a name in other bytes, as Python carries it
        return False
    return True
