"""Where an import reads from: another neffbuild directory, or a tar of one."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from neffbuild.cache import files
from neffbuild.cache.archive import Member, members, require_archive
from neffbuild.cache.archive_reader import ArchiveDamaged
from neffbuild.cache.copying import WORKERS, Progress, copy_blobs
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.names import LAYOUT
from neffbuild.cache.problem import ProblemKind
from neffbuild.config.errors import ConfigError, IntegrityError

MOST_DOCUMENT_BYTES = 1 << 32
"""Bytes of all documents of an archive together."""

_DOCUMENT_FOLDERS = frozenset({"entries", "manifests", "attestations", "configs", "runs"})
_DOCUMENT = re.compile(
    r"entries/[0-9a-f]{2}/[0-9a-f]{64}\.json"
    r"|(?:manifests|attestations|configs)/[0-9a-f]{64}\.json"
    r"|runs/[A-Za-z0-9][A-Za-z0-9-]{0,63}\.json"
)
_BLOB = re.compile(r"blobs/sha256/([0-9a-f]{2})/(\1[0-9a-f]{62})")


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a blob could not be copied."""

    kind: ProblemKind
    detail: str


class Source(Protocol):
    """Something to import. `documents` holds its documents; `damage` says where it breaks off, if it does."""

    name: str
    documents: DirectoryStore
    damage: str | None

    def copy_blobs(
        self,
        local: DirectoryStore,
        sizes: Mapping[str, int],
        modes: Mapping[str, int],
        progress: Progress | None,
    ) -> Mapping[str, Fault]:
        """Copy blobs (digest → size in bytes) into `local`, each checked before it gets its name; those
        that are damaged or not there are returned, with why. Raises `StoreError` when either side
        cannot be used (a full disk)."""
        ...


@contextmanager
def open_source(path: Path, local: DirectoryStore) -> Iterator[Source]:
    """The directory or tar at `path`. The documents of a tar are laid out in `local`'s folder for unfinished
    writes while it is open.

    Raises `ConfigError` for anything else, and for `local` itself; `IntegrityError` for an archive that
    holds what no archive of ours does; `StoreError` where either cannot be used.
    """
    with files.refusals("read", path):
        is_directory, is_file = path.is_dir(), path.is_file()
        is_local = is_directory and path.resolve() == local.root.resolve()
    if is_local:
        raise ConfigError(
            f"{path} is the local cache itself",
            value=str(path),
            hint="name another directory, or another cache with --cache",
        )
    if is_directory:
        yield DirectorySource(DirectoryStore(path))
        return
    if not is_file:
        raise ConfigError(
            f"there is no directory and no file {path}",
            value=str(path),
            hint="name a neffbuild cache or store directory, or a tar of one",
        )
    require_archive(path)
    with local.scratch_folder() as folder:
        yield ArchiveSource(path, folder)


class DirectorySource:
    """A local cache, or a directory that was pushed to."""

    damage: str | None = None

    def __init__(self, store: DirectoryStore) -> None:
        self.name = store.url
        self.documents = store

    def copy_blobs(
        self,
        local: DirectoryStore,
        sizes: Mapping[str, int],
        modes: Mapping[str, int],
        progress: Progress | None,
    ) -> Mapping[str, Fault]:
        faults: dict[str, Fault] = {}

        def copy(digest: str) -> None:
            try:
                local.receive_blob(digest, sizes[digest], modes[digest], self.documents)
            except IntegrityError:
                kind = self.documents.check_blob(digest, sizes[digest]) or ProblemKind.BAD_DIGEST
                faults[digest] = Fault(kind, kind.value)

        copy_blobs(sizes, copy, WORKERS, progress)
        return faults


class ArchiveSource:
    """A tar, read twice: once for its documents, which say what its other files have to be, and once for
    those of them that are wanted. Files may come in any order, and nothing is laid out that no entry
    declares."""

    def __init__(self, path: Path, folder: Path) -> None:
        """Read the documents into `folder`. Raises as `members` does."""
        self.name = str(path)
        self.documents = DirectoryStore(folder)
        self.damage: str | None = None
        self._path = path
        with self._until_damage():
            self._lay_out_documents(folder / LAYOUT)

    def copy_blobs(
        self,
        local: DirectoryStore,
        sizes: Mapping[str, int],
        modes: Mapping[str, int],
        progress: Progress | None,
    ) -> Mapping[str, Fault]:
        missing = ProblemKind.MISSING_BLOB
        faults = {digest: Fault(missing, missing.value) for digest in sizes}
        done, total = 0, sum(sizes.values())
        with self._until_damage():
            for member in members(self._path):
                digest = _blob_digest(member)
                if digest is None or digest not in faults:
                    continue
                fault = _receive(local, digest, sizes[digest], modes[digest], member)
                if fault is not None:
                    faults[digest] = fault
                    continue
                del faults[digest]
                done += sizes[digest]
                if progress is not None:
                    progress(done, total)
        return faults

    def _lay_out_documents(self, folder: Path) -> None:
        left = MOST_DOCUMENT_BYTES
        for member in members(self._path):
            kind = member.name.partition("/")[0]
            if _blob_digest(member) is not None or kind not in _DOCUMENT_FOLDERS:
                continue
            if _DOCUMENT.fullmatch(member.name) is None:
                raise member.refused("is not a name of the layout")
            left -= member.size
            if member.size > files.LARGEST_DOCUMENT or left < 0:
                raise member.refused(f"has {member.size} bytes, too many for a document")
            target = folder / member.name
            _write(member, target)
            os.utime(target, (member.modified, member.modified))

    @contextmanager
    def _until_damage(self) -> Iterator[None]:
        try:
            yield
        except ArchiveDamaged as error:
            self.damage = error.message


@dataclass(frozen=True, slots=True)
class _Blob:
    """A member as what `DirectoryStore.receive_blob` copies from."""

    member: Member

    def fetch_blob(self, digest: str, size: int, destination: Path) -> None:
        content = _write(self.member, destination)
        if content != digest:
            destination.unlink()
            raise IntegrityError(f"member {self.member.spelled!r} is not the blob {digest}")


def _receive(
    local: DirectoryStore, digest: str, size: int, mode: int, member: Member
) -> Fault | None:
    if member.size != size:
        kind = ProblemKind.BAD_SIZE
        return Fault(kind, f"{kind.value} (member {member.spelled!r} has {member.size})")
    try:
        local.receive_blob(digest, size, mode, _Blob(member))
    except ArchiveDamaged:
        raise
    except IntegrityError:
        return Fault(ProblemKind.BAD_DIGEST, ProblemKind.BAD_DIGEST.value)
    return None


def _write(member: Member, path: Path) -> str:
    """Write a member to a file that is not there yet; the SHA-256 of what was written."""
    content = hashlib.sha256()
    with files.refusals("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("xb") as file:
                for chunk in member.chunks():
                    content.update(chunk)
                    file.write(chunk)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return content.hexdigest()


def _blob_digest(member: Member) -> str | None:
    """The digest that a blob's member is named by; None for another member."""
    if not member.name.startswith("blobs/"):
        return None
    match = _BLOB.fullmatch(member.name)
    if match is None:
        raise member.refused("is not a name of the layout")
    return match[2]
