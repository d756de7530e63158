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
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from neffbuild.cache import files
from neffbuild.cache.canonical import digest_bytes, is_digest
from neffbuild.cache.lock import host_lock
from neffbuild.cache.names import LAYOUT, NOT_DOCUMENTS, is_name, valid_name, valid_prefix
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
            if os.path.lexists(path):
                return False
            with self._temporary() as temporary:
                files.write_synced(temporary, data)
                files.make_folder(path.parent)
                created = self._create(temporary, path)
            if created:
                files.sync_folder(path.parent)
            return created

    def replace(self, name: str, data: bytes, version: str) -> bool:
        path = self._document_path(name)
        with files.refusals("write", path), self._lock(path):
            current = self.read(name)
            if current is None or current.version != version:
                return False
            with self._temporary() as temporary:
                files.write_synced(temporary, data)
                temporary.replace(path)
            files.sync_folder(path.parent)
            return True

    def delete(self, name: str) -> None:
        path = self._document_path(name)
        with files.refusals("delete", path):
            path.unlink(missing_ok=True)

    def list(self, prefix: str) -> Iterator[Listed]:
        folder, _, start = valid_prefix(prefix).rpartition("/")
        with files.refusals("list", self._base / folder):
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
                    status = os.lstat(f"{self._blobs}/{digest[:2]}/{digest}")
                except FileNotFoundError:
                    continue
                if status.st_size == size and stat.S_ISREG(status.st_mode):
                    present.add(digest)
        return present

    def put_blob(self, digest: str, source: Path) -> None:
        path = self.blob_path(digest)
        with files.refusals("read", source):
            status = source.stat()
        # Reading an old blob is cheap beside what it took to make the new one, and a damaged one
        # must not outlive this write.
        if self.check_blob(digest, status.st_size) is None:
            return
        with files.refusals("write", path), self._temporary() as temporary:
            with temporary.open("xb") as file:
                fault = files.file_fault(source.resolve(), digest, status.st_size, copy=file)
            if fault is not None:
                raise IntegrityError(
                    f"{source} is not the blob {digest} it was recorded as ({fault.value})",
                    hint="something wrote to the file while it was being stored",
                )
            self._keep_blob(temporary, path, status.st_mode)

    def fetch_blob(self, digest: str, size: int, destination: Path) -> None:
        path = self.blob_path(digest)
        try:
            with files.refusals("copy", path), destination.open("wb") as file:
                fault = files.file_fault(path, digest, size, copy=file)
            if fault is not None:
                raise IntegrityError(
                    f"blob {digest} in {self.url} is damaged or gone ({fault.value})",
                    hint="`neffbuild verify URL --repair`, then push it again from where it was built",
                )
        except BaseException:
            with contextlib.suppress(OSError):
                destination.unlink()
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
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        folder = self._document_path(f"quarantine/{label}-{when}-{os.urandom(3).hex()}")
        with files.refusals("quarantine to", folder):
            files.make_folder(folder)
            for name, version in documents.items():
                self._quarantine_document(name, version, folder)
            for digest, size in blobs.items():
                if self.check_blob(digest, size) is not None:
                    with contextlib.suppress(FileNotFoundError):
                        self.blob_path(digest).rename(folder / digest)
            with contextlib.suppress(OSError):
                folder.rmdir()  # only succeeds where nothing had to be moved

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
            for folder in _scan(Path(self._blobs)):
                for item in _scan(Path(folder.path)):
                    if is_digest(item.name) and item.is_file(follow_symlinks=False):
                        status = item.stat(follow_symlinks=False)
                        yield Listed(item.name, status.st_size, status.st_mtime)

    def list_leftovers(self) -> Iterator[Leftover]:
        for name, kind in _LEFTOVERS.items():
            with files.refusals("list", self._base / name):
                for item in _scan(self._base / name):
                    size, modified = _extent(Path(item.path))
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
                path.unlink(missing_ok=True)

    def delete_leftover(self, leftover: Leftover) -> None:
        path = self._base / leftover.name
        with files.refusals("delete", path):
            _remove(path)

    @contextlib.contextmanager
    def scratch_folder(self) -> Iterator[Path]:
        """An empty folder on the store's file system, removed at the end unless renamed away."""
        with files.refusals("write below", self._base), self._temporary() as temporary:
            temporary.mkdir()
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
                    with os.scandir(path) as scan:
                        present = {item.name for item in scan}
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
            _remove(path)

    def _lock(self, path: Path) -> contextlib.AbstractContextManager[None]:
        return host_lock(str(path.resolve()), wait=_LOCK_WAIT)

    def _create(self, temporary: Path, path: Path) -> bool:
        try:
            return files.link_new(temporary, path)
        except OSError as error:
            if error.errno not in files.NO_LINKS:
                raise
        # No hard links here: the check and the rename are one step only for this host's processes.
        # Another host may overwrite the document with an equally whole one.
        with self._lock(path):
            if os.path.lexists(path):
                return False
            temporary.rename(path)
            return True

    def _keep_blob(self, temporary: Path, path: Path, mode: int) -> None:
        files.copy_executable_bits(temporary, mode)
        files.sync_file(temporary)
        files.make_folder(path.parent)
        temporary.replace(path)
        files.sync_folder(path.parent)

    def _quarantine_document(self, name: str, version: str, folder: Path) -> None:
        path = self._document_path(name)
        with self._lock(path):
            current = self.read(name)
            if current is not None and current.version == version:
                path.rename(folder / path.name)

    def _list(self, folder: str, start: str) -> Iterator[Listed]:
        try:
            scan = os.scandir(self._base / folder)
        except FileNotFoundError:
            return
        with scan:
            for item in scan:
                if not item.name.startswith(start) or (not folder and item.name in NOT_DOCUMENTS):
                    continue
                if item.is_dir(follow_symlinks=False):
                    yield from self._list(f"{folder}{item.name}/", "")
                elif is_name(item.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = item.stat(follow_symlinks=False)
                        yield Listed(f"{folder}{item.name}", status.st_size, status.st_mtime)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where there is none, or something else in its place."""
    try:
        with os.scandir(folder) as scan:
            return list(scan)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _extent(path: Path) -> tuple[int, float]:
    """Bytes of what lies at and below a path, and when any of it was last changed."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0, 0.0
    size, modified = status.st_size, status.st_mtime
    if stat.S_ISDIR(status.st_mode):
        below = [_extent(Path(item.path)) for item in _scan(path)]
        size = sum(one[0] for one in below)
        modified = max([modified, *(one[1] for one in below)])
    return size, modified


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        import shutil

        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
