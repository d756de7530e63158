"""A store in a directory: local, or shared over a network file system.

Every write goes to a temporary name first and is made durable before it gets its own, so a process
killed at any moment leaves whole files and nothing to clean before the next run. A directory that
cannot be written still serves reads.

Replacing a document compares and writes under a lock that the processes of one user on one host
share. Several hosts or users may build into one directory (creating is atomic everywhere); to move
tags from several hosts at once, use a store with conditional writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from neffbuild.cache import files, filesystem
from neffbuild.cache.canonical import digest_bytes, is_digest
from neffbuild.cache.lock import host_lock
from neffbuild.cache.names import (
    LAYOUT,
    NOT_DOCUMENTS,
    is_name,
    is_place_of_document,
    valid_name,
    valid_prefix,
)
from neffbuild.cache.problem import ProblemKind
from neffbuild.cache.store import BlobSource, Document, Leftover, LeftoverKind, Listed
from neffbuild.config.errors import IntegrityError

_LOCK_WAIT = 60.0
_LEFTOVERS: Mapping[str, LeftoverKind] = {
    "tmp": "temporary",
    "loaded": "loaded",
    "quarantine": "quarantined",
}


class DirectoryStore:
    """Documents under their names below `v1/`, blobs raw under `v1/blobs/sha256/<aa>/<digest>`,
    unfinished writes in `v1/tmp/`. What each method promises is said once, in `Store`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.checked = files.CheckedFiles()
        self._base = self.root / LAYOUT
        self._blobs = f"{self._base}/blobs/sha256"

    @property
    def url(self) -> str:
        return str(self.root)

    @property
    def identity(self) -> str:
        return os.path.realpath(self.root)

    def read(self, name: str) -> Document | None:
        path = self._document_path(name)
        with files.refusals("read", path):
            data = files.read_document(str(path))
        return None if data is None else Document(data, digest_bytes(data))

    def read_many(self, names: Iterable[str]) -> Iterator[tuple[str, Document]]:
        for name in self._present(names):
            path = f"{self._base}/{name}"
            with files.refusals("read", path):
                data = files.read_document(path)
            if data is not None:
                yield name, Document(data, digest_bytes(data))

    def present_documents(self, names: Iterable[str]) -> set[str]:
        return set(self._present(names))

    def create(self, name: str, data: bytes) -> bool:
        path = self._document_path(name)
        with files.refusals("write", path):
            if filesystem.is_taken(path):
                return False
            with self._temporary() as temporary:
                files.write_synced(temporary, data)
                files.make_folder(path.parent)
                created = self._create(temporary, path)
            if created:
                filesystem.sync(path.parent)
            return created

    def replace(self, name: str, data: bytes, version: str) -> bool:
        path = self._document_path(name)
        with files.refusals("write", path), self._lock(path):
            current = self.read(name)
            if current is None or current.version != version:
                return False
            with self._temporary() as temporary:
                files.write_synced(temporary, data)
                self._give_name(temporary, path)
            filesystem.sync(path.parent)
            return True

    def delete(self, name: str) -> None:
        path = self._document_path(name)
        with files.refusals("delete", path):
            try:
                filesystem.unlink(path)
            except IsADirectoryError:
                self._set_aside(path)  # what is in it is not ours to destroy

    def list(self, prefix: str) -> Iterator[Listed]:
        folder, _, start = valid_prefix(prefix).rpartition("/")
        place = self._base / folder
        with files.refusals("list", place):
            # A slip of whoever named it, or damage; taken for an empty store, it would cost a collector's
            # user everything.
            for path in (self.root, place):
                if filesystem.is_taken(path) and not filesystem.is_folder(path):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            yield from self._list(f"{folder}/" if folder else "", start)

    def blob_path(self, digest: str) -> Path:
        """Where a blob lies, for use in place. Nothing is checked: see `check_blob`."""
        if not is_digest(digest):
            raise IntegrityError(f"malformed SHA-256 digest {digest!r}")
        return Path(f"{self._blobs}/{digest[:2]}/{digest}")

    def present_blobs(self, sizes: Mapping[str, int]) -> set[str]:
        present = set()
        with files.refusals("read", self._blobs):
            for digest, size in sizes.items():
                try:
                    status = filesystem.status(f"{self._blobs}/{digest[:2]}/{digest}")
                except FileNotFoundError:
                    continue
                if status.st_size == size and stat.S_ISREG(status.st_mode):
                    present.add(digest)
        return present

    def put_blob(self, digest: str, source: Path) -> None:
        path = self.blob_path(digest)
        with files.refusals("read", source):
            source = source.resolve()
            status = filesystem.status(source)
        # Reading an old blob is cheap beside what it took to make the new one, and a damaged one
        # must not outlive this write.
        if self.check_blob(digest, status.st_size) is None:
            return
        with files.refusals("write", path), self._temporary() as temporary:
            fault = files.copy_checked(source, digest, status.st_size, temporary)
            if fault is not None:
                raise IntegrityError(
                    f"{source} is not the blob {digest} it was recorded as ({fault.value})",
                    hint="something wrote to the file while it was being stored",
                )
            self._keep_blob(temporary, path, status.st_mode)

    def fetch_blob(self, digest: str, size: int, destination: Path) -> None:
        path = self.blob_path(digest)
        try:
            with files.copy_refusals(path, destination):
                fault = files.copy_checked(path, digest, size, destination)
            if fault is not None:
                raise IntegrityError(
                    f"blob {digest} in {self.url} is damaged or gone ({fault.value})",
                    hint="`neffbuild verify URL --repair`, then push it again from where it was built",
                )
        except BaseException:
            with contextlib.suppress(OSError):
                filesystem.unlink(destination)
            raise

    def receive_blob(self, digest: str, size: int, mode: int, remote: BlobSource) -> None:
        """Store a blob fetched from elsewhere; `mode` are the permission bits of its record."""
        path = self.blob_path(digest)
        with files.refusals("write", path), self._temporary() as temporary:
            remote.fetch_blob(digest, size, temporary)
            self._keep_blob(temporary, path, mode)

    def check_blob(self, digest: str, size: int) -> ProblemKind | None:
        path = self.blob_path(digest)
        with files.refusals("read", path):
            return files.file_fault(path, digest, size)

    def quarantine(
        self, label: str, documents: Mapping[str, str], blobs: Mapping[str, int]
    ) -> None:
        folder = self._quarantine_folder(label)
        with files.refusals("quarantine to", folder):
            files.make_folder(folder)
            for name, version in documents.items():
                self._quarantine_document(name, version, folder)
            for digest, size in blobs.items():
                if self.check_blob(digest, size) is not None:
                    with contextlib.suppress(FileNotFoundError):
                        filesystem.rename(self.blob_path(digest), folder / digest)
            filesystem.remove_empty_folder(folder)  # only does where nothing had to be moved

    def effective(self) -> dict[str, str | bool | float | None]:
        there = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        return {
            "path": str(self.root),
            "exists": self.root.exists(),
            "writable": there.is_dir() and os.access(there, os.W_OK | os.X_OK),
            "file_system": files.file_system(there),
        }

    def list_blobs(self) -> Iterator[Listed]:
        with files.refusals("list", self._blobs):
            for folder in _items(self._blobs):
                above = f"{self._blobs}/{folder.name}"
                for item in _items(above):
                    if not is_digest(item.name):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = filesystem.status(f"{above}/{item.name}")
                        if stat.S_ISREG(status.st_mode):
                            yield Listed(item.name, status.st_size, status.st_mtime)

    def list_leftovers(self) -> Iterator[Leftover]:
        for name, kind in _LEFTOVERS.items():
            with files.refusals("list", self._base / name):
                for item in _items(self._base / name):
                    size, modified = _extent(self._base / name / item.name)
                    if kind == "loaded":  # links to blobs
                        yield Leftover(kind, f"{name}/{item.name}", 0, modified, item.name)
                    else:
                        yield Leftover(kind, f"{name}/{item.name}", size, modified)

    def delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            self.delete(name)

    def delete_blobs(self, digests: Sequence[str]) -> None:
        for digest in digests:
            path = self.blob_path(digest)
            with files.refusals("delete", path):
                filesystem.unlink(path)

    def delete_leftover(self, leftover: Leftover) -> None:
        path = self._base / leftover.name
        with files.refusals("delete", path):
            filesystem.remove_tree(path)

    @contextlib.contextmanager
    def scratch_folder(self) -> Iterator[Path]:
        """An empty folder on the store's file system, removed at the end unless renamed away."""
        with files.refusals("write below", self._base), self._temporary() as temporary:
            filesystem.make_folder(temporary)
            yield temporary

    def loaded_path(self, key: str) -> Path:
        """Where the files of entries with this key are laid out under their real names."""
        return self._document_path(f"loaded/{key}")

    def _present(self, names: Iterable[str]) -> Iterator[str]:
        """Those of the names that there are, by one look at each folder."""
        by_folder: dict[str, list[str]] = {}
        for name in names:
            folder, _, leaf = valid_name(name).rpartition("/")
            by_folder.setdefault(folder, []).append(leaf)
        for folder, leaves in by_folder.items():
            path = f"{self._base}/{folder}"
            with files.refusals("read", path):
                try:
                    present = {item.name for item in filesystem.items(path)}
                except FileNotFoundError:
                    continue
            yield from (f"{folder}/{leaf}" for leaf in present.intersection(leaves))

    def _document_path(self, name: str) -> Path:
        return self._base / valid_name(name)

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path]:
        """A name nobody else uses, on the store's file system; what is left under it is removed."""
        folder = self._base / "tmp"
        files.make_folder(folder)
        path = folder / f"{os.getpid()}-{os.urandom(8).hex()}"
        try:
            yield path
        finally:
            # What cannot be removed is for the collector, and no reason to call a write failed.
            with contextlib.suppress(OSError):
                filesystem.remove_tree(path)

    def _lock(self, path: Path) -> contextlib.AbstractContextManager[None]:
        return host_lock(str(path.resolve()), wait=_LOCK_WAIT)

    def _create(self, temporary: Path, path: Path) -> bool:
        try:
            return filesystem.link(temporary, path)
        except OSError as error:
            if error.errno not in files.NO_LINKS:
                raise
        # No hard links here: the check and the rename are one step only for this host's processes.
        # Another host may overwrite the document with an equally whole one.
        with self._lock(path):
            if filesystem.is_taken(path):
                return False
            filesystem.rename(temporary, path)
            return True

    def _keep_blob(self, temporary: Path, path: Path, mode: int) -> None:
        files.copy_executable_bits(temporary, mode)
        filesystem.sync(temporary)
        files.make_folder(path.parent)
        self._give_name(temporary, path)
        filesystem.sync(path.parent)

    def _give_name(self, temporary: Path, path: Path) -> None:
        """Put a finished file in the place of whatever has its name."""
        try:
            filesystem.rename(temporary, path)
        except IsADirectoryError:
            self._set_aside(path)
            filesystem.rename(temporary, path)

    def _set_aside(self, path: Path) -> None:
        folder = self._quarantine_folder(path.stem)
        files.make_folder(folder)
        with contextlib.suppress(FileNotFoundError):
            filesystem.rename(path, folder / path.name)

    def _quarantine_folder(self, label: str) -> Path:
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        return self._document_path(f"quarantine/{label}-{when}-{os.urandom(3).hex()}")

    def _quarantine_document(self, name: str, version: str, folder: Path) -> None:
        path = self._document_path(name)
        with self._lock(path):
            current = self.read(name)
            if current is not None and current.version == version:
                filesystem.rename(path, folder / path.name)

    def _list(self, folder: str, start: str) -> Iterator[Listed]:
        for item in _items(self._base / folder):
            if not item.name.startswith(start) or (not folder and item.name in NOT_DOCUMENTS):
                continue
            if item.is_folder and not is_place_of_document(folder, item.name):
                yield from self._list(f"{folder}{item.name}/", "")
            elif is_name(item.name):
                with contextlib.suppress(FileNotFoundError):
                    status = filesystem.status(self._base / folder / item.name)
                    yield Listed(f"{folder}{item.name}", status.st_size, status.st_mtime)


def _items(folder: Path | str) -> list[filesystem.Item]:
    """What is in a folder; nothing where there is none, or something else in its place."""
    try:
        return filesystem.items(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _extent(path: Path) -> tuple[int, float]:
    """Bytes of what lies at and below a path, and when any of it was last changed."""
    try:
        status = filesystem.status(path)
    except FileNotFoundError:
        return 0, 0.0
    size, modified = status.st_size, status.st_mtime
    if stat.S_ISDIR(status.st_mode):
        below = [_extent(path / item.name) for item in _items(path)]
        size = sum(one[0] for one in below)
        modified = max([modified, *(one[1] for one in below)])
    return size, modified
